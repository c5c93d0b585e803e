"""A partition's store on disk: one LMDB environment in a directory of its own. The only module that imports lmdb.

    <partition>/data.mdb    the tables
    <partition>/lock.mdb    LMDB's own: writer's mutex and reader slots
    <partition>/owner.lock  held by the process that has the store open; others may only read (`TablesSnapshot`)

A commit is two syncs: the changed pages, then the root that points to them. Pages are never changed in place, so a
process killed at any moment leaves the last commit that returned, or the one under way if its root got to the disk.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EDQUOT, EIO, ENOENT, ENOSPC
from itertools import islice, repeat
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import lmdb

from storage.durable import free_disk_bytes, sync_directory
from storage.file_lock import FileLock, FileLocked
from storage.liveness import SILENT, Signs
from storage.mapped_pages import MappedPages
from storage.pages import PageFinding, RootReplaced, check_pages
from storage.records import (
    FORMAT_VERSION,
    FORMAT_VERSION_KEY,
    KNOWN_STORES_KEY,
    LOG_POSITION_KEY,
    OLDEST_FORMAT_VERSION,
    PARTITION_ID_KEY,
    STORE_ID_BYTES,
    STORE_ID_KEY,
    CorruptRecord,
    decode_document,
    encode_document,
)
from storage.store import Store, StoreDamaged, StoreError, StoreFull, Table

DATA_FILE = "data.mdb"
LOCK_FILE = "lock.mdb"
OWNER_LOCK_FILE = "owner.lock"
CHECKS_MAX = 1000  # attempts to see the root of a commit before two others have followed it

MAX_READERS = 16  # this process, and a few that verify or back up
FULL_DISK_BYTES = 1 << 20  # if a write fails with less left than this, the disk is full
RENEWAL_BYTES = 1 << 20  # more than a change of a few records needs
META_PAGES = 2  # LMDB's two roots at the start of the file
RESERVED_BYTES = 2 << 20  # of the disk, for a commit that deletes: pages that it frees are for the next but one

# The errors by which LMDB reports damaged pages, as far as it finds the damage. BadTxnError is one of them, because a
# transaction that has ended for another reason is never used again here.
_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.NotFoundError,  # for a table: none is ever removed
    lmdb.InvalidError,
    lmdb.IncompatibleError,
    lmdb.CursorFullError,
    lmdb.BadTxnError,
)

_NAMES = [table.name.lower().encode() for table in Table]


class UnknownFormat(StoreError):
    """The file was written in a format this version does not know. Nothing was changed."""

    def __init__(self, path: Path, found: object, supported: int = FORMAT_VERSION) -> None:
        super().__init__(f"{path}: format version {found!r} found, {supported} supported; the file was left untouched")
        self.path, self.found, self.supported = path, found, supported

    def __reduce__(self) -> tuple[Any, ...]:
        return UnknownFormat, (self.path, self.found, self.supported)


class WrongPartition(StoreError):
    """The directory holds another partition's store. Nothing was changed."""

    def __init__(self, path: Path, found: object, wanted: int) -> None:
        super().__init__(f"{path}: holds partition {found!r}, not {wanted}; the file was left untouched")
        self.path, self.found, self.wanted = path, found, wanted

    def __reduce__(self) -> tuple[Any, ...]:
        return WrongPartition, (self.path, self.found, self.wanted)


class LogNotReplayed(StoreError):
    """The latest changes of the store are in a log. Nothing was changed."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path}: its latest changes are in the log of its worker, and must be replayed first")
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return LogNotReplayed, (self.path,)


class StoreMissing(StoreDamaged):
    """There is no store, where one should be. Nothing was made."""

    def __init__(self, path: Path) -> None:
        data = path / DATA_FILE
        super().__init__(f"{data}: {'is empty' if data.exists() else os.strerror(ENOENT)}: no store here")
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreMissing, (self.path,)


class StoreInUse(StoreError):
    """Another process has this store open."""


def store_error(path: Path, doing: str, error: Exception) -> StoreError:
    """The error for the caller when LMDB or the system failed while `doing` something at `path`, which exists."""
    number = error.errno if isinstance(error, OSError) else getattr(error, "code", None)
    if isinstance(error, _DAMAGE):
        return StoreDamaged(f"{path}: {doing}: {error}")
    full = isinstance(error, (lmdb.MapFullError, lmdb.DiskError)) or number in (ENOSPC, EDQUOT)
    # LMDB reports a short write as EIO, and on most full disks a write is short.
    full = full or (number == EIO and free_disk_bytes(path) < FULL_DISK_BYTES)
    return (StoreFull if full else StoreError)(f"{path}: {doing}: {error}")


def _open_read_only(path: Path) -> Any:
    """The environment at `path`, for reading. Raises StoreError.

    Without a lock file nobody writes to the store (a backup, or a store that was never opened since); none is made
    then.
    """
    try:
        env = lmdb.open(
            str(path),
            map_size=0,  # the size is in the file
            readonly=True,
            lock=(path / LOCK_FILE).exists(),
            create=False,
            readahead=True,
            max_dbs=len(Table),
            max_readers=MAX_READERS,
        )
    except lmdb.VersionMismatchError as error:
        raise UnknownFormat(path, f"LMDB's own file format ({error})") from error
    except (lmdb.Error, OSError) as error:
        raise store_error(path / DATA_FILE, "cannot be opened", error) from error
    # A read beyond the end of a mapped file kills the process (SIGBUS), so a truncated file is refused here.
    needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    found = (path / DATA_FILE).stat().st_size
    if found < needed:
        env.close()
        raise StoreDamaged(f"{path / DATA_FILE}: truncated: {found} bytes of {needed}")
    return env


def _open_tables(env: Any, transaction: Any = None) -> list[Any]:
    """Handles of all tables, in the order of Table. Raises lmdb.NotFoundError if one is missing."""
    return [env.open_db(name, txn=transaction, create=False) for name in _NAMES]


def check_store_pages(path: Path) -> list[PageFinding]:
    """The damaged pages of the store at `path`, as of one commit; its owner may be running. See `pages`.

    Raises StoreError.
    """
    env = _open_read_only(path)
    try:
        for _ in range(CHECKS_MAX):
            # Beginning a transaction reads no pages, and until it ends the pages of its commit stay as they are.
            with env.begin() as transaction, suppress(RootReplaced):
                return check_pages(path / DATA_FILE, transaction.id())
        raise StoreError(f"{path}: the broker commits so often that no commit could be checked; try again")
    except (lmdb.Error, OSError) as error:
        raise StoreError(f"{path}: {error}") from error
    finally:
        env.close()


class TablesSnapshot:
    """The tables of one partition as they were at one commit. Others may continue to write.

    As long as the snapshot is open, pages that are freed cannot be used again, so the file grows with later writes.
    Raises StoreError, UnknownFormat.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._env = _open_read_only(path)
        self.partition_id: int
        try:
            self._txn = self._env.begin()
            self._databases = [self._meta()]
            found = self._document(FORMAT_VERSION_KEY)
            if not isinstance(found, int) or not OLDEST_FORMAT_VERSION <= found <= FORMAT_VERSION:
                raise UnknownFormat(path, found)
            self.format_version = found
            self.partition_id = self._document(PARTITION_ID_KEY)
            self._databases = _open_tables(self._env, self._txn)
        except (lmdb.Error, OSError) as error:
            self.close()
            raise store_error(path, "open", error) from error
        except BaseException:
            self.close()
            raise

    def items(self, table: Table) -> Iterator[tuple[bytes, bytes]]:
        """All items in key order. Raises StoreError if pages of the file are invalid."""
        try:
            yield from self._txn.cursor(self._databases[table]).iternext()
        except lmdb.Error as error:
            raise store_error(self.path, f"read {table.name}", error) from error

    def get(self, table: Table, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._txn.get(key, db=self._databases[table])
            return value
        except lmdb.Error as error:
            raise store_error(self.path, f"read {table.name}", error) from error

    def copy(self, target: Path) -> None:
        """Write this commit, compacted, into the empty directory `target`. Not yet synced to disk."""
        try:
            self._env.copy(str(target), compact=True, txn=self._txn)
        except (lmdb.Error, OSError) as error:
            raise store_error(target, f"copy of {self.path}", error) from error

    def close(self) -> None:
        self._env.close()  # this ends its transaction, too

    def _meta(self) -> Any:
        """The handle of META. Raises lmdb.Error, UnknownFormat."""
        try:
            return self._env.open_db(_NAMES[Table.META], txn=self._txn, create=False)
        except lmdb.NotFoundError as error:
            raise UnknownFormat(self.path, None) from error  # a file of another program

    def _document(self, key: bytes) -> Any:
        value = self.get(Table.META, key)
        if value is None:
            raise StoreDamaged(f"{self.path}: META has no {key.decode()}")
        try:
            return decode_document(value)
        except CorruptRecord as error:
            raise StoreDamaged(f"{self.path}: META {key.decode()}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def renew_store_id(path: Path) -> None:
    """Give the store at `path` a new id. It is a copy that no process has open.

    The original store continued to assign sequence numbers, which this copy will assign again. Marks in other stores
    say that messages with these numbers were taken over. With a new id the copy's messages count as new. The marks in
    the copy itself are of stores that get new ids as well. Raises StoreError.
    """
    size = (path / DATA_FILE).stat().st_size
    try:
        env = lmdb.open(str(path), map_size=size + RENEWAL_BYTES, create=False, lock=False, max_dbs=len(Table))
        with env.begin(write=True) as txn:
            key, value = STORE_ID_KEY, encode_document(os.urandom(STORE_ID_BYTES))
            meta = env.open_db(_NAMES[Table.META], txn=txn, create=False)
            txn.put(key, value, db=meta)
            txn.delete(LOG_POSITION_KEY, db=meta)
            txn.delete(KNOWN_STORES_KEY, db=meta)  # others may be copies, too
            txn.drop(env.open_db(_NAMES[Table.MARKS], txn=txn, create=False), delete=False)
        env.close()
    except (lmdb.Error, OSError) as error:
        raise store_error(path, "renew the store's id", error) from error


def _look(path: Path, partition_id: int, attached: bool) -> int | None:
    """The format version of this partition's store at `path`; None if there is no store yet. Writes nothing.

    Raises UnknownFormat, WrongPartition, LogNotReplayed unless `attached`, StoreError.
    """
    data = path / DATA_FILE
    if not data.exists() or data.stat().st_size == 0:
        return None
    env = _open_read_only(path)
    try:
        if env.begin().stat()["entries"] == 0:
            return None  # the process that created the file ended before its first commit
    finally:
        env.close()
    with TablesSnapshot(path) as snapshot:
        if snapshot.partition_id != partition_id:
            raise WrongPartition(path, snapshot.partition_id, partition_id)
        if not attached and snapshot.get(Table.META, LOG_POSITION_KEY) is not None:
            raise LogNotReplayed(path)
        return snapshot.format_version


# With this much room behind the last page of the file, any record finds adjacent pages.
ROOM_BYTES = 4 << 20
PAGE_BYTES = 4096
PAGE_RECORD_BYTES = 4000  # a record of this size takes a page of its own
# Each commit writes one record with the pages that it has freed, and one with those that are still free. Without room
# for both nothing can be deleted. The limit is the size of such a record for 4 GiB of pages.
PAGE_NUMBER_BYTES = 8
RELEASE_BYTES_MAX = 8 << 20
# Changes in the log of an attached store were accepted already, so they must find room whatever the map's nominal size.
MAP_SLACK_BYTES = 512 << 20
AT_ONCE = 64  # records that are written between two signs of life: each may need a page that is not in memory
_TRIAL_KEY = b"\xff" * 8  # above every message's
_REFUSED_KEY = b"refused"


class LmdbStore(Store):
    """See Store. Open it in the process and thread that use it: LMDB ties a write transaction to its thread.

    `map_size_bytes` is address space, not disk: choose it large once; the file grows to it as needed. With `create`,
    a missing store is made, else it is damage. After StoreFull nothing is staged, and the store can go on; after any
    other StoreError it is closed, because a failed sync must not be tried again: the kernel may have dropped the pages
    it could not write, and would report success.

    `attached`: the caller takes care of the log that may have the store's latest changes (`storage.log`). The
    checkpointer does not own the store (`owned`): its worker does, and writes nothing to it. `signs` are given while it
    is opened and written.

    Raises StoreError, UnknownFormat, WrongPartition, LogNotReplayed, StoreInUse.
    """

    def __init__(
        self,
        path: Path,
        *,
        partition_id: int,
        map_size_bytes: int,
        create: bool,
        attached: bool = False,
        owned: bool = True,
        signs: Signs = SILENT,
    ) -> None:
        self.path = path
        self._signs = signs
        self._map_size_bytes = map_size_bytes
        self._mapped_bytes = map_size_bytes + MAP_SLACK_BYTES if attached else map_size_bytes
        self._writing: Any = None
        self.writes = 0
        self._reading: Any = None
        self._pid = str(os.getpid())
        self._last_page_seen = 0
        self._free_pages_pinned = False
        self._room_bytes = 0  # the bytes of the map behind the last page that was ever used
        self._release_bytes = 0  # adjacent bytes that LMDB needs to write a list of all pages as free
        self._reserved_to = 0  # the offset in the file up to which the disk has room for it
        self._env: Any = None
        self._pages: MappedPages | None = None
        if not create and not path.is_dir():
            raise StoreMissing(path)
        self._lock = self._take_lock(create) if owned else None
        try:
            version = _look(path, partition_id, attached)
            signs.beat()
            known = version is not None
            if not known and not create:
                raise StoreMissing(path)
            self._env = lmdb.open(
                str(path),
                map_size=self._mapped_bytes,
                mode=0o600,
                create=not known,
                readahead=True,  # messages are read in about the order in which they were written
                max_dbs=len(_NAMES),
                max_readers=MAX_READERS,
                max_spare_txns=1,
            )
            self._env.reader_check()  # frees slots of killed readers, which would keep old pages
            signs.beat()
            if known:
                self._databases = _open_tables(self._env)
            else:
                with signs.waiting_for_disk():
                    self._databases = self._create(partition_id)
            if known and version != FORMAT_VERSION:
                with signs.waiting_for_disk():
                    self._upgrade()
            self._pages = MappedPages(path / DATA_FILE)
            self._measure()
        except (lmdb.Error, OSError) as error:
            self.close()
            raise store_error(path, "open", error) from error
        except StoreError:
            self.close()
            raise

    def get(self, table: Table, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._transaction().get(key, db=self._databases[table])
            return value
        except (lmdb.Error, OSError) as error:
            self._failed("get", error)

    def get_many(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        try:
            found = self._transaction().cursor(self._databases[table]).getmulti(keys)
        except (lmdb.Error, OSError) as error:
            self._failed("get", error)
        if len(found) == len(keys):  # the usual case: all are there
            return [value for _, value in found]
        return list(map(dict(found).get, keys))

    def get_adjacent(self, table: Table, first: bytes, last: bytes, count: int) -> list[bytes | None] | None:
        try:
            cursor = self._transaction().cursor(self._databases[table])
            if not cursor.set_key(first):
                return None
            # From one to the next is faster than from the root to each. The cursor stays at the last that was taken.
            values: list[bytes | None] = list(islice(cursor.iternext(keys=False), count))
            return values if len(values) == count and cursor.key() == last else None
        except (lmdb.Error, OSError) as error:
            self._failed("get", error)

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        self.writes += 1
        try:
            (self._writing or self._begin()).put(key, value, db=self._databases[table])
        except (lmdb.Error, OSError) as error:
            self._failed("put", error)

    def append(self, table: Table, items: Sequence[tuple[bytes, bytes]]) -> None:
        if not items:
            return
        self.writes += 1
        added = 0
        try:
            cursor = (self._writing or self._begin()).cursor(self._databases[table])
            for some in self._in_pieces(items):
                added += cursor.putmulti(some, append=True)[1]
        except (lmdb.Error, OSError) as error:
            self._failed("append", error)
        if added != len(items):
            self._failed("append", ValueError("keys are not in order above the last of the table"))

    def put_many(self, table: Table, items: Sequence[tuple[bytes, bytes]]) -> None:
        if not items:
            return
        self.writes += 1
        try:
            cursor = (self._writing or self._begin()).cursor(self._databases[table])
            for some in self._in_pieces(items):
                cursor.putmulti(some)
        except (lmdb.Error, OSError) as error:
            self._failed("put", error)

    def _in_pieces(self, items: Sequence[tuple[bytes, bytes]]) -> Iterator[Sequence[tuple[bytes, bytes]]]:
        """A sign is given before each."""
        for at in range(0, len(items), AT_ONCE):
            self._signs.beat()
            yield items[at : at + AT_ONCE]

    def insert_many(self, table: Table, items: Sequence[tuple[bytes, bytes]]) -> None:
        self.put_many(table, items)

    def delete(self, table: Table, key: bytes) -> None:
        self.writes += 1
        try:
            (self._writing or self._begin()).delete(key, db=self._databases[table])
        except (lmdb.Error, OSError) as error:
            self._failed("delete", error)

    def delete_many(self, table: Table, keys: Iterable[bytes]) -> None:
        self.writes += 1
        try:
            # A cursor finds a neighbour on its current page without a walk from the root.
            cursor = (self._writing or self._begin()).cursor(self._databases[table])
            for number, key in enumerate(keys):
                if not number % AT_ONCE:
                    self._signs.beat()
                if cursor.set_key(key):
                    cursor.delete()
        except (lmdb.Error, OSError) as error:
            self._failed("delete", error)

    def scan(
        self, table: Table, start: bytes, end: bytes, limit: int, reverse: bool = False
    ) -> list[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = []
        try:
            cursor = self._transaction().cursor(self._databases[table])
            if reverse:
                if not (cursor.prev() if cursor.set_range(end) else cursor.last()):
                    return found
                for item in islice(cursor.iterprev(), limit):
                    if item[0] < start:
                        break
                    found.append(item)
            elif cursor.set_range(start):
                for item in islice(cursor.iternext(), limit):
                    if item[0] >= end:
                        break
                    found.append(item)
        except (lmdb.Error, OSError) as error:
            self._failed("scan", error)
        return found

    def last_key(self, table: Table) -> bytes | None:
        try:
            cursor = self._transaction().cursor(self._databases[table])
            key: bytes | None = cursor.key() if cursor.last() else None
            return key
        except (lmdb.Error, OSError) as error:
            self._failed("last key", error)

    def begin(self) -> None:
        """Begin to write, so that what is read now is what the commit changes. Waits for another process's commit."""
        try:
            self._begin()
        except (lmdb.Error, OSError) as error:
            self._failed("begin", error)

    def commit(self) -> None:
        if self._writing is None:
            return
        txn, self._writing = self._writing, None
        try:
            with self._signs.waiting_for_disk():
                txn.commit()
        except (lmdb.Error, OSError) as error:
            self._failed("commit", error)

    def abort(self) -> None:
        if self._writing is not None:
            self._writing.abort()
            self._writing = None

    @property
    def dirty(self) -> bool:
        return self._writing is not None

    def record_count(self, table: Table) -> int:
        try:
            entries: int = self._transaction().stat(self._databases[table])["entries"]
            return entries
        except (lmdb.Error, OSError) as error:
            self._failed("statistics", error)

    def used_bytes(self) -> int:
        """Bytes of the pages in use; while another process reads, also of pages that it keeps from being used again.

        LMDB does not tell how many pages are free without a walk of its list of them. But the counters of pages in each
        table are exact, and all other pages are free, except for the list itself, which is small. While another process
        reads, pages that were freed since its begin cannot be used again, and their number is unknown. This matters
        when no other free pages are left, and then the file grows. From then on, until that reader has ended, the whole
        file counts as used, so that a watermark below the capacity still leaves room for settling. Takes about 6 us.
        """
        try:
            txn = self._transaction()
            stat = txn.stat()
            pages = META_PAGES + stat["branch_pages"] + stat["leaf_pages"]
            for database in self._databases:
                table = txn.stat(database)
                pages += table["branch_pages"] + table["leaf_pages"] + table["overflow_pages"]
            last_page = self._env.info()["last_pgno"]
            grown, self._last_page_seen = last_page > self._last_page_seen, last_page
            self._free_pages_pinned = (self._free_pages_pinned or grown) and self._foreign_reader()
            used: int = stat["psize"] * (last_page + 1 if self._free_pages_pinned else pages)
            return used
        except (lmdb.Error, OSError) as error:
            self._failed("statistics", error)

    def fits(self, added_bytes: int, sizes: Iterable[int], pages: int = 0) -> bool:
        """Once the file is as large as the map, this tries the write: it depends on where the free pages are."""
        try:
            self._room_bytes -= added_bytes + pages * PAGE_BYTES
            if self._room_bytes > ROOM_BYTES:
                return True
            txn = self._writing or self._begin()
            wanted = [*sizes, self._release_bytes, self._release_bytes, *repeat(PAGE_RECORD_BYTES, pages)]
            if self._records_that_fit(wanted, txn) == len(wanted):
                return True
            # Pages that a transaction frees can be used by the next but one, so there must be a next one.
            txn.put(_REFUSED_KEY, encode_document(None), db=self._databases[Table.META])
            return False
        except (lmdb.Error, OSError) as error:
            self._failed("trial", error)

    def reserve(self) -> None:
        """Set disk space aside behind the last page, so that there is some for deleting when the disk is full.

        If there is none to set aside any more, what was set aside before is still there.
        """
        needed = (self._env.info()["last_pgno"] + 1) * PAGE_BYTES + RESERVED_BYTES
        if needed <= self._reserved_to or needed > self._mapped_bytes:
            return
        with suppress(OSError), self._signs.waiting_for_disk(), (self.path / DATA_FILE).open("r+b") as file:
            os.posix_fallocate(file.fileno(), needed - RESERVED_BYTES, RESERVED_BYTES)
            self._reserved_to = needed

    def tail_bytes(self) -> int:
        """Bytes of the map behind the last page that was ever used."""
        tail: int = self._mapped_bytes - (self._env.info()["last_pgno"] + 1) * PAGE_BYTES
        return tail

    def room_bytes(self) -> int:
        """Bytes of free pages, and of further ones that map and disk have room for."""
        try:
            possible_bytes: int = (self._env.info()["last_pgno"] + 1) * PAGE_BYTES + free_disk_bytes(self.path)
        except OSError as error:
            self._failed("statistics", error)
        return min(self._mapped_bytes, possible_bytes) - self.used_bytes()

    def adjacent_bytes(self, size_bytes: int, most_bytes: int) -> int:
        """The bytes of records of this size that certainly find room, up to about `most_bytes`; tries it."""
        try:
            fitting = self._records_that_fit(repeat(size_bytes, -(-most_bytes // size_bytes)))
        except (lmdb.Error, OSError) as error:
            self._failed("trial", error)
        return max(0, fitting * size_bytes - RELEASE_BYTES_MAX)

    def _records_that_fit(self, sizes: Iterable[int], parent: Any = None) -> int:
        """Tries to write records of these sizes, in addition to what `parent` has written; how many found room."""
        fitting = 0
        trial = self._env.begin(write=True, parent=parent)
        try:
            for size in sizes:
                key = _TRIAL_KEY + fitting.to_bytes(4, "big")
                trial.put(key, bytes(size), db=self._databases[Table.MESSAGES], append=True)
                fitting += 1
                self._signs.beat()
        except lmdb.MapFullError:
            pass
        finally:
            trial.abort()
        return fitting

    def capacity_bytes(self, spare_bytes: int = 0) -> int:
        """The size of the map; or of the pages used so far plus the free disk space less `spare_bytes`, if smaller."""
        try:
            possible_bytes: int = (self._env.info()["last_pgno"] + 1) * PAGE_BYTES + free_disk_bytes(self.path)
        except OSError as error:
            self._failed("statistics", error)
        return min(self._map_size_bytes, possible_bytes - spare_bytes)

    @contextmanager
    def giving_signs(self) -> Iterator[None]:
        """Within, each read gives a sign of life, too, and a long scan several. Outside, that costs nothing."""
        transaction, scan = self._transaction, self.scan

        def beating() -> Any:
            self._signs.beat()
            return transaction()

        def in_pieces(
            table: Table, start: bytes, end: bytes, limit: int, reverse: bool = False
        ) -> list[tuple[bytes, bytes]]:
            found: list[tuple[bytes, bytes]] = []
            while len(found) < limit:
                count = min(limit - len(found), AT_ONCE)
                items = scan(table, start, end, count, reverse)
                found += items
                if len(items) < count:
                    break
                start, end = (start, items[-1][0]) if reverse else (items[-1][0] + b"\0", end)
            return found

        # In the place of methods, of this object and for a while.
        self._transaction, self.scan = beating, in_pieces  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._transaction, self.scan

    def release_pages(self) -> None:
        """Give the memory of pages read back to the kernel; see MappedPages."""
        if self._pages is not None:
            self._pages.release()

    def close(self) -> None:
        self._pages = None  # the addresses may soon be used for other memory
        if self._env is not None:
            self.abort()
            self.end_reading()
            self._env.close()
        if self._lock is not None:
            self._lock.release()

    def _transaction(self) -> Any:
        """The transaction for reads: the one with the staged writes if there is one, so that reads see them."""
        if self._writing is not None:
            return self._writing
        if self._reading is None:
            self._reading = self._env.begin()
        return self._reading

    def _begin(self) -> Any:
        # Our own reader must end before a write begins, else it would keep freed pages from being used again.
        self.end_reading()
        self._writing = self._env.begin(write=True)
        self._measure()
        return self._writing

    def _measure(self) -> None:
        pages = self._env.info()["last_pgno"] + 1
        self._room_bytes = self._mapped_bytes - pages * PAGE_BYTES
        self._release_bytes = min(pages * PAGE_NUMBER_BYTES, RELEASE_BYTES_MAX)

    def end_reading(self) -> None:
        """Let the next read see what other processes have committed meanwhile."""
        if self._reading is not None:
            self._reading.abort()  # LMDB keeps its slot for the next `begin` (max_spare_txns)
            self._reading = None

    def _foreign_reader(self) -> bool:
        lines = [line.split() for line in self._env.readers().splitlines()[1:]]
        if not any(pid != self._pid for pid, *_ in lines):
            return False
        self._env.reader_check()
        lines = [line.split() for line in self._env.readers().splitlines()[1:]]
        return any(pid != self._pid and txn != "-" for pid, _, txn in lines)

    def _create(self, partition_id: int) -> list[Any]:
        with self._env.begin(write=True) as txn:
            databases = [self._env.open_db(name, txn=txn) for name in _NAMES]
            meta = databases[Table.META]
            txn.put(FORMAT_VERSION_KEY, encode_document(FORMAT_VERSION), db=meta)
            txn.put(PARTITION_ID_KEY, encode_document(partition_id), db=meta)
            txn.put(STORE_ID_KEY, encode_document(os.urandom(STORE_ID_BYTES)), db=meta)
        for directory in (self.path, self.path.parent):  # the file's name must survive a power cut as well
            sync_directory(directory)
        return databases

    def _upgrade(self) -> None:
        with self._env.begin(write=True) as txn:
            txn.put(FORMAT_VERSION_KEY, encode_document(FORMAT_VERSION), db=self._databases[Table.META])

    def _take_lock(self, create: bool) -> FileLock:
        try:
            if create:
                self.path.mkdir(mode=0o700, exist_ok=True)
            return FileLock(self.path / OWNER_LOCK_FILE)
        except FileLocked as error:
            raise StoreInUse(f"{self.path}: another process has this store open: {error}") from error
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be opened: {error}") from error

    def _failed(self, doing: str, error: Exception) -> NoReturn:
        """Raise the error for the caller; nothing stays staged."""
        raised = store_error(self.path, doing, error)
        if isinstance(raised, StoreFull):
            self.abort()
        else:
            self.close()
        raise raised from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
