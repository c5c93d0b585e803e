import os
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from broker.namespace.entities import AuthorizationRule, QueueDescription
from broker.namespace.rule_descriptions import CorrelationFilter, RuleDescription, RuleValue, SqlAction, SqlFilter
from broker.settings.audiences import AUDIENCES, audience_of
from broker.settings.config import Settings
from broker.settings.declared import DeclaredSubscription, DeclaredTopic
from broker.settings.fields import MIB
from broker.settings.hosts import is_loopback
from broker.settings.internal import INTERNAL
from broker.settings.listeners import Amqp
from broker.settings.placement import PARTITIONS, guess
from broker.settings.reference import document
from broker.settings.sources import leaves, section_of, variable

REPOSITORY = Path(__file__).parents[2]
UNITS = {"timeout": "_ms", "time_out": "_ms", "duration": "_ms", "size": "_bytes", "buffer": "_bytes"}


def everything() -> list[tuple[str, FieldInfo]]:
    models: list[tuple[str, type[BaseModel]]] = [("Settings", Settings)]
    models += [(model.__name__, model) for model in map(section_of, Settings.model_fields.values()) if model]
    declared = (QueueDescription, DeclaredTopic, DeclaredSubscription, RuleDescription, AuthorizationRule)
    models += [(model.__name__, model) for model in (*declared, SqlAction, RuleValue)]
    found = [(f"{name}.{field}", info) for name, model in models for field, info in model.model_fields.items()]
    for filter_ in (SqlFilter, CorrelationFilter):
        found += [(f"{filter_.__name__}.{name}", info) for name, info in filter_.model_fields.items() if name != "kind"]
    return found


@pytest.mark.parametrize(("name", "field"), everything())
def test_every_setting_has_one_line_of_meaning(name, field):
    assert field.description, name
    assert field.description.endswith("."), name
    assert "\n" not in field.description, name


def test_every_setting_has_a_default():
    assert [place for place, field in leaves().items() if field.is_required()] == []


def test_a_setting_with_a_unit_has_it_last_in_its_name():
    for place in leaves():
        name = str(place[-1])
        for word, unit in UNITS.items():
            assert word not in name or name.endswith(unit), name


def test_numbers_have_limits():
    for place, field in leaves().items():
        if field.annotation in (int, float, int | None):
            assert len(field.metadata) == 2, place


def test_the_page_of_settings_is_current():
    page = (REPOSITORY / "docs" / "configuration.md").read_text()
    assert page == document(), "run: peeklock config reference > docs/configuration.md"


def test_the_page_of_settings_lists_each_with_its_variable():
    page = document()
    for place in leaves():
        assert (f"`{'.'.join(map(str, place))}`<br>`{variable(place)}`" in page) is (place not in INTERNAL), place


def test_each_setting_is_for_one_audience_that_exists():
    names = [name for audience in AUDIENCES for name in audience.members]
    assert len(names) == len(set(names))
    assert set(names) <= {".".join(map(str, place)) for place in leaves()} | set(Settings.model_fields)
    assert all(audience_of(place) for place in leaves() if place not in INTERNAL)


def test_a_setting_that_nobody_was_named_for_is_no_part_of_the_page():
    with pytest.raises(LookupError, match=r"broker\.settings\.audiences"):
        audience_of(("new", "setting"))


def test_internal_settings_exist_and_are_no_limits_of_links_and_tokens():
    assert set(leaves()) >= INTERNAL
    assert not [place for place in INTERNAL if str(place[-1]).startswith(("max_links", "cbs"))]


def test_defaults_are_secure():
    settings = Settings()
    assert is_loopback(settings.amqp.host)
    assert is_loopback(settings.ops.host)
    assert not settings.security.allow_anonymous
    assert not settings.emulator
    assert settings.security.root_key is None


@pytest.mark.parametrize(
    ("given", "unfinished", "connections"),
    [
        ({}, 512 * MIB, 1024 * MIB),
        ({"max_unfinished_bytes": 4096 * MIB}, 4096 * MIB, 8192 * MIB),
        ({"max_unfinished_bytes": 1024 * 1024 * MIB}, 1024 * 1024 * MIB, 2048 * 1024 * MIB),
        ({"max_unfinished_bytes": MIB}, MIB, 1024 * MIB),
        ({"max_connections_bytes": 256 * MIB}, 128 * MIB, 256 * MIB),
        ({"max_connections_bytes": 256 * MIB, "max_unfinished_bytes": 128 * MIB}, 128 * MIB, 256 * MIB),
    ],
)
def test_unfinished_messages_have_half_of_the_memory_of_connections_at_most(given, unfinished, connections):
    """Who has set one of the two, in an earlier version or now, need not know the other."""
    settings = Settings.model_validate({"amqp": given})
    assert (settings.amqp.max_unfinished_bytes, settings.amqp.max_connections_bytes) == (unfinished, connections)
    assert Settings.model_validate(settings.model_dump(mode="json")) == settings  # as processes get them


def test_large_messages_have_room_whatever_the_limits_are():
    amqp = Settings.model_validate(
        {"amqp": {"max_message_size_bytes": 100 * MIB, "max_connections_bytes": 64 * MIB}}
    ).amqp
    assert amqp.unfinished_bytes == 16 * 100 * MIB
    assert amqp.connections_bytes == 32 * 100 * MIB


def test_settings_cannot_change():
    with pytest.raises(ValidationError):
        Settings().partitions = 5


def test_children_get_the_same_settings_with_their_secrets():
    rule = {"key_name": "k", "primary_key": "one", "secondary_key": "two", "rights": ["Send", "Listen"]}
    settings = Settings(
        security={"root_key": "root", "authorization_rules": [rule]},
        queues=[{"name": "q", "authorization_rules": [rule]}],
        amqp={"tls_port": 0},
        tls={"certificate": "c.pem", "key": "k.pem"},
        log={"level": "debug"},
    )
    there = Settings.model_validate_json(settings.model_dump_json())
    assert there == settings
    assert there.security.root_key == "root"
    assert there.queues[0].authorization_rules[0].secondary_key == "two"


def test_no_secret_is_in_what_is_printed():
    rule = AuthorizationRule(key_name="k", primary_key="hunter2", secondary_key="hunter3", rights=frozenset())
    settings = Settings(
        security={"root_key": "hunter1", "authorization_rules": (rule,)},
        queues=(QueueDescription(name="q", authorization_rules=(rule,)),),
    )
    assert "hunter" not in repr(settings) + str(settings) + f"{settings.security!r}"


def test_channel_and_handle_maxima_are_the_highest_numbers_not_counts():
    amqp = Amqp(max_sessions_per_connection=10, max_links_per_session=1)
    assert (amqp.channel_max, amqp.handle_max) == (9, 0)


@pytest.mark.parametrize(
    ("partitions", "workers", "processors", "count"),
    [(4, None, 2, 1), (4, None, 1, 1), (4, None, 16, 4), (4, None, 3, 2), (4, 4, 2, 4), (1, None, 8, 1)],
)
def test_workers_leave_a_processor_to_the_gateway_unless_set(monkeypatch, partitions, workers, processors, count):
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    assert Settings(partitions=partitions, workers=workers).worker_count == count


@pytest.mark.parametrize(
    ("workers", "gateways", "processors", "is_one"),
    [
        (None, 1, 1, True),
        (None, 1, 2, False),
        (None, 2, 1, False),
        (0, 1, 16, True),
        (1, 1, 1, False),
        (2, 1, 2, False),
    ],
)
def test_the_partitions_are_in_the_gateways_process_if_set_and_with_one_processor(
    monkeypatch, workers, gateways, processors, is_one
):
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    settings = Settings(workers=workers, gateways=gateways)
    assert settings.is_one_process is is_one
    if is_one:
        assert settings.worker_count == 1
    arguments = [] if workers is None else [f"--workers={workers}"]
    guessed = guess(["peeklock", "serve", *arguments], {"PEEKLOCK_GATEWAYS": str(gateways)})
    assert guessed == (is_one, settings.gateways, settings.worker_count)


@pytest.mark.parametrize(
    ("arguments", "environment", "is_one"),
    [
        ([], {}, True),
        (["--workers", "1"], {}, False),
        (["--workers=0"], {"PEEKLOCK_WORKERS": "3"}, True),
        ([], {"PEEKLOCK_WORKERS": "3"}, False),
        ([], {"PEEKLOCK_GATEWAYS": "2"}, False),
        (["--workers", "off"], {"PEEKLOCK_WORKERS": "3"}, True),
        (["--workers"], {}, True),
        (["--workers", "no number"], {}, True),
    ],
)
def test_it_is_guessed_before_the_settings_are_read(monkeypatch, arguments, environment, is_one):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert guess(["peeklock", "serve", *arguments], environment).is_one_process is is_one


@pytest.mark.parametrize(
    ("text", "environment", "is_one"),
    [
        ("workers = 0", {}, True),
        ("workers = 2\n[[queues]]\nname = 'q'", {}, False),
        ("workers = 0\ngateways = 2", {}, True),  # refused when the settings are read
        ("workers = 0", {"PEEKLOCK_WORKERS": "1"}, False),
        ("workers = 'off'", {}, False),
        ("workers = false", {}, False),
        ("workers = 99999999999999999999", {}, False),
        ("no TOML", {}, False),
        ("\udc80", {}, False),
        ("", {}, False),
    ],
)
@pytest.mark.parametrize("how", ["flag", "flag=", "variable"])
def test_it_is_guessed_from_the_file(monkeypatch, tmp_path, text, environment, is_one, how):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    file = tmp_path / "peeklock.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    arguments = {"flag": ["--config", str(file)], "flag=": [f"--config={file}"], "variable": []}[how]
    if how == "variable":
        environment = environment | {"PEEKLOCK_CONFIG": str(file)}
    assert guess(["peeklock", "serve", *arguments], environment).is_one_process is is_one


@pytest.mark.parametrize(
    ("text", "environment", "processors", "numbers"),
    [
        ("", {}, 2, (1, 1)),
        ("", {}, 8, (1, PARTITIONS)),
        ("partitions = 2", {}, 8, (1, 2)),
        ("workers = 3\ngateways = 2", {"PEEKLOCK_GATEWAYS": "5"}, 8, (5, 3)),
        ("workers = -1\ngateways = 'two'", {}, 2, (1, 1)),
        ("partitions = 0", {}, 8, (1, 1)),
    ],
)
def test_the_numbers_of_processes_are_guessed(monkeypatch, tmp_path, text, environment, processors, numbers):
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    file = tmp_path / "peeklock.toml"
    file.write_text(text)
    guessed = guess(["peeklock", "serve", "--config", str(file)], environment)
    assert (guessed.gateways, guessed.workers) == numbers


def test_a_guess_reads_nothing_from_a_pipe(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe, os.fdopen(writing, "w") as other:
        other.write("workers = 0")
        other.close()
        assert not guess(["peeklock", "serve", "--config", f"/dev/fd/{reading}"], {}).is_one_process
        assert pipe.read() == "workers = 0"


@pytest.mark.parametrize("host", ["localhost", "LocalHost", "127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_addresses_are_known(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "broker.example", "fe80::1%eth0"])
def test_other_addresses_are_not_loopback(host):
    assert not is_loopback(host)
