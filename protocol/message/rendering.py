"""Renders a stored message for a receiver.

The broker writes a new header, the lock token and its own message annotations; the stored bytes follow. These begin
with the sender's annotation pairs, which continue the map of annotations, and then have the bare message. So most
deliveries are a prefix and the unchanged stored bytes. Changed properties or application properties are put into the
prefix too, and only the stored bytes behind them are sent.

Header and properties are always sent, even if they are empty, because some clients rely on them.
"""

import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

from protocol.codec import Int, Short, decode_exactly, encode, skip
from protocol.message.layout import DURABLE, HAS_DELIVERY_ANNOTATIONS, HAS_PRIORITY, LAYOUT, Layout, unpack_layout
from protocol.message.stored import values_of, without
from protocol.symbols import (
    DEADLETTER_SOURCE,
    ENQUEUE_SEQUENCE_NUMBER,
    ENQUEUED_TIME,
    LOCK_TOKEN,
    LOCKED_UNTIL,
    MESSAGE_STATE,
    PARTITION_ID,
    PARTITION_KEY,
    SCHEDULED_ENQUEUE_TIME,
    SEQUENCE_NUMBER,
    STORED_FIRST_ACQUIRER,
)

MAX_TTL_MS: Final = (1 << 32) - 1  # the maximum of a header; the true time to live is in the properties' times
MAX_EXPIRY_MS: Final = 253_402_243_199_000  # 9999-12-31T07:59:59Z: the latest that clients with local dates can show


class Additions(NamedTuple):
    """Parts that few messages have; parts that are None are left out.

    `properties` are application properties that were set later, by name: a str, bytes of one encoded AMQP value, or
    None for a removed one. `system` are fields of the properties section that were set later, by index, in the same
    form. `message_state` is 0 active, 1 deferred, 2 scheduled. `partition_id` is of a partitioned entity, from 0 to
    32767, and `partition_key` a key that the sender did not set. `scheduled_ms` is an enqueue time that replaces the
    sender's.
    """

    enqueue_sequence_number: int | None = None
    dead_letter_source: str | None = None
    properties: Mapping[str, str | bytes | None] | None = None
    message_state: int | None = None
    system: Mapping[int, bytes | None] | None = None
    partition_id: int | None = None
    partition_key: str | None = None
    scheduled_ms: int | None = None


def render(
    layout: bytes,
    record: bytes,
    start: int,
    sequence_number: int,
    delivery_count: int,
    enqueued_ms: int,
    locked_until_ms: int | None = None,
    ttl_ms: int | None = None,
    additions: Additions | None = None,
    lock_token: bytes | None = None,
) -> tuple[bytes, int]:
    """A prefix, and the offset in `record` from which the rest is sent.

    `record[start:]` are the bytes stored with `layout`. `delivery_count` counts earlier failed deliveries. `ttl_ms` is
    the effective time to live, counted from `enqueued_ms`. `lock_token`, the 16 bytes of an AMQP uuid, is given
    together with the end of the lock; only a peeked message, which has additions, may have an end and no token.
    """
    flags, priority, values, pairs_bytes, properties_bytes, _ = _unpack_layout(layout)
    if additions is not None or flags >= HAS_DELIVERY_ANNOTATIONS:
        return _render_with(
            additions or _NO_ADDITIONS,
            layout,
            record,
            start,
            sequence_number,
            delivery_count,
            enqueued_ms,
            locked_until_ms,
            ttl_ms,
            lock_token,
        )
    header = _HEADER[flags, priority] if ttl_ms is None else _header_with_ttl(flags, priority, ttl_ms)
    if locked_until_ms is not None:
        prefix = header + _pack_locked(
            delivery_count,
            _LOCK_TOKEN,
            lock_token,
            _ANNOTATIONS,
            _LOCKED_BYTES + pairs_bytes,
            6 + values,
            _SEQUENCE_NUMBER,
            sequence_number,
            _ENQUEUED_TIME,
            enqueued_ms,
            _LOCKED_UNTIL,
            locked_until_ms,
        )
    else:
        prefix = header + _pack_plain(
            delivery_count,
            _ANNOTATIONS,
            _PLAIN_BYTES + pairs_bytes,
            4 + values,
            _SEQUENCE_NUMBER,
            sequence_number,
            _ENQUEUED_TIME,
            enqueued_ms,
        )
    bare = start + pairs_bytes
    if ttl_ms is not None:
        rest = bare + properties_bytes
        return b"".join((prefix, record[start:bare], _with_times(record[bare:rest], enqueued_ms, ttl_ms))), rest
    if properties_bytes:
        return prefix, start
    return prefix + record[start:bare] + _NO_PROPERTIES, bare


def render_embedded(
    layout: bytes,
    record: bytes,
    start: int,
    sequence_number: int,
    delivery_count: int,
    enqueued_ms: int,
    locked_until_ms: int | None = None,
    ttl_ms: int | None = None,
    additions: Additions | None = None,
    lock_token: bytes | None = None,
    omit_body: bool = False,
) -> bytes:
    """The whole message for answers of $management; `omit_body` leaves out body and footer."""
    prefix, offset = render(
        layout,
        record,
        start,
        sequence_number,
        delivery_count,
        enqueued_ms,
        locked_until_ms,
        ttl_ms,
        additions,
        lock_token,
    )
    if omit_body:
        parts = unpack_layout(layout)
        body = start + parts.annotation_bytes + parts.properties_bytes + parts.application_properties_bytes
        return prefix + record[offset:body]
    return b"".join((prefix, memoryview(record)[offset:]))


def with_changes(
    layout: bytes, body: bytes, properties: Mapping[str, str | bytes | None], system: Mapping[int, bytes | None]
) -> tuple[bytes, bytes]:
    """Layout and stored bytes of a message into which later changes were merged; see `Additions`."""
    parts = unpack_layout(layout)
    properties_at = parts.annotation_bytes
    application_properties_at = properties_at + parts.properties_bytes
    body_at = application_properties_at + parts.application_properties_bytes
    fields = body[properties_at:application_properties_at]
    if system:
        fields = _with_fields(fields, system)
    pairs = body[application_properties_at:body_at]
    if properties:
        pairs = _merged(pairs, properties)
    changed = parts._replace(properties_bytes=len(fields), application_properties_bytes=len(pairs))
    return LAYOUT.pack(*changed), b"".join((body[:properties_at], fields, pairs, body[body_at:]))


def header_bytes(
    layout: bytes, body: bytes, properties: Mapping[str, str | bytes | None], system: Mapping[int, bytes | None]
) -> int:
    """The size of all sections but the body, after later changes were merged into them; see `Additions`."""
    parts = unpack_layout(layout)
    sections = body[: parts.annotation_bytes + parts.properties_bytes + parts.application_properties_bytes]
    changed = unpack_layout(with_changes(layout, sections, properties, system)[0])
    return changed.annotation_bytes + changed.properties_bytes + changed.application_properties_bytes


# --- the common way ---------------------------------------------------------------------------------------------------

_unpack_layout = LAYOUT.unpack


def _header_begin(flags: int, priority: int, ttl: bytes) -> bytes:
    """A header up to the constructor of the ttl field."""
    fields = (b"\x41" if flags & DURABLE else b"\x42") + (bytes((0x50, priority)) if flags & HAS_PRIORITY else b"\x40")
    to_come = _HEADER_END_BYTES + (4 if ttl == b"\x70" else 0)
    return b"\x00\x53\x70\xc0" + bytes((1 + len(fields) + len(ttl) + to_come, 5)) + fields + ttl


_HEADER_END: Final = b"\x40\x70"  # first-acquirer null, the constructor of the delivery count
_HEADER_END_BYTES: Final = len(_HEADER_END) + 4
_FLAGS_AND_PRIORITY: Final = [
    (flags, priority) for flags in range(4) for priority in (range(256) if flags & HAS_PRIORITY else (0,))
]
_HEADER: Final = {key: _header_begin(*key, b"\x40") + _HEADER_END for key in _FLAGS_AND_PRIORITY}
_HEADER_TO_TTL: Final = {key: _header_begin(*key, b"\x70") for key in _FLAGS_AND_PRIORITY}


def _header_with_ttl(flags: int, priority: int, ttl_ms: int) -> bytes:
    return _HEADER_TO_TTL[flags, priority] + min(ttl_ms, MAX_TTL_MS).to_bytes(4, "big") + _HEADER_END


_ANNOTATIONS: Final = b"\x00\x53\x72\xd1"
_SEQUENCE_NUMBER: Final = encode(SEQUENCE_NUMBER) + b"\x81"
_ENQUEUED_TIME: Final = encode(ENQUEUED_TIME) + b"\x83"
_LOCKED_UNTIL: Final = encode(LOCKED_UNTIL) + b"\x83"
_ENQUEUE_SEQUENCE_NUMBER: Final = encode(ENQUEUE_SEQUENCE_NUMBER) + b"\x81"
_MESSAGE_STATE: Final = encode(MESSAGE_STATE)
_DEADLETTER_SOURCE: Final = encode(DEADLETTER_SOURCE)
_PARTITION_ID: Final = encode(PARTITION_ID)
_PARTITION_KEY: Final = encode(PARTITION_KEY)
_SCHEDULED_KEY: Final = SCHEDULED_ENQUEUE_TIME.encode()
_SCHEDULED_ENQUEUE_TIME: Final = encode(SCHEDULED_ENQUEUE_TIME) + b"\x83"
_FIRST_ACQUIRER: Final = encode(STORED_FIRST_ACQUIRER)
_NO_PROPERTIES: Final = b"\x00\x53\x73\x45"

_plain = struct.Struct(f">I4sII{len(_SEQUENCE_NUMBER)}sq{len(_ENQUEUED_TIME)}sq")
_pack_plain = _plain.pack
_pack_ours = struct.Struct(f">{len(_SEQUENCE_NUMBER)}sq{len(_ENQUEUED_TIME)}sq").pack
_PLAIN_BYTES: Final = _plain.size - 4 - 4 - 4  # the map's size counts neither itself nor the bytes before it
_LOCK_TOKEN: Final = b"\x00\x53\x71\xc1" + bytes((1 + len(encode(LOCK_TOKEN)) + 17, 2)) + encode(LOCK_TOKEN) + b"\x98"
_LOCKED_BYTES: Final = _PLAIN_BYTES + len(_LOCKED_UNTIL) + 8
_pack_locked = struct.Struct(f">I{len(_LOCK_TOKEN)}s16s{_plain.format[2:]}{len(_LOCKED_UNTIL)}sq").pack


# --- additions --------------------------------------------------------------------------------------------------------


def _render_with(
    additions: Additions,
    layout: bytes,
    record: bytes,
    start: int,
    sequence_number: int,
    delivery_count: int,
    enqueued_ms: int,
    locked_until_ms: int | None,
    ttl_ms: int | None,
    lock_token: bytes | None,
) -> tuple[bytes, int]:
    parts = unpack_layout(layout)
    flags, priority = parts.flags & ~HAS_DELIVERY_ANNOTATIONS, parts.priority
    properties_at = start + parts.annotation_bytes
    delivery_annotations = b"" if lock_token is None else _LOCK_TOKEN + lock_token
    header = _HEADER[flags, priority] if ttl_ms is None else _header_with_ttl(flags, priority, ttl_ms)
    if parts.flags & HAS_DELIVERY_ANNOTATIONS:
        pairs_at = skip(record, skip(record, start))
        delivery_annotations, first_acquirer = _delivery_annotations(record[start:pairs_at], lock_token)
        if first_acquirer:
            header = header[: -len(_HEADER_END)] + first_acquirer + _HEADER_END[1:]
        parts = parts._replace(annotation_values=parts.annotation_values - 2, annotation_bytes=properties_at - pairs_at)
        start = pairs_at
    pairs = record[start:properties_at]
    if additions.scheduled_ms is not None and (kept := without(pairs, _SCHEDULED_KEY)) is not pairs:
        parts = parts._replace(annotation_values=parts.annotation_values - 2, annotation_bytes=len(kept))
        pairs = kept
    application_properties_at = properties_at + parts.properties_bytes
    properties = record[properties_at:application_properties_at]
    if additions.system:
        properties = _with_fields(properties, additions.system)
    prefix = [
        header,
        delivery_count.to_bytes(4, "big"),
        delivery_annotations,
        _annotations(parts, sequence_number, enqueued_ms, locked_until_ms, additions),
        pairs,
        (properties or _NO_PROPERTIES) if ttl_ms is None else _with_times(properties, enqueued_ms, ttl_ms),
    ]
    if not additions.properties:
        return b"".join(prefix), application_properties_at
    body_at = application_properties_at + parts.application_properties_bytes
    prefix.append(_merged(record[application_properties_at:body_at], additions.properties))
    return b"".join(prefix), body_at


_NO_ADDITIONS: Final = Additions()


def _delivery_annotations(stored: bytes, lock_token: bytes | None) -> tuple[bytes, bytes]:
    """The section of delivery annotations: ours, and the sender's from the pair that stores them. No bytes if there are
    none. And the encoded first-acquirer, if it is stored with them.
    """
    pairs_at = skip(stored, 0) + 9
    values, pairs, first_acquirer = int.from_bytes(stored[pairs_at - 4 : pairs_at], "big"), stored[pairs_at:], b""
    if pairs.startswith(_FIRST_ACQUIRER):
        end = len(_FIRST_ACQUIRER) + 1
        values, pairs, first_acquirer = values - 2, pairs[end:], pairs[end - 1 : end]
    if lock_token is not None:
        values, pairs = values + 2, _LOCK_TOKEN[_PAIRS_AT:] + lock_token + pairs
    section = b"\x00\x53\x71\xd1" + _two(4 + len(pairs), values) + pairs
    return section if values else b"", first_acquirer


_PAIRS_AT: Final = 6  # in a section that is a map of 8-bit size


def _annotations(
    parts: Layout, sequence_number: int, enqueued_ms: int, locked_until_ms: int | None, additions: Additions
) -> bytes:
    """The section of message annotations up to the sender's own pairs."""
    ours = _pack_ours(_SEQUENCE_NUMBER, sequence_number, _ENQUEUED_TIME, enqueued_ms)
    values = 4
    if locked_until_ms is not None:
        ours += _LOCKED_UNTIL + _long(locked_until_ms)
        values += 2
    if additions.enqueue_sequence_number is not None:
        ours += _ENQUEUE_SEQUENCE_NUMBER + _long(additions.enqueue_sequence_number)
        values += 2
    if additions.message_state is not None:
        ours += _MESSAGE_STATE + encode(Int(additions.message_state))
        values += 2
    if additions.dead_letter_source is not None:
        ours += _DEADLETTER_SOURCE + encode(additions.dead_letter_source)
        values += 2
    if additions.partition_id is not None:
        ours += _PARTITION_ID + encode(Short(additions.partition_id))
        values += 2
    if additions.partition_key is not None:
        ours += _PARTITION_KEY + encode(additions.partition_key)
        values += 2
    if additions.scheduled_ms is not None:
        ours += _SCHEDULED_ENQUEUE_TIME + _long(additions.scheduled_ms)
        values += 2
    return _ANNOTATIONS + _two(4 + len(ours) + parts.annotation_bytes, values + parts.annotation_values) + ours


# --- changed sections -------------------------------------------------------------------------------------------------

_two = struct.Struct(">II").pack
_long = struct.Struct(">q").pack
_times = struct.Struct(">BqBq").pack
_EXPIRY_FIELD: Final = 8  # absolute-expiry-time; creation-time is the next
_CREATION_FIELD: Final = 9


def _with_times(properties: bytes, enqueued_ms: int, ttl_ms: int) -> bytes:
    """The properties section (empty: none) with creation-time and absolute-expiry-time for the ttl."""
    times = _times(0x83, min(enqueued_ms + ttl_ms, MAX_EXPIRY_MS), 0x83, enqueued_ms)
    count, at = values_of(properties) if properties else (0, 0)
    if count <= _EXPIRY_FIELD:
        fields = properties[at:] + b"\x40" * (_EXPIRY_FIELD - count) + times
        count = _CREATION_FIELD + 1
    else:
        begin = at
        for _ in range(_EXPIRY_FIELD):
            at = at + 1 if properties[at] == 0x40 else skip(properties, at)
        before = properties[begin:at]
        for _ in range(min(count, _CREATION_FIELD + 1) - _EXPIRY_FIELD):
            at = at + 1 if properties[at] == 0x40 else skip(properties, at)
        fields = before + times + properties[at:]
        count = max(count, _CREATION_FIELD + 1)
    return b"\x00\x53\x73\xd0" + _two(len(fields) + 4, count) + fields


def _with_fields(properties: bytes, changes: Mapping[int, bytes | None]) -> bytes:
    """The properties section (empty: none) with these fields replaced, by index."""
    count, at = values_of(properties) if properties else (0, 0)
    fields = []
    for _ in range(count):
        end = skip(properties, at)
        fields.append(properties[at:end])
        at = end
    fields += [b"\x40"] * (max(changes) + 1 - count)
    for index, value in changes.items():
        fields[index] = b"\x40" if value is None else value
    content = b"".join(fields)
    return b"\x00\x53\x73\xd0" + _two(len(content) + 4, len(fields)) + content


def _merged(application_properties: bytes, changes: Mapping[str, str | bytes | None]) -> bytes:
    """The section (empty: none) with these properties added, replaced or removed, by name."""
    added = {encode(name): encode(value) if isinstance(value, str) else value for name, value in changes.items()}
    pairs = []
    if application_properties:
        count, at = values_of(application_properties)
        for _ in range(count >> 1):
            value_at = skip(application_properties, at)
            end = skip(application_properties, value_at)
            name = application_properties[at:value_at]
            if name[0] != 0xA1:  # not every encoder uses the short form, and some clients send symbols
                name = encode(str(decode_exactly(name)))
            if name not in added:
                pairs.append(application_properties[at:end])
            at = end
    pairs += [name + value for name, value in added.items() if value is not None]
    content = b"".join(pairs)
    return b"\x00\x53\x74\xd1" + _two(len(content) + 4, 2 * len(pairs)) + content
