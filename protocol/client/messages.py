"""A message as a client makes and reads it (AMQP 1.0 3.2). Its body stays encoded, so that forwarding changes nothing.

Application properties and annotations hold Python values that `protocol.codec` encodes; decoded values are encoded to
the same AMQP types again.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Final, Self

from protocol.codec import Buffer, Described, Symbol, Timestamp, UByte, UInt, decode, encode
from protocol.errors import DecodeError
from protocol.symbols import DESCRIPTOR_OF, SEQUENCE_NUMBER, Descriptor


@dataclass(slots=True)
class Message:
    """`body` holds the encoded body sections, and the footer if there is one: see `data_section`."""

    body: bytes = b""
    # header (3.2.1)
    durable: bool = True
    priority: int | None = None
    ttl_ms: int | None = None
    first_acquirer: bool | None = None
    delivery_count: int | None = None
    # properties (3.2.4)
    message_id: Any = None
    user_id: bytes | None = None
    to: str | None = None
    subject: str | None = None
    reply_to: str | None = None
    correlation_id: Any = None
    content_type: str | None = None
    content_encoding: str | None = None
    absolute_expiry_ms: int | None = None
    creation_ms: int | None = None
    group_id: str | None = None
    group_sequence: int | None = None
    reply_to_group_id: str | None = None

    annotations: dict[Any, Any] = field(default_factory=dict)
    application_properties: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, data: bytes, **values: Any) -> Self:
        """A message whose body is `data`; `values` are fields by name."""
        return cls(data_section(data), **values)

    @classmethod
    def decode(cls, message: Buffer) -> Self:
        """Decode a message without delivery annotations, which were for this hop. Raises DecodeError, LimitExceeded."""
        result = cls(durable=False)
        at = 0
        while at < len(message):
            code, value_at = _descriptor(message, at)
            if code >= Descriptor.DATA:
                result.body = bytes(message[at:])
                break
            value, at = decode(message, value_at)
            result._take(code, value, value_at)
        return result

    def encode(self) -> bytes:
        """Encode the message. Raises TypeError or ValueError for a value that has no AMQP encoding."""
        return b"".join(
            (
                self.header(),
                _map(Descriptor.MESSAGE_ANNOTATIONS, {_symbol(key): value for key, value in self.annotations.items()}),
                _list(Descriptor.PROPERTIES, _PROPERTIES, self),
                _map(Descriptor.APPLICATION_PROPERTIES, self.application_properties),
                self.body or data_section(b""),
            )
        )

    def header(self) -> bytes:
        """The encoded header (3.2.1), empty if it says nothing. Raises as `encode` does."""
        return _list(Descriptor.HEADER, _HEADER, self)

    def content(self) -> Any:
        """The decoded body: bytes of data sections, items of sequences, or the value. Raises DecodeError."""
        data: list[bytes] = []
        items: list[Any] = []
        at = 0
        code = None
        while at < len(self.body):
            code, value_at = _descriptor(self.body, at)
            value, at = decode(self.body, value_at)
            if code == Descriptor.AMQP_VALUE:
                return value
            if code == Descriptor.AMQP_SEQUENCE and isinstance(value, list):
                items += value
            elif code == Descriptor.DATA and isinstance(value, bytes):
                data.append(value)
        return items if items and not data else b"".join(data)

    @property
    def sequence_number(self) -> int | None:
        """The broker's sequence number, on a message that was received or peeked."""
        return self.annotations.get(SEQUENCE_NUMBER)

    def _take(self, code: int, value: Any, at: int) -> None:
        if code in (Descriptor.HEADER, Descriptor.PROPERTIES):
            names = _HEADER if code == Descriptor.HEADER else _PROPERTIES
            if not isinstance(value, list) or len(value) > len(names):
                raise DecodeError("a header or properties that are no list of its fields", at)
            for name, item in zip(names, value, strict=False):
                setattr(self, name, item)
        elif code != Descriptor.DELIVERY_ANNOTATIONS:
            if not isinstance(value, dict):
                raise DecodeError("annotations or application properties that are no map", at)
            if code == Descriptor.MESSAGE_ANNOTATIONS:
                self.annotations = value
            else:
                self.application_properties = value


def data_section(data: bytes) -> bytes:
    """A body of one data section (3.2.6)."""
    return encode(Described(Descriptor.DATA.value, data))


def value_section(value: Any) -> bytes:
    """A body of one value (3.2.8)."""
    return encode(Described(Descriptor.AMQP_VALUE.value, value))


# Fields in the order of their lists, with their AMQP types if Python has no such type.
_NAMES: Final = tuple(each.name for each in fields(Message))
_HEADER: Final = dict.fromkeys(_NAMES[1:6], None) | {"priority": UByte, "ttl_ms": UInt, "delivery_count": UInt}
_PROPERTIES: Final = dict.fromkeys(_NAMES[6:19], None) | {
    "content_type": Symbol,
    "content_encoding": Symbol,
    "absolute_expiry_ms": Timestamp,
    "creation_ms": Timestamp,
    "group_sequence": UInt,
}


def _list(code: Descriptor, types: dict[str, Any], message: Message) -> bytes:
    values = [getattr(message, name) for name in types]
    while values and values[-1] is None:
        values.pop()
    typed = [
        value if value is None or kind is None else kind(value)
        for value, kind in zip(values, types.values(), strict=False)
    ]
    return encode(Described(code.value, typed)) if typed else b""


def _symbol(key: Any) -> Any:
    """The key as a symbol, as keys of annotations are (3.2.10)."""
    return Symbol(key) if type(key) is str else key


def _map(code: Descriptor, values: dict[Any, Any]) -> bytes:
    return encode(Described(code.value, values)) if values else b""


def _descriptor(message: Buffer, at: int) -> tuple[int, int]:
    """The code of the section that begins at `at`, and the offset of its value. Raises DecodeError."""
    if message[at] != 0:
        raise DecodeError("a value where a section of a message is due", at)
    descriptor, end = decode(message, at + 1)
    code = DESCRIPTOR_OF.get(descriptor) if isinstance(descriptor, str) else descriptor
    if not isinstance(code, int) or not Descriptor.HEADER <= code <= Descriptor.FOOTER:
        raise DecodeError(f"a section that messages do not have, {descriptor!r}", at)
    return int(code), end
