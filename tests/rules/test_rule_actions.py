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
        ("5", "6", Long(6)),
        (Int(5), "'6'", "6"),
        (True, "1", Long(1)),
        (Int(1), "TRUE", True),
        (None, "1", Long(1)),
        (NOON, "5", Long(5)),
        (Int(1), "NULL", None),
    ],
)
def test_an_existing_property_keeps_its_type_if_that_loses_nothing(existing, expression, value):
    assert typed(applied(f"SET a = {expression}", a=existing).user["a"]) == typed(value)


def test_decimals_stay_decimals():
    cents = Decimal64((396 << 53 | 1999).to_bytes(8, "big"))  # 19.99
    value = applied("SET a = a * 2", a=cents).user["a"]
    assert typed(value) == typed(Decimal128(((6176 - 2) << 113 | 3998).to_bytes(16, "big")))
    assert typed(applied("SET a = 20", a=cents).user["a"]) == typed(Decimal128((6176 << 113 | 20).to_bytes(16, "big")))


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
        ("SET sys.Label = 1.5", "sys.Label is a string, not a double"),
        ("SET sys.Label = TRUE", "sys.Label is a string, not a boolean"),
        ("SET sys.TimeToLive = 5", "sys.TimeToLive is a duration of at least 0, not an integer"),
        ("SET sys.TimeToLive = -@took", "sys.TimeToLive is a duration of at least 0"),
        ("SET sys.ScheduledEnqueueTimeUtc = 'now'", "sys.ScheduledEnqueueTimeUtc is a date, not a string"),
        ("SET sys.SessionId = long", "sys.SessionId has at most 128 characters, not 129"),
        ("SET sys.MessageId = long", "sys.MessageId has at most 128 characters"),
        ("SET a = 1 / 0", "division of an integer by zero"),
        ("SET a = 'a' + 1", "a string + an integer is not defined"),
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
