"""Brings the definitions in all stores in line with those declared, before any process of the broker opens the stores.

LMDB kills the process that reads some damaged pages, and so this is done in a process of its own. It notes which
partition's store it is at work on; when it dies, or finds damage, that partition is left out and the next process does
the same for the others. What was committed already that one finds done. Left out, a partition keeps what it has: as
definitions are compared and no steps are replayed, the next start with a sound store brings it in line.

Only the home cannot be left out: without it nobody knows what there is.
"""

import time
from typing import Any, NamedTuple, cast

from broker.catalog.catalog import HOME, Reconciled, reconcile
from broker.settings.config import ConfigurationError, Settings
from broker.touched_partition import TouchedPartition
from storage.apart import ProcessDied, apart
from storage.data_dir import partition_path
from storage.lmdb_store import LmdbStore
from storage.memory import MemoryStore
from storage.store import Store, StoreDamaged


class InLine(NamedTuple):
    """What was changed, and of the partitions that were left out what is wrong with their stores."""

    reconciled: Reconciled
    damaged: dict[int, str]


def bring_in_line(settings: Settings) -> InLine:
    """Make missing stores, and reconcile the entities. All stores are closed again.

    The data directory exists, and is locked. Raises ConfigurationError, CannotReconcile; StoreError, which is
    StoreDamaged if the home is.
    """
    damaged: dict[int, str] = {}
    while True:
        touching = TouchedPartition()
        try:
            return InLine(apart(_reconcile, settings, frozenset(damaged), touching), damaged)
        except StoreDamaged as error:
            text = str(error)
        except ProcessDied as error:
            text = f"the process that read it died of {error}"
            if not error.crashed:
                raise ConfigurationError(f"the process that compares definitions ended: {error}") from error
        partition = touching.get()
        if partition is None:
            raise ConfigurationError(f"the definitions cannot be compared: {text}")
        path = partition_path(settings.data_dir, partition)
        text = text if str(path) in text else f"{path}: {text}"
        if partition == HOME:
            raise StoreDamaged(f"the store of partition {HOME} is damaged, which has the definitions: {text}")
        damaged[partition] = text


def _reconcile(settings: Settings, left_out: frozenset[int], touching: TouchedPartition) -> Reconciled:
    stores: list[Store] = []  # of all partitions
    opened: list[LmdbStore] = []
    try:
        for partition in range(settings.partitions):
            if partition in left_out:
                stores.append(MemoryStore())
                continue
            touching.set(partition)
            opened.append(store := _opened(settings, partition))
            stores.append(cast(Store, _Watched(store, partition, touching)))
        return reconcile(stores, settings.entities, int(time.time() * 1000), settings.rules)
    finally:
        for store in opened:
            store.close()


def _opened(settings: Settings, partition: int) -> LmdbStore:
    path, size = partition_path(settings.data_dir, partition), settings.store.map_size_bytes
    return LmdbStore(path, partition_id=partition, map_size_bytes=size, create=True)


class _Watched:
    """A store whose partition is noted before anything is done with it."""

    def __init__(self, store: Store, partition: int, touching: TouchedPartition) -> None:
        self._store = store
        self._partition = partition
        self._touching = touching

    def __getattr__(self, name: str) -> Any:
        self._touching.set(self._partition)
        return getattr(self._store, name)
