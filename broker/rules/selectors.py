"""Message selectors of JMS (Jakarta Messaging 3.1, 3.8): which of the messages of a queue a receiver wants.

They are compiled as filters are. What differs from the language of rules: names are case-sensitive; values of different
types do not compare, so each comparison of theirs is false; strings and booleans have no order; arithmetic without a
result is null; times are milliseconds since 1970.

A selector sees a stored message as a receiver would get it: with the properties that were set since it was sent.
"""

import operator
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

from broker.rules import tree
from broker.rules.compiling import Compiler, Test
from broker.rules.errors import FilterError
from broker.rules.message import Getter, MessageView
from broker.rules.selector_syntax import (
    CORRELATION_ID,
    DELIVERY_COUNT,
    DELIVERY_MODE,
    DURABLE,
    MESSAGE_ID,
    PRIORITY,
    TIMES_DELIVERED,
    parse_selector,
)
from broker.rules.tree import Predicate, Property, Value
from broker.rules.usual_sections import properties_fields, user_properties
from broker.rules.values import COMPARISONS, Comparison, Instant, canonical, compare, compute, negate
from protocol import codec
from protocol.message.layout import DURABLE as IS_DURABLE
from protocol.message.layout import HAS_PRIORITY, LAYOUT

MAX_STEPS: Final = 100_000  # for one message: at most some 0.6 ms; see MessageView.spend
# Measured in the time that it takes to read a record: to decode a section of a message, and how many nodes of an
# expression are evaluated meanwhile.
VIEW_WORK: Final = 4
NODES_AT_ONCE: Final = 16

DEFAULT_PRIORITY: Final = 4  # AMQP 1.0 3.2.1
# Fields of the properties section (AMQP 1.0 3.2.4)
_FIELDS: Final = {
    "message-id": 0,
    "user-id": 1,
    "to": 2,
    "subject": 3,
    "reply-to": 4,
    "correlation-id": 5,
    "content-type": 6,
    "content-encoding": 7,
    "absolute-expiry-time": 8,
    "creation-time": 9,
    "group-id": 10,
    "group-sequence": 11,
    "reply-to-group-id": 12,
}
_USER_ID: Final = _FIELDS["user-id"]
_IDS: Final = frozenset((_FIELDS[MESSAGE_ID], _FIELDS[CORRELATION_ID]))  # texts, whatever the type on the wire is
_unpack_layout = LAYOUT.unpack_from


class StoredMessage(MessageView):
    """A message as selectors see it. A section is decoded when it is first needed.

    `record` has the layout of the message at `layout_at`, and behind it the stored bytes. `set_since` are application
    properties, and `fields_since` fields of the properties section, that were set after it was sent: str, or bytes of
    an encoded AMQP value; None is one that was removed.
    """

    __slots__ = ("_delivery_count", "_fields_since", "_flags", "_priority", "_set_since", "fields", "named")

    fields: list[Any]  # of the properties section, as they were decoded
    named: dict[str, Any]  # application properties, the same

    def __init__(
        self,
        record: bytes,
        layout_at: int,
        delivery_count: int,
        set_since: Mapping[str, Any] | None = None,
        fields_since: Mapping[int, Any] | None = None,
    ) -> None:
        self._flags, self._priority, _, annotation_bytes, properties_bytes, application_properties_bytes = (
            _unpack_layout(record, layout_at)
        )
        properties_at = layout_at + LAYOUT.size + annotation_bytes
        end = properties_at + properties_bytes
        super().__init__(record[properties_at:end], record[end : end + application_properties_bytes])
        self.steps_left = MAX_STEPS
        self._delivery_count = delivery_count
        self._set_since = set_since
        self._fields_since = fields_since

    def __getattr__(self, name: str) -> Any:
        """Called for attributes that are not set yet: decodes the section."""
        decode = _DECODERS.get(name)
        if decode is None:
            return super().__getattr__(name)
        value = decode(self)
        setattr(self, name, value)
        return value

    def header(self, name: str) -> Any:
        """A value of `selector_syntax.HEADERS`; None if the message has none."""
        at = _FIELDS.get(name)
        if at is not None:
            fields = self.fields
            value = fields[at] if at < len(fields) else None
            return _id_text(value) if at in _IDS else _plain(value)
        if name == PRIORITY:
            return self._priority if self._flags & HAS_PRIORITY else DEFAULT_PRIORITY
        if name == DELIVERY_COUNT:
            return self._delivery_count
        if name == TIMES_DELIVERED:
            return self._delivery_count + 1
        is_durable = bool(self._flags & IS_DURABLE)
        if name == DURABLE:
            return is_durable
        assert name == DELIVERY_MODE
        return "PERSISTENT" if is_durable else "NON_PERSISTENT"

    def _decode_fields(self) -> list[Any]:
        section = self._properties
        assert isinstance(section, bytes)
        fields: list[Any] | None = properties_fields(section) if section else []
        if fields is None:
            found = _section(section, list)
            if len(found) > _USER_ID and isinstance(found[_USER_ID], bytes):
                found[_USER_ID] = found[_USER_ID].decode(errors="replace")  # JMSXUserID is a text
            fields = found
        for at, value in (self._fields_since or {}).items():
            fields += [None] * (at + 1 - len(fields))
            fields[at] = _since(value)
        return fields

    def _decode_named(self) -> dict[str, Any]:
        section = self._application_properties
        assert isinstance(section, bytes)
        found: dict[str, Any] | None = user_properties(section, as_spelled=True) if section else {}
        if found is None:
            found = _section(section, dict)
        for name, value in (self._set_since or {}).items():
            found[name] = _since(value)
        return found


_DECODERS: Final = {"fields": StoredMessage._decode_fields, "named": StoredMessage._decode_named}


def _section(section: bytes, kind: type[Any]) -> Any:
    """The list or map of a section. Raises ProtocolError, or FilterError if it is another thing."""
    found = codec.decode_exactly(section).value
    if not isinstance(found, kind):
        raise FilterError("a section of the message cannot be read")
    return found


def _since(value: Any) -> Any:
    return codec.decode_exactly(value) if isinstance(value, bytes) else value


_USUAL: Final = frozenset((str, bool, int, float, Decimal))


def _plain(value: Any) -> Any:
    """A value of AMQP as selectors compare it; what JMS has no type for is null."""
    if type(value) not in _USUAL:
        value = canonical(value)
    match value:
        case Instant():
            return value.ms
        case UUID():
            return str(value)
    return value if type(value) in _USUAL else None


def _id_text(value: Any) -> str | None:
    """An id as a text, as `selector_syntax.bare_id` makes it of what clients show."""
    if value is None:
        return None
    return value.hex() if isinstance(value, bytes) else str(canonical(value))


class Selector:
    """A compiled selector. Raises RuleSyntaxError, SelectorNotSupported."""

    def __init__(self, text: str) -> None:
        compiler = _SelectorCompiler(text, None)
        self.text = text
        self._evaluate = compiler.predicate(parse_selector(text))
        self.work = VIEW_WORK + compiler.nodes // NODES_AT_ONCE
        """How many records could be read in the time that it takes to evaluate it."""

    def matches(
        self,
        record: bytes,
        layout_at: int,
        delivery_count: int,
        set_since: Mapping[str, Any] | None = None,
        fields_since: Mapping[int, Any] | None = None,
    ) -> bool:
        """The arguments are those of a `StoredMessage`.

        False also if there is no result, whatever the reason: then the message is for others.
        """
        try:
            message = StoredMessage(record, layout_at, delivery_count, set_since, fields_since)
            return self._evaluate(message) is True
        except Exception:
            return False


class _SelectorCompiler(Compiler):
    """What it compiles reads from a `StoredMessage`."""

    def value(self, node: Value) -> Getter:
        if isinstance(node, tree.Signed):
            self.nodes += 1
            is_negative, operand = node.symbol == "-", self.value(node.operand)
            return lambda message: _signed(is_negative, operand(message))
        return super().value(node)

    def _property(self, node: Property) -> Getter:
        name = node.name

        def read_header(message: Any) -> Any:
            return message.header(name)

        def read_named(message: Any) -> Any:
            return _plain(message.named.get(name))

        return read_header if node.is_system else read_named

    def _arithmetic(self, node: tree.Arithmetic) -> Getter:
        first = self.value(node.first)
        rest = [(symbol, self.value(operand)) for symbol, operand in node.rest]

        def evaluate(message: MessageView) -> Any:
            result = first(message)
            for symbol, operand in rest:
                result = _computed(symbol, result, operand(message))
            return result

        return evaluate

    def predicate(self, node: Predicate) -> Test:
        if isinstance(node, tree.Truth):
            self.nodes += 1
            value = self.value(node.value)
            return lambda message: _true(value(message))
        return super().predicate(node)

    def _comparison(self, node: tree.Comparison) -> Test:
        comparison = COMPARISONS[node.symbol]
        left, right = self.value(node.left), self.value(node.right)
        return lambda message: _compared(comparison, left(message), right(message))


_NUMBERS: Final = frozenset((int, float, Decimal))
_UNORDERED: Final = frozenset((str, bool))


def _true(value: Any) -> bool | None:
    return value if value is None else value is True


def _compared(comparison: Comparison, left: Any, right: Any) -> bool | None:
    """None for unknown, because one is null. Values of different types do not compare: that is false."""
    if left is None or right is None:
        return None
    kind, other = type(left), type(right)
    if kind is other and kind in _UNORDERED:
        return comparison in (operator.eq, operator.ne) and bool(comparison(left, right))
    return kind in _NUMBERS and other in _NUMBERS and compare(comparison, left, right)


def _computed(symbol: str, left: Any, right: Any) -> Any:
    """None if there is no result: one is no number, or it is divided by zero."""
    if type(left) not in _NUMBERS or type(right) not in _NUMBERS:
        return None
    try:
        return compute(symbol, left, right)
    except FilterError:
        return None


def _signed(is_negative: bool, value: Any) -> Any:
    if type(value) not in _NUMBERS:
        return None
    try:
        return negate(value) if is_negative else value
    except FilterError:
        return None
