"""What the rules of a topic may cost together for one message: steps are counted, not seconds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.rules import ActionError, FilterError, MessageView, Rule, RuleSet, compile_action, compile_filter
from broker.rules.like import like
from tests.examples import examples
from tests.rules import rule_reference as reference

LONG = "a" * 32_768


def spent(view):
    return MessageView().steps_left - view.steps_left


def topic_with(*expressions):
    rules = RuleSet()
    filters = {expression: compile_filter(expression) for expression in set(expressions)}
    for number, expression in enumerate(expressions):
        rules.add(number, Rule("r", filters[expression]))
    return rules


def failed(matches):
    return [match.subscription for match in matches if match.errors]


@pytest.mark.parametrize(
    ("pattern", "least"),
    [
        ("%a" * 500 + "b", 0),
        ("%" * 1000 + "b", 0),
        ("%_" * 500 + "b", 0),
        ("%" + "a" * 500 + "b%", 32_000),
        ("a%" * 500 + "b", 0),
        ("%" + "_" * 1000 + "b", 0),
        ("%" + "_" * 1000 + "b%", 31_000),
        ("%" + "a_" * 500 + "b%", 31_000),
    ],
)
def test_a_pattern_costs_what_the_text_is_long_and_not_a_multiple_of_it(pattern, least):
    view = MessageView(None, {"p": LONG})
    assert compile_filter("p LIKE @pattern", {"pattern": pattern}).evaluate(view) is False
    assert least <= spent(view) < 2 * len(LONG)


def test_a_hundred_patterns_of_single_characters_all_have_a_result():
    rules = topic_with(*[f"p LIKE '%{'_' * (900 + n)}b%'" for n in range(100)])
    view = MessageView(None, {"p": LONG})
    assert rules.match(view) == ()
    assert spent(view) < 101 * len(LONG)
    last = MessageView(None, {"p": LONG[:-1] + "b"})
    assert len(rules.match(last)) == 100


@pytest.mark.parametrize(
    "expensive",
    [
        "p LIKE '%a_____c_____b%'",  # what is searched first is everywhere, and what comes next nowhere near
        "p LIKE q",
        "p + p LIKE 'x%'",
        "property(p) = 1",
    ],
)
def test_rules_that_exceed_the_steps_of_a_message_are_a_filter_error(expensive):
    rules = topic_with("color = 'red'", *[expensive] * 2_000, "color LIKE 'r%'")
    text = "a____________" + "a" * 9_000 + "c_____d_____b"
    view = MessageView(None, {"p": text, "q": "%" + "_a" * 500 + "%c", "color": "red"})
    matches = rules.match(view)
    assert matches[0].is_plain
    assert not matches[0].errors
    errors = [error for match in matches for _, error in match.errors]
    assert errors
    assert all("steps" in str(error) and "4,000,000" in str(error) for error in errors)
    assert spent(view) < 1.1 * MessageView().steps_left
    assert rules.match(MessageView(None, {"color": "red"}))[-1].is_plain  # the next message has its own


def test_the_length_of_expressions_counts_where_a_topic_has_very_many_of_them():
    long = " OR ".join(["a*a*a*a*a*a*a*a+b = 1"] * 40)
    rules = topic_with(*[long] * 2_000)
    view = MessageView(None, {"a": 7, "b": 1})
    assert 0 < len(failed(rules.match(view))) < 2_000
    few = topic_with(*[long] * 50)
    assert failed(few.match(MessageView(None, {"a": 7, "b": 1}))) == []


def test_actions_have_what_filters_left():
    rule = Rule("r", compile_filter("a = 1"), compile_action("; ".join(["SET x = p + p"] * 32)))
    view = MessageView(None, {"a": 1, "p": LONG[:16_000]})
    rule.action.apply(view)
    assert spent(view) > 32 * 32_000
    view.spend(view.steps_left - 31 * 32_000)
    with pytest.raises(ActionError, match="steps"):
        rule.action.apply(view)


@settings(max_examples=examples(1_000))
@given(st.text("ab", max_size=12), st.text("ab%_!", max_size=12), st.none() | st.just("!"))
def test_a_pattern_matches_what_the_table_of_all_its_ends_does(text, pattern, escape):
    try:
        expected = reference.like(text, pattern, escape)
    except reference.NoResult:
        with pytest.raises(FilterError):
            like(pattern, escape)
        return
    view = MessageView(None, {"t": text, "p": pattern, "e": escape})
    expression = "t LIKE p" if escape is None else "t LIKE p ESCAPE e"
    assert compile_filter(expression).evaluate(view) is expected
