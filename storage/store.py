"""The store of one partition: ordered tables of bytes, changed in atomic, durable commits."""

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, Protocol


class Table(IntEnum):
    """The tables of a partition. Keys are big-endian, so that byte order is the order of the numbers.

    Keys and values are made and read in `storage.records` only.
    """

    META = 0  # name -> value: format version, partition id, next entity id, catalog version
    ENTITIES = 1  # entity id -> definition
    MESSAGES = 2  # message id -> message record
    QUEUE = 3  # (queue id, place, sequence number) -> queue entry
    DUE = 4  # (queue id, timer kind, time, sequence number) -> message id
    COUNTS = 5  # queue id -> next sequence number, messages by place, bytes
    QUARANTINE = 6  # (table, key) of a corrupt record -> its bytes as found
    RULES = 7  # (entity id of a subscription, rule name) -> rule
    REFS = 8  # message id -> number of queue entries that refer to the message, if there are several
    MARKS = 9  # (store id, queue id) of messages forwarded from another store -> highest sequence number taken over
    SESSION_ENTRIES = 10  # (queue id, place, session id, sequence number) -> nothing: the entries of QUEUE by session
    SESSIONS = 11  # (queue id, session id) -> time when its state was set, bytes of the state; if it has one
    SESSION_STATES = 12  # (queue id, session id) -> state
    DUPLICATE_LOG = 13  # (entity id, row) -> the message ids of one send: see `storage.seen_ids`
    DUPLICATE_RUNS = 14  # (entity id, run) -> description of a run of sorted ids
    DUPLICATE_CHUNKS = 15  # (entity id, run, first digest) -> ids of a run, sorted
    DUPLICATE_FILTERS = 16  # (entity id, run, piece) -> a piece of the run's filter


class StoreError(Exception):
    """The store failed to read or write. The partition must stop, and be loaded again from disk."""


class StoreDamaged(StoreError):
    """The data on disk are damaged: another attempt to read them will fail again."""


class StoreFull(StoreError):
    """The map or the disk has no room left for this commit; nothing of it was kept."""


class Entries(Protocol):
    """Items of QUEUE that are made when somebody asks for them: see `Entries` of `protocol.extension`."""

    @property
    def begin(self) -> tuple[bytes, int] | None: ...

    def items(self) -> list[tuple[bytes, bytes]]: ...

    def part(self, begin: int, end: int) -> "Entries": ...

    def __len__(self) -> int: ...


class Keys(Protocol):
    """Keys that are made when somebody asks for them: see `Keys` of `protocol.extension`."""

    @property
    def prefix(self) -> bytes: ...

    @property
    def ranges(self) -> list[tuple[int, int]]: ...

    @property
    def highest(self) -> bytes: ...

    def keys(self) -> list[bytes]: ...

    def of(self, ranges: list[tuple[int, int]]) -> "Keys":
        """Return keys with the same prefix and these ranges."""

    def __len__(self) -> int: ...


class Store(Protocol):
    """Ordered tables of one partition.

    Writes are staged in one transaction that begins with the first of them; reads see staged writes. `commit` makes all
    staged writes durable (synced to disk), or none of them; `abort` drops them. One thread only. After a StoreError the
    store must not be used any more.
    """

    # Called with the keys of each put and deletion, after it was staged. A store that is only read from, or written to
    # by the checkpointer, does not call it.
    noting: Callable[[Table, Iterable[bytes]], None] | None = None
    # Hints for the journal (see `storage.journal.events`) that go into the log with the next commit; None if there is
    # no journal.
    hints: list[Any] | None = None
    writes: int  # the number of calls since the store was opened that staged a write; attempts to delete count

    def get(self, table: Table, key: bytes) -> bytes | None: ...

    def get_many(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]: ...

    def get_adjacent(self, table: Table, first: bytes, last: bytes, count: int) -> list[bytes | None] | None:
        """The values of the keys from `first` to `last`, in order, if these are there and so many in all (fast path).

        None if it is not so, or not known at once.
        """
        return None

    def put(self, table: Table, key: bytes, value: bytes) -> None: ...

    def append(self, table: Table, items: Sequence[tuple[bytes, bytes]]) -> None:
        """Put `items`, which are in key order and above every key in the table (fast path for MESSAGES)."""

    def append_rows(self, first: int, items: list[tuple[bytes, bytes]]) -> None:
        """Append to MESSAGES, as `append` does, items with all keys from the one with the number `first` on."""
        self.append(Table.MESSAGES, items)

    def put_many(self, table: Table, items: Sequence[tuple[bytes, bytes]]) -> None: ...

    def insert_many(self, table: Table, items: Sequence[tuple[bytes, bytes]]) -> None:
        """Put `items`, whose keys the table does not have. What is deleted soon may never be written to it."""

    def insert_entries(self, entries: Entries) -> None:
        """Insert into QUEUE, as `insert_many` does. A store may make the items when somebody asks for one."""
        self.insert_many(Table.QUEUE, entries.items())

    def delete(self, table: Table, key: bytes) -> None:
        """The key need not be there."""

    def delete_many(self, table: Table, keys: Iterable[bytes]) -> None: ...

    def delete_keys(self, table: Table, keys: Keys) -> None:
        """Delete, as `delete_many` does. A store may make the keys when somebody asks for one."""
        self.delete_many(table, keys.keys())

    def scan(
        self, table: Table, start: bytes, end: bytes, limit: int, reverse: bool = False
    ) -> list[tuple[bytes, bytes]]:
        """Up to `limit` items with start <= key < end in key order, or from the end backwards."""

    def last_key(self, table: Table) -> bytes | None: ...

    def record_count(self, table: Table) -> int:
        """Records in the table, without reading them."""
        ...

    def commit(self) -> None:
        """Make staged writes durable; without any, nothing happens. Raises StoreFull or StoreError."""

    def abort(self) -> None: ...

    @property
    def dirty(self) -> bool:
        """True while writes are staged; an attempt to delete counts as one."""

    def used_bytes(self) -> int:
        """Bytes of the map in use, free pages not counted."""

    def fits(self, added_bytes: int, sizes: Iterable[int], pages: int = 0) -> bool:
        """True if records of these sizes, `added_bytes` in all, can be appended to MESSAGES in addition to staged
        writes, and this number of other `pages` can be written.

        A store may have free space, but no adjacent free pages.
        """
        ...

    def capacity_bytes(self, spare_bytes: int = 0) -> int:
        """The number of bytes that the store may use, if `spare_bytes` of the disk stay free."""
        ...

    def shortage(self) -> str | None:
        """Why nothing fits now, however small it is; None if that is not so."""
        return None

    def release_pages(self) -> None:
        """Release memory that was taken by reading, if there is any."""
        return

    def close(self) -> None: ...
