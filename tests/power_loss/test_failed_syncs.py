"""Writes and syncs of a log fail now and then, and then the power is lost: nothing that was answered is missing.

Without direct writes, what a sync could not write is read as if it were on the disk, by the next start, too. So that
start must write it again before it goes on behind it.
"""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.brokers import REPOSITORY
from tests.logs import crash, open_log
from tests.power_loss.disk import Disk, Metadata
from tests.power_loss.failing_journal import opened, rows
from tests.power_loss.failing_lives import LIMITS, PARTITIONS, numbers
from tests.power_loss.simulate import MEMORY
from tests.power_loss.trace import SHIM, Kind, Trace, mark_of
from tests.shims import NoCompiler, make_shim
from tests.without_calls import OPENAT, without

LIVES = 10
LOSSES = 80


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    try:
        return make_shim(SHIM, tmp_path_factory.mktemp("shim"))
    except NoCompiler as error:
        pytest.skip(str(error))


def traced(folder: Path, shim: Path, fail: str, prefix: tuple[str, ...], lives: str = "failing_lives") -> Trace:
    directory, trace = folder / "data", folder / "trace"
    directory.mkdir()
    environment = {
        "LD_PRELOAD": str(shim),
        "POWER_LOSS_DIRECTORY": str(directory.resolve()),
        "POWER_LOSS_TRACE": str(trace),
        "POWER_LOSS_FAIL": fail,
        "PYTHONPATH": str(REPOSITORY),
    }
    command = ["env", *(f"{name}={value}" for name, value in environment.items()), *prefix]
    command += [sys.executable, "-m", f"tests.power_loss.{lives}", str(directory), str(trace), str(LIVES)]
    subprocess.run(command, env=dict(os.environ), check=True)
    return Trace(trace)


class Told:
    """What clients were told so far."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.gone: set[int] = set()
        self.asked = 0

    def tell(self, mark: dict[str, int]) -> None:
        self.done.update({mark.get("done", 0)} - {0})
        self.gone.update({mark.get("gone", 0)} - {0})
        self.asked = max(self.asked, mark.get("asked", 0))

    def check(self, found: set[int]) -> None:
        assert self.done <= found, f"missing: {self.done - found}"
        assert not found & self.gone, f"back: {found & self.gone}"
        assert found <= self.done | {self.asked}


@pytest.mark.skipif(OPENAT == -1, reason="the numbers of system calls are not known here")
@pytest.mark.parametrize(
    ("fail", "calls"),
    [
        ("7:/segment-", ("direct", "aio")),
        ("11:/segment-", ("direct", "aio")),
        ("9:/data.mdb", ("direct", "aio")),
        ("13:/", ("direct", "aio")),
        ("13:/", ()),
    ],
)
def test_what_was_answered_is_there_after_syncs_that_failed_and_a_loss_of_power(tmp_path, shim, fail, calls):
    folder = Path(os.path.realpath(tmp_path))
    trace = traced(folder, shim, fail, without(*calls) if calls else ())

    def check(image: Path, told: Told) -> None:
        log = open_log(image, PARTITIONS, limits=LIMITS, map_size_bytes=1 << 24)
        told.check(numbers(log))
        crash(log)

    lose(folder, trace, check)


def test_rows_of_the_journal_that_were_readable_are_there_after_syncs_that_failed_and_a_loss_of_power(tmp_path, shim):
    folder = Path(os.path.realpath(tmp_path))
    trace = traced(folder, shim, "7:.journal", (), "failing_journal")

    def check(image: Path, told: Told) -> None:
        journal = opened(image)
        assert journal.damage == []
        told.check(rows(journal))
        journal.close()

    lose(folder, trace, check)


def lose(folder: Path, trace: Trace, check: Callable[[Path, Told], None]) -> None:
    """Lose the power at many moments, and check what is left against what clients were told by then."""
    chance = random.Random(len(trace))
    failed = [at for at, each in enumerate(trace) if each.kind == Kind.SYNC and each.result < 0]
    assert len(failed) >= 3
    # Half of the losses come soon after a sync that failed.
    moments = sorted(
        min(len(trace) - 1, chance.choice(failed) + chance.randrange(60))
        if failed and chance.random() < 0.5
        else chance.randrange(len(trace))
        for _ in range(LOSSES)
    )
    disk, told, at = Disk(), Told(), 0
    image = (MEMORY if MEMORY.is_dir() else folder) / f"failed-syncs-{os.getpid()}"
    for moment in moments:
        while at <= moment:
            record = trace[at]
            at += 1
            if record.kind != Kind.MARK:
                disk.tell(record)
                continue
            mark = mark_of(record)
            if "root" in mark:
                disk.set_root(mark["root"])
            told.tell(mark)
        if not told.asked:
            continue
        disk.image(image, chance, chance.choice(list(Metadata)))
        try:
            check(image, told)
        finally:
            shutil.rmtree(image)
