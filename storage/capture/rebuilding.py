"""Rebuilds the store of a partition by replaying captured rows into it.

The tables of queues, messages and references are changed row by row, as the broker changed them; so the store itself
holds what is there at any moment, and memory is that of one batch of rows. At the cut, `finish` takes out what other
partitions have by then, and makes the tables that follow from these: timers, counts, sessions' entries.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple, Self

import msgpack
import pyarrow as pa
from xxhash import xxh3_128_digest

from storage.capture.lifetimes import Message
from storage.capture.survey import MOVED, Mark, QueueName, Survey, to_ms
from storage.journal.events import ELSEWHERE, ENTERING, LEAVING, Op, name_of
from storage.journal.schema import SUB_QUEUES
from storage.queue_ids import Part, entity_of, part_of, queue_id_of
from storage.records import (
    COPY_BYTES,
    MESSAGE_HEADER_BYTES,
    NEVER,
    PARTITION_SHIFT,
    CorruptRecord,
    Counts,
    Entry,
    Field,
    Overlay,
    Place,
    SessionRow,
    Timer,
    check_message,
    decode_entry,
    decode_references,
    decode_session,
    due_key,
    encode_counts,
    encode_document,
    encode_entry,
    encode_references,
    encode_session,
    encode_state,
    entity_key,
    forwarded_key,
    message_enqueued_ms,
    message_expires_ms,
    message_key,
    queue_key,
    session_entry_key,
    session_key,
    unpack_queue_key,
    unpack_session_key,
)
from storage.store import Store, Table

COMMIT_BYTES: Final = 64 << 20  # of records, and of what else was written, before they are committed
_ROW_BYTES: Final = 200  # what a change of an entry counts as
_PAGE: Final = 1000
_NO_MESSAGE: Final = 0  # the message id of entries whose bodies the capture does not have
_BYTES: Final = 3  # the place of a queue's bytes in its counts
_UNDEFINED: Final = 1 << 28  # entities without a definition get ids from here on, while rows are replayed
_PARTS: Final = {name: part for part, name in SUB_QUEUES.items()}
_ENTERING: Final = frozenset(map(name_of, ENTERING))
_LEAVING: Final = frozenset(map(name_of, LEAVING))
_STATE_SET: Final = name_of(Op.STATE_SET)
_STATES: Final = {_STATE_SET, name_of(Op.STATE_CLEARED)}
_UNCHANGING: Final = {"delivered", "released"}
_COLUMNS: Final = [
    "eventTime", "op", "entity", "subQueue", "sequenceNumber", "deliveryCount", "reason", "originEntity",
    "originSubQueue", "originSequenceNumber", "sessionId", "record", "overlay",
]  # fmt: skip


class Entity(NamedTuple):
    """What must be known of an entity. `topic_id` is that of a subscription's topic."""

    entity_id: int
    is_topic: bool = False
    topic_id: int | None = None
    requires_session: bool = False
    partitions: tuple[int, ...] = (0,)


Entities = Mapping[str, Entity]  # by path, in lower case


@dataclass(slots=True)
class Rebuilt:
    """What became of one partition's rows."""

    messages: Counter[tuple[str, str]] = field(default_factory=Counter)  # by entity, and by sub-queue and place
    bytes: int = 0  # of their records
    without_body: Counter[str] = field(default_factory=Counter)  # by entity: not restored
    states: int = 0  # of sessions
    without_state: Counter[str] = field(default_factory=Counter)  # sessions by entity: their state is not restored
    undefined: Counter[str] = field(default_factory=Counter)  # by entity that no definition describes: not restored
    unknown: int = 0  # rows about messages that the rows before them do not have
    put_back: int = 0  # had left for another partition, which did not have them yet
    taken_over: int = 0  # had not left yet, and another partition has them

    def document(self) -> dict[str, Any]:
        """Return plain values, for JSON and the like."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return plain | {"messages": [[*key, count] for key, count in self.messages.items()]}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        messages = Counter({(path, place): count for path, place, count in document["messages"]})
        by_entity = {name: Counter(document[name]) for name in ("without_body", "without_state", "undefined")}
        return cls(**{**document, **by_entity, "messages": messages})


class Rebuilder:
    """The rebuilding of one partition. At first, `store` has nothing but definitions."""

    def __init__(self, store: Store, partition: int, entities: Entities, survey: Survey) -> None:
        self._store = store
        self._partition = partition
        self._entities = entities
        self._survey = survey
        self._marks = _marks_of_others(survey, partition)
        self._undefined: dict[str, Entity] = {}
        self._names: dict[int, str] = {entity.entity_id: path for path, entity in entities.items()}
        self._next_id = 1
        self._pending_bytes = 0
        self._leaving: set[tuple[int, int]] = set()  # have entered another queue of this partition, and leave next
        self._staged: dict[int, int] = {}  # records of open transactions: message ids by number of origin
        self._adopted: dict[int, int] = {}  # those that entries of this turn refer to
        self._shared: dict[bytes, int] = {}  # digests of the records of this turn's copies: message ids
        self._unknown_states: set[bytes] = set()  # by keys of SESSIONS: the capture does not have their bytes
        self._turn_at: Any = None
        self.found = Rebuilt()

    # -- rows

    def add(self, batch: pa.RecordBatch | pa.Table) -> None:
        """The next rows, with columns of SCHEMA. Raises StoreError."""
        for row in batch.select(_COLUMNS).to_pylist():
            if row["op"] == "staged":
                self._stage(row)
            elif row["entity"] is None:
                continue
            elif row["op"] in _STATES:
                self._set_state(row)
            elif row["sequenceNumber"] is not None:
                self._replay(row)
        if self._pending_bytes >= COMMIT_BYTES:
            self._commit()

    def _replay(self, row: dict[str, Any]) -> None:
        op, path, number = row["op"], row["entity"].lower(), row["sequenceNumber"]
        if op in _UNCHANGING:
            return
        queue_id = self._queue(path, row["subQueue"])
        if queue_id is None:
            return
        if op in _ENTERING:
            self._enter(queue_id, number, row)
        elif (found := self._find(queue_id, number)) is None:
            self.found.unknown += op in _LEAVING
        elif op in _LEAVING:
            self._leaving.discard((queue_id, number))
            place, entry = found
            if row["reason"] == ELSEWHERE and not self._is_taken_over(path, row["subQueue"], number, entry):
                self.found.put_back += 1
                return
            self._delete(queue_id, place, number, entry)
        else:
            self._change(queue_id, number, *found, row)

    def _queue(self, path: str, sub_queue: str) -> int | None:
        part = _PARTS.get(sub_queue)
        if part is None:
            return None
        entity = self._entities.get(path) or self._undefined.get(path)
        if entity is None:
            entity = self._undefined[path] = Entity(_UNDEFINED + len(self._undefined))
            self._names[entity.entity_id] = path
        elif self._partition not in entity.partitions and entity.entity_id < _UNDEFINED:
            return None  # it was moved away, or is not here yet
        return queue_id_of(entity.entity_id, part)

    def _enter(self, queue_id: int, number: int, row: dict[str, Any]) -> None:
        if (there := self._find(queue_id, number)) is not None:
            place, entry = there
            self._delete(queue_id, place, number, entry)
        message_id = self._body(row)
        overlay = None if row["overlay"] is None else msgpack.unpackb(row["overlay"], strict_map_key=False)
        place = Place.SCHEDULED if row["op"] == "scheduled" else Place.AVAILABLE
        if overlay and Field.RETURNS_MS in overlay:  # moved here with its entity, while it was delayed
            place = Place.SCHEDULED
        self._put(queue_id, place, number, Entry(message_id, row["deliveryCount"] or 0, overlay))

    def _body(self, row: dict[str, Any]) -> int:
        """The id of the message's record, which may be there already; _NO_MESSAGE if the rows do not have it."""
        record: bytes | None = row["record"]
        if self._turn_at != row["eventTime"]:
            self._turn_at = row["eventTime"]
            self._shared.clear()
            self._adopted.clear()
        if (row["originSequenceNumber"] or 0) < 0:
            return self._adopt(row["originSequenceNumber"])
        if row["originSequenceNumber"] is not None and row["reason"] != MOVED:
            origin_id = self._queue(row["originEntity"].lower(), row["originSubQueue"])
            origin = None if origin_id is None else self._find(origin_id, row["originSequenceNumber"])
            if origin is not None:
                assert origin_id is not None
                self._leaving.add((origin_id, row["originSequenceNumber"]))
                message_id = origin[1].message_id
                if message_id != _NO_MESSAGE:
                    self._refer(message_id, 1)
                    return message_id
        if record is None or not _is_whole(record):
            return _NO_MESSAGE
        if row["reason"] != "published":
            return self._append(record)
        # Copies of one message share one record. They are of one turn.
        digest = xxh3_128_digest(record)
        known = self._shared.get(digest)
        if known is not None and self._store.get(Table.MESSAGES, message_key(known)) is not None:
            self._refer(known, 1)
            return known
        self._shared[digest] = message_id = self._append(record)
        return message_id

    def _stage(self, row: dict[str, Any]) -> None:
        number, record = row["originSequenceNumber"], row["record"]
        if record is None or number is None or not _is_whole(record):
            return
        self._drop_staged(number)  # its transaction was rolled back, and the id is used again
        self._staged[number] = self._append(record)

    def _set_state(self, row: dict[str, Any]) -> None:
        queue_id = self._queue(row["entity"].lower(), row["subQueue"])
        if queue_id is None:
            return
        key, state = session_key(queue_id, row["sessionId"].encode()), row["record"]
        self._unknown_states.discard(key)
        if state is not None:
            self._store.put(Table.SESSIONS, key, encode_session(SessionRow(to_ms(row["eventTime"]), len(state))))
            self._store.put(Table.SESSION_STATES, key, encode_state(state))
            self._pending_bytes += len(state) + _ROW_BYTES
            return
        self._store.delete(Table.SESSIONS, key)
        self._store.delete(Table.SESSION_STATES, key)
        if row["op"] == _STATE_SET:
            self._unknown_states.add(key)

    def _drop_staged(self, number: int) -> None:
        if (message_id := self._staged.pop(number, None)) is not None:
            self._store.delete(Table.MESSAGES, message_key(message_id))

    def _adopt(self, number: int) -> int:
        message_id = self._staged.pop(number, None)
        if message_id is not None:
            self._adopted[number] = message_id
            return message_id
        message_id = self._adopted.get(number, _NO_MESSAGE)
        if message_id == _NO_MESSAGE or self._store.get(Table.MESSAGES, message_key(message_id)) is None:
            return _NO_MESSAGE
        self._refer(message_id, 1)
        return message_id

    def _append(self, record: bytes) -> int:
        message_id = self._next_id
        self._next_id += 1
        self._store.append(Table.MESSAGES, [(message_key(message_id), record)])
        self._pending_bytes += len(record)
        return message_id

    def _refer(self, message_id: int, change: int) -> None:
        """Count so many more entries that refer to the record, which is there."""
        key = message_key(message_id)
        value = self._store.get(Table.REFS, key)
        count = (1 if value is None else decode_references(value)) + change
        if count > 1:
            self._store.put(Table.REFS, key, encode_references(count))
        elif value is not None:
            self._store.delete(Table.REFS, key)
        if count < 1:
            self._store.delete(Table.MESSAGES, key)

    def _find(self, queue_id: int, number: int) -> tuple[Place, Entry] | None:
        for place in Place:
            value = self._store.get(Table.QUEUE, queue_key(queue_id, place, number))
            if value is not None:
                return place, decode_entry(value)
        return None

    def _put(self, queue_id: int, place: Place, number: int, entry: Entry) -> None:
        self._store.put(Table.QUEUE, queue_key(queue_id, place, number), encode_entry(*entry))
        self._pending_bytes += _ROW_BYTES

    def _delete(self, queue_id: int, place: Place, number: int, entry: Entry) -> None:
        self._store.delete(Table.QUEUE, queue_key(queue_id, place, number))
        self._pending_bytes += _ROW_BYTES
        if entry.message_id != _NO_MESSAGE:
            self._refer(entry.message_id, -1)

    def _change(self, queue_id: int, number: int, place: Place, entry: Entry, row: dict[str, Any]) -> None:
        """Change the message as a row says that neither enters nor leaves."""
        overlay: Overlay | None = entry.overlay
        if row["overlay"] is not None:
            overlay = msgpack.unpackb(row["overlay"], strict_map_key=False)
        to = place
        if row["op"] == "changed":
            to = Place[row["reason"].upper()]
            overlay = None if row["overlay"] is None else overlay
        elif row["op"] == "deferred":
            to = Place.DEFERRED
        elif row["op"] == "returned":
            to = Place.AVAILABLE
            overlay = {key: value for key, value in (overlay or {}).items() if key != Field.RETURNS_MS}
        elif overlay and Field.RETURNS_MS in overlay:
            to = Place.SCHEDULED
        count = entry.delivery_count if row["deliveryCount"] is None else row["deliveryCount"]
        changed = Entry(entry.message_id, count, overlay or None)
        if (to, changed) != (place, entry):
            self._store.delete(Table.QUEUE, queue_key(queue_id, place, number))
            self._put(queue_id, to, number, changed)

    def _is_taken_over(self, path: str, sub_queue: str, number: int, entry: Entry) -> bool:
        """Whether the partition that this message was forwarded to has it at the cut."""
        marks = self._marks.get(QueueName(path, sub_queue), {})
        lane = (entry.overlay or {}).get(Field.LANE)
        return any(number <= mark.number for partition, mark in marks.items() if lane in (None, partition))

    def _commit(self) -> None:
        self._store.commit()
        self._pending_bytes = 0

    # -- the cut

    def finish(self, unwanted: Iterable[Message] = ()) -> Rebuilt:
        """Make the store whole, without these messages of the partition. Raises StoreError."""
        for each in unwanted:
            unwanted_id = self._queue(each.entity, each.sub_queue)
            if unwanted_id is not None and (found := self._find(unwanted_id, each.number)) is not None:
                self._delete(unwanted_id, found[0], each.number, found[1])
        for queue_id, number in self._leaving:
            if (found := self._find(queue_id, number)) is not None:
                self._delete(queue_id, found[0], number, found[1])
        for number in [*self._staged]:
            self._drop_staged(number)
        for name, marks in self._marks.items():
            self._remove_taken_over(name, marks)
        self._commit()
        self._remove_what_cannot_be()
        derived = _Derived(self._store, self._by_id())
        for queue_id, place, number, entry in self._entries():
            record = self._store.get(Table.MESSAGES, message_key(entry.message_id))
            assert record is not None, "entries and records are changed together"
            self.found.messages[self._names[entity_of(queue_id)], _shown(queue_id, place)] += 1
            self.found.bytes += len(record)
            derived.add(queue_id, place, number, entry, record, self._references(entry.message_id))
            self._pending_bytes += _ROW_BYTES
        for key, value in self._items(Table.SESSIONS):
            queue_id, _ = unpack_session_key(key)
            derived.add_state(queue_id, decode_session(value).state_bytes)
            self.found.states += 1
        derived.write(self._next_numbers())
        self._commit()
        return self.found

    def _remove_what_cannot_be(self) -> None:
        """Entries without a definition, or without a body. Others may share the bodies of the former."""
        for queue_id, place, number, entry in self._entries():
            path = self._names[entity_of(queue_id)]
            if entity_of(queue_id) >= _UNDEFINED:
                self.found.undefined[path] += 1
            elif entry.message_id == _NO_MESSAGE:
                self.found.without_body[path] += 1
            else:
                continue
            self._delete(queue_id, place, number, entry)
        for key, _ in self._items(Table.SESSIONS):
            if not self._has_sessions(key):
                self._store.delete(Table.SESSIONS, key)
                self._store.delete(Table.SESSION_STATES, key)
        for key in filter(self._has_sessions, self._unknown_states):
            self.found.without_state[self._names[entity_of(unpack_session_key(key)[0])]] += 1
        self._commit()

    def _has_sessions(self, key: bytes) -> bool:
        """Whether the queue of a session's key may have any."""
        entity = self._entities.get(self._names[entity_of(unpack_session_key(key)[0])])
        return entity is not None and entity.requires_session

    def _by_id(self) -> dict[int, Entity]:
        return {entity.entity_id: entity for entity in self._entities.values()}

    def _references(self, message_id: int) -> int:
        value = self._store.get(Table.REFS, message_key(message_id))
        return 1 if value is None else decode_references(value)

    def _entries(self, first: bytes = b"", end: bytes = b"\xff" * 14) -> Iterator[tuple[int, Place, int, Entry]]:
        for key, value in self._items(Table.QUEUE, first, end):
            queue_id, place, number = unpack_queue_key(key)
            yield queue_id, Place(place), number, decode_entry(value)

    def _items(self, table: Table, first: bytes = b"", end: bytes = b"\xff" * 512) -> Iterator[tuple[bytes, bytes]]:
        """Yield the items in the order of their keys; those that were yielded may be deleted meanwhile."""
        while items := self._store.scan(table, first, end, _PAGE):
            yield from items
            first = items[-1][0] + b"\0"
            if self._pending_bytes >= COMMIT_BYTES:
                self._commit()

    def _remove_taken_over(self, name: QueueName, marks: Mapping[int, Mark]) -> None:
        """Remove messages that another partition has at the cut, and that had not left their queue here yet."""
        entity = self._entities.get(name.entity)
        part = _PARTS.get(name.sub_queue)
        if entity is None or part is None:
            return
        queue_id = queue_id_of(entity.entity_id, part)
        highest = max(mark.number for mark in marks.values())
        start, end = (queue_key(queue_id, Place.AVAILABLE, number) for number in (0, highest + 1))
        for _, place, number, entry in self._entries(start, end):
            lane = (entry.overlay or {}).get(Field.LANE)
            since_ms = self._since_ms(entry)
            if any(
                number <= mark.number and since_ms <= mark.time_ms  # else it is of another entity of this name
                for partition, mark in marks.items()
                if lane in (None, partition)
            ):
                self._delete(queue_id, place, number, entry)
                self.found.taken_over += 1

    def _since_ms(self, entry: Entry) -> int:
        since_ms: int | None = (entry.overlay or {}).get(Field.ENQUEUED_MS)
        if since_ms is not None:
            return since_ms
        record = self._store.get(Table.MESSAGES, message_key(entry.message_id))
        return 0 if record is None else message_enqueued_ms(record)

    def _next_numbers(self) -> dict[int, int]:
        """Return the next number of all queues that ever had one, by queue id."""
        found: dict[int, int] = {}
        for queue in {queue for _, queue in (*self._survey.highest, *self._survey.given)}:
            entity, part = self._entities.get(queue.entity), _PARTS.get(queue.sub_queue)
            if entity is None or part is None or self._partition not in entity.partitions:
                continue
            # A plain entity may have been on another partition before.
            of = (self._partition,) if len(entity.partitions) > 1 else self._survey.cuts.keys()
            number = self._survey.next_number(queue, of)
            if entity.is_topic and part is Part.MAIN:
                number = max(number, self._survey.next_of_topic(queue, of, _first_number(entity, self._partition)))
            found[queue_id_of(entity.entity_id, part)] = number
        return found


class _Derived:
    """The tables that follow from entries and records. Entries are added in the order of their keys."""

    def __init__(self, store: Store, entities: Mapping[int, Entity]) -> None:
        self._store = store
        self._entities = entities
        self._counts: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])  # by place; bytes
        self._lanes: dict[int, set[int]] = defaultdict(set)  # by transfer queue
        self._copies: Counter[int] = Counter()  # by topic
        # By topic, and by how many entries share a record: the bytes of these, once for each entry.
        self._shared_bytes: dict[int, Counter[int]] = defaultdict(Counter)
        self._state_bytes: Counter[int] = Counter()  # of the subscriptions, by topic

    def add(self, queue_id: int, place: Place, number: int, entry: Entry, record: bytes, references: int) -> None:
        entity = self._entities[entity_of(queue_id)]
        overlay = entry.overlay or {}
        counts = self._counts[queue_id]
        counts[place] += 1
        counts[_BYTES] += len(record)
        if entity.topic_id is not None:
            self._copies[entity.topic_id] += 1
            self._shared_bytes[entity.topic_id][references] += len(record)
        if part_of(queue_id) == Part.TRANSFER and Field.LANE in overlay:
            self._lanes[queue_id].add(overlay[Field.LANE])
        if part_of(queue_id) == Part.MAIN and entity.requires_session and Field.SESSION in overlay:
            key = session_entry_key(queue_id, place, overlay[Field.SESSION].encode(), number)
            self._store.put(Table.SESSION_ENTRIES, key, b"")
        timer = _timer(queue_id, place, entity, overlay, record)
        if timer is not None:
            kind, time_ms = timer
            self._store.put(Table.DUE, due_key(queue_id, kind, time_ms, number), message_key(entry.message_id))

    def add_state(self, queue_id: int, state_bytes: int) -> None:
        self._counts[queue_id][_BYTES] += state_bytes
        topic_id = self._entities[entity_of(queue_id)].topic_id
        if topic_id is not None:
            self._state_bytes[topic_id] += state_bytes

    def write(self, next_numbers: Mapping[int, int]) -> None:
        topics = {queue_id_of(topic_id) for topic_id in (*self._copies, *self._state_bytes)}
        for queue_id in sorted({*self._counts, *next_numbers, *topics}):
            available, deferred, scheduled, size_bytes = self._counts[queue_id]
            if queue_id in topics:
                size_bytes += self._copies_bytes(entity_of(queue_id))
            counts = Counts(next_numbers.get(queue_id, 1), available, deferred, scheduled, size_bytes)
            self._store.put(Table.COUNTS, entity_key(queue_id), encode_counts(counts))
        for queue_id, lanes in self._lanes.items():
            self._store.put(Table.META, forwarded_key(queue_id), encode_document(sorted(lanes)))

    def _copies_bytes(self, topic_id: int) -> int:
        """Each record once, COPY_BYTES for each entry, and states. All entries of a record are of one topic."""
        shared = sum(size // count for count, size in self._shared_bytes[topic_id].items())
        return self._copies[topic_id] * COPY_BYTES + shared + self._state_bytes[topic_id]


def _timer(queue_id: int, place: Place, entity: Entity, overlay: Overlay, record: bytes) -> tuple[Timer, int] | None:
    """The kind and time, milliseconds, of the timer that an entry has."""
    if place is Place.SCHEDULED:
        own = overlay.get(Field.RETURNS_MS, overlay.get(Field.ENQUEUED_MS))
        return Timer.SCHEDULED, message_enqueued_ms(record) if own is None else own
    expires_ms = overlay.get(Field.EXPIRES_MS)
    if expires_ms is None:
        expires_ms = message_expires_ms(record)
    if place is Place.AVAILABLE and part_of(queue_id) == Part.MAIN and expires_ms != NEVER and not entity.is_topic:
        return Timer.EXPIRY, expires_ms
    return None


def _first_number(entity: Entity, partition: int) -> int:
    return 1 + (partition << PARTITION_SHIFT if len(entity.partitions) > 1 else 0)


def _marks_of_others(survey: Survey, partition: int) -> dict[QueueName, dict[int, Mark]]:
    """Return what other partitions have taken over, by queue."""
    found: dict[QueueName, dict[int, Mark]] = defaultdict(dict)
    for (queue, by), mark in survey.marks.items():
        if by != partition:
            found[queue][by] = mark
    return found


def _is_whole(record: bytes) -> bool:
    try:
        check_message(record)
    except CorruptRecord:
        return False
    return len(record) >= MESSAGE_HEADER_BYTES


def _shown(queue_id: int, place: Place) -> str:
    sub_queue = SUB_QUEUES[Part(part_of(queue_id))]
    if place is Place.AVAILABLE:
        return sub_queue
    return place.name.lower() if sub_queue == "active" else f"{sub_queue}, {place.name.lower()}"
