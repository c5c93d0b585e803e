"""Disks that are full, read-only or broken, and a checkpointer that is stopped or killed."""

import errno
import os
import resource
import select
import signal
import time
from contextlib import contextmanager

import pytest

from storage.log import commit_log, segments, writer
from storage.log.aio import OneWrite
from storage.log.checkpointing import Prepared
from storage.log.commit_log import LogLimits
from storage.log.recovery import log_directory
from storage.log.writer import LogWriter, NoSegment
from storage.store import StoreError, StoreFull, Table
from tests.logged_turns import SMALL, Turns, contents, open_local
from tests.logs import checkpoint, crash, open_log, open_tables
from tests.patience import PATIENCE_S

MIB = 1 << 20


def failing(monkeypatch, name, number, when=lambda *args: True, after=0):
    """Let this function of `os`, where segments are written, fail after some calls. Returns the calls."""
    calls = []
    original = getattr(os, name)

    def call(*args, **kwargs):
        if when(*args):
            calls.append(args)
            if len(calls) > after:
                raise OSError(number, os.strerror(number))
        return original(*args, **kwargs)

    class Os:
        def __getattr__(self, each):
            return call if each == name else getattr(os, each)

    monkeypatch.setattr(segments, "os", Os())
    return calls


def holds(directory, turns, partitions=(0,)):
    found = {}
    for partition in partitions:
        with open_tables(directory, partition) as store:
            found.update(contents({partition: store}))
    return found in (turns.done, turns.asked)


def test_without_direct_writes_each_turn_is_synced(monkeypatch, tmp_path):
    refused = failing(monkeypatch, "open", errno.EINVAL, lambda path, flags, *mode: flags & os.O_DIRECT)
    synced = []
    original = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (synced.append(descriptor), original(descriptor)))
    turns = Turns((0,), 1)
    log = open_local(monkeypatch, tmp_path, (0,))
    for _ in range(30):
        before = len(synced)
        lsn = log.lsn
        turns.turn(log.stores, log.commit)
        assert len(synced) - before >= (log.lsn > lsn)
        if log.is_checkpointing:
            log.hear()
    assert refused
    assert log.checkpoints >= 2
    crash(log)
    assert holds(tmp_path, turns)


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "io_submit", "io_getevents"])
def test_a_write_that_fails_ends_the_worker_and_loses_nothing(monkeypatch, tmp_path, call, number):
    turns = Turns((0, 1), 1)
    for after in (1, 2, 5, 20, 21):
        with monkeypatch.context() as patch:
            if call in ("pwrite", "fdatasync"):
                failing(patch, "open", errno.EINVAL, lambda path, flags, *mode: flags & os.O_DIRECT)
            patch.setattr(segments, "ASYNCHRONOUS_BYTES", 0)
            if call == "fdatasync":
                patch.setattr(segments.SegmentFile, "_sync", _failing_call(segments.SegmentFile._sync, after, number))
            elif call == "io_submit":
                patch.setattr(OneWrite, "begin", _failing_call(OneWrite.begin, after, number))
            elif call == "io_getevents":
                patch.setattr(OneWrite, "result", _failing_call(OneWrite.result, after, number))
            else:
                patch.setattr(segments.SegmentFile, "_write_all", _failing_write(after, number))
            expected = StoreFull if number in (errno.ENOSPC, errno.EDQUOT) else StoreError
            logs = []
            with pytest.raises(expected) as raised:
                work(monkeypatch, tmp_path, turns, logs)
            assert (type(raised.value) is StoreError) == (expected is StoreError)
            assert os.strerror(number) in str(raised.value)
        for log in logs:
            crash(log)
        again = open_local(monkeypatch, tmp_path, (0, 1))
        found = contents(again.stores)
        assert found in (turns.done, turns.asked)
        turns.done = found
        crash(again)


def test_after_a_write_that_failed_nothing_more_is_written(monkeypatch, tmp_path):
    """What comes behind it would make damage of what was only torn: here the header of the next segment."""
    monkeypatch.setattr(segments, "ASYNCHRONOUS_BYTES", 0)
    monkeypatch.setattr(writer, "LARGE_TURN_BYTES", 0)
    log = open_local(monkeypatch, tmp_path, (0,))
    turns = Turns((0,), 1)
    turns.turn(log.stores, log.commit)
    log.stores[0].put(Table.MESSAGES, b"key", bytes(SMALL.segment_bytes))  # needs another segment
    with monkeypatch.context() as patch:
        patch.setattr(segments.SegmentFile, "start", _failing_call(lambda *args: None, 0, errno.EIO))
        with pytest.raises(StoreError):
            log.commit()
    for again in (log.end_commit, log.commit):
        with pytest.raises(StoreError, match="Input/output error"):
            again()
    crash(log)
    assert holds(tmp_path, turns)


def work(monkeypatch, directory, turns, logs):
    log = open_local(monkeypatch, directory, turns.partitions)
    logs.append(log)
    for _ in range(100):
        turns.turn(log.stores, log.commit)
        if log.is_checkpointing:
            log.hear()


def _failing_call(original, after, number):
    calls = []

    def call(self, *args, **options):
        result = original(self, *args, **options)
        calls.append(result)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        return result

    return call


def _failing_write(after, number):
    original = segments.SegmentFile._write_all
    calls = []

    def write(self, data, at):
        calls.append(at)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        original(self, data, at)

    return write


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_short_write_is_finished_or_is_an_error(monkeypatch, tmp_path, is_asynchronous):
    log = open_local(monkeypatch, tmp_path, (0,))
    turns = Turns((0,), 1)
    with monkeypatch.context() as patch:
        patch.setattr(segments, "os", _Short(4096))
        patch.setattr(segments, "ASYNCHRONOUS_BYTES", 0 if is_asynchronous else 1 << 30)
        original = OneWrite.begin
        patch.setattr(
            OneWrite, "begin", lambda self, to, data, at: original(self, to, data[: len(data) // 2 // 512 * 512], at)
        )
        for _ in range(5):
            turns.turn(log.stores, log.commit)
        patch.setattr(segments, "os", _Short(0))
        turns.asked = turns.copy()
        turns.asked[0, Table.MESSAGES][b"key"] = b"value"
        log.stores[0].put(Table.MESSAGES, b"key", b"value")
        with pytest.raises(StoreFull, match="the disk takes no more"):
            log.commit()
    crash(log)
    assert holds(tmp_path, turns)


@pytest.mark.parametrize("most", [4096, 700_000])
def test_a_segment_that_is_made_by_short_writes_has_its_size(monkeypatch, tmp_path, most):
    monkeypatch.setattr(segments, "os", _Short(most))
    segments.prepare(tmp_path / "segment-1", 2 * MIB + 4096)
    assert (tmp_path / "segment-1").read_bytes() == bytes(2 * MIB + 4096)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_segment_that_cannot_be_made_leaves_no_file(monkeypatch, tmp_path, number):
    failing(monkeypatch, "write", number, after=1)
    with pytest.raises(OSError, match=os.strerror(number)):
        segments.prepare(tmp_path / "segment-1", 4 * MIB)
    assert not [*tmp_path.iterdir()]


def test_a_disk_without_room_for_a_segment_is_not_filled_to_find_that_out(monkeypatch, tmp_path):
    """It is tried each second, and what is left is for those who need little."""
    written = failing(monkeypatch, "write", errno.ENOSPC)
    monkeypatch.setattr(segments, "free_disk_bytes", lambda path: 4 * MIB - 1)
    with pytest.raises(OSError, match="No space left"):
        segments.prepare(tmp_path / "segment-1", 4 * MIB)
    assert not written
    assert not [*tmp_path.iterdir()]


class _Short:
    """Writes so many bytes of each write at most."""

    def __init__(self, most):
        self._most = most

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, descriptor, data):
        return os.write(descriptor, data[: self._most])

    def pwrite(self, descriptor, data, at):
        return os.pwrite(descriptor, data[: self._most], at) if self._most else 0


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "logs").write_text("no directory")
    with pytest.raises(StoreError, match="the log cannot be opened"):
        open_log(tmp_path)


def test_without_room_for_another_segment_nothing_is_accepted_until_there_is_one(monkeypatch, tmp_path):
    log = open_local(monkeypatch, tmp_path, (0,))
    turns = Turns((0,), 2)
    asked = []
    monkeypatch.setattr(log.checkpointer, "prepare", lambda path, size: asked.append(path))
    log.checkpointer.start()
    log.beat()
    assert asked
    assert log.accepts(0, 100, 0)
    log._prepared(Prepared(str(asked[-1]), "No space left on device"))
    assert not log.accepts(0, 100, 0)
    turns.turn(log.stores, log.commit)  # settling goes on
    log.beat()
    assert len(asked) == 2  # it is tried again
    segments.prepare(asked[-1], SMALL.segment_bytes)
    log._prepared(Prepared(str(asked[-1]), None))
    assert log.accepts(0, 100, 0)
    # A segment that is free again does as well.
    while log._writer._free:
        turns.turn(log.stores, log.commit)
    log.beat()
    log._prepared(Prepared(str(asked[-1]), "No space left on device"))
    assert not log.accepts(0, 100, 0)
    for _ in range(2):
        if not log.is_checkpointing:
            log.begin_checkpoint()
        log.hear()
        if not log._writer._free:
            log._writer._continue_in_next()
    assert log.accepts(0, 100, 0)
    crash(log)
    assert holds(tmp_path, turns)


# -- the checkpointer


@pytest.fixture
def running(tmp_path):
    """A log with a checkpointer, and turns that it has made."""
    log = open_log(tmp_path, (0, 1), limits=LogLimits(64 << 10, 512 << 10))
    log.checkpointer.start()
    turns = Turns((0, 1), 4)
    yield log, turns
    crash(log)
    assert holds(tmp_path, turns, (0, 1))


def stop(pid):
    os.kill(pid, signal.SIGSTOP)


@contextmanager
def within(seconds):
    """What waits for ever fails instead."""

    def fail(*_):
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_answer_that_a_turn_took_is_not_waited_for_again(running):
    """A worker sees all events at once. A turn for the first of them may hear the checkpointer, whose event is next."""
    log, turns = running
    with select.epoll() as poll:
        log.watch(poll)
        log.begin_checkpoint()
        while log.is_checkpointing:
            events = poll.poll(PATIENCE_S)
            assert events
            log.hear()
        with within(1.0):
            assert all(log.serve(descriptor) for descriptor, _ in events)
    turns.turn(log.stores, log.commit)


def test_a_turn_waits_for_a_checkpointer_whose_descriptor_is_large(running):
    log, turns = running
    os.kill(log.checkpointer.pid, signal.SIGKILL)
    while log.checkpointer.is_running:
        log.hear()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while held[-1] < 1024:
            held.append(os.open(os.devnull, os.O_RDONLY))
        log.beat()
        assert log.checkpointer.descriptor >= 1024
        end = time.monotonic() + PATIENCE_S
        while not log.waited_seconds:
            assert time.monotonic() < end
            turns.turn(log.stores, log.commit)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_a_segment_and_a_checkpointer_a_turn_fails_at_once(monkeypatch, running):
    """Nobody would free a segment."""
    log, turns = running
    log.begin_checkpoint()
    os.kill(log.checkpointer.pid, signal.SIGKILL)
    monkeypatch.setattr(log._writer, "begin_turn", _without_segment)
    monkeypatch.setattr(log._writer, "_free", [])
    with within(PATIENCE_S), pytest.raises(StoreFull):
        turns.turn(log.stores, log.commit)
    assert not log.checkpointer.is_running


def _without_segment(*args):
    raise NoSegment(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_stopped_checkpointer_slows_sends_then_refuses_them_and_settling_goes_on(monkeypatch, running):
    log, turns = running
    monkeypatch.setattr(commit_log, "LONGEST_WAIT_SECONDS", 0.5)
    checkpoint(log)
    stop(log.checkpointer.pid)
    slowest, end = 0.0, time.monotonic() + PATIENCE_S
    waited = []
    while log.accepts(0, 1000, 0):
        assert time.monotonic() < end
        began = time.monotonic()
        turns.turn(log.stores, log.commit)
        slowest = max(slowest, time.monotonic() - began)
        waited.append(log.waited_seconds)
    assert log.young_bytes() > 512 << 10
    assert 0.5 <= slowest < 4.5  # by default it would wait for five
    assert any(0 < each < 0.5 for each in waited)  # before it waited in vain
    waited_seconds = log.waited_seconds
    for _ in range(20):  # nobody waits any more
        turns.turn(log.stores, log.commit)
    assert log.waited_seconds == waited_seconds
    assert contents(log.stores) == turns.done
    os.kill(log.checkpointer.pid, signal.SIGCONT)
    while log.is_checkpointing:
        log.hear()
    assert log.accepts(0, 1000, 0)
    assert log.young_bytes() == 0
    assert log.checkpointer.starts == 1
    assert contents(log.stores) == turns.done
    assert len(log._writer._used) <= 2


@pytest.mark.parametrize("share", [0.05, 0.34, 0.51, 0.7, 0.98])
def test_the_log_is_no_longer_than_allowed_however_much_of_a_segment_its_turns_leave_unused(
    monkeypatch, tmp_path, share
):
    monkeypatch.setattr(commit_log, "LONGEST_WAIT_SECONDS", 0.1)
    limits = LogLimits(256 << 10, 4 << 20)
    log = open_log(tmp_path, (0,), limits=limits)
    log.checkpointer.start()
    checkpoint(log)
    stopped = log.checkpointer.pid
    assert stopped is not None
    stop(stopped)
    try:
        number = 0
        while log.accepts(0, 1000, 0):
            number += 1
            log.stores[0].append(
                Table.MESSAGES, [(number.to_bytes(8, "big"), bytes(int(share * limits.segment_bytes)))]
            )
            log.commit()
        # The current segment, the one behind which the log was too long, and the turn that waited in vain.
        assert log.usage().disk_bytes <= limits.log_bytes + 3 * limits.segment_bytes
        assert number * share * limits.segment_bytes > limits.log_bytes / 2 - limits.segment_bytes
    finally:
        os.kill(stopped, signal.SIGCONT)
        crash(log)


def test_a_killed_checkpointer_is_started_again_and_does_what_it_was_asked(running):
    log, turns = running
    for life in range(4):
        while not log.is_checkpointing:
            turns.turn(log.stores, log.commit)
        if life % 2:
            os.kill(log.checkpointer.pid, signal.SIGKILL)
        else:
            stop(log.checkpointer.pid)
            turns.turn(log.stores, log.commit)
            os.kill(log.checkpointer.pid, signal.SIGKILL)
        while log.checkpointer.is_running:
            log.hear()
        for _ in range(20):
            turns.turn(log.stores, log.commit)
        assert contents(log.stores) == turns.done
        checkpoint(log)
        assert contents(log.stores) == turns.done
    assert log.checkpointer.starts >= 4


def test_a_checkpointer_that_cannot_be_started_is_started_later(monkeypatch, running):
    log, turns = running
    os.kill(log.checkpointer.pid, signal.SIGKILL)
    while log.checkpointer.is_running:
        log.hear()

    def refuse(*args, **kwargs):
        raise OSError(errno.EAGAIN, "no process")

    with monkeypatch.context() as patch:
        patch.setattr("storage.log.checkpointing.subprocess.Popen", refuse)
        for _ in range(60):
            turns.turn(log.stores, log.commit)
            log.beat()
    assert not log.checkpointer.is_running
    checkpoint(log)
    assert contents(log.stores) == turns.done
    assert log.young_bytes() == 0


def test_an_idle_partition_does_not_keep_segments(tmp_path):
    log = open_log(tmp_path, (0, 1), limits=LogLimits(64 << 10, 512 << 10))
    log.checkpointer.start()
    turns = Turns((0, 1), 4, frozenset({1}))
    turns.partitions = (0,)
    while log.checkpoints < 20:
        turns.turn(log.stores, log.commit)
        if log.is_checkpointing:
            checkpoint(log)
        assert len(log._writer._used) + len(log._writer._free) <= 8  # many of these frames take half a segment
    assert log._writer.tables.positions[1] < log._writer.tables.lsn // 2
    crash(log)
    assert holds(tmp_path, turns, (0, 1))


# -- large frames


@pytest.mark.parametrize("size_mib", [3, 100])
def test_a_frame_larger_than_a_segment(tmp_path, size_mib):
    log = open_log(tmp_path, limits=LogLimits(MIB, 8 * MIB), map_size_bytes=1 << 30)
    store = log.stores[0]
    store.put(Table.META, b"before", b"small")
    log.commit()
    large = os.urandom(MIB) * size_mib
    store.put(Table.MESSAGES, b"large", large)
    log.commit()
    store.put(Table.META, b"after", b"small")
    log.commit()
    assert max(path.stat().st_size for path in log_directory(tmp_path, 0).iterdir()) > size_mib * MIB
    assert store.get(Table.MESSAGES, b"large") == large
    crash(log)
    log = open_log(tmp_path, limits=LogLimits(MIB, 8 * MIB), map_size_bytes=1 << 30)
    store = log.stores[0]
    assert store.get(Table.MESSAGES, b"large") == large
    assert (store.get(Table.META, b"before"), store.get(Table.META, b"after")) == (b"small", b"small")
    for _ in range(6):  # the segments are used again, and give back what the large frame needed
        store.put(Table.META, b"fill", bytes(900_000))
        log.commit()
        checkpoint(log)
    checkpoint(log)
    log.beat()
    crash(log)
    assert max(path.stat().st_size for path in log_directory(tmp_path, 0).iterdir()) <= 2 * MIB
    with open_tables(tmp_path, 0, map_size_bytes=1 << 30) as tables:
        assert tables.get(Table.MESSAGES, b"large") == large


def test_a_checkpoint_that_is_done_in_a_turn_with_staged_changes_begins_none(monkeypatch, tmp_path):
    log = open_local(monkeypatch, tmp_path, (0,))
    turns = Turns((0,), 1)
    checkpoints = log.checkpoints
    log.begin_checkpoint()
    while log.young_bytes() < 2 * SMALL.segment_bytes:  # so the next is due when this one is done
        turns.turn(log.stores, log.commit)
    turns.asked = turns.copy()
    turns.asked[0, Table.MESSAGES][b"key"] = b"value"
    log.stores[0].put(Table.MESSAGES, b"key", b"value")  # by a command of this turn
    log.hear()
    assert log.checkpoints == checkpoints + 1
    log.commit()
    turns.done = turns.asked
    assert log.is_checkpointing, "the next one begins with the commit"
    log.hear()
    assert contents(log.stores) == turns.done
    crash(log)
    assert holds(tmp_path, turns)


def test_a_checkpoint_never_has_a_turn_that_is_not_in_the_log(monkeypatch, tmp_path):
    """On a full disk a turn waits for a checkpoint that frees a segment. When that is done, another one is due."""
    log = open_local(monkeypatch, tmp_path, (0,))
    turns = Turns((0,), 1)
    log.begin_checkpoint()
    while log.young_bytes() < 2 * SMALL.segment_bytes:
        turns.turn(log.stores, log.commit)
    monkeypatch.setattr(log._writer, "begin_turn", _without_segment)
    monkeypatch.setattr(LogWriter, "has_free", False)
    log.stores[0].put(Table.MESSAGES, b"key", b"value")
    with pytest.raises(StoreFull):
        log.commit()
    assert log.checkpoints == 1
    crash(log)
    with open_tables(tmp_path, 0) as store:
        assert contents({0: store}) == turns.done


@pytest.mark.parametrize("when", ["staged", "being written", "checkpointing"])
def test_a_checkpoint_begins_between_two_commits_only(monkeypatch, tmp_path, when):
    log = open_local(monkeypatch, tmp_path, (0,))
    log.stores[0].put(Table.MESSAGES, b"key", b"value")
    if when != "staged":
        log.commit()
    if when == "being written":
        log._writer.is_writing = True
    elif when == "checkpointing":
        log.begin_checkpoint()
    with pytest.raises(AssertionError):
        log.begin_checkpoint()
    crash(log)


def test_a_segment_that_could_not_be_made_is_not_missed_when_another_was_freed_meanwhile(monkeypatch, tmp_path):
    log = open_local(monkeypatch, tmp_path, (0,))
    turns = Turns((0,), 2)
    asked = []
    monkeypatch.setattr(log.checkpointer, "prepare", lambda path, size: asked.append(path))
    log.checkpointer.start()
    while not log.is_checkpointing:
        turns.turn(log.stores, log.commit)
    while log._writer._free:
        log._writer._continue_in_next()
    log.beat()  # asks for another, behind the checkpoint that is being made
    assert asked
    for _ in range(2):
        log.hear()
        if log._writer.has_free:
            break
        log.begin_checkpoint()
    assert log._writer.has_free
    log._prepared(Prepared(str(asked[-1]), "No space left on device"))
    assert log.accepts(0, 100, 0)
    crash(log)
    assert holds(tmp_path, turns)


def test_a_segment_that_is_made_in_haste_has_its_blocks(monkeypatch, tmp_path):
    log = open_local(monkeypatch, tmp_path, (0,))
    while log._writer._free:
        log._writer._continue_in_next()
    log._writer._continue_in_next()
    sizes = [path.stat().st_blocks * 512 for path in log_directory(tmp_path, 0).iterdir()]
    assert min(sizes) >= SMALL.segment_bytes, "on a disk that is full by then it could not be written"
    crash(log)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_allocates_no_blocks_gets_segments_without(monkeypatch, tmp_path, number):
    log = open_local(monkeypatch, tmp_path, (0,))
    turns = Turns((0,), 1)
    calls = failing(monkeypatch, "posix_fallocate", number)
    for _ in range(3):
        while log._writer._free:
            log._writer._continue_in_next()
        log._writer._continue_in_next()
        turns.turn(log.stores, log.commit)
    assert len(calls) >= 3
    crash(log)
    assert holds(tmp_path, turns)


def test_a_commit_without_a_free_segment_on_a_full_disk_waits_for_the_checkpoint_that_frees_one(monkeypatch, tmp_path):
    log = open_local(monkeypatch, tmp_path, (0,))
    turns = Turns((0,), 3)
    while log.is_checkpointing or not log.young_bytes():
        turns.turn(log.stores, log.commit)
        if log.is_checkpointing:
            log.hear()
    log._writer._continue_in_next()
    while log._writer._free:
        log._writer._continue_in_next()
    turns.turn(log.stores, log.commit)  # so that the last segment is not empty
    calls = failing(monkeypatch, "posix_fallocate", errno.ENOSPC)
    if not log.is_checkpointing:
        log.begin_checkpoint()
    large = bytes(SMALL.segment_bytes)
    turns.asked = turns.copy()
    turns.asked[0, Table.MESSAGES][b"large"] = large
    log.stores[0].put(Table.MESSAGES, b"large", large)
    assert log.is_checkpointing
    log.commit()  # needs a segment of its own
    assert calls
    turns.done = turns.asked
    crash(log)
    assert holds(tmp_path, turns)
