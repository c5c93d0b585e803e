"""Which equalities a topic looks up before it tries a filter."""

import pytest

from broker.rules import CorrelationFilter, MessageView, Rule, RuleSet, compile_filter
from broker.rules.guards import MAX_GUARDS, Condition, Guard
from protocol.codec import Described, encode

COLOR, SIZE, LABEL = Condition(False, "color"), Condition(False, "size"), Condition(True, "label")


def guards(expression, **parameters):
    return compile_filter(expression, parameters).guards


def guard(**values):
    return Guard.of({{"color": COLOR, "size": SIZE, "label": LABEL}[name]: value for name, value in values.items()})


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("color = 'red'", [guard(color="red")]),
        ("'red' = [Color]", [guard(color="red")]),
        ("sys.Label = 'a' OR sys.Subject = 'a'", [guard(label="a")]),
        ("size = -2", [guard(size=-2)]),
        ("color = 'red' AND size > 3", [guard(color="red")]),
        ("size > 3 AND (color = 'red' AND sys.Label = 'a')", [guard(color="red", label="a")]),
        ("color IN ('red', 'blue', NULL)", [guard(color="red"), guard(color="blue")]),
        ("color IN ('red', 'blue') AND size = 1", [guard(size=1)]),
        ("color IN ('red', 'blue') AND size IN (1, 2, 3)", [guard(color="red"), guard(color="blue")]),
        ("color = 'red' OR size > 3 AND sys.Label = 'a'", [guard(color="red"), guard(label="a")]),
        ("color = 'red' AND NOT size = 3", [guard(color="red")]),
        ("color = 'red' AND sys.Label LIKE 'a%'", [guard(color="red")]),
        ("color = 'red' AND size = size", [guard(color="red")]),
        ("color = 'red' AND color = 'blue'", []),
        ("color = 'red' AND size = NULL", []),
        ("color IN (NULL)", []),
    ],
)
def test_one_of_the_guards_holds_for_each_message_that_the_filter_takes(expression, expected):
    assert guards(expression) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "size > 3",
        "color <> 'red'",
        "NOT color = 'red'",
        "color NOT IN ('red')",
        "color = size",
        "color IN ('red', size)",
        "color IS NULL",
        "EXISTS (color)",
        "color LIKE 'red'",
        "color = 'red' OR size > 3",
    ],
)
def test_a_filter_that_other_messages_pass_has_no_guards(expression):
    assert guards(expression) is None


@pytest.mark.parametrize(
    "expression",
    [
        "color = 'red' AND size + 1 = 2",
        "color = 'red' AND -size = 2",
        "color = 'red' AND property(size) = 2",
        "color = 'red' AND sys.Label LIKE size",
        "color = 'red' AND sys.Label LIKE 'a' ESCAPE size",
        "color = 'red' AND NOT (size / 0 = 1 OR size IN (size * 2))",
    ],
)
def test_a_filter_that_may_fail_has_no_guards(expression):
    assert guards(expression) is None


def test_parameters_are_constants():
    assert guards("color = @c", c="red") == [guard(color="red")]
    assert guards("color = @c", c=None) == guards("color = @c", c=float("nan")) == []


def test_a_filter_has_a_limited_number_of_guards():
    listed = ", ".join(map(str, range(MAX_GUARDS)))
    assert len(guards(f"size IN ({listed})")) == MAX_GUARDS
    assert guards(f"size IN ({listed}, {MAX_GUARDS})") is None


def test_correlation_filters_are_found_and_never_tried_also_for_properties_that_are_null():
    rules = RuleSet()
    for at in range(100):
        rules.add(at, Rule("r", CorrelationFilter(properties={"color": f"c{at}", "gone": None})))
    rules.add("null", Rule("r", CorrelationFilter(properties={"gone": None})))
    rules.add("set", Rule("r", CorrelationFilter(properties={"gone": True})))
    for properties, takers in (
        ({"color": "c7"}, [7, "null"]),
        ({"color": "c7", "Gone": None}, [7, "null"]),
        ({"color": "c7", "gone": True}, ["set"]),
        ({"color": "c7", "gone": False}, []),
        ({}, ["null"]),
    ):
        message = MessageView(application_properties=encode(Described(0x74, properties)))
        assert [match.subscription for match in rules.match(message)] == takers
        assert message.tried == 0
    rules.remove("null", "r")
    assert not rules.match(MessageView())


def test_only_filters_with_a_guard_that_holds_are_tried():
    rules = RuleSet()
    for at in range(1000):
        rules.add(at, Rule("r", compile_filter(f"color = 'c{at}' AND size > {at} OR sys.Label = 'l{at}'")))
    rules.add("unguarded", Rule("r", compile_filter("size > 5000")))
    view = MessageView(encode([None, None, None, "l7"]), encode({"color": "c9", "size": 1}))
    assert [match.subscription for match in rules.match(view)] == [7]
    assert view.tried == 3


def test_a_filter_fails_on_a_section_that_it_reads_and_its_guards_do_not():
    rules = RuleSet()
    rules.add(1, Rule("r", compile_filter("sys.Label > 'a' AND color = 'red'")))
    rules.add(2, Rule("r", compile_filter("color = 'red'")))
    [match] = rules.match(MessageView(b"\xff", encode({"color": "blue"})))
    assert match.subscription == 1
    assert match.errors
    rules.remove(1, "r")
    assert rules.match(MessageView(b"\xff", encode({"color": "blue"}))) == ()
