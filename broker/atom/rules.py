"""Rules of subscriptions as XML (management.md 1.7): filters, actions and their typed values.

The `type` attribute says what a filter is, not its expression. Some clients know only the prefixes `i` and `d6p1`, and
fail on a rule without an action element.
"""

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final
from xml.etree.ElementTree import Element

from pydantic import ValidationError

from broker.atom import xml
from broker.atom.values import read_boolean, read_number, write_boolean, write_time
from broker.errors import InvalidArgument
from broker.namespace import names
from broker.namespace.durations import format_duration
from broker.namespace.rule_descriptions import RuleDescription, RuleValue, ValueType
from protocol.symbols import TICKS_PER_MS

ELEMENT: Final = "RuleDescription"
FIRST: Final = "DefaultRuleDescription"  # within the description of a new subscription
_LEVEL: Final = "<CompatibilityLevel>20</CompatibilityLevel>"

# The elements of a correlation filter, in the order of the service: its fields.
_CORRELATION: Final = {
    "CorrelationId": "correlation_id",
    "MessageId": "message_id",
    "To": "to",
    "ReplyTo": "reply_to",
    "Label": "label",
    "SessionId": "session_id",
    "ReplyToSessionId": "reply_to_session_id",
    "ContentType": "content_type",
}

_TYPES: Final[dict[str, tuple[ValueType, Callable[[str], Any]]]] = {
    "string": (ValueType.STRING, str),
    "int": (ValueType.INT, read_number),
    "long": (ValueType.LONG, read_number),
    "double": (ValueType.DOUBLE, float),
    "boolean": (ValueType.BOOLEAN, read_boolean),
    "dateTime": (ValueType.TIMESTAMP, str),
    "duration": (ValueType.DURATION, str),
    "guid": (ValueType.UUID, str),
}
# Python calls a negative number an int however large it is.
_WIDER: Final = {"short": "int", "byte": "int", "float": "double", "decimal": "double", "unsignedInt": "long"}
_INT: Final = range(-(1 << 31), 1 << 31)
# As .NET and the service write a time: ticks are the seventh place.
_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,7})?)\d*(Z|[+-]\d\d:\d\d)", re.ASCII)


def read(name: str, described: Element) -> RuleDescription:
    """The rule of this name. Raises InvalidArgument, which names the element."""
    filter_, action = xml.child(described, "Filter"), xml.child(described, "Action")
    document = {
        "name": name,
        "filter": {"kind": "true"} if filter_ is None else _read_filter(filter_),
        "action": None if action is None or xml.is_nil(action) else _read_action(action),
    }
    try:
        return RuleDescription.model_validate(document)
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_input=False)
        place = ".".join(map(str, first["loc"]))
        if place == "name":
            raise InvalidArgument(names.refusal("rule", first)) from None
        raise InvalidArgument(f"The rule is not valid: {f'{place}: ' if place else ''}{first['msg']}.") from None


def read_name(described: Element) -> str:
    return xml.text_of(xml.child(described, "Name"))


def _read_filter(given: Element) -> dict[str, Any]:
    kind = xml.type_of(given)
    match kind:
        case "TrueFilter":
            return {"kind": "true"}
        case "FalseFilter":
            return {"kind": "false"}
        case "SqlFilter":
            return {"kind": "sql", **_read_sql(given)}
        case "CorrelationFilter":
            fields: dict[str, Any] = {}
            for element, field in _CORRELATION.items():
                if (found := xml.child(given, element)) is not None and not xml.is_nil(found):
                    fields[field] = found.text or ""
            return {"kind": "correlation", **fields, "properties": _read_values(xml.child(given, "Properties"))}
    raise InvalidArgument(
        f"Filter: its type {kind[:100]!r} must be one of SqlFilter, CorrelationFilter, TrueFilter and FalseFilter."
    )


def _read_action(given: Element) -> dict[str, Any] | None:
    kind = xml.type_of(given)
    if kind == "EmptyRuleAction" or (kind == "SqlRuleAction" and not xml.text_of(xml.child(given, "SqlExpression"))):
        return None
    if kind == "SqlRuleAction":
        return _read_sql(given)
    raise InvalidArgument(f"Action: its type {kind[:100]!r} must be SqlRuleAction or EmptyRuleAction.")


def _read_sql(given: Element) -> dict[str, Any]:
    expression = xml.text_of(xml.child(given, "SqlExpression"))
    if not expression:
        raise InvalidArgument("SqlExpression: is missing.")
    return {"expression": expression, "parameters": _read_values(xml.child(given, "Parameters"))}


def _read_values(given: Element | None) -> dict[str, RuleValue]:
    values: dict[str, RuleValue] = {}
    for name, item in xml.children(given) if given is not None else ():
        key, value = xml.child(item, "Key"), xml.child(item, "Value")
        if name != "KeyValueOfstringanyType" or key is None or not key.text or value is None:
            raise InvalidArgument(f"{name}: must be a KeyValueOfstringanyType with a Key and a Value.")
        if key.text in values:
            raise InvalidArgument(f"Key: {key.text[:100]!r} is given twice.")
        values[key.text] = _read_value(key.text, value)
    return values


def _read_value(key: str, given: Element) -> RuleValue:
    if xml.is_nil(given):
        return RuleValue(type=ValueType.NULL, value=None)
    given_type = xml.type_of(given) or "string"
    name = _WIDER.get(given_type, given_type)
    if name not in _TYPES:
        raise InvalidArgument(f"Value of {key[:100]!r}: its type {name[:100]!r} must be one of {', '.join(_TYPES)}.")
    kind, read_text = _TYPES[name]
    text = given.text or ""
    try:
        value = read_text(text if kind is ValueType.STRING else text.strip())
        if kind is ValueType.INT and value not in _INT:
            kind = ValueType.LONG
        made = RuleValue(type=kind, value=value)
        return made.model_copy(update={"text": _kept_text(given_type, made, str(value))})
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_input=False)
        raise InvalidArgument(f"Value of {key[:100]!r}: {first['msg']}.") from None
    except ValueError:
        raise InvalidArgument(f"Value of {key[:100]!r}: {text[:100]!r} is no {name}.") from None


def _kept_text(given_type: str, made: RuleValue, text: str) -> str | None:
    """Return what the value itself does not tell: that a small number is a long, and how a time was written."""
    if made.type is ValueType.TIMESTAMP:
        if (as_sent := _TIME.fullmatch(text)) is not None:
            return "".join(as_sent.groups())
        return text if datetime.fromisoformat(text).tzinfo is None else None
    return text if given_type == "long" and made.value in _INT else None


def write(rule: RuleDescription, created_ms: int | None = None, element: str = ELEMENT) -> str:
    """The description element of a rule. Clients do not say when it was created."""
    created = "" if created_ms is None else f"<CreatedAt>{write_time(created_ms)}</CreatedAt>"
    return (
        f'<{element} xmlns="{xml.SERVICE_BUS}" xmlns:i="{xml.INSTANCE}">{_write_filter(rule)}{_write_action(rule)}'
        f"{created}{xml.element('Name', rule.name)}</{element}>"
    )


def _write_filter(rule: RuleDescription) -> str:
    described = rule.filter
    match described.kind:
        case "true":
            return f'<Filter i:type="TrueFilter"><SqlExpression>1=1</SqlExpression>{_LEVEL}</Filter>'
        case "false":
            return f'<Filter i:type="FalseFilter"><SqlExpression>1=0</SqlExpression>{_LEVEL}</Filter>'
        case "sql":
            return f'<Filter i:type="SqlFilter">{_write_sql(described.expression, described.parameters)}</Filter>'
        case "correlation":
            fields = "".join(
                xml.element(element, text)
                for element, field in _CORRELATION.items()
                if (text := getattr(described, field)) is not None
            )
            properties = _write_values("Properties", described.properties)
            return f'<Filter i:type="CorrelationFilter">{fields}{properties}</Filter>'


def _write_action(rule: RuleDescription) -> str:
    if rule.action is None:
        return '<Action i:type="EmptyRuleAction"/>'
    return f'<Action i:type="SqlRuleAction">{_write_sql(rule.action.expression, rule.action.parameters)}</Action>'


def _write_sql(expression: str, parameters: Mapping[str, RuleValue]) -> str:
    return f"{xml.element('SqlExpression', expression)}{_LEVEL}{_write_values('Parameters', parameters)}"


def _write_values(name: str, values: Mapping[str, RuleValue]) -> str:
    if not values:
        return ""
    items = (
        f"<KeyValueOfstringanyType>{xml.element('Key', key)}{_write_value(value)}</KeyValueOfstringanyType>"
        for key, value in values.items()
    )
    return f"<{name}>{''.join(items)}</{name}>"


def _write_value(value: RuleValue) -> str:
    text: str
    content: Any = value.value  # as its type says
    match value.type:
        case ValueType.NULL:
            return '<Value i:nil="true"/>'
        case ValueType.BOOLEAN:
            name, text = "boolean", write_boolean(content)
        case ValueType.LONG if content in _INT and value.text is None:
            name, text = "int", str(content)  # JavaScript's client knows no long, and nobody has said that it is one
        case ValueType.TIMESTAMP:
            name, text = "dateTime", value.text or write_time(content)
        case ValueType.DURATION:
            name, text = "duration", _write_ticks(content)
        case ValueType.UUID:
            name, text = "guid", content
        case kind:
            name, text = kind.value, str(content)
    return f'<Value i:type="d6p1:{name}" xmlns:d6p1="{xml.SCHEMA}">{xml.written(text)}</Value>'


def _write_ticks(ticks: int) -> str:
    sign = "-" if ticks < 0 else ""
    return sign + format_duration(abs(ticks) // TICKS_PER_MS)
