"""Puts an unreadable record into quarantine, so that it is neither served nor lost.

Its bytes move to QUARANTINE as they were found, under the table's number and the key, so that a person can look at
them. The rest of the partition is served. The partition changes other records that depend on this one (counts, timers,
entries that refer to a message) in the same commit.
"""

from collections.abc import Iterator

from storage.store import Store, Table

_END = b"\xff" * 16  # above every quarantine key: the first byte is a table's number


def quarantine_key(table: Table, key: bytes) -> bytes:
    return bytes([table]) + key


def quarantine(store: Store, table: Table, key: bytes) -> int | None:
    """Stage the move of the record at `key` to QUARANTINE; returns its size in bytes, or None if there is none.

    An earlier record in quarantine under the same table and key is replaced.
    """
    value = store.get(table, key)
    if value is None:
        return None
    store.put(Table.QUARANTINE, quarantine_key(table, key), value)
    store.delete(table, key)
    return len(value)


def size_set_aside(store: Store, table: Table, key: bytes) -> int | None:
    """Size in bytes of the record in quarantine under this table and key, or None if there is none."""
    value = store.get(Table.QUARANTINE, quarantine_key(table, key))
    return None if value is None else len(value)


def quarantined(store: Store, page: int = 100) -> Iterator[tuple[Table, bytes, bytes]]:
    """(table, key, bytes as found) of each record in quarantine."""
    start = b"\0"
    while items := store.scan(Table.QUARANTINE, start, _END, page):
        for key, value in items:
            yield Table(key[0]), key[1:], value
        last_key, _ = items[-1]
        start = last_key + b"\0"
