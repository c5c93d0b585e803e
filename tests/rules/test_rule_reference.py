"""Any expression has the result that the slow interpreter finds for it."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from broker.rules import FilterError, MessageView, Rule, RuleSet, RuleSyntaxError, compile_action, compile_filter
from broker.rules.syntax import MAX_CHARACTERS
from protocol.codec import Float, Int, Long, Short, Symbol, UInt, encode
from tests.examples import examples
from tests.rules import rule_reference as reference

NAMES = ["a", "b", "c", "d"]
# How a property is written: the reference knows it by that, in lower case.
SPELLINGS = [*NAMES, *map(str.upper, NAMES), "[a]", '"B"', "user.c", "User.[D]", "sys.Label", "sys.[messageid]"]
NAME_OF_SPELLING = {
    spelling.lower(): spelling.lower().removeprefix("user.").strip('["]')
    for spelling in SPELLINGS
    if not spelling.startswith("sys.")
}
SYSTEM = {"sys.label": 3, "sys.[messageid]": 0}

TEXTS = st.text("ab%_!'", max_size=4)
INTEGERS = st.integers(0, 9) | st.sampled_from([2**63 - 1, 2**62, 2**53 + 1])
DOUBLES = st.sampled_from([0.0, 0.5, 1.0, 2.0, 5e-324, 1e308, 2.0**53, 2.0**63, 3.25])
LITERALS = st.builds(lambda value: ("literal", value), st.none() | st.booleans() | INTEGERS | DOUBLES | TEXTS)
PROPERTIES = st.builds(lambda name: ("property", name), st.sampled_from(SPELLINGS))


def _larger(values):
    return (
        st.tuples(st.just("+-"), st.sampled_from("+-"), values, values)
        | st.tuples(st.just("*/%"), st.sampled_from("*/%"), values, values)
        | st.tuples(st.just("sign"), st.sampled_from("+-"), values)
    )


VALUES = st.recursive(LITERALS | PROPERTIES, _larger, max_leaves=5)
STRINGS = st.builds(lambda text: ("literal", text), TEXTS) | PROPERTIES
ESCAPES = st.none() | st.just(("literal", "!")) | PROPERTIES
TESTS = (
    st.tuples(st.just("compare"), st.sampled_from(["=", "<>", "!=", "<", "<=", ">", ">="]), VALUES, VALUES)
    | st.tuples(st.just("like"), st.booleans(), VALUES | STRINGS, STRINGS, ESCAPES)
    | st.tuples(st.just("in"), st.booleans(), VALUES, st.lists(VALUES, min_size=1, max_size=4).map(tuple))
    | st.tuples(st.just("isnull"), st.booleans(), PROPERTIES)
    | st.tuples(st.just("exists"), PROPERTIES.filter(lambda each: not each[1].startswith("sys.")))
)
PREDICATES = st.recursive(
    TESTS,
    lambda smaller: (
        st.tuples(st.just("and"), smaller, smaller)
        | st.tuples(st.just("or"), smaller, smaller)
        | st.tuples(st.just("not"), smaller)
    ),
    max_leaves=6,
)

INTEGER_TYPES = st.builds(Int, st.integers(-9, 9)) | st.builds(Short, st.integers(-9, 9)) | st.builds(
    Long, st.sampled_from([2**63 - 1, -(2**63), 2**53 + 1])
) | st.builds(UInt, st.integers(0, 9))  # fmt: skip
DOUBLE_TYPES = st.sampled_from([0.0, -0.0, 0.5, -1.5, 2.0**53, float("nan"), float("inf"), Float(0.5)])
STRING_TYPES = TEXTS | st.builds(Symbol, TEXTS)
MESSAGES = st.tuples(
    st.dictionaries(st.sampled_from(NAMES), st.none() | st.booleans() | INTEGER_TYPES | DOUBLE_TYPES | STRING_TYPES),
    st.tuples(st.none() | TEXTS, st.none() | TEXTS),
)


def plain(value):
    """Without its AMQP type."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def as_the_reference_sees(user, label, message_id):
    known = {spelling: plain(user[name]) for spelling, name in NAME_OF_SPELLING.items() if name in user}
    return known | {"sys.label": label, "sys.[messageid]": message_id}


def expected(evaluate):
    try:
        return evaluate()
    except reference.NoResult:
        return "error"


def is_refused(expression):
    """LIKE with constants that make no pattern is refused when the rule is made."""
    kind, *parts = expression
    if kind == "like":
        _, _, pattern, escape = parts
        if pattern[0] == "literal" and escape is not None and escape[0] == "literal":
            return expected(lambda: reference.like("", pattern[1], escape[1])) == "error"
        return False
    return kind in ("and", "or", "not") and any(is_refused(part) for part in parts)


@settings(max_examples=examples(400))
@given(PREDICATES, MESSAGES, st.sampled_from(["", " ", "\n  "]))
@example(("and", ("not", ("compare", "=", ("literal", 1), ("literal", 1))), ("isnull", False, ("property", "a"))),
         ({}, (None, None)), " ")  # fmt: skip
def test_a_filter_has_the_result_of_the_reference(expression, message, space):
    user, (label, message_id) = message
    text = reference.text(expression, space=space)
    if len(text) > MAX_CHARACTERS:
        return
    if is_refused(expression):
        with pytest.raises(RuleSyntaxError):
            compile_filter(text)
        return
    view = MessageView(encode([message_id, None, None, label]), encode(user))
    seen = as_the_reference_sees(user, label, message_id)
    filter_ = compile_filter(text)
    result: bool | str | None
    try:
        result = filter_.evaluate(view)
    except FilterError:
        result = "error"
    assert result is expected(lambda: reference.evaluate(expression, seen)), text
    rules = RuleSet()
    rules.add(1, Rule("r", filter_))
    found = [(match.is_plain, bool(match.errors)) for match in rules.match(view)]
    assert found == ([(result is True, result == "error")] if result in (True, "error") else [])
    if filter_.is_always_true or filter_.is_never_true:
        assert filter_.is_always_true is (result is True)


@settings(max_examples=examples(200))
@given(VALUES, MESSAGES)
def test_an_action_sets_the_value_of_the_reference(expression, message):
    user, (label, message_id) = message
    text = reference.text(expression)
    seen = as_the_reference_sees(user, label, message_id)
    wanted = expected(lambda: reference.evaluate(expression, seen))
    action = compile_action(f"SET new = {text}")
    view = MessageView([message_id, None, None, label], user)
    if wanted == "error":
        with pytest.raises(FilterError):
            action.apply(view)
    else:
        value = plain(action.apply(view).user["new"])
        assert (type(value), repr(value)) == (type(wanted), repr(wanted))
        encode(action.apply(view).user)
