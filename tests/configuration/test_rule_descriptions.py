import json
from datetime import UTC, datetime
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from broker.namespace.rule_descriptions import (
    DEFAULT_RULE,
    MAX_TEXT_CHARACTERS,
    CorrelationFilter,
    RuleDescription,
    RuleValue,
    SqlAction,
    SqlFilter,
    TrueFilter,
    ValueType,
)
from protocol.codec import (
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
    Described,
    Float,
    Int,
    Long,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    decode_exactly,
    encode,
)
from protocol.symbols import CORRELATION_FIELDS
from tests.examples import examples

NOON_MS = int(datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp() * 1000)
SOME_UUID = "6f9619ff-8b86-d011-b42d-00cf4fc964ff"


def read(rule) -> RuleDescription:
    """As a child process reads its settings."""
    return RuleDescription.model_validate_json(json.dumps(rule), strict=True)


def read_value(value) -> RuleValue:
    described = read({"name": "r", "filter": {"kind": "correlation", "properties": {"p": value}}}).filter
    assert isinstance(described, CorrelationFilter)
    return described.properties["p"]


@pytest.mark.parametrize(
    ("written", "amqp"),
    [
        ("high", "high"),
        (True, True),
        (5, Long(5)),
        (5.0, 5.0),
        (None, None),
        ({"type": "null", "value": None}, None),
        ({"type": "string", "value": ""}, ""),
        ({"type": "int", "value": -5}, Int(-5)),
        ({"type": "long", "value": 2**62}, Long(2**62)),
        ({"type": "double", "value": 5}, 5.0),
        ({"type": "boolean", "value": False}, False),
        ({"type": "timestamp", "value": NOON_MS}, Timestamp(NOON_MS)),
        ({"type": "timestamp", "value": "2026-01-31T13:00:00+01:00"}, Timestamp(NOON_MS)),
        ({"type": "timestamp", "value": "2026-01-31T12:00:00"}, Timestamp(NOON_MS)),
        ({"type": "uuid", "value": SOME_UUID.upper()}, UUID(SOME_UUID)),
        ({"type": "duration", "value": "PT1.5S"}, Described(Symbol("com.microsoft:timespan"), Long(15_000_000))),
        ({"type": "duration", "value": 1}, Described(Symbol("com.microsoft:timespan"), Long(1))),
    ],
)
def test_a_value_is_of_the_amqp_type_it_was_written_as(written, amqp):
    value = read_value(written).amqp()
    assert (type(value), value) == (type(amqp), amqp)
    assert encode(value) == encode(amqp)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ({"type": "null", "value": 0}, "must be null"),
        ({"type": "int", "value": None}, "must be a whole number of 32 bits"),
        ([1], "must be a string, a number, true or false, or a table with type and value"),
        ({"type": "int"}, "must be a string, a number, true or false, or a table with type and value"),
        ({"type": "bogus", "value": 1}, "'uuid', 'duration' or 'null'"),
        ({"type": [], "value": 1}, "type"),
        ({"type": "int", "value": 2**31}, "must be a whole number of 32 bits"),
        ({"type": "int", "value": True}, "must be a whole number of 32 bits"),
        ({"type": "int", "value": 1.0}, "must be a whole number of 32 bits"),
        (2**63, "must be a whole number of 64 bits"),
        ({"type": "boolean", "value": 1}, "must be true or false"),
        ({"type": "double", "value": "1"}, "must be a finite number"),
        (1e400, "must be a finite number"),
        ({"type": "timestamp", "value": "noon"}, "must be a date and time of ISO 8601"),
        ({"type": "timestamp", "value": 1.5}, "must be a whole number of 64 bits"),
        ({"type": "uuid", "value": "noon"}, "must be the text of a UUID"),
        ({"type": "uuid", "value": 1}, "must be the text of a UUID"),
        ({"type": "duration", "value": "1 hour"}, "must be an ISO 8601 duration"),
        ("x" * (MAX_TEXT_CHARACTERS + 1), "must be a string of at most 32768 characters"),
        ({"type": "string", "value": 1}, "must be a string of at most"),
        ({"type": "int", "value": 1, "unit": "m"}, "Extra inputs are not permitted"),
    ],
    ids=repr,
)
def test_a_wrong_value_is_refused_with_what_it_must_be(written, text):
    with pytest.raises(ValidationError) as raised:
        read_value(written)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("amqp", "type_", "value"),
    [
        ("high", ValueType.STRING, "high"),
        (None, ValueType.NULL, None),
        (Symbol("high"), ValueType.STRING, "high"),
        (Char("c"), ValueType.STRING, "c"),
        (True, ValueType.BOOLEAN, True),
        (UByte(5), ValueType.INT, 5),
        (Byte(-5), ValueType.INT, -5),
        (UInt(5), ValueType.INT, 5),
        (UInt(2**31), ValueType.LONG, 2**31),
        (ULong(5), ValueType.INT, 5),
        (ULong(2**62), ValueType.LONG, 2**62),
        (Int(5), ValueType.INT, 5),
        (Long(5), ValueType.LONG, 5),
        (Float(0.5), ValueType.DOUBLE, 0.5),
        (0.5, ValueType.DOUBLE, 0.5),
        (Decimal32((99 << 23 | 1250).to_bytes(4, "big")), ValueType.DOUBLE, 12.5),
        (Decimal64((398 << 53 | 7).to_bytes(8, "big")), ValueType.DOUBLE, 7.0),
        (Decimal128(bytes.fromhex("0c3c00000000000000000000000004e2")), ValueType.DOUBLE, 12.5),  # of .NET
        (Timestamp(-62135596800000), ValueType.TIMESTAMP, -62135596800000),
        (UUID(SOME_UUID), ValueType.UUID, SOME_UUID),
        (Described(Symbol("com.microsoft:timespan"), Long(7)), ValueType.DURATION, 7),
        (Described(Symbol("com.microsoft:uri"), "http://a"), ValueType.STRING, "http://a"),
        # 2026-01-31T12:00:00Z in .NET's ticks
        (
            Described(Symbol("com.microsoft:datetime-offset"), Long(NOON_MS * 10_000 + 621355968000000000)),
            ValueType.TIMESTAMP,
            NOON_MS,
        ),
    ],
    ids=repr,
)
def test_values_of_clients_are_read(amqp, type_, value):
    found = RuleValue.of_amqp(amqp)
    assert (found.type, found.value, type(found.value)) == (type_, value, type(value))


@pytest.mark.parametrize(
    "amqp",
    [
        *(b"x", [1], {"a": 1}, ULong(2**63), float("nan"), Described(Symbol("x"), 1), "x" * (MAX_TEXT_CHARACTERS + 1)),
        *(Decimal32(b"\x7c\0\0\0"), Decimal64(b"\xf8" + bytes(7)), Decimal128(b"\x5f\xfe" + bytes(13) + b"\x01")),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_impossible_values_are_refused(amqp):
    with pytest.raises(ValueError, match="must be"):
        RuleValue.of_amqp(amqp)


@pytest.mark.parametrize("part", ["filter", "action"])
def test_a_parameter_cannot_be_null(part):
    written = {"kind": "sql", "expression": "a = @p"} if part == "filter" else {"expression": "SET a = @p"}
    with pytest.raises(ValidationError, match="the value of @p must not be null"):
        read({"name": "r", part: {**written, "parameters": {"@p": None}}})


@pytest.mark.parametrize("name", ["$Default", "a", "Some.Class+Nested", "two words", "x" * 50])
def test_names_that_clients_make_are_taken(name):
    assert read({"name": name}).name == name


@pytest.mark.parametrize("name", ["", "x" * 51, "a/b", "a\\b", "a?", " a", "a ", "a\n", "a*b", "#", "@a", "a\tb"])
def test_names_that_the_service_refuses_are_refused(name):
    with pytest.raises(ValidationError, match="name"):
        read({"name": name})


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({"name": "r", "filter": {"kind": "correlation"}}, "has no condition"),
        ({"name": "r", "filter": {"kind": "sql"}}, "Field required"),
        ({"name": "r", "filter": {"kind": "sql", "expression": "x" * 1025}}, "at most 1024 characters"),
        ({"name": "r", "action": {"expression": "x" * 1025}}, "at most 1024 characters"),
        ({"name": "r", "filter": {"kind": "regex"}}, "'true', 'false', 'sql', 'correlation'"),
        (
            {"name": "r", "filter": {"kind": "correlation", "properties": dict.fromkeys(map(str, range(257)), 1)}},
            "at most 256 items",
        ),
    ],
)
def test_a_wrong_rule_is_refused(rule, text):
    with pytest.raises(ValidationError) as raised:
        read(rule)
    assert text in str(raised.value)


def test_a_new_subscriptions_rule_takes_every_message():
    assert RuleDescription(name="$Default", filter=TrueFilter(), action=None) == DEFAULT_RULE
    document = {"name": "$Default", "created_ms": 7, "filter": {"kind": "true"}, "action": None}
    assert DEFAULT_RULE.document(7) == document


def test_the_document_of_a_rule_has_fixed_keys_and_encoded_values():
    sql = RuleDescription(
        name="large",
        filter=SqlFilter(expression="amount > @limit", parameters={"@limit": RuleValue(type=ValueType.INT, value=5)}),
        action=SqlAction(expression="SET a = 1"),
    )
    assert sql.document(7) == {
        "name": "large",
        "created_ms": 7,
        "filter": {"kind": "sql", "expression": "amount > @limit", "parameters": {"@limit": encode(Int(5))}},
        "action": {"expression": "SET a = 1", "parameters": {}},
    }
    fields = dict.fromkeys(CORRELATION_FIELDS)
    correlation = read({"name": "c", "filter": {"kind": "correlation", "label": "x", "properties": {"p": "v"}}})
    assert correlation.document(7)["filter"] == {
        "kind": "correlation", **fields, "label": "x", "properties": {"p": encode("v")},
    }  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"filter": None},
        {"filter": {"kind": "sql"}},
        {"filter": {"kind": "sql", "expression": "a = 1", "parameters": {"@a": b"\xff"}}},
        {"filter": {"kind": "sql", "expression": "a = 1", "parameters": None}},
        {"name": ""},
        {"action": {"expression": "SET a = 1"}},
    ],
    ids=repr,
)
def test_a_document_that_is_no_rules_is_refused(change):
    with pytest.raises(ValueError, match="not a rule"):
        RuleDescription.of_document({**DEFAULT_RULE.document(7), **change})


NAMES = st.text("abc$@ .", min_size=1, max_size=5)
VALUES = st.one_of(
    st.text(max_size=5),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.builds(lambda number: {"type": "int", "value": number}, st.integers(-(2**31), 2**31 - 1)),
    st.builds(lambda ms: {"type": "timestamp", "value": ms}, st.integers(-(2**63), 2**63 - 1)),
    st.builds(lambda ticks: {"type": "duration", "value": ticks}, st.integers(-(2**63), 2**63 - 1)),
    st.builds(lambda uuid: {"type": "uuid", "value": str(uuid)}, st.uuids()),
)
TABLES = st.dictionaries(NAMES, VALUES, max_size=4)
FILTERS = st.one_of(
    st.sampled_from([{"kind": "true"}, {"kind": "false"}]),
    st.builds(lambda values: {"kind": "sql", "expression": "a = 1", "parameters": values}, TABLES),
    st.builds(
        lambda fields, values: {"kind": "correlation", "label": "", **fields, "properties": values},
        st.dictionaries(st.sampled_from(CORRELATION_FIELDS), st.text(max_size=5)),
        TABLES,
    ),
)
ACTIONS = st.none() | st.builds(lambda values: {"expression": "SET a = 1", "parameters": values}, TABLES)


@settings(max_examples=examples(100))
@given(FILTERS, ACTIONS)
def test_a_rule_survives_its_document_and_its_way_to_a_child(filter_, action):
    rule = read({"name": "r", "filter": filter_, "action": action})
    assert RuleDescription.of_document(rule.document(7)) == rule
    assert RuleDescription.model_validate_json(rule.model_dump_json(), strict=True) == rule
    for encoded in rule.document(7)["filter"].get("parameters", {}).values():
        decode_exactly(encoded)


def test_a_text_is_stored_only_where_a_client_gave_one():
    filter_ = SqlFilter(expression="a = @p", parameters={"@p": RuleValue(type=ValueType.TIMESTAMP, value="2020-01-01")})
    document = RuleDescription(name="r", filter=filter_).document(0)
    assert "texts" not in document["filter"]
    written = filter_.parameters["@p"].model_copy(update={"text": "2020-01-01"})
    told = RuleDescription(name="r", filter=filter_.model_copy(update={"parameters": {"@p": written}}))
    stored = told.document(0)
    assert stored["filter"]["parameters"] == document["filter"]["parameters"]
    assert RuleDescription.of_document(stored) == told
