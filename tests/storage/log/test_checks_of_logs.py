"""The checks of a log and its writer find what must not be."""

from collections.abc import Callable
from pathlib import Path

import pytest

from storage.log.checkpoint_state import State
from storage.log.commit_log import CommitLog
from storage.log.writer import LogWriter
from storage.store import Table
from tests.logged_turns import SMALL, Turns, open_local
from tests.logs import crash

IN_LOG: dict[str, Callable[[CommitLog], object]] = {
    "a change that nobody would log": lambda log: log._changed.clear(),
    "a store that is logged twice": lambda log: log._changed.extend(log._changed),
    "a checkpoint without frozen changes": lambda log: setattr(log, "state", State.UNDER_WAY),
    "frozen changes without a checkpoint": lambda log: log.stores[1].freeze(),
    "bytes of what is not frozen": lambda log: log._frozen_bytes.update({1: 10}),
    "a checkpoint of turns that are not there": lambda log: setattr(log, "_frozen_lsn", log.lsn + 1),
    "young changes that do not count": lambda log: setattr(log, "_young_bytes", 0),
}
IN_WRITER: dict[str, Callable[[LogWriter], object]] = {
    "a segment that is free and used": lambda writer: writer._free.append(writer._used[0]),
    "a segment that is made and used": lambda writer: setattr(writer, "_preparing", writer._used[0].number),
    "frames in another order": lambda writer: writer._used.reverse(),
    "a last frame that is another": lambda writer: setattr(writer, "lsn", writer.lsn + 1),
    "no room for the next name": lambda writer: setattr(writer._used[-1], "at", writer._used[-1].size_bytes),
    "a size that the file has not": lambda writer: setattr(writer._used[-1], "size_bytes", SMALL.segment_bytes * 2),
    "kept segments that are in use": lambda writer: writer._kept.append(writer._used[-1]),
    "bytes of what is not kept": lambda writer: setattr(writer, "kept_bytes", writer.kept_bytes + 1),
    "what nobody knows": lambda writer: setattr(writer, "_known_lsn", writer.lsn + 1),
    "a write of nothing": lambda writer: setattr(writer, "is_writing", not writer.is_writing),
    "a spare segment that is not there": lambda writer: setattr(writer, "has_spare", True),
}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommitLog:
    """A log with some segments, a change that is staged, and none that is frozen."""
    log = open_local(monkeypatch, tmp_path, (0, 1))
    monkeypatch.setattr(log, "_checkpoint_if_due", lambda: None)
    turns = Turns((0, 1), 1)
    while len(log._writer._used) < 3:
        turns.turn(log.stores, log.commit)
    log.stores[0].put(Table.MESSAGES, b"key", b"value")
    log.check()
    return log


@pytest.mark.parametrize("wrong", IN_LOG)
def test_what_must_not_be_in_a_log_is_found(log: CommitLog, wrong: str) -> None:
    IN_LOG[wrong](log)
    with pytest.raises(AssertionError):
        log.check()
    crash(log)


@pytest.mark.parametrize("wrong", IN_WRITER)
def test_what_must_not_be_in_a_writer_is_found(log: CommitLog, wrong: str) -> None:
    files = [segment.file for segment in (*log._writer._used, *log._writer._free)]
    IN_WRITER[wrong](log._writer)
    with pytest.raises(AssertionError):
        log.check()
    for each in files:
        each.close()
    log.checkpointer.close()


def test_after_a_write_that_failed_nothing_is_said(log: CommitLog) -> None:
    log._changed.clear()
    log._writer.failure = OSError()
    log.check()
    crash(log)
