"""Keys and values of the store's tables, each value with a checksum that is verified when it is read.

Numbers in keys are unsigned and big-endian, so that the order of the bytes is the order of the numbers. A number
outside their range is refused: KeyOutOfRange for a time, struct.error for a number that the broker itself has counted.
Queue ids are those of `storage.queue_ids`.
"""

import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple
from zlib import crc32

import msgpack
from xxhash import xxh3_64_digest, xxh3_64_intdigest

_pack = msgpack.Packer().pack  # `packb` would make a packer for each value

# 1: before the commit log. 2: META may have a log position, without which the tables alone are not up to date.
FORMAT_VERSION = 2
OLDEST_FORMAT_VERSION = 1  # is upgraded when it is opened
COPIED_BYTES = 16 << 10  # up to this, a copy costs less than a view
NEVER = (1 << 63) - 1  # the time that never comes, milliseconds

FORMAT_VERSION_KEY = b"format-version"  # in META, a document: FORMAT_VERSION
PARTITION_ID_KEY = b"partition-id"  # in META, a document: the partition of this store
NEXT_ENTITY_ID_KEY = b"next-entity-id"  # in META, a document: greater than the ids of all entities so far
KNOWN_STORES_KEY = b"known-stores"  # in META of partition 0, a document: [partition, id of the store that it had last]
NAMESPACE_ID_KEY = b"namespace-id"  # in META, a document: NAMESPACE_ID_BYTES random bytes, the same in all partitions
NAMESPACE_ID_BYTES = 16
STORE_ID_KEY = b"store-id"  # in META, a document: STORE_ID_BYTES random bytes, which no other store and no copy has
STORE_ID_BYTES = 8
LOG_POSITION_KEY = b"log-position"  # in META, a document: log id, worker, LSN; see `storage.log.tables`
PARTITION_SHIFT = 48  # the sequence numbers of a partitioned entity have its partition in the bits from this one on
DELETED_ENTITY_PREFIX = b"deleted-entity-"  # in META, then the key of an entity whose messages are still being deleted
AUTO_DELETED_PREFIX = b"auto-deleted-"  # in META, then the key of an entity deleted here that the catalog still has
STAGED_PREFIX = b"staged-"  # in META, then the key of a message that is stored, and that no entry refers to yet
FROZEN_PREFIX = b"frozen-"  # in META, then the key of an entity that refuses uses, because it is being moved away
# In META, then the key of an entity that is being moved here from another partition.
ARRIVING_PREFIX = b"arriving-"
# In META, then the key of such an entity and a message id of its partition: the id of the same record here. And in the
# other direction, with the id here.
ARRIVED_FROM_PREFIX = b"arrived-from-"
ARRIVED_AS_PREFIX = b"arrived-as-"
# In META, then the key of an entity: the milliseconds for which nobody had used it, or that its fragment has agreed to
# its deletion; see `broker.partition.state.idleness`.
IDLE_PREFIX = b"idle-"
# In META, then a queue id: the partition that may have taken over messages of the queue; for a transfer queue, a list
# of the partitions that its messages are for.
FORWARDED_PREFIX = b"forwarded-"
# In META, then a queue id: sequence numbers below this may be lower than some that the queue has forwarded.
OVERTAKEN_PREFIX = b"overtaken-"


class CorruptRecord(Exception):
    """A stored value does not match its checksum or its shape."""


class KeyOutOfRange(Exception):
    """A number does not fit into a key, which is a mistake of the caller. Nothing was stored."""


class Place(IntEnum):
    """Where in its queue a message is; the second part of a QUEUE key. Locks are not stored."""

    AVAILABLE = 0
    DEFERRED = 1
    SCHEDULED = 2


class Timer(IntEnum):
    """The kind of a timer; the second part of a DUE key."""

    SCHEDULED = 0  # becomes available
    EXPIRY = 1  # time to live ends


class Field(IntEnum):
    """Keys of a queue entry's overlay: what differs between this copy of the message and its record."""

    ENQUEUED_MS = 1
    EXPIRES_MS = 2
    ENQUEUE_SEQUENCE_NUMBER = 3
    PROPERTIES = 4  # application properties set since: name -> str, or bytes of one encoded AMQP value; None: removed
    DEAD_LETTER_SOURCE = 5
    SYSTEM = 6  # fields of the properties section set since: index in its list -> as in PROPERTIES
    HOPS = 7  # number of entities it was forwarded from
    SESSION = 8  # session id, of the messages in a queue or subscription that requires sessions
    DESTINATION = 9  # in a transfer queue: the destination's name, in lower case
    LANE = 10  # in a transfer queue: the destination's partition; earlier versions found it by the name
    RETURNS_MS = 11  # of a scheduled message that was abandoned with a delay: the time of its timer
    SCHEDULED_MS = 12  # of a copy that a rule's action delays: until when. Earlier versions passed it by


Overlay = dict[int, Any]

message_key = struct.Struct(">Q").pack  # message id
queue_key = struct.Struct(">IBQ").pack  # queue id, place, sequence number
entity_key = struct.Struct(">I").pack
unpack_message_key = struct.Struct(">Q").unpack
unpack_queue_key = struct.Struct(">IBQ").unpack
_due = struct.Struct(">IBQQ")  # queue id, timer, time ms, sequence number
_TIMERS = frozenset(Timer)


def due_key(queue_id: int, timer: int, time_ms: int, sequence_number: int) -> bytes:
    """Make the key of a timer that is due at `time_ms` (Unix milliseconds). Raises KeyOutOfRange."""
    try:
        return _due.pack(queue_id, timer, time_ms, sequence_number)
    except struct.error:
        raise KeyOutOfRange(f"due: {queue_id}, {timer}, {time_ms} ms, {sequence_number}") from None


def unpack_due_key(key: bytes) -> tuple[int, int, int, int]:
    """Queue id, timer, time ms, sequence number. Raises CorruptRecord for a key of another shape."""
    if len(key) != _due.size or key[4] not in _TIMERS:
        raise CorruptRecord("due key: of another length, or of no timer that there is")
    return _due.unpack(key)


def due_keys_end(key: bytes) -> bytes:
    """A key above all keys of this key's queue and timer, also above those with invalid times."""
    return key[:5] + b"\xff" * _due.size


def rule_key(entity_id: int, name: str) -> bytes:
    return entity_key(entity_id) + name.encode()


def mark_key(store_id: bytes, queue_id: int) -> bytes:
    return store_id + entity_key(queue_id)


def forwarded_key(queue_id: int) -> bytes:
    return FORWARDED_PREFIX + entity_key(queue_id)


def overtaken_key(queue_id: int) -> bytes:
    return OVERTAKEN_PREFIX + entity_key(queue_id)


def deleted_entity_key(entity_id: int) -> bytes:
    return DELETED_ENTITY_PREFIX + entity_key(entity_id)


def auto_deleted_key(entity_id: int) -> bytes:
    return AUTO_DELETED_PREFIX + entity_key(entity_id)


def frozen_key(entity_id: int) -> bytes:
    return FROZEN_PREFIX + entity_key(entity_id)


def arriving_key(entity_id: int) -> bytes:
    return ARRIVING_PREFIX + entity_key(entity_id)


def staged_key(message_id: int) -> bytes:
    return STAGED_PREFIX + message_key(message_id)


def idle_key(entity_id: int) -> bytes:
    return IDLE_PREFIX + entity_key(entity_id)


# Session ids have 128 characters at most, in UTF-8 at most this many bytes; LMDB takes keys of 511.
MAX_SESSION_ID_BYTES = 384
_session = struct.Struct(">IH").pack  # queue id, bytes of the session id, which follows
_session_entry = struct.Struct(">IBH")  # queue id, place, bytes of the session id; then that, sequence number
_number = struct.Struct(">Q").pack


def session_key(queue_id: int, session_id: bytes) -> bytes:
    return _session(queue_id, len(session_id)) + session_id


def session_entry_key(queue_id: int, place: int, session_id: bytes, sequence_number: int) -> bytes:
    """The length comes before the id, so that entries of one session are adjacent, in the order of their numbers."""
    return _session_entry.pack(queue_id, place, len(session_id)) + session_id + _number(sequence_number)


def unpack_session_key(key: bytes) -> tuple[int, bytes]:
    """Queue id, session id. Raises CorruptRecord for a key of another shape."""
    if len(key) < 6 or len(key) != 6 + int.from_bytes(key[4:6], "big"):
        raise CorruptRecord("session key: of another length than it says")
    return int.from_bytes(key[:4], "big"), key[6:]


def unpack_session_entry_key(key: bytes) -> tuple[int, int, bytes, int]:
    """Queue id, place, session id, sequence number. Raises CorruptRecord for a key of another shape."""
    if len(key) < 15 or len(key) != 15 + int.from_bytes(key[5:7], "big"):
        raise CorruptRecord("session entry key: of another length than it says")
    queue_id, place, _ = _session_entry.unpack_from(key)
    return queue_id, place, key[7:-8], int.from_bytes(key[-8:], "big")


# Message record: checksum of all that follows, enqueued ms, expires ms (NEVER), layout (opaque here: see
# protocol.message.layout.Layout), then the message's bytes.
LAYOUT_BYTES = 16
_message = struct.Struct(">Qqq16s")
_message_rest = struct.Struct(">qq16s")
_expires_ms = struct.Struct(">q").unpack_from
MESSAGE_HEADER_BYTES = _message.size
LAYOUT_AT = MESSAGE_HEADER_BYTES - LAYOUT_BYTES  # of a message record


def encode_message(enqueued_ms: int, expires_ms: int, layout: bytes, body: bytes) -> bytes:
    rest = _message_rest.pack(enqueued_ms, expires_ms, layout) + body
    return xxh3_64_digest(rest) + rest


def check_message(record: bytes) -> None:
    """Raise CorruptRecord if the record is short or its checksum does not match."""
    rest = record[8:] if len(record) <= COPIED_BYTES else memoryview(record)[8:]
    if len(record) < MESSAGE_HEADER_BYTES or xxh3_64_digest(rest) != record[:8]:
        raise CorruptRecord("message record: checksum mismatch")


def message_parts(record: bytes) -> tuple[bytes, bytes]:
    """Layout and body."""
    return record[24:MESSAGE_HEADER_BYTES], record[MESSAGE_HEADER_BYTES:]


def message_enqueued_ms(record: bytes) -> int:
    """The enqueued time; for a scheduled message the scheduled time. Old records may say before 1970; then it is 0."""
    return max(0, int.from_bytes(record[8:16], "big", signed=True))


def message_expires_ms(record: bytes) -> int:
    expires_ms: int
    (expires_ms,) = _expires_ms(record, 16)
    return expires_ms


class Entry(NamedTuple):
    """One message in one queue. `overlay` is None when nothing differs from the record."""

    message_id: int
    delivery_count: int
    overlay: Overlay | None


# Queue entry: crc32 of the rest, message id, delivery count, then the overlay in msgpack or nothing.
_entry_parts = struct.Struct(">IQI").unpack_from
ENTRY_BYTES = 16  # without an overlay
_entry_rest = struct.Struct(">QI").pack
_crc = struct.Struct(">I").pack


def encode_entry(message_id: int, delivery_count: int = 0, overlay: Overlay | None = None) -> bytes:
    rest = _entry_rest(message_id, delivery_count)
    if overlay:
        rest += _pack(overlay)
    return _crc(crc32(rest)) + rest


def decode_entry(value: bytes) -> Entry:
    """Decode a queue entry. Raises CorruptRecord."""
    if len(value) < ENTRY_BYTES:
        raise CorruptRecord("queue entry: too short")
    checksum, message_id, delivery_count = _entry_parts(value)
    if crc32(value[4:]) != checksum:
        raise CorruptRecord("queue entry: checksum mismatch")
    overlay = msgpack.unpackb(value[ENTRY_BYTES:], strict_map_key=False) if len(value) > ENTRY_BYTES else None
    return tuple.__new__(Entry, (message_id, delivery_count, overlay))  # calling the class costs several times as much


# References: the number of queue entries that refer to one message, and its crc32. If it is absent, the number is 1.
def entry_or_none(value: bytes | None) -> Entry | None:
    """Decode an entry of QUEUE; None if there is none, or it cannot be read."""
    try:
        return None if value is None else decode_entry(value)
    except CorruptRecord:
        return None


def encode_references(count: int) -> bytes:
    number = count.to_bytes(4, "big")
    return number + crc32(number).to_bytes(4, "big")


def decode_references(value: bytes) -> int:
    """Decode the number of references to a message. Raises CorruptRecord."""
    if len(value) != 8 or crc32(value[:4]) != int.from_bytes(value[4:], "big"):
        raise CorruptRecord("references: checksum mismatch")
    return int.from_bytes(value[:4], "big")


# Mark: the highest sequence number that was taken over from a queue of another store, and its crc32.
def encode_mark(sequence_number: int) -> bytes:
    number = sequence_number.to_bytes(8, "big")
    return number + crc32(number).to_bytes(4, "big")


def decode_mark(value: bytes) -> int:
    """Decode a mark. Raises CorruptRecord."""
    if len(value) != 12 or crc32(value[:8]) != int.from_bytes(value[8:], "big"):
        raise CorruptRecord("mark: checksum mismatch")
    return int.from_bytes(value[:8], "big")


class SessionRow(NamedTuple):
    """A session with a state: the time when the state was set, ms, and its size in bytes."""

    updated_ms: int
    state_bytes: int


_session_row = struct.Struct(">qQ")


def encode_session(row: SessionRow) -> bytes:
    rest = _session_row.pack(*row)
    return crc32(rest).to_bytes(4, "big") + rest


def decode_session(value: bytes) -> SessionRow:
    """Decode the row of a session. Raises CorruptRecord."""
    if len(value) != 4 + _session_row.size or crc32(value[4:]) != int.from_bytes(value[:4], "big"):
        raise CorruptRecord("session: checksum mismatch")
    return SessionRow(*_session_row.unpack_from(value, 4))


# Session state: checksum, then the bytes that a client set.
STATE_AT = 8


def encode_state(state: bytes) -> bytes:
    return xxh3_64_intdigest(state).to_bytes(8, "big") + state


def decode_state(value: bytes) -> bytes:
    """Decode the state of a session. Raises CorruptRecord."""
    if len(value) < STATE_AT or xxh3_64_intdigest(memoryview(value)[STATE_AT:]) != int.from_bytes(value[:8], "big"):
        raise CorruptRecord("session state: checksum mismatch")
    return value[STATE_AT:]


# Bytes that each copy of a message in a subscription adds to the size of its topic: about those of an entry with its
# key. Bodies count once.
COPY_BYTES = 48


# Duplicate detection. A seen row stands for a message id that was accepted: its digest, the end of its window in ms,
# and the message's sequence number. As bytes, rows sort by their digests, and rows of one digest by the ends of their
# windows.
DIGEST_BYTES = 16
SEEN_BYTES = 32
encode_seen = struct.Struct(">16sqQ").pack
_seen = struct.Struct(">16xqQ")
_seen_row = struct.Struct("32s")
log_key = struct.Struct(">IQ").pack  # entity id, number of the row
run_key = struct.Struct(">II").pack  # entity id, run
filter_key = struct.Struct(">III").pack  # entity id, run, piece
unpack_log_key = struct.Struct(">IQ").unpack
unpack_run_key = struct.Struct(">II").unpack
unpack_filter_key = struct.Struct(">III").unpack


def chunk_key(entity_id: int, run: int, digest: bytes) -> bytes:
    """`digest` is the first digest in the chunk."""
    return run_key(entity_id, run) + digest


class Seen(NamedTuple):
    """A message id that was accepted: the end of its window, ms, and the message's sequence number."""

    end_ms: int
    sequence_number: int


def decode_seen(row: bytes) -> Seen:
    return Seen(*_seen.unpack(row))


# Seen rows of a send in the log, or of a chunk: checksum, then the rows. A piece of a filter is stored in the same way.
def encode_rows(rows: Iterable[bytes | bytearray]) -> bytes:
    joined = b"".join(rows)
    return xxh3_64_intdigest(joined).to_bytes(8, "big") + joined


def check_rows(value: bytes) -> None:
    """Check rows of seen message ids. Raises CorruptRecord."""
    if (
        len(value) <= 8
        or len(value) % SEEN_BYTES != 8
        or xxh3_64_intdigest(memoryview(value)[8:]) != int.from_bytes(value[:8], "big")
    ):
        raise CorruptRecord("seen message ids: checksum mismatch")


def decode_rows(value: bytes) -> list[bytes]:
    """Decode rows of seen message ids. Raises CorruptRecord."""
    check_rows(value)
    return [row for (row,) in _seen_row.iter_unpack(memoryview(value)[8:])]


def find_seen(value: bytes, digest: bytes) -> Seen | None:
    """The chunk's row of a digest, the last one if there are several. Raises CorruptRecord."""
    check_rows(value)
    low, high = 0, len(value) // SEEN_BYTES
    while low < high:
        middle = (low + high) // 2
        at = 8 + middle * SEEN_BYTES
        if value[at : at + DIGEST_BYTES] <= digest:
            low = middle + 1
        else:
            high = middle
    at = 8 + (low - 1) * SEEN_BYTES
    if not low or value[at : at + DIGEST_BYTES] != digest:
        return None
    return decode_seen(value[at : at + SEEN_BYTES])


class RunManifest(NamedTuple):
    """The description of a run of seen rows. An incomplete run is being made or deleted, and is not searched."""

    complete: bool
    level: int
    ids: int
    earliest_end_ms: int  # the earliest end of a row's window
    latest_end_ms: int  # the latest end of a row's window
    log_end: int  # rows of the log below this number are in this run, or were in the runs that it was made of
    filter_bytes: int  # 0: it has no filter


_manifest = struct.Struct(">?BQqqQQ")


def encode_manifest(manifest: RunManifest) -> bytes:
    rest = _manifest.pack(*manifest)
    return crc32(rest).to_bytes(4, "big") + rest


def decode_manifest(value: bytes) -> RunManifest:
    """Decode the manifest of a run of seen message ids. Raises CorruptRecord."""
    if len(value) != 4 + _manifest.size or crc32(value[4:]) != int.from_bytes(value[:4], "big"):
        raise CorruptRecord("run of seen message ids: checksum mismatch")
    return RunManifest(*_manifest.unpack_from(value, 4))


class Counts(NamedTuple):
    """The counts of a queue. A locked message counts as available. Bytes are of message records and session states.

    A topic's numbers are those of the messages sent to it. Its bytes are its size: each body once, COPY_BYTES for each
    copy, and the session states of its subscriptions.
    """

    next_sequence_number: int = 1
    available: int = 0
    deferred: int = 0
    scheduled: int = 0
    size_bytes: int = 0


_counts = struct.Struct(">QQQQQ")


def encode_counts(counts: tuple[int, int, int, int, int]) -> bytes:
    """`counts` are `Counts`, or the same as a plain tuple, which is made faster."""
    rest = _counts.pack(*counts)
    return _crc(crc32(rest)) + rest


def decode_counts(value: bytes) -> Counts:
    """Decode the counts of a queue. Raises CorruptRecord."""
    if len(value) != _counts.size + 4 or crc32(value[4:]) != int.from_bytes(value[:4], "big"):
        raise CorruptRecord("counts: checksum mismatch")
    return Counts(*_counts.unpack_from(value, 4))


def encode_document(document: Any) -> bytes:
    """A META, ENTITIES or RULES value: any msgpack value."""
    rest: bytes = _pack(document)
    return crc32(rest).to_bytes(4, "big") + rest


def decode_document(value: bytes) -> Any:
    """Decode a document. Raises CorruptRecord."""
    if len(value) < 5 or crc32(value[4:]) != int.from_bytes(value[:4], "big"):
        raise CorruptRecord("document: checksum mismatch")
    return msgpack.unpackb(value[4:], strict_map_key=False)
