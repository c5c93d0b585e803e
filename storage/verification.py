"""Verifies one partition: each table by itself, and the tables against each other.

Needs about 30 bytes of memory for each message, and 10 to 35 for each queue entry; reads all of the store once.
"""

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from storage.duplicate_verification import DuplicateVerification
from storage.findings import PartitionReport, Problem
from storage.log.snapshot import Snapshot
from storage.queue_ids import Part, entity_of, part_of, queue_id_of
from storage.records import (
    ARRIVING_PREFIX,
    COPY_BYTES,
    DELETED_ENTITY_PREFIX,
    FORWARDED_PREFIX,
    NEVER,
    STAGED_PREFIX,
    STORE_ID_BYTES,
    CorruptRecord,
    Counts,
    Field,
    Place,
    Timer,
    check_message,
    decode_counts,
    decode_document,
    decode_entry,
    decode_mark,
    decode_references,
    message_expires_ms,
    message_key,
    queue_key,
    unpack_due_key,
    unpack_message_key,
    unpack_queue_key,
)
from storage.session_verification import SessionVerification
from storage.store import StoreError, Table

ANY_TIME = -1

_PLACES = frozenset(Place)
_TIMERS = frozenset(Timer)


def verify_snapshot(snapshot: Snapshot) -> PartitionReport:
    report = PartitionReport(snapshot.partition_id)
    try:
        _Verification(snapshot, report).run()
    except StoreError as error:
        report.add(Problem.UNREADABLE_STORE, None, b"", str(error))
    return report


class _Timed:
    """The entries of a queue that need a timer of one kind, by ascending sequence number."""

    def __init__(self) -> None:
        self.numbers = array("Q")
        self.message_ids = array("Q")
        self.times_ms = array("q")  # ANY_TIME if the entry has no time
        self.has_timer = bytearray()

    def add(self, sequence_number: int, message_id: int, time_ms: int) -> None:
        self.numbers.append(sequence_number)
        self.message_ids.append(message_id)
        self.times_ms.append(time_ms)
        self.has_timer.append(False)


class _Queue:
    """The contents of one queue: sequence numbers by place, in order, and the entries that need timers."""

    def __init__(self) -> None:
        self.places: dict[Place, array[int]] = {place: array("Q") for place in Place}
        self.timed = {timer: _Timed() for timer in Timer}
        self.timers_unknown: set[int] = set()  # numbers of entries that are unreadable or in quarantine
        self.entries_set_aside: set[int] = set()
        self.set_aside = False
        self.size_bytes = 0

    def place_of(self, sequence_number: int) -> Place | None:
        for place, numbers in self.places.items():
            if _index(numbers, sequence_number) is not None:
                return place
        return None


class _Verification:
    def __init__(self, snapshot: Snapshot, report: PartitionReport) -> None:
        self._snapshot = snapshot
        self._report = report
        self._message_ids = array("Q")
        self._message_sizes = array("Q")
        self._message_expiries = array("q")
        self._staged: set[int] = set()  # ids of messages to which no entry refers yet
        self._references = array("L")  # by message: the number of entries that refer to it
        self._queues: defaultdict[int, _Queue] = defaultdict(_Queue)
        self._entity_ids: set[int] = set()
        self._forwarding: list[tuple[bytes, int]] = []  # keys in META, queue ids
        self._transferring: set[int] = set()  # ids of transfer queues for which META lists partitions
        self._deleted: set[int] = set()  # entities whose contents are being deleted step by step
        self._published: set[int] = set()  # entity ids of topics, whose waiting messages have no timers
        self._topics: dict[int, int] = {}  # entity id of a subscription, even of one being deleted -> that of its topic
        self._topic_bytes: Counter[int] = Counter()  # entity id -> bytes of bodies, each once, and of copies
        self._bodies_set_aside: set[int] = set()
        self._entry_set_aside = False
        self._sessions = SessionVerification(report)
        self._duplicates = DuplicateVerification(report)

    def run(self) -> None:
        self._meta()
        self._entities()
        self._rules()
        self._marks()
        self._quarantine()
        self._messages()
        self._entries()
        self._check_sessions()
        self._duplicates.check(self._snapshot, self._deleted)
        self._timers()
        self._counts()
        self._compare_references()

    def _documents(self, table: Table) -> Iterator[tuple[bytes, Any]]:
        """Keys and documents; None in place of an unreadable document."""
        for key, value in self._snapshot.items(table):
            self._report.records[table] += 1
            try:
                document = decode_document(value)
            except (CorruptRecord, ValueError) as error:
                self._report.add(Problem.CORRUPT_RECORD, table, key, str(error))
                document = None
            yield key, document

    def _meta(self) -> None:
        for key, document in self._documents(Table.META):
            if key.startswith(DELETED_ENTITY_PREFIX):
                entity_id = int.from_bytes(key.removeprefix(DELETED_ENTITY_PREFIX), "big")
                self._deleted.add(entity_id)
                if isinstance(document, dict) and document["topic_id"] is not None:
                    self._topics[entity_id] = document["topic_id"]
            elif key.startswith(ARRIVING_PREFIX):  # it is a copy that is not used yet, and perhaps never will be
                self._deleted.add(int.from_bytes(key.removeprefix(ARRIVING_PREFIX), "big"))
            elif key.startswith(STAGED_PREFIX):
                self._staged.add(int.from_bytes(key.removeprefix(STAGED_PREFIX), "big"))
            elif key.startswith(FORWARDED_PREFIX):
                queue_id = int.from_bytes(key.removeprefix(FORWARDED_PREFIX), "big")
                self._forwarding.append((key, queue_id))
                if isinstance(document, list):
                    self._transferring.add(queue_id)

    def _entities(self) -> None:
        subscriptions: dict[int, str] = {}
        topics: dict[str, int] = {}
        for key, document in self._documents(Table.ENTITIES):
            self._entity_ids.add(int.from_bytes(key, "big"))
            kind = document.get("kind") if isinstance(document, dict) else None
            if kind is not None and document.get("requires_session"):
                self._sessions.add_entity(int.from_bytes(key, "big"))
            if kind is not None and document.get("requires_duplicate_detection"):
                self._duplicates.add_entity(int.from_bytes(key, "big"))
            if kind == "subscription":
                subscriptions[int.from_bytes(key, "big")] = document["topic"].lower()
            elif kind == "topic":
                topics[document["name"].lower()] = int.from_bytes(key, "big")
                self._published.add(int.from_bytes(key, "big"))
        self._topics.update((key, topics[name]) for key, name in subscriptions.items() if name in topics)

    def _rules(self) -> None:
        for key, _ in self._documents(Table.RULES):
            entity_id = int.from_bytes(key[:4], "big")
            if entity_id not in self._topics and entity_id not in self._deleted:
                text = f"entity {entity_id}: {key[4:].decode(errors='replace')!r} is a rule of no subscription"
                self._report.add(Problem.STRAY_RULE, Table.RULES, key, text)

    def _marks(self) -> None:
        """Check the records of forwarding, for queues of this store and of others. Every store has all entities."""
        for key, queue_id in self._forwarding:
            self._check_mark_of(queue_id, Table.META, key)
        for key, value in self._snapshot.items(Table.MARKS):
            self._report.records[Table.MARKS] += 1
            if len(key) != STORE_ID_BYTES + 4:
                self._malformed(Table.MARKS, key)
                continue
            try:
                decode_mark(value)
            except CorruptRecord as error:
                self._report.add(Problem.CORRUPT_RECORD, Table.MARKS, key, str(error))
            self._check_mark_of(int.from_bytes(key[STORE_ID_BYTES:], "big"), Table.MARKS, key)

    def _check_mark_of(self, queue_id: int, table: Table, key: bytes) -> None:
        entity_id = entity_of(queue_id)
        if entity_id not in self._entity_ids and entity_id not in self._deleted:
            self._report.add(Problem.STRAY_MARK, table, key, f"queue {queue_id}: forwarded from, and not there")

    def _quarantine(self) -> None:
        """A record in quarantine is no problem, nor that the timer and size of its entry may still be there."""
        for key, _ in self._snapshot.items(Table.QUARANTINE):
            self._report.records[Table.QUARANTINE] += 1
            self._duplicates.add_set_aside(key[0], key[1:])
            if key[0] == Table.QUEUE and len(key) == 14:
                queue_id, _, sequence_number = unpack_queue_key(key[1:])
                self._queues[queue_id].timers_unknown.add(sequence_number)
                self._queues[queue_id].entries_set_aside.add(sequence_number)
                self._queues[queue_id].set_aside = True
                self._entry_set_aside = True
            elif key[0] == Table.MESSAGES and len(key) == 9:
                self._bodies_set_aside.add(unpack_message_key(key[1:])[0])

    def _messages(self) -> None:
        for key, record in self._snapshot.items(Table.MESSAGES):
            self._report.records[Table.MESSAGES] += 1
            if len(key) != 8:
                self._malformed(Table.MESSAGES, key)
                continue
            try:
                check_message(record)
                expires_ms = message_expires_ms(record)
            except CorruptRecord as error:
                self._report.add(Problem.CORRUPT_RECORD, Table.MESSAGES, key, str(error))
                expires_ms = ANY_TIME
            self._message_ids.append(unpack_message_key(key)[0])
            self._message_sizes.append(len(record))
            self._message_expiries.append(expires_ms)
        self._references = array("L", bytes(array("L").itemsize * len(self._message_ids)))

    def _entries(self) -> None:
        for key, value in self._snapshot.items(Table.QUEUE):
            self._report.records[Table.QUEUE] += 1
            if len(key) != 13 or key[4] not in _PLACES:
                self._malformed(Table.QUEUE, key)
                continue
            queue_id, place, sequence_number = unpack_queue_key(key)
            queue = self._queues[queue_id]
            elsewhere = queue.place_of(sequence_number)
            if elsewhere is not None:
                text = f"queue {queue_id}: sequence number {sequence_number} is also {elsewhere.name.lower()}"
                self._report.add(Problem.TWO_PLACES, Table.QUEUE, key, text)
            queue.places[Place(place)].append(sequence_number)
            self._entry(queue_id, queue, Place(place), sequence_number, key, value)

    def _entry(
        self, queue_id: int, queue: _Queue, place: Place, sequence_number: int, key: bytes, value: bytes
    ) -> None:
        try:
            entry = decode_entry(value)
        except (CorruptRecord, ValueError) as error:
            self._report.add(Problem.CORRUPT_RECORD, Table.QUEUE, key, str(error))
            queue.timers_unknown.add(sequence_number)
            self._sessions.add_unreadable(queue_id, place, sequence_number)
            return
        overlay = entry.overlay or {}
        self._sessions.add_entry(queue_id, place, sequence_number, overlay.get(Field.SESSION))
        has_destination = Field.DESTINATION in overlay and queue_id in self._transferring
        if part_of(queue_id) == Part.TRANSFER and not has_destination and entity_of(queue_id) not in self._deleted:
            text = f"queue {queue_id}: {sequence_number} is to be moved on, and it is not known where to"
            self._report.add(Problem.NO_DESTINATION, Table.QUEUE, key, text)
        expires_ms = overlay.get(Field.EXPIRES_MS)
        index = _index(self._message_ids, entry.message_id)
        if index is None and entry.message_id in self._bodies_set_aside:
            # Its copies in other subscriptions are quarantined when somebody asks for them.
            queue.timers_unknown.add(sequence_number)
            queue.set_aside = True
            return
        if index is None:
            text = f"queue {queue_id}: {sequence_number} refers to message {entry.message_id}, which is not there"
            self._report.add(Problem.MISSING_MESSAGE, Table.QUEUE, key, text)
        else:
            topic_id = self._topics.get(entity_of(queue_id))
            if topic_id is not None:
                first = not self._references[index]
                self._topic_bytes[topic_id] += COPY_BYTES + (self._message_sizes[index] if first else 0)
            self._references[index] += 1
            queue.size_bytes += self._message_sizes[index]
            if expires_ms is None:
                expires_ms = self._message_expiries[index]
        if place is Place.SCHEDULED:
            own_ms = overlay.get(Field.RETURNS_MS, overlay.get(Field.ENQUEUED_MS))
            time_ms = ANY_TIME if own_ms is None else own_ms
            queue.timed[Timer.SCHEDULED].add(sequence_number, entry.message_id, time_ms)
        elif expires_ms is None or expires_ms == ANY_TIME:
            queue.timers_unknown.add(sequence_number)
        elif (
            place is Place.AVAILABLE
            and part_of(queue_id) == Part.MAIN
            and expires_ms != NEVER
            and entity_of(queue_id) not in self._published
        ):
            queue.timed[Timer.EXPIRY].add(sequence_number, entry.message_id, expires_ms)

    def _check_sessions(self) -> None:
        set_aside = {queue_id: queue.entries_set_aside for queue_id, queue in self._queues.items()}
        for queue_id, state_bytes in self._sessions.check(self._snapshot, self._deleted, set_aside).items():
            self._queues[queue_id].size_bytes += state_bytes
            topic_id = self._topics.get(entity_of(queue_id))
            if topic_id is not None:
                self._topic_bytes[topic_id] += state_bytes

    def _timers(self) -> None:
        """Available messages that expire, and scheduled messages, have one timer each; other messages have none."""
        for key, value in self._snapshot.items(Table.DUE):
            self._report.records[Table.DUE] += 1
            if len(key) != 21 or key[4] not in _TIMERS:
                self._malformed(Table.DUE, key)
                continue
            queue_id, timer, time_ms, sequence_number = unpack_due_key(key)
            if entity_of(queue_id) in self._deleted:
                continue
            wrong = self._wrong_timer(self._queues[queue_id], Timer(timer), time_ms, sequence_number, value)
            if wrong:
                text = f"queue {queue_id}: {Timer(timer).name.lower()} of {sequence_number} at {time_ms} ms: {wrong}"
                self._report.add(Problem.STRAY_TIMER, Table.DUE, key, text)
        for queue_id, queue in self._queues.items():
            if entity_of(queue_id) in self._deleted:
                continue
            for timer, timed in queue.timed.items():
                for sequence_number, has_timer in zip(timed.numbers, timed.has_timer, strict=True):
                    if not has_timer:
                        place = Place.SCHEDULED if timer is Timer.SCHEDULED else Place.AVAILABLE
                        key = queue_key(queue_id, place, sequence_number)
                        text = f"queue {queue_id}: {sequence_number} has no timer for {timer.name.lower()}"
                        self._report.add(Problem.MISSING_TIMER, Table.QUEUE, key, text)

    def _wrong_timer(self, queue: _Queue, timer: Timer, time_ms: int, sequence_number: int, value: bytes) -> str | None:
        if sequence_number in queue.timers_unknown:
            return None
        timed = queue.timed[timer]
        index = _index(timed.numbers, sequence_number)
        if index is None:
            place = queue.place_of(sequence_number)
            return (
                f"the entry is {place.name.lower()} and needs none" if place is not None else "there is no such entry"
            )
        if timed.times_ms[index] not in (ANY_TIME, time_ms):
            return f"it should be at {timed.times_ms[index]} ms"
        if timed.has_timer[index]:
            return "it has another one"
        timed.has_timer[index] = True
        if value != message_key(timed.message_ids[index]):
            return f"it is of another message, {value.hex()}"
        return None

    def _counts(self) -> None:
        without = {
            queue_id for queue_id, queue in self._queues.items() if any(queue.places.values()) or queue.size_bytes
        }
        without.update(queue_id_of(topic_id) for topic_id in self._topic_bytes if topic_id not in self._deleted)
        for key, value in self._snapshot.items(Table.COUNTS):
            self._report.records[Table.COUNTS] += 1
            if len(key) != 4:
                self._malformed(Table.COUNTS, key)
                continue
            queue_id = int.from_bytes(key, "big")
            without.discard(queue_id)
            try:
                counts = decode_counts(value)
            except CorruptRecord as error:
                self._report.add(Problem.CORRUPT_RECORD, Table.COUNTS, key, str(error))
                continue
            self._compare(queue_id, key, counts)
        for queue_id in without:
            self._compare(queue_id, queue_id.to_bytes(4, "big"), Counts())

    def _compare(self, queue_id: int, key: bytes, counts: Counts) -> None:
        if entity_of(queue_id) in self._deleted:
            return
        queue = self._queues[queue_id]
        places = queue.places
        size_bytes = queue.size_bytes + (
            self._topic_bytes[entity_of(queue_id)] if part_of(queue_id) == Part.MAIN else 0
        )
        highest = max((numbers[-1] for numbers in places.values() if numbers), default=0)
        there = Counts(
            next_sequence_number=max(counts.next_sequence_number, highest + 1),
            available=len(places[Place.AVAILABLE]),
            deferred=len(places[Place.DEFERRED]),
            scheduled=len(places[Place.SCHEDULED]),
            # An entry in quarantine does not tell which body it referred to, so that body stays stored and counted.
            size_bytes=max(counts.size_bytes, size_bytes) if self._may_count_more(queue_id) else size_bytes,
        )
        if counts != there:
            self._report.add(
                Problem.WRONG_COUNTS, Table.COUNTS, key, f"queue {queue_id}: counted {counts}, there are {there}"
            )

    def _may_count_more(self, queue_id: int) -> bool:
        if self._queues[queue_id].set_aside:
            return True
        subscriptions = (key for key, topic_id in self._topics.items() if topic_id == entity_of(queue_id))
        return any(
            (queue := self._queues.get(queue_id_of(key, part))) is not None and queue.set_aside
            for key in subscriptions
            for part in Part
        )

    def _compare_references(self) -> None:
        """A message to which several entries refer needs a row in REFS with their number; others need none."""
        several = {index for index, references in enumerate(self._references) if references > 1}
        for key, value in self._snapshot.items(Table.REFS):
            self._report.records[Table.REFS] += 1
            if len(key) != 8:
                self._malformed(Table.REFS, key)
                continue
            (message_id,) = unpack_message_key(key)
            index = _index(self._message_ids, message_id)
            if index is not None:
                several.discard(index)
            try:
                recorded = decode_references(value)
            except CorruptRecord as error:
                self._report.add(Problem.CORRUPT_RECORD, Table.REFS, key, str(error))
                continue
            if index is None:
                wrong = message_id not in self._bodies_set_aside
                there = 0
            else:
                there = self._references[index]
                # An entry in quarantine counts as one that still refers to its message.
                wrong = recorded != there and not (self._entry_set_aside and recorded > there)
            if wrong:
                text = f"message {message_id}: {recorded} references recorded, there are {there}"
                self._report.add(Problem.WRONG_REFERENCES, Table.REFS, key, text)
        for index in sorted(several):
            key, there = message_key(self._message_ids[index]), self._references[index]
            text = f"message {self._message_ids[index]}: no references recorded, there are {there}"
            self._report.add(Problem.WRONG_REFERENCES, Table.REFS, key, text)
        for message_id, references in zip(self._message_ids, self._references, strict=True):
            key = message_key(message_id)
            if not references and message_id not in self._staged:
                self._report.add(Problem.ORPHANED_MESSAGE, Table.MESSAGES, key, f"message {message_id} is in no queue")
            elif references and message_id in self._staged:
                text = f"message {message_id} is in a queue, and META says that it is in none"
                self._report.add(Problem.WRONG_REFERENCES, Table.MESSAGES, key, text)

    def _malformed(self, table: Table, key: bytes) -> None:
        self._report.add(Problem.MALFORMED_KEY, table, key, f"{table.name}: key {key.hex()}")


def _index(numbers: "array[int]", number: int) -> int | None:
    """The index of `number` in the ascending `numbers`; None if it is not there."""
    index = bisect_left(numbers, number)
    return index if index < len(numbers) and numbers[index] == number else None
