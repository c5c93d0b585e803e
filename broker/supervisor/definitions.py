"""Updates the definitions in all stores to the declared ones, before any process of the broker opens the stores.

Some damaged pages kill the process that reads them by LMDB, so this is done in a process of its own. It notes the
partition whose store it is working on. When it dies or finds damage, that partition is left out, and another process
does the same for the others; it finds the committed changes done. A partition that is left out keeps its definitions.
Because definitions are compared and no steps are replayed, the next start with a sound store updates them.

Only the home cannot be left out, because without its catalog nobody knows which entities exist.
"""

import time
from typing import Any, NamedTuple, cast

from broker.catalog.catalog import FIRST_ENTITY_ID, HOME, Reconciled, reconcile
from broker.logging import get_logger
from broker.settings.config import ConfigurationError, Settings
from broker.supervisor.parking import home_is_damaged
from broker.touched_partition import TouchedPartition
from storage.apart import ProcessDied, apart
from storage.data_dir import partition_path
from storage.lmdb_store import LmdbStore
from storage.log.recovery import detach, keep_log, logs
from storage.log.tables import position
from storage.memory import MemoryStore
from storage.records import NEXT_ENTITY_ID_KEY, encode_document
from storage.store import Store, StoreDamaged, Table

log = get_logger("supervisor")


class InLine(NamedTuple):
    """The changes, and for each partition that was left out the damage of its store."""

    reconciled: Reconciled
    damaged: dict[int, str]


def bring_in_line(settings: Settings) -> InLine:
    """Make missing stores and reconcile the entities. All stores are closed again.

    The data directory must exist and be locked. Raises ConfigurationError, also if the home's store is damaged,
    CannotReconcile, and StoreError for what is no damage.
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
            raise ConfigurationError(home_is_damaged(text))
        damaged[partition] = text


def _reconcile(settings: Settings, left_out: frozenset[int], touching: TouchedPartition) -> Reconciled:
    stores: dict[int, Store] = {}  # of all partitions that are here
    opened: dict[int, LmdbStore] = {}
    try:
        for partition in settings.partitions_here:
            if partition in left_out:
                stores[partition] = MemoryStore()
                continue
            touching.set(partition)
            opened[partition] = store = _opened(settings, partition)
            stores[partition] = cast(Store, _Watched(store, partition, touching))
        for worker, directory in logs(settings.data_dir):
            for partition in left_out:
                keep_log(directory, worker, partition, partition_path(settings.data_dir, partition))
        _replay(opened, touching)
        if HOME not in stores:
            _await_home(stores)
            return Reconciled(0, (), (), ())
        return reconcile(
            stores,
            settings.entities,
            int(time.time() * 1000),
            settings.rules,
            settings.partitioning,
            settings.partitions,
        )
    finally:
        for store in opened.values():
            store.close()


def _await_home(stores: dict[int, Store]) -> None:
    """A new partition has heard of no entity yet: it will when its worker is connected to the home's."""
    for store in stores.values():
        if store.get(Table.META, NEXT_ENTITY_ID_KEY) is None:
            store.put(Table.META, NEXT_ENTITY_ID_KEY, encode_document(FIRST_ENTITY_ID))
            store.commit()


def _replay(opened: dict[int, LmdbStore], touching: TouchedPartition) -> None:
    behind = []
    for partition, store in opened.items():
        touching.set(partition)
        if position(store) is not None:
            behind.append(partition)
    if behind:
        log.info("the broker was not stopped; bringing its stores up to date from their logs", partitions=behind)
    began = time.monotonic()
    detach(opened, touching.set)
    if behind:
        log.info("stores are up to date", seconds=round(time.monotonic() - began, 3))


def _opened(settings: Settings, partition: int) -> LmdbStore:
    path, size = partition_path(settings.data_dir, partition), settings.store.map_size_bytes
    return LmdbStore(path, partition_id=partition, map_size_bytes=size, create=True, attached=True)


class _Watched:
    """A store. Each access first notes its partition."""

    def __init__(self, store: Store, partition: int, touching: TouchedPartition) -> None:
        self._store = store
        self._partition = partition
        self._touching = touching

    def __getattr__(self, name: str) -> Any:
        self._touching.set(self._partition)
        return getattr(self._store, name)
