"""Translates rules as clients describe them to rule documents, and back."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from broker.errors import InvalidArgument
from broker.namespace import names
from broker.namespace.rule_descriptions import (
    CorrelationFilter,
    FalseFilter,
    RuleDescription,
    RuleValue,
    SqlAction,
    SqlFilter,
    TrueFilter,
)
from protocol.codec import decode_exactly
from protocol.nodes import rule_operations as wire


def rule_document(rule: wire.Rule) -> dict[str, Any]:
    """The document of a rule to add; the partition sets its time of creation. Raises InvalidArgument."""
    try:
        action = None if rule.action is None else SqlAction(expression=rule.action)
        return RuleDescription(name=rule.name, filter=_filter(rule.filter), action=action).document(0)
    except ValidationError as error:
        raise _invalid(error) from None


def described_rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `rule_document` does, for a rule with the configuration file's fields. Raises InvalidArgument."""
    try:
        return RuleDescription.model_validate(rule).document(0)
    except ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: ValidationError) -> InvalidArgument:
    [first, *_] = error.errors(include_url=False)
    place = ".".join(map(str, first["loc"]))
    if place == "name" and first["type"] != "missing":
        return InvalidArgument(names.refusal("rule", first))
    return InvalidArgument(f"The rule is not valid: {f'{place}: ' if place else ''}{first['msg']}.")


def _filter(described: bool | wire.SqlFilter | wire.CorrelationFilter) -> Any:
    if isinstance(described, bool):
        return TrueFilter() if described else FalseFilter()
    if isinstance(described, wire.SqlFilter):
        return SqlFilter(expression=described.expression)
    fields = {name: getattr(described, name) for name in wire.FIELDS}
    return CorrelationFilter(**fields, properties=_values(described.properties))


def _values(properties: Mapping[str, Any]) -> dict[str, RuleValue]:
    values = {}
    for name, value in properties.items():
        try:
            values[name] = RuleValue.of_amqp(value)
        except ValueError as error:
            raise InvalidArgument(f"The rule is not valid: properties.{name[:100]}: {error}.") from None
    return values


def rule_of_document(document: Mapping[str, Any]) -> tuple[wire.Rule, int]:
    """The rule and the time of its creation, milliseconds. Parameters have no place on the wire and are left out."""
    stored, action = document["filter"], document["action"]
    described: bool | wire.SqlFilter | wire.CorrelationFilter
    if stored["kind"] == "sql":
        described = wire.SqlFilter(stored["expression"])
    elif stored["kind"] == "correlation":
        fields = {name: stored[name] for name in wire.FIELDS}
        properties = {name: decode_exactly(value) for name, value in stored["properties"].items()}
        described = wire.CorrelationFilter(**fields, properties=properties)
    else:
        described = stored["kind"] == "true"
    return wire.Rule(document["name"], described, action and action["expression"]), document["created_ms"]
