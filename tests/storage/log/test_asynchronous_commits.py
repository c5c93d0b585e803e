"""Commits that the disk writes while the worker goes on."""

import errno
import os
import select

import pytest

from protocol.extension import extension
from storage.log import aio, segments, writer
from storage.log.aio import OneWrite
from storage.log.commit_log import LogLimits
from storage.log.frames import BUFFER_BYTES
from storage.log.segments import ASYNCHRONOUS_BYTES, SegmentFile, prepare
from storage.store import Table
from tests.logs import checkpoint, crash, open_log, open_tables
from tests.patience import PATIENCE_S

MIB = 1 << 20
LARGE = os.urandom(ASYNCHRONOUS_BYTES)


@pytest.fixture
def one_write():
    one_write = OneWrite(BUFFER_BYTES)
    if one_write.descriptor is None:
        pytest.skip("the kernel has no asynchronous I/O for us")
    yield one_write
    one_write.close()


@pytest.fixture
def segment(tmp_path, one_write):
    path = tmp_path / "segment-0"
    prepare(path, 2 * BUFFER_BYTES)
    segment = SegmentFile(path, one_write)
    yield segment
    segment.close()


def test_a_large_write_is_under_way_until_its_descriptor_is_signalled(segment, one_write):
    with select.epoll() as poll:
        poll.register(one_write.descriptor, select.EPOLLIN | select.EPOLLET)
        for at in (0, ASYNCHRONOUS_BYTES):
            assert segment.begin(at, (b"head", LARGE[4:])) == at + ASYNCHRONOUS_BYTES
            assert segment.is_writing
            assert poll.poll(PATIENCE_S)
            assert segment.end(wait=False)
            assert not segment.is_writing
            assert segment.path.read_bytes()[at : at + ASYNCHRONOUS_BYTES] == b"head" + LARGE[4:]


def test_waiting_for_the_end_needs_no_look(segment):
    segment.begin(4096, (LARGE,))
    assert segment.end(wait=True)
    assert segment.end(wait=True), "there is nothing to wait for"
    assert segment.path.read_bytes()[4096 : 4096 + len(LARGE)] == LARGE


@pytest.mark.parametrize("size", [1, ASYNCHRONOUS_BYTES - 4096, BUFFER_BYTES + 1])
def test_small_and_very_large_writes_are_waited_for(segment, size):
    segment.begin(0, (bytes([7]) * size,))
    assert not segment.is_writing
    assert segment.path.read_bytes()[:size] == bytes([7]) * size


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINVAL])
def test_a_write_that_the_kernel_does_not_take_is_made_at_once(monkeypatch, segment, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(OneWrite, "begin", refuse)
    segment.begin(0, (LARGE,))
    assert not segment.is_writing
    assert segment.path.read_bytes()[: len(LARGE)] == LARGE


def test_a_file_that_turns_out_to_take_no_direct_writes_is_written_otherwise(monkeypatch, segment):
    def cannot(*_):
        raise OSError(errno.EINVAL, "a disk with larger sectors")

    monkeypatch.setattr(OneWrite, "result", cannot)
    segment.begin(0, (LARGE,))
    assert segment.end(wait=True)
    assert segment.path.read_bytes()[: len(LARGE)] == LARGE


@pytest.mark.parametrize("reason", ["machine", "kernel"])
def test_without_asynchronous_io_commits_wait(monkeypatch, tmp_path, reason):
    if reason == "machine":
        monkeypatch.setattr(aio, "_NUMBERS", {})
    else:
        monkeypatch.setattr(aio, "_syscall", lambda *_: -1)
    log = open_log(tmp_path)
    log.stores[0].put(Table.MESSAGES, b"key", LARGE)
    assert log.begin_commit(0)
    assert not log.is_committing
    crash(log)
    with open_tables(tmp_path, 0) as tables:
        assert tables.get(Table.MESSAGES, b"key") == LARGE


def test_what_is_staged_during_a_commit_is_in_the_next(tmp_path):
    log = open_log(tmp_path)
    store = log.stores[0]
    store.put(Table.MESSAGES, b"one", LARGE)
    assert log.begin_commit(1)
    assert log.is_committing
    store.put(Table.MESSAGES, b"two", LARGE)
    assert store.get(Table.MESSAGES, b"one") == store.get(Table.MESSAGES, b"two") == LARGE
    log.end_commit()
    assert not log.is_committing
    assert store.dirty
    crash(log)
    with open_tables(tmp_path, 0) as tables:
        assert tables.get(Table.MESSAGES, b"one") == LARGE
        assert tables.get(Table.MESSAGES, b"two") is None


def test_a_worker_that_waits_for_events_hears_the_end_of_its_commit(tmp_path):
    log = open_log(tmp_path)
    with select.epoll() as poll:
        log.watch(poll)
        for number in range(5):
            log.stores[0].put(Table.MESSAGES, b"key", LARGE + bytes([number]))
            assert log.begin_commit(1)
            while log.is_committing:
                events = poll.poll(PATIENCE_S)
                assert events
                assert all(log.serve(descriptor) for descriptor, _ in events)
    crash(log)


def test_a_checkpoint_that_is_due_begins_between_two_commits(tmp_path):
    """With changes staged or on their way to the disk it would write what may never have happened."""
    log = open_log(tmp_path, limits=LogLimits(MIB, 8 * MIB))
    store = log.stores[0]
    store.put(Table.MESSAGES, b"early", b"value")
    log.commit()
    log._checkpoint_soon()
    assert log.is_checkpointing, "nothing is staged"
    store.put(Table.MESSAGES, b"one", LARGE)
    assert log.begin_commit(1)
    assert log.is_committing
    store.put(Table.MESSAGES, b"two", b"value")
    while log.is_checkpointing:
        log.hear()
    log._checkpoint_soon()
    assert not log.is_checkpointing
    log.end_commit()
    assert not log.is_checkpointing, "something is staged"
    assert log.begin_commit(2)
    assert log.is_checkpointing
    while log.is_checkpointing:
        log.hear()
    assert log._tables[0].get(Table.MESSAGES, b"one") == LARGE
    assert log._tables[0].get(Table.MESSAGES, b"two") == b"value"
    crash(log)


def test_closing_waits_for_the_commit(tmp_path):
    log = open_log(tmp_path)
    log.stores[0].put(Table.MESSAGES, b"key", LARGE)
    assert log.begin_commit(1)
    log.close()
    with open_tables(tmp_path, 0) as tables:
        assert tables.get(Table.MESSAGES, b"key") == LARGE


def test_aborting_keeps_what_is_being_committed(tmp_path):
    log = open_log(tmp_path)
    store = log.stores[0]
    store.put(Table.MESSAGES, b"one", LARGE)
    assert log.begin_commit(1)
    store.put(Table.MESSAGES, b"two", LARGE)
    store.abort()
    assert store.get(Table.MESSAGES, b"one") == LARGE
    assert store.get(Table.MESSAGES, b"two") is None
    crash(log)


def test_aborting_while_a_checkpoint_is_due_keeps_what_is_being_committed(tmp_path):
    """The checkpoint that the end of the commit begins would be one of nothing, and say that the tables have all."""
    log = open_log(tmp_path)
    store = log.stores[0]
    store.put(Table.MESSAGES, b"one", LARGE)
    assert log.begin_commit(1)
    store.put(Table.MESSAGES, b"two", LARGE)
    log._checkpoint_soon()
    store.abort()
    assert store.get(Table.MESSAGES, b"one") == LARGE
    checkpoint(log)
    assert store.get(Table.MESSAGES, b"one") == LARGE
    crash(log)
    with open_tables(tmp_path, 0) as tables:
        assert tables.get(Table.MESSAGES, b"one") == LARGE
        assert tables.get(Table.MESSAGES, b"two") is None


@pytest.mark.parametrize("large_turn_bytes", [0, MIB])
def test_segments_follow_each_other_while_all_commits_are_asynchronous(monkeypatch, tmp_path, large_turn_bytes):
    monkeypatch.setattr(segments, "ASYNCHRONOUS_BYTES", 0)
    monkeypatch.setattr(writer, "LARGE_TURN_BYTES", large_turn_bytes)
    log = open_log(tmp_path, limits=LogLimits(MIB, 64 * MIB))
    for number in range(100):
        log.stores[0].put(Table.MESSAGES, number.to_bytes(4, "big"), LARGE)
        assert log.begin_commit(number)
        log.end_commit()
    crash(log)
    with open_tables(tmp_path, 0) as tables:
        assert tables.record_count(Table.MESSAGES) == 100


@pytest.mark.skipif(extension is None, reason="a turn that is not packed in place waits for its segment")
def test_a_worker_goes_on_while_a_segment_begins(monkeypatch, tmp_path):
    """The frame that names it, its header and its first turn are written one after the other."""
    monkeypatch.setattr(writer, "LARGE_TURN_BYTES", 0)
    log = open_log(tmp_path, limits=LogLimits(MIB, 64 * MIB))
    log._look_at_bytes = 1 << 60  # there is no checkpoint, which waits for the commit before
    begun: list[int] = []
    original = OneWrite.begin
    monkeypatch.setattr(OneWrite, "begin", lambda *to: (begun.append(to[3]), original(*to)))
    monkeypatch.setattr(SegmentFile, "write", lambda *_: pytest.fail("it waits"))
    numbers = 0
    while len(begun) == numbers:  # a turn of one write
        log.stores[0].put(Table.MESSAGES, numbers.to_bytes(4, "big"), LARGE)
        assert log.begin_commit(numbers)
        assert log.is_committing
        numbers += 1
        while log.is_committing:
            log.end_commit(wait=False)
    assert begun[-2:] == [0, 4096], "the header, and the turn"
    assert numbers > 2
    crash(log)
    with open_tables(tmp_path, 0) as tables:
        assert tables.record_count(Table.MESSAGES) == numbers
