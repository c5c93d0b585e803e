"""What turns change in one partition: operations as they are logged, and their net effect.

An operation is (kind, table, items). Replaying operations that were applied before changes nothing, as long as all
later ones are replayed as well.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import chain, islice
from typing import Any

from sortedcontainers import SortedList

from protocol.extension import extension
from storage.store import Entries, Table

Item = tuple[bytes, bytes]
_TABLES = tuple(int(table) for table in Table)


class Operation(IntEnum):
    PUT = 0  # items: (key, value)
    DELETE = 1  # items: keys
    INSERT = 2  # items: (key, value), for keys that the table does not have


def items_of_entries(value: object) -> list[Item]:
    """In place of `Entries` that a packer meets."""
    if extension is None or not isinstance(value, extension.Entries):
        raise TypeError(f"{type(value).__name__} cannot be packed")
    items: list[Item] = value.items()
    return items


class YoungTable:
    """Changes of one table over what is below: the tables on disk, or an older layer."""

    __slots__ = ("_changed", "_deleted", "_entries", "_fresh", "_order", "_unordered", "highest")

    def __init__(self) -> None:
        self._fresh: dict[bytes, bytes] = {}  # see `fresh`
        # Items that come into `_fresh` only when somebody looks: where messages are only sent, nobody does before the
        # checkpoint.
        self._entries: list[Entries] = []
        self._changed: dict[bytes, bytes | None] = {}  # see `changed`
        # Keys that were deleted later than what is in `_changed`. They come into it when somebody looks: where messages
        # are only received, nobody does before the checkpoint.
        self._deleted: list[Sequence[bytes]] = []
        # No key of `changed` is above this. Queues are read above what they have deleted, so that most who ask whether
        # their keys were changed need not look for each.
        self.highest = b""
        # Keys with values, which are put in order only when somebody looks: most come and go before. A key that is gone
        # may still be in both, and one that came twice is twice in them.
        self._order: SortedList | None = None
        self._unordered: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self._fresh or self._entries or self._changed or self._deleted)

    @property
    def fresh(self) -> dict[bytes, bytes]:
        """Keys that are not below."""
        if self._entries:
            for entries in self._entries:
                items = entries.items()
                self._fresh.update(items)
                self._unordered += [key for key, _ in items]
            self._entries.clear()
        return self._fresh

    @property
    def changed(self) -> dict[bytes, bytes | None]:
        """Other keys than the fresh ones; None: deleted."""
        if self._deleted:
            self._changed.update(dict.fromkeys(chain.from_iterable(self._deleted)))
            self._deleted.clear()
        return self._changed

    def count(self) -> int:
        """The number of these keys, or a little more."""
        return len(self._fresh) + sum(map(len, self._entries)) + len(self._changed) + sum(map(len, self._deleted))

    def insert(self, items: Sequence[Item], keys: Sequence[bytes]) -> None:
        """`keys` are those of the items."""
        self._fresh.update(items)
        self._unordered += keys

    def insert_entries(self, entries: Entries) -> None:
        self._entries.append(entries)

    def put(self, items: Iterable[Item]) -> None:
        fresh, changed = self.fresh, self.changed
        for key, value in items:
            if key in fresh:
                fresh[key] = value
            else:
                if changed.get(key) is None:
                    self._unordered.append(key)
                changed[key] = value
                self.highest = max(self.highest, key)

    def delete(self, keys: Sequence[bytes]) -> None:
        """`keys` must not change later."""
        fresh = self.fresh
        if not fresh and keys:
            self._deleted.append(keys)
            self.highest = max(self.highest, max(keys))
            return
        changed = self.changed
        if extension is not None:
            self.highest = extension.delete_all(fresh, changed, tuple(keys), self.highest)
            return
        for key in keys:
            if fresh.pop(key, None) is None:
                changed[key] = None
                self.highest = max(self.highest, key)

    def split(self) -> tuple[list[bytes], list[Item]]:
        """The changed keys that were deleted, of which some may be there twice, and the items of the others."""
        if not self._changed:
            return list(chain.from_iterable(self._deleted)), []
        deleted = [key for key, value in self.changed.items() if value is None]
        if len(deleted) == len(self.changed):  # the usual case
            return deleted, []
        return deleted, [(key, value) for key, value in self.changed.items() if value is not None]

    def pieces(self, table: int, fresh_items: int) -> Iterator["Piece"]:
        """See `Layer.pieces`."""
        deleted, changed = self.split()
        fresh = iter(self._fresh.items())
        while (piece := list(islice(fresh, fresh_items))) or deleted or changed:
            yield table, deleted, changed, piece
            deleted, changed = [], []
        for entries in self._entries:
            yield table, [], [], entries

    def hides(self, key: bytes) -> bool:
        """True if the key was changed or deleted here, so that what is below does not count."""
        return key in self.fresh or key in self.changed

    def keys(self, start: bytes, end: bytes, reverse: bool) -> Iterator[bytes]:
        """The keys that have a value here, with start <= key < end in order, or from the end backwards."""
        fresh, changed = self.fresh, self.changed
        if not self._unordered and not self._order:
            return
        if self._order is None:
            self._order = SortedList()
        if self._unordered:
            self._order.update([key for key in self._unordered if self.value(key) is not None])
            self._unordered.clear()
            if len(self._order) > 2 * (len(fresh) + len(changed)) + 64:
                self._order = SortedList([*fresh, *(key for key, value in changed.items() if value is not None)])
        before = None
        for key in self._order.irange(start, end, (True, False), reverse):
            if key != before and (key in fresh or changed.get(key) is not None):
                yield key
            before = key

    def not_hidden(self, items: list[Item]) -> list[Item]:
        """Those of these items of what is below, in order, that were neither changed nor deleted here."""
        fresh = self.fresh
        if fresh:
            items = [item for item in items if item[0] not in fresh]
        if not items or min(items[0][0], items[-1][0]) > self.highest:
            return items
        changed = self.changed
        return [item for item in items if item[0] not in changed]

    def has_none_of(self, keys: Sequence[bytes]) -> bool:
        """True if all these keys are as they are below."""
        if self.fresh and not self.fresh.keys().isdisjoint(keys):
            return False
        return min(keys) > self.highest or self.changed.keys().isdisjoint(keys)

    def is_below(self, key: bytes) -> bool:
        """True if it is known at once that nothing was changed at this key and above."""
        return not self.fresh and key > self.highest

    def items(self, keys: Iterable[bytes]) -> list[Item]:
        """The items of keys that have a value here."""
        return [(key, value) for key in keys if (value := self.value(key)) is not None]

    def value(self, key: bytes) -> bytes | None:
        """The value of a changed key; None if it was deleted."""
        value = self.fresh.get(key)
        return self.changed.get(key) if value is None else value


# A table's number, deleted keys, items of keys that may be in it, items of keys that are not.
TableEffect = tuple[int, Sequence[bytes], Sequence[Item], Sequence[Item]]
# As a TableEffect, whose last part may be packed like its items.
Piece = tuple[int, Sequence[bytes], Sequence[Item], Sequence[Item] | Entries]
NetEffect = list[TableEffect]


class Layer:
    """The net effect of some turns on one partition."""

    __slots__ = ("tables",)

    def __init__(self) -> None:
        self.tables = tuple(YoungTable() for _ in _TABLES)

    def __bool__(self) -> bool:
        return any(self.tables)

    def apply(self, operations: Iterable[tuple[int, int, Any]]) -> None:
        """Apply logged operations."""
        for kind, table, items in operations:
            young = self.tables[table]
            if kind == Operation.INSERT:
                young.insert(items, [key for key, _ in items])
            elif kind == Operation.PUT:
                young.put(items)
            elif kind == Operation.DELETE:
                young.delete(items)
            else:
                raise ValueError(f"unknown operation {kind}")

    def net_effect(self) -> NetEffect:
        """One item for each changed table."""
        effects = [
            (table, *young.split(), [*young.fresh.items()]) for table, young in zip(_TABLES, self.tables, strict=True)
        ]
        return [effect for effect in effects if any(effect[1:])]

    def pieces(self, fresh_items: int) -> Iterator[Piece]:
        """The net effect, with at most so many items of keys that are not in the table in a piece, besides Entries."""
        for table, young in zip(_TABLES, self.tables, strict=True):
            yield from young.pieces(table, fresh_items)

    def merge(self, newer: "Layer") -> None:
        """Add the changes of a layer that was above this one."""
        for young, above in zip(self.tables, newer.tables, strict=True):
            deleted, changed = above.split()
            young.delete(deleted)
            young.put(changed)
            young.insert(list(above.fresh.items()), list(above.fresh))
