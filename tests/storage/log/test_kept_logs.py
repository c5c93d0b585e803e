"""Logs of partitions that are left out, moved to another worker, restored or upgraded."""

import shutil
import subprocess
import sys

import pytest

from storage.data_dir import partition_path
from storage.lmdb_store import LmdbStore, UnknownFormat
from storage.log.reading import LogDamaged
from storage.log.recovery import detach, keep_log, log_directory, logs
from storage.log.tables import position
from storage.records import FORMAT_VERSION, FORMAT_VERSION_KEY, encode_document
from storage.store import Table
from tests.brokers import REPOSITORY
from tests.logged_turns import Turns, contents, open_local
from tests.logs import attached_tables, crash, open_tables

MAP_BYTES = 1 << 24


def work(log, turns, count=40):
    for _ in range(count):
        turns.turn(log.stores, log.commit)
        if log.is_checkpointing:
            log.hear()


def holds(directory, turns):
    """All partitions are brought up to date together, as at a start."""
    with attached_tables(directory, turns.partitions, MAP_BYTES) as stores:
        detach(stores, lambda _: None)
        assert contents(stores) == turns.done


def leave_out(monkeypatch, directory, turns, partition):
    """The worker goes on without this partition, until all segments were used again."""
    keep_log(log_directory(directory, 0), 0, partition, partition_path(directory, partition))
    rest = Turns(tuple(each for each in turns.partitions if each != partition), 5)
    rest.done = {place: items for place, items in turns.done.items() if place[0] != partition}
    log = open_local(monkeypatch, directory, rest.partitions)
    work(log, rest, 100)
    assert log.checkpoints > 4
    crash(log)
    turns.done |= rest.done


@pytest.fixture
def worked(monkeypatch, tmp_path):
    """The turns of two partitions, whose worker was killed."""
    turns = Turns((0, 1), 3)
    log = open_local(monkeypatch, tmp_path, (0, 1))
    work(log, turns, 21)
    crash(log)
    return turns


def test_a_partition_that_comes_back_is_brought_up_from_the_log_that_was_kept(monkeypatch, tmp_path, worked):
    leave_out(monkeypatch, tmp_path, worked, 1)
    leave_out(monkeypatch, tmp_path, worked, 1)  # another start; what is kept stays as it is
    assert (partition_path(tmp_path, 1) / "logs" / "0").is_dir()
    holds(tmp_path, worked)
    assert not (partition_path(tmp_path, 1) / "logs").exists()


def test_without_the_log_that_was_kept_it_is_not_opened(monkeypatch, tmp_path, worked):
    leave_out(monkeypatch, tmp_path, worked, 1)
    shutil.rmtree(partition_path(tmp_path, 1) / "logs")
    with pytest.raises(LogDamaged, match=r"logs/0.*(missing|older copy|damaged)"):
        holds(tmp_path, worked)


COPY = """
import pathlib, sys
from storage.lmdb_store import renew_store_id
from storage.log.snapshot import Snapshot
source, target = map(pathlib.Path, sys.argv[1:])
target.mkdir()
with Snapshot(source) as snapshot:
    snapshot.copy(target)
renew_store_id(target)
"""


def copied(directory, partition, target):
    """A copy of the partition, as backups are made, by another process."""
    command = [sys.executable, "-c", COPY, str(partition_path(directory, partition)), str(target)]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    return target


def test_a_partition_that_is_restored_needs_no_log(monkeypatch, tmp_path, worked):
    backup = copied(tmp_path, 1, tmp_path / "backup")
    then = {place: dict(items) for place, items in worked.done.items() if place[0] == 1}
    assert any(then.values())
    leave_out(monkeypatch, tmp_path, worked, 1)
    path = partition_path(tmp_path, 1)
    (path / "data.mdb").unlink()
    (path / "lock.mdb").unlink()
    shutil.copy(backup / "data.mdb", path)
    worked.done |= then
    holds(tmp_path, worked)
    assert not (path / "logs").exists()


def test_a_backup_has_the_turns_that_only_the_log_has(monkeypatch, tmp_path):
    turns = Turns((0, 1), 3)
    log = open_local(monkeypatch, tmp_path, (0, 1))
    work(log, turns, 7)
    while not log.young_bytes():
        turns.turn(log.stores, log.commit)
    then = turns.copy()
    copies = {partition: copied(tmp_path, partition, tmp_path / f"copy-{partition}") for partition in (0, 1)}
    work(log, turns, 7)
    crash(log)
    for partition, path in copies.items():
        with LmdbStore(path, partition_id=partition, map_size_bytes=MAP_BYTES, create=False) as store:
            assert contents({partition: store}) == {
                place: items for place, items in then.items() if place[0] == partition
            }
    holds(tmp_path, turns)


def test_damaged_logs_of_other_workers_are_kept_beside_that_which_is_needed(monkeypatch, tmp_path, worked):
    for worker in (5, 7):
        log_directory(tmp_path, worker).mkdir()
        (log_directory(tmp_path, worker) / "segment-0").write_bytes(b"garbage")
    for worker, directory in sorted(logs(tmp_path), reverse=True):
        keep_log(directory, worker, 1, partition_path(tmp_path, 1))
    leave_out(monkeypatch, tmp_path, worked, 1)
    holds(tmp_path, worked)


def test_a_log_that_has_nothing_of_a_partition_is_not_kept_for_it(monkeypatch, tmp_path, worked):
    keep_log(log_directory(tmp_path, 0), 0, 2, partition_path(tmp_path, 1))
    assert not (partition_path(tmp_path, 1) / "logs").exists()


def test_an_interrupted_copy_is_made_again(monkeypatch, tmp_path, worked):
    path = partition_path(tmp_path, 1)
    (path / "logs" / "0.partial").mkdir(parents=True)
    (path / "logs" / "0.partial" / "segment-0").write_bytes(b"half of it")
    leave_out(monkeypatch, tmp_path, worked, 1)
    holds(tmp_path, worked)


def test_partitions_move_between_workers_when_their_number_changes(monkeypatch, tmp_path):
    turns = Turns((0, 1, 2, 3), 9)
    for workers in (2, 3, 1, 4, 2):
        opened = [
            open_local(monkeypatch, tmp_path, tuple(range(worker, 4, workers)), worker=worker)
            for worker in range(workers)
        ]
        stores = {partition: store for log in opened for partition, store in log.stores.items()}

        def commit(opened=opened):
            for log in opened:
                log.commit()
                if log.is_checkpointing:
                    log.hear()

        for _ in range(15):
            turns.turn(stores, commit)
        for log in opened:
            crash(log)
        holds(tmp_path, turns)


def test_stores_of_the_format_before_the_log_are_opened_and_upgraded(monkeypatch, tmp_path):
    turns = Turns((0,), 2)
    path = partition_path(tmp_path, 0)
    path.parent.mkdir(parents=True)
    with LmdbStore(path, partition_id=0, map_size_bytes=MAP_BYTES, create=True) as store:
        store.put(Table.META, FORMAT_VERSION_KEY, encode_document(1))
        turns.change(0, store)
        store.commit()
        turns.done = turns.asked
    log = open_local(monkeypatch, tmp_path, (0,))
    assert contents(log.stores) == turns.done
    assert log.stores[0].get(Table.META, FORMAT_VERSION_KEY) == encode_document(FORMAT_VERSION)
    work(log, turns, 5)
    crash(log)
    holds(tmp_path, turns)


def test_a_newer_format_is_refused_before_its_log_is_read(monkeypatch, tmp_path, worked):
    with open_tables(tmp_path, 0) as store:
        store.put(Table.META, FORMAT_VERSION_KEY, encode_document(FORMAT_VERSION + 1))
        store.commit()
    before = {path: path.read_bytes() for path in log_directory(tmp_path, 0).iterdir()}
    data = (partition_path(tmp_path, 0) / "data.mdb").read_bytes()
    with pytest.raises(UnknownFormat):
        open_local(monkeypatch, tmp_path, (0, 1))
    assert {path: path.read_bytes() for path in log_directory(tmp_path, 0).iterdir()} == before
    assert (partition_path(tmp_path, 0) / "data.mdb").read_bytes() == data


def test_a_stopped_worker_leaves_no_position(monkeypatch, tmp_path, worked):
    log = open_local(monkeypatch, tmp_path, (0, 1))
    work(log, worked, 5)
    log.close()
    for partition in (0, 1):
        with LmdbStore(
            partition_path(tmp_path, partition), partition_id=partition, map_size_bytes=MAP_BYTES, create=False
        ) as store:
            assert position(store) is None
    holds(tmp_path, worked)
