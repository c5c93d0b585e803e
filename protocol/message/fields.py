"""Checks the fields of header, annotations, properties and application properties (AMQP 1.0, 3.2).

A receiver that cannot decode one of these sections would lose its connection at every delivery of the message. So the
form and the types of values are checked when the message comes in. The check of a section puts the values that the
broker needs into the extra map.

The functions take a section's content as the whole `message`, where the content begins and ends (`at`, `end`), and
the `count` of values in its encoding. They raise DecodeError, InvalidField, LimitExceeded or HeaderTooLarge; if the
message ends within the content also IndexError or struct.error.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from protocol import bounds
from protocol.codec import UByte, UInt, decode, decode_exactly, skip
from protocol.errors import DecodeError, HeaderTooLarge, InvalidField, LimitExceeded, UnequalKeys
from protocol.message.layout import DURABLE, HAS_PRIORITY
from protocol.symbols import (
    DEADLETTER_SOURCE,
    DELIVERY_TIME,
    ENQUEUE_SEQUENCE_NUMBER,
    ENQUEUED_TIME,
    LOCK_TOKEN,
    LOCKED_UNTIL,
    MESSAGE_STATE,
    PARTITION_ID,
    PARTITION_KEY,
    PING_CONTENT_TYPE,
    SCHEDULED_ENQUEUE_TIME,
    SEQUENCE_NUMBER,
    STORED_DELIVERY_ANNOTATIONS,
    STORED_FIRST_ACQUIRER,
    VIA_PARTITION_KEY,
)

MAX_ID_CHARACTERS: Final = 128  # message-id, session id, partition keys
MAX_PROPERTY_BYTES: Final = 32 * 1024  # one application property: encoded key and value

# Keys of the extra map, the same numbers as in the messages between gateways and workers (`broker.wire.Extra`).
EXTRA_SCHEDULED_MS: Final = 1
EXTRA_SESSION_ID: Final = 2
EXTRA_PARTITION_KEY: Final = 3
EXTRA_MESSAGE_ID: Final = 4
EXTRA_PING: Final = 5

Extra = dict[int, Any]

UINT_MAX: Final = (1 << 32) - 1


_SHORT_STRING: Final = 0xA1


def id_text(encoded: bytes) -> bytes:
    """The text of an encoded message-id, whatever its type and form: ids with the same text are the same id."""
    if encoded[0] == _SHORT_STRING:
        return encoded[2:]
    value = decode_exactly(encoded)
    return value if isinstance(value, bytes) else str(value).encode()


@lru_cache(maxsize=256)  # the headers of a sender mostly have the same bytes
def header(value: bytes) -> tuple[int, int, int | None, bool | None]:
    """Flags, priority, ttl in milliseconds and first-acquirer of a header's encoded list."""
    fields = decode_exactly(value)
    for field, kind in zip(fields, (bool, UByte, UInt, bool, UInt), strict=False):
        if field is not None and type(field) is not kind:
            raise InvalidField("header", f"a field should be {kind.__name__.lower()}, not {type(field).__name__}")
    if len(fields) > 5:
        raise DecodeError("header of more than five fields", 0)
    durable, priority, ttl_ms, first_acquirer = (*fields, None, None, None, None)[:4]
    flags = (DURABLE if durable else 0) | (HAS_PRIORITY if priority is not None else 0)
    return flags, int(priority or 0), None if ttl_ms is None else int(ttl_ms), first_acquirer


# Allowed constructors of the fields of the properties section (3.2.4), besides null. Content type and encoding are
# symbols, but some clients send strings.
_ID: Final = frozenset((0x44, 0x53, 0x80, 0x98, 0xA0, 0xB0, 0xA1, 0xB1))
_STRING: Final = frozenset((0xA1, 0xB1))
_SYMBOL: Final = frozenset((0xA3, 0xB3, 0xA1, 0xB1))
_TIME: Final = frozenset((0x83,))
_PROPERTIES: Final = (
    ("message-id", _ID),
    ("user-id", frozenset((0xA0, 0xB0))),
    ("to", _STRING),
    ("subject", _STRING),
    ("reply-to", _STRING),
    ("correlation-id", _ID),
    ("content-type", _SYMBOL),
    ("content-encoding", _SYMBOL),
    ("absolute-expiry-time", _TIME),
    ("creation-time", _TIME),
    ("group-id", _STRING),
    ("group-sequence", frozenset((0x43, 0x52, 0x70))),
    ("reply-to-group-id", _STRING),
)
_PROPERTY_CONSTRUCTORS: Final = tuple(constructors for _, constructors in _PROPERTIES)
_PING: Final = PING_CONTENT_TYPE.encode()


def properties(message: bytes, at: int, end: int, count: int, extra: Extra, want_message_id: bool) -> None:
    """Check the fields of the properties section, and put those that the broker needs into `extra`."""
    if count > len(_PROPERTY_CONSTRUCTORS):
        raise DecodeError("properties of more than thirteen fields", at)
    for index in range(count):
        constructor = message[at]
        if constructor == 0x40:
            at += 1
            continue
        if constructor not in _PROPERTY_CONSTRUCTORS[index]:
            raise InvalidField(_PROPERTIES[index][0], f"a value of constructor {constructor:#04x} is not of its type")
        begin = at
        if 0xA0 <= constructor <= 0xA3:
            at += 2 + message[at + 1]
            value = message[begin + 2 : at]
            if not value.isascii() and constructor != 0xA0:
                _check_text(value, constructor, begin)
        else:
            at = skip(message, begin)
            if constructor >= 0xB0:
                value = message[begin + 5 : at]
                if not value.isascii() and constructor != 0xB0:
                    _check_text(value, constructor, begin)
            else:
                value = b""
        if index == 0:
            if len(value) > MAX_ID_CHARACTERS:
                _check_id_length("message-id", value, constructor in _STRING)
            if want_message_id:
                extra[EXTRA_MESSAGE_ID] = message[begin:at]
        elif index == 10:
            if len(value) > MAX_ID_CHARACTERS:
                check_session_id(value.decode())
            extra[EXTRA_SESSION_ID] = value.decode()
        elif index == 6 and value == _PING:
            extra[EXTRA_PING] = True
    if at != end:
        raise DecodeError("properties whose size and content differ", end)


# Bytes of a value with its constructor, for the fixed-width values that a property may have.
_FIXED_WIDTH: Final = {
    **dict.fromkeys((0x40, 0x41, 0x42, 0x43, 0x44), 1),
    **dict.fromkeys((0x50, 0x51, 0x52, 0x53, 0x54, 0x55), 2),
    **dict.fromkeys((0x60, 0x61), 3),
    **dict.fromkeys((0x70, 0x71, 0x72, 0x74), 5),
    **dict.fromkeys((0x80, 0x81, 0x82, 0x83, 0x84), 9),
    **dict.fromkeys((0x94, 0x98), 17),
}


_SHORT_TEXT: Final = frozenset((0xA1, 0xA3))  # strings and symbols of up to 255 bytes
_LONG_TEXT: Final = frozenset((0xB1, 0xB3))


def application_properties(message: bytes, at: int, end: int, count: int) -> None:
    """Check that the pairs are strings and simple values (or described simple values, as .NET sends).

    Some clients send symbols in place of the strings, and Service Bus takes them. Equal texts are the same key.
    """
    if count & 1:
        raise DecodeError("application properties with an odd number of values", at)
    keys = set()
    for _ in range(count >> 1):
        begin = at
        constructor = message[at]
        if constructor in _SHORT_TEXT:
            at += 2 + message[at + 1]
            key = message[begin + 2 : at]
        elif constructor in _LONG_TEXT:
            at = skip(message, at)
            key = message[begin + 5 : at]
        else:
            raise DecodeError("an application property's key is neither a string nor a symbol", at)
        if not key.isascii():
            _check_text(key, constructor, begin)
        keys.add(key)
        constructor = message[at]
        if constructor == 0xA1:
            value_at = at + 2
            at = value_at + message[at + 1]
            value = message[value_at:at]
            if not value.isascii():
                _check_text(value, constructor, value_at)
        elif constructor in _FIXED_WIDTH:
            at += _FIXED_WIDTH[constructor]
        else:
            at = _check_simple(message, at, key)
        if at - begin > MAX_PROPERTY_BYTES:
            name = (
                key.decode()
                if len(key) <= MAX_ID_CHARACTERS
                else f"{key[:MAX_ID_CHARACTERS].decode(errors='ignore')}..."
            )
            raise HeaderTooLarge(f"size of the application property {name!r}", MAX_PROPERTY_BYTES, "bytes")
    if at != end:
        raise DecodeError("application properties whose size and content differ", end)
    if len(keys) * 2 != count:
        raise DecodeError("application properties with equal keys", end)


def _check_simple(message: bytes, at: int, key: bytes) -> int:
    """The offset behind the property's value at `at`, which is decoded to check it."""
    constructor = message[at]
    if constructor == 0:
        _, constructor_at = decode(message, at + 1)
        constructor = message[constructor_at]
    if constructor >= 0xC0 or constructor in (0, 0x45):
        raise InvalidField(
            "application property", f"{key[:MAX_ID_CHARACTERS].decode(errors='ignore')!r} is no simple value"
        )
    _, end = decode(message, at)
    return end


def _partition_key(message: bytes, at: int, extra: Extra) -> bytes | None:
    extra[EXTRA_PARTITION_KEY], constructor = _key(message, at, PARTITION_KEY)
    return constructor


def _via_partition_key(message: bytes, at: int, extra: Extra) -> bytes | None:
    return _key(message, at, VIA_PARTITION_KEY)[1]


_STRING_OF_BINARY: Final = {0xA0: b"\xa1", 0xB0: b"\xb1"}


def _key(message: bytes, at: int, name: str) -> tuple[str, bytes | None]:
    """The key, a string; and the constructor to replace if it is a binary of UTF-8, as the Python SDK resends keys."""
    constructor = message[at]
    if constructor in (0xA0, 0xA1):
        value = message[at + 2 : at + 2 + message[at + 1]]
    elif constructor in (0xB0, 0xB1):
        value = message[at + 5 : at + 5 + int.from_bytes(message[at + 1 : at + 5], "big")]
    else:
        raise InvalidField(name, "is not a string")
    try:
        key = value.decode()
    except UnicodeDecodeError:
        raise InvalidField(name, "is not of valid UTF-8") from None
    if len(key) > MAX_ID_CHARACTERS:
        raise LimitExceeded(name, MAX_ID_CHARACTERS, "characters")
    return key, _STRING_OF_BINARY.get(constructor)


def _scheduled_enqueue_time(message: bytes, at: int, extra: Extra) -> None:
    if message[at] != 0x83:
        raise InvalidField(SCHEDULED_ENQUEUE_TIME, "is not a timestamp")
    extra[EXTRA_SCHEDULED_MS] = bounds.time_ms(int.from_bytes(message[at + 1 : at + 9], "big", signed=True))


_INTEGER: Final = frozenset((0x44, 0x53, 0x80, 0x55, 0x81, 0x83, 0x43, 0x52, 0x70, 0x54, 0x71))


def delivery_time_ms(message: bytes, at: int) -> int | None:
    """The value of DELIVERY_TIME at `at`, milliseconds since 1970; None if it is neither a timestamp nor an integer."""
    return bounds.time_ms(int(decode(message, at)[0])) if message[at] in _INTEGER else None


def _delivery_time(message: bytes, at: int, extra: Extra) -> None:
    """The annotation of Service Bus says more than that of JMS, whichever comes first."""
    time_ms = delivery_time_ms(message, at)
    if time_ms is None:
        raise InvalidField(DELIVERY_TIME, "is neither a timestamp nor an integer")
    extra.setdefault(EXTRA_SCHEDULED_MS, time_ms)


_BROKERS: Final = "only a broker sets it"
_ANNOTATIONS: Final[dict[bytes, Any]] = {
    **{
        key.encode(): _BROKERS
        for key in (
            SEQUENCE_NUMBER,
            ENQUEUED_TIME,
            LOCKED_UNTIL,
            ENQUEUE_SEQUENCE_NUMBER,
            MESSAGE_STATE,
            DEADLETTER_SOURCE,
            PARTITION_ID,
            LOCK_TOKEN,
            STORED_DELIVERY_ANNOTATIONS,
        )
    },
    PARTITION_KEY.encode(): _partition_key,
    VIA_PARTITION_KEY.encode(): _via_partition_key,
    SCHEDULED_ENQUEUE_TIME.encode(): _scheduled_enqueue_time,
    DELIVERY_TIME.encode(): _delivery_time,
}
_ULONG: Final = frozenset((0x44, 0x53, 0x80))
_DELIVERY_ANNOTATIONS: Final[dict[bytes, Any]] = {
    LOCK_TOKEN.encode(): _BROKERS,
    STORED_FIRST_ACQUIRER.encode(): _BROKERS,
}


def annotations(
    message: bytes, at: int, end: int, count: int, extra: Extra, names: Mapping[bytes, Any] = _ANNOTATIONS
) -> tuple[bytes | None, int]:
    """The pairs to store, or None if they are stored as they were sent; and the count of their keys and values.

    Keys are symbols or ulongs (3.2.10), and strings are taken as symbols are. Pairs that only a broker sets are left
    out, and partition keys become strings.
    """
    if count & 1:
        raise DecodeError("annotations with an odd number of values", at)
    kept = []
    keep_from = at
    values = count
    keys: set[bytes | int] = set()
    for _ in range(count >> 1):
        begin = at
        constructor = message[at]
        key: bytes | int
        if constructor in _SHORT_TEXT:
            at += 2 + message[at + 1]
            key = message[begin + 2 : at]
        elif constructor in _LONG_TEXT:
            at = skip(message, at)
            key = message[begin + 5 : at]
        elif constructor in _ULONG:
            number, at = decode(message, at)
            key = int(number)
        else:
            raise DecodeError("an annotation's key is no symbol, ulong or string", at)
        if isinstance(key, bytes) and not key.isascii():
            _check_text(key, constructor, begin)
        keys.add(key)
        value_at = at
        at = _check_value(message, at)
        known = names.get(key) if isinstance(key, bytes) else None
        if known is None:
            continue
        if known is _BROKERS:
            kept.append(message[keep_from:begin])
            keep_from = at
            values -= 2
        elif message[value_at] != 0x40:
            constructor = known(message, value_at, extra)
            if constructor is not None:
                kept += (message[keep_from:value_at], constructor)
                keep_from = value_at + 1
    if at != end:
        raise DecodeError("annotations whose size and content differ", end)
    if len(keys) * 2 != count:
        raise DecodeError("annotations with equal keys", end)
    if not kept:
        return None, values
    kept.append(message[keep_from:at])
    return b"".join(kept), values


def delivery_annotations(message: bytes, at: int, end: int, count: int) -> tuple[bytes | None, int]:
    """Read delivery annotations, as `annotations` does; the broker itself needs none of them."""
    return annotations(message, at, end, count, {}, _DELIVERY_ANNOTATIONS)


def _check_value(message: bytes, at: int) -> int:
    """The offset behind the value at `at`, which may be of any type. It is decoded to check it, unless it is short."""
    constructor = message[at]
    if constructor == 0xA1:
        end = at + 2 + message[at + 1]
        value = message[at + 2 : end]
        if not value.isascii():
            _check_text(value, constructor, at)
        return end
    if constructor in _FIXED_WIDTH:
        return at + _FIXED_WIDTH[constructor]
    _, end = decode(message, at)
    return end


def _check_text(value: bytes, constructor: int, at: int) -> None:
    try:
        value.decode("ascii" if constructor in (0xA3, 0xB3) else "utf-8")
    except UnicodeDecodeError:
        raise DecodeError("string or symbol of invalid bytes", at) from None


def check_session_id(session_id: str) -> None:
    """Raises LimitExceeded for more than 128 characters. Service Bus counts characters of UTF-16, so the maximum is 384
    bytes of UTF-8.
    """
    if len(session_id.encode("utf-16-le")) > 2 * MAX_ID_CHARACTERS:
        raise LimitExceeded("session id", MAX_ID_CHARACTERS, "characters")


def _check_id_length(name: str, value: bytes, text: bool) -> None:
    if len(value.decode() if text else value) > MAX_ID_CHARACTERS:
        raise LimitExceeded(name, MAX_ID_CHARACTERS, "characters")


def check_keys(extra: Extra) -> None:
    session_id = extra.get(EXTRA_SESSION_ID)
    if session_id is not None and session_id != extra[EXTRA_PARTITION_KEY]:
        raise UnequalKeys(PARTITION_KEY, "differs from the session id")
