"""Logs on a full disk: how they are opened, and what is committed until there is room."""

import errno
import os

import pytest

from storage.data_dir import partition_path
from storage.log import commit_log, segments
from storage.log.recovery import log_directory
from storage.log.segments import SPARE_NAME, SegmentFile, prepare, segment_numbers
from storage.log.tables import position
from storage.store import StoreFull, Table
from tests.logged_turns import SMALL, Turns, contents, open_local
from tests.logs import attached_tables, checkpoint, crash, open_tables
from tests.without_room import Fault, Faults


class Full:
    """When it is called, the disk has no room for a further segment, and the tables of these partitions have none."""

    def __init__(self, monkeypatch):
        self.patch = monkeypatch
        self.faults = Faults(monkeypatch)

    def __call__(self, partitions=(0, 1)):
        def allocate(file, size_bytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self.patch.setattr(SegmentFile, "allocate", allocate)
        for module in (segments, commit_log):
            self.patch.setattr(module, "free_disk_bytes", lambda path: 0)
        self.faults.update(dict.fromkeys(partitions, Fault.NOTHING))

    def empty(self):
        self.patch.undo()


@pytest.fixture
def full(monkeypatch):
    return Full(monkeypatch)


def holds(directory, turns):
    found = {}
    for partition in turns.partitions:
        with open_tables(directory, partition) as store:
            found |= contents({partition: store})
    return found == turns.done


def spare_of(directory):
    return log_directory(directory, 0) / SPARE_NAME


def test_what_tables_have_no_room_for_at_a_start_stays_in_memory_until_they_have(monkeypatch, tmp_path):
    faults = Faults(monkeypatch)
    log = open_local(monkeypatch, tmp_path, (0, 1))
    turns = Turns((0, 1), 1)
    for _ in range(20):
        turns.turn(log.stores, log.commit)
    crash(log)
    faults[1] = Fault.NOTHING
    log = open_local(monkeypatch, tmp_path, (0, 1))
    assert [*log.behind] == [1]
    assert contents(log.stores) == turns.done
    assert log.shortage(1) == "its store has no room: " + log.behind[1].problem
    assert log.unwritten_bytes(0) == 0
    assert log.unwritten_bytes(1) > 0
    turns.turn(log.stores, log.commit)
    faults.clear()
    log.checkpointer.start()
    log._shortages[1]._again_s = 0.0
    for _ in range(2):  # the first may have begun before
        checkpoint(log)
    assert log.shortage(1) is None
    assert log.unwritten_bytes(1) == 0
    crash(log)
    assert holds(tmp_path, turns)


def test_starts_on_a_full_disk_need_no_further_segment(monkeypatch, tmp_path, full):
    log = open_local(monkeypatch, tmp_path, (0, 1))
    turns = Turns((0, 1), 2)
    turns.turn(log.stores, log.commit)
    crash(log)
    full()
    for _ in range(5):
        before = segment_numbers(log_directory(tmp_path, 0))
        log = open_local(monkeypatch, tmp_path, (0, 1))
        assert contents(log.stores) == turns.done
        assert not log.accepts(0, 100, 0), "what settles needs what is left"
        log.stores[0].delete(Table.META, b"x")
        log.commit()
        crash(log)
        assert segment_numbers(log_directory(tmp_path, 0)) == before
    full.empty()
    assert holds(tmp_path, turns)


def test_the_spare_segment_is_for_what_settles_and_is_made_anew(monkeypatch, tmp_path, full):
    log = open_local(monkeypatch, tmp_path, (0,))
    prepare(spare_of(tmp_path), SMALL.segment_bytes)
    crash(log)
    log = open_local(monkeypatch, tmp_path, (0,))
    turns = Turns((0,), 3)
    full((0,))
    assert log.accepts(0, 100, 0)
    while spare_of(tmp_path).exists():
        turns.turn(log.stores, log.commit)
    assert not log.accepts(0, 100, 0)
    assert log.shortage(0) == "the disk has no room for the log"
    log.stores[0].delete(Table.META, b"x")
    log.commit()
    full.empty()
    log.checkpointer.start()
    while not spare_of(tmp_path).exists():
        turns.turn(log.stores, log.commit)
        checkpoint(log)
    assert log.accepts(0, 100, 0)
    crash(log)
    assert holds(tmp_path, turns)


def test_without_a_spare_segment_a_commit_fails_and_nothing_is_written(monkeypatch, tmp_path, full):
    log = open_local(monkeypatch, tmp_path, (0,))
    turns = Turns((0,), 4)
    full((0,))

    def go_on():
        while True:
            turns.turn(log.stores, log.commit)

    with pytest.raises(StoreFull):
        go_on()
    crash(log)
    full.empty()
    assert holds(tmp_path, turns)


def test_a_clean_stop_leaves_attached_what_has_no_room(monkeypatch, tmp_path, full):
    log = open_local(monkeypatch, tmp_path, (0, 1))
    turns = Turns((0, 1), 5)
    for _ in range(20):
        turns.turn(log.stores, log.commit)
    full((1,))
    log.close()
    full.empty()
    with attached_tables(tmp_path, (0, 1)) as tables:
        assert [partition for partition, store in tables.items() if position(store) is not None] == [1]
    assert partition_path(tmp_path, 1).exists()
    assert holds(tmp_path, turns)


def test_a_log_that_nobody_needs_is_continued_though_its_older_segments_are_gone(monkeypatch, tmp_path):
    log = open_local(monkeypatch, tmp_path, (0,))
    turns = Turns((0,), 6)
    log.checkpointer.start()
    while len(segment_numbers(log_directory(tmp_path, 0))) < 4:
        turns.turn(log.stores, log.commit)
    current = log._writer._used[-1].number
    log.close()
    for number in segment_numbers(log_directory(tmp_path, 0)):
        if number != current:
            segments.segment_path(log_directory(tmp_path, 0), number).unlink()
    log = open_local(monkeypatch, tmp_path, (0,))
    assert log.put_aside == ""
    crash(log)
    assert holds(tmp_path, turns)
