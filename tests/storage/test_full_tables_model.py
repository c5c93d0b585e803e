"""Turns of some partitions whose tables have no room now and then, and a checkpointer and a worker that die anywhere.

Whatever happens, what was committed is there, and what was deleted is not: in the worker's view, and in the tables when
all has come to an end. Rows are made and deleted as partitions do it: runs of entries and records, and single ones.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from errno import EAGAIN
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocol.extension import extension
from storage.log import changes, checkpointing, commit_log, frames, segments, writer
from storage.log.aio import OneWrite
from storage.log.checkpointing import Ended
from storage.log.commit_log import ENDS_MAX, CommitLog
from storage.records import Place, message_key, queue_key
from storage.store import Store, StoreFull, Table
from tests.logged_turns import Local, open_local
from tests.logs import crash, open_tables
from tests.models import model_settings, rarely
from tests.storage import entered
from tests.without_room import Died, Fault, Faults

TABLES = (Table.QUEUE, Table.MESSAGES, Table.DUE, Table.COUNTS)
LOWEST, HIGHEST = b"\0", b"\xff" * 20
QUEUES = (1, 2)
_NATIVE = (changes, checkpointing, frames, entered)  # modules that use the extension
_WORKED_EXAMPLES = 30

Rows = dict[bytes, bytes]
small = st.integers(0, 11)


def available(queue: int, number: int) -> bytes:
    return queue_key(queue, Place.AVAILABLE, number)


def ranges_of(numbers: list[int]) -> list[tuple[int, int]]:
    """(first, count) of consecutive numbers."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and sum(ranges[-1]) == number:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((number, 1))
    return ranges


def chosen(of: list[int], at: int, count: int) -> list[int]:
    """Some that follow each other; every second of more than five."""
    begin = at % len(of) if of else 0
    return of[begin : begin + count] if count < 6 else of[begin::2]


class Change:
    """One change of a partition's store and of what must be in it."""

    def __init__(self, store: Store, rows: dict[Table, Rows]) -> None:
        self.store, self.rows = store, rows

    def next_number(self, name: int) -> int:
        return int.from_bytes(self.rows[Table.COUNTS].get(bytes([name]), b"\1"), "big")

    def count(self, name: int, number: int) -> None:
        self.put(Table.COUNTS, {bytes([name]): number.to_bytes(4, "big")})

    def put(self, table: Table, items: Rows) -> None:
        self.store.put_many(table, [*items.items()])
        self.rows[table].update(items)

    def numbers(self, table: Table, prefix: bytes) -> list[int]:
        return sorted(int.from_bytes(key[-8:], "big") for key in self.rows[table] if key[:-8] == prefix)

    def delete_numbers(self, table: Table, prefix: bytes, numbers: list[int], in_ranges: bool) -> None:
        keys = [prefix + number.to_bytes(8, "big") for number in numbers]
        if in_ranges:
            self.store.delete_keys(table, entered.keys(prefix, ranges_of(numbers)))
        else:
            self.store.delete_many(table, keys)
        for key in keys:
            del self.rows[table][key]

    # -- the changes, with numbers that say which and how many

    def send(self, a: int, b: int, value: bytes) -> None:
        """Records, and entries for them in one or both queues."""
        count, queues = 1 + b % 4, QUEUES if a == 0 else QUEUES[a % 2 :][:1]
        first = self.next_number(0)
        items = [(message_key(first + each), value) for each in range(count)]
        self.store.append_rows(first, items)
        self.rows[Table.MESSAGES].update(items)
        self.count(0, first + count)
        begins = [(queue, self.next_number(queue)) for queue in queues]
        self.store.insert_entries(entered.entries([value[:4]] * count, begins))
        for queue, begin in begins:
            self.rows[Table.QUEUE].update({available(queue, begin + each): value[:4] for each in range(count)})
            self.count(queue, begin + count)

    def settle(self, a: int, b: int, value: bytes) -> None:
        prefix = available(QUEUES[a % 2], 0)[:-8]
        numbers = chosen(self.numbers(Table.QUEUE, prefix), b, 1 + a % 7)
        self.delete_numbers(Table.QUEUE, prefix, numbers, in_ranges=a < 9)

    def forget(self, a: int, b: int, value: bytes) -> None:
        numbers = chosen(self.numbers(Table.MESSAGES, b""), b, 1 + a % 7)
        self.delete_numbers(Table.MESSAGES, b"", numbers, in_ranges=a < 9)

    def update(self, a: int, b: int, value: bytes) -> None:
        numbers = chosen(self.numbers(Table.QUEUE, available(QUEUES[a % 2], 0)[:-8]), b, 3)
        self.put(Table.QUEUE, {available(QUEUES[a % 2], number): value[:5] for number in numbers})

    def put_back(self, a: int, b: int, value: bytes) -> None:
        """Deleted and inserted again, at once."""
        queue = QUEUES[a % 2]
        numbers = chosen(self.numbers(Table.QUEUE, available(queue, 0)[:-8]), b, 1 + a % 3)
        self.delete_numbers(Table.QUEUE, available(queue, 0)[:-8], numbers, in_ranges=a < 6)
        items = [(available(queue, number), value[:6]) for number in numbers]
        self.store.insert_many(Table.QUEUE, items)
        self.rows[Table.QUEUE].update(items)

    def timers(self, a: int, b: int, value: bytes) -> None:
        """Keys of a few that come and go."""
        keys = [bytes([a]), bytes([(a + b) % 12])]
        due = self.rows[Table.DUE]
        if b % 3 == 0:
            self.store.delete_many(Table.DUE, keys)
            for key in keys:
                due.pop(key, None)
        elif b % 3 == 1:
            items = {key: value[:b] for key in keys if key not in due}
            self.store.insert_many(Table.DUE, [*items.items()])
            due.update(items)
        else:
            self.put(Table.DUE, dict.fromkeys(keys, value[:b]))


MOVING = (Change.send, Change.settle)  # what most turns do
CHANGES = (*MOVING, *MOVING, Change.forget, Change.update, Change.put_back, Change.timers)
turns = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(CHANGES), small, small), min_size=1, max_size=6)
fault_of_each = st.tuples(*[st.one_of(st.none(), st.none(), st.sampled_from(Fault))] * 3)


class Dying(Local):
    """Ends when a `Fault` says so, in a partition whose tables the others follow or precede."""

    def answers(self) -> list[Any]:
        try:
            return super().answers()
        except Died:
            assert self.log is not None
            for store in self.log._tables.values():
                store.abort()
            self.is_running = False
            return [Ended("signal 9")]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class ShortWrites:
    """In place of `os`, where segments are written: so many bytes of each write at most; none, as on a full disk."""

    def __init__(self, most: int) -> None:
        self._most = most

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwrite(self, descriptor: int, data: memoryview, at: int) -> int:
        return os.pwrite(descriptor, data[: self._most], at) if self._most else 0


def no_asynchronous_write(*_: Any) -> None:
    raise OSError(EAGAIN, os.strerror(EAGAIN))


class FullTables(RuleBasedStateMachine):
    is_native: ClassVar[bool]

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        memory = Path("/dev/shm")
        self.directory = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
        self.clock = Clock()
        self.patch.setattr(commit_log, "time", self.clock)
        self.patch.setattr(segments, "ASYNCHRONOUS_BYTES", 0)
        self.patch.setattr(writer, "LARGE_TURN_BYTES", 0)
        for module in _NATIVE:
            self.patch.setattr(module, "extension", extension if self.is_native else None)
        self.faults = Faults(self.patch)
        self.log: CommitLog | None = None
        self.turns = self.ended_at = 0

    @initialize(partitions=st.integers(1, 3))
    def begin(self, partitions: int) -> None:
        self.partitions = tuple(range(partitions))
        self.done: dict[int, dict[Table, Rows]] = {
            partition: {table: {} for table in TABLES} for partition in self.partitions
        }
        self.open()

    def open(self) -> None:
        self.faults.clear()
        self.open_with_faults()

    def open_with_faults(self) -> None:
        self.log = open_local(self.patch, self.directory, self.partitions, Dying)
        self.log.checkpointer.start()

    @property
    def opened(self) -> CommitLog:
        assert self.log is not None
        return self.log

    def end(self) -> None:
        """As a kill does."""
        if self.log is not None:
            with suppress(StoreFull):  # it has failed before
                self.log.end_commit()
            for store in self.log._tables.values():
                store.abort()
            crash(self.log)
            self.log = None

    def stage(self, changes: list[tuple[int, Callable[[Change, int, int, bytes], None], int, int]]) -> Any:
        """The rows that there are with these changes."""
        self.turns += 1
        value = self.turns.to_bytes(2, "big") + bytes(self.turns * 1000 % 9000)
        after = {each: {table: dict(rows) for table, rows in tables.items()} for each, tables in self.done.items()}
        for partition, change, a, b in changes:
            number = partition % len(self.partitions)
            change(Change(self.opened.stores[number], after[number]), a, b, value)
        return after

    @rule(changes=turns, most=st.sampled_from((0, 0, 4096, 8192)), waits=st.booleans())
    def turn(self, changes: Any, most: int, waits: bool) -> None:
        """Which is on disk at the end only if it `waits`."""
        after = self.stage(changes)
        self.opened.end_commit()
        with self.patch.context() as patch:
            if most:
                patch.setattr(segments, "os", ShortWrites(most))
            self.opened.begin_commit(0)
            if waits:
                self.opened.end_commit()
        self.done = after

    @rule(changes=turns)
    def turn_that_is_dropped(self, changes: Any) -> None:
        self.stage(changes)
        for store in self.opened.stores.values():
            store.abort()

    @precondition(lambda self: self.turns > self.ended_at + 8)
    @rule(changes=turns)
    def turn_that_the_disk_does_not_take(self, changes: Any) -> None:
        self.opened.end_commit()
        after = self.stage(changes)
        lsn = self.opened.lsn
        with self.patch.context() as patch:
            patch.setattr(segments, "os", ShortWrites(0))
            patch.setattr(OneWrite, "begin", no_asynchronous_write)
            with suppress(StoreFull):
                self.opened.commit()
                assert self.opened.lsn == lsn, "nothing was changed"
        self.ended_at = self.turns
        self.end()
        self.open()
        assert self.found() in (self.done, after)
        self.done = self.found()

    @precondition(lambda self: not self.opened.is_checkpointing and not self.opened.is_committing)
    @rule()
    def begin_checkpoint(self) -> None:
        self.opened.begin_checkpoint()

    @precondition(
        lambda self: (
            self.opened.is_checkpointing and self.opened.checkpointer.is_running and self.opened._ends < ENDS_MAX - 1
        )
    )
    @rule(faults=fault_of_each)
    def checkpoint(self, faults: tuple[Fault | None, ...]) -> None:
        self.faults.update({number: fault for number, fault in enumerate(faults) if fault is not None})
        self.opened.hear()
        self.faults.clear()

    @rule(seconds=st.sampled_from((0.5, 1, 2, 20)))
    def beat(self, seconds: float) -> None:
        self.clock.now += seconds
        self.opened.beat()

    @rarely
    @rule()
    def kill(self) -> None:
        self.end()
        self.open()

    @rarely
    @rule(faults=fault_of_each)
    def kill_and_start_without_room(self, faults: tuple[Fault | None, ...]) -> None:
        """The start dies, or has in memory what tables do not take, and goes on with that."""
        self.end()
        self.faults.update({number: fault for number, fault in enumerate(faults) if fault is not None})
        try:
            self.open_with_faults()
        except Died:
            self.open()
        self.faults.clear()

    @rarely
    @rule(faults=fault_of_each)
    def stop(self, faults: tuple[Fault | None, ...]) -> None:
        """Cleanly, while a checkpoint may be under way, or its process may be dead."""
        self.faults.update({number: fault for number, fault in enumerate(faults) if fault is not None})
        try:
            self.opened.close()
            self.log = None
        except Died:
            self.end()
        self.open()

    def found(self) -> Any:
        return {
            number: {table: dict(store.scan(table, LOWEST, HIGHEST, 1000)) for table in TABLES}
            for number, store in self.opened.stores.items()
        }

    @invariant()
    def what_was_committed_is_there(self) -> None:
        if self.log is None:
            return
        self.log.check()
        assert self.found() == self.done
        for number, store in self.log.stores.items():
            for table in TABLES:
                rows = self.done[number][table]
                assert store.record_count(table) == len(rows)
                assert store.last_key(table) == max(rows, default=None)
                keys = sorted(rows)[:3]
                assert store.get_many(table, keys) == [rows[key] for key in keys]

    def teardown(self) -> None:
        try:
            if self.log is not None:
                self.faults.clear()
                self.end()
                for number in self.partitions:
                    with open_tables(self.directory, number) as tables:
                        for table in TABLES:
                            assert dict(tables.scan(table, LOWEST, HIGHEST, 1000)) == self.done[number][table]
        finally:
            self.patch.undo()
            shutil.rmtree(self.directory)


class FullTablesInPython(FullTables):
    is_native = False


class FullTablesInC(FullTables):
    is_native = True


TestFullTablesInPython = FullTablesInPython.TestCase
TestFullTablesInPython.settings = model_settings(_WORKED_EXAMPLES, 50)
if extension is not None:
    TestFullTablesInC = FullTablesInC.TestCase
    TestFullTablesInC.settings = model_settings(_WORKED_EXAMPLES, 50)
