"""Rules between the wire and the partition."""

import pytest

from broker.errors import InvalidArgument
from broker.gateway.nodes.rules import rule_document, rule_of_document
from protocol.codec import Described, Int, Long, Symbol, ULong, encode
from protocol.nodes.rule_operations import CorrelationFilter, Rule, SqlFilter

PROPERTIES = {"n": Int(1), "s": "x", "p": Described(Symbol("com.microsoft:timespan"), Long(5))}


@pytest.mark.parametrize(
    "rule",
    [
        Rule("r", True),
        Rule("r", False),
        Rule("r", SqlFilter("a = 1"), "SET b = 2"),
        Rule("r", CorrelationFilter(label="x", reply_to_session_id="y", properties=PROPERTIES), "REMOVE n"),
    ],
)
def test_a_rule_comes_back_as_it_was_added(rule):
    document = {**rule_document(rule), "created_ms": 7}
    found, created_ms = rule_of_document(document)
    assert (found, created_ms) == (rule, 7)


def test_values_keep_their_types():
    document = rule_document(Rule("r", CorrelationFilter(properties=PROPERTIES)))
    assert document["filter"]["properties"] == {name: encode(value) for name, value in PROPERTIES.items()}


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Rule("x" * 51), "The rule's name is not valid: it must be 1 to 50 characters other than / "),
        (Rule("a/b"), "The rule's name is not valid: it must be 1 to 50 characters other than / "),
        (Rule("r", SqlFilter("x" * 1025)), "expression: String should have at most 1024 characters"),
        (Rule("r", True, "x" * 1025), "expression: String should have at most 1024 characters"),
        (Rule("r", CorrelationFilter()), "has no condition"),
        (Rule("r", CorrelationFilter(properties={"": b"x"})), "properties.: must be a string, int, long"),
        (
            Rule("r", CorrelationFilter(properties={"n": ULong(2**63)})),
            "properties.n: must be a whole number of 64",
        ),
        (Rule("r", CorrelationFilter(properties=dict.fromkeys(map(str, range(257)), 1))), "properties: "),
    ],
)
def test_a_rule_out_of_limits_is_refused_with_the_field(rule, text):
    with pytest.raises(InvalidArgument) as raised:
        rule_document(rule)
    assert text in str(raised.value)
