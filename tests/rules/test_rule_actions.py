from uuid import UUID

import pytest

from broker.rules import ActionError, Duration, FilterError, Instant, MessageView, compile_action
from protocol.codec import (
    Char,
    Decimal64,
    Decimal128,
    Described,
    Float,
    Int,
    Long,
    Short,
    Symbol,
    Timestamp,
    UByte,
    ULong,
    decode_exactly,
    encode,
)

TIMESPAN = Symbol("com.microsoft:timespan")
MINUTE = Described(TIMESPAN, Long(60 * 10_000_000))
NOON = Timestamp(1_704_110_400_000)
CENTS = Decimal64((396 << 53 | 1999).to_bytes(8, "big"))  # 19.99
OFFSET_NOON = Described(Symbol("com.microsoft:datetime-offset"), Long(621_355_968_000_000_000 + NOON * 10_000))
FIELDS = ["m-1", None, "orders", "new", None, "c-1", Symbol("text/plain"), None, None, None, "s-1"]


def applied(expression, parameters=None, /, **user):
    return compile_action(expression, parameters).apply(MessageView(FIELDS, user))


def typed(value):
    return type(value), value


def test_the_documented_example():
    changes = applied("SET quantity = quantity / 2; REMOVE priority; SET sys.CorrelationId = 'low';",
                      quantity=Long(7), priority="high")  # fmt: skip
    assert changes.user == {"quantity": 3}
    assert changes.removed == ["priority"]
    assert changes.system == {"CorrelationId": "low"}


@pytest.mark.parametrize(
    "expression",
    [
        "SET a = 1 SET b = 2",
        "SET a = 1; SET b = 2",
        "SET a = 1;\nSET b = 2;",
        "set A=1 set user.b=2",
        "SET a=1;SET[b]=2",
    ],
)
def test_semicolons_between_statements_are_optional(expression):
    changes = applied(expression)
    assert {name.lower(): value for name, value in changes.user.items()} == {"a": 1, "b": 2}


def test_a_minus_after_an_expression_belongs_to_it():
    assert applied("SET a = 5 - 1 SET b = -1").user == {"a": 4, "b": -1}


@pytest.mark.parametrize("expression", ["", "  \n"])
def test_a_blank_action_changes_nothing(expression):
    assert compile_action(expression).is_empty
    assert applied(expression, a=1) == applied("REMOVE missing", a=1)


def test_later_statements_see_what_earlier_ones_did():
    changes = applied(
        "SET a = a + 1; SET b = a * 10; REMOVE a; SET c = a; SET sys.Label = 'x' + sys.Label; SET d = sys.Label",
        a=Int(1),
    )
    assert changes.user == {"b": 20, "c": None, "d": "xnew"}
    assert changes.removed == ["a"]
    assert changes.system == {"Label": "xnew"}


def test_an_action_leaves_the_message_itself_alone():
    message = MessageView(FIELDS, {"a": 1}, None, {"SequenceNumber": 1})
    compile_action("SET a = 2; SET sys.To = 'x'; SET sys.PartitionKey = 'y'; REMOVE sys.Label").apply(message)
    assert (message.user, message.system_properties["to"], message.system_properties["label"]) == (
        {"a": 1},
        "orders",
        "new",
    )
    assert message.other_system == {"sequencenumber": 1}


def test_a_property_keeps_the_name_that_the_message_has_for_it():
    assert applied("SET COLOR = 'blue'", Color="red").user == {"Color": "blue"}
    assert applied("SET COLOR = 'blue'").user == {"COLOR": "blue"}
    assert applied("REMOVE COLOR", Color="red").removed == ["Color"]


def test_of_names_that_differ_in_case_the_first_is_set_and_all_are_removed():
    assert applied("SET color = color + '!'", COLOR="red", Color="blue").user == {"COLOR": "red!"}
    assert applied("REMOVE color", COLOR="red", Color="blue").removed == ["COLOR", "Color"]


def test_setting_after_removing_and_removing_after_setting():
    changes = applied("REMOVE a; SET a = 2", a=1)
    assert (changes.user, changes.removed) == ({"a": 2}, [])
    changes = applied("SET a = 2; REMOVE a", a=1)
    assert (changes.user, changes.removed) == ({}, ["a"])
    changes = applied("SET new = 2; REMOVE NEW")
    assert (changes.user, changes.removed) == ({}, [])


def test_removing_what_is_missing_is_no_error():
    changes = applied("REMOVE missing", a=1)
    assert (changes.user, changes.removed, changes.system) == ({}, [], {})


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1", Long(1)),
        ("-9223372036854775808", Long(-(2**63))),
        ("+huge", ULong(2**64 - 1)),
        ("1.5", 1.5),
        ("'text'", "text"),
        ("TRUE", True),
        ("NULL", None),
        ("missing", None),
        ("missing + 1", None),
        ("5 / 2", Long(2)),
        ("@at", NOON),
        ("@at + @took", Timestamp(NOON + 60_000)),
        ("@took", MINUTE),
        ("@took + @took", Described(TIMESPAN, Long(120 * 10_000_000))),
        ("@id", UUID(int=7)),
        ("'a' + kind", "aorder"),
        # What is only a property keeps its type.
        ("small", UByte(3)),
        ("kind", Symbol("order")),
        ("ratio", Float(0.5)),
        ("property('SMALL')", UByte(3)),
        ("link", Described(Symbol("com.microsoft:uri"), "https://example.com/")),
        ("small + 0", Long(3)),
    ],
)
def test_a_new_property_has_the_type_of_the_expression(expression, value):
    user = {
        "small": UByte(3),
        "kind": Symbol("order"),
        "ratio": Float(0.5),
        "huge": ULong(2**64 - 1),
        "link": Described(Symbol("com.microsoft:uri"), "https://example.com/"),
    }
    changes = applied(f"SET new = {expression}", {"@at": NOON, "@took": MINUTE, "@id": UUID(int=7)}, **user)
    assert typed(changes.user["new"]) == typed(value)
    assert typed(decode_exactly(encode(changes.user["new"]))) == typed(value)


@pytest.mark.parametrize(
    ("existing", "expression", "value"),
    [
        (Int(7), "a / 2", Int(3)),
        (Short(7), "a * 10000", Long(70000)),
        (UByte(7), "-1", Long(-1)),
        (UByte(7), "255", UByte(255)),
        (ULong(7), "8", ULong(8)),
        (Float(1.0), "a + 1", Float(2.0)),
        (Float(1.0), "1e300", 1e300),
        (1.5, "2", 2.0),
        (1.5, "9007199254740993", Long(9007199254740993)),
        (Int(7), "1.5", 1.5),
        (Symbol("x"), "'y'", Symbol("y")),
        (Symbol("x"), "'ü'", "ü"),
        (Char("x"), "'y'", Char("y")),
        (Char("x"), "'yz'", "yz"),
        ("5", "6", "6"),
        ("5", "1.5", "1.5"),
        ("5", "@id", "00000000-0000-0000-0000-000000000007"),
        ("5", "TRUE", True),
        (Symbol("x"), "6", Symbol("6")),
        (Char("x"), "6", Char("6")),
        (Char("x"), "60", "60"),
        (Described(Symbol("com.microsoft:uri"), "https://example.com/"), "6", "6"),
        (Int(5), "'6'", Int(6)),
        (Int(5), "' -6 '", Int(-6)),
        (UByte(5), "'256'", "256"),
        (Long(5), "'9223372036854775808'", "9223372036854775808"),
        (ULong(5), "'18446744073709551615'", ULong(2**64 - 1)),
        (Int(5), "'6.0'", "6.0"),
        (Int(5), "'\u0666'", "\u0666"),
        (Int(5), "''", ""),
        (1.5, "'2.5e3'", 2500.0),
        (1.5, "'1e999'", "1e999"),
        (1.5, "'nan'", "nan"),
        (Float(1.5), "'2.5'", Float(2.5)),
        (CENTS, "'20'", Decimal128((6176 << 113 | 20).to_bytes(16, "big"))),
        (CENTS, "'1e9999'", "1e9999"),
        (CENTS, "'1234567890123456789012345678901234567890'", "1234567890123456789012345678901234567890"),
        (True, "'false'", False),
        (True, "'0'", "0"),
        (UUID(int=1), "'00000000-0000-0000-0000-000000000007'", UUID(int=7)),
        (UUID(int=1), "'seven'", "seven"),
        (NOON, "'2024-01-01T12:00:00Z'", NOON),
        (NOON, "'noon'", "noon"),
        (MINUTE, "'00:01:00'", MINUTE),
        (OFFSET_NOON, "'2024-01-01T12:00:00+00:00'", OFFSET_NOON),
        (True, "1", Long(1)),
        (Int(1), "TRUE", True),
        (None, "1", Long(1)),
        (NOON, "5", Long(5)),
        (Int(1), "NULL", None),
    ],
)
def test_an_existing_property_keeps_its_type_if_that_loses_nothing(existing, expression, value):
    changed = applied(f"SET a = {expression}", {"@id": UUID(int=7)}, a=existing).user["a"]
    assert typed(changed) == typed(value)
    assert typed(decode_exactly(encode(changed))) == typed(value)


def test_decimals_stay_decimals():
    value = applied("SET a = a * 2", a=CENTS).user["a"]
    assert typed(value) == typed(Decimal128(((6176 - 2) << 113 | 3998).to_bytes(16, "big")))
    assert typed(applied("SET a = 20", a=CENTS).user["a"]) == typed(Decimal128((6176 << 113 | 20).to_bytes(16, "big")))


def test_system_properties_that_may_be_set():
    changes = applied(
        "SET sys.MessageId = 'm'; SET sys.CorrelationId = 5; SET sys.To = @id; SET sys.Subject = 'l'; "
        "SET sys.ReplyTo = 'r'; SET sys.ReplyToSessionId = 'rs'; SET sys.SessionId = 's'; SET sys.PartitionKey = 's'; "
        "SET sys.ContentType = 'c'; SET sys.TimeToLive = @took; SET sys.ScheduledEnqueueTimeUtc = @at + @took;",
        {"@took": MINUTE, "@at": NOON, "@id": UUID(int=7)},
    )
    assert changes.system == {
        "MessageId": "m",
        "CorrelationId": "5",
        "To": "00000000-0000-0000-0000-000000000007",
        "Label": "l",
        "ReplyTo": "r",
        "ReplyToSessionId": "rs",
        "SessionId": "s",
        "PartitionKey": "s",
        "ContentType": "c",
        "TimeToLive": Duration.from_ms(60_000),
        "ScheduledEnqueueTimeUtc": Instant.from_ms(NOON + 60_000),
    }
    assert changes.user == {}


def test_removing_a_system_property_clears_it():
    assert applied("REMOVE sys.Label; SET sys.To = NULL; SET sys.ReplyTo = missing").system == {
        "Label": None,
        "To": None,
        "ReplyTo": None,
    }


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("SET sys.Label = TRUE", "sys.Label is a string, not a boolean"),
        (
            "SET sys.TimeToLive = 5",
            "sys.TimeToLive is a duration of at least 0, such as '00:10:00' or 'PT10M', not an int",
        ),
        ("SET sys.TimeToLive = -@took", "sys.TimeToLive is a duration of at least 0"),
        (
            "SET sys.ScheduledEnqueueTimeUtc = 'now'",
            "sys.ScheduledEnqueueTimeUtc is a date, such as '2030-01-01T00:00:00Z', not 'now'",
        ),
        ("SET sys.SessionId = long", "sys.SessionId has at most 128 characters, not 129"),
        ("SET sys.MessageId = long", "sys.MessageId has at most 128 characters"),
        ("SET a = 1 / 0", "division of an integer by zero"),
        ("SET a = 'a' - 1", "a string - an integer is not defined"),
        ("SET a = 1 + 'a'", "an integer + a string is not defined"),
        ("SET a = property(5)", "property() takes the name of a property, not an integer"),
        ("REMOVE b; SET a = 9223372036854775807 + 1", "a computed integer does not fit 64 bits"),
    ],
)
def test_an_action_that_cannot_be_done(expression, text):
    with pytest.raises(ActionError) as caught:
        applied(expression, {"@took": MINUTE}, long="x" * 129)
    assert str(caught.value).startswith(text)
    assert isinstance(caught.value, FilterError)
    assert (FilterError.reason, ActionError.reason) == ("FilterException", "RuleActionException")


def test_newid_makes_another_id_each_time():
    action = compile_action("SET a = newid(); SET b = newid(); SET sys.MessageId = newid()")
    changes = action.apply(MessageView())
    ids = {changes.user["a"], changes.user["b"], UUID(str(changes.system["MessageId"]))}
    assert len(ids) == 3
    assert {each.version for each in ids} == {4}


def test_computed_strings_have_a_limit():
    with pytest.raises(ActionError, match="longer than 32768 characters"):
        applied("SET a = a + a", a="x" * 16_385)


@pytest.mark.parametrize(
    ("literal", "ticks"),
    [
        ("00:10:00", 6_000_000_000),
        ("PT10M", 6_000_000_000),
        ("1.00:00:00", 864_000_000_000),
        ("P1D", 864_000_000_000),
        ("0:0:0", 0),
        ("10:30", 378_000_000_000),
        ("23:59:59.9999999", 863_999_999_999),
        (" 00:10:00 ", 6_000_000_000),
        ("PT0.5S", 5_000_000),
        ("10675199.02:48:05.4775807", 2**63 - 1),
        ("P10675199DT2H48M5.4775807S", 2**63 - 1),
        ("99999999.00:00:00", 2**63 - 1),
    ],
)
def test_a_string_becomes_the_duration_of_the_property_that_it_is_assigned_to(literal, ticks):
    assert applied(f"SET sys.TimeToLive = '{literal}'").system == {"TimeToLive": Duration(ticks)}
    assert applied("SET sys.TimeToLive = ttl", ttl=literal).system == {"TimeToLive": Duration(ticks)}
    assert compile_action(f"SET sys.TimeToLive = '{literal}'").flaw is None


@pytest.mark.parametrize(
    ("literal", "ms"),
    [
        ("2030-01-01T00:00:00Z", 1_893_456_000_000),
        ("2030-01-01T00:00:00", 1_893_456_000_000),
        ("2030-01-01 00:00:00", 1_893_456_000_000),
        ("2030-01-01", 1_893_456_000_000),
        ("2030-01-01T02:00:00.0000000+02:00", 1_893_456_000_000),
        ("2030-01-01T00:00:00.125Z", 1_893_456_000_125),
        ("Tue, 01 Jan 2030 00:00:00 GMT", 1_893_456_000_000),
        ("0001-01-01T00:00:00+14:00", -62_135_596_800_000 - 14 * 3_600_000),
        ("9999-12-31T23:59:59.9999999Z", 253_402_300_799_999),
    ],
)
def test_a_string_becomes_the_time_of_the_property_that_it_is_assigned_to(literal, ms):
    changes = applied(f"SET sys.ScheduledEnqueueTimeUtc = '{literal}'")
    assert isinstance(changes.system["ScheduledEnqueueTimeUtc"], Instant)
    assert changes.system["ScheduledEnqueueTimeUtc"].ms == ms
    assert compile_action(f"SET sys.ScheduledEnqueueTimeUtc = '{literal}'").flaw is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "600",
        "24:00:00",
        "00:60:00",
        "1:2:3:4",
        "-00:00:01",
        "P1Y",
        "PT",
        "\u0660\u0660:10:00",
        "1" * 100,
        "\ud800",
        "x" * 32_000,
    ],
)
def test_a_text_that_is_no_duration_fails_for_its_message(text):
    with pytest.raises(ActionError, match=r"sys\.TimeToLive is a duration"):
        applied("SET sys.TimeToLive = ttl", ttl=text)


@pytest.mark.parametrize("text", ["", "now", "2030-13-01", "25:00", "\ud800", "2030-01-01T00:00:00Z" * 9, "1893456000"])
def test_a_text_that_is_no_time_fails_for_its_message(text):
    with pytest.raises(ActionError, match=r"sys\.ScheduledEnqueueTimeUtc is a date"):
        applied("SET sys.ScheduledEnqueueTimeUtc = at", at=text)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("@id", "00000000-0000-0000-0000-000000000007"),
        ("5", "5"),
        ("1.5", "1.5"),
        ("-2.0", "-2"),
        ("1e15", "1E+15"),
        ("123456789012345678.0", "1.2345678901234568E+17"),
        ("123456789012345.0", "123456789012345"),
        ("0.00001", "1E-05"),
        ("0.0001", "0.0001"),
        ("1.5e300", "1.5E+300"),
        ("1.0 / 0", "Infinity"),
        ("-1.0 / 0", "-Infinity"),
        ("0.0 / 0", "NaN"),
        ("-0.0", "-0"),
        ("cents", "19.99"),
    ],
)
def test_a_number_or_a_guid_is_text_where_a_string_is_wanted(expression, text):
    action = f"SET sys.Label = {expression}; SET text = {expression}; SET new = 'is ' + ({expression})"
    changes = applied(action, {"@id": UUID(int=7)}, text="", cents=CENTS)
    assert changes.system == {"Label": text}
    assert changes.user == {"text": text, "new": f"is {text}"}


def test_a_boolean_is_appended_as_net_writes_it():
    assert applied("SET a = 'is ' + TRUE + ' or ' + no", no=False).user == {"a": "is True or False"}


@pytest.mark.parametrize(
    ("expression", "column", "details"),
    [
        ("SET sys.TimeToLive = 5", 22, "sys.TimeToLive is a duration of at least 0"),
        ("SET sys.TimeToLive = 'soon'", 22, "such as '00:10:00' or 'PT10M', not 'soon'"),
        ("SET sys.TimeToLive = '-00:10:00'", 22, "sys.TimeToLive is a duration of at least 0"),
        ("SET sys.TimeToLive = -@took", 22, "sys.TimeToLive is a duration of at least 0"),
        ("SET sys.TimeToLive = newid()", 22, "sys.TimeToLive is set to a duration or a string, not to a guid"),
        ("SET sys.TimeToLive = sys.SequenceNumber", 22, "not to an integer"),
        ("SET sys.ScheduledEnqueueTimeUtc = 'tomorrow'", 35, "not 'tomorrow'"),
        ("SET sys.ScheduledEnqueueTimeUtc = @took", 35, "sys.ScheduledEnqueueTimeUtc is a date"),
        ("SET sys.ScheduledEnqueueTimeUtc = sys.EnqueuedTimeUtc + '00:10:00'", 35, "a date + a string is not defined"),
        ("SET sys.Label = TRUE", 17, "sys.Label is a string, not a boolean"),
        ("SET sys.Label = sys.EnqueuedTimeUtc", 17, "not to a date"),
        (f"SET sys.SessionId = '{'x' * 129}'", 21, "sys.SessionId has at most 128 characters, not 129"),
        ("SET a = 1 / 0", 9, "division of an integer by zero"),
        ("SET a = b; SET a = (b + 1) * (1 / 0)", 31, "division of an integer by zero"),
        ("SET a = 9223372036854775807 + 1", 9, "a computed integer does not fit 64 bits"),
        ("SET a = 'a' - 1", 9, "a string - an integer is not defined"),
        ("SET a = 'a' + 'b' * 2", 15, "a string * an integer is not defined"),
        ("SET a = sys.Size - 'a'", 9, "an integer - a string is not defined"),
        ("SET a = newid() + 1", 9, "a guid + an integer is not defined"),
        ("SET a = -'a'", 9, "- a string is not defined"),
        ("SET a = -newid()", 9, "- a guid is not defined"),
        ("SET a = property(5)", 18, "property() takes the name of a property, not an integer"),
        ("SET a = property(newid())", 18, "property() takes the name of a property, not a guid"),
        ("SET a = property(p(5))", 20, "property() takes the name of a property, not an integer"),
    ],
)
def test_an_action_that_fails_on_every_message_has_a_flaw(expression, column, details):
    parameters = {"@took": MINUTE}
    flaw = compile_action(expression, parameters).flaw
    assert flaw is not None
    assert (flaw.line, flaw.column) == (1, column)
    assert details in str(flaw)
    with pytest.raises(ActionError):
        compile_action(expression, parameters).apply(MessageView(FIELDS, {}, None, GIVEN))


GIVEN = {"SequenceNumber": 1, "EnqueuedTimeUtc": NOON, "Size": 10}


@pytest.mark.parametrize(
    "expression",
    [
        "SET sys.TimeToLive = ttl",
        "SET sys.TimeToLive = sys.ReplyTo",
        "SET sys.TimeToLive = NULL",
        "SET sys.TimeToLive = sys.ExpiresAtUtc - sys.EnqueuedTimeUtc",
        "SET sys.ScheduledEnqueueTimeUtc = sys.EnqueuedTimeUtc + @took",
        "SET sys.ScheduledEnqueueTimeUtc = 'x' + missing",
        "SET sys.Label = flag",
        "SET sys.Label = sys.SequenceNumber",
        "SET a = b / 0",
        "SET a = b - 'x'",
        "SET a = 'x' + newid() + sys.SequenceNumber",
        "SET a = property(b)",
        "SET a = property(NULL)",
        "SET a = NULL + 1",
        "REMOVE sys.TimeToLive",
        "REMOVE a",
        "",
    ],
)
def test_an_action_that_may_succeed_has_none(expression):
    action = compile_action(expression, {"@took": MINUTE})
    assert action.flaw is None
    action.apply(MessageView(FIELDS, {}, None, GIVEN))
