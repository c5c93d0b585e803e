"""What a gateway asks of a journal is what it has read of the client's request, however that was written."""

from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from broker.journal_requests import MAX_BYTES, MAX_OFFSET, PATH, Consumer, Overview, Range, WrongRequest
from storage.journal.entities import Wanted
from tests.examples import examples

HOSTILE = st.sampled_from(
    [
        "?",
        "#",
        "&",
        "/",
        "..",
        "\r\n",
        "%3F",
        "%23",
        "%252e",
        ";",
        "\\",
        "=",
        "+",
        " ",
        "\0",
        "\ud800",
        "*",
        "[",
        "]",
        "K",
    ]
)
TEXTS = st.lists(HOSTILE | st.text(max_size=4) | st.sampled_from(["orders", "0", "entity", "owner"])).map("".join)
NUMBERS = st.integers(-2, MAX_OFFSET + 2).map(str) | TEXTS
EPOCHS = st.text("0123456789abcdefABCDEF", min_size=16, max_size=16) | TEXTS
QUERIES = st.fixed_dictionaries(
    {"epoch": EPOCHS, "from": NUMBERS, "to": NUMBERS},
    optional={"maxBytes": NUMBERS, "records": NUMBERS, "entity": TEXTS, "owner": TEXTS, "current": NUMBERS},
)


def asked(base, target):
    """Path and query, as a server reads what our client sends for this target."""
    url = URL(f"{base}{target.path}").with_query(target.query)
    sent = URL("http://journal" + url.raw_path_qs, encoded=True)
    return sent.path, list(sent.query.items())


@settings(max_examples=examples(500))
@given(st.integers(-1, 10**9).map(str) | TEXTS, QUERIES, st.none() | TEXTS)
def test_the_journal_reads_what_the_gateway_has_read(partition, query, owner):
    try:
        wanted = Range.read(partition, query.items())
    except WrongRequest:
        return
    if owner and owner.isprintable():
        wanted = wanted._replace(owner=owner)
    path, parameters = asked("http://journal", wanted.target())
    assert path == f"{PATH}/{int(partition)}"
    assert Range.read(path.removeprefix(f"{PATH}/"), parameters) == wanted
    assert 0 <= wanted.first <= wanted.end <= MAX_OFFSET
    assert 1 <= wanted.max_bytes <= MAX_BYTES


@given(st.dictionaries(st.sampled_from(["current", "entity", "x"]), TEXTS | st.sampled_from("01")))
def test_an_overview_is_asked_for_as_it_was_read(query):
    try:
        wanted = Overview.read(query.items())
    except WrongRequest:
        return
    path, parameters = asked("http://journal", wanted.target())
    assert (path, Overview.read(parameters)) == (PATH, wanted)


@settings(max_examples=examples(300))
@given(TEXTS | st.text("aZ0._-", max_size=101))
def test_a_consumer_is_named_as_it_was_read(name):
    try:
        consumer = Consumer.read(name)
    except WrongRequest:
        assert (
            not name
            or len(name) > 100
            or name in (".", "..")
            or quote(name, safe="", errors="replace") != name
            or "~" in name
        )
        return
    assert asked("https://10.0.0.1:5681", consumer.target()) == (f"{PATH}/consumers/{name}", [])


@pytest.mark.parametrize("name", ["epoch", "from", "entity", "owner", "anything"])
def test_a_parameter_is_given_once(name):
    query = [
        ("epoch", "0" * 16),
        ("from", "0"),
        ("to", "1"),
        ("entity", "orders"),
        ("owner", "orders"),
        ("anything", ""),
    ]
    assert Range.read("0", query).pattern == "orders"
    with pytest.raises(WrongRequest, match=f"'{name}' is given more than once"):
        Range.read("0", [*query, (name, "*")])


@pytest.mark.parametrize(
    ("pattern", "owner", "path", "has"),
    [
        ("Orders", "orders", "ORDERS", True),
        ("*", None, "anything/at/all", True),
        ("*", "news", "news", True),
        ("*", "News", "news/Subscriptions/all", True),
        ("news/subscriptions/*", "news", "news/Subscriptions/all", True),
        ("news/subscriptions/*", "news", "news/subscriptions/all/eu", False),  # a queue may have this name
        ("*", "news", "news/subscriptions/all/subscriptions/eu", False),
        ("*", "news", "news/subscriptions", False),
        ("*", "news", "news2", False),
        ("*", "news", "old/news", False),
        ("orders", "orders", "order\u017f", False),  # in upper case both are ORDERS
        ("orders", None, "order\u017f", False),
        ("*", "\u212aeys", "keys", True),  # the sign of Kelvin is a k in lower case, for all who compare names
    ],
)  # fmt: skip
def test_rows_of_an_owner_are_of_nobody_else(pattern, owner, path, has):
    assert Wanted(pattern, owner).has(path) is has
