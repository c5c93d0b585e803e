"""Message ids kept for duplicate detection: verify finds what is wrong with them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from partition_contents import open_store

from storage.data_dir import Description, partition_path
from storage.durable import write_file
from storage.findings import Problem
from storage.lmdb_store import LmdbStore
from storage.maintenance import verify
from storage.quarantine import quarantine
from storage.records import (
    DELETED_ENTITY_PREFIX,
    CorruptRecord,
    decode_digests,
    decode_seen,
    duplicate_end_key,
    duplicate_key,
    encode_digests,
    encode_document,
    encode_seen,
    entity_key,
)
from storage.store import Table

ENTITY, PLAIN, GONE = 1, 2, 3
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
END_MS = 1000
ENDS = duplicate_end_key(ENTITY, END_MS, 1)


def fill(store: LmdbStore) -> None:
    """a and b of one send, c of another; a's window had ended once before. Entity 3 is being freed."""
    detecting = {"kind": "queue", "requires_duplicate_detection": True}
    store.put(Table.ENTITIES, entity_key(ENTITY), encode_document(detecting))
    store.put(Table.ENTITIES, entity_key(PLAIN), encode_document({"kind": "queue"}))
    store.put(Table.META, DELETED_ENTITY_PREFIX + entity_key(GONE), encode_document({"topic_id": None}))
    put(store, A, END_MS)
    put(store, B, END_MS)
    put(store, C, END_MS + 1)
    store.put(Table.DUPLICATE_ENDS, ENDS, encode_digests([A, B]))
    store.put(Table.DUPLICATE_ENDS, duplicate_end_key(ENTITY, END_MS + 1, 3), encode_digests([C]))
    store.put(Table.DUPLICATE_ENDS, duplicate_end_key(ENTITY, 1, 0), encode_digests([A]))
    put(store, A, END_MS, GONE)


def put(store: LmdbStore, digest: bytes, end_ms: int, entity_id: int = ENTITY) -> None:
    store.put(Table.DUPLICATES, duplicate_key(entity_id, digest), encode_seen(end_ms, 1))


def problems(path: Path, *changes: Callable[[LmdbStore], object]) -> dict[Problem, int]:
    (path / "partitions").mkdir()
    with open_store(partition_path(path, 0)) as store:
        for each in (fill, *changes):
            each(store)
        store.commit()
    write_file(path / "peeklock.json", Description(1).to_json())
    report = verify(path).partitions[0]
    assert report.records[Table.DUPLICATES]
    assert report.records[Table.DUPLICATE_ENDS]
    return dict(report.problems)


def test_ids_kept_are_sound(tmp_path: Path) -> None:
    assert problems(tmp_path) == {}


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda store: store.delete(Table.DUPLICATES, duplicate_key(ENTITY, B)), {Problem.WRONG_DUPLICATE: 1}),
        (lambda store: put(store, B, END_MS - 1), {Problem.WRONG_DUPLICATE: 2}),  # listed too late, and not by its end
        (lambda store: put(store, b"d" * 16, END_MS), {Problem.WRONG_DUPLICATE: 1}),
        (lambda store: store.delete(Table.DUPLICATE_ENDS, ENDS), {Problem.WRONG_DUPLICATE: 1}),
        (lambda store: put(store, A, END_MS, PLAIN), {Problem.WRONG_DUPLICATE: 1}),
        (lambda store: store.put(Table.DUPLICATES, duplicate_key(ENTITY, B), b"?" * 20), {Problem.CORRUPT_RECORD: 1}),
        (lambda store: store.put(Table.DUPLICATE_ENDS, ENDS, b"?" * 36), {Problem.CORRUPT_RECORD: 1}),
        (lambda store: store.put(Table.DUPLICATES, b"?" * 21, b""), {Problem.MALFORMED_KEY: 1}),
        (lambda store: store.put(Table.DUPLICATE_ENDS, b"?" * 21, b""), {Problem.MALFORMED_KEY: 1}),
        (lambda store: quarantine(store, Table.DUPLICATES, duplicate_key(ENTITY, B)), {}),
        (lambda store: quarantine(store, Table.DUPLICATE_ENDS, ENDS), {}),
    ],
)
def test_what_is_wrong_with_ids_is_found(
    damage: Callable[[LmdbStore], object], found: dict[Problem, int], tmp_path: Path
) -> None:
    assert problems(tmp_path, damage) == found


def test_values_that_are_damaged_are_not_read() -> None:
    assert decode_seen(encode_seen(5, 7)) == (5, 7)
    assert decode_digests(encode_digests([A, B])) == [A, B]
    for damaged in (b"", encode_seen(5, 7)[:-1], encode_seen(5, 7)[:-1] + b"?"):
        with pytest.raises(CorruptRecord):
            decode_seen(damaged)
    for damaged in (b"", encode_digests([A])[:-1], encode_digests([A])[:-1] + b"?"):
        with pytest.raises(CorruptRecord):
            decode_digests(damaged)
