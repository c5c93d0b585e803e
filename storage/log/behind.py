"""The store of a partition whose tables have no room for what its log has: it is read through that, and not changed."""

from storage.lmdb_store import LmdbStore
from storage.log.changes import Layer
from storage.log.logged_store import LoggedStore
from storage.log.recovery import Behind
from storage.store import StoreFull


class BehindStore(LoggedStore):
    """A commit of changes raises StoreFull. The caller closes the tables."""

    def __init__(self, partition: int, tables: LmdbStore, behind: Behind) -> None:
        super().__init__(partition, tables, _NoLog(behind.problem), behind.layer)


class _NoLog:
    """The stand-in for a log that takes no changes."""

    def __init__(self, problem: str) -> None:
        self._problem = problem
        self._is_changed = False

    def changed(self, store: LoggedStore) -> None:
        self._is_changed = True

    def unchanged(self, store: LoggedStore) -> None:
        self._is_changed = False

    def commit(self, time_ms: int = 0) -> bool:
        if self._is_changed:
            raise StoreFull(self._problem)
        return False

    def unwritten_bytes(self, partition: int) -> int:
        return 0

    def shortage(self, partition: int) -> str | None:
        return self._problem

    def accepts(self, partition: int, added_bytes: int, pages: int) -> bool:
        return False

    def read_again(self, partition: int) -> Layer:
        return Layer()

    def close(self) -> None: ...
