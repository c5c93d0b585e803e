"""Rule operations as SDKs write and read them (amqp.md 8.4 and 9)."""

from typing import Any
from uuid import UUID

import pytest

from protocol import conditions
from protocol.client.messages import Message
from protocol.codec import (
    Described,
    Int,
    Long,
    Symbol,
    Timestamp,
    ULong,
    encode,
)
from protocol.nodes import management
from protocol.nodes.management import AddRule, ArgumentError, ArgumentOutOfRange, EnumerateRules, RemoveRule
from protocol.nodes.request_message import Request
from protocol.nodes.rule_operations import CorrelationFilter, Rule, SqlFilter


def request(operation: str, body: object) -> Request:
    return Request(message_id="1", reply_to="me", properties={"operation": f"com.microsoft:{operation}"}, body=body)


def parsed(operation: str, body: object) -> object:
    return management.parse(request(operation, body)).arguments


def added(**description: object) -> Rule:
    body = {"rule-name": "r", "rule-description": {key.replace("_", "-"): value for key, value in description.items()}}
    arguments = parsed("add-rule", body)
    assert isinstance(arguments, AddRule)
    return arguments.rule


SQL = {"expression": "a = 1"}


@pytest.mark.parametrize(
    ("description", "rule"),
    [
        ({}, Rule("r", True)),
        ({"sql_filter": SQL}, Rule("r", SqlFilter("a = 1"))),
        ({"sql_filter": {"expression": "1=1"}}, Rule("r", SqlFilter("1=1"))),
        ({"sql_filter": None, "correlation_filter": None, "sql_rule_action": None}, Rule("r", True)),
        (
            {"sql_filter": SQL, "sql_rule_action": {"expression": "SET a = 1"}},
            Rule("r", SqlFilter("a = 1"), "SET a = 1"),
        ),
        ({"sql_rule_action": {"expression": " "}}, Rule("r")),
        ({"sql_rule_action": {}}, Rule("r")),
        ({"sql_filter": {Symbol("expression"): b"a = 1"}}, Rule("r", SqlFilter("a = 1"))),
        ({"correlation_filter": {}}, Rule("r", CorrelationFilter())),
        (
            {"correlation_filter": {"label": "x", "to": None, "properties": {"n": Int(1)}}},
            Rule("r", CorrelationFilter(label="x", properties={"n": Int(1)})),
        ),
        ({"rule_name": "other", "colour": "red"}, Rule("r")),
    ],
)
def test_a_rule_to_add_is_read(description, rule):
    assert added(**description) == rule


def test_each_field_of_a_correlation_filter_is_read_from_its_key():
    names = (
        "correlation-id", "message-id", "to", "reply-to", "label", "session-id", "reply-to-session-id", "content-type",
    )  # fmt: skip
    texts: dict[str, Any] = {name.replace("-", "_"): name for name in names}
    described = added(correlation_filter={name: name for name in names}).filter
    assert described == CorrelationFilter(**texts)


def test_the_name_may_be_in_the_description_only():
    assert parsed("add-rule", {"rule-description": {"rule-name": "r"}}) == AddRule(Rule("r"))


@pytest.mark.parametrize(
    ("operation", "body", "named"),
    [
        ("add-rule", {"rule-description": {}}, "'rule-name' is missing"),
        ("add-rule", {"rule-name": "", "rule-description": {}}, "'rule-name' is missing"),
        ("add-rule", {"rule-name": 5}, "'rule-name' is not a string"),
        ("add-rule", {"rule-name": "r", "rule-description": [1]}, "'rule-description' is not a map"),
        ("add-rule", {"rule-name": "r", "rule-description": {"sql-filter": "x"}}, "'sql-filter' is not a map"),
        ("add-rule", {"rule-name": "r", "rule-description": {"sql-filter": {}}}, "'expression' is missing"),
        (
            "add-rule",
            {"rule-name": "r", "rule-description": {"sql-filter": {"expression": 1}}},
            "is not a string",
        ),
        ("add-rule", {"rule-name": "r", "rule-description": {"sql-rule-action": 1}}, "'sql-rule-action' is not a map"),
        (
            "add-rule",
            {"rule-name": "r", "rule-description": {"sql-filter": SQL, "correlation-filter": {"label": "x"}}},
            "a rule has one filter",
        ),
        (
            "add-rule",
            {"rule-name": "r", "rule-description": {"correlation-filter": {"message-id": 5}}},
            "'message-id' is not a string",
        ),
        (
            "add-rule",
            {"rule-name": "r", "rule-description": {"correlation-filter": {"properties": {5: "x"}}}},
            "'properties' is not a map with names",
        ),
        ("remove-rule", {}, "'rule-name' is missing"),
        ("remove-rule", {"rule-name": ""}, "'rule-name' is empty"),
        ("enumerate-rules", {"skip": "0"}, "'skip' is not an integer"),
    ],
)
def test_a_wrong_argument_is_named(operation, body, named):
    with pytest.raises(ArgumentError) as raised:
        parsed(operation, body)
    assert named in str(raised.value)
    assert raised.value.condition == conditions.ARGUMENT_ERROR


@pytest.mark.parametrize("body", [{"skip": Int(-1)}, {"top": Int(0)}, {"top": Int(-5)}])
def test_a_page_out_of_range_is_refused(body):
    with pytest.raises(ArgumentOutOfRange):
        parsed("enumerate-rules", body)


def test_pages_and_removals_are_read():
    assert parsed("remove-rule", {"rule-name": "$Default"}) == RemoveRule("$Default")
    assert parsed("enumerate-rules", {"skip": Long(5), "top": Int(10)}) == EnumerateRules(5, 10)
    assert parsed("enumerate-rules", {}) == EnumerateRules(0, 100)


def response(encoded: bytes) -> tuple[dict[str, object], object]:
    message = Message.decode(encoded)
    return message.application_properties, message.content()


def described(rule: Rule) -> Described:
    encoded = management.encode_rules(request("enumerate-rules", {}), [(rule, 7)])
    properties, body = response(encoded)
    assert properties["statusCode"] == 200
    [item] = body["rules"]
    assert list(item) == ["rule-description"]
    return item["rule-description"]


EMPTY_ACTION = Described(ULong(1335734829061), [])


@pytest.mark.parametrize(
    ("rule", "filter_", "action"),
    [
        (Rule("r", True), Described(ULong(83483426823), []), EMPTY_ACTION),
        (Rule("r", False), Described(ULong(83483426824), []), EMPTY_ACTION),
        (
            Rule("r", SqlFilter("1=1"), "SET a = 1"),
            Described(ULong(83483426822), ["1=1", Int(20)]),
            Described(ULong(1335734829062), ["SET a = 1", Int(20)]),
        ),
        (
            Rule("r", CorrelationFilter("a", "b", "c", "d", "e", "f", "g", "h", {"p": UUID(int=1)})),
            Described(ULong(83483426825), ["a", "b", "c", "d", "e", "f", "g", "h", {"p": UUID(int=1)}]),
            EMPTY_ACTION,
        ),
    ],
)
def test_a_rule_is_described_by_numbers_and_always_has_an_action(rule, filter_, action):
    found = described(rule)
    assert (type(found.descriptor), found.descriptor) == (ULong, 1335734829060)
    assert encode(found.value) == encode([filter_, action, "r", Timestamp(7)])


def test_no_rules_are_no_content():
    properties, body = response(management.encode_rules(request("enumerate-rules", {}), []))
    assert (properties["statusCode"], body) == (204, {})
    assert "errorCondition" not in properties


def test_more_rules_than_fit_are_refused_rather_than_left_out():
    rules = [(Rule(f"rule-{number}"), 7) for number in range(100)]
    properties, body = response(management.encode_rules(request("enumerate-rules", {}), rules, 1000))
    assert (properties["statusCode"], properties["errorCondition"]) == (403, "amqp:link:message-size-exceeded")
    assert body == {}
