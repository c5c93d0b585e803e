"""Checkpoints that find no room in the tables of a partition, on a disk or in a map that is full."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from storage import lmdb_store
from storage.log import commit_log, shortage
from storage.log.commit_log import CommitLog, LogLimits
from storage.log.shortage import CHANGED_KEYS, FIRST_SECONDS, LONGEST_SECONDS, MORE_BYTES, Shortage
from storage.log.tables import position
from storage.store import Table
from tests.logged_turns import SMALL, Contents, Local, Turns, contents, open_local
from tests.logs import attached_tables, crash, open_tables
from tests.without_room import Fault, Faults

MIB = 1 << 20
KEYS = 1000


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(commit_log, "time", made)
    return made


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


class Checkpoints(Local):
    """`made`: the partitions of each checkpoint."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.made: list[list[int]] = []

    def checkpoint(self, layers: Any, up_to_lsn: int, positions: Any) -> None:
        self.made.append([*layers])
        super().checkpoint(layers, up_to_lsn, positions)


def opened(monkeypatch: pytest.MonkeyPatch, directory: Path, partitions: tuple[int, ...], **limits: Any) -> Any:
    """The log, and its checkpointer."""
    log = open_local(monkeypatch, directory, partitions, Checkpoints, **limits)
    log.checkpointer.start()
    return log, log.checkpointer


def checkpoint(log: CommitLog) -> None:
    if not log.is_checkpointing:
        log.begin_checkpoint()
    while log.is_checkpointing:
        log.hear()


def in_tables(log: CommitLog) -> Contents:
    for store in log._tables.values():
        store.end_reading()
    return contents(log._tables)


def key(number: int) -> bytes:
    return number.to_bytes(4, "big")


def put(log: CommitLog, partition: int, size: int = 10) -> None:
    log.stores[partition].put(Table.QUEUE, key(1), bytes(size))
    log.commit()


def test_the_tables_of_other_partitions_have_the_checkpoint(monkeypatch, tmp_path, clock, faults):
    log, _ = opened(monkeypatch, tmp_path, (0, 1, 2))
    turns = Turns((0, 1, 2), 1)
    while not log.is_checkpointing:
        turns.turn(log.stores, log.commit)
    faults[1] = Fault.NO_ROOM
    checkpoint(log)
    for _ in range(3):
        turns.turn(log.stores, log.commit)
        checkpoint(log)
        found = in_tables(log)
        for partition in (0, 2):
            assert {place: items for place, items in found.items() if place[0] == partition} == {
                place: items for place, items in turns.done.items() if place[0] == partition
            }
        assert not any(found[1, table] for table in (Table.MESSAGES, Table.QUEUE))
        assert contents(log.stores) == turns.done
    assert log.checkpoints >= 2, "those that were made without this partition"
    faults.clear()
    clock.now += LONGEST_SECONDS
    checkpoint(log)
    assert in_tables(log) == turns.done
    assert log.young_bytes() == 0
    crash(log)


def test_a_crash_while_one_partition_has_no_room_loses_nothing(monkeypatch, tmp_path, clock, faults):
    turns = Turns((0, 1), 2)
    log, _ = opened(monkeypatch, tmp_path, (0, 1))
    faults[1] = Fault.NO_ROOM
    for _ in range(40):
        turns.turn(log.stores, log.commit)
        if log.is_checkpointing:
            checkpoint(log)
    assert position(log._tables[0]).lsn > position(log._tables[1]).lsn
    crash(log)
    faults.clear()
    log, _ = opened(monkeypatch, tmp_path, (0, 1))
    assert contents(log.stores) == turns.done
    crash(log)


def test_only_the_partition_without_room_refuses_messages_until_the_log_is_as_long_as_it_may_be(
    monkeypatch, tmp_path, clock, faults
):
    log, _ = opened(monkeypatch, tmp_path, (0, 1), limits=LogLimits(64 << 10, 512 << 10))
    turns = Turns((0, 1), 2)
    faults[1] = Fault.NO_ROOM
    while not log.is_checkpointing:
        turns.turn(log.stores, log.commit)
    checkpoint(log)
    assert log.accepts(0, 100, 0)
    assert not log.accepts(1, 100, 0)
    assert log.stores[0].shortage() is None
    assert "MDB_MAP_FULL" in log.stores[1].shortage()
    while log.accepts(0, 100, 0):
        assert log.young_bytes() <= 512 << 10
        turns.turn(log.stores, log.commit)  # settling goes on in both
        if log.is_checkpointing:
            checkpoint(log)
    assert log.young_bytes() > 512 << 10
    assert (
        log.stores[0].shortage()
        == "the log has store.log_bytes: partitions without room keep it from being shortened: 1"
    )
    used = log.stores[0].used_bytes()
    assert used - log._tables[0].used_bytes() < 512 << 10, "what is in its tables does not count twice"
    turns.turn(log.stores, log.commit)
    assert contents(log.stores) == turns.done
    faults.clear()
    clock.now += LONGEST_SECONDS
    log.beat()
    checkpoint(log)
    for partition in (0, 1):
        assert log.accepts(partition, 100, 0)
        assert log.stores[partition].shortage() is None
    crash(log)
    assert [*(tmp_path / "logs" / "0").glob("segment-*")]
    for partition in (0, 1):
        with open_tables(tmp_path, partition) as store:
            assert contents({partition: store}) == {
                place: items for place, items in turns.done.items() if place[0] == partition
            }


def test_the_log_keeps_the_frames_that_the_tables_without_room_lack(monkeypatch, tmp_path, clock, faults):
    log, _ = opened(monkeypatch, tmp_path, (0, 1))
    put(log, 0)
    checkpoint(log)
    put(log, 1, 100)
    faults[1] = Fault.NO_ROOM
    lsn = log.lsn
    number = 0
    while number < 20:
        put(log, 0, SMALL.segment_bytes // 2)
        checkpoint(log)
        number += 1
    assert log._writer._used[0].file.size_bytes() * len(log._writer._used) > 10 * SMALL.segment_bytes
    assert log._writer.tables.lsn < lsn <= log._writer.tables.positions[0]
    crash(log)
    faults.clear()
    with attached_tables(tmp_path, (1,)) as tables:
        assert tables[1].get(Table.QUEUE, key(1)) is None
    with open_tables(tmp_path, 1) as tables:
        assert tables.get(Table.QUEUE, key(1)) == bytes(100)


def test_while_there_is_no_room_checkpoints_are_tried_less_and_less_often(monkeypatch, tmp_path, clock, faults):
    log, checkpointer = opened(monkeypatch, tmp_path, (0, 1))
    faults[1] = Fault.NO_ROOM
    put(log, 1)
    tried = []
    for second in range(200):
        clock.now = float(second)
        log.beat()
        if log.is_checkpointing:
            if 1 in checkpointer.made[-1]:
                tried.append(second)
            log.hear()
    assert tried[:6] == [2, 3, 5, 9, 17, 33]
    assert {later - earlier for earlier, later in itertools.pairwise(tried[5:])} == {LONGEST_SECONDS}
    assert len(checkpointer.made) == len(tried), "the other partition has nothing to write"
    put(log, 0)
    clock.now += 2
    log.beat()
    assert checkpointer.made[-1] == [0], "it need not wait"
    crash(log)


def test_when_there_is_more_room_a_checkpoint_is_made_at_once(monkeypatch, tmp_path, clock, faults):
    log, checkpointer = opened(monkeypatch, tmp_path, (0, 1))
    free = 0
    monkeypatch.setattr(lmdb_store, "free_disk_bytes", lambda path: free)
    faults[1] = Fault.NO_ROOM
    put(log, 1)
    for second in range(2, 40):
        clock.now = float(second)
        log.beat()
        if log.is_checkpointing:
            log.hear()
    made = len(checkpointer.made)
    clock.now += 1
    free = MORE_BYTES - 4096
    log.beat()
    assert not log.is_checkpointing
    free = MORE_BYTES
    log.beat()
    assert log.is_checkpointing
    log.hear()
    assert len(checkpointer.made) == made + 1
    free = 3 * MORE_BYTES
    faults.clear()
    log.beat()
    log.hear()
    assert log.accepts(1, 100, 0)
    crash(log)


def test_a_map_whose_messages_are_deleted_has_room_again(monkeypatch, tmp_path, clock):
    """Pages that a commit frees can be used by the next but one, so there must be a next one."""
    monkeypatch.setattr(lmdb_store, "MAP_SLACK_BYTES", 0)
    limits = LogLimits(MIB, 64 * MIB)
    log, _ = opened(monkeypatch, tmp_path, (0,), limits=limits, map_size_bytes=16 * MIB)
    store, number = log.stores[0], 0
    while log.stores[0].shortage() is None:
        store.append(Table.MESSAGES, [(key(number + each), bytes(20_000)) for each in range(1, 21)])
        number += 20
        log.commit()
        if log.is_checkpointing:
            checkpoint(log)
    half = number // 2
    store.delete_many(Table.MESSAGES, [key(each) for each in range(1, half)])
    log.commit()
    for _ in range(10):
        clock.now += 1
        log.beat()
        if log.is_checkpointing:
            log.hear()
    assert log.stores[0].shortage() is None
    assert log.young_bytes() == 0
    crash(log)
    with open_tables(tmp_path, 0, map_size_bytes=16 * MIB) as tables:
        assert tables.record_count(Table.MESSAGES) == number - half + 1


# -- when it is tried again


def test_a_try_after_one_that_has_made_room_comes_soon():
    waits = Shortage()
    now, room = 0.0, 0
    for _ in range(10):
        waits.failed("no room", now, room, 0)
        now += LONGEST_SECONDS
    assert not waits.is_due(now - 0.1, room, 0)
    waits.failed("no room", now, room + MORE_BYTES, 0)
    assert not waits.is_due(now + 0.9 * FIRST_SECONDS, room + MORE_BYTES, 0)
    assert waits.is_due(now + FIRST_SECONDS, room + MORE_BYTES, 0)


def test_while_the_log_takes_little_more_any_change_is_tried():
    waits = Shortage()
    for now in (0.0, 1.0, 2.0):
        waits.failed("no room", now, 0, 0)
    assert not waits.is_due(2.0 + FIRST_SECONDS, 0, 1)
    assert not waits.is_due(2.0 + FIRST_SECONDS, 0, 0, is_pressing=True)
    assert not waits.is_due(2.0 + 0.9 * FIRST_SECONDS, 0, 1, is_pressing=True)
    assert waits.is_due(2.0 + FIRST_SECONDS, 0, 1, is_pressing=True)


def test_while_room_grows_slowly_few_tries_are_made():
    waits, tries, room, waiting = Shortage(), 0, 0, 64 * MIB
    waits.failed("no room", 0.0, room, waiting)
    while room < waiting:
        room += 4096
        if waits.is_due(0.5, room, 0):
            waits.failed("no room", 0.0, room, waiting)
            tries += 1
    assert tries == shortage.MORE_PART


@pytest.mark.parametrize("of_others", [0, 1, CHANGED_KEYS])
def test_it_is_tried_again_when_much_was_deleted(of_others):
    waits = Shortage()
    waits.failed("no room", 0.0, 0, 0)
    waits.changed_keys += of_others
    assert not waits.is_due(0.5, 0, CHANGED_KEYS - of_others - 1)
    assert waits.is_due(0.5, 0, CHANGED_KEYS - of_others)
