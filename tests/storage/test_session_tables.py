"""Entries listed by session, and states of sessions: their keys and values, verify and backup where they are."""

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
    MAX_SESSION_ID_BYTES,
    NEVER,
    CorruptRecord,
    Counts,
    Field,
    Place,
    SessionRow,
    decode_session,
    decode_state,
    encode_counts,
    encode_document,
    encode_entry,
    encode_message,
    encode_session,
    encode_state,
    entity_key,
    message_key,
    queue_key,
    session_entry_key,
    session_key,
    unpack_session_entry_key,
    unpack_session_key,
)
from storage.store import Table
from tests.storage.partition_contents import LAYOUT, open_store

ENTITY, PLAIN, TOPIC, SUBSCRIPTION = 1, 2, 3, 4
MAIN, DEAD = ENTITY << 3, ENTITY << 3 | Part.DEAD_LETTER
RECORD = encode_message(1, NEVER, LAYOUT, b"body")
SIZE = len(RECORD)


def fill(store: LmdbStore) -> None:
    """1 and 3 in session a, 2 deferred in session b, one dead-lettered; a and c have states; a topic's session, too."""
    store.put(Table.ENTITIES, entity_key(ENTITY), encode_document({"kind": "queue", "requires_session": True}))
    store.put(Table.ENTITIES, entity_key(PLAIN), encode_document({"kind": "queue", "requires_session": False}))
    store.put(Table.ENTITIES, entity_key(TOPIC), encode_document({"kind": "topic", "name": "news"}))
    subscription = {"kind": "subscription", "topic": "news", "requires_session": True}
    store.put(Table.ENTITIES, entity_key(SUBSCRIPTION), encode_document(subscription))
    put_entry(store, MAIN, Place.AVAILABLE, 1, "a")
    put_entry(store, MAIN, Place.DEFERRED, 2, "b")
    put_entry(store, MAIN, Place.AVAILABLE, 3, "a")
    put_entry(store, DEAD, Place.AVAILABLE, 1, None)
    put_state(store, MAIN, b"a", b"half way")
    put_state(store, MAIN, b"c", b"")
    put_state(store, SUBSCRIPTION << 3, b"a", b"123")
    put_entry(store, SUBSCRIPTION << 3, Place.AVAILABLE, 1, "a")
    put_counts(store, MAIN, Counts(4, available=2, deferred=1, size_bytes=3 * SIZE + 8))
    put_counts(store, DEAD, Counts(2, available=1, size_bytes=SIZE))
    put_counts(store, SUBSCRIPTION << 3, Counts(2, available=1, size_bytes=SIZE + 3))
    put_counts(store, TOPIC << 3, Counts(2, size_bytes=SIZE + COPY_BYTES + 3))


def put_entry(store: LmdbStore, queue_id: int, place: Place, number: int, session: str | None) -> None:
    message_id = queue_id << 8 | number
    store.put(Table.MESSAGES, message_key(message_id), RECORD)
    overlay = None if session is None else {int(Field.SESSION): session}
    store.put(Table.QUEUE, queue_key(queue_id, place, number), encode_entry(message_id, 0, overlay))
    if session is not None:
        store.put(Table.SESSION_ENTRIES, session_entry_key(queue_id, place, session.encode(), number), b"")


def put_state(store: LmdbStore, queue_id: int, session_id: bytes, state: bytes) -> None:
    key = session_key(queue_id, session_id)
    store.put(Table.SESSIONS, key, encode_session(SessionRow(5, len(state))))
    store.put(Table.SESSION_STATES, key, encode_state(state))


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


def entry(session_id: bytes, number: int, place: Place = Place.AVAILABLE, queue_id: int = MAIN) -> bytes:
    return session_entry_key(queue_id, place, session_id, number)


def test_sessions_are_sound_and_counted(tmp_path: Path) -> None:
    change(tmp_path, fill)
    report = verify(tmp_path).partitions[0]
    assert report.ok, report.findings
    assert report.records[Table.SESSION_ENTRIES] == 4
    assert report.records[Table.SESSIONS] == report.records[Table.SESSION_STATES] == 3


def test_a_backup_has_the_sessions_too(tmp_path: Path) -> None:
    change(tmp_path / "data", fill)
    backup(tmp_path / "data", tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "restored")
    assert problems(tmp_path / "restored") == {}
    with open_store(partition_path(tmp_path / "restored", 0)) as store:
        assert decode_state(store.get(Table.SESSION_STATES, session_key(MAIN, b"a")) or b"") == b"half way"


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (
            lambda store: store.delete(Table.SESSION_ENTRIES, entry(b"a", 3)),
            {Problem.MISSING_SESSION_ENTRY: 1},
        ),
        (
            lambda store: store.put(Table.SESSION_ENTRIES, entry(b"a", 9), b""),
            {Problem.STRAY_SESSION_ENTRY: 1},
        ),
        (
            lambda store: store.put(Table.SESSION_ENTRIES, entry(b"b", 3), b""),
            {Problem.STRAY_SESSION_ENTRY: 1},
        ),
        (
            lambda store: store.put(Table.SESSION_ENTRIES, entry(b"a", 1, Place.SCHEDULED), b""),
            {Problem.STRAY_SESSION_ENTRY: 1},
        ),
        (
            lambda store: store.put(Table.SESSION_ENTRIES, entry(b"a", 1, queue_id=PLAIN << 3), b""),
            {Problem.STRAY_SESSION_ENTRY: 1},
        ),
        (
            lambda store: store.put(Table.QUEUE, queue_key(MAIN, 0, 1), encode_entry(MAIN << 8 | 1)),
            {Problem.STRAY_SESSION_ENTRY: 1, Problem.MISSING_SESSION_ENTRY: 1},
        ),
        (
            lambda store: store.put(Table.QUEUE, queue_key(MAIN, 0, 1), b"\0" * 16),
            {Problem.CORRUPT_RECORD: 1, Problem.ORPHANED_MESSAGE: 1, Problem.WRONG_COUNTS: 1},
        ),
        (
            lambda store: store.put(Table.SESSION_ENTRIES, b"\0" * 15 + b"x", b""),
            {Problem.MALFORMED_KEY: 1},
        ),
        (
            lambda store: store.put(Table.SESSIONS, session_key(MAIN, b"a") + b"x", b""),
            {Problem.MALFORMED_KEY: 1},
        ),
        (
            lambda store: store.put(Table.SESSIONS, session_key(MAIN, b"a"), encode_session(SessionRow(5, 7))),
            {Problem.WRONG_SESSION_STATE: 1},
        ),
        (
            lambda store: store.delete(Table.SESSION_STATES, session_key(MAIN, b"c")),
            {Problem.WRONG_SESSION_STATE: 1},
        ),
        (
            lambda store: store.put(Table.SESSION_STATES, session_key(MAIN, b"d"), encode_state(b"")),
            {Problem.WRONG_SESSION_STATE: 1},
        ),
        (
            lambda store: put_state(store, PLAIN << 3, b"a", b""),
            {Problem.WRONG_SESSION_STATE: 1},
        ),
        (
            lambda store: store.put(Table.SESSIONS, session_key(MAIN, b"a"), b"x" * 20),
            {Problem.CORRUPT_RECORD: 1},
        ),
        (
            lambda store: store.put(Table.SESSION_STATES, session_key(MAIN, b"a"), encode_state(b"half wax")[:8] * 2),
            {Problem.CORRUPT_RECORD: 1},
        ),
        (
            lambda store: put_counts(store, MAIN, Counts(4, available=2, deferred=1, size_bytes=3 * SIZE)),
            {Problem.WRONG_COUNTS: 1},
        ),
    ],
)
def test_what_is_wrong_is_found(
    damage: Callable[[LmdbStore], object], found: dict[Problem, int], tmp_path: Path
) -> None:
    change(tmp_path, fill, damage)
    assert problems(tmp_path) == found


def test_states_of_a_queue_without_messages_and_counts_are_missed_in_its_size(tmp_path: Path) -> None:
    queue = {"kind": "queue", "requires_session": True}
    change(
        tmp_path,
        lambda store: store.put(Table.ENTITIES, entity_key(ENTITY), encode_document(queue)),
        lambda store: put_state(store, MAIN, b"a", b"state"),
    )
    assert problems(tmp_path) == {Problem.WRONG_COUNTS: 1}


def test_an_entry_set_aside_may_leave_its_listing_behind(tmp_path: Path) -> None:
    change(
        tmp_path,
        fill,
        lambda store: quarantine(store, Table.QUEUE, queue_key(MAIN, Place.AVAILABLE, 3)),
        lambda store: store.delete(Table.MESSAGES, message_key(MAIN << 8 | 3)),
        lambda store: put_counts(store, MAIN, Counts(4, available=1, deferred=1, size_bytes=2 * SIZE + 8)),
    )
    assert problems(tmp_path) == {}


def test_sessions_of_a_deleted_queue_are_no_problem_while_they_are_freed(tmp_path: Path) -> None:
    deleted = encode_document({"deleted_ms": 1, "topic_id": None})
    change(
        tmp_path,
        fill,
        lambda store: store.put(Table.META, DELETED_ENTITY_PREFIX + entity_key(ENTITY), deleted),
        lambda store: store.delete(Table.ENTITIES, entity_key(ENTITY)),
        lambda store: store.delete(Table.QUEUE, queue_key(MAIN, Place.AVAILABLE, 1)),
        lambda store: store.delete(Table.MESSAGES, message_key(MAIN << 8 | 1)),
        lambda store: store.delete(Table.SESSIONS, session_key(MAIN, b"a")),
    )
    assert problems(tmp_path) == {}


def test_entries_of_one_session_lie_together_in_the_order_of_their_numbers() -> None:
    ids = [b"", b"a", b"b", b"aa", b"a\x00", "ü".encode(), b"\xff" * MAX_SESSION_ID_BYTES]
    keys = sorted(session_entry_key(8, 0, each, number) for each in ids for number in (1, 255, 256, 1 << 40))
    order = [unpack_session_entry_key(key)[2:] for key in keys]
    assert [number for _, number in order] == [1, 255, 256, 1 << 40] * len(ids)
    assert [session_id for session_id, _ in order[::4]] == sorted(ids, key=lambda each: (len(each), each))
    assert max(map(len, keys)) <= 511


def test_keys_say_what_they_were_made_of() -> None:
    assert unpack_session_key(session_key(9, b"a")) == (9, b"a")
    assert unpack_session_entry_key(session_entry_key(9, 2, b"a", 7)) == (9, 2, b"a", 7)
    for wrong in (b"", b"\0" * 5, session_key(9, b"a") + b"x", session_key(9, b"a")[:-1]):
        with pytest.raises(CorruptRecord):
            unpack_session_key(wrong)
    for wrong in (b"", b"\0" * 14, session_entry_key(9, 2, b"a", 7)[:-1]):
        with pytest.raises(CorruptRecord):
            unpack_session_entry_key(wrong)


def test_rows_and_states_are_verified_when_they_are_read() -> None:
    row = SessionRow(1_700_000_000_000, 12)
    assert decode_session(encode_session(row)) == row
    assert decode_state(encode_state(b"state")) == b"state"
    for wrong in (b"", encode_session(row)[:-1], encode_session(row)[:-1] + b"\x07"):
        with pytest.raises(CorruptRecord):
            decode_session(wrong)
    for wrong in (b"", b"\0" * 7, encode_state(b"state")[:-1]):
        with pytest.raises(CorruptRecord):
            decode_state(wrong)
