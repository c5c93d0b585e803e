"""A message as it lies in a backlog queue: what would decide about it there is kept under aliases (PN6).

| of the message         | application property           | its type                                |
|------------------------|--------------------------------|-----------------------------------------|
| the destination        | `x-ms-path`                    | string                                  |
| session id             | `x-ms-sessionid`               | string                                  |
| time to live           | `x-ms-timetolive`              | `com.microsoft:timespan`, ticks as long |
| scheduled enqueue time | `x-ms-scheduledenqueuetimeutc` | timestamp                               |

The syphon restores them. A time to live begins anew then, as in the client library of the cloud. Everything else stays
as it is, the message id above all: by it, duplicate detection in the primary recognises a message that was stored there
although its sender had no answer. A message without an id gets one of its place in the backlog, so that the syphon may
send it twice.
"""

from dataclasses import dataclass
from typing import Any, Final

from protocol import bounds
from protocol.client.messages import Message
from protocol.codec import Described, Long, Timestamp
from protocol.errors import InvalidField, ProtocolError
from protocol.message.batches import pack_batch, unpack_batch
from protocol.symbols import (
    DATETIME_OFFSET,
    DEADLETTER_SOURCE,
    ENQUEUE_SEQUENCE_NUMBER,
    ENQUEUED_TIME,
    EPOCH_TICKS,
    LOCKED_UNTIL,
    MESSAGE_STATE,
    PARTITION_ID,
    PARTITION_KEY,
    SCHEDULED_ENQUEUE_TIME,
    SEQUENCE_NUMBER,
    TICKS_PER_MS,
    TIMESPAN,
)

PATH: Final = "x-ms-path"
SESSION_ID: Final = "x-ms-sessionid"
TIME_TO_LIVE: Final = "x-ms-timetolive"
SCHEDULED: Final = "x-ms-scheduledenqueuetimeutc"
ALIASES: Final = (PATH, SESSION_ID, TIME_TO_LIVE, SCHEDULED)

MAX_PATH_CHARACTERS: Final = 260
MAX_SESSION_ID_CHARACTERS: Final = 128
MAX_MESSAGE_ID_CHARACTERS: Final = 128
_UINT_MAX: Final = (1 << 32) - 1
_MAX_TICKS: Final = (1 << 63) - 1  # .NET's TimeSpan.MaxValue
# What the broker of the backlog has set, and the primary will set anew.
OF_THE_BACKLOG: Final = (
    SEQUENCE_NUMBER,
    ENQUEUED_TIME,
    LOCKED_UNTIL,
    ENQUEUE_SEQUENCE_NUMBER,
    MESSAGE_STATE,
    PARTITION_ID,
    DEADLETTER_SOURCE,
)


class AliasTaken(Exception):
    """The message has an application property with the name of an alias, so it cannot go to a backlog queue."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The application property '{name}' is reserved for messages in a backlog queue; rename it.")


class NotRestorable(Exception):
    """A message in a backlog queue has no aliases, or some that make no sense. The text names the property."""


@dataclass(slots=True)
class Restored:
    """A message for the primary. Messages with the same `key` must keep their order; None is no such demand.

    `number` is its sequence number in the backlog queue, and `enqueued_ms` when it came there, in Unix milliseconds.
    """

    path: str
    message: bytes
    key: str | None
    number: int
    enqueued_ms: int


def to_backlog(message: bytes, path: str) -> bytes:
    """The encoded message as it is sent to a backlog queue instead of to `path`. Raises AliasTaken, ProtocolError."""
    try:
        return _aliased(Message.decode(message), path)
    except (IndexError, TypeError, ValueError, OverflowError) as error:
        raise InvalidField("message", f"cannot be read: {error}") from None


def batch_to_backlog(batch: bytes, path: str) -> bytes:
    """Alter each message of a batch (`protocol.message.batches`), as `to_backlog` does. Raises LimitExceeded, too."""
    return pack_batch(to_backlog(message, path) for message in unpack_batch(batch))


def _aliased(parsed: Message, path: str) -> bytes:
    aliases: dict[str, Any] = {PATH: path}
    if parsed.group_id is not None:
        if not isinstance(parsed.group_id, str):
            raise InvalidField("properties.group-id", "must be a text")
        aliases[SESSION_ID] = parsed.group_id
        parsed.group_id = None
    ttl_ms = _time_to_live_ms(parsed)
    if ttl_ms is not None:
        aliases[TIME_TO_LIVE] = Described(TIMESPAN, Long(min(ttl_ms * TICKS_PER_MS, _MAX_TICKS)))
        parsed.ttl_ms = parsed.absolute_expiry_ms = None
    scheduled = parsed.annotations.pop(SCHEDULED_ENQUEUE_TIME, None)
    if scheduled is not None:
        if not isinstance(scheduled, Timestamp):
            raise InvalidField(SCHEDULED_ENQUEUE_TIME, "must be a timestamp")
        aliases[SCHEDULED] = scheduled
    for name in ALIASES:
        if name in parsed.application_properties:
            raise AliasTaken(name)
    parsed.application_properties |= aliases
    return parsed.encode()


def _time_to_live_ms(message: Message) -> int | None:
    """The time to live, which .NET gives as two times if it does not fit into the header."""
    ttl_ms = message.ttl_ms
    if ttl_ms is None:
        return None
    if not isinstance(ttl_ms, int) or isinstance(ttl_ms, bool) or not 0 <= ttl_ms <= _UINT_MAX:
        raise InvalidField("header.ttl", "must be a uint")
    created, expires = message.creation_ms, message.absolute_expiry_ms
    if ttl_ms == _UINT_MAX and isinstance(created, int) and isinstance(expires, int):
        return max(_UINT_MAX, bounds.span_ms(expires - created))
    return ttl_ms


def from_backlog(message: bytes, backlog: str, now_ms: int) -> Restored:
    """The message as it was sent, which lay in the queue `backlog`. Raises NotRestorable.

    `now_ms`, of the wall clock, is for times to live of more than 49 days, which are two times.
    """
    try:
        parsed = Message.decode(message)
        return _restored(parsed, backlog, now_ms)
    except (ProtocolError, IndexError) as error:
        raise NotRestorable(f"The message cannot be read: {error}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise NotRestorable(f"The message has a field that cannot be written: {error}") from None


def _restored(message: Message, backlog: str, now_ms: int) -> Restored:
    properties = message.application_properties
    path = properties.pop(PATH, None)
    if not isinstance(path, str) or not 0 < len(path) <= MAX_PATH_CHARACTERS:
        raise NotRestorable(
            f"The message has no property '{PATH}' that is a text of 1 to {MAX_PATH_CHARACTERS} characters."
        )
    session_id = properties.pop(SESSION_ID, None)
    if session_id is not None:
        if not isinstance(session_id, str) or len(session_id) > MAX_SESSION_ID_CHARACTERS:
            limit = MAX_SESSION_ID_CHARACTERS
            raise NotRestorable(f"The property '{SESSION_ID}' must be a text of at most {limit} characters.")
        message.group_id = session_id
    message.ttl_ms = None  # what it has is of the backlog queue
    if TIME_TO_LIVE in properties:
        _set_time_to_live(message, duration_ms(properties.pop(TIME_TO_LIVE)), now_ms)
    number, enqueued_ms = message.annotations.get(SEQUENCE_NUMBER), message.annotations.get(ENQUEUED_TIME)
    if not isinstance(number, int):
        raise NotRestorable(f"The message has no annotation '{SEQUENCE_NUMBER}'.")
    for name in OF_THE_BACKLOG:
        message.annotations.pop(name, None)
    if SCHEDULED in properties:
        message.annotations[SCHEDULED_ENQUEUE_TIME] = scheduled_time(properties.pop(SCHEDULED))
    if message.message_id is None:
        message.message_id = f"{backlog}:{number}"[-MAX_MESSAGE_ID_CHARACTERS:]
    message.delivery_count = None
    partition_key = message.annotations.get(PARTITION_KEY)
    if session_id is not None and partition_key != session_id and partition_key == str(message.message_id):
        # A partitioned backlog queue that detects duplicates has shown its own key; the primary would refuse both.
        del message.annotations[PARTITION_KEY]
    key = session_id if session_id is not None else partition_key if isinstance(partition_key, str) else None
    return Restored(path, message.encode(), key, int(number), enqueued_ms if isinstance(enqueued_ms, int) else 0)


def _set_time_to_live(message: Message, ttl_ms: int, now_ms: int) -> None:
    message.ttl_ms = min(ttl_ms, _UINT_MAX)
    if ttl_ms > _UINT_MAX:
        message.creation_ms = now_ms
        message.absolute_expiry_ms = bounds.time_ms(now_ms + ttl_ms)


def duration_ms(value: Any) -> int:
    """The time to live in its alias. Raises NotRestorable."""
    match value:
        case Described(descriptor, int(ticks)) if descriptor == TIMESPAN and ticks >= 0:
            return ticks // TICKS_PER_MS
    raise NotRestorable(f"The property '{TIME_TO_LIVE}' must be a duration ({TIMESPAN}) that is not negative.")


def scheduled_time(value: Any) -> Timestamp:
    """The scheduled enqueue time in its alias. Raises NotRestorable."""
    match value:
        case Timestamp():
            return value
        case Described(descriptor, int(ticks)) if descriptor == DATETIME_OFFSET:
            return Timestamp((ticks - EPOCH_TICKS) // TICKS_PER_MS)
    raise NotRestorable(f"The property '{SCHEDULED}' must be a timestamp.")
