"""A filter that fails on every message is known by its expression alone."""

import pytest
from hypothesis import given, settings

from broker.rules import FilterError, MessageView, Rule, RuleSet, TrueFilter, compile_action, compile_filter
from broker.rules.syntax import MAX_CHARACTERS
from protocol.codec import Timestamp
from tests.examples import examples
from tests.rules import rule_reference as reference
from tests.rules.rule_table import MESSAGE, PARAMETERS, ROWS, E, S
from tests.rules.test_rule_reference import MESSAGES, PREDICATES

GIVEN = {"SequenceNumber": 1, "EnqueuedTimeUtc": Timestamp(0), "Size": 1}


@pytest.mark.parametrize(
    ("expression", "details"),
    [
        ("1 / 0 = 1", "division of an integer by zero"),
        ("color = 1 % 0", "division of an integer by zero"),
        ("NOT 1 / 0 = 1", "division of an integer by zero"),
        ("1 / 0 = 1 OR color = 'red'", "division of an integer by zero"),
        ("1 / 0 = 1 AND color = 'red'", "division of an integer by zero"),
        ("color LIKE 'r' - 'd'", "a string - a string is not defined"),
        ("1 / 0 IN (1, 2)", "division of an integer by zero"),
        ("property(5) = 1", "property() takes the name of a property, not an integer"),
        ("1 + 'a' = '1a'", "an integer + a string is not defined"),
        ("sys.SequenceNumber + 'a' = '1a'", "an integer + a string is not defined"),
        ("sys.EnqueuedTimeUtc > sys.EnqueuedTimeUtc + 'PT1H'", "a date + a string is not defined"),
        ("sys.EnqueuedTimeUtc + 5 > @noon", "a date + an integer is not defined"),
        ("-sys.EnqueuedTimeUtc > @noon", "- a date is not defined"),
        ("newid() + 1 = 1", "a guid + an integer is not defined"),
    ],
)
def test_a_filter_that_fails_on_every_message_has_a_flaw(expression, details):
    flaw = compile_filter(expression, PARAMETERS).flaw
    assert flaw is not None
    assert details in str(flaw)
    with pytest.raises(FilterError):
        compile_filter(expression, PARAMETERS).evaluate(MessageView(None, {"color": "r"}, None, GIVEN))


@pytest.mark.parametrize(("expression", "expected"), ROWS)
def test_an_expression_with_a_result_for_some_message_has_none(expression, expected):
    if expected not in (E, S):
        assert compile_filter(expression, PARAMETERS).flaw is None


@settings(max_examples=examples(300))
@given(PREDICATES, MESSAGES)
def test_a_filter_with_a_flaw_fails_on_any_message(expression, message):
    text = reference.text(expression)
    if len(text) > MAX_CHARACTERS:
        return
    user, (label, message_id) = message
    try:
        filter_ = compile_filter(text)
    except ValueError:
        return
    if filter_.flaw is not None:
        with pytest.raises(FilterError):
            filter_.evaluate(MessageView([message_id, None, None, label], user, None, GIVEN))


def test_a_rule_has_the_flaw_of_its_filter_or_its_action():
    assert Rule("r", TrueFilter()).flaw is None
    assert Rule("r", compile_filter("1 = 1"), compile_action("SET a = 1")).flaw is None
    assert Rule("r", compile_filter("1 / 0 = 1"), compile_action("SET a = 1")).flaw is not None
    assert Rule("r", TrueFilter(), compile_action("SET a = 1 / 0")).flaw is not None


def test_a_rule_with_a_flaw_goes_on_failing():
    rules = RuleSet()
    rules.add(1, Rule("r", compile_filter("1 / 0 = 1")))
    [match] = rules.match(MESSAGE)
    assert [str(error) for _, error in match.errors] == ["division of an integer by zero"]
