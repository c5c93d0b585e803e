"""Stores with a log, for tests: one worker's log over the tables of its partitions."""

import select
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from storage.data_dir import partition_path
from storage.lmdb_store import LmdbStore
from storage.log.commit_log import DEFAULT_LIMITS, CommitLog, LogLimits, LogUsage
from storage.log.follower import Follower
from storage.log.logged_store import LoggedStore
from storage.log.recovery import detach, log_directory
from storage.store import Store

MAP_BYTES = 1 << 28


def open_log(
    directory: Path,
    partitions: Sequence[int] = (0,),
    *,
    worker: int = 0,
    limits: LogLimits = DEFAULT_LIMITS,
    map_size_bytes: int = MAP_BYTES,
    follower: Follower | None = None,
    **others: Any,
) -> CommitLog:
    """The log of a worker in the data directory, which is made if missing, with the stores of these partitions."""
    partition_path(directory, 0).parent.mkdir(parents=True, exist_ok=True)
    tables = {}
    try:
        for partition in partitions:
            path = partition_path(directory, partition)
            tables[partition] = LmdbStore(
                path, partition_id=partition, map_size_bytes=map_size_bytes, create=True, attached=True
            )
        return CommitLog(
            log_directory(directory, worker),
            worker,
            tables,
            map_size_bytes=map_size_bytes,
            limits=limits,
            follower=follower,
            **others,
        )
    except BaseException:
        for store in tables.values():
            store.close()
        raise


@contextmanager
def attached_tables(
    directory: Path, partitions: Iterable[int], map_size_bytes: int = MAP_BYTES
) -> Iterator[dict[int, LmdbStore]]:
    """The tables of these partitions, which may have changes in a log."""
    with ExitStack() as opened:
        yield {
            partition: opened.enter_context(
                LmdbStore(
                    partition_path(directory, partition),
                    partition_id=partition,
                    map_size_bytes=map_size_bytes,
                    create=False,
                    attached=True,
                )
            )
            for partition in partitions
        }


def open_tables(directory: Path, partition: int, *, map_size_bytes: int = MAP_BYTES) -> LmdbStore:
    """The tables of a partition whose worker may have been killed: its log is replayed, and has nothing more for it."""
    path = partition_path(directory, partition)
    store = LmdbStore(path, partition_id=partition, map_size_bytes=map_size_bytes, create=False, attached=True)
    try:
        assert not detach({partition: store}, lambda _: None).behind
    except BaseException:
        store.close()
        raise
    return store


def open_logged_store(directory: Path, limits: LogLimits = DEFAULT_LIMITS) -> LoggedStore:
    return open_log(directory, limits=limits).stores[0]


def log_of(store: LoggedStore) -> CommitLog:
    assert isinstance(store._log, CommitLog)
    return store._log


def checkpoint(log: CommitLog) -> None:
    """Begin a checkpoint, unless one is being made, and wait until all are done."""
    if not log.is_checkpointing:
        log.begin_checkpoint()
    while log.is_checkpointing:
        if log.checkpointer.is_running:
            log.hear()
        else:
            log.beat()


def crash(log: CommitLog) -> None:
    """End as if the process were killed: without a checkpoint, and what is staged is lost."""
    log.checkpointer.close()
    log.close_files()


class InMemory:
    """In place of a worker's log: its one store is in memory."""

    lost_segments = 0
    together_bytes = 4 << 20

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def is_committing(self) -> bool:
        return False

    def begin_commit(self, time_ms: int) -> bool:
        dirty = self._store.dirty
        self._store.commit()
        return dirty

    def end_commit(self, wait: bool = True) -> None: ...

    def watch(self, poll: select.epoll) -> None: ...

    def serve(self, descriptor: int) -> bool:
        return False

    def beat(self) -> None: ...

    def usage(self) -> LogUsage:
        return LogUsage(0, 0, 0, 0, 0, 0, 0, 0.0, 0, None)
