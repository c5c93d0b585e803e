"""Rules on the wire: the operations of a subscription's $management node on rules, in the form that SDKs use.

A request describes a rule by a map, a response by described lists. JavaScript finds the kind of a filter or an action
by the number of its descriptor. So there is always an action, which may be the empty one (amqp.md 8.4 and 9).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from protocol.codec import Described, Int, Timestamp, ULong
from protocol.nodes.management_fields import ArgumentError, Fields

_RULE: Final = ULong(0x0000013700000004)
_EMPTY_ACTION: Final = ULong(0x0000013700000005)
_SQL_ACTION: Final = ULong(0x0000013700000006)
_SQL_FILTER: Final = ULong(0x0000001370000006)
_TRUE_FILTER: Final = ULong(0x0000001370000007)
_FALSE_FILTER: Final = ULong(0x0000001370000008)
_CORRELATION_FILTER: Final = ULong(0x0000001370000009)

_COMPATIBILITY_LEVEL: Final = Int(20)  # the only one
_DEFAULT_PAGE: Final = 100


@dataclass(frozen=True, slots=True)
class SqlFilter:
    expression: str


@dataclass(frozen=True, slots=True)
class CorrelationFilter:
    """`properties` are application properties with their AMQP values."""

    correlation_id: str | None = None
    message_id: str | None = None
    to: str | None = None
    reply_to: str | None = None
    label: str | None = None
    session_id: str | None = None
    reply_to_session_id: str | None = None
    content_type: str | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)


# The order is that of the described list.
FIELDS: Final = (
    "correlation_id",
    "message_id",
    "to",
    "reply_to",
    "label",
    "session_id",
    "reply_to_session_id",
    "content_type",
)


@dataclass(frozen=True, slots=True)
class Rule:
    """`filter` is True or False for a true or false filter; `action` is an expression, or None."""

    name: str
    filter: bool | SqlFilter | CorrelationFilter = True
    action: str | None = None


@dataclass(frozen=True, slots=True)
class AddRule:
    rule: Rule


@dataclass(frozen=True, slots=True)
class RemoveRule:
    name: str


@dataclass(frozen=True, slots=True)
class EnumerateRules:
    skip: int
    top: int


# --- requests ---------------------------------------------------------------------------------------------------------


def read_add_rule(fields: Fields) -> AddRule:
    description = Fields(fields.optional_map("rule-description") or {})
    # .NET writes the name in the description, too.
    name = fields.optional_string("rule-name") or description.optional_string("rule-name")
    if not name:
        raise ArgumentError("'rule-name' is missing.")
    action = description.optional_map("sql-rule-action")
    expression = Fields(action or {}).optional_string("expression")
    # A blank expression is no action (management.md 3.1).
    return AddRule(Rule(name, _filter(description), expression if expression and expression.strip() else None))


def _filter(description: Fields) -> bool | SqlFilter | CorrelationFilter:
    sql = description.optional_map("sql-filter")
    correlation = description.optional_map("correlation-filter")
    if sql is not None and correlation is not None:
        raise ArgumentError("'rule-description' has both 'sql-filter' and 'correlation-filter'; a rule has one filter.")
    if sql is not None:
        return SqlFilter(Fields(sql).string("expression"))
    if correlation is not None:
        return _correlation_filter(Fields(correlation))
    return True


def _correlation_filter(fields: Fields) -> CorrelationFilter:
    properties = fields.optional_map("properties") or {}
    if not all(isinstance(name, str) for name in properties):
        raise ArgumentError("'properties' is not a map with names as its keys.")
    return CorrelationFilter(
        **{name: fields.optional_string(name.replace("_", "-")) for name in FIELDS},
        properties={str(name): value for name, value in properties.items()},
    )


def read_remove_rule(fields: Fields) -> RemoveRule:
    return RemoveRule(fields.string("rule-name"))


def read_enumerate_rules(fields: Fields) -> EnumerateRules:
    return EnumerateRules(
        fields.count("skip", 0) if fields.value("skip") is not None else 0,
        fields.count("top", 1) if fields.value("top") is not None else _DEFAULT_PAGE,
    )


# --- responses --------------------------------------------------------------------------------------------------------


def rules_body(rules: Sequence[tuple[Rule, int]]) -> dict[str, Any]:
    """The body of the response to enumerate-rules: rules with the times of their creation, milliseconds."""
    return {"rules": [{"rule-description": _described(rule, created_ms)} for rule, created_ms in rules]}


def _described(rule: Rule, created_ms: int) -> Described:
    return Described(_RULE, [_described_filter(rule.filter), _described_action(rule), rule.name, Timestamp(created_ms)])


def _described_filter(described: bool | SqlFilter | CorrelationFilter) -> Described:
    if isinstance(described, bool):
        return Described(_TRUE_FILTER if described else _FALSE_FILTER, [])
    if isinstance(described, SqlFilter):
        return Described(_SQL_FILTER, [described.expression, _COMPATIBILITY_LEVEL])
    fields = [getattr(described, name) for name in FIELDS]
    return Described(_CORRELATION_FILTER, [*fields, dict(described.properties)])


def _described_action(rule: Rule) -> Described:
    if rule.action is None:
        return Described(_EMPTY_ACTION, [])
    return Described(_SQL_ACTION, [rule.action, _COMPATIBILITY_LEVEL])
