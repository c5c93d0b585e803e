"""What was deleted since a checkpoint began is gone, also for those who read many records at once."""

import pytest

from storage.records import message_key
from storage.store import Table
from tests.logs import open_logged_store
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
