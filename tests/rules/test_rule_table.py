import pytest

from broker.rules import FilterError, MessageView, RuleSyntaxError, compile_filter
from protocol.codec import encode
from tests.rules.rule_table import MESSAGE, PARAMETERS, PROPERTIES, ROWS, USER, E, S


def result(expression, message):
    try:
        filter_ = compile_filter(expression, PARAMETERS)
    except RuleSyntaxError:
        return S
    try:
        return filter_.evaluate(message)
    except FilterError:
        return E


@pytest.mark.parametrize(("expression", "expected"), ROWS)
def test_an_expression_has_the_documented_result(expression, expected):
    assert result(expression, MESSAGE) is expected


@pytest.mark.parametrize(("expression", "expected"), ROWS)
def test_a_filter_matches_when_its_result_is_true_and_only_then(expression, expected):
    if expected == S:
        with pytest.raises(RuleSyntaxError):
            compile_filter(expression, PARAMETERS)
    elif expected == E:
        with pytest.raises(FilterError):
            compile_filter(expression, PARAMETERS).matches(MESSAGE)
    else:
        assert compile_filter(expression, PARAMETERS).matches(MESSAGE) is (expected is True)


def test_an_encoded_message_has_the_results_of_the_decoded_one():
    annotations = b"".join(encode(item) for pair in MESSAGE._annotations.items() for item in pair)
    message = MessageView(encode(PROPERTIES), encode(USER), annotations, MESSAGE._given)
    rows = [(expression, expected) for expression, expected in ROWS if "newid" not in expression.lower()]
    assert [(expression, result(expression, message)) for expression, _ in rows] == rows


def test_the_table_is_as_large_as_the_language_asks_for():
    assert len({expression for expression, _ in ROWS}) == len(ROWS) >= 250
