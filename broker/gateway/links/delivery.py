"""Renders a stored record and its overlay as a message to a receiver."""

import struct
from collections.abc import Mapping
from typing import Any

from broker.namespace.fragments import Keys, partition_of_number
from protocol import bounds
from protocol.message.fields import delivery_time_ms, id_text
from protocol.message.layout import unpack_layout
from protocol.message.rendering import Additions, render, render_embedded
from protocol.message.stored import annotation, field
from protocol.symbols import DELIVERY_TIME, PARTITION_KEY, SCHEDULED_ENQUEUE_TIME
from storage.records import MESSAGE_HEADER_BYTES, NEVER, Field, Place

# checksum (verified by the partition), enqueued ms, expires ms, layout: storage.records' message record
_head = struct.Struct(">Qqq16s").unpack_from

# What an overlay adds to a message. Its other fields say where the message is, and when.
_ADDED = (
    Field.ENQUEUE_SEQUENCE_NUMBER,
    Field.DEAD_LETTER_SOURCE,
    Field.PROPERTIES,
    Field.SYSTEM,
    Field.SCHEDULED_MS,
)

# `x-opt-message-state` by place (amqp.md 5.4). A receiver sees the last one, too, if the message had been scheduled.
_STATE = {Place.AVAILABLE: 0, Place.DEFERRED: 1, Place.SCHEDULED: 2}
_WAS_SCHEDULED = _STATE[Place.SCHEDULED]

_SCHEDULED_ENQUEUE_TIME, _PARTITION_KEY = SCHEDULED_ENQUEUE_TIME.encode(), PARTITION_KEY.encode()
_DELIVERY_TIME = DELIVERY_TIME.encode()
_MESSAGE_ID, _GROUP_ID = 0, 10  # fields of the properties section
_TIMESTAMP = 0x83  # the constructor
_NONE = Keys.NONE  # here, because to look up a member of an enum takes as long as a call


def render_delivery(
    record: bytes,
    sequence_number: int,
    delivery_count: int,
    locked_until_ms: int | None,
    overlay: dict[int, Any] | None,
    lock_token: bytes | None,
    keys: Keys = Keys.NONE,
    is_copy: bool = False,
) -> tuple[bytes, int]:
    """The prefix to send, and the offset in `record` from which the rest is sent.

    `lock_token` is in the order of an AMQP uuid; None as `locked_until_ms` if the message is not locked. `is_copy`: the
    message is a subscription's, and always has an enqueue-sequence-number: if it has no earlier one, its own.
    """
    _, enqueued_ms, expires_ms, layout = _head(record)
    additions = None
    if overlay is None and keys is _NONE and not is_copy:
        if expires_ms == NEVER:
            return render(
                layout,
                record,
                MESSAGE_HEADER_BYTES,
                sequence_number,
                delivery_count,
                enqueued_ms,
                locked_until_ms,
                None,
                None,
                lock_token,
            )
    else:
        overlay = overlay or {}
        state = _received_state(record, overlay)
        if state or is_copy or keys is not _NONE or not overlay.keys().isdisjoint(_ADDED):
            additions = _additions(record, sequence_number, overlay, keys, is_copy, state)
    return render(
        layout,
        record,
        MESSAGE_HEADER_BYTES,
        sequence_number,
        delivery_count,
        *_times(enqueued_ms, expires_ms, overlay, locked_until_ms),
        additions,
        lock_token,
    )


def embed(
    record: bytes,
    sequence_number: int,
    delivery_count: int,
    locked_until_ms: int | None,
    overlay: dict[int, Any] | None,
    *,
    place: int | None,
    keys: Keys,
    is_copy: bool = False,
    lock_token: bytes | None = None,
    omit_body: bool = False,
) -> bytes:
    """The whole message as it is in answers of $management; `lock_token` is in the byte order of an AMQP uuid.

    `place` is None for an active message that is received; `is_copy` as in `render_delivery`.
    """
    _, enqueued_ms, expires_ms, layout = _head(record)
    overlay = overlay or {}
    state = _received_state(record, overlay) or 0 if place is None else _STATE[Place(place)]
    return render_embedded(
        layout,
        record,
        MESSAGE_HEADER_BYTES,
        sequence_number,
        delivery_count,
        *_times(enqueued_ms, expires_ms, overlay, locked_until_ms),
        _additions(record, sequence_number, overlay, keys, is_copy, state),
        lock_token,
        omit_body,
    )


def _times(
    enqueued_ms: int, expires_ms: int, overlay: dict[int, Any] | None, locked_until_ms: int | None
) -> tuple[int, int | None, int | None]:
    """Enqueued, locked until, and the effective time to live."""
    if overlay:
        enqueued_ms = overlay.get(Field.ENQUEUED_MS, enqueued_ms)
        expires_ms = overlay.get(Field.EXPIRES_MS, expires_ms)
    return enqueued_ms, locked_until_ms, None if expires_ms == NEVER else max(0, expires_ms - enqueued_ms)


def _additions(
    record: bytes,
    sequence_number: int,
    overlay: Mapping[int, Any],
    keys: Keys,
    is_copy: bool,
    message_state: int | None,
) -> Additions:
    is_partitioned = keys is not _NONE
    return Additions(
        overlay.get(Field.ENQUEUE_SEQUENCE_NUMBER, sequence_number if is_copy else None),
        overlay.get(Field.DEAD_LETTER_SOURCE),
        overlay.get(Field.PROPERTIES),
        message_state,
        overlay.get(Field.SYSTEM),
        partition_of_number(sequence_number) if is_partitioned else None,
        _added_key(record, overlay.get(Field.SYSTEM) or {}, keys) if is_partitioned else None,
        overlay.get(Field.SCHEDULED_MS),
    )


def _received_state(record: bytes, overlay: Mapping[int, Any]) -> int | None:
    """The state of an active message for its receiver; None in place of 0, which is not sent.

    The record of a message that had to wait has the time that its sender has set as the time when it came; if that time
    was over when it came, the record has the later time. The overlay of a message that an action delayed says so.
    """
    if Field.SCHEDULED_MS in overlay:
        return _WAS_SCHEDULED
    if Field.ENQUEUED_MS not in overlay:
        return None
    _, enqueued_ms, _, layout = _head(record)
    pairs = _annotation_pairs(record, layout)
    set_time = annotation(pairs, _SCHEDULED_ENQUEUE_TIME)
    if set_time is not None and set_time[0] == _TIMESTAMP:
        scheduled_ms: int | None = bounds.time_ms(int.from_bytes(set_time[1:], "big", signed=True))
    else:
        set_time = annotation(pairs, _DELIVERY_TIME)
        scheduled_ms = None if set_time is None else delivery_time_ms(set_time, 0)
    return _WAS_SCHEDULED if scheduled_ms == enqueued_ms else None


def _annotation_pairs(record: bytes, layout: bytes) -> bytes:
    return record[MESSAGE_HEADER_BYTES : MESSAGE_HEADER_BYTES + unpack_layout(layout).annotation_bytes]


def _added_key(record: bytes, changed: Mapping[int, bytes | None], keys: Keys) -> str | None:
    """The key that the message's fragment was chosen by; None if the sender has set it, or there is none (PE5).

    `changed` are fields of the properties section that were set since.
    """
    _, _, _, layout = _head(record)
    parts = unpack_layout(layout)
    properties_at = MESSAGE_HEADER_BYTES + parts.annotation_bytes
    if annotation(record[MESSAGE_HEADER_BYTES:properties_at], _PARTITION_KEY) is not None:
        return None
    properties = record[properties_at : properties_at + parts.properties_bytes]
    key = changed[_GROUP_ID] if _GROUP_ID in changed else field(properties, _GROUP_ID)
    if key is None and keys is Keys.WITH_MESSAGE_ID:
        key = changed[_MESSAGE_ID] if _MESSAGE_ID in changed else field(properties, _MESSAGE_ID)
    if key is None:
        return None
    try:
        return id_text(key).decode()
    except UnicodeError:  # a binary id, or one of broken text, which no string can show
        return None
