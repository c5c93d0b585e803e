"""Verify, backup and restore of data directories whose latest changes are in a log."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.data_dir import partition_path
from storage.findings import Problem
from storage.lmdb_store import DATA_FILE, LmdbStore
from storage.log.recovery import detach, keep_log, log_directory, log_of_partition
from storage.log.segments import segment_path
from storage.log.tables import LogPosition
from storage.maintenance import BackupDamaged, backup, restore, verify
from storage.records import LOG_POSITION_KEY, Counts, encode_document, message_key
from storage.store import Store, StoreDamaged, Table
from tests.logs import MAP_BYTES, attached_tables, checkpoint, crash, open_log, open_tables
from tests.storage.partition_contents import add_message, make_data_directory, put_counts, said, start


def add(store: Store, number: int) -> None:
    """Message `number` in the place of the four that were there, or of the one before it."""
    if number == 5:
        for table in (Table.MESSAGES, Table.QUEUE, Table.DUE, Table.COUNTS):
            store.delete_many(table, [key for key, _ in store.scan(table, b"\0", b"\xff" * 32, 100)])
    size_bytes = add_message(store, number)
    put_counts(store, Counts(number + 1, available=number - 4, size_bytes=size_bytes * (number - 4)))


def killed(path: Path, *, workers: int = 1, checkpoint_at: int = 6, last: int = 8) -> None:
    """A data directory of two partitions whose workers were killed: the tables have older messages than the log."""
    make_data_directory(path)
    for worker in range(workers):
        with_log = open_log(path, range(worker, 2, workers), worker=worker)
        for number in range(5, last + 1):
            for store in with_log.stores.values():
                add(store, number)
            with_log.commit()
            if number == checkpoint_at:
                checkpoint(with_log)
        crash(with_log)


def numbers(path: Path, partition: int) -> list[int]:
    with open_tables(path, partition) as store:
        return [int.from_bytes(key, "big") for key, _ in store.scan(Table.MESSAGES, b"\0", b"\xff" * 9, 100)]


def files(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "lock.mdb"}


def test_the_changes_in_a_log_are_verified_with_the_others_and_nothing_is_changed(tmp_path: Path) -> None:
    killed(tmp_path)
    before = files(tmp_path)
    report = verify(tmp_path)
    assert report.ok, report
    assert [partition.records[Table.MESSAGES] for partition in report.partitions] == [4, 4]
    assert files(tmp_path) == before


def test_a_problem_that_is_only_in_the_log_is_found(tmp_path: Path) -> None:
    killed(tmp_path)
    log = open_log(tmp_path, (0, 1))
    log.stores[1].delete(Table.MESSAGES, message_key(7))
    log.commit()
    crash(log)
    first, second = verify(tmp_path).partitions
    assert first.ok
    assert second.problems[Problem.MISSING_MESSAGE] == 1


def test_a_backup_has_the_changes_of_the_log_and_no_log(tmp_path: Path) -> None:
    killed(tmp_path / "data")
    backup(tmp_path / "data", tmp_path / "backup")
    assert not (tmp_path / "backup" / "logs").exists()
    assert verify(tmp_path / "backup").ok
    shutil.rmtree(tmp_path / "data")  # the backup does not need it
    restore(tmp_path / "backup", tmp_path / "restored")
    assert [numbers(tmp_path / "restored", partition) for partition in range(2)] == [[5, 6, 7, 8]] * 2
    log = open_log(tmp_path / "restored", (0, 1))  # a worker takes it
    add(log.stores[0], 9)
    log.commit()
    log.close()
    assert numbers(tmp_path / "restored", 0) == [5, 6, 7, 8, 9]


def test_a_killed_brokers_directory_is_restored_like_a_backup(tmp_path: Path) -> None:
    killed(tmp_path / "data")
    restore(tmp_path / "data", tmp_path / "restored")
    assert numbers(tmp_path / "restored", 1) == [5, 6, 7, 8]


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def flip_first_frame(path: Path) -> None:
    flip(segment_path(log_directory(path, 0), 0), 4096 + 100)


def lose_log(path: Path) -> None:
    shutil.rmtree(log_directory(path, 0))


def take_another_workers(path: Path) -> None:
    lose_log(path)
    shutil.copytree(log_directory(path, 1), log_directory(path, 0))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit": (flip_first_frame, "segment-0: turn 2 at byte .* is whole, but turn 1 is damaged or missing"),
    "no log": (lose_log, "logs/0: the log is missing"),
    "another worker's log": (take_another_workers, "segment-0: is a segment of worker 1, not of worker 0"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_log_is_a_finding_of_each_partition_that_needs_it(tmp_path: Path, name: str) -> None:
    damage, text = DAMAGES[name]
    killed(tmp_path / "data", workers=2, checkpoint_at=0)  # partition 0 has the log of worker 0
    damage(tmp_path / "data")
    before = files(tmp_path / "data")
    first, second = verify(tmp_path / "data").partitions
    assert second.ok
    assert dict(first.problems) == {Problem.DAMAGED_LOG: 1}
    assert re.search(text, first.findings[0].text)
    with pytest.raises(StoreDamaged, match=text):
        backup(tmp_path / "data", tmp_path / "backup")
    assert not (tmp_path / "backup").exists()
    with pytest.raises(BackupDamaged):
        restore(tmp_path / "data", tmp_path / "restored")
    assert not (tmp_path / "restored").exists()
    assert files(tmp_path / "data") == before


@pytest.mark.parametrize("value", [b"nonsense", encode_document([1, 2, 3, 4])])
def test_a_position_in_the_log_that_makes_no_sense_is_damage_of_its_store(tmp_path: Path, value: bytes) -> None:
    killed(tmp_path)
    path = partition_path(tmp_path, 1)
    with LmdbStore(path, partition_id=1, map_size_bytes=MAP_BYTES, create=False, attached=True) as store:
        store.put(Table.META, LOG_POSITION_KEY, value)
        store.commit()
    first, second = verify(tmp_path).partitions
    assert first.ok
    assert dict(second.problems) == {Problem.UNREADABLE_STORE: 1}
    with pytest.raises(StoreDamaged, match="META log"):
        open_log(tmp_path, (0, 1))


def test_of_the_partitions_of_a_log_only_the_one_that_is_an_older_copy_is_blamed(tmp_path: Path) -> None:
    killed(tmp_path, checkpoint_at=0)
    older = (partition_path(tmp_path, 1) / DATA_FILE).read_bytes()
    crash(open_log(tmp_path, range(3)))  # the tables are brought up to date, and the log knows it
    (partition_path(tmp_path, 1) / DATA_FILE).write_bytes(older)
    blamed: list[int] = []
    with (
        attached_tables(tmp_path, range(3)) as stores,
        pytest.raises(StoreDamaged, match=r"partitions/1: .* is an older copy"),
    ):
        detach(stores, blamed.append)
    assert blamed[-1] == 1


def test_a_partition_that_left_the_log_does_not_need_it(tmp_path: Path) -> None:
    killed(tmp_path)
    open_tables(tmp_path, 1).close()
    lose_log(tmp_path)
    first, second = verify(tmp_path).partitions
    assert dict(first.problems) == {Problem.DAMAGED_LOG: 1}
    assert second.ok


def test_a_partition_that_is_left_out_is_verified_with_the_copy_of_its_log(tmp_path: Path) -> None:
    killed(tmp_path)
    keep_log(log_directory(tmp_path, 0), 0, 1, partition_path(tmp_path, 1))
    kept = log_of_partition(partition_path(tmp_path, 1), LogPosition(b"", 0, 0))
    assert kept.is_relative_to(partition_path(tmp_path, 1))
    open_tables(tmp_path, 0).close()
    lose_log(tmp_path)
    report = verify(tmp_path)
    assert report.ok
    assert report.partitions[1].records[Table.MESSAGES] == 4
    backup(tmp_path, tmp_path / "backup")
    assert {file.name for file in partition_path(tmp_path / "backup", 1).iterdir()} == {DATA_FILE}
    assert numbers(tmp_path / "backup", 1) == [5, 6, 7, 8]
    flip(segment_path(kept, 0), 4096 + 100)
    [finding] = verify(tmp_path).partitions[1].findings
    assert finding.problem is Problem.DAMAGED_LOG
    assert str(kept) in finding.text


WRITE_IN_A_LOOP = """
import select
import sys
from pathlib import Path
from partition_contents import QUEUE_ID, add_message, put_counts
from storage.data_dir import DataDirectory
from storage.log.commit_log import LogLimits
from storage.records import Counts, Place, message_key, queue_key
from storage.store import Table
from tests.logs import open_log

directory = DataDirectory(Path(sys.argv[1]), partitions=2)
log = open_log(directory.path, (0, 1), limits=LogLimits(1 << 20, 8 << 20))
log.checkpointer.start()
sizes, first = [0, 0], 0
for number in range(1, 1_000_000):
    settled = first + (number % 3 == 0)  # a third of them is settled
    for partition, store in log.stores.items():
        sizes[partition] += (size := add_message(store, number, bytes(3000)))
        if settled > first:
            store.delete(Table.MESSAGES, message_key(settled))
            store.delete(Table.QUEUE, queue_key(QUEUE_ID, Place.AVAILABLE, settled))
            sizes[partition] -= size
        put_counts(store, Counts(number + 1, available=number - settled, size_bytes=sizes[partition]))
    first = settled
    log.commit()
    if log.checkpointer.descriptor is not None:
        if select.select([log.checkpointer.descriptor], [], [], 0)[0]:
            log.hear()
    if number % 100 == 0:
        log.beat()
    print(number, log.checkpoints, flush=True)
"""


def test_backup_and_verify_while_a_worker_writes_to_its_log(tmp_path: Path) -> None:
    with start(WRITE_IN_A_LOOP, tmp_path / "data") as process:
        while int(said(process).split()[1]) < 3:
            pass
        for round_ in range(3):
            number, _ = map(int, said(process).split())
            report = verify(tmp_path / "data")
            assert report.ok, report
            backup(tmp_path / "data", tmp_path / f"copy-{round_}")
            *_, last = [said(process) for _ in range(100)]
            assert int(last.split()[0]) > number  # it went on
        process.kill()
    report = verify(tmp_path / "data")  # as it was left
    assert report.ok, report
    assert verify(tmp_path / "copy-2").ok
    restore(tmp_path / "copy-2", tmp_path / "restored")
    for partition in range(2):
        with open_tables(tmp_path / "restored", partition) as store:
            there = int.from_bytes(store.last_key(Table.MESSAGES) or b"", "big")
            assert there >= number
            keys = [key for key, _ in store.scan(Table.MESSAGES, b"\0", b"\xff" * 9, 1_000_000)]
            assert keys == [message_key(each) for each in range(there // 3 + 1, there + 1)]
