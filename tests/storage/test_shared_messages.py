"""Verify and backup where several queue entries refer to one message, and rules belong to subscriptions."""

from collections.abc import Callable
from pathlib import Path

import pytest

from storage.data_dir import Description, partition_path
from storage.durable import write_file
from storage.findings import Problem
from storage.lmdb_store import LmdbStore
from storage.maintenance import backup, restore, verify
from storage.quarantine import quarantine
from storage.queue_ids import Part
from storage.records import (
    COPY_BYTES,
    DELETED_ENTITY_PREFIX,
    NEVER,
    CorruptRecord,
    Counts,
    Place,
    decode_references,
    encode_counts,
    encode_document,
    encode_entry,
    encode_message,
    encode_references,
    entity_key,
    message_key,
    queue_key,
    rule_key,
)
from storage.store import Table
from tests.storage.partition_contents import LAYOUT, open_store

TOPIC, ONE, TWO = 1, 2, 3
RECORD = encode_message(1, NEVER, LAYOUT, b"body")
SIZE = len(RECORD)


def fill(store: LmdbStore) -> None:
    """Message 1 is in both subscriptions of a topic, in one of them dead-lettered; message 2 in one."""
    store.put(Table.ENTITIES, entity_key(TOPIC), encode_document({"kind": "topic", "name": "News"}))
    for entity_id in (ONE, TWO):
        store.put(Table.ENTITIES, entity_key(entity_id), encode_document({"kind": "subscription", "topic": "news"}))
        store.put(Table.RULES, rule_key(entity_id, "$Default"), encode_document({}))
    for message_id in (1, 2):
        store.put(Table.MESSAGES, message_key(message_id), RECORD)
    store.put(Table.REFS, message_key(1), encode_references(2))
    put_entry(store, ONE << 3, 1, 1)
    put_entry(store, ONE << 3, 2, 2)
    put_entry(store, TWO << 3 | Part.DEAD_LETTER, 1, 1)
    put_counts(store, TOPIC << 3, Counts(3, size_bytes=2 * SIZE + 3 * COPY_BYTES))
    put_counts(store, ONE << 3, Counts(3, available=2, size_bytes=2 * SIZE))
    put_counts(store, TWO << 3 | Part.DEAD_LETTER, Counts(2, available=1, size_bytes=SIZE))


def put_entry(store: LmdbStore, queue_id: int, number: int, message_id: int) -> None:
    store.put(Table.QUEUE, queue_key(queue_id, Place.AVAILABLE, number), encode_entry(message_id))


def put_counts(store: LmdbStore, queue_id: int, counts: Counts) -> None:
    store.put(Table.COUNTS, entity_key(queue_id), encode_counts(counts))


def change(path: Path, *changes: Callable[[LmdbStore], object]) -> None:
    (path / "partitions").mkdir(parents=True, exist_ok=True)
    with open_store(partition_path(path, 0)) as store:
        for each in changes:
            each(store)
        store.commit()
    write_file(path / "peeklock.json", Description(1).to_json())


def problems(path: Path) -> dict[Problem, int]:
    return dict(verify(path).partitions[0].problems)


def test_shared_messages_are_sound_and_counted(tmp_path: Path) -> None:
    change(tmp_path, fill)
    (report,) = verify(tmp_path).partitions
    assert report.ok
    assert (report.records[Table.REFS], report.records[Table.RULES]) == (1, 2)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda store: store.delete(Table.REFS, message_key(1)), {Problem.WRONG_REFERENCES: 1}),
        (lambda store: store.put(Table.REFS, message_key(1), encode_references(3)), {Problem.WRONG_REFERENCES: 1}),
        (lambda store: store.put(Table.REFS, message_key(2), encode_references(2)), {Problem.WRONG_REFERENCES: 1}),
        (lambda store: store.put(Table.REFS, message_key(9), encode_references(2)), {Problem.WRONG_REFERENCES: 1}),
        (lambda store: store.put(Table.REFS, message_key(1), bytes(8)), {Problem.CORRUPT_RECORD: 1}),
        (lambda store: store.put(Table.REFS, b"odd", encode_references(2)), {Problem.MALFORMED_KEY: 1}),
        (lambda store: store.put(Table.RULES, rule_key(ONE, "r"), bytes(8)), {Problem.CORRUPT_RECORD: 1}),
        (lambda store: store.put(Table.RULES, rule_key(TOPIC, "r"), encode_document({})), {Problem.STRAY_RULE: 1}),
        (
            lambda store: put_counts(store, TOPIC << 3, Counts(3, size_bytes=3 * SIZE + 3 * COPY_BYTES)),
            {Problem.WRONG_COUNTS: 1},
        ),
        (lambda store: store.delete(Table.COUNTS, entity_key(TOPIC << 3)), {Problem.WRONG_COUNTS: 1}),
    ],
)
def test_each_damage_is_found(tmp_path: Path, damage: Callable[[LmdbStore], object], found: dict[Problem, int]) -> None:
    change(tmp_path, fill, damage)
    assert problems(tmp_path) == found


def test_a_recorded_single_reference_is_as_good_as_none(tmp_path: Path) -> None:
    change(tmp_path, fill, lambda store: store.put(Table.REFS, message_key(2), encode_references(1)))
    assert problems(tmp_path) == {}


def test_a_body_set_aside_for_one_subscription_is_no_problem_for_the_other(tmp_path: Path) -> None:
    def set_aside(store: LmdbStore) -> None:
        quarantine(store, Table.MESSAGES, message_key(1))
        quarantine(store, Table.QUEUE, queue_key(ONE << 3, Place.AVAILABLE, 1))
        store.delete(Table.REFS, message_key(1))
        put_counts(store, TOPIC << 3, Counts(3, size_bytes=SIZE + 2 * COPY_BYTES))
        put_counts(store, ONE << 3, Counts(3, available=1, size_bytes=SIZE))

    change(tmp_path, fill, set_aside)
    assert problems(tmp_path) == {}


def test_an_entry_set_aside_still_refers_to_its_message(tmp_path: Path) -> None:
    def set_aside(store: LmdbStore) -> None:
        quarantine(store, Table.QUEUE, queue_key(ONE << 3, Place.AVAILABLE, 1))
        put_counts(store, ONE << 3, Counts(3, available=1, size_bytes=2 * SIZE))

    change(tmp_path, fill, set_aside)
    assert problems(tmp_path) == {}


def test_a_subscription_being_freed_still_counts_for_its_topic(tmp_path: Path) -> None:
    def delete(store: LmdbStore) -> None:
        store.delete(Table.ENTITIES, entity_key(ONE))
        store.put(Table.META, DELETED_ENTITY_PREFIX + entity_key(ONE), encode_document({"topic_id": TOPIC}))

    change(tmp_path, fill, delete)
    assert problems(tmp_path) == {}


def test_backup_and_restore_keep_references_and_rules(tmp_path: Path) -> None:
    source = tmp_path / "source"
    change(source, fill)
    backup(source, tmp_path / "copy")
    restore(tmp_path / "copy", tmp_path / "again")
    (report,) = verify(tmp_path / "again").partitions
    assert report.ok
    assert (report.records[Table.REFS], report.records[Table.RULES]) == (1, 2)


def test_references_are_checked_when_they_are_read() -> None:
    assert decode_references(encode_references(2000)) == 2000
    for value in (b"", encode_references(2)[:-1], bytes([1]) + encode_references(2)[1:]):
        with pytest.raises(CorruptRecord):
            decode_references(value)
