"""Verify, backup and restore, also while a broker writes."""

import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.data_dir import DataDirectory, NetworkFileSystem, UnknownLayout, partition_path
from storage.findings import FINDINGS_KEPT, Problem
from storage.lmdb_store import DATA_FILE, LmdbStore
from storage.maintenance import (
    BackupDamaged,
    MaintenanceError,
    NotADataDirectory,
    TargetNotEmpty,
    backup,
    restore,
    verify,
)
from storage.quarantine import quarantine
from storage.queue_ids import Part
from storage.records import (
    DELETED_ENTITY_PREFIX,
    NEVER,
    STORE_ID_KEY,
    Counts,
    Field,
    Overlay,
    Place,
    Timer,
    due_key,
    encode_counts,
    encode_document,
    encode_entry,
    encode_mark,
    encode_message,
    entity_key,
    forwarded_key,
    mark_key,
    message_key,
    queue_key,
    staged_key,
)
from storage.store import Table
from tests.storage.partition_contents import (
    LAYOUT,
    QUEUE_ID,
    make_data_directory,
    open_store,
    put_counts,
    said,
    start,
)


def contents(path: Path, partition: int) -> list[list[tuple[bytes, bytes]]]:
    with open_store(partition_path(path, partition), partition_id=partition, create=False) as store:
        return [store.scan(table, b"\0", b"\xff" * 32, 1_000_000) for table in Table]


# ---- verify


def test_a_sound_directory_has_no_findings_and_is_counted(tmp_path: Path) -> None:
    make_data_directory(tmp_path)
    report = verify(tmp_path)
    assert report.ok
    assert report.problem_count == 0
    assert [partition.partition for partition in report.partitions] == [0, 1]
    assert report.partitions[0].records == Counter(
        {Table.META: 3, Table.MESSAGES: 4, Table.QUEUE: 4, Table.DUE: 2, Table.COUNTS: 1}
    )


def put_message(store: LmdbStore, number: int) -> None:
    store.put(Table.MESSAGES, message_key(number), encode_message(1, NEVER, LAYOUT, b"body"))


def put_nonsense(store: LmdbStore, *tables: Table) -> None:
    for table in tables:
        store.put(table, b"k", b"v")


def put_to_be_transferred(store: LmdbStore, overlay: Overlay | None, listed: list[int] | None) -> None:
    put_message(store, 99)
    queue_id = QUEUE_ID | Part.TRANSFER
    store.put(Table.QUEUE, queue_key(queue_id, Place.AVAILABLE, 1), encode_entry(99, 0, overlay))
    if listed:
        store.put(Table.META, forwarded_key(queue_id), encode_document(listed))


DAMAGES: dict[str, tuple[Callable[[LmdbStore], object], dict[Problem, int]]] = {
    "message of nonsense": (
        lambda store: store.put(Table.MESSAGES, message_key(1), bytes(50)),
        {Problem.CORRUPT_RECORD: 1},
    ),
    "entry of nonsense": (
        lambda store: store.put(Table.QUEUE, queue_key(QUEUE_ID, Place.AVAILABLE, 1), bytes(50)),
        {Problem.CORRUPT_RECORD: 1, Problem.ORPHANED_MESSAGE: 1, Problem.WRONG_COUNTS: 1},
    ),
    "counts of nonsense": (
        lambda store: store.put(Table.COUNTS, entity_key(QUEUE_ID), bytes(44)),
        {Problem.CORRUPT_RECORD: 1},
    ),
    "entity of nonsense": (
        lambda store: store.put(Table.ENTITIES, entity_key(1), bytes(44)),
        {Problem.CORRUPT_RECORD: 1},
    ),
    "keys of nonsense": (
        lambda store: put_nonsense(store, Table.MESSAGES, Table.QUEUE, Table.DUE, Table.COUNTS, Table.MARKS),
        {Problem.MALFORMED_KEY: 5},
    ),
    "mark of nonsense": (
        lambda store: store.put(Table.MARKS, mark_key(bytes(8), 9 << 3), bytes(12)),
        {Problem.CORRUPT_RECORD: 1, Problem.STRAY_MARK: 1},
    ),
    "mark of no entity": (
        lambda store: store.put(Table.MARKS, mark_key(bytes(8), 9 << 3), encode_mark(7)),
        {Problem.STRAY_MARK: 1},
    ),
    "forwarded from no entity": (
        lambda store: store.put(Table.META, forwarded_key(9 << 3), encode_document(1)),
        {Problem.STRAY_MARK: 1},
    ),
    "in a transfer queue and for nobody": (
        lambda store: put_to_be_transferred(store, None, [1]),
        {Problem.NO_DESTINATION: 1, Problem.WRONG_COUNTS: 1, Problem.STRAY_MARK: 1},
    ),
    "in a transfer queue of which nothing is listed": (
        lambda store: put_to_be_transferred(store, {Field.DESTINATION: "billing"}, None),
        {Problem.NO_DESTINATION: 1, Problem.WRONG_COUNTS: 1},
    ),
    "in a transfer queue that is not counted": (
        lambda store: put_to_be_transferred(store, {Field.DESTINATION: "billing"}, [1]),
        {Problem.WRONG_COUNTS: 1, Problem.STRAY_MARK: 1},
    ),
    "unknown place": (
        lambda store: store.put(Table.QUEUE, queue_key(QUEUE_ID, 9, 9), encode_entry(1)),
        {Problem.MALFORMED_KEY: 1},
    ),
    "message gone": (
        lambda store: store.delete(Table.MESSAGES, message_key(1)),
        {Problem.MISSING_MESSAGE: 1, Problem.WRONG_COUNTS: 1},
    ),
    "entry gone": (
        lambda store: store.delete(Table.QUEUE, queue_key(QUEUE_ID, Place.AVAILABLE, 1)),
        {Problem.ORPHANED_MESSAGE: 1, Problem.WRONG_COUNTS: 1},
    ),
    "message in no queue": (
        lambda store: put_message(store, 99),
        {Problem.ORPHANED_MESSAGE: 1},
    ),
    "message in a queue and staged": (
        lambda store: store.put(Table.META, staged_key(1), encode_document(None)),
        {Problem.WRONG_REFERENCES: 1},
    ),
    "entry twice": (
        lambda store: store.put(Table.QUEUE, queue_key(QUEUE_ID, Place.DEFERRED, 1), encode_entry(1)),
        {Problem.TWO_PLACES: 1, Problem.WRONG_COUNTS: 1, Problem.WRONG_REFERENCES: 1},
    ),
    "counts gone": (
        lambda store: store.delete(Table.COUNTS, entity_key(QUEUE_ID)),
        {Problem.WRONG_COUNTS: 1},
    ),
    "next sequence number in use": (
        lambda store: put_counts(store, Counts(4, 2, 1, 1, 0)),
        {Problem.WRONG_COUNTS: 1},
    ),
    "counts of an empty queue": (
        lambda store: store.put(Table.COUNTS, entity_key(16), store.get(Table.COUNTS, entity_key(QUEUE_ID)) or b""),
        {Problem.WRONG_COUNTS: 1},
    ),
    "timer gone": (
        lambda store: store.delete(Table.DUE, due_key(QUEUE_ID, Timer.SCHEDULED, 9_000, 4)),
        {Problem.MISSING_TIMER: 1},
    ),
    "expiry gone": (
        lambda store: store.delete(Table.DUE, due_key(QUEUE_ID, Timer.EXPIRY, 5_000, 2)),
        {Problem.MISSING_TIMER: 1},
    ),
    "scheduled twice": (
        lambda store: store.put(Table.DUE, due_key(QUEUE_ID, Timer.SCHEDULED, 9_500, 4), message_key(4)),
        {Problem.STRAY_TIMER: 1},
    ),
    "expiry of a deferred message": (
        lambda store: store.put(Table.DUE, due_key(QUEUE_ID, Timer.EXPIRY, 7_000, 3), message_key(3)),
        {Problem.STRAY_TIMER: 1},
    ),
    "timer of no entry": (
        lambda store: store.put(Table.DUE, due_key(QUEUE_ID, Timer.EXPIRY, 7_000, 77), message_key(1)),
        {Problem.STRAY_TIMER: 1},
    ),
    "timer of another message": (
        lambda store: store.put(Table.DUE, due_key(QUEUE_ID, Timer.EXPIRY, 5_000, 2), message_key(1)),
        {Problem.STRAY_TIMER: 1},
    ),
    "timer at another time": (
        lambda store: store.put(Table.DUE, due_key(QUEUE_ID, Timer.EXPIRY, 6_000, 2), message_key(2)),
        {Problem.STRAY_TIMER: 1},
    ),
    "activation of an available message": (
        lambda store: store.put(Table.DUE, due_key(QUEUE_ID, Timer.SCHEDULED, 7_000, 1), message_key(1)),
        {Problem.STRAY_TIMER: 1},
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_is_found_as_what_it_is(tmp_path: Path, name: str) -> None:
    make_data_directory(tmp_path)
    damage, problems = DAMAGES[name]
    with open_store(partition_path(tmp_path, 1), partition_id=1) as store:
        damage(store)
        store.commit()
    report = verify(tmp_path)
    sound, damaged = report.partitions
    assert sound.ok
    assert dict(damaged.problems) == problems
    assert Counter(finding.problem for finding in damaged.findings) == damaged.problems


def test_the_expiry_of_an_entry_is_that_of_its_overlay_if_it_has_one(tmp_path: Path) -> None:
    make_data_directory(tmp_path)
    with open_store(partition_path(tmp_path, 0)) as store:
        entry = encode_entry(2, 0, {Field.EXPIRES_MS: 6_000})
        store.put(Table.QUEUE, queue_key(QUEUE_ID, Place.AVAILABLE, 2), entry)
        store.commit()
    stray, missing = verify(tmp_path).partitions[0].findings
    assert (stray.problem, missing.problem) == (Problem.STRAY_TIMER, Problem.MISSING_TIMER)
    assert "it should be at 6000 ms" in stray.text


def test_dead_lettered_messages_do_not_expire_and_need_no_timer(tmp_path: Path) -> None:
    make_data_directory(tmp_path)
    with open_store(partition_path(tmp_path, 0)) as store:
        record = encode_message(1, 5_000, LAYOUT, b"body")
        store.put(Table.MESSAGES, message_key(5), record)
        store.put(Table.QUEUE, queue_key(QUEUE_ID | Part.DEAD_LETTER, Place.AVAILABLE, 1), encode_entry(5))
        counts = Counts(2, available=1, size_bytes=len(record))
        store.put(Table.COUNTS, entity_key(QUEUE_ID | Part.DEAD_LETTER), encode_counts(counts))
        store.commit()
    assert verify(tmp_path).ok


def test_a_deleted_entity_is_freed_step_by_step_and_that_is_no_problem(tmp_path: Path) -> None:
    make_data_directory(tmp_path)
    with open_store(partition_path(tmp_path, 0)) as store:
        store.put(Table.META, DELETED_ENTITY_PREFIX + entity_key(QUEUE_ID >> 3), encode_document({"topic_id": None}))
        for number, place in ((1, Place.AVAILABLE), (2, Place.AVAILABLE), (3, Place.DEFERRED)):
            store.delete(Table.QUEUE, queue_key(QUEUE_ID, place, number))
            store.delete(Table.MESSAGES, message_key(number))
        store.commit()
    assert verify(tmp_path).ok


def test_a_byte_changed_on_disk_is_found_with_its_key(tmp_path: Path) -> None:
    make_data_directory(tmp_path)
    file = partition_path(tmp_path, 0) / DATA_FILE
    file.write_bytes(file.read_bytes().replace(b"first body", b"worst body"))
    (finding,) = verify(tmp_path).partitions[0].findings
    assert (finding.problem, finding.table, finding.key) == (Problem.CORRUPT_RECORD, Table.MESSAGES, message_key(1))


def test_a_message_set_aside_is_counted_and_no_problem(tmp_path: Path) -> None:
    make_data_directory(tmp_path)
    with open_store(partition_path(tmp_path, 0)) as store:
        size_bytes = sum(len(store.get(Table.MESSAGES, message_key(n)) or b"") for n in (1, 3, 4))
        quarantine(store, Table.MESSAGES, message_key(2))
        quarantine(store, Table.QUEUE, queue_key(QUEUE_ID, Place.AVAILABLE, 2))  # its timer stays until it is due
        put_counts(store, Counts(5, available=1, deferred=1, scheduled=1, size_bytes=size_bytes))
        store.commit()
    report = verify(tmp_path)
    assert report.ok
    assert report.partitions[0].records[Table.QUARANTINE] == 2


def test_of_an_entry_set_aside_the_body_is_left_over(tmp_path: Path) -> None:
    make_data_directory(tmp_path)
    with open_store(partition_path(tmp_path, 0)) as store:
        size_bytes = sum(len(record) for _, record in store.scan(Table.MESSAGES, b"\0", b"\xff" * 9, 10))
        quarantine(store, Table.QUEUE, queue_key(QUEUE_ID, Place.AVAILABLE, 2))
        put_counts(store, Counts(5, available=1, deferred=1, scheduled=1, size_bytes=size_bytes))
        store.commit()
    assert dict(verify(tmp_path).partitions[0].problems) == {Problem.ORPHANED_MESSAGE: 1}


def test_all_problems_are_counted_and_the_first_of_them_kept(tmp_path: Path) -> None:
    make_data_directory(tmp_path, partitions=1)
    with open_store(partition_path(tmp_path, 0)) as store:
        for number in range(100, 100 + FINDINGS_KEPT + 5):
            put_message(store, number)
        store.commit()
    (report,) = verify(tmp_path).partitions
    assert report.problems == {Problem.ORPHANED_MESSAGE: FINDINGS_KEPT + 5}
    assert len(report.findings) == FINDINGS_KEPT


def test_a_store_that_cannot_be_opened_is_a_finding_and_the_others_are_read(tmp_path: Path) -> None:
    make_data_directory(tmp_path, partitions=3)
    (partition_path(tmp_path, 0) / DATA_FILE).write_bytes(b"nonsense")
    (partition_path(tmp_path, 1) / DATA_FILE).unlink()
    report = verify(tmp_path)
    assert [dict(partition.problems) for partition in report.partitions] == [
        {Problem.UNREADABLE_STORE: 1},
        {Problem.UNREADABLE_STORE: 1},
        {},
    ]


def test_a_store_in_the_place_of_another_is_a_finding(tmp_path: Path) -> None:
    make_data_directory(tmp_path)
    partition_path(tmp_path, 1).rename(tmp_path / "aside")
    partition_path(tmp_path, 0).rename(partition_path(tmp_path, 1))
    (tmp_path / "aside").rename(partition_path(tmp_path, 0))
    report = verify(tmp_path)
    assert [dict(partition.problems) for partition in report.partitions] == [{Problem.UNREADABLE_STORE: 1}] * 2


def test_verify_changes_nothing(tmp_path: Path) -> None:
    make_data_directory(tmp_path)
    files = [file for file in tmp_path.rglob("*") if file.is_file() and file.name != "lock.mdb"]
    before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]
    verify(tmp_path)
    assert [(file.read_bytes(), file.stat().st_mtime_ns) for file in files] == before


@pytest.mark.parametrize(
    "task", [verify, lambda path: backup(path, path / "t"), lambda path: restore(path, path / "t")]
)
def test_a_directory_that_is_no_data_directory_is_refused(tmp_path: Path, task: Callable[[Path], object]) -> None:
    with pytest.raises(NotADataDirectory, match=r"has no peeklock\.json"):
        task(tmp_path)
    (tmp_path / "peeklock.json").write_text('{"layout-version": 7}')
    with pytest.raises(UnknownLayout):
        task(tmp_path)


# ---- backup and restore


def without_store_id(tables: list[list[tuple[bytes, bytes]]]) -> list[list[tuple[bytes, bytes]]]:
    meta = [item for item in tables[Table.META] if item[0] != STORE_ID_KEY]
    return [meta, *tables[Table.META + 1 :]]


def test_a_restored_backup_has_the_same_contents(tmp_path: Path) -> None:
    make_data_directory(tmp_path / "data")
    written = backup(tmp_path / "data", tmp_path / "backups" / "monday")
    assert verify(tmp_path / "backups" / "monday").ok
    assert restore(tmp_path / "backups" / "monday", tmp_path / "restored") >= written > 0
    DataDirectory(tmp_path / "restored", partitions=2).close()
    for partition in range(2):
        restored, original = (contents(tmp_path / name, partition) for name in ("restored", "data"))
        assert without_store_id(restored) == without_store_id(original)


def test_a_copied_store_forwards_as_another_one(tmp_path: Path) -> None:
    """What it forwarded after the backup must not stand in the way of what gets the same numbers now."""
    make_data_directory(tmp_path / "data")
    with open_store(partition_path(tmp_path / "data", 0)) as store:
        store.put(Table.ENTITIES, entity_key(1), encode_document({"kind": "queue", "name": "q"}))
        store.put(Table.MARKS, mark_key(bytes(8), 1 << 3), encode_mark(7))
        store.commit()
    backup(tmp_path / "data", tmp_path / "copy")
    restore(tmp_path / "copy", tmp_path / "restored")
    restore(tmp_path / "copy", tmp_path / "again")
    names = ("data", "copy", "restored", "again")
    ids = {
        dict(contents(tmp_path / name, partition)[Table.META])[STORE_ID_KEY] for name in names for partition in range(2)
    }
    assert len(ids) == 8
    assert [len(contents(tmp_path / name, 0)[Table.MARKS]) for name in names] == [1, 0, 0, 0]
    assert verify(tmp_path / "restored").ok


def test_a_backup_is_for_its_owner_only_and_without_secrets_and_locks(tmp_path: Path) -> None:
    make_data_directory(tmp_path / "data", partitions=1)
    (tmp_path / "data" / "root-key").write_text("secret")
    backup(tmp_path / "data", tmp_path / "copy")
    found = {
        str(path.relative_to(tmp_path / "copy")): stat.S_IMODE(path.stat().st_mode)
        for path in tmp_path.rglob("copy/**/*")
    }
    assert found == {
        "peeklock.json": 0o600,
        "partitions": 0o700,
        "partitions/0": 0o700,
        "partitions/0/data.mdb": 0o600,
    }


def test_verifying_a_backup_adds_no_files_to_it(tmp_path: Path) -> None:
    make_data_directory(tmp_path / "data", partitions=1)
    backup(tmp_path / "data", tmp_path / "copy")
    before = sorted((tmp_path / "copy").rglob("*"))
    assert verify(tmp_path / "copy").ok
    assert sorted((tmp_path / "copy").rglob("*")) == before


def test_a_backup_is_compacted(tmp_path: Path) -> None:
    make_data_directory(tmp_path / "data", partitions=1)
    with open_store(partition_path(tmp_path / "data", 0)) as store:
        store.put(Table.META, b"large", bytes(5_000_000))
        store.commit()
        store.delete(Table.META, b"large")
        store.commit()
    assert backup(tmp_path / "data", tmp_path / "copy") < 200_000


@pytest.mark.parametrize("task", [backup, restore])
def test_a_target_with_something_in_it_is_refused_and_left_alone(
    tmp_path: Path, task: Callable[[Path, Path], int]
) -> None:
    make_data_directory(tmp_path / "data")
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").write_text("mine")
    with pytest.raises(TargetNotEmpty):
        task(tmp_path / "data", target)
    assert [path.name for path in target.iterdir()] == ["file"]
    with pytest.raises(TargetNotEmpty):
        task(tmp_path / "data", target / "file")


@pytest.mark.parametrize("task", [backup, restore])
def test_an_empty_target_is_taken(tmp_path: Path, task: Callable[[Path, Path], int]) -> None:
    make_data_directory(tmp_path / "data")
    (tmp_path / "target").mkdir()
    task(tmp_path / "data", tmp_path / "target")
    assert verify(tmp_path / "target").ok


def test_restore_takes_a_new_volume(tmp_path: Path) -> None:
    make_data_directory(tmp_path / "data")
    (tmp_path / "volume" / "lost+found").mkdir(parents=True)
    restore(tmp_path / "data", tmp_path / "volume")
    assert verify(tmp_path / "volume").ok


def test_a_damaged_backup_is_not_restored(tmp_path: Path) -> None:
    make_data_directory(tmp_path / "data")
    backup(tmp_path / "data", tmp_path / "copy")
    file = partition_path(tmp_path / "copy", 1) / DATA_FILE
    file.write_bytes(file.read_bytes().replace(b"first body", b"worst body"))
    with pytest.raises(BackupDamaged, match="1 problem found") as caught:
        restore(tmp_path / "copy", tmp_path / "restored")
    assert caught.value.report.problem_count == 1
    assert not (tmp_path / "restored").exists()


def test_restore_to_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_data_directory(tmp_path / "data")
    table = tmp_path / "mountinfo"
    table.write_text(f"22 1 0:1 / {tmp_path} rw - nfs4 server:/x rw\n")
    monkeypatch.setattr("storage.maintenance.MOUNT_TABLE", table)
    with pytest.raises(NetworkFileSystem):
        restore(tmp_path / "data", tmp_path / "restored")


def test_a_failed_backup_leaves_nothing(tmp_path: Path) -> None:
    make_data_directory(tmp_path / "data")
    (partition_path(tmp_path / "data", 1) / DATA_FILE).write_bytes(b"nonsense")
    with pytest.raises(Exception, match="cannot be opened"):
        backup(tmp_path / "data", tmp_path / "copies" / "one")
    assert list((tmp_path / "copies").iterdir()) == []


def test_a_backup_to_where_another_is_under_way_is_refused(tmp_path: Path) -> None:
    make_data_directory(tmp_path / "data")
    (tmp_path / "copy.partial").mkdir()
    with pytest.raises(MaintenanceError, match="another backup is under way"):
        backup(tmp_path / "data", tmp_path / "copy")
    assert (tmp_path / "copy.partial").is_dir()


def test_a_restore_that_was_interrupted_is_not_taken_for_a_data_directory(tmp_path: Path) -> None:
    make_data_directory(tmp_path / "data")
    (tmp_path / "data" / "peeklock.json").unlink()  # it is written last
    with pytest.raises(UnknownLayout):
        DataDirectory(tmp_path / "data", partitions=2)


WRITE_IN_A_LOOP = """
import sys
from pathlib import Path
from partition_contents import QUEUE_ID, add_message, open_store, put_counts
from storage.data_dir import DataDirectory
from storage.records import Counts, Place, message_key, queue_key
from storage.store import Table

directory = DataDirectory(Path(sys.argv[1]), partitions=1)
store = open_store(directory.partition_path(0))
size_bytes = first = 0
for number in range(1, 1_000_000):
    size_bytes += (size := add_message(store, number, bytes(1000)))
    if number % 3 == 0:  # a third of them is settled
        first += 1
        store.delete(Table.MESSAGES, message_key(first))
        store.delete(Table.QUEUE, queue_key(QUEUE_ID, Place.AVAILABLE, first))
        size_bytes -= size
    put_counts(store, Counts(number + 1, available=number - first, size_bytes=size_bytes))
    store.commit()
    print(number, flush=True)
"""


def test_backup_and_verify_while_a_broker_writes(tmp_path: Path) -> None:
    with start(WRITE_IN_A_LOOP, tmp_path / "data") as process:
        for _ in range(50):
            said(process)
        reported = int(said(process))
        assert verify(tmp_path / "data").ok
        backup(tmp_path / "data", tmp_path / "copy")
        assert said(process)  # it went on
        process.kill()
    assert verify(tmp_path / "copy").ok
    restore(tmp_path / "copy", tmp_path / "restored")
    with open_store(partition_path(tmp_path / "restored", 0), create=False) as store:
        there = int.from_bytes(store.last_key(Table.MESSAGES) or b"", "big")
        assert there >= reported
        keys = [key for key, _ in store.scan(Table.MESSAGES, b"\0", b"\xff" * 9, 1_000_000)]
        assert keys == [message_key(number) for number in range(there // 3 + 1, there + 1)]
