"""Finds the session of a published or forwarded message, whose sender did not choose the entity with sessions."""

import struct
from typing import Any

from broker.partition.messages.moves import DESCRIPTION, REASON
from broker.partition.state.queue import Queue
from protocol.codec import decode_exactly
from protocol.errors import ProtocolError
from storage.records import MAX_SESSION_ID_BYTES, Field, Overlay, message_parts

SESSION_ID_IS_NULL = "Session ID is null."
_TEXT = "Session enabled entity doesn't allow a message whose session identifier is null."

GROUP_ID = 10  # field of AMQP's properties section (3.2.4)
_layout = struct.Struct(">4xII4x").unpack  # bytes of annotations and of properties: protocol.message.layout


def session_id_in(record: bytes) -> str | None:
    """The session id in the stored message; None if it has none."""
    layout, body = message_parts(record)
    annotation_bytes, properties_bytes = _layout(layout)
    if not properties_bytes:
        return None
    try:
        fields = decode_exactly(body[annotation_bytes : annotation_bytes + properties_bytes]).value
    except ProtocolError:
        return None
    return _valid(fields[GROUP_ID] if len(fields) > GROUP_ID else None)


def session_id_of(overlay: Overlay | None, said: str | None) -> str | None:
    """The session of a message, by its own session id `said` and later changes in the overlay."""
    changed: dict[int, bytes | None] = (overlay or {}).get(Field.SYSTEM) or {}
    if GROUP_ID not in changed:
        return said
    value = changed[GROUP_ID]
    return None if value is None else _valid(decode_exactly(value))


def _valid(value: Any) -> str | None:
    return str(value) if isinstance(value, str) and len(value.encode()) <= MAX_SESSION_ID_BYTES else None


def without_session(queue: Queue, overlay: Overlay | None) -> Overlay:
    """The overlay of a message without a session in the dead-letter queue of `queue`, which requires sessions (DL4)."""
    queue.tally.dead_lettered[SESSION_ID_IS_NULL] = queue.tally.dead_lettered.get(SESSION_ID_IS_NULL, 0) + 1
    overlay = overlay or {}
    properties = overlay.get(Field.PROPERTIES) or {}
    return {
        **overlay,
        Field.PROPERTIES: {**properties, REASON: SESSION_ID_IS_NULL, DESCRIPTION: _TEXT},
        Field.DEAD_LETTER_SOURCE: queue.terms.name,
    }
