"""Tables of partitions that have no room, and processes that die while they write them."""

from collections.abc import Sequence
from enum import Enum
from typing import Any

import lmdb
import pytest

from storage.lmdb_store import LmdbStore
from storage.store import Table


class Fault(Enum):
    NO_ROOM = "deletions, and rows of META, are taken, as LMDB has free pages for these"
    NOTHING = "nothing is taken"
    DIES_BEFORE = "the process dies before it commits"
    DIES_AFTER = "the process dies when it has committed"


class Died(BaseException):
    pass


class Faults(dict[int, Fault]):
    """By partition. They hold for all that writes tables: the checkpointer, the end of a worker, and its start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._append, self._put_many, self._commit = LmdbStore.append, LmdbStore.put_many, LmdbStore.commit
        monkeypatch.setattr(LmdbStore, "append", lambda *args: self._put(self._append, *args))
        monkeypatch.setattr(LmdbStore, "put_many", lambda *args: self._put(self._put_many, *args))
        monkeypatch.setattr(LmdbStore, "commit", lambda *args: self._committed(*args))

    def _of(self, store: LmdbStore) -> Fault | None:
        return self.get(int(store.path.name))

    def _put(self, put: Any, store: LmdbStore, table: Table, items: Sequence[tuple[bytes, bytes]]) -> None:
        if items and self._of(store) is Fault.NO_ROOM:
            store._failed("put", lmdb.MapFullError("MDB_MAP_FULL"))
        put(store, table, items)

    def _committed(self, store: LmdbStore) -> None:
        fault = self._of(store) if store.dirty else None
        if fault is Fault.NOTHING:
            store._failed("commit", OSError(28, "No space left on device"))
        if fault is Fault.DIES_BEFORE:
            store.abort()
            raise Died
        self._commit(store)
        if fault is Fault.DIES_AFTER:
            raise Died
