"""Which segments are hosts, and which are names of entities."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.host_names import DEFAULT_HOST_NAMES, HostNames, is_pattern

NAMES = HostNames(
    [*DEFAULT_HOST_NAMES, "Broker.example.com", "*.shop.example", "broker", "0.0.0.0", "nonsense?", "*", "a*.example"]
)


@pytest.mark.parametrize(
    "segment",
    [
        "localhost",
        "LOCALHOST",
        "localhost.",
        "127.0.0.1",
        "[::1]",
        "[::1]:5671",
        "10.0.0.1:5672",
        "x:5672",
        "any.name:443",
        "contoso.servicebus.windows.net",
        "CONTOSO.ServiceBus.Windows.NET.",
        "broker.example.com",
        "broker",
        "a.shop.example",
    ],
)
def test_hosts(segment):
    assert NAMES.has(segment)


@pytest.mark.parametrize(
    "segment",
    [
        "",
        ".",
        "orders",
        "tenant1.inbox",
        "v1.0",
        "localhost2",
        "localhost.orders",
        "example.com",
        "a.broker.example.com",
        "broker.example.com.orders",
        "shop.example",
        "b.a.shop.example",
        ".shop.example",
        "servicebus.windows.net",
        "a.privatelink.servicebus.windows.net",
        "*.shop.example",
        "nonsense?",
        "x.example",
        "ab.example",
        "127.0.0.1.orders",
        "1.2.3",
        "300.0.0.1",
        "orders:",
        "orders:port",
        "orders:123456",
        "user@localhost",
        "localhost%2E",
        "localhost#",
        "bro\u212aer",  # the sign of Kelvin is a k in lower case
        "local\u200bhost",
        "a" * 300 + ":5672",
    ],
)  # fmt: skip
def test_names_of_entities(segment):
    assert not NAMES.has(segment)


def test_without_names_what_nobody_else_can_be_is_a_host():
    assert HostNames().has("localhost")
    assert not HostNames().has("contoso.servicebus.windows.net")


@pytest.mark.parametrize("pattern", ["broker", "a.b", "*.a", "*.a.b", "A-1.b_2", "xn--bcher-kva.example"])
def test_patterns(pattern):
    assert is_pattern(pattern)


@pytest.mark.parametrize("pattern", ["", "*", "*.", "a.", ".a", "a..b", "a.*.b", "*a.b", "a*", "**.a", "-a", "a-"])
@pytest.mark.parametrize("end", ["", ".com "])
def test_no_patterns(pattern, end):
    assert not is_pattern(pattern)
    assert not is_pattern(pattern + end)


@pytest.mark.parametrize("pattern", ["a b", "a/b", "b\u00fccher", "a:1", "a\n", "x" * 64, "a." * 127 + "abc"])
def test_no_patterns_either(pattern):
    assert not is_pattern(pattern)


LABELS = st.text("abz09", min_size=1, max_size=3)


@given(st.lists(LABELS, min_size=1, max_size=4).map(".".join), st.lists(LABELS, min_size=1, max_size=4).map(".".join))
def test_a_wildcard_stands_for_one_label(domain, name):
    expected = name.partition(".")[2] == domain
    assert HostNames([f"*.{domain}"]).has(name) == (expected or HostNames().has(name))
