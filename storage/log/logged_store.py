"""A partition's store with a log: young changes in memory, over the tables that a checkpointer keeps up to date.

Reads go from the youngest to the oldest: `active` (turns since the last checkpoint began), `frozen` (turns that the
checkpointer is writing to the tables), the tables. The checkpointer may have written some of `frozen` when a read comes
to the tables, which makes no difference: what is in a layer hides what is below.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Protocol

from storage.lmdb_store import LmdbStore
from storage.log.changes import Item, Layer, Operation, Rows, YoungTable
from storage.store import Entries, Keys, Store, StoreError, Table

_PUT, _DELETE, _INSERT = map(int, Operation)  # to look up a member of an enum takes as long as a call
KEY_BYTES_MAX = 511  # of LMDB, which refuses longer ones only when they are checkpointed
# Tables whose keys have parts of any length; those of the others have few bytes.
_OF_ANY_LENGTH = frozenset(
    (Table.META, Table.QUARANTINE, Table.RULES, Table.SESSION_ENTRIES, Table.SESSIONS, Table.SESSION_STATES)
)
YOUNG_FACTOR = 2  # the bytes that changes take in the tables are at most so many times those that they take in the log
_ABOVE = b"\xff" * (KEY_BYTES_MAX + 1)  # above every key
# A scan takes as many items from the tables as are asked for. If some were deleted since, it goes on with more at once.
_SCAN_MORE, _SCAN_MAX = 16, 4096


class Log(Protocol):
    """What the stores need of their log; see `CommitLog`."""

    def changed(self, store: "LoggedStore") -> None: ...

    def unchanged(self, store: "LoggedStore") -> None: ...

    def commit(self, time_ms: int = 0) -> bool: ...

    def unwritten_bytes(self, partition: int) -> int: ...

    def shortage(self, partition: int) -> str | None: ...

    def accepts(self, partition: int, added_bytes: int, pages: int) -> bool: ...

    def read_again(self, partition: int) -> Layer: ...

    def close(self) -> None: ...


class LoggedStore(Store):
    """See Store. Its log commits it, together with the other stores of the log: `CommitLog.commit`."""

    def __init__(self, partition: int, tables: LmdbStore, log: Log, frozen: Layer | None = None) -> None:
        """`tables` are only read; `frozen` is what they lack."""
        self.partition = partition
        self.tables = tables
        self.writes = 0
        self._log = log
        self._active = Layer()
        self._frozen = frozen
        self._young: list[tuple[YoungTable, ...]] = []  # by table: those of the layers, the youngest first
        self._staged: list[tuple[int, int, Any]] = []
        self._appended: dict[Table, bytes] = {}  # the last key that was appended
        self._look()

    def _look(self) -> None:
        layers = [self._active] if self._frozen is None else [self._active, self._frozen]
        self._young = [tuple(layer.tables[table] for layer in layers) for table in Table]

    # -- reads

    def get(self, table: Table, key: bytes) -> bytes | None:
        for young in self._young[table]:
            if (records := young.records((key,))) is not None:
                return records[0]
            value = young.fresh.get(key)
            if value is not None:
                return value
            if key in young.changed:
                return young.changed[key]
        return self.tables.get(table, key)

    def get_many(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        for young in self._young[table]:
            if keys and (records := young.records(keys)) is not None:
                return records
            if keys and keys[0] in young.fresh:
                fresh = young.fresh
                try:
                    return [fresh[key] for key in keys]
                except KeyError:
                    break
            if keys and not young.has_none_of(keys):
                break  # what an older layer has of these does not count
        if keys and not all(young.has_none_of(keys) for young in self._young[table]):
            return [self.get(table, key) for key in keys]
        return self.tables.get_many(table, keys)

    def get_adjacent(self, table: Table, first: bytes, last: bytes, count: int) -> list[bytes | None] | None:
        for young in self._young[table]:
            if not young.is_below(first):
                return None
        return self.tables.get_adjacent(table, first, last, count)

    def scan(
        self, table: Table, start: bytes, end: bytes, limit: int, reverse: bool = False
    ) -> list[tuple[bytes, bytes]]:
        layers = [young for young in self._young[table] if young]
        if not layers:
            return self.tables.scan(table, start, end, limit, reverse)
        found: list[tuple[bytes, bytes]] = []
        count = min(limit, _SCAN_MAX)
        while len(found) < limit:
            # A piece of the range at a time: as many items as were asked of the tables, and what is young among them.
            items = self.tables.scan(table, start, end, count, reverse)
            is_last = len(items) < count
            low, high = start, end
            if not is_last:
                last = items[-1][0]
                low, high = (last, end) if reverse else (start, last + b"\0")
            for young in layers:
                items = young.not_hidden(items)
            in_tables = len(items)
            for number, young in enumerate(layers):
                younger = layers[:number]
                keys = young.keys(low, high, reverse)
                if younger:
                    keys = (key for key in keys if not any(each.hides(key) for each in younger))
                items += young.items(islice(keys, limit - len(found)))
            if len(items) > in_tables:
                items.sort(reverse=reverse)
            found += items[: limit - len(found)]
            if is_last:
                break
            start, end = (start, low) if reverse else (high, end)
            count = min(max(2 * count, _SCAN_MORE), _SCAN_MAX)
        return found

    def last_key(self, table: Table) -> bytes | None:
        last = self.scan(table, b"", _ABOVE, 1, reverse=True)
        return last[0][0] if last else None

    def record_count(self, table: Table) -> int:
        count = self.tables.record_count(table)
        changed = {key for young in self._young[table] for key in (*young.fresh, *young.changed)}
        return count + sum(
            (self.get(table, key) is not None) - (self.tables.get(table, key) is not None) for key in changed
        )

    # -- writes

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        self.put_many(table, ((key, value),))

    def put_many(self, table: Table, items: Sequence[Item]) -> None:
        if items:
            if table in _OF_ANY_LENGTH:
                _check_keys([key for key, _ in items])
            self._active.tables[table].put(items)
            self._stage(_PUT, table, tuple(items))

    def append(self, table: Table, items: Sequence[Item]) -> None:
        if not items:
            return
        keys = [key for key, _ in items]
        last = self._appended.get(table, _ABOVE)
        if keys[0] <= last:  # it may have been deleted since
            last = self.last_key(table) or b""
        if keys[0] <= last or (len(keys) > 1 and keys != sorted(keys)):
            raise StoreError(f"append to {table.name}: keys are not in order above the last of the table")
        self._appended[table] = keys[-1]
        self._insert(table, items, keys)

    def append_rows(self, first: int, items: list[Item]) -> None:
        if not items:
            return
        last, end = self._appended.get(Table.MESSAGES, _ABOVE), items[-1][0]
        if items[0][0] <= last:  # it may have been deleted since
            self.append(Table.MESSAGES, items)
            return
        self._appended[Table.MESSAGES] = end
        self._active.tables[Table.MESSAGES].insert_entries(Rows(first, items))
        self._stage(_INSERT, Table.MESSAGES, tuple(items))

    def insert_many(self, table: Table, items: Sequence[Item]) -> None:
        if items:
            self._insert(table, items, [key for key, _ in items])

    def insert_entries(self, entries: Entries) -> None:
        if self.noting is not None or not len(entries):
            self.insert_many(Table.QUEUE, entries.items())
            return
        self._active.tables[Table.QUEUE].insert_entries(entries)
        self._stage(_INSERT, Table.QUEUE, entries)

    def _insert(self, table: Table, items: Sequence[Item], keys: list[bytes]) -> None:
        if table in _OF_ANY_LENGTH:
            _check_keys(keys)
        self._active.tables[table].insert(items, keys)
        self._stage(_INSERT, table, tuple(items))

    def delete(self, table: Table, key: bytes) -> None:
        self.delete_many(table, (key,))

    def delete_many(self, table: Table, keys: Iterable[bytes]) -> None:
        keys = tuple(keys)
        self._active.tables[table].delete(keys)
        self._stage(_DELETE, table, keys)

    def delete_keys(self, table: Table, keys: Keys) -> None:
        if self.noting is not None or not len(keys):
            self.delete_many(table, keys.keys())
            return
        self._active.tables[table].delete_keys(keys)
        self._stage(_DELETE, table, keys)

    def _stage(self, kind: int, table: int, items: Any) -> None:
        self.writes += 1
        staged = self._staged
        if not staged:
            self._log.changed(self)
        staged.append((kind, table, items))
        if self.noting is not None:
            self.noting(Table(table), items if kind == _DELETE else [key for key, _ in items])

    # -- commits

    @property
    def dirty(self) -> bool:
        return bool(self._staged)

    def commit(self) -> None:
        self._log.commit()

    def take_staged(self) -> list[tuple[int, int, Any]]:
        """What was staged since the last call, for the log."""
        staged, self._staged = self._staged, []
        return staged

    def take_hints(self) -> list[Any]:
        """The hints since the last call, for the log."""
        assert self.hints is not None
        taken, self.hints = self.hints, []
        return taken

    def abort(self) -> None:
        """Drop what was staged: the turns since the last checkpoint are read from the log again."""
        if self._staged:
            # This ends the commit under way. Until it has, the store is a changed one, of which no checkpoint begins.
            self._active = self._log.read_again(self.partition)
            self._staged = []
            if self.hints:
                self.hints = []
            self._log.unchanged(self)
            self._appended.clear()
            self._look()

    def freeze(self) -> None:
        """A checkpoint of everything that was committed begins. Nothing is staged.

        What is frozen already stays so: an earlier checkpoint of it was not made.
        """
        assert not self._staged
        if self._frozen is None:
            self._frozen = self._active
        else:
            self._frozen.merge(self._active)
        self._active = Layer()
        self._look()

    def changed_keys(self) -> int:
        """The keys that were changed since the last checkpoint began."""
        return sum(young.count() for young in self._active.tables)

    @property
    def is_frozen(self) -> bool:
        """Something is frozen: it is being written to the tables, or they had no room for it."""
        return self._frozen is not None

    @property
    def frozen_layer(self) -> Layer:
        assert self._frozen is not None
        return self._frozen

    def thaw(self) -> None:
        """What was frozen is in the tables."""
        self._frozen = None
        self.tables_changed()
        self._look()

    def tables_changed(self) -> None:
        """Somebody else has changed the tables, and waits for pages that only old reads need."""
        self.tables.end_reading()

    # -- room

    def used_bytes(self) -> int:
        """The size, with the most that young changes may take. If they take less, the next checkpoint shows it."""
        return self.tables.used_bytes() + YOUNG_FACTOR * self._log.unwritten_bytes(self.partition)

    def fits(self, added_bytes: int, sizes: Iterable[int], pages: int = 0) -> bool:
        return self._log.accepts(self.partition, added_bytes, pages)

    def capacity_bytes(self, spare_bytes: int = 0) -> int:
        return self.tables.capacity_bytes(spare_bytes)

    def shortage(self) -> str | None:
        return self._log.shortage(self.partition)

    def release_pages(self) -> None:
        self.tables.release_pages()

    def close(self) -> None:
        """Close the whole log, and with it its other stores."""
        self.abort()
        self._log.close()


def _check_keys(keys: Sequence[bytes]) -> None:
    if max(map(len, keys)) > KEY_BYTES_MAX or not all(keys):
        raise StoreError(f"a key of {max(map(len, keys))} bytes; 1 to {KEY_BYTES_MAX} are possible")
