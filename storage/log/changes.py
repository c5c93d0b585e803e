"""The changes of turns in one partition: operations as they are logged, and their net effect.

An operation is (kind, table, items). Replaying operations that were applied before changes nothing, as long as all
later ones are replayed as well.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import chain, islice
from typing import Any

from sortedcontainers import SortedList

from protocol.extension import extension
from storage.store import Entries, Keys, Table

Item = tuple[bytes, bytes]
RANGES_MAX = 16  # of keys that are nearly all alone: with more, to look for each costs more than to make the keys
_TABLES = tuple(int(table) for table in Table)


class Operation(IntEnum):
    PUT = 0  # items: (key, value)
    DELETE = 1  # items: keys
    INSERT = 2  # items: (key, value), for keys that the table does not have


def packable(value: object) -> Any:
    """Return what a packer takes in place of `Entries` and `Keys` that it meets."""
    if extension is not None and isinstance(value, extension.Entries):
        return value.items()
    if extension is not None and isinstance(value, extension.Keys):
        return value.keys()
    raise TypeError(f"{type(value).__name__} cannot be packed")


class Rows:
    """Items of MESSAGES with consecutive ids from `first` on, as `Entries` are items of QUEUE."""

    __slots__ = ("_items", "first")

    def __init__(self, first: int, items: list[Item]) -> None:
        self.first = first
        self._items = items

    @property
    def begin(self) -> tuple[bytes, int]:
        return b"", self.first

    def items(self) -> list[Item]:
        return self._items

    def part(self, begin: int, end: int) -> "Rows":
        return Rows(self.first + begin, self._items[begin:end])

    def __len__(self) -> int:
        return len(self._items)


class EntryRuns:
    """Entries of one queue, or records, by ascending numbers."""

    __slots__ = ("firsts", "runs")

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.runs: list[Entries] = []

    def add(self, first: int, entries: Entries) -> bool:
        """False if it is not behind the others."""
        if self.runs and first < self.firsts[-1] + len(self.runs[-1]):
            return False
        self.firsts.append(first)
        self.runs.append(entries)
        return True

    def find(self, first: int, count: int) -> list[Item] | None:
        """The items with these numbers, if one run has them all."""
        at = bisect_right(self.firsts, first) - 1
        if at < 0:
            return None
        begin = first - self.firsts[at]
        return self.runs[at].part(begin, begin + count).items() if begin + count <= len(self.runs[at]) else None

    def remove(self, first: int, count: int) -> list[tuple[int, int]]:
        """Remove the entries with these numbers. Returns the ranges of numbers that are not here."""
        firsts, runs = self.firsts, self.runs
        absent: list[tuple[int, int]] = []
        at = max(bisect_right(firsts, first) - 1, 0)
        while count:
            if at == len(firsts):
                return [*absent, (first, count)]
            begin = first - firsts[at]
            if begin < 0:
                here = min(count, -begin)
                absent.append((first, here))
            elif begin >= (length := len(runs[at])):
                at += 1
                continue
            else:
                here = min(count, length - begin)
                left = [(firsts[at], runs[at].part(0, begin))] if begin else []
                if begin + here < length:
                    left.append((first + here, runs[at].part(begin + here, length)))
                firsts[at : at + 1] = [number for number, _ in left]
                runs[at : at + 1] = [entries for _, entries in left]
                at += bool(begin)
            first += here
            count -= here
        return absent


def _each_of(keys: Sequence[bytes] | Keys) -> Sequence[bytes]:
    return keys if isinstance(keys, list | tuple) else keys.keys()  # type: ignore[union-attr]


class YoungTable:
    """Changes of one table over what is below: the tables on disk, or an older layer."""

    __slots__ = ("_changed", "_deleted", "_entries", "_fresh", "_order", "_runs", "_unordered", "highest")

    def __init__(self) -> None:
        self._fresh: dict[bytes, bytes] = {}  # see `fresh`
        # Items that come into `_fresh` only when somebody looks. Where messages are only sent, or sent and received at
        # once, nobody does before the checkpoint. `_runs` are by the keys' prefix, of queues.
        self._entries: list[Entries] = []  # of several queues each, or not in order
        self._runs: dict[bytes, EntryRuns] = {}
        self._changed: dict[bytes, bytes | None] = {}  # see `changed`
        # Keys that were deleted later than what is in `_changed`. They come into it when somebody looks: where messages
        # are only received, nobody does before the checkpoint.
        self._deleted: list[Sequence[bytes] | Keys] = []
        # No key of `changed` is above this. Queues are read above what they have deleted, so that most who ask whether
        # their keys were changed need not look for each.
        self.highest = b""
        # Keys with values, which are put in order only when somebody looks: most come and go before. A key that is gone
        # may still be in both, and one that came twice is twice in them.
        self._order: SortedList | None = None
        self._unordered: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self._fresh or self._entries or self._runs or self._changed or self._deleted)

    @property
    def fresh(self) -> dict[bytes, bytes]:
        """Keys that are not below."""
        if self._entries or self._runs:
            for entries in self._all_entries():
                items = entries.items()
                self._fresh.update(items)
                self._unordered += [key for key, _ in items]
            self._entries.clear()
            self._runs.clear()
        return self._fresh

    def _all_entries(self) -> Iterator[Entries]:
        return chain(self._entries, *[each.runs for each in self._runs.values()])

    @property
    def changed(self) -> dict[bytes, bytes | None]:
        """The changes of other keys than the fresh ones; None: deleted."""
        if self._deleted:
            self._changed.update(dict.fromkeys(chain.from_iterable(map(_each_of, self._deleted))))
            self._deleted.clear()
        return self._changed

    def count(self) -> int:
        """The number of these keys, or a little more."""
        return len(self._fresh) + len(self._changed) + sum(map(len, (*self._all_entries(), *self._deleted)))

    def insert(self, items: Sequence[Item], keys: Sequence[bytes]) -> None:
        """`keys` are those of the items."""
        self._fresh.update(items)
        self._unordered += keys

    def insert_entries(self, entries: Entries) -> None:
        begin = entries.begin
        if begin is not None:
            prefix, first = begin
            runs = self._runs.get(prefix)
            if runs is None:
                runs = self._runs[prefix] = EntryRuns()
            if runs.add(first, entries):
                return
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

    def delete_keys(self, keys: Keys) -> None:
        """Delete these keys, as `delete` does."""
        ranges = keys.ranges
        if len(ranges) > RANGES_MAX and 2 * len(ranges) > len(keys):
            self.delete(tuple(keys.keys()))
            return
        runs = self._runs.get(keys.prefix) if self._runs else None
        if runs is not None:
            absent = [each for first, count in ranges for each in runs.remove(first, count)]
            if not runs.runs:
                del self._runs[keys.prefix]
            if not absent:
                return
            if absent != ranges:
                keys = keys.of(absent)
        if self._fresh or self._entries:
            self.delete(tuple(keys.keys()))
        else:
            self._deleted.append(keys)
            self.highest = max(self.highest, keys.highest)

    def merge(self, newer: "YoungTable") -> None:
        """Add the changes of a younger layer.

        A checkpoint of this one was begun, so the tables may have what is fresh here. Therefore all deletions stay:
        without that of a fresh key, the next checkpoint would leave its item in the tables for ever.
        """
        deleted, changed = newer.split()
        fresh = self.fresh
        for key in deleted:
            fresh.pop(key, None)
        if deleted:
            self._deleted.append(deleted)
            self.highest = max(self.highest, newer.highest)
        self.put(changed)
        self.insert(list(newer.fresh.items()), list(newer.fresh))

    def split(self) -> tuple[list[bytes], list[Item]]:
        """The changed keys that were deleted, of which some may be there twice, and the items of the others."""
        if not self._changed:
            return list(chain.from_iterable(map(_each_of, self._deleted))), []
        deleted = [key for key, value in self.changed.items() if value is None]
        if len(deleted) == len(self.changed):  # the usual case
            return deleted, []
        return deleted, [(key, value) for key, value in self.changed.items() if value is not None]

    def pieces(self, table: int, fresh_items: int) -> Iterator["Piece"]:
        """See `Layer.pieces`. Runs of a few keys or items are joined, because each piece costs something."""
        few_items = fresh_items // 4
        deleted: list[bytes] = []
        changed: list[Item] = []
        if self._changed:
            deleted, changed = self.split()
        else:
            for keys in self._deleted:
                if len(keys) < few_items:
                    deleted += _each_of(keys)
                else:
                    yield table, keys, [], []
        few: list[Item] = []
        for entries in self._all_entries():
            if len(entries) < few_items or isinstance(entries, Rows):
                few += entries.items()
            else:
                yield table, [], [], entries
        fresh = chain(self._fresh.items(), few)
        while (piece := list(islice(fresh, fresh_items))) or deleted or changed:
            yield table, deleted, changed, piece
            deleted, changed = [], []

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
        """Return those of these items of what is below, in order, that were neither changed nor deleted here."""
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
        return not (self._fresh or self._entries or self._runs) and key > self.highest

    def records(self, keys: Sequence[bytes]) -> list[bytes | None] | None:
        """The values of these keys of MESSAGES, if they follow each other and came together (fast path)."""
        runs = self._runs.get(b"")
        if runs is None:
            return None
        first = int.from_bytes(keys[0], "big")
        found = runs.find(first, len(keys))
        if found is None or [key for key, _ in found] != [*keys]:
            return None
        return [value for _, value in found]

    def items(self, keys: Iterable[bytes]) -> list[Item]:
        """The items of keys that have a value here."""
        return [(key, value) for key in keys if (value := self.value(key)) is not None]

    def value(self, key: bytes) -> bytes | None:
        """The value of a changed key; None if it was deleted."""
        value = self.fresh.get(key)
        return self.changed.get(key) if value is None else value


# A table's number, deleted keys, items of keys that may be in it, items of keys that are not.
TableEffect = tuple[int, Sequence[bytes], Sequence[Item], Sequence[Item]]
# As a TableEffect, of which parts may be packed like their keys or items.
Piece = tuple[int, Sequence[bytes] | Keys, Sequence[Item], Sequence[Item] | Entries]
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
        """Add the changes of a layer that was above this one, which a checkpoint may have written to the tables."""
        for young, above in zip(self.tables, newer.tables, strict=True):
            young.merge(above)
