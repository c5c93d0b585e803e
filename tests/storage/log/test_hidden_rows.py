"""What was deleted since a checkpoint began is gone, also for those who read many records at once."""

import pytest

from storage.records import message_key
from storage.store import Table
from tests.logs import checkpoint, log_of, open_logged_store
from tests.storage.entered import keys


@pytest.mark.parametrize("in_rows", [True, False])
def test_records_that_were_deleted_while_a_checkpoint_is_made_are_not_read(tmp_path, in_rows):
    store = open_logged_store(tmp_path)
    items = [(message_key(number), b"%d" % number) for number in range(1, 6)]
    if in_rows:
        store.append_rows(1, items)
    else:
        store.append(Table.MESSAGES, items)
    store.commit()
    store.freeze()
    store.delete_keys(Table.MESSAGES, keys(b"", [(2, 1), (4, 1)]))
    sought = [key for key, _ in items]
    assert store.get_many(Table.MESSAGES, sought) == [b"1", None, b"3", None, b"5"]
    assert [store.get(Table.MESSAGES, key) for key in sought] == [b"1", None, b"3", None, b"5"]
    store.abort()
    store.close()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 100])
def test_a_scan_finds_nothing_that_was_deleted_while_a_checkpoint_is_made(tmp_path, limit, reverse):
    """In the tables, in the checkpoint's layer and above it: each has keys that a younger one deletes."""
    store = open_logged_store(tmp_path)
    kept: dict[bytes, bytes] = {}

    def put(*numbers: int) -> None:
        items = [(message_key(number), b"%d" % number) for number in numbers]
        store.put_many(Table.MESSAGES, items)
        kept.update(items)

    def delete(*numbers: int) -> None:
        store.delete_many(Table.MESSAGES, [message_key(number) for number in numbers])
        for number in numbers:
            del kept[message_key(number)]

    put(1, 4, 7, 10)
    store.commit()
    checkpoint(log_of(store))
    put(2, 5, 8, 11)
    delete(4)
    store.commit()
    store.freeze()
    put(3, 4, 9)
    delete(2, 7, 11)
    expected = sorted(kept.items(), reverse=reverse)
    assert store.scan(Table.MESSAGES, b"", b"\xff" * 9, limit, reverse) == expected[:limit]
    assert store.last_key(Table.MESSAGES) == max(kept)
    assert store.record_count(Table.MESSAGES) == len(kept)
    store.abort()
    store.close()
