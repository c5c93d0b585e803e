"""Message ids kept for duplicate detection: verify finds what is wrong with them, and copies keep them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.data_dir import Description, partition_path
from storage.durable import write_file
from storage.findings import Problem
from storage.lmdb_store import LmdbStore
from storage.maintenance import backup, restore, verify
from storage.quarantine import quarantine
from storage.records import (
    DELETED_ENTITY_PREFIX,
    RunManifest,
    chunk_key,
    decode_manifest,
    encode_document,
    encode_manifest,
    encode_rows,
    encode_seen,
    entity_key,
    filter_key,
    log_key,
    run_key,
)
from storage.seen_ids import SeenIds
from storage.seen_runs import SeenLimits, SeenMemory
from storage.store import Table
from tests.storage.partition_contents import open_store

ENTITY, PLAIN, GONE = 1, 2, 3
END_MS = 1000
IDS = [bytes([number]) * 16 for number in range(1, 11)]
COMPLETE, UNFINISHED = 1, 2
SECOND_CHUNK = chunk_key(ENTITY, COMPLETE, IDS[2])
LOG_ROW = log_key(ENTITY, 3)


def keep(store: LmdbStore, entity_id: int) -> None:
    """Four ids in a run of two chunks, four in one that is being made, and two in the log."""
    limits = SeenLimits(run_ids=4, fan_out=2, chunk_ids=2, step_ids=1)
    ids = SeenIds(store, SeenMemory(limits), entity_id, 0)
    ids.add(IDS[:4], range(1, 5), END_MS)
    while ids.is_busy:
        ids.step(0, 1 << 30)
    ids.add(IDS[4:8], range(5, 9), END_MS + 1)
    while len(store.scan(Table.DUPLICATE_CHUNKS, entity_key(entity_id), entity_key(entity_id + 1), 9)) < 3:
        ids.step(0, 1 << 30)
    ids.add(IDS[8:], range(9, 11), END_MS)


def fill(store: LmdbStore) -> None:
    """Entity 3 is being freed."""
    detecting = {"kind": "queue", "requires_duplicate_detection": True}
    store.put(Table.ENTITIES, entity_key(ENTITY), encode_document(detecting))
    store.put(Table.ENTITIES, entity_key(PLAIN), encode_document({"kind": "queue"}))
    store.put(Table.META, DELETED_ENTITY_PREFIX + entity_key(GONE), encode_document({"topic_id": None}))
    keep(store, ENTITY)
    keep(store, GONE)
    store.delete(Table.DUPLICATE_CHUNKS, chunk_key(GONE, COMPLETE, IDS[0]))


def make(path: Path, *changes: Callable[[LmdbStore], object]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "partitions").mkdir()
    with open_store(partition_path(path, 0)) as store:
        for each in (fill, *changes):
            each(store)
        store.commit()
    write_file(path / "peeklock.json", Description(1).to_json())
    return path


def problems(path: Path) -> dict[Problem, int]:
    report = verify(path).partitions[0]
    for table in (Table.DUPLICATE_LOG, Table.DUPLICATE_RUNS, Table.DUPLICATE_CHUNKS, Table.DUPLICATE_FILTERS):
        assert report.records[table]
    return dict(report.problems)


def test_ids_kept_are_sound(tmp_path: Path) -> None:
    assert problems(make(tmp_path)) == {}


def damage(table: Table, key: bytes) -> Callable[[LmdbStore], object]:
    def change(store: LmdbStore) -> None:
        value = store.get(table, key)
        assert value is not None
        store.put(table, key, value[:-1] + bytes([value[-1] ^ 1]))

    return change


def put(table: Table, key: bytes, value: bytes) -> Callable[[LmdbStore], object]:
    return lambda store: store.put(table, key, value)


def delete(table: Table, key: bytes) -> Callable[[LmdbStore], object]:
    return lambda store: store.delete(table, key)


def set_aside(table: Table, key: bytes) -> Callable[[LmdbStore], object]:
    return lambda store: quarantine(store, table, key)


def rows(*ids: bytes, end_ms: int = END_MS) -> bytes:
    return encode_rows([encode_seen(digest, end_ms, 1) for digest in ids])


def say(**changes: Any) -> Callable[[LmdbStore], object]:
    """Of the complete run."""

    def change(store: LmdbStore) -> None:
        value = store.get(Table.DUPLICATE_RUNS, run_key(ENTITY, COMPLETE))
        assert value is not None
        manifest = decode_manifest(value)._replace(**changes)
        store.put(Table.DUPLICATE_RUNS, run_key(ENTITY, COMPLETE), encode_manifest(manifest))

    return change


WRONG, CORRUPT, MALFORMED = Problem.WRONG_DUPLICATE, Problem.CORRUPT_RECORD, Problem.MALFORMED_KEY
LOG, RUNS, CHUNKS, FILTERS = (
    Table.DUPLICATE_LOG,
    Table.DUPLICATE_RUNS,
    Table.DUPLICATE_CHUNKS,
    Table.DUPLICATE_FILTERS,
)
PIECE = filter_key(ENTITY, COMPLETE, 0)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (damage(LOG, LOG_ROW), {CORRUPT: 1}),
        (damage(RUNS, run_key(ENTITY, COMPLETE)), {CORRUPT: 1}),
        (damage(CHUNKS, SECOND_CHUNK), {CORRUPT: 1}),
        (damage(FILTERS, PIECE), {CORRUPT: 1}),
        (put(LOG, b"?" * 5, b""), {MALFORMED: 1}),
        (put(RUNS, b"?" * 5, b""), {MALFORMED: 1}),
        (put(CHUNKS, b"?" * 5, b""), {MALFORMED: 1}),
        (put(FILTERS, b"?" * 5, b""), {MALFORMED: 1}),
        (put(LOG, log_key(PLAIN, 1), rows(IDS[0])), {WRONG: 1}),  # of no entity with duplicate detection
        (put(RUNS, run_key(PLAIN, 1), encode_manifest(RunManifest(False, 0, 0, 0, 0, 0, 0))), {WRONG: 1}),
        (put(LOG, LOG_ROW, encode_rows([encode_seen(IDS[8], 1, 9), encode_seen(IDS[9], 2, 10)])), {WRONG: 1}),
        (delete(RUNS, run_key(ENTITY, COMPLETE)), {WRONG: 3}),  # two chunks and a filter of no run
        (delete(RUNS, run_key(ENTITY, UNFINISHED)), {WRONG: 1}),
        (delete(CHUNKS, SECOND_CHUNK), {WRONG: 1}),  # too few
        (put(CHUNKS, chunk_key(ENTITY, COMPLETE, IDS[9]), rows(IDS[9])), {WRONG: 2}),  # too many, not in the filter
        (put(CHUNKS, SECOND_CHUNK, rows(IDS[3], IDS[2])), {WRONG: 1}),  # not in order
        (put(CHUNKS, SECOND_CHUNK, rows(IDS[1], IDS[3])), {WRONG: 1}),  # under a wrong key
        (put(CHUNKS, chunk_key(ENTITY, COMPLETE, IDS[0]), rows(IDS[0], IDS[3])), {WRONG: 1}),  # not below the next
        (put(CHUNKS, SECOND_CHUNK, rows(IDS[2], IDS[3], end_ms=END_MS + 1)), {WRONG: 1}),
        (put(CHUNKS, SECOND_CHUNK, rows(IDS[2], IDS[3], end_ms=END_MS - 1)), {WRONG: 1}),
        (delete(FILTERS, PIECE), {WRONG: 1}),
        (put(FILTERS, filter_key(ENTITY, COMPLETE, 1), encode_rows([bytes(32)])), {WRONG: 1}),
        (put(FILTERS, PIECE, encode_rows([bytes(32)])), {WRONG: 2}),  # neither of two chunks is in it
        (put(FILTERS, filter_key(ENTITY, 9, 0), encode_rows([bytes(32)])), {WRONG: 1}),
        (say(ids=5), {WRONG: 1}),
        (say(filter_bytes=64), {WRONG: 1}),
        (say(complete=False), {}),
        (set_aside(LOG, LOG_ROW), {}),
        (set_aside(CHUNKS, SECOND_CHUNK), {}),
        (set_aside(FILTERS, PIECE), {}),
    ],
)
def test_damage_of_stored_ids_is_found(
    change: Callable[[LmdbStore], object], found: dict[Problem, int], tmp_path: Path
) -> None:
    assert problems(make(tmp_path, change)) == found


def test_a_restored_backup_knows_the_ids(tmp_path: Path) -> None:
    backup(make(tmp_path / "data"), tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "restored")
    assert problems(tmp_path / "restored") == {}
    with open_store(partition_path(tmp_path / "restored", 0), create=False) as store:
        ids = SeenIds(store, SeenMemory(SeenLimits()), ENTITY, 0)
        assert ids.find(IDS, 0) == {digest: number for number, digest in enumerate(IDS, 1)}
