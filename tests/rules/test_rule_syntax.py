"""What is refused when a rule is made: where, and in which words; and that nothing else comes of any text."""

import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.rules import FilterError, InvalidRule, MessageView, RuleSyntaxError, compile_action, compile_filter
from broker.rules.syntax import MAX_CHARACTERS, MAX_DEPTH, MAX_STATEMENTS
from tests.examples import examples

A_VALUE = "expected a value (a property, number, string, TRUE, FALSE, NULL, @parameter or function)"

WRONG_FILTERS = [
    # expression, line, column, what was found, details
    ("", 1, 1, "", "expected a condition"),
    ("   ", 1, 4, "", "expected a condition"),
    ("color = ", 1, 9, "", A_VALUE),
    ("color = 'red' AND", 1, 18, "", "expected a condition"),
    ("color = 'red'\nAND size >\n", 3, 1, "", A_VALUE),
    ("color =\n\n  ?", 3, 3, "?", A_VALUE),
    ("color = = 1", 1, 9, "=", A_VALUE),
    ("color == 1", 1, 8, "=", A_VALUE),
    ("a = 1 b", 1, 7, "b", "expected an operator (+, -, *, /, %), AND or OR or the end of the expression"),
    ("a = b = c", 1, 7, "=", "expected AND or OR or the end of the expression"),
    ("a = 1)", 1, 6, ")", "expected the end of the expression"),
    ("(a = 1", 1, 7, "", "expected ')'"),
    ("a IN (1,", 1, 9, "", A_VALUE),
    ("a IN ()", 1, 7, ")", A_VALUE),
    ("a NOT = 1", 1, 7, "=", "expected LIKE or IN"),
    ("a IS 1", 1, 6, "1", "expected NOT or NULL"),
    ("a IS NOT 1", 1, 10, "1", "expected NULL"),
    ("EXISTS(1)", 1, 8, "1", "expected the name of a property"),
    ("a = 'red", 1, 5, "'red", "the string that begins here has no closing '"),
    ("[a = 1", 1, 1, "[", "the name that begins here has no closing ]"),
    ('"a = 1', 1, 1, '"', 'the name that begins here has no closing "'),
    ("[] = 1", 1, 1, "[", "the name of a property is not empty"),
    ('user."" = 1', 1, 6, '"', "the name of a property is not empty"),
    ("and = 1", 1, 1, "and", "expected a condition; and is a reserved word, as a name it is written [and]"),
    ("user.in = 1", 1, 6, "in",
     "expected the name of a property; in is a reserved word, as a name it is written [in]"),
    ("_a = 1", 1, 1, "_a", "expected a condition"),
    ("12abc = 1", 1, 1, "12abc", "expected a condition"),
    ("@ = 1", 1, 1, "@", "expected a condition"),
    ("queue.color = 1", 1, 1, "queue", "there is no such scope; there are sys and user"),
    ("max() = 1", 1, 1, "max", "there is no such function; there are newid(), property(name) and p(name)"),
    ("a = newid(1)", 1, 11, "1", "newid() takes no argument"),
    ("p() = 1", 1, 1, "p", "p() takes the name of a property"),
    ("a = @b", 1, 5, "@", "the parameter has no value; the rule's parameters: none"),
    ("isUrgent", 1, 1, "isUrgent",
     "a condition is expected here, and this is a value; compare it, as in isUrgent = TRUE"),
    ("a = 1 AND b", 1, 11, "b", "a condition is expected here, and this is a value; compare it, as in isUrgent = TRUE"),
    ("NOT a", 1, 5, "a", "a condition is expected here, and this is a value; compare it, as in isUrgent = TRUE"),
    ("TRUE", 1, 1, "TRUE", "a condition is expected here, and this is a value; compare it, as in isUrgent = TRUE"),
    ("(a = 1) = TRUE", 1, 2, "a", "a value is expected here, and this is a condition"),
    ("1 + (a = 1) = 2", 1, 6, "a", "a value is expected here, and this is a condition"),
    ("a IN (1, (b = 1))", 1, 11, "b", "a value is expected here, and this is a condition"),
    ("a = 1e999", 1, 5, "1e999", "the number is too large for a double"),
    ("a = 9223372036854775808", 1, 5, "9223372036854775808", "the integer does not fit 64 bits"),
    ("a = 99999999999999999999", 1, 5, "99999999999999999999", "the integer does not fit 64 bits"),
    ("a = -9223372036854775809", 1, 6, "9223372036854775809", "the integer does not fit 64 bits"),
    ("a LIKE 5", 1, 8, "5", "the pattern of LIKE is a string, not an integer"),
    ("a LIKE 'b' ESCAPE 'cd'", 1, 19, "'cd'", "ESCAPE takes one character, not 'cd'"),
    ("a LIKE 'b!' ESCAPE '!'", 1, 20, "'!'", "the pattern of LIKE ends with its ESCAPE character"),
]  # fmt: skip

WRONG_ACTIONS = [
    ("color", 1, 1, "color", "expected SET or REMOVE"),
    ("SET", 1, 4, "", "expected the name of a property"),
    ("SET a", 1, 6, "", "expected '='"),
    ("SET a =", 1, 8, "", A_VALUE),
    ("SET a = 1,", 1, 10, ",", "expected SET or REMOVE, ';' or the end of the expression"),
    ("SET a = 1;; REMOVE b", 1, 11, ";", "expected SET or REMOVE or the end of the expression"),
    ("SET a = b > 1", 1, 11, ">", "expected SET or REMOVE, ';' or the end of the expression"),
    ("SET a = (b > 1)", 1, 10, "b", "a value is expected here, and this is a condition"),
    ("REMOVE 1", 1, 8, "1", "expected the name of a property"),
    ("SET sys.color = 1", 1, 9, "color", None),
    ("SET sys.SequenceNumber = 1", 1, 5, "sys", None),
    ("REMOVE sys.EnqueuedTimeUtc", 1, 8, "sys", None),
    ("a = 1", 1, 1, "a", "expected SET or REMOVE"),
]


def mistake(compile_, expression) -> RuleSyntaxError:
    with pytest.raises(RuleSyntaxError) as caught:
        compile_(expression)
    return caught.value


@pytest.mark.parametrize(("expression", "line", "column", "found", "details"), WRONG_FILTERS)
def test_a_wrong_filter_is_refused_with_its_position_and_what_was_expected(expression, line, column, found, details):
    error = mistake(compile_filter, expression)
    assert (error.line, error.column, error.found, error.details) == (line, column, found, details)


@pytest.mark.parametrize(("expression", "line", "column", "found", "details"), WRONG_ACTIONS)
def test_a_wrong_action_is_refused_with_its_position_and_what_was_expected(expression, line, column, found, details):
    error = mistake(compile_action, expression)
    assert (error.line, error.column, error.found) == (line, column, found)
    assert details is None or error.details == details


def test_an_unknown_system_property_is_answered_with_those_there_are():
    error = mistake(compile_filter, "sys.Colour = 1")
    assert (error.column, error.found) == (5, "Colour")
    assert re.search(r"\bContentType, CorrelationId\b.*\bViaPartitionKey$", error.details)


def test_a_read_only_system_property_is_answered_with_those_that_are_not():
    error = mistake(compile_action, "SET sys.SequenceNumber = 1")
    assert error.details.startswith("sys.SequenceNumber is read-only; an action may change sys.ContentType, ")


def test_the_text_of_the_error_has_the_form_of_the_services_own():
    assert str(mistake(compile_filter, "a = 1 b")) == (
        "There was an error parsing the SQL expression. [Token line=1, column=7, Token in error=b, Additional details="
        "expected an operator (+, -, *, /, %), AND or OR or the end of the expression]"
    )


def test_a_parameter_without_value_is_answered_with_those_that_have_one():
    with pytest.raises(RuleSyntaxError, match="the rule's parameters: @b, @c"):
        compile_filter("a = @d", {"@c": 1, "b": 2})


# --- limits -----------------------------------------------------------------------------------------------------------


def test_an_expression_has_at_most_1024_characters():
    longest = "a = '" + "x" * (MAX_CHARACTERS - 6) + "'"
    assert not compile_filter(longest).matches(MessageView())
    assert mistake(compile_filter, longest + " ").details == (
        "an expression has at most 1024 characters, this one has 1025"
    )
    assert mistake(compile_action, " " * 1025).column == 1025
    assert len(str(mistake(compile_filter, "x" * 1_000_000))) < 300


def test_operators_nest_to_a_limit():
    deepest = "-" * (MAX_DEPTH - 2) + "a = 1"
    assert compile_filter(deepest).evaluate(MessageView(None, {"a": 1})) is True
    assert "nested in more than 50 levels" in mistake(compile_filter, "-" + deepest).details


def test_chains_and_parentheses_do_not_nest():
    view = MessageView(None, {"a": 1})
    assert compile_filter("(" * 400 + "a = 1" + ")" * 400).matches(view)
    assert compile_filter("a=1" + " AND a=1" * 120).matches(view)
    assert compile_filter("a=2 OR " * 120 + "a=1").matches(view)
    assert compile_filter("a" + "+a" * 500 + "=501").matches(view)
    assert compile_filter("a IN (" + "2," * 500 + "1)").matches(view)


@pytest.mark.parametrize(
    "expression",
    ["NOT " * 250 + "a=1", "-" * 1000 + "1=1", "- " * 500 + "1=1", "p(" * 500, "p(" * 240 + "'a'" + ")" * 240 + "=1",
     "(-" * 300 + "1" + ")" * 300 + "=1", "(NOT " * 150 + "a=1" + ")" * 150, "a+(" * 250 + "1" + ")" * 250 + "=1",
     "(a=1 AND " * 80 + "a=1" + ")" * 80, "(" * 1024, "[" * 1024, "'" * 1023, "1" * 1024, "a" * 1024, "\x00", "\ud800"],
)  # fmt: skip
def test_hostile_text_is_refused_with_a_position(expression):
    limit = sys.getrecursionlimit()
    error = mistake(compile_filter, expression)
    assert error.line == 1
    assert 1 <= error.column <= len(expression) + 1
    assert sys.getrecursionlimit() == limit


def test_an_action_has_at_most_32_statements():
    assert not compile_action("REMOVE a;" * MAX_STATEMENTS).is_empty
    error = mistake(compile_action, "REMOVE a;" * (MAX_STATEMENTS + 1))
    assert (error.column, error.details) == (9 * 32 + 1, "an action has at most 32 statements")


WORDS = st.sampled_from([
    "a", "b", "sys", "user", ".", ",", ";", "(", ")", "[", "]", '"', "'", "@p", "@", "+", "-", "*", "/", "%", "=", "<>",
    "!=", "<", "<=", ">", ">=", "AND", "OR", "NOT", "IN", "LIKE", "ESCAPE", "IS", "NULL", "EXISTS", "TRUE", "FALSE",
    "SET", "REMOVE", "newid", "property", "p", "1", "2.5", "1e5", "0x1", "'x'", "[y]", '"z"', "sys.Label", "!", "\\",
    "é", "日", "\n",
])  # fmt: skip


@settings(max_examples=examples(400))
@given(st.lists(WORDS, max_size=30).map(" ".join) | st.lists(WORDS, max_size=30).map("".join) | st.text(max_size=40))
def test_any_text_is_a_rule_or_refused(text):
    for compile_ in (compile_filter, compile_action):
        try:
            rule = compile_(text, {"@p": 1})
        except InvalidRule:
            continue
        try:
            rule.matches(MessageView()) if compile_ is compile_filter else rule.apply(MessageView())
        except FilterError:
            continue
