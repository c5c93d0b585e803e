"""Rules of a subscription: filter and action, as a user sets them and as they are stored.

A rule document is what table RULES holds and what travels between processes:
    {"name", "created_ms", "filter": {"kind": "true" | "false" | "sql" | "correlation", ...}, "action": None | {...}}
"sql" and the action have "expression" and "parameters"; "correlation" has a key for each of CORRELATION_FIELDS (None if
unset) and "properties". Values of parameters and properties are encoded AMQP values, so that their types survive.
"""

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self
from uuid import UUID

from pydantic import AfterValidator, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from broker.namespace import names
from broker.namespace.durations import parse_duration
from broker.namespace.entities import Frozen
from protocol.codec import (
    Byte,
    Decimal32,
    Decimal64,
    Decimal128,
    Described,
    Float,
    Int,
    Long,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
    decode_exactly,
    encode,
)
from protocol.decimals import decode_decimal
from protocol.errors import DecodeError
from protocol.symbols import CORRELATION_FIELDS, DATETIME_OFFSET, EPOCH_TICKS, TICKS_PER_MS, TIMESPAN

DEFAULT_RULE_NAME = "$Default"
MAX_EXPRESSION_CHARACTERS = 1024
MAX_VALUES = 256  # parameters, or properties of a correlation filter; the contract has no figure
MAX_TEXT_CHARACTERS = 32 * 1024  # of one value: a message's property cannot be longer

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_TICKS: Final = (1 << 63) - 1
_URI: Final = Symbol("com.microsoft:uri")

_NAME: Final = r"[^\s\x00-\x1f\x7f/\\@?#*]"

RuleName = Annotated[
    str,
    # Few characters are refused, because clients make rule names of class names; only those of the contract are.
    StringConstraints(min_length=1, max_length=50, pattern=rf"^{_NAME}(?:(?:{_NAME}| )*{_NAME})?$"),
]


class ValueType(StrEnum):
    STRING = "string"
    INT = "int"
    LONG = "long"
    DOUBLE = "double"
    BOOLEAN = "boolean"
    TIMESTAMP = "timestamp"
    UUID = "uuid"
    DURATION = "duration"
    NULL = "null"


class RuleValue(Frozen):
    """A value that messages are compared with, or that an action sets.

    A bare string, boolean, whole number (a long) or number (a double) may stand for it. `value` of a timestamp is
    milliseconds since 1970, of a duration ticks of 100 ns, of a uuid its text; a timestamp or a duration may be given
    as ISO 8601 text. Only a property of a correlation filter can be null; None may stand for it.
    """

    type: ValueType = Field(description="string, int, long, double, boolean, timestamp, uuid or duration.")
    value: bool | int | float | str | None = Field(description="The value, as its type says.")
    text: Annotated[str, StringConstraints(max_length=64)] | None = Field(
        None, description="How a client of the administration API has written a timestamp, or a long that fits an int."
    )

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, given: Any) -> Any:
        if isinstance(given, bool | int | float | str | None):
            given = {"type": _BARE[type(given)], "value": given}
        if not isinstance(given, dict) or not {"type", "value"} <= given.keys():
            raise _wrong("must be a string, a number, true or false, or a table with type and value")
        read = _READ.get(str(given["type"]))
        if read is None:
            return given  # the check of the type refuses it
        try:
            return {**given, "value": read(given["value"])}
        except ValueError as error:
            raise _wrong(str(error)) from None

    @classmethod
    def of_amqp(cls, value: Any) -> Self:
        """The rule value for a decoded AMQP value. Raises ValueError, whose text says what the value must be."""
        if isinstance(value, Described):
            return cls._of_described(value)
        if isinstance(value, bool):
            return cls(type=ValueType.BOOLEAN, value=value)
        if isinstance(value, Timestamp):
            return cls(type=ValueType.TIMESTAMP, value=int(value))
        if isinstance(value, int):
            fits = isinstance(value, Int | Short | Byte | UByte | UShort) or (
                isinstance(value, UInt | ULong) and value < 2**31
            )
            return cls(type=ValueType.INT if fits else ValueType.LONG, value=_integer(int(value), 64))
        if isinstance(value, float | Float):
            return cls(type=ValueType.DOUBLE, value=_double(float(value)))
        if isinstance(value, Decimal32 | Decimal64 | Decimal128):
            return cls(type=ValueType.DOUBLE, value=_double(float(decode_decimal(value))))  # as over HTTP
        if isinstance(value, UUID):
            return cls(type=ValueType.UUID, value=str(value))
        if isinstance(value, str):
            return cls(type=ValueType.STRING, value=_text(str(value)))
        if value is None:
            return cls(type=ValueType.NULL, value=None)
        raise ValueError(f"must be a {', '.join(ValueType)}")

    @classmethod
    def _of_described(cls, value: Described) -> Self:
        match value.descriptor, value.value:
            case str(descriptor), int(ticks) if descriptor == TIMESPAN:
                return cls(type=ValueType.DURATION, value=int(ticks))
            case str(descriptor), int(ticks) if descriptor == DATETIME_OFFSET:
                return cls(type=ValueType.TIMESTAMP, value=(ticks - EPOCH_TICKS) // TICKS_PER_MS)
            case str(descriptor), str(text) if descriptor == _URI:
                return cls(type=ValueType.STRING, value=_text(str(text)))
        raise ValueError(f"must be a {', '.join(ValueType)}")

    def amqp(self) -> Any:
        """The AMQP value, as `protocol.codec` has it."""
        return _AMQP[self.type](self.value)


def _wrong(text: str) -> PydanticCustomError:
    return PydanticCustomError("rule_value", "{text}", {"text": text})


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARACTERS:
        raise ValueError(f"must be a string of at most {MAX_TEXT_CHARACTERS} characters")
    return value


def _integer(value: Any, bits: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise ValueError(f"must be a whole number of {bits} bits")
    return value


def _double(value: Any) -> float:
    # Infinity and NaN are not in JSON, and comparing with them makes no sense.
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError("must be a finite number")
    return float(value)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _null(value: Any) -> None:
    if value is not None:
        raise ValueError("must be null")


def _uuid(value: Any) -> str:
    try:
        return str(UUID(value))
    except (ValueError, TypeError, AttributeError):
        raise ValueError("must be the text of a UUID") from None


def _timestamp_ms(value: Any) -> int:
    if not isinstance(value, str):
        return _integer(value, 64)
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError("must be a date and time of ISO 8601, such as 2026-01-31T12:00:00Z") from None
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return (time - _EPOCH) // timedelta(milliseconds=1)  # not rounded: what a day ends with stays in it


def _duration_ticks(value: Any) -> int:
    """A text may have a sign; the longest duration that clients know is a little longer than its ticks say."""
    if not isinstance(value, str):
        return _integer(value, 64)
    text = value.strip()
    ticks = min(parse_duration(text.removeprefix("-")) * TICKS_PER_MS, _MAX_TICKS)
    return -ticks if text.startswith("-") else ticks


_BARE: Final[dict[type, ValueType]] = {
    bool: ValueType.BOOLEAN,
    int: ValueType.LONG,
    float: ValueType.DOUBLE,
    str: ValueType.STRING,
    type(None): ValueType.NULL,
}

_READ: Final[dict[str, Callable[[Any], Any]]] = {
    ValueType.STRING: _text,
    ValueType.INT: lambda value: _integer(value, 32),
    ValueType.LONG: lambda value: _integer(value, 64),
    ValueType.DOUBLE: _double,
    ValueType.BOOLEAN: _boolean,
    ValueType.TIMESTAMP: _timestamp_ms,
    ValueType.UUID: _uuid,
    ValueType.DURATION: _duration_ticks,
    ValueType.NULL: _null,
}

_AMQP: Final[dict[ValueType, Any]] = {
    ValueType.STRING: str,
    ValueType.INT: Int,
    ValueType.LONG: Long,
    ValueType.DOUBLE: float,
    ValueType.BOOLEAN: bool,
    ValueType.TIMESTAMP: Timestamp,
    ValueType.UUID: UUID,
    ValueType.DURATION: lambda ticks: Described(TIMESPAN, Long(ticks)),
    ValueType.NULL: lambda _: None,
}


def _none_is_null(values: dict[str, RuleValue]) -> dict[str, RuleValue]:
    for name, value in values.items():
        if value.type is ValueType.NULL:
            raise _wrong(f"the value of {name[:100]} must not be null")
    return values


Values = Annotated[dict[str, RuleValue], Field(max_length=MAX_VALUES)]
Parameters = Annotated[Values, AfterValidator(_none_is_null)]
Expression = Annotated[str, StringConstraints(min_length=1, max_length=MAX_EXPRESSION_CHARACTERS)]
_PARAMETERS: Final = "Values of the expression's parameters, by name, with the @."


class TrueFilter(Frozen):
    """Takes every message."""

    kind: Literal["true"] = "true"


class FalseFilter(Frozen):
    """Takes no message."""

    kind: Literal["false"] = "false"


class SqlFilter(Frozen):
    """Takes the messages for which the expression is true."""

    kind: Literal["sql"] = "sql"
    expression: Expression = Field(description="A condition in the SQL language of rules.")
    parameters: Parameters = Field({}, description=_PARAMETERS)


class CorrelationFilter(Frozen):
    """Takes the messages that have all of these values."""

    kind: Literal["correlation"] = "correlation"
    correlation_id: str | None = Field(None, description="The message's correlation id.")
    message_id: str | None = Field(None, description="Its message id.")
    to: str | None = Field(None, description="Its to address.")
    reply_to: str | None = Field(None, description="Its reply-to address.")
    label: str | None = Field(None, description="Its subject.")
    session_id: str | None = Field(None, description="Its session id.")
    reply_to_session_id: str | None = Field(None, description="Its reply-to session id.")
    content_type: str | None = Field(None, description="Its content type.")
    properties: Values = Field(
        {}, description="Application properties and their values; null (in JSON) takes messages without the property."
    )

    @model_validator(mode="after")
    def _has_a_condition(self) -> Self:
        if not self.properties and all(getattr(self, name) is None for name in CORRELATION_FIELDS):
            raise PydanticCustomError(
                "no_condition",
                "has no condition; give it a property or a field of the message, or use a filter of the kind true",
            )
        return self


Filter = Annotated[TrueFilter | FalseFilter | SqlFilter | CorrelationFilter, Field(discriminator="kind")]
FILTER_KINDS: Final = ("true", "false", "sql", "correlation")


class SqlAction(Frozen):
    """Changes the rule's own copy of the message."""

    expression: Expression = Field(description="Statements SET and REMOVE in the SQL language of rules.")
    parameters: Parameters = Field({}, description=_PARAMETERS)


class RuleDescription(Frozen):
    """Which messages of its topic a subscription takes. A rule with an action makes a copy of its own."""

    name: RuleName = Field(description=f"Name of the rule: {names.RULES['rule']}.")
    filter: Filter = Field(TrueFilter(), description="Which messages the rule takes; by default all.")
    action: SqlAction | None = Field(None, description="How the rule changes its copies; unset changes nothing.")

    def document(self, created_ms: int) -> dict[str, Any]:
        """The rule document."""
        action = self.action
        return {
            "name": self.name,
            "created_ms": created_ms,
            "filter": _filter_document(self.filter),
            "action": None if action is None else _sql_document(action),
        }

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Self:
        """Read a stored rule. Raises ValueError if this version does not know the form of `document`."""
        try:
            stored, action = dict(document["filter"]), document["action"]
            texts = stored.pop("texts", {})
            for name in ("parameters", "properties"):
                if name in stored:
                    stored[name] = _values(stored[name], texts)
            if action is not None:
                action = dict(action)
                action["parameters"] = _values(action["parameters"], action.pop("texts", {}))
            return cls.model_validate({"name": document["name"], "filter": stored, "action": action})
        except (KeyError, TypeError, AttributeError, DecodeError, ValidationError) as error:
            raise ValueError(f"not a rule: {error}") from error


DEFAULT_RULE: Final = RuleDescription(name=DEFAULT_RULE_NAME)
"""The rule of a new subscription without declared rules."""


def _filter_document(described: TrueFilter | FalseFilter | SqlFilter | CorrelationFilter) -> dict[str, Any]:
    if isinstance(described, SqlFilter):
        return {"kind": described.kind, **_sql_document(described)}
    if isinstance(described, CorrelationFilter):
        fields = {name: getattr(described, name) for name in CORRELATION_FIELDS}
        return {
            "kind": described.kind,
            **fields,
            "properties": _encoded(described.properties),
            **_texts(described.properties),
        }
    return {"kind": described.kind}


def _sql_document(described: SqlFilter | SqlAction) -> dict[str, Any]:
    parameters = described.parameters
    return {"expression": described.expression, "parameters": _encoded(parameters), **_texts(parameters)}


def _texts(values: Mapping[str, RuleValue]) -> dict[str, dict[str, str]]:
    """A part of a document that only those have in which a value has a text."""
    texts = {name: value.text for name, value in values.items() if value.text is not None}
    return {"texts": texts} if texts else {}


def amqp_values(values: Mapping[str, RuleValue]) -> dict[str, Any]:
    return {name: value.amqp() for name, value in values.items()}


def _encoded(values: Mapping[str, RuleValue]) -> dict[str, bytes]:
    return {name: encode(value) for name, value in amqp_values(values).items()}


def _values(encoded: Mapping[str, bytes], texts: Mapping[str, str]) -> dict[str, RuleValue]:
    values = {name: RuleValue.of_amqp(decode_exactly(value)) for name, value in encoded.items()}
    return {name: value.model_copy(update={"text": texts.get(name)}) for name, value in values.items()}
