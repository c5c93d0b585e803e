"""A capture that is killed anywhere: each offset is in one file that counts, before and after it goes on."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyarrow import fs

from storage.capture.chain import load
from storage.capture.compaction import clean, compact
from storage.capture.place import Place, Sink
from storage.capture.writing import CaptureOptions, CaptureWriter
from tests.capture.capturing_process import NAMESPACE, ROWS_PER_SECOND
from tests.capture.checks import captured_rows
from tests.capture.synthetic_rows import EPOCH, batch, row
from tests.processes import REPOSITORY

ROUNDS = 12


def expected(position: tuple[int, str], count: int, rows_per_second: int) -> list[dict[str, object]]:
    partition, epoch = position
    return [
        {
            **{"namespace": NAMESPACE, "epoch": epoch},
            **row(partition, offset, rows_per_second=rows_per_second, body_bytes=30),
        }
        for offset in range(count)
    ]


def test_killed_at_random_times_each_offset_is_in_one_file(tmp_path):
    chance = random.Random(5)
    before = 0
    for _ in range(ROUNDS):
        command = [sys.executable, "-m", "tests.capture.capturing_process", tmp_path]
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"begun\n"
            time.sleep(chance.random() / 3)  # it may be killed anywhere
            process.kill()
        rows = captured_rows(tmp_path)
        for position, found in rows.items():
            assert found == expected(position, len(found), ROWS_PER_SECOND)
        now = sum(map(len, rows.values()))
        assert now >= before, "what was captured has gone"
        before = now
    assert before > 100
    assert load(Place.of(str(tmp_path))).removed, "nothing was compacted"


class Stopped(BaseException):
    """As if the process had been killed."""


class HalfSink(Sink):
    """Takes half of what is written."""

    def write(self, content: bytes) -> int:
        return super().write(content[: len(content) // 2])


class StoppingPlace(Place):
    """Stops at the operation of that number on the file system: before it, in the middle of it, or behind it."""

    left = 0
    how = "before"

    def _count(self) -> bool:
        self.left -= 1
        return self.left == 0

    @contextmanager
    def writing(self, path: str) -> Iterator[Sink]:
        stops = self._count()
        if stops and self.how == "before":
            raise Stopped
        with super().writing(path) as sink:
            is_within = stops and self.how == "within"
            yield HalfSink(sink) if is_within and path.endswith(".json") else sink
            if is_within:
                raise Stopped
        if stops:
            raise Stopped

    def delete(self, path: str) -> None:
        stops = self._count()
        if stops and self.how == "before":
            raise Stopped
        super().delete(path)
        if stops:
            raise Stopped


@pytest.mark.parametrize("how", ["before", "within", "behind"])
@pytest.mark.parametrize("form", ["local", "other"])
def test_stopped_at_each_write_and_removal_each_offset_is_in_one_file(tmp_path, how, form):
    """`other`: a file system that has no lock, to which files are written and moved."""
    operations = 0
    done = False
    while not done:
        operations += 1
        folder = tmp_path / f"{operations}"
        folder.mkdir()
        place = _place(folder, form)
        place.left, place.how = operations, how
        try:
            _work(place, rounds=2)
            done = True
        except Stopped:
            pass
        place.left = 0
        _compare(folder)
        _work(place, rounds=1)
        _compare(folder)
    assert operations > 12


def _place(folder: Path, form: str) -> StoppingPlace:
    if form == "local":
        return StoppingPlace(fs.LocalFileSystem(), str(folder), str(folder))
    return StoppingPlace(fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem()), "x", "other:x")


def _work(place: Place, rounds: int) -> None:
    options = CaptureOptions(keep_seconds=-3600, compact_after_seconds=0, lease_seconds=0)
    writer = CaptureWriter(place, NAMESPACE, options)
    try:
        for _ in range(rounds):
            for partition in range(2):
                first = writer.next_offset(partition, EPOCH) or 0
                writer.add(partition, EPOCH, batch(partition, first, first + 9, body_bytes=30))
            writer.roll()
        compact(writer, {})
        clean(writer)
        writer.close()
    except Stopped:
        if writer.chain._lock is not None:
            writer.chain._lock.release()  # as the kernel does
        raise


def _compare(folder: Path) -> None:
    root = folder / "x" if (folder / "x").exists() else folder
    for position, found in captured_rows(root).items():
        assert found == expected(position, len(found), 10)
