"""Restores a message of the backlog by cutting and joining its bytes, which is several times as fast as decoding it.

Almost all messages have the form that brokers deliver: sections with short descriptors in their usual order, keys of
annotations as short symbols and names of properties as short strings. Any other goes through `broker.pairing.aliases`,
which does the same for any message.
"""

from functools import lru_cache
from typing import Final

from broker.pairing import aliases
from broker.pairing.aliases import (
    MAX_MESSAGE_ID_CHARACTERS,
    MAX_PATH_CHARACTERS,
    MAX_SESSION_ID_CHARACTERS,
    NotRestorable,
    Restored,
    from_backlog,
)
from protocol.client.messages import Message
from protocol.codec import decode, encode, skip
from protocol.errors import ProtocolError
from protocol.symbols import ENQUEUED_TIME, PARTITION_KEY, SCHEDULED_ENQUEUE_TIME, SEQUENCE_NUMBER, Descriptor

_DESCRIBED, _SMALL_ULONG = 0x00, 0x53
_SYMBOL, _STRING, _NULL, _EMPTY_LIST = 0xA3, 0xA1, 0x40, 0x45
_LIST8, _LIST32, _MAP8, _MAP32 = 0xC0, 0xD0, 0xC1, 0xD1
_SMALL_LONG, _LONG, _TIMESTAMP = 0x55, 0x81, 0x83
_HEADER_CODE, _DELIVERY_CODE, _ANNOTATIONS_CODE, _PROPERTIES_CODE, _APPLICATION_CODE, _BODY_CODE = map(
    int,
    (
        Descriptor.HEADER,
        Descriptor.DELIVERY_ANNOTATIONS,
        Descriptor.MESSAGE_ANNOTATIONS,
        Descriptor.PROPERTIES,
        Descriptor.APPLICATION_PROPERTIES,
        Descriptor.DATA,
    ),
)
_DELIVERED: Final = frozenset(name.encode() for name in aliases.OF_THE_BACKLOG)
_NUMBER, _ENQUEUED, _PARTITION_KEY = SEQUENCE_NUMBER.encode(), ENQUEUED_TIME.encode(), PARTITION_KEY.encode()
_PATH, _SESSION_ID = aliases.PATH.encode(), aliases.SESSION_ID.encode()
_TIME_TO_LIVE, _SCHEDULED = aliases.TIME_TO_LIVE.encode(), aliases.SCHEDULED.encode()
_ALIASES: Final = frozenset(name.encode() for name in aliases.ALIASES)
_SCHEDULED_KEY: Final = encode(SCHEDULED_ENQUEUE_TIME)
_GROUP_ID: Final = 10  # its index in the properties
_MOST_PROPERTIES: Final = 13
_UINT_MAX: Final = (1 << 32) - 1


class _Unusual(Exception):
    """The message must be decoded."""


def restore(message: bytes, backlog: str, now_ms: int) -> Restored:
    """Restore a message, as `broker.pairing.aliases.from_backlog` does; the primary judges fields of wrong types."""
    try:
        return _spliced(message, backlog)
    except (_Unusual, NotRestorable, ProtocolError, IndexError, TypeError, ValueError, OverflowError):
        return from_backlog(message, backlog, now_ms)


def _spliced(message: bytes, backlog: str) -> Restored:
    header = properties = b""
    annotations: list[bytes] = []
    own: list[bytes] = []
    found: dict[bytes, int] = {}  # where the values of aliases are
    number: int | None = None
    enqueued_ms = 0
    partition_key: str | None = None
    at, end, last = 0, len(message), 0
    while at < end:
        code = message[at + 2]
        if message[at] != _DESCRIBED or message[at + 1] != _SMALL_ULONG or code <= last or code < _HEADER_CODE:
            raise _Unusual
        if code >= _BODY_CODE:
            break
        last = code
        start = at + 3
        at, count, section_end = _content(message, start)
        if section_end > end:
            raise _Unusual
        if code == _ANNOTATIONS_CODE:
            for _ in range(count // 2):
                key, value = _key(message, at, _SYMBOL)
                behind = _behind(message, value)
                if key not in _DELIVERED:
                    annotations.append(message[at:behind])
                    if key == _PARTITION_KEY:
                        partition_key = _text(message, value)
                elif key == _NUMBER:
                    number = _long(message, value)
                elif key == _ENQUEUED:
                    enqueued_ms = _long(message, value)
                at = behind
        elif code == _APPLICATION_CODE:
            for _ in range(count // 2):
                key, value = _key(message, at, _STRING)
                behind = _behind(message, value)
                if key in _ALIASES:
                    found[key] = value
                else:
                    own.append(message[at:behind])
                at = behind
        else:
            at = section_end
            if code == _PROPERTIES_CODE:
                properties = message[start:at]
            elif code == _HEADER_CODE:
                header = message[start:at]
        if at != section_end:
            raise _Unusual
    if number is None or at == end or _PATH not in found:
        raise _Unusual
    path = _text(message, found[_PATH])
    session_id = _text(message, found[_SESSION_ID]) if _SESSION_ID in found else None
    if session_id is not None and partition_key not in (None, session_id):
        raise _Unusual
    if not 0 < len(path) <= MAX_PATH_CHARACTERS or len(session_id or "") > MAX_SESSION_ID_CHARACTERS:
        raise _Unusual
    ttl_ms = aliases.duration_ms(decode(message, found[_TIME_TO_LIVE])[0]) if _TIME_TO_LIVE in found else None
    if ttl_ms is not None and ttl_ms > _UINT_MAX:
        raise _Unusual
    if _SCHEDULED in found:
        annotations.append(_SCHEDULED_KEY + encode(aliases.scheduled_time(decode(message, found[_SCHEDULED])[0])))
    restored = b"".join(
        (
            _header(header, ttl_ms),
            _map(_ANNOTATIONS_CODE, annotations),
            _properties(properties, backlog, number, session_id),
            _map(_APPLICATION_CODE, own),
            message[at:],
        )
    )
    return Restored(path, restored, partition_key if session_id is None else session_id, number, enqueued_ms)


def _content(message: bytes, at: int) -> tuple[int, int, int]:
    """Return where the values of the list or map at `at` begin, their number, and its end."""
    constructor = message[at]
    if constructor in (_LIST8, _MAP8):
        return at + 3, message[at + 2], at + 2 + message[at + 1]
    if constructor in (_LIST32, _MAP32):
        count = int.from_bytes(message[at + 5 : at + 9], "big")
        return at + 9, count, at + 5 + int.from_bytes(message[at + 1 : at + 5], "big")
    if constructor == _EMPTY_LIST:
        return at + 1, 0, at + 1
    raise _Unusual


def _key(message: bytes, at: int, constructor: int) -> tuple[bytes, int]:
    """The bytes of a short key, and where its value begins."""
    if message[at] != constructor:
        raise _Unusual
    value = at + 2 + message[at + 1]
    return message[at + 2 : value], value


def _behind(message: bytes, at: int) -> int:
    """Where the value at `at` ends."""
    constructor = message[at]
    if constructor in (_STRING, _SYMBOL):
        return at + 2 + message[at + 1]
    if constructor in (_LONG, _TIMESTAMP):
        return at + 9
    return skip(message, at)


def _text(message: bytes, at: int) -> str:
    if message[at] != _STRING:
        raise _Unusual
    return str(message[at + 2 : at + 2 + message[at + 1]], "utf-8")


def _long(message: bytes, at: int) -> int:
    constructor = message[at]
    if constructor in (_LONG, _TIMESTAMP):
        return int.from_bytes(message[at + 1 : at + 9], "big", signed=True)
    if constructor == _SMALL_LONG:
        return int.from_bytes(message[at + 1 : at + 2], "big", signed=True)
    raise _Unusual


@lru_cache(maxsize=256)  # messages have one of a few
def _header(header: bytes, ttl_ms: int | None) -> bytes:
    parsed = Message.decode(bytes((_DESCRIBED, _SMALL_ULONG, _HEADER_CODE)) + header) if header else Message()
    parsed.durable = parsed.durable if header else False
    parsed.ttl_ms = ttl_ms
    parsed.delivery_count = None
    return parsed.header()


def _properties(properties: bytes, backlog: str, number: int, session_id: str | None) -> bytes:
    """The section with the session id, and with a message id if there was none."""
    at, count, end = _content(properties, 0) if properties else (0, 0, 0)
    if count > _MOST_PROPERTIES:
        raise _Unusual
    has_id = count > 0 and properties[at] != _NULL
    if has_id and session_id is None:
        return bytes((_DESCRIBED, _SMALL_ULONG, _PROPERTIES_CODE)) + properties
    behind_id = _behind(properties, at) if count else at
    first = properties[at:behind_id] if has_id else encode(f"{backlog}:{number}"[-MAX_MESSAGE_ID_CHARACTERS:])
    rest = properties[behind_id:end]
    count = max(count, 1)
    if session_id is None:
        return _section(_PROPERTIES_CODE, _LIST8, count, first + rest)
    group = encode(session_id)
    if count <= _GROUP_ID:
        parts = (first, rest, bytes((_NULL,)) * (_GROUP_ID - count), group)
        return _section(_PROPERTIES_CODE, _LIST8, _GROUP_ID + 1, b"".join(parts))
    before = behind_id
    for _ in range(_GROUP_ID - 1):
        before = _behind(properties, before)
    parts = (first, properties[behind_id:before], group, properties[_behind(properties, before) : end])
    return _section(_PROPERTIES_CODE, _LIST8, count, b"".join(parts))


def _map(code: int, pairs: list[bytes]) -> bytes:
    return _section(code, _MAP8, 2 * len(pairs), b"".join(pairs)) if pairs else b""


def _section(code: int, short: int, count: int, content: bytes) -> bytes:
    """A section that is a list or map; `short` is the constructor of short ones."""
    size = len(content)
    if size < 255 and count < 256:
        return bytes((_DESCRIBED, _SMALL_ULONG, code, short, size + 1, count)) + content
    head = bytes((_DESCRIBED, _SMALL_ULONG, code, short | 0x10))
    return b"".join((head, (size + 4).to_bytes(4, "big"), count.to_bytes(4, "big"), content))
