"""The room that young changes are counted with: never less than they take in the tables."""

from collections.abc import Callable
from pathlib import Path

import pytest

from storage.log.commit_log import LogLimits
from storage.records import NEVER, Place, encode_entry, encode_message, message_key, queue_key
from storage.store import Store, Table
from tests.logs import checkpoint, log_of, open_logged_store

MIB = 1 << 20
QUEUES = 200


def copies(store: Store, turn: int) -> None:
    """One message in the middle of each of many queues, as a topic makes them."""
    store.append(Table.MESSAGES, [(message_key(turn), encode_message(1, NEVER, bytes(16), b"body"))])
    items = [(queue_key(queue << 3, Place.AVAILABLE, turn), encode_entry(turn, 0, None)) for queue in range(QUEUES)]
    store.insert_many(Table.QUEUE, items)


def small_messages(store: Store, turn: int) -> None:
    number = turn * 100
    record = encode_message(1, NEVER, bytes(16), bytes(100))
    store.append(Table.MESSAGES, [(message_key(number + each), record) for each in range(100)])
    store.insert_many(
        Table.QUEUE,
        [(queue_key(8, Place.AVAILABLE, number + each), encode_entry(number + each, 0, None)) for each in range(100)],
    )


def pages(store: Store, turn: int) -> None:
    """Records that take a page and a little more."""
    record = encode_message(1, NEVER, bytes(16), bytes(4200))
    store.append(Table.MESSAGES, [(message_key(turn * 10 + each), record) for each in range(10)])


@pytest.mark.parametrize("write", [copies, small_messages, pages])
def test_young_changes_count_for_at_least_what_they_take_in_the_tables(
    tmp_path: Path, write: Callable[[Store, int], None]
) -> None:
    store = open_logged_store(tmp_path)
    for turn in range(1, 300):
        write(store, turn)
        store.commit()
        if turn % 100 == 50:
            counted = store.used_bytes()
            checkpoint(log_of(store))
            assert store.used_bytes() <= counted
    store.close()


def test_a_small_store_has_small_segments() -> None:
    assert LogLimits.of(64 * MIB, 16 * MIB) == LogLimits(MIB, 64 * MIB)
    assert LogLimits.of(64 * MIB, 64 * MIB) == LogLimits(4 * MIB, 64 * MIB)
    assert LogLimits.of(64 * MIB, 64 << 30) == LogLimits(8 * MIB, 64 * MIB)
    assert LogLimits.of(8 * MIB, 64 << 30) == LogLimits(MIB, 8 * MIB)
