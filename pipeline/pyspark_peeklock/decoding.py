"""Encoded AMQP messages as columns of `rows`. Each message is decoded on its own: this is not a path for bulk."""

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from protocol import bounds
from protocol.client.browsing import fragment_of
from protocol.client.messages import Message
from protocol.symbols import (
    DEAD_LETTER_ERROR_DESCRIPTION,
    DEAD_LETTER_REASON,
    DEADLETTER_SOURCE,
    ENQUEUED_TIME,
    LOCKED_UNTIL,
    MESSAGE_STATE,
    PARTITION_KEY,
    SCHEDULED_ENQUEUE_TIME,
)

_STATES: Final = ("active", "deferred", "scheduled")


def columns_of(encoded: Sequence[bytes], *, has_body: bool) -> dict[str, Any]:
    """What messages say of themselves, by the names of `rows`. Raises DecodeError or LimitExceeded."""
    messages = [Message.decode(each) for each in encoded]
    notes = [message.annotations for message in messages]
    properties = [message.application_properties for message in messages]
    bodies = [bytes_of(message.content()) for message in messages] if has_body else None
    return {
        "partition": [fragment_of(message.sequence_number or 0) for message in messages],
        "sequenceNumber": [message.sequence_number for message in messages],
        "enqueuedTime": times(note.get(ENQUEUED_TIME) for note in notes),
        "scheduledTime": times(note.get(SCHEDULED_ENQUEUE_TIME) for note in notes),
        "expiresAt": times(message.absolute_expiry_ms for message in messages),
        "lockedUntil": times(note.get(LOCKED_UNTIL) for note in notes),
        "state": [_state(note.get(MESSAGE_STATE)) for note in notes],
        "messageId": [text_of(message.message_id) for message in messages],
        "sessionId": [text_of(message.group_id) for message in messages],
        "partitionKey": [text_of(note.get(PARTITION_KEY)) for note in notes],
        "correlationId": [text_of(message.correlation_id) for message in messages],
        "subject": [text_of(message.subject) for message in messages],
        "replyTo": [text_of(message.reply_to) for message in messages],
        "contentType": [text_of(message.content_type) for message in messages],
        "deliveryCount": [min(message.delivery_count or 0, bounds.MAX_COUNT) for message in messages],
        "deadLetterReason": [text_of(each.get(DEAD_LETTER_REASON)) for each in properties],
        "deadLetterDescription": [text_of(each.get(DEAD_LETTER_ERROR_DESCRIPTION)) for each in properties],
        "deadLetterSource": [text_of(note.get(DEADLETTER_SOURCE)) for note in notes],
        "applicationProperties": [pairs_of(each) for each in properties],
        "body": bodies,
        "bodySize": None if bodies is None else [None if body is None else len(body) for body in bodies],
    }


def times(milliseconds: Any) -> pa.Array:
    """Unix milliseconds as timestamps in UTC, within the years that Spark and Python know."""
    kept = [None if value is None else bounds.time_ms(int(value)) for value in milliseconds]
    return pc.multiply(pa.array(kept, pa.int64()), 1000).cast(pa.timestamp("us", "UTC"))


def text_of(value: Any) -> str | None:
    """A value as text: bytes as hexadecimal digits, truth as true and false, all else as Python writes it."""
    if value is None or type(value) is str:
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def pairs_of(properties: dict[Any, Any]) -> list[tuple[str, str | None]]:
    """Application properties as Arrow takes maps. Of values that are no strings only the text is left."""
    return [(str(key), text_of(value)) for key, value in properties.items()]


def _state(state: Any) -> str:
    """Locked messages are active; servers that do not say it show active messages."""
    return _STATES[state] if isinstance(state, int) and 0 <= state < len(_STATES) else "active"


def bytes_of(content: Any) -> bytes | None:
    """The bytes of a body: of its data, or of a value that is a string or a binary; None of others."""
    if isinstance(content, str):
        return content.encode()
    return content if isinstance(content, bytes) else None
