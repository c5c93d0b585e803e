import base64
import stat

import pytest

from broker.keys import (
    ALL_RIGHTS,
    EMULATOR_KEY,
    ROOT_KEY_NAME,
    Grant,
    Keyring,
    RootKeys,
    connection_string,
    effective_rights,
    has_key,
    kept_root_keys,
    with_root_key,
)
from broker.namespace.entities import (
    AuthorizationRule,
    QueueDescription,
    Right,
    SubscriptionDescription,
    TopicDescription,
)
from broker.settings.config import ConfigurationError, Settings


def rule(name, *rights, primary="primary", secondary=None) -> AuthorizationRule:
    return AuthorizationRule(key_name=name, primary_key=primary, secondary_key=secondary, rights=frozenset(rights))


# The root key


def test_the_first_start_makes_a_random_key_that_only_the_owner_reads(tmp_path):
    settings = with_root_key(Settings(data_dir=tmp_path))
    key = settings.security.root_key
    assert key is not None
    assert len(base64.b64decode(key, validate=True)) == 32
    assert stat.S_IMODE((tmp_path / "root-key").stat().st_mode) == 0o600
    other = tmp_path / "other"
    other.mkdir()
    assert with_root_key(Settings(data_dir=other)).security.root_key != key


def test_the_key_stays_the_same(tmp_path):
    assert kept_root_keys(tmp_path / "root-key") == kept_root_keys(tmp_path / "root-key")


def test_a_configured_key_is_used_and_no_file_made(tmp_path):
    settings = Settings(data_dir=tmp_path, emulator=True, security={"root_key": "mine"})
    assert with_root_key(settings).security.root_key == "mine"
    assert list(tmp_path.iterdir()) == []


def test_the_emulator_has_its_well_known_key_and_no_file(tmp_path):
    settings = with_root_key(Settings(data_dir=tmp_path, emulator=True))
    assert settings.security.root_key == EMULATOR_KEY == "SAS_KEY_VALUE"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o666])
def test_a_key_that_others_can_get_at_is_refused_with_the_fix(tmp_path, mode):
    path = tmp_path / "root-key"
    kept_root_keys(path)
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"mode {mode:04o}.*chmod 600 {path}"):
        kept_root_keys(path)


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe", b"a\nb\nc", b"a\n\nb", b"k" * 257, b"a\n" + b"k" * 257])
def test_a_file_without_a_usable_key_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "root-key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="does not hold a key of 1 to 256 characters"):
        kept_root_keys(path)
    assert path.read_bytes() == content


def test_a_key_written_by_hand_is_used(tmp_path):
    path = tmp_path / "root-key"
    path.write_text("  by hand \n")
    path.chmod(0o600)
    assert kept_root_keys(path) == ("by hand", None)
    path.write_text("first\r\n second\n\n")
    assert kept_root_keys(path) == ("first", "second")


def test_the_second_line_is_the_secondary_key(tmp_path):
    RootKeys("first", "second").write(tmp_path / "root-key")
    assert stat.S_IMODE((tmp_path / "root-key").stat().st_mode) == 0o600
    ring = Keyring.of(with_root_key(Settings(data_dir=tmp_path)).security)
    for key in ("first", "second"):
        assert ring.verify_plain(ROOT_KEY_NAME, key) == (Grant(None, ALL_RIGHTS),)
    assert ring.verify_plain(ROOT_KEY_NAME, "third") == ()
    configured = Settings(data_dir=tmp_path, security={"root_secondary_key": "configured"})
    assert with_root_key(configured).security.root_secondary_key == "configured"


def test_a_directory_that_is_none_is_the_callers_to_report(tmp_path):
    with pytest.raises(FileNotFoundError):
        kept_root_keys(tmp_path / "missing" / "root-key")


# The key ring


@pytest.fixture
def ring() -> Keyring:
    settings = Settings(
        security={"root_key": "root", "authorization_rules": (rule("both", Right.SEND, primary="namespace's"),)}
    )
    ring = Keyring.of(settings.security)
    own = rule("both", Right.LISTEN, primary="queue's", secondary="second")
    ring.set_entities([QueueDescription(name="Orders", authorization_rules=(own,)), QueueDescription(name="plain")])
    return ring


def test_the_root_key_has_all_rights_everywhere(ring):
    for entity in (None, "orders", "plain", "unknown"):
        [root] = ring.rules(ROOT_KEY_NAME, entity)
        assert (root.primary_key, effective_rights(root)) == ("root", ALL_RIGHTS)


def keys_of(ring: Keyring, key_name: str, entity: str | None = None) -> list[str]:
    """The primary keys of the rules."""
    return [each.primary_key for each in ring.rules(key_name, entity)]


def test_a_rule_of_the_entity_and_one_of_the_namespace_with_the_same_name_both_count(ring):
    assert keys_of(ring, "both", "orders") == ["queue's", "namespace's"]
    assert keys_of(ring, "both", "plain") == keys_of(ring, "both") == ["namespace's"]
    assert ring.rights_of("both", "second", "orders") == {Right.LISTEN}
    assert ring.rights_of("both", "namespace's", "orders") == {Right.SEND}
    assert ring.rights_of("both", "queue's", "plain") == frozenset()


def test_entities_are_found_in_any_case_and_key_names_are_not(ring):
    assert keys_of(ring, "both", "ORDERS") == ["queue's", "namespace's"]
    assert keys_of(ring, "Both", "orders") == []


def test_a_rule_of_one_entity_is_not_found_on_another_nor_on_the_namespace(ring):
    ring.set_entities([QueueDescription(name="a", authorization_rules=(rule("own", Right.SEND),))])
    assert keys_of(ring, "own", "a") != []
    for entity in (None, "b", "a/b", "ab"):
        assert keys_of(ring, "own", entity) == []


def test_rules_of_a_deleted_entity_are_gone(ring):
    ring.set_entities([])
    assert keys_of(ring, "both", "orders") == ["namespace's"]


def test_the_rules_of_a_topic_outlast_its_subscriptions(ring):
    topic = TopicDescription(name="News", authorization_rules=(rule("own", Right.SEND),))
    ring.set_entity(topic)
    ring.forget_entity(SubscriptionDescription(topic="news", name="all"))
    assert keys_of(ring, "own", "news") != []
    assert keys_of(ring, "both", "orders") == ["queue's", "namespace's"]
    ring.forget_entity(topic)
    ring.forget_entity(topic)
    assert keys_of(ring, "own", "news") == []
    assert keys_of(ring, "both", "orders") == ["queue's", "namespace's"]


def test_manage_implies_send_and_listen():
    assert effective_rights(rule("m", Right.MANAGE)) == {Right.SEND, Right.LISTEN, Right.MANAGE}
    assert effective_rights(rule("s", Right.SEND)) == {Right.SEND}
    assert effective_rights(rule("none")) == frozenset()


@pytest.mark.parametrize(
    ("name", "key", "grants"),
    [
        (ROOT_KEY_NAME, "root", (Grant(None, ALL_RIGHTS),)),
        ("both", "namespace's", (Grant(None, frozenset({Right.SEND})),)),
        ("both", "queue's", (Grant("orders", frozenset({Right.LISTEN})),)),
        ("both", "second", (Grant("orders", frozenset({Right.LISTEN})),)),
        ("both", "", ()),
        ("both", "Queue's", ()),
        ("both", "queue's ", ()),
        ("unknown", "root", ()),
        (ROOT_KEY_NAME, "wrong", ()),
        (ROOT_KEY_NAME, "\udcffroot", ()),
        (ROOT_KEY_NAME, "ключ", ()),
    ],
)
def test_plain_grants_what_name_and_key_stand_for(ring, name, key, grants):
    assert ring.verify_plain(name, key) == grants


def test_plain_grants_all_entities_that_share_name_and_key(ring):
    shared = rule("shared", Right.SEND)
    ring.set_entities(QueueDescription(name=name, authorization_rules=(shared,)) for name in ("a", "b"))
    assert {grant.entity for grant in ring.verify_plain("shared", "primary")} == {"a", "b"}


def test_keys_beyond_ascii_are_compared():
    assert has_key(rule("k", primary="ключ"), "ключ")


# Connection strings


@pytest.mark.parametrize(
    ("host", "port", "tls", "endpoint"),
    [
        ("127.0.0.1", 5672, False, "localhost"),
        ("0.0.0.0", 5673, False, "localhost:5673"),
        ("::", 5672, False, "localhost"),
        ("broker.example", 5672, False, "broker.example"),
        ("10.0.0.1", 5671, False, "10.0.0.1:5671"),
        ("fd00::1", 5673, False, "[fd00::1]:5673"),
        ("broker.example", 5671, True, "broker.example"),
        ("broker.example", 5672, True, "broker.example:5672"),
    ],
)
def test_a_connection_string_names_endpoint_key_and_plain_tcp(host, port, tls, endpoint):
    text = f"Endpoint=sb://{endpoint};SharedAccessKeyName=name;SharedAccessKey=a+b/c=;"
    plain = "" if tls else "UseDevelopmentEmulator=true;"
    assert connection_string(host, port, "name", "a+b/c=", tls=tls) == text + plain


def test_subscriptions_have_no_keys_of_their_own():
    ring = Keyring()
    rule = AuthorizationRule(key_name="k", primary_key="p", secondary_key=None, rights=frozenset({Right.LISTEN}))
    topic = TopicDescription(name="News", authorization_rules=(rule,))
    ring.set_entities([topic, SubscriptionDescription(topic="News", name="all")])
    assert ring.rules("k", "news") == [rule]
    assert keys_of(ring, "k", "news/subscriptions/all") == []
    assert [grant.entity for grant in ring.verify_plain("k", "p")] == ["news"]
