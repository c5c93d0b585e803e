"""A store in memory, for tests and for partitions that need not outlive their process."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import islice

from storage.store import Store, StoreError, StoreFull, Table

KEY_BYTES_MAX = 511  # as in LMDB, so that tests in memory find keys that would not fit on disk


class MemoryStore(Store):
    """Sorted tables. Writes happen in place; the values before them are kept until the commit, for `abort`.

    `used_bytes` counts keys and values. A commit that leaves more than `capacity_bytes` in use is aborted (StoreFull),
    unless it freed bytes: a full store can still be emptied.
    """

    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        self._values: list[dict[bytes, bytes]] = [{} for _ in Table]
        self._keys: list[list[bytes]] = [[] for _ in Table]  # of each table, sorted
        self._before: dict[tuple[Table, bytes], bytes | None] = {}  # value before this transaction, None: no such key
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._used_before_bytes = 0
        self._dirty = False
        self.writes = 0

    def get(self, table: Table, key: bytes) -> bytes | None:
        return self._values[table].get(key)

    def get_many(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        return list(map(self._values[table].get, keys))

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise StoreError(f"key of {len(key)} bytes; 1 to {KEY_BYTES_MAX} are possible")
        self._dirty = True
        self.writes += 1
        self._before.setdefault((table, key), self._values[table].get(key))
        self._set(table, key, value)
        if self.noting is not None:
            self.noting(table, [key])

    def append(self, table: Table, items: Sequence[tuple[bytes, bytes]]) -> None:
        last = self.last_key(table) or b""
        for key, value in items:
            if key <= last:
                raise StoreError(f"append to {table.name}: key {key.hex()} is not above the last, {last.hex()}")
            last = key
            self.put(table, key, value)

    def put_many(self, table: Table, items: Sequence[tuple[bytes, bytes]]) -> None:
        for key, value in items:
            self.put(table, key, value)

    def insert_many(self, table: Table, items: Sequence[tuple[bytes, bytes]]) -> None:
        if not items:
            return
        for key, _ in items:
            if key in self._values[table]:
                raise StoreError(f"insert into {table.name}: key {key.hex()} is there")
        self.put_many(table, items)

    def delete(self, table: Table, key: bytes) -> None:
        self._dirty = True
        self.writes += 1
        before = self._values[table].get(key)
        if before is not None:
            self._before.setdefault((table, key), before)
            self._set(table, key, None)
            if self.noting is not None:
                self.noting(table, [key])

    def delete_many(self, table: Table, keys: Iterable[bytes]) -> None:
        self._dirty = True
        self.writes += 1
        for key in keys:
            self.delete(table, key)

    def scan(
        self, table: Table, start: bytes, end: bytes, limit: int, reverse: bool = False
    ) -> list[tuple[bytes, bytes]]:
        keys, values = self._keys[table], self._values[table]
        low, high = bisect_left(keys, start), bisect_left(keys, end)
        places = range(high - 1, low - 1, -1) if reverse else range(low, high)
        return [(keys[place], values[keys[place]]) for place in islice(places, limit)]

    def last_key(self, table: Table) -> bytes | None:
        keys = self._keys[table]
        return keys[-1] if keys else None

    def record_count(self, table: Table) -> int:
        return len(self._keys[table])

    def commit(self) -> None:
        if self._used_bytes > max(self._capacity_bytes, self._used_before_bytes):
            needed = self._used_bytes
            self.abort()
            raise StoreFull(f"{needed} bytes do not fit into {self._capacity_bytes}")
        self._before.clear()
        self._used_before_bytes = self._used_bytes
        self._dirty = False

    def abort(self) -> None:
        for (table, key), value in self._before.items():
            self._set(table, key, value)
        self._before.clear()
        self._dirty = False

    @property
    def dirty(self) -> bool:
        return self._dirty

    def used_bytes(self) -> int:
        return self._used_bytes

    def fits(self, added_bytes: int, sizes: Iterable[int], pages: int = 0) -> bool:
        return self._used_bytes + added_bytes <= self._capacity_bytes

    def capacity_bytes(self, spare_bytes: int = 0) -> int:
        return self._capacity_bytes - spare_bytes

    def close(self) -> None:
        self.abort()

    def _set(self, table: Table, key: bytes, value: bytes | None) -> None:
        values, keys = self._values[table], self._keys[table]
        before = values.get(key)
        if before is not None:
            self._used_bytes -= len(key) + len(before)
        if value is not None:
            self._used_bytes += len(key) + len(value)
            if before is None:
                insort(keys, key)
            values[key] = bytes(value)
        elif before is not None:
            del keys[bisect_left(keys, key)]
            del values[key]
