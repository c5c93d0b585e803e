"""Renders a stored record and its overlay as a message to a receiver."""

import struct
from typing import Any

from protocol.message.rendering import Additions, render, render_embedded
from storage.records import MESSAGE_HEADER_BYTES, NEVER, Field, Place

# checksum (verified by the partition), enqueued ms, expires ms, layout: storage.records' message record
_head = struct.Struct(">Qqq16s").unpack_from

# What an overlay adds to a message. Its other fields say where the message is, and when.
_ADDED = (Field.ENQUEUE_SEQUENCE_NUMBER, Field.DEAD_LETTER_SOURCE, Field.PROPERTIES, Field.SYSTEM)

# `x-opt-message-state` by place (amqp.md 5.4)
_STATE = {Place.AVAILABLE: 0, Place.DEFERRED: 1, Place.SCHEDULED: 2}


def render_delivery(
    record: bytes,
    sequence_number: int,
    delivery_count: int,
    locked_until_ms: int | None,
    overlay: dict[int, Any] | None,
    lock_token: bytes | None,
) -> tuple[bytes, int]:
    """The prefix to send, and the offset in `record` from which the rest is sent.

    `lock_token` is in the order of an AMQP uuid; None as `locked_until_ms` if the message is not locked.
    """
    _, enqueued_ms, expires_ms, layout = _head(record)
    if overlay is None and expires_ms == NEVER:
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
    return render(
        layout,
        record,
        MESSAGE_HEADER_BYTES,
        sequence_number,
        delivery_count,
        *_times(enqueued_ms, expires_ms, overlay, locked_until_ms),
        None if overlay is None or overlay.keys().isdisjoint(_ADDED) else _additions(overlay),
        lock_token,
    )


def embed(
    record: bytes,
    sequence_number: int,
    delivery_count: int,
    locked_until_ms: int | None,
    overlay: dict[int, Any] | None,
    *,
    place: int,
    lock_token: bytes | None = None,
    omit_body: bool = False,
) -> bytes:
    """The whole message as it is in answers of $management; `lock_token` is in the byte order of an AMQP uuid."""
    _, enqueued_ms, expires_ms, layout = _head(record)
    return render_embedded(
        layout,
        record,
        MESSAGE_HEADER_BYTES,
        sequence_number,
        delivery_count,
        *_times(enqueued_ms, expires_ms, overlay, locked_until_ms),
        _additions(overlay or {}, _STATE[Place(place)]),
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


def _additions(overlay: dict[int, Any], message_state: int | None = None) -> Additions:
    return Additions(
        overlay.get(Field.ENQUEUE_SEQUENCE_NUMBER),
        overlay.get(Field.DEAD_LETTER_SOURCE),
        overlay.get(Field.PROPERTIES),
        message_state,
        overlay.get(Field.SYSTEM),
    )
