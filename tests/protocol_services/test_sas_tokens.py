import hmac
from base64 import b64encode
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.nodes.sas_tokens import (
    MAX_TOKEN_CHARACTERS,
    Claim,
    ExpiredToken,
    InvalidAudience,
    InvalidSignature,
    KeyRule,
    MalformedToken,
    TokenError,
    covers,
    generate,
    resource_path,
    verify,
)
from tests.examples import examples

PRIMARY, SECONDARY = "cHJpbWFyeQ==", "second+ary/key="
RIGHTS = frozenset({"Send", "Listen"})
NOW = 1_700_000_000


def lookup(name: str, path: str) -> list[KeyRule]:
    root, of_queue = KeyRule((PRIMARY, SECONDARY), RIGHTS), KeyRule((PRIMARY,), frozenset({"Send"}))
    match name:
        case "root":
            return [root]
        case "both":
            return [KeyRule(("another",), frozenset({"Manage"})), root]
        case "queue-rule" if covers("queue", path):
            return [of_queue]
    return []


def signed(encoded_resource: str, expires: object = NOW + 60, name: str = "root", key: str = PRIMARY) -> str:
    digest = hmac.digest(key.encode(), f"{encoded_resource}\n{expires}".encode(), "sha256")
    signature = quote_plus(b64encode(digest))
    return f"SharedAccessSignature sr={encoded_resource}&sig={signature}&se={expires}&skn={name}"


def test_a_token_made_here_is_as_the_documentation_says():
    # Computed with openssl: printf '%s\n%s' <sr> <se> | openssl dgst -sha256 -hmac SAS_KEY_VALUE -binary | base64
    assert generate("sb://localhost/q1", "Root", "SAS_KEY_VALUE", 1700000000) == (
        "SharedAccessSignature sr=sb%3A%2F%2Flocalhost%2Fq1"
        "&sig=7uC0%2FDMOgD0fYMO7DPR%2F1mA%2F9PZopAFcJDcN1hsXK%2Bc%3D"
        "&se=1700000000&skn=Root"
    )


@pytest.mark.parametrize("key", [PRIMARY, SECONDARY])
def test_either_key_signs(key):
    token = generate("sb://host/queue", "root", key, NOW + 60)
    assert verify(token, "sb://host/queue", lookup, NOW) == Claim("queue", "root", key, RIGHTS, NOW + 60)


@pytest.mark.parametrize(
    "encoded",
    [
        quote_plus("sb://localhost:5672/Queue"),  # Python
        quote("sb://host/queue", safe="!~*'()"),  # JavaScript
        quote_plus("amqps://host/Queue").lower(),  # Go
        quote_plus("amqp://host/queue/"),  # Java
        quote_plus("amqps://host/"),  # .NET: the namespace
        "sb://host/queue",  # not encoded at all
    ],
)
def test_each_encoders_resource_is_signed_as_it_stands(encoded):
    assert verify(signed(encoded), "amqps://host:5671/queue/$management", lookup, NOW).path == "queue"


def test_parameters_come_in_any_order():
    token = generate("sb://host/queue", "root", PRIMARY, NOW + 60).removeprefix("SharedAccessSignature ")
    shuffled = "SharedAccessSignature " + "&".join(reversed(token.split("&")))
    assert verify(shuffled, "sb://host/queue", lookup, NOW).key_name == "root"


def test_a_token_is_expired_at_the_second_it_names():
    token = generate("sb://host/queue", "root", PRIMARY, NOW)
    assert verify(token, "sb://host/queue", lookup, NOW - 1).expires_s == NOW
    with pytest.raises(ExpiredToken, match=r"^ExpiredToken: The token is expired\."):
        verify(token, "sb://host/queue", lookup, NOW)


@pytest.mark.parametrize(
    ("resource", "audience", "covered"),
    [
        ("sb://host/topic", "sb://host/Topic/Subscriptions/S/$DeadLetterQueue", True),
        ("sb://HOST/TOPIC", "amqps://host:5671/topic/", True),
        ("sb://host", "sb://host/anything", True),
        ("sb://host/a%20b", "sb://host/a%20B", True),
        ("sb://host/que", "sb://host/queue", False),
        ("sb://host/queue/x", "sb://host/queue", False),
        ("sb://host/queue", "sb://host/", False),
    ],
)
def test_a_resource_covers_what_is_below_it_segment_by_segment(resource, audience, covered):
    token = generate(resource, "root", PRIMARY, NOW + 60)
    if covered:
        assert verify(token, audience, lookup, NOW).path == resource_path(audience)
    else:
        with pytest.raises(InvalidAudience, match=r"^InvalidAudience: "):
            verify(token, audience, lookup, NOW)


@pytest.mark.parametrize(("key", "rights"), [("another", {"Manage"}), (SECONDARY, RIGHTS)])
def test_a_key_of_any_rule_of_that_name_signs_for_the_rights_of_its_own(key, rights):
    token = generate("sb://host/queue", "both", key, NOW + 60)
    assert verify(token, "sb://host/queue", lookup, NOW) == Claim("queue", "both", key, frozenset(rights), NOW + 60)


def test_a_rule_of_an_entity_grants_nothing_outside_of_it_whatever_resource_it_signs():
    token = generate("sb://host/", "queue-rule", PRIMARY, NOW + 60)
    assert verify(token, "sb://host/queue", lookup, NOW).rights == {"Send"}
    for audience in ("sb://host/", "sb://host/other"):
        with pytest.raises(InvalidSignature):
            verify(token, audience, lookup, NOW)


def altered(token: str, name: str, value: str) -> str:
    parameters = [
        f"{name}={value}" if parameter.startswith(name + "=") else parameter
        for parameter in token.removeprefix("SharedAccessSignature ").split("&")
    ]
    return "SharedAccessSignature " + "&".join(parameters)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sr", "sb%3A%2F%2Fhost%2F"),
        ("se", str(NOW + 61)),
        ("skn", "nobody"),
        ("sig", "AAAA"),
        ("sr", "sb://host/queue"),
    ],
)
def test_any_change_breaks_the_signature(name, value):
    token = altered(generate("sb://host/queue", "root", PRIMARY, NOW + 60), name, value)
    with pytest.raises(InvalidSignature, match=r"^InvalidSignature: The token has an invalid signature\.$"):
        verify(token, "sb://host/queue", lookup, NOW)


def test_an_unknown_key_name_cannot_be_signed_with_an_empty_key():
    with pytest.raises(InvalidSignature):
        verify(generate("sb://host/queue", "nobody", "", NOW + 60), "sb://host/queue", lookup, NOW)


def test_the_key_is_its_text_and_not_what_it_is_as_base64():
    with pytest.raises(InvalidSignature):
        verify(signed("sb://host/queue", key="primary"), "sb://host/queue", lookup, NOW)


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ("", "does not begin"),
        ("SharedAccessSignature ", "'sr' is missing"),
        ("SharedAccessSignature sr=a&se=1&skn=k", "'sig' is missing"),
        ("SharedAccessSignature sr=a&sig=AA==&se=1&skn=", "'skn' is missing"),
        ("SharedAccessSignature sr=a&sr=b&sig=AA==&se=1&skn=k", "'sr' is given more than once"),
        ("SharedAccessSignature sr=a&sig=*&se=1&skn=k", "'sig' is not base64"),
        ("SharedAccessSignature sr=a&sig=AA==&se=soon&skn=k", "'se' is not a time"),
        ("SharedAccessSignature sr=a&sig=AA==&se=-1&skn=k", "'se' is not a time"),
        ("SharedAccessSignature sr=a&sig=AA==&se=\u0661&skn=k", "'se' is not a time"),
        ("SharedAccessSignature sr=a&sig=AA==&skn=k&se=" + "9" * 5000, "'se' is not a time"),
        ("SharedAccessSignature " + "x" * MAX_TOKEN_CHARACTERS, "longer than"),
    ],
)
def test_a_malformed_token_says_what_is_wrong_with_it(token, reason):
    with pytest.raises(MalformedToken, match=f"^MalformedToken: .*{reason}"):
        verify(token, "sb://host/queue", lookup, NOW)


@settings(max_examples=examples(200))
@given(
    st.one_of(
        st.text(),
        st.text().map("SharedAccessSignature ".__add__),
        st.fixed_dictionaries(dict.fromkeys(("sr", "sig", "se", "skn"), st.text("aA1%=&+/:\u00e9\0", max_size=12))).map(
            lambda fields: "SharedAccessSignature " + "&".join(f"{name}={value}" for name, value in fields.items())
        ),
    ),
    st.text(),
)
def test_hostile_tokens_raise_token_errors_only(token, audience):
    with pytest.raises(TokenError):
        verify(token, audience, lookup, NOW)


@settings(max_examples=examples(100))
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40), st.text("abc/%+ é", max_size=30))
def test_generated_tokens_verify(key, path):
    resource = "sb://host/" + quote(path)
    token = generate(resource, "any", key, NOW + 1)
    claim = verify(token, resource, lambda name, _: [KeyRule((key,), RIGHTS)] if name == "any" else [], NOW)
    assert claim.rights == RIGHTS


# --- resources without a scheme: a host, then perhaps a path ----------------------------------------------------------


@pytest.mark.parametrize(
    ("resource", "audience"),
    [
        ("localhost", "amqps://localhost/queue"),
        ("localhost/queue", "amqps://localhost/queue"),
        ("localhost:5672/Queue/", "sb://localhost:5672/queue/$DeadLetterQueue"),
        ("contoso.servicebus.windows.net", "amqps://contoso.servicebus.windows.net/topic/Subscriptions/s"),
        ("CONTOSO.servicebus.windows.net/topic", "sb://contoso.servicebus.windows.net/topic/Subscriptions/s"),
        ("broker:5672/queue", "amqps://broker:5672/queue"),
        ("localhost2:5672/queue", "amqps://localhost2:5672/queue"),
        ("127.0.0.1/queue", "amqps://127.0.0.1/queue"),
        ("[::1]:5672/queue", "amqps://[::1]:5672/queue"),
    ],
)
@pytest.mark.parametrize("encode", [quote_plus, lambda uri: quote_plus(uri).lower(), str])
def test_a_resource_without_a_scheme_begins_with_the_host(resource, audience, encode):
    """As Go's own signer makes it for a connection string with a signature."""
    assert verify(signed(encode(resource)), audience, lookup, NOW).path == resource_path(audience)


@pytest.mark.parametrize(
    ("resource", "audience"),
    [
        ("localhost/queue", "sb://localhost/other"),
        ("localhost/queue", "sb://localhost/"),
        ("localhost/que", "sb://localhost/queue"),
        ("localhost/localhost", "sb://localhost/queue"),
        ("broker:5672/queue", "sb://broker:5672/"),
        ("queue", "sb://localhost/other"),
        ("queue", "sb://queue/other"),  # the client chooses what it calls us
        ("queue/other", "sb://queue/other"),
        ("/localhost", "sb://localhost/queue"),
        ("localhost2", "sb://localhost2/queue"),
        ("queue/sb://localhost", "sb://localhost/other"),
        ("tenant1.inbox", "sb://localhost/other"),
        ("tenant1.inbox", "sb://tenant1.inbox/"),  # the client chooses what it calls us
        ("broker.example.com/queue", "sb://broker.example.com/queue"),  # nor do we know this name
        ("contoso%2Eservicebus.windows.net/queue", "sb://contoso.servicebus.windows.net/queue"),
        ("x:y/queue", "sb://x/queue"),
    ],
)
def test_a_resource_without_a_scheme_covers_no_more_than_it_names(resource, audience):
    with pytest.raises(InvalidAudience):
        verify(signed(quote_plus(resource)), audience, lookup, NOW)


SEGMENTS = st.sampled_from(["localhost", "a", "b", "a.b", "host:5672", "$management", "A", "127.0.0.1"])
PATHS = st.lists(SEGMENTS, max_size=4).map("/".join)


def covered(resource: str, audience: str) -> bool:
    try:
        verify(signed(quote_plus(resource)), audience, lookup, NOW)
    except InvalidAudience:
        return False
    return True


@settings(max_examples=examples(300))
@given(st.sampled_from(["localhost", "127.0.0.1", "host:5672", "a.servicebus.windows.net"]), PATHS, PATHS)
def test_with_and_without_a_scheme_a_resource_covers_the_same(host, path, asked):
    audience = f"amqps://anything/{asked}"
    assert covered(f"{host}/{path}", audience) == covered(f"sb://{host}/{path}", audience)


@settings(max_examples=examples(300))
@given(PATHS, PATHS)
def test_a_path_alone_covers_nothing_outside_of_it(path, asked):
    """Whatever the client calls the host: in its audience it can write what it likes."""
    for audience in (f"sb://{asked}", f"sb://x/{asked}", asked):
        for first in ("queue", "tenant1.inbox", "v1.0"):
            if covered(f"{first}/{path}", audience):
                assert covers(resource_path(f"sb://x/{first}/{path}"), resource_path(audience))
