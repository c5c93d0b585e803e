"""A log that another process follows: what the worker tells it, and which segments it keeps for it."""

import os
from typing import Any

import pytest

from storage.log.commit_log import LogLimits
from storage.log.follower import (
    DurableLsn,
    Follower,
    durable_lsn,
    durable_path,
    position_path,
    read_position,
    write_position,
)
from storage.log.frames import decode_turn
from storage.log.reading import LogDamaged, LogOnDisk
from storage.log.recovery import log_directory
from storage.log.tail import Position
from storage.store import Table
from tests.logs import checkpoint, crash, open_log
from tests.own_disk import own_disk_or_skip

KIB, MIB = 1 << 10, 1 << 20
LIMITS = LogLimits(64 * KIB, 4 * MIB)


@pytest.fixture
def follower(tmp_path):
    for name in ("run", "journal"):
        (tmp_path / name).mkdir()
    return Follower(tmp_path, 0, backlog_bytes=MIB)


def fill(log, count, size=8 * KIB):
    for number in range(count):
        log.stores[0].put(Table.MESSAGES, b"%08d" % number, os.urandom(size))
        log.stores[0].hints.append((1, 10, 8, [number], None, None, None))
        log.commit(number)


def turns(tmp_path, after):
    return [frame.lsn for frame in LogOnDisk(log_directory(tmp_path, 0), 0).turns(after)]


def test_hints_are_in_the_frame_of_their_turn(tmp_path, follower):
    log = open_log(tmp_path, (0, 1), limits=LIMITS, follower=follower)
    log.stores[0].put(Table.MESSAGES, b"one", b"value")
    log.stores[0].hints.append((0, 7, "orders"))
    log.commit(5)
    log.stores[0].put(Table.MESSAGES, b"two", b"value")
    log.commit(6)
    log.stores[1].put(Table.MESSAGES, b"one", b"value")
    log.stores[1].hints += [(0, 8, "bills"), (2, 11)]
    log.commit(7)
    frames: list[Any] = [decode_turn(frame.payload) for frame in LogOnDisk(log_directory(tmp_path, 0), 0).turns(0)]
    [(_, first, _)], [(_, second, _)] = frames[0][2], frames[2][2]
    assert first != second
    assert len(first) == len(second) == 8
    assert frames[0][2] == ((0, first, ((0, 7, "orders"),)),)
    assert frames[1][2] == ((0, first, ()),)
    assert frames[2][2] == ((1, second, ((0, 8, "bills"), (2, 11))),)
    crash(log)
    again = open_log(tmp_path, (0, 1), limits=LIMITS, follower=follower)
    again.stores[0].put(Table.MESSAGES, b"three", b"value")
    again.commit(8)
    *_, last = LogOnDisk(log_directory(tmp_path, 0), 0).turns(3)
    assert [item[:2] for item in decode_turn(last.payload)[2]] == [(0, first)]
    crash(again)


def test_hints_of_turns_that_change_nothing_wait_for_the_next_frame_and_no_longer_than_a_beat(tmp_path, follower):
    log = open_log(tmp_path, (0,), limits=LIMITS, follower=follower)
    fill(log, 1)
    lsn = log.lsn
    log.stores[0].hints.append((1, 30, 8, [1], [0], None, 5))
    assert not log.commit(6)
    assert log.lsn == lsn
    log.beat()
    assert log.commit(7)
    assert log.lsn == lsn + 1
    [frame] = LogOnDisk(log_directory(tmp_path, 0), 0).turns(lsn)
    found: Any = decode_turn(frame.payload)
    assert found == (7, (), ((0, log._store_ids[0], ((1, 30, 8, (1,), (0,), None, 5),)),))
    log.beat()
    assert not log.commit(8)
    crash(log)


def test_without_a_follower_stores_take_no_hints(tmp_path):
    log = open_log(tmp_path, (0,), limits=LIMITS)
    assert log.stores[0].hints is None
    crash(log)


def test_the_worker_says_what_is_on_disk(tmp_path, follower):
    log = open_log(tmp_path, (0,), limits=LIMITS, follower=follower)
    for number in range(5):
        log.stores[0].put(Table.MESSAGES, b"%d" % number, bytes(MIB))
        before = durable_lsn(tmp_path, 0)
        assert before == log.lsn
        assert log.begin_commit(number)
        if log.is_committing:
            assert durable_lsn(tmp_path, 0) <= log.lsn - 1
        log.end_commit()
        assert durable_lsn(tmp_path, 0) == log.lsn
    crash(log)
    again = open_log(tmp_path, (0,), limits=LIMITS, follower=Follower(tmp_path, 0, backlog_bytes=MIB))
    assert durable_lsn(tmp_path, 0) == again.lsn
    crash(again)


def test_segments_stay_until_the_follower_needs_them_no_more(tmp_path, follower):
    log = open_log(tmp_path, (0,), limits=LIMITS, follower=follower)
    log.checkpointer.start()
    fill(log, 40)
    checkpoint(log)
    assert turns(tmp_path, 0)[0] == 1
    kept = log._writer.kept_bytes
    assert kept >= 4 * 64 * KIB
    half = log.lsn // 2
    write_position(position_path(tmp_path, 0), Position(log._log_id, half))
    log.beat()
    assert 0 < log._writer.kept_bytes < kept
    assert turns(tmp_path, half)[0] in (half + 1, half + 2)  # a frame NEXT may be between them
    write_position(position_path(tmp_path, 0), Position(log._log_id, log.lsn))
    log.beat()
    assert log._writer.kept_bytes == 0
    assert log._writer.lost_segments == 0
    crash(log)


@pytest.mark.parametrize("is_clean", [True, False])
def test_segments_that_the_follower_needs_outlive_the_worker(tmp_path, follower, is_clean):
    log = open_log(tmp_path, (0,), limits=LIMITS, follower=follower)
    log.checkpointer.start()
    fill(log, 40)
    checkpoint(log)
    lsn = log.lsn
    if is_clean:
        log.close()
    else:
        crash(log)
    for _ in range(3):
        again = open_log(tmp_path, (0,), limits=LIMITS, follower=Follower(tmp_path, 0, backlog_bytes=8 * MIB))
        again.checkpointer.start()
        fill(again, 20)
        checkpoint(again)
        found = turns(tmp_path, 0)
        assert found[0] == 1
        assert found[-1] == again.lsn > lsn
        crash(again)


def test_a_follower_that_is_too_far_behind_loses_the_oldest(tmp_path, follower):
    log = open_log(tmp_path, (0,), limits=LIMITS, follower=follower)
    log.checkpointer.start()
    for _ in range(10):
        fill(log, 40)
        checkpoint(log)
        log.beat()
        assert log._writer.kept_bytes <= MIB
    assert log._writer.lost_segments > 10
    first = next(lsn for lsn in range(1, log.lsn) if _has_turns_after(tmp_path, lsn))
    assert first < log.lsn - 40
    crash(log)


def test_on_a_full_disk_turns_go_on_and_the_follower_loses_the_oldest(tmp_path):
    with own_disk_or_skip(tmp_path) as disk:
        data = disk.seen / "data"
        for name in ("run", "journal"):
            (data / name).mkdir(parents=True)
        log = open_log(data, (0,), limits=LIMITS, follower=Follower(data, 0, backlog_bytes=1 << 30))
        log.checkpointer.start()
        for _ in range(4):
            fill(log, 40)
            checkpoint(log)
            log.beat()
        kept = log._writer.kept_bytes
        assert kept > MIB
        assert log._writer.lost_segments == 0
        disk.fill()
        free = disk.free_bytes()
        for _ in range(30):  # three times what is kept
            fill(log, 20)
            checkpoint(log)
            log.beat()
        assert log._writer.lost_segments > kept // (64 * KIB)
        assert disk.free_bytes() <= free
        values = [log.stores[0].get(Table.MESSAGES, b"%08d" % number) for number in range(40)]
        assert all(value is not None and len(value) == 8 * KIB for value in values)
        crash(log)


def test_what_is_kept_for_the_follower_goes_while_the_disk_has_too_little_room(tmp_path):
    with own_disk_or_skip(tmp_path) as disk:
        data = disk.seen / "data"
        for name in ("run", "journal"):
            (data / name).mkdir(parents=True)
        log = open_log(data, (0,), limits=LIMITS, follower=Follower(data, 0, 1 << 30, spare_disk_bytes=2 * MIB))
        log.checkpointer.start()
        for _ in range(6):
            fill(log, 80)
            checkpoint(log)
            log.beat()
        assert log._writer.lost_segments == 0
        kept = log._writer.kept_bytes
        assert kept > 3 * MIB
        disk.fill(leave_bytes=MIB)
        log.beat()
        assert disk.free_bytes() >= 2 * MIB
        assert 0 < log._writer.kept_bytes < kept
        disk.empty()
        lost = log._writer.lost_segments
        fill(log, 80)
        checkpoint(log)
        log.beat()
        assert log._writer.lost_segments == lost
        crash(log)


def test_a_position_in_another_log_or_one_that_is_torn_says_nothing(tmp_path):
    for name in ("run", "journal"):
        (tmp_path / name).mkdir()
    path = position_path(tmp_path, 0)
    assert read_position(path) is None
    write_position(path, Position(bytes(16), 2**64 - 1))
    assert read_position(path) == Position(bytes(8), 2**64 - 1)
    follower = Follower(tmp_path, 0, backlog_bytes=MIB)
    assert follower.position(bytes(16)) == 2**64 - 1
    assert follower.position(b"another log's id") == 0
    path.write_bytes(path.read_bytes()[:-1])
    assert follower.position(bytes(16)) == 0


def _has_turns_after(tmp_path, lsn):
    try:
        return bool(turns(tmp_path, lsn))
    except LogDamaged:
        return False


def test_the_memory_of_the_durable_turn_has_its_block(tmp_path):
    """Else the first turn on a full disk would end the process."""
    path = durable_path(tmp_path, 0)
    path.parent.mkdir()
    path.write_bytes(b"\xff" * 8)
    before = path.stat().st_ino
    DurableLsn(path)
    assert path.stat().st_ino == before
    assert path.stat().st_blocks > 0
    assert durable_lsn(tmp_path, 0) == 0
