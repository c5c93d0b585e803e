"""Whether what one partition's tables say is true, each by itself and of each other.

Needs about 25 bytes of memory for each message and each queue entry; reads all of the store once.
"""

from array import array
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from storage.lmdb_store import Snapshot
from storage.records import (
    CorruptRecord,
    Counts,
    Entry,
    Field,
    Place,
    Timer,
    check_message,
    decode_counts,
    decode_document,
    decode_entry,
    message_expires_ms,
    queue_key,
    unpack_due_key,
    unpack_message_key,
    unpack_queue_key,
)
from storage.store import StoreError, Table

FINDINGS_KEPT = 1000  # per partition; all are counted

_PLACES = frozenset(Place)
_TIMERS = frozenset(Timer)


class Problem(StrEnum):
    UNREADABLE_STORE = "unreadable-store"  # the file cannot be opened, or its pages make no sense
    CORRUPT_RECORD = "corrupt-record"  # checksum or shape of a value
    MALFORMED_KEY = "malformed-key"
    MISSING_MESSAGE = "missing-message"  # a queue entry refers to none
    ORPHANED_MESSAGE = "orphaned-message"  # no queue entry refers to it
    TWO_PLACES = "two-places"  # a sequence number is in two places of its queue
    WRONG_COUNTS = "wrong-counts"
    STRAY_TIMER = "stray-timer"  # a timer without its queue entry, or at a time other than the entry's
    MISSING_TIMER = "missing-timer"  # a scheduled entry that would never become available


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `table` and `key` say where, and are None and empty for the store as a whole."""

    problem: Problem
    table: Table | None
    key: bytes
    text: str


@dataclass
class PartitionReport:
    """What was read and what was found: the first FINDINGS_KEPT findings, and how many there are of each kind."""

    partition: int
    records: Counter[Table] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    problems: Counter[Problem] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        return not self.problems

    def add(self, problem: Problem, table: Table | None, key: bytes, text: str) -> None:
        self.problems[problem] += 1
        if len(self.findings) < FINDINGS_KEPT:
            self.findings.append(Finding(problem, table, key, text))


def verify_snapshot(snapshot: Snapshot) -> PartitionReport:
    report = PartitionReport(snapshot.partition_id)
    try:
        _Verification(snapshot, report).run()
    except StoreError as error:
        report.add(Problem.UNREADABLE_STORE, None, b"", str(error))
    return report


class _Queue:
    """What was found of one queue: sequence numbers by place, in order; which scheduled ones have a timer."""

    def __init__(self) -> None:
        self.places: dict[Place, array[int]] = {place: array("Q") for place in Place}
        self.has_timer = bytearray()
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
        self._referenced = bytearray()
        self._queues: dict[int, _Queue] = {}

    def run(self) -> None:
        for table in (Table.META, Table.ENTITIES):
            self._documents(table)
        self._messages()
        self._entries()
        self._timers()
        self._counts()
        self._unreferenced()
        self._report.records[Table.QUARANTINE] = sum(1 for _ in self._snapshot.items(Table.QUARANTINE))

    def _documents(self, table: Table) -> None:
        for key, value in self._snapshot.items(table):
            self._report.records[table] += 1
            try:
                decode_document(value)
            except (CorruptRecord, ValueError) as error:
                self._report.add(Problem.CORRUPT_RECORD, table, key, str(error))

    def _messages(self) -> None:
        for key, record in self._snapshot.items(Table.MESSAGES):
            self._report.records[Table.MESSAGES] += 1
            if len(key) != 8:
                self._malformed(Table.MESSAGES, key)
                continue
            self._message_ids.append(unpack_message_key(key)[0])
            self._message_sizes.append(len(record))
            try:
                check_message(record)
            except CorruptRecord as error:
                self._report.add(Problem.CORRUPT_RECORD, Table.MESSAGES, key, str(error))
        self._referenced = bytearray(len(self._message_ids))

    def _entries(self) -> None:
        for key, value in self._snapshot.items(Table.QUEUE):
            self._report.records[Table.QUEUE] += 1
            if len(key) != 13 or key[4] not in _PLACES:
                self._malformed(Table.QUEUE, key)
                continue
            queue_id, place, sequence_number = unpack_queue_key(key)
            queue = self._queues.setdefault(queue_id, _Queue())
            elsewhere = queue.place_of(sequence_number)
            if elsewhere is not None:
                text = f"queue {queue_id}: sequence number {sequence_number} is also {elsewhere.name.lower()}"
                self._report.add(Problem.TWO_PLACES, Table.QUEUE, key, text)
            queue.places[Place(place)].append(sequence_number)
            entry = self._entry(key, value)
            if entry is None:
                continue
            index = _index(self._message_ids, entry.message_id)
            if index is None:
                text = f"queue {queue_id}: {sequence_number} refers to message {entry.message_id}, which is not there"
                self._report.add(Problem.MISSING_MESSAGE, Table.QUEUE, key, text)
                continue
            self._referenced[index] = True
            queue.size_bytes += self._message_sizes[index]
        for queue in self._queues.values():
            queue.has_timer = bytearray(len(queue.places[Place.SCHEDULED]))

    def _entry(self, key: bytes, value: bytes) -> Entry | None:
        try:
            return decode_entry(value)
        except (CorruptRecord, ValueError) as error:
            self._report.add(Problem.CORRUPT_RECORD, Table.QUEUE, key, str(error))
            return None

    def _timers(self) -> None:
        for key, value in self._snapshot.items(Table.DUE):
            self._report.records[Table.DUE] += 1
            if len(key) != 21 or key[4] not in _TIMERS:
                self._malformed(Table.DUE, key)
                continue
            queue_id, timer, time_ms, sequence_number = unpack_due_key(key)
            wrong = self._wrong_timer(queue_id, Timer(timer), time_ms, sequence_number, value)
            if wrong:
                text = f"queue {queue_id}: {Timer(timer).name.lower()} of {sequence_number} at {time_ms} ms: {wrong}"
                self._report.add(Problem.STRAY_TIMER, Table.DUE, key, text)
        for queue_id, queue in self._queues.items():
            for sequence_number, has_timer in zip(queue.places[Place.SCHEDULED], queue.has_timer, strict=True):
                if not has_timer:
                    key = queue_key(queue_id, Place.SCHEDULED, sequence_number)
                    text = f"queue {queue_id}: {sequence_number} is scheduled and has no timer"
                    self._report.add(Problem.MISSING_TIMER, Table.QUEUE, key, text)

    def _wrong_timer(self, queue_id: int, timer: Timer, time_ms: int, sequence_number: int, value: bytes) -> str | None:
        queue = self._queues.get(queue_id)
        place = queue.place_of(sequence_number) if queue else None
        if queue is None or place is None:
            return "there is no such entry"
        if timer is Timer.SCHEDULED:
            if place is not Place.SCHEDULED:
                return f"the entry is {place.name.lower()}"
            index = _index(queue.places[place], sequence_number)
            assert index is not None
            queue.has_timer[index] = True
        try:
            entry = decode_entry(self._snapshot.get(Table.QUEUE, queue_key(queue_id, place, sequence_number)) or b"")
        except (CorruptRecord, ValueError):
            return None  # reported as a corrupt entry
        if len(value) != 8 or unpack_message_key(value)[0] != entry.message_id:
            return f"it is of another message, {value.hex()}"
        if timer is Timer.EXPIRY and (expires_ms := self._expires_ms(entry)) not in (None, time_ms):
            return f"the entry expires at {expires_ms} ms"
        return None

    def _expires_ms(self, entry: Entry) -> int | None:
        """When the entry expires; None if it cannot be told."""
        if entry.overlay and Field.EXPIRES_MS in entry.overlay:
            expires_ms: int = entry.overlay[Field.EXPIRES_MS]
            return expires_ms
        record = self._snapshot.get(Table.MESSAGES, entry.message_id.to_bytes(8, "big"))
        return message_expires_ms(record) if record is not None and len(record) >= 24 else None

    def _counts(self) -> None:
        without = set(self._queues)
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
        queue = self._queues.get(queue_id, _Queue())
        places = queue.places
        highest = max((numbers[-1] for numbers in places.values() if numbers), default=0)
        there = Counts(
            next_sequence_number=max(counts.next_sequence_number, highest + 1),
            available=len(places[Place.AVAILABLE]),
            deferred=len(places[Place.DEFERRED]),
            scheduled=len(places[Place.SCHEDULED]),
            size_bytes=queue.size_bytes,
        )
        if counts != there:
            self._report.add(
                Problem.WRONG_COUNTS, Table.COUNTS, key, f"queue {queue_id}: counted {counts}, there are {there}"
            )

    def _unreferenced(self) -> None:
        for message_id, referenced in zip(self._message_ids, self._referenced, strict=True):
            if not referenced:
                key = message_id.to_bytes(8, "big")
                self._report.add(Problem.ORPHANED_MESSAGE, Table.MESSAGES, key, f"message {message_id} is in no queue")

    def _malformed(self, table: Table, key: bytes) -> None:
        self._report.add(Problem.MALFORMED_KEY, table, key, f"{table.name}: key {key.hex()}")


def _index(numbers: "array[int]", number: int) -> int | None:
    """Where `number` is in the ascending `numbers`."""
    index = bisect_left(numbers, number)
    return index if index < len(numbers) and numbers[index] == number else None
