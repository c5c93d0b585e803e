"""Message selectors of JMS: what they may say, and which messages they select (Jakarta Messaging 3.1, 3.8.1)."""

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.rules.errors import InvalidRule, RuleSyntaxError, SelectorNotSupported
from broker.rules.selecting import compile_selector, joined
from broker.rules.selector_syntax import HEADERS, MAX_CHARACTERS
from protocol.codec import (
    Byte,
    Char,
    Decimal128,
    Described,
    Float,
    Int,
    Long,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    encode,
)
from protocol.message.intake import take_apart

CREATED_MS = 1_700_000_000_000


def record_of(
    application: dict[str, Any] | None = None,
    fields: list[Any] | None = None,
    header: list[Any] | None = None,
    annotations: dict[Any, Any] | None = None,
) -> bytes:
    """Layout and stored bytes of a message with these sections."""
    sections = ((0x70, header), (0x72, annotations), (0x73, fields), (0x74, application), (0x77, "body"))
    encoded = b"".join(encode(Described(ULong(code), section)) for code, section in sections if section is not None)
    layout, body, _, _ = take_apart(encoded, False)
    return layout + body


def selects(text: str, record: bytes, delivery_count: int = 0, *since: Any) -> bool:
    return compile_selector(text).matches(record, 0, delivery_count, *since)


APPLICATION = {
    "color": "red",
    "Color": "blue",
    "quote": "it's",
    "n": Int(5),
    "big": Long(1 << 40),
    "byte": Byte(-3),
    "short": Short(7),
    "ushort": UByte(200),
    "x": 2.5,
    "f": Float(0.5),
    "yes": True,
    "no": False,
    "nothing": None,
    "_x": "underscore",
    "$y": "dollar",
    "a.b": "dot",
    "x-opt-z": "hyphens",
    "größe": "groß",
    "at": Timestamp(CREATED_MS),
    "letter": Char("c"),
    "symbol": Symbol("s"),
    "binary": b"red",
    "AND_more": 1,
}
FIELDS = [
    "ID:1", b"me", "to", "kind", "reply", "corr", Symbol("text/plain"), Symbol("gzip"), Timestamp(CREATED_MS + 5),
    Timestamp(CREATED_MS), "group", UInt(3), "reply-group",
]  # fmt: skip
MESSAGE = record_of(APPLICATION, FIELDS, [True, UByte(7)])
BARE = record_of()

TRUE = [
    "color = 'red'",
    "Color = 'blue'",
    "  color\n=\t'red'  ",
    "quote = 'it''s'",
    "color <> 'blue'",
    "color != 'blue'",
    "n = 5 AND big > 1000000 AND byte < 0 AND short >= 7 AND ushort <= 200",
    "n = 5L and n = 0x5 and n = 05 and n = 5.0 and n = 5d and n = 5f and n = 5. and n = .5e1 and n = 0X5L",
    "x = 2.5 and f = 0.5 and f = 5e-1 and x > n - 3",
    "-n = -5 and +n = 5 and n + 1 = 6 and n * 2 = 10 and n / 2 = 2 and n - 7 = -2 and 7 % n = 2",
    "2 + 3 * 4 = 14 and (2 + 3) * 4 = 20",
    "yes",
    "yes AND NOT no",
    "yes = TRUE and no = false and yes <> no",
    "TRUE",
    "NOT FALSE",
    "n BETWEEN 5 AND 6 and n between 1 and 5 and n NOT BETWEEN 6 AND 9",
    "color IN ('green', 'red') and color not in ('green')",
    "color LIKE 'r%' and color LIKE '_ed' and color NOT LIKE 'b%' and color like 'red'",
    "quote LIKE 'it!_s' ESCAPE '!' OR color = 'red'",
    "missing IS NULL and nothing IS NULL and color IS NOT NULL",
    "COLOR IS NULL",
    "_x = 'underscore' and $y = 'dollar' and a.b = 'dot' and größe = 'groß'",
    "\"x-opt-z\" = 'hyphens' and \"color\" = 'red'",
    "AND_more = 1",
    f"at = {CREATED_MS} and at > 1",
    "letter = 'c' and symbol = 's'",
    "color = 'red' OR missing = 1",
    "missing = 1 OR yes",
    "n / 0 = 1 OR yes",
    "NOT (color = 5)",  # values of different types do not compare: each comparison of theirs is false
    "NOT (n = 'five')",
    "JMSMessageID = 'ID:1' and JMSType = 'kind' and JMSCorrelationID = 'corr' and JMSPriority = 7",
    f"JMSTimestamp = {CREATED_MS}",
    "JMSDeliveryMode = 'PERSISTENT'",
    "JMSXGroupID = 'group' and JMSXGroupSeq = 3 and JMSXUserID = 'me' and JMSXDeliveryCount = 1",
    "JMS_AMQP_REPLY_TO_GROUP_ID = 'reply-group'",
    "JMS_VENDOR IS NULL",
    "amqp.message_id = 'ID:1' and \"amqp.correlation_id\" = 'corr' and amqp.to = 'to' and amqp.reply_to = 'reply'",
    "amqp.subject = 'kind' and amqp.content_type = 'text/plain' and amqp.content_encoding = 'gzip'",
    f"amqp.absolute_expiry_time = {CREATED_MS + 5} and amqp.creation_time = {CREATED_MS}",
    "amqp.group_id = 'group' and amqp.group_sequence = 3 and amqp.reply_to_group_id = 'reply-group'",
    "amqp.user_id = 'me' and amqp.durable and amqp.priority = 7 and amqp.delivery_count = 0",
    "NOT NOT yes",
    "((((color))) = ('red'))",
]
NOT_TRUE = [
    "color = 'Red'",
    "color = 'blue'",
    "missing = 1",
    "NOT (missing = 1)",  # unknown
    "missing <> 1",
    "missing = missing",
    "nothing = 1",
    "missing",
    "NOT missing",
    "color",  # no boolean
    "n",
    "color <> 5",  # values of different types
    "n <> 'five'",
    "yes <> 1",
    "yes = 1",
    "yes = 'true'",
    "color > n",
    "color < Color",  # strings have no order
    "yes > no",
    "n / 0 = 1",
    "color + 1 = 1",
    "-color = 1",
    "color + Color = 'redblue'",
    "n LIKE '5'",
    "n NOT LIKE '5'",
    "missing LIKE '%'",
    "missing NOT LIKE 'a%'",
    "missing IN ('a')",
    "missing NOT IN ('a')",
    "missing BETWEEN 1 AND 2",
    "missing NOT BETWEEN 1 AND 2",
    "n BETWEEN missing AND 9",
    "n IN ('5')",
    "color IS NULL",
    "binary = 'red'",
    "FALSE",
    "yes AND missing",
    "no OR missing",
    "JMSPriority = 4",
    "jmspriority = 7",
    "color = 'red' AND Color = 'red'",
]


@pytest.mark.parametrize("text", TRUE)
def test_it_selects(text):
    assert selects(text, MESSAGE)


@pytest.mark.parametrize("text", NOT_TRUE)
def test_it_does_not_select(text):
    assert not selects(text, MESSAGE)


@pytest.mark.parametrize(
    "text",
    ["JMSPriority = 4", "JMSDeliveryMode = 'NON_PERSISTENT'", "NOT amqp.durable", "JMSMessageID IS NULL", "n IS NULL"],
)
def test_a_message_without_sections_has_the_defaults(text):
    assert selects(text, BARE)


@pytest.mark.parametrize("header", sorted(HEADERS))
def test_each_header_can_be_named_of_any_message(header):
    for record in (MESSAGE, BARE):
        assert selects(f'"{header}" IS NULL', record) is not selects(f'"{header}" IS NOT NULL', record)


@pytest.mark.parametrize(
    ("encoded", "texts"),
    [
        ("ID:abc", ["ID:abc"]),
        ("abc", ["abc", "ID:AMQP_NO_PREFIX:abc", "ID:AMQP_STRING:abc"]),
        (ULong(7), ["7", "ID:AMQP_ULONG:7"]),
        (
            UUID("11111111-2222-3333-4444-aaaaaaaaaaaa"),
            ["11111111-2222-3333-4444-aaaaaaaaaaaa", "ID:AMQP_UUID:11111111-2222-3333-4444-AAAAAAAAAAAA"],
        ),
        (b"\x01\xab", ["01ab", "ID:AMQP_BINARY:01AB"]),
        ("ID:AMQP_OTHER:x", ["ID:AMQP_OTHER:x"]),
    ],
)
@pytest.mark.parametrize(("at", "name"), [(0, "JMSMessageID"), (5, "JMSCorrelationID")])
def test_ids_are_named_as_clients_show_them(encoded, texts, at, name):
    """Of Qpid JMS: a prefix says the type of the id on the wire."""
    record = record_of(None, [None] * at + [encoded])
    for text in texts:
        assert selects(f"{name} = '{text}'", record)
        assert selects(f"'{text}' = {name}", record)
        assert selects(f"{name} IN ('other', '{text}')", record)
        assert not selects(f"{name} <> '{text}'", record)
    assert not selects(f"{name} = 'other'", record)


def test_what_was_set_since_counts():
    """Properties that a receiver has set, that say why a message is a dead letter, or that a rule's action has set."""
    set_since = {"color": "green", "DeadLetterReason": "because", "n": encode(Long(6)), "yes": None}
    fields_since = {3: encode("other"), 12: None}
    for text, expected in {
        "color = 'green'": True,
        "color = 'red'": False,
        "DeadLetterReason LIKE 'be%'": True,
        "n = 6": True,
        "yes": False,
        "yes IS NULL": True,
        "Color = 'blue'": True,
        "JMSType = 'other'": True,
        "amqp.reply_to_group_id IS NULL": True,
        "JMSCorrelationID = 'corr'": True,
    }.items():
        assert selects(text, MESSAGE, 0, set_since, fields_since) is expected
    assert selects("JMSType = 'other' and DeadLetterReason = 'because'", BARE, 0, set_since, fields_since)
    assert selects("JMSXDeliveryCount = 4 and amqp.delivery_count = 3", BARE, 3)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "color =", "= 'red'", "color 'red'", "color = red' ", "color = 'red", "(color = 'red'", "color)"),
        *("n +", "1 + 2", "'red'", "5", "n AND 'x'", "NOT 'x'", "AND", "color = AND", "NULL", "color = NULL", "NOT"),
        *("color > 'a'", "'a' <= color", "yes < TRUE", "color BETWEEN 'a' AND 'b'", "n BETWEEN 1", "n BETWEEN 1, 2"),
        *("n IN ()", "n IN (1", "n IN 1", "color LIKE", "color LIKE 5", "color LIKE Color", "color LIKE 'a' ESCAPE"),
        *("color LIKE 'a' ESCAPE 'xy'", "color LIKE 'ax' ESCAPE 'x'", "5 IS NULL", "color IS", "color IS NOT"),
        *("foo()", "newid() = 1", "EXISTS(n)", "@p = 1", "[color] = 'red'", "a..b = 1", "a. = 1", ".a = 1", '"" = 1'),
        *("n = 09", "n = 99999999999999999999", "n = 1e999", "n = 5x", "n = 0x", "n = 5dd", f"n = {'1' * 5000}"),
        *("n === 5", "n = 5;", "n = 5 /* comment */", "\0", "color = 'red' color = 'red'", "n ! = 5", "n = = 5"),
        "NOT " * 60 + "yes",
        "(" * 60 + "n" + " + 1)" * 60 + " = 1",
    ],
)
def test_what_is_no_selector_is_refused(text):
    with pytest.raises(RuleSyntaxError) as caught:
        compile_selector(text)
    assert "There was an error parsing" in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text",
    [
        *("JMSReplyTo = 'x'", "JMSDestination = 'x'", "JMSExpiration > 1", "NOT JMSRedelivered", "JMSXAppID = 'x'"),
        *("amqp.ttl = 1", '"amqp.annotation.x-opt-offset" > 1', "color = 'red' OR JMSReplyTo IS NULL"),
        "n = 1 OR " * 1000 + "n = 2",
    ],
)
def test_what_cannot_be_evaluated_is_told_from_what_is_no_selector(text):
    with pytest.raises(SelectorNotSupported):
        compile_selector(text)


def test_long_selectors_have_a_bound_and_are_compiled():
    text = "n = 1 OR " * 900 + "n = 5"
    assert len(text) < MAX_CHARACTERS
    assert selects(text, MESSAGE)
    assert compile_selector(text).work > compile_selector("n = 5").work


def test_several_are_all_to_match():
    assert joined(["n = 5"]) == "n = 5"
    assert selects(joined(["n = 5 OR no", "color = 'red'"]), MESSAGE)
    assert not selects(joined(["n = 5 OR no", "no"]), MESSAGE)
    with pytest.raises(RuleSyntaxError):
        joined(["n = 1) OR (n = 5", "yes"])
    with pytest.raises(SelectorNotSupported):
        joined(["n = 1 OR " * 600 + "yes", "n = 1 OR " * 600 + "yes"])


def test_a_costly_pattern_ends_without_a_match():
    """What is searched first is everywhere, and what comes next nowhere near: then there is no result."""
    record = record_of({"text": "a" * 32_000})
    others = " OR ".join(f"text LIKE '%{'_' * number}b%'" for number in range(900, 905))
    assert selects("text LIKE '%aaa%'", record)
    assert not selects(others, record)
    assert not selects(f"NOT ({others})", record), "it has used up its steps"
    assert selects(f"text LIKE '%aaa%' OR {others}", record)


def test_broken_sections_have_no_result():
    layout = MESSAGE[:16]
    for at in range(16, len(MESSAGE)):
        broken = bytearray(MESSAGE)
        broken[at] ^= 0xFF
        selects("color = 'red' and JMSType = 'kind'", layout + bytes(broken[16:]))


WORDS = st.sampled_from(
    [
        "color",
        "n",
        "yes",
        "JMSType",
        "amqp.to",
        "missing",
        "'red'",
        "'it''s'",
        "5",
        "2.5",
        "0x7",
        "TRUE",
        "FALSE",
        "NULL",
        "AND",
        "OR",
        "NOT",
        "BETWEEN",
        "LIKE",
        "IN",
        "IS",
        "ESCAPE",
        "=",
        "<>",
        "<",
        ">=",
        "(",
        ")",
        ",",
        "+",
        "-",
        "*",
        "/",
        ".",
        '"',
        "'",
    ]
)


@given(st.lists(WORDS, max_size=14).map(" ".join) | st.text(max_size=40))
def test_any_text_is_a_selector_or_is_refused(text):
    try:
        selector = compile_selector(text)
    except InvalidRule:
        return
    assert selector.matches(MESSAGE, 0, 0) in (True, False)
    assert selector.matches(BARE, 0, 0) in (True, False)


VALUES = st.one_of(
    st.none(), st.booleans(), st.text(max_size=5), st.integers(-(2**63), 2**63 - 1).map(Long), st.floats(), st.binary(),
    st.uuids(), st.integers(-(2**63), 2**63 - 1).map(Timestamp), st.binary(min_size=16, max_size=16).map(Decimal128),
    st.integers(0, 2**64 - 1).map(ULong), st.just(Symbol("s")),
)  # fmt: skip


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c"]), VALUES), st.sampled_from(["=", "<>", "<", ">="]), st.booleans()
)
def test_a_comparison_is_false_or_unknown_where_values_are_not_alike(values, symbol, swapped):
    record = record_of(values)
    left, right = ("b", "a") if swapped else ("a", "b")
    text = f"{left} {symbol} {right}"
    result, negated = selects(text, record), selects(f"NOT ({text})", record)
    a, b = values.get(left), values.get(right)
    has_no_type = [isinstance(value, bytes | None) and not isinstance(value, Decimal128) for value in (a, b)]
    if any(has_no_type):
        assert not result
        assert not negated
    elif isinstance(a, str | UUID) != isinstance(b, str | UUID) or isinstance(a, bool) != isinstance(b, bool):
        assert not result
        assert negated
    elif type(a) is type(b) is str:
        assert result is ({"=": a == b, "<>": a != b}.get(symbol, False))
        assert negated is not result
    elif type(a) is type(b) is Long:
        assert result is {"=": a == b, "<>": a != b, "<": a < b, ">=": a >= b}[symbol]
