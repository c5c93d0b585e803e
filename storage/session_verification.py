"""Verifies a partition's tables of sessions: each entry is listed under its session, and states are whole.

Needs 17 bytes of memory for each entry of a queue or subscription that requires sessions.
"""

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Container, Mapping

from xxhash import xxh3_64_intdigest

from storage.findings import PartitionReport, Problem
from storage.log.snapshot import Snapshot
from storage.queue_ids import Part, entity_of, queue_id_of
from storage.records import (
    CorruptRecord,
    Place,
    decode_session,
    decode_state,
    queue_key,
    unpack_session_entry_key,
    unpack_session_key,
)
from storage.store import Table

# In place of the hash of a session id:
_UNKNOWN = 0  # the entry cannot be read
_NO_SESSION = 1  # the entry has no session id, though its queue requires sessions


class _Entries:
    """The entries of one place of one queue by ascending sequence number."""

    def __init__(self) -> None:
        self.numbers = array("Q")
        self.hashes = array("Q")
        self.listed = bytearray()


class SessionVerification:
    """First add the queues and their entries in the order of their keys, then call `check`."""

    def __init__(self, report: PartitionReport) -> None:
        self._report = report
        self._queues: set[int] = set()  # those that require sessions
        self._entries: defaultdict[tuple[int, int], _Entries] = defaultdict(_Entries)

    def add_entity(self, entity_id: int) -> None:
        """A queue or subscription that requires sessions."""
        self._queues.add(queue_id_of(entity_id, Part.MAIN))

    def add_entry(self, queue_id: int, place: Place, sequence_number: int, session_id: str | None) -> None:
        self._add(queue_id, place, sequence_number, _NO_SESSION if session_id is None else _hash(session_id.encode()))

    def add_unreadable(self, queue_id: int, place: Place, sequence_number: int) -> None:
        self._add(queue_id, place, sequence_number, _UNKNOWN)

    def _add(self, queue_id: int, place: Place, sequence_number: int, hash_of_session: int) -> None:
        if queue_id in self._queues:
            entries = self._entries[queue_id, place]
            entries.numbers.append(sequence_number)
            entries.hashes.append(hash_of_session)
            entries.listed.append(False)

    def check(
        self, snapshot: Snapshot, deleted: Container[int], set_aside: Mapping[int, Container[int]]
    ) -> Counter[int]:
        """Bytes of states by queue id. `deleted` entities are skipped; `set_aside` are entries in quarantine."""
        for key, _ in snapshot.items(Table.SESSION_ENTRIES):
            self._report.records[Table.SESSION_ENTRIES] += 1
            try:
                queue_id, place, session_id, sequence_number = unpack_session_entry_key(key)
            except CorruptRecord:
                self._malformed(Table.SESSION_ENTRIES, key)
                continue
            if entity_of(queue_id) in deleted or sequence_number in set_aside.get(queue_id, ()):
                continue
            wrong = self._wrong_entry(queue_id, place, session_id, sequence_number)
            if wrong:
                text = (
                    f"queue {queue_id}: {sequence_number} in session {session_id.decode(errors='replace')!r}: {wrong}"
                )
                self._report.add(Problem.STRAY_SESSION_ENTRY, Table.SESSION_ENTRIES, key, text)
        for (queue_id, place), entries in self._entries.items():
            if entity_of(queue_id) in deleted:
                continue
            for sequence_number, listed in zip(entries.numbers, entries.listed, strict=True):
                if not listed and sequence_number not in set_aside.get(queue_id, ()):
                    text = f"queue {queue_id}: {sequence_number} is not listed under its session"
                    key = queue_key(queue_id, place, sequence_number)
                    self._report.add(Problem.MISSING_SESSION_ENTRY, Table.QUEUE, key, text)
        return self._states(snapshot, deleted)

    def _wrong_entry(self, queue_id: int, place: int, session_id: bytes, sequence_number: int) -> str | None:
        entries = self._entries.get((queue_id, place))
        if entries is None:
            return "the queue has no entry there"
        index = bisect_left(entries.numbers, sequence_number)
        if index == len(entries.numbers) or entries.numbers[index] != sequence_number:
            return "there is no such entry"
        if entries.hashes[index] not in (_UNKNOWN, _hash(session_id)):
            return "the entry is of another session"
        entries.listed[index] = True
        return None

    def _states(self, snapshot: Snapshot, deleted: Container[int]) -> Counter[int]:
        found: dict[bytes, int] = {}
        for key, value in snapshot.items(Table.SESSION_STATES):
            self._report.records[Table.SESSION_STATES] += 1
            try:
                found[key] = len(decode_state(value))
            except CorruptRecord as error:
                found[key] = max(0, len(value) - 8)
                self._report.add(Problem.CORRUPT_RECORD, Table.SESSION_STATES, key, str(error))
        sizes: Counter[int] = Counter()
        for key, value in snapshot.items(Table.SESSIONS):
            self._report.records[Table.SESSIONS] += 1
            state_bytes = found.pop(key, None)
            try:
                queue_id, _ = unpack_session_key(key)
            except CorruptRecord:
                self._malformed(Table.SESSIONS, key)
                continue
            sizes[queue_id] += state_bytes or 0
            if entity_of(queue_id) in deleted:
                continue
            try:
                recorded = decode_session(value).state_bytes
            except CorruptRecord as error:
                self._report.add(Problem.CORRUPT_RECORD, Table.SESSIONS, key, str(error))
                continue
            if queue_id not in self._queues:
                self._wrong_state(Table.SESSIONS, key, "the queue requires no sessions")
            elif recorded != state_bytes:
                self._wrong_state(Table.SESSIONS, key, f"{recorded} bytes are recorded, there are {state_bytes}")
        for key in found:
            if entity_of(int.from_bytes(key[:4], "big")) not in deleted:
                self._wrong_state(Table.SESSION_STATES, key, "no session has this state")
        return sizes

    def _wrong_state(self, table: Table, key: bytes, text: str) -> None:
        session_id = key[6:].decode(errors="replace")
        text = f"queue {int.from_bytes(key[:4], 'big')}: state of session {session_id!r}: {text}"
        self._report.add(Problem.WRONG_SESSION_STATE, table, key, text)

    def _malformed(self, table: Table, key: bytes) -> None:
        self._report.add(Problem.MALFORMED_KEY, table, key, f"{table.name}: key {key.hex()}")


def _hash(session_id: bytes) -> int:
    return max(_NO_SESSION + 1, xxh3_64_intdigest(session_id))
