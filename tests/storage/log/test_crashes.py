"""A process that is killed before or after any step that changes the disk, also while it recovers, loses nothing."""

import random
import shutil
import tempfile
from pathlib import Path

import pytest

from storage.lmdb_store import LmdbStore
from storage.log import reading, recovery, segments, writer
from storage.log.commit_log import LogLimits
from storage.log.frames import FRAME_HEAD_BYTES, FrameCodec
from storage.log.segments import SegmentFile
from storage.store import Table
from tests.examples import examples
from tests.logged_turns import Turns, contents, open_local
from tests.logs import crash, open_tables

PARTITIONS = (0, 1, 2)
SELDOM = frozenset({2})
STEPS = [  # all that changes what is on the disk
    (SegmentFile, "begin"),
    (SegmentFile, "start"),
    (SegmentFile, "end"),
    (SegmentFile, "write"),
    (SegmentFile, "truncate"),
    (SegmentFile, "extend"),
    (SegmentFile, "allocate"),
    (LmdbStore, "commit"),
    (reading, "write_again"),
    (writer, "prepare"),
    (writer, "sync_directory"),
    (Path, "mkdir"),
    (Path, "unlink"),
    (Path, "rename"),
]


class Killed(BaseException):
    pass


class Killer:
    """Raises Killed before or after the step `at` of those that are counted."""

    def __init__(self, monkeypatch):
        self.steps, self.at, self.after = 0, -1, False
        for owner, name in STEPS:
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function):
        def step(*args, **kwargs):
            self.steps += 1
            due = self.steps == self.at
            if due and not self.after:
                raise Killed
            result = function(*args, **kwargs)
            if due:
                raise Killed
            return result

        return step

    def kill(self, at, after):
        self.steps, self.at, self.after = 0, at, after

    def spare(self):
        self.kill(-1, False)


def opened(monkeypatch, directory):
    """The log. If the process is killed meanwhile, its tables are closed."""
    tables = []
    original = LmdbStore.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        tables.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(LmdbStore, "__init__", init)
        try:
            return open_local(monkeypatch, directory, PARTITIONS)
        except Killed:
            for each in tables:
                each.close()
            raise


def live(monkeypatch, directory, turns, count, logs):
    """One life of a worker: turns and checkpoints, at whose steps it may be killed."""
    log = opened(monkeypatch, directory)
    logs.append(log)
    assert contents(log.stores) in (turns.done, turns.asked)
    turns.done = contents(log.stores)
    waits = 0
    for _ in range(count):
        turns.turn(log.stores, log.commit)
        if log.is_checkpointing:
            waits += 1
            if waits % 4 == 3:  # meanwhile there were other turns
                log.hear()
    return log


def end(logs):
    for log in logs:
        crash(log)
    logs.clear()


@pytest.fixture
def tmp_path(tmp_path):
    """In memory if possible: there are thousands of syncs, and it does not matter what they do."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as name:
        yield Path(name)


@pytest.fixture
def killer(monkeypatch):
    monkeypatch.setattr(writer, "LARGE_TURN_BYTES", 0)
    monkeypatch.setattr(segments, "ASYNCHRONOUS_BYTES", 0)  # so that there are kills between the begin and the end
    return Killer(monkeypatch)


def steps_of_a_life(monkeypatch, killer, directory, seed, count):
    logs = []
    killer.spare()
    turns = Turns(PARTITIONS, seed, SELDOM)
    killer.kill(-1, False)
    live(monkeypatch, directory, turns, count, logs)
    assert logs[0].checkpoints >= 3
    end(logs)
    return killer.steps


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_at_any_step_loses_nothing(monkeypatch, killer, tmp_path, after):
    count = 50
    steps = steps_of_a_life(monkeypatch, killer, tmp_path / "whole", 1, count)
    assert steps > 80
    chosen = random.sample(range(1, steps + 1), examples(steps))
    print("kills at", chosen)
    killed = 0
    for at in chosen:
        directory, logs = tmp_path / str(at), []
        turns = Turns(PARTITIONS, 1, SELDOM)
        killer.kill(at, after)
        try:
            live(monkeypatch, directory, turns, count, logs)
        except Killed:
            killed += 1
        end(logs)
        killer.spare()
        live(monkeypatch, directory, turns, 10, logs)
        end(logs)
        shutil.rmtree(directory)
    assert killed == len(chosen)


@pytest.mark.parametrize("seed", range(6))
def test_kills_of_one_recovery_after_another_lose_nothing(monkeypatch, killer, tmp_path, seed):
    chance = random.Random(seed)
    turns = Turns(PARTITIONS, seed, SELDOM)
    logs = []
    recoveries = kills = 0
    for _ in range(60):
        # Most kills are of the opening, which takes few steps.
        killer.kill(chance.choice((chance.randint(1, 16), chance.randint(1, 120))), chance.random() < 0.5)
        try:
            log = live(monkeypatch, tmp_path, turns, chance.choice((0, 5, 40)), logs)
            recoveries += 1
            if chance.random() < 0.3:
                if log.is_checkpointing:
                    log.hear()
                log.close()
                logs.clear()
        except Killed:
            kills += 1
        end(logs)
    killer.spare()
    live(monkeypatch, tmp_path, turns, 0, logs)
    end(logs)
    assert recoveries > 5
    assert kills > 20


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_at_any_step_of_detaching_loses_nothing(monkeypatch, killer, tmp_path, after):
    logs = []
    turns = Turns(PARTITIONS, 3)
    live(monkeypatch, tmp_path, turns, 20, logs)
    end(logs)
    at = 1
    while True:
        killer.kill(at, after)
        tables = {}
        try:
            for partition in PARTITIONS:
                path = tmp_path / "partitions" / str(partition)
                tables[partition] = LmdbStore(
                    path, partition_id=partition, map_size_bytes=1 << 24, create=False, attached=True
                )
            recovery.detach(tables, lambda _: None)
        except Killed:
            pass
        else:
            break
        finally:
            for store in tables.values():
                store.close()
        at += 1
        if at % 3 == 0:  # a worker starts in between
            killer.spare()
            live(monkeypatch, tmp_path, turns, 3, logs)
            end(logs)
    assert at > 3
    killer.spare()
    for partition in PARTITIONS:
        with open_tables(tmp_path, partition) as store:
            assert contents({partition: store}) == {
                place: items for place, items in turns.done.items() if place[0] == partition
            }


def test_a_frame_that_is_cut_at_any_byte_ends_the_log(monkeypatch, tmp_path):
    turns = Turns((0,), 5)
    log = open_local(monkeypatch, tmp_path / "data", (0,), limits=LogLimits(1 << 20, 1 << 24))
    for _ in range(3):
        turns.turn(log.stores, log.commit)
    current = log._writer._used[-1]
    start = current.at
    log.stores[0].put_many(Table.META, [(b"key", b"value")])
    log.commit()
    crash(log)
    whole = current.file.path.read_bytes()
    length = FRAME_HEAD_BYTES + len(FrameCodec(log._log_id).read(memoryview(whole)[start:]).payload)
    for size in [*range(length), length]:
        directory = shutil.copytree(tmp_path / "data", tmp_path / "cut")
        path = directory / current.file.path.relative_to(tmp_path / "data")
        path.write_bytes(whole[: start + size] + bytes(len(whole) - start - size))
        again = open_local(monkeypatch, directory, (0,))
        assert contents(again.stores) == turns.done
        assert again.stores[0].get(Table.META, b"key") == (b"value" if size == length else None)
        # It goes on from there.
        again.stores[0].put_many(Table.META, [(b"next", b"turn")])
        again.commit()
        crash(again)
        with open_tables(directory, 0) as store:
            assert contents({0: store}) == turns.done
            assert store.get(Table.META, b"next") == b"turn"
        shutil.rmtree(directory)
