"""What every Store does, whatever it keeps its tables in."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.log.logged_store import LoggedStore
from storage.memory import MemoryStore
from storage.quarantine import quarantine, quarantined
from storage.store import Store, StoreError, Table
from tests.logs import checkpoint, log_of, open_logged_store
from tests.storage.partition_contents import open_store

END = b"\xff" * 16


@pytest.fixture(params=["memory", "lmdb", "logged"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store
    match request.param:
        case "memory":
            made = MemoryStore()
        case "lmdb":
            made = open_store(tmp_path / "0")
        case _:
            made = open_logged_store(tmp_path)
    yield made
    made.close()


def key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def keys(store: Store, table: Table = Table.QUEUE) -> list[int]:
    return [int.from_bytes(found, "big") for found, _ in store.scan(table, b"\0", END, 1000)]


def put(store: Store, *numbers: int) -> None:
    store.put_many(Table.QUEUE, [(key(number), b"value") for number in numbers])


def test_a_missing_key_is_none(store: Store) -> None:
    assert store.get(Table.QUEUE, key(1)) is None


def test_staged_writes_are_read(store: Store) -> None:
    store.put(Table.QUEUE, key(1), b"old")
    store.commit()
    store.put(Table.QUEUE, key(1), b"new")
    store.put(Table.QUEUE, key(2), b"another")
    assert store.get(Table.QUEUE, key(1)) == b"new"
    assert keys(store) == [1, 2]
    assert store.last_key(Table.QUEUE) == key(2)


def test_tables_are_apart(store: Store) -> None:
    store.put(Table.QUEUE, key(1), b"a")
    store.put(Table.MESSAGES, key(1), b"b")
    store.delete(Table.QUEUE, key(1))
    assert store.get(Table.MESSAGES, key(1)) == b"b"


def test_abort_forgets_what_is_staged_and_only_that(store: Store) -> None:
    put(store, 1, 2)
    store.commit()
    store.put(Table.QUEUE, key(1), b"changed")
    store.delete(Table.QUEUE, key(2))
    put(store, 3)
    store.abort()
    assert not store.dirty
    assert keys(store) == [1, 2]
    assert store.get(Table.QUEUE, key(1)) == b"value"


def test_dirty_from_the_first_write_to_the_commit(store: Store) -> None:
    assert not store.dirty
    put(store, 1)
    assert store.dirty
    store.commit()
    assert not store.dirty


def test_commit_without_writes_is_nothing(store: Store) -> None:
    store.commit()
    store.commit()
    assert keys(store) == []


def test_reading_does_not_make_dirty(store: Store) -> None:
    store.get(Table.QUEUE, key(1))
    keys(store)
    store.last_key(Table.QUEUE)
    assert not store.dirty


def test_keys_that_are_deleted_need_not_be_there(store: Store) -> None:
    put(store, 1, 2, 3, 4)
    store.delete(Table.QUEUE, key(1))
    store.delete(Table.QUEUE, key(1))
    store.delete_many(Table.QUEUE, (key(number) for number in (4, 9, 2, 2)))
    assert keys(store) == [3]


def test_inserted_keys_are_there_until_they_are_deleted(store: Store) -> None:
    put(store, 3)
    store.insert_many(Table.QUEUE, [(key(4), b"four"), (key(1), b"one")])
    assert keys(store) == [1, 3, 4]
    store.put(Table.QUEUE, key(4), b"changed")
    store.commit()
    store.delete_many(Table.QUEUE, [key(1), key(3)])
    assert keys(store) == [4]
    assert store.get(Table.QUEUE, key(1)) is None
    assert store.get_many(Table.QUEUE, [key(4), key(1), key(4), key(9)]) == [b"changed", None, b"changed", None]
    store.insert_many(Table.QUEUE, [(key(1), b"again")])
    assert store.get(Table.QUEUE, key(1)) == b"again"


def test_scan_is_from_start_and_before_end(store: Store) -> None:
    put(store, 5, 1, 3, 7)
    assert [found for found, _ in store.scan(Table.QUEUE, key(3), key(7), 10)] == [key(3), key(5)]
    assert [found for found, _ in store.scan(Table.QUEUE, key(2), key(6), 10)] == [key(3), key(5)]
    assert store.scan(Table.QUEUE, key(3), key(7), 1) == [(key(3), b"value")]


def test_scan_backwards_is_the_same_from_the_end(store: Store) -> None:
    put(store, 5, 1, 3, 7)
    assert [found for found, _ in store.scan(Table.QUEUE, key(3), key(7), 10, reverse=True)] == [key(5), key(3)]
    assert [found for found, _ in store.scan(Table.QUEUE, key(0), key(9), 2, reverse=True)] == [key(7), key(5)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (8, 9), (3, 3), (4, 2)])
def test_scan_of_a_range_without_keys_is_empty(store: Store, start: int, end: int, reverse: bool) -> None:
    put(store, 1, 3, 7)
    assert store.scan(Table.QUEUE, key(start), key(end), 10, reverse) == []
    assert store.scan(Table.DUE, key(start), key(end), 10, reverse) == []


def test_append_puts_above_the_last(store: Store) -> None:
    store.append(Table.MESSAGES, [(key(1), b"a"), (key(2), b"b")])
    store.commit()
    store.append(Table.MESSAGES, [(key(5), b"c")])
    assert keys(store, Table.MESSAGES) == [1, 2, 5]
    assert store.last_key(Table.MESSAGES) == key(5)


@pytest.mark.parametrize("numbers", [(2,), (1,), (4, 3)])
def test_append_below_the_last_is_an_error(store: Store, numbers: tuple[int, ...]) -> None:
    store.append(Table.MESSAGES, [(key(2), b"a")])
    store.commit()
    with pytest.raises(StoreError):
        store.append(Table.MESSAGES, [(key(number), b"b") for number in numbers])


@pytest.mark.parametrize("key_bytes", [0, 512])
def test_a_key_is_1_to_511_bytes(store: Store, key_bytes: int) -> None:
    with pytest.raises(StoreError):
        store.put(Table.META, bytes(key_bytes), b"value")


def test_values_of_any_size(store: Store) -> None:
    values = {number: bytes([number]) * size for number, size in enumerate((0, 1, 4096, 3_000_000))}
    for number, value in values.items():
        store.put(Table.MESSAGES, key(number), value)
    store.commit()
    assert {number: store.get(Table.MESSAGES, key(number)) for number in values} == values


def test_used_bytes_grow_with_what_is_kept_and_shrink_when_it_is_freed(store: Store) -> None:
    empty_bytes = store.used_bytes()
    store.append(Table.MESSAGES, [(key(number), bytes(1000)) for number in range(1000)])
    store.commit()
    if isinstance(store, LoggedStore):
        checkpoint(log_of(store))  # until then, they count for more than they take
    full_bytes = store.used_bytes()
    assert 1_000_000 <= full_bytes - empty_bytes < 2_000_000
    assert full_bytes < store.capacity_bytes()
    store.delete_many(Table.MESSAGES, [key(number) for number in range(1000)])
    store.commit()
    if isinstance(store, LoggedStore):
        checkpoint(log_of(store))
        empty_bytes += 4 * 4096  # the frame since, twice, and the position
    assert store.used_bytes() <= empty_bytes


def test_a_record_set_aside_is_out_of_its_table_and_kept_as_found(store: Store) -> None:
    store.put(Table.MESSAGES, key(7), b"damaged")
    store.put(Table.MESSAGES, key(8), b"sound")
    assert quarantine(store, Table.MESSAGES, key(7)) == len(b"damaged")
    store.commit()
    assert store.get(Table.MESSAGES, key(7)) is None
    assert store.get(Table.MESSAGES, key(8)) == b"sound"
    assert list(quarantined(store)) == [(Table.MESSAGES, key(7), b"damaged")]


def test_records_of_several_tables_are_set_aside_under_the_same_key(store: Store) -> None:
    for table in (Table.QUEUE, Table.MESSAGES):
        store.put(table, key(1), table.name.encode())
        quarantine(store, table, key(1))
    found = [(Table.MESSAGES, key(1), b"MESSAGES"), (Table.QUEUE, key(1), b"QUEUE")]
    assert list(quarantined(store, page=1)) == found


def test_setting_aside_what_is_not_there_changes_nothing(store: Store) -> None:
    assert quarantine(store, Table.MESSAGES, key(7)) is None
    assert not store.dirty


def test_adjacent_values_are_those_of_a_scan_or_not_known(store: Store) -> None:
    def look(must_know: bool = False) -> None:
        for first in range(9):
            for last in range(first, 9):
                found = store.scan(Table.QUEUE, key(first), key(last) + b"\0", 100)
                is_so = found and found[0][0] == key(first) and found[-1][0] == key(last)
                for count in range(1, 10):
                    expected = [value for _, value in found] if is_so and count == len(found) else None
                    known = store.get_adjacent(Table.QUEUE, key(first), key(last), count)
                    assert known == expected or (known is None and not must_know)

    look()
    put(store, 1, 2, 3, 5, 6)
    look()
    store.commit()
    store.delete(Table.QUEUE, key(2))
    store.put(Table.QUEUE, key(7), b"seven")
    look()
    store.commit()
    if isinstance(store, LoggedStore):
        checkpoint(log_of(store))
    look(must_know=not isinstance(store, MemoryStore))
    store.delete(Table.QUEUE, key(5))
    store.insert_many(Table.QUEUE, [(key(8), b"eight")])
    look()
