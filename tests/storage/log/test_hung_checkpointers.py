"""A checkpointer that hangs is replaced; one whose disk is slow is not, however slow that is."""

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from storage.log import commit_log
from storage.log.commit_log import LogLimits
from storage.log.writer import NoSegment
from storage.store import StoreError
from tests.logged_turns import Turns, contents
from tests.logs import crash, open_log
from tests.patience import PATIENCE_S
from tests.shims import NoCompiler, make_shim

SHIM = Path(__file__).parents[2] / "partitioned" / "slow_disk.c"
STALL_S = 2.0  # on a busy machine the start of a process takes a second
LIMITS = LogLimits(64 << 10, 512 << 10)


@pytest.fixture
def log(tmp_path, stalls):
    log = open_log(tmp_path / "data", (0, 1), limits=LIMITS, stall_seconds=STALL_S, on_stall=stalls.append)
    yield log
    crash(log)


@pytest.fixture
def stalls():
    """The silences that were too long."""
    return []


@contextmanager
def in_time(seconds=PATIENCE_S):
    def fail(*_):
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def stop(log):
    assert log.checkpointer.pid is not None
    os.kill(log.checkpointer.pid, signal.SIGSTOP)


def go_on(log, turns, until, each=lambda: None, lasts_s=0.0):
    """Turns as a worker makes them, with its beat each second, until the condition holds; that may take `lasts_s`."""
    deadline, beat_at = time.monotonic() + lasts_s + PATIENCE_S, 0.0
    while not until():
        assert time.monotonic() < deadline
        if time.monotonic() >= beat_at:
            log.beat()
            beat_at = time.monotonic() + 1.0
        turns.turn(log.stores, log.commit)
        each()
        if log.checkpointer.has_answered(0.01):
            log.hear()


@pytest.fixture
def slow(tmp_path, monkeypatch):
    """Makes the syncs of each checkpointer that is started take so many seconds."""
    try:
        shim = make_shim(SHIM, tmp_path)
    except NoCompiler as reason:
        pytest.skip(str(reason))
    control = tmp_path / "slow"
    monkeypatch.setenv("LD_PRELOAD", str(shim))
    monkeypatch.setenv("SLOW_DISK", str(control))
    return lambda seconds: control.write_text(f"{seconds * 1e6:.0f} 0")


@pytest.mark.parametrize("when", ["before its first sign", "idle", "at work"])
def test_a_stopped_checkpointer_is_replaced_and_sends_go_on(log, stalls, when):
    turns = Turns((0, 1), 7)
    log.checkpointer.start()
    first = log.checkpointer.pid
    if when == "before its first sign":
        os.kill(first, signal.SIGSTOP)
    else:
        go_on(log, turns, lambda: log.checkpoints and not log.is_checkpointing)
        if when == "at work":
            go_on(log, turns, lambda: log.is_checkpointing)
        os.kill(first, signal.SIGSTOP)
    began, done = time.monotonic(), log.checkpoints
    go_on(log, turns, lambda: log.checkpoints > done)
    assert time.monotonic() - began >= STALL_S
    assert min(stalls) >= STALL_S
    assert log.checkpointer.starts == 1 + len(stalls)
    assert log.checkpointer.pid != first
    go_on(log, turns, lambda: log.accepts(0, 1000, 0))
    assert contents(log.stores) == turns.done


def test_one_that_hangs_each_time_ends_its_worker(monkeypatch, log, stalls):
    monkeypatch.setattr(commit_log, "ENDS_MAX", 2)
    turns = Turns((0, 1), 8)
    log.checkpointer.start()

    def stop_it():
        if log.checkpointer.pid is not None:
            stop(log)

    with pytest.raises(StoreError, match="ended 2 times"):
        go_on(log, turns, lambda: False, stop_it)
    assert len(stalls) == 2


def test_what_waits_for_a_stopped_checkpointer_waits_for_its_replacement(monkeypatch, log, stalls):
    """A commit that finds no segment, and the end of the worker."""
    turns = Turns((0, 1), 9)
    log.checkpointer.start()
    go_on(log, turns, lambda: log.checkpoints and not log.is_checkpointing)
    stop(log)
    go_on(log, turns, lambda: log.is_checkpointing)

    def without(*_):
        raise NoSegment(28, os.strerror(28))

    monkeypatch.setattr(log._writer, "begin_turn", without)
    monkeypatch.setattr(log._writer, "_free", [])
    with in_time(), pytest.raises(StoreError):
        turns.turn(log.stores, log.commit)
    assert len(stalls) == 1


def test_the_end_of_a_worker_does_not_wait_for_a_stopped_checkpointer(tmp_path, stalls):
    log = open_log(tmp_path / "data", (0,), limits=LIMITS, stall_seconds=STALL_S, on_stall=stalls.append)
    turns = Turns((0,), 10)
    log.checkpointer.start()
    go_on(log, turns, lambda: log.checkpoints and not log.is_checkpointing)
    stop(log)
    go_on(log, turns, lambda: log.is_checkpointing)
    with in_time():
        log.close()
    again = open_log(tmp_path / "data", (0,))
    assert contents(again.stores) == turns.done
    again.checkpointer.start()
    stop(again)
    with in_time():
        again.close()


@pytest.mark.parametrize("seconds", [0.4 * STALL_S, 5 * STALL_S])
def test_a_checkpoint_may_take_five_times_as_long_if_its_disk_does(slow, log, stalls, seconds):
    """By many syncs, or by a single one."""
    slow(seconds)
    turns = Turns((0, 1), 11)
    log.checkpointer.start()
    first = log.checkpointer.pid
    began = time.monotonic()
    several_syncs_s = 6 * seconds
    go_on(log, turns, lambda: time.monotonic() - began > 5 * STALL_S and log.checkpoints, lasts_s=several_syncs_s)
    assert stalls == []
    assert log.checkpointer.pid == first
    assert contents(log.stores) == turns.done


def test_a_checkpointer_that_is_stopped_within_a_sync_is_replaced(slow, log, stalls):
    turns = Turns((0, 1), 12)
    slow(60)
    log.checkpointer.start()
    first = log.checkpointer.pid
    go_on(log, turns, lambda: log.is_checkpointing)
    go_on(log, turns, lambda: log.checkpointer._its_signs.waits_for_disk)
    slow(0)
    os.kill(first, signal.SIGSTOP)
    go_on(log, turns, lambda: log.checkpoints)
    assert len(stalls) == 1
    assert log.checkpointer.starts == 2
    assert contents(log.stores) == turns.done
