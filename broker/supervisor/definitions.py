"""Updates the definitions in all stores to the declared ones, before any process of the broker opens the stores.

Some damaged pages kill the process that reads them by LMDB, so this is done in a process of its own. It notes the
partition whose store it is working on. When it dies or finds damage, that partition is left out, and another process
does the same for the others; it finds the committed changes done. A partition that is left out keeps its definitions.
Because definitions are compared and no steps are replayed, the next start with a sound store updates them.

Only the home cannot be left out, because without its catalog nobody knows which entities exist.

A store that has been made and is not there any more is damaged, too, and not made anew. The description of the data
directory says which have been made; in one of an earlier version, logs and definitions say it.

Where a disk is full, tables may lack what their log has, and stay behind it. Then definitions are read through that,
and if they differ from the declared ones, they stay as they are until a start that finds room.

A process that hangs is replaced as the broker's others are: it gives signs of life while it makes progress.
"""

import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from broker.catalog.catalog import FIRST_ENTITY_ID, HOME, Reconciled, catalog_version, reconcile
from broker.logging import get_logger
from broker.settings.config import ConfigurationError, Settings
from broker.supervisor.parking import home_is_damaged
from broker.touched_partition import TouchedPartition
from storage.apart import ProcessDied, ProcessStalled, apart_in_time
from storage.data_dir import DESCRIPTION_FILE, partition_path, read_description
from storage.liveness import SharedSigns, Signs
from storage.lmdb_store import DATA_FILE, LmdbStore, StoreMissing, TablesSnapshot
from storage.log.behind import BehindStore
from storage.log.reading import LogDamaged, LogOnDisk
from storage.log.recovery import Behind, detach, keep_log, log_directory, log_of_partition, logs
from storage.log.tables import position
from storage.memory import MemoryStore
from storage.records import NEXT_ENTITY_ID_KEY, CorruptRecord, decode_document, encode_document
from storage.store import Store, StoreDamaged, StoreError, StoreFull, Table

_UNCHANGED = Reconciled(0, (), (), ())
STARTS = 3  # of a process that hangs, before the broker gives up

log = get_logger("supervisor")


class InLine(NamedTuple):
    """The changes, and for each partition that was left out the damage of its store. `no_room`: why not all definitions
    are the declared ones, if they are not."""

    reconciled: Reconciled
    damaged: dict[int, str]
    no_room: str = ""


def bring_in_line(settings: Settings) -> InLine:
    """Make stores that have never been made, and reconcile the entities. All stores are closed again.

    The data directory must exist and be locked. Raises ConfigurationError, also if the home's store is damaged,
    CannotReconcile, and StoreError for what is no damage.
    """
    damaged: dict[int, str] = {}
    stall_seconds = settings.worker_stall_timeout_ms / 1000
    signs = SharedSigns()
    stalls = 0
    while True:
        touching = TouchedPartition()
        try:
            reconciled, no_room = apart_in_time(
                signs, stall_seconds, _reconcile, settings, frozenset(damaged), touching, signs
            )
            return InLine(reconciled, damaged, no_room)
        except ProcessStalled as error:
            stalls += 1
            log.error("process stalled; it was killed", process="definitions", seconds=round(error.seconds))
            if stalls == STARTS:
                raise ConfigurationError(f"the definitions cannot be compared: {error}, {stalls} times") from error
            continue
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


def _reconcile(
    settings: Settings, left_out: frozenset[int], touching: TouchedPartition, signs: Signs
) -> tuple[Reconciled, str]:
    """The changes, and why they are not all that should be made, if so."""
    stores: dict[int, Store] = {}  # of all partitions that are here
    opened: dict[int, LmdbStore] = {}
    known = _known_stores(settings, left_out, touching, signs)
    with ExitStack() as closing:
        for partition in settings.partitions_here:
            if partition in left_out:
                stores[partition] = MemoryStore()
                continue
            touching.set(partition)
            is_known = partition in known
            opened[partition] = store = closing.enter_context(_opened(settings, partition, signs, is_known=is_known))
            closing.enter_context(store.giving_signs())
            stores[partition] = cast(Store, _Watched(store, partition, touching, signs))
        for worker, directory in logs(settings.data_dir):
            for partition in left_out:
                keep_log(directory, worker, partition, partition_path(settings.data_dir, partition), signs)
        for partition, behind in _replay(settings, opened, touching, signs).items():
            read = BehindStore(partition, opened[partition], behind)
            stores[partition] = cast(Store, _Watched(read, partition, touching, signs))
        is_new = HOME in stores and catalog_version(stores[HOME]) == 0
        try:
            if HOME not in stores:
                _await_home(stores)
                return _UNCHANGED, ""
            reconciled = reconcile(
                stores,
                settings.entities,
                int(time.time() * 1000),
                settings.rules,
                settings.partitioning,
                settings.partitions,
                keep_case=settings.keep_case_of_names,
            )
        except StoreFull as error:
            if is_new:
                raise
            return _UNCHANGED, str(error)
        return reconciled, ""


def _await_home(stores: dict[int, Store]) -> None:
    """A new partition has heard of no entity yet: it will when its worker is connected to the home's."""
    for store in stores.values():
        if store.get(Table.META, NEXT_ENTITY_ID_KEY) is None:
            store.put(Table.META, NEXT_ENTITY_ID_KEY, encode_document(FIRST_ENTITY_ID))
            store.commit()


def _replay(
    settings: Settings, opened: dict[int, LmdbStore], touching: TouchedPartition, signs: Signs
) -> dict[int, Behind]:
    """The partitions whose stores have no room. Their workers go on with that. Raises StoreFull if they cannot."""
    attached = {}
    for partition, store in opened.items():
        touching.set(partition)
        if (at := position(store)) is not None:
            attached[partition] = log_of_partition(store.path, at)
    if attached:
        log.info("the broker was not stopped; bringing its stores up to date from their logs", partitions=[*attached])
    began = time.monotonic()
    torn, behind = detach(opened, touching.set, signs)
    for each in torn:
        log.warning("the log ends with a turn that is torn or damaged", found=each)
    for partition, found in behind.items():
        own = log_directory(settings.data_dir, partition % settings.workers_here)
        if attached[partition] != own:
            raise StoreFull(
                f"{found.problem}: the partition has its latest changes in {attached[partition]}, and cannot go on "
                f"with {own} until there is room for them"
            )
        log.error("the store has no room for what its log has; its worker keeps that", partition=partition)
    if attached:
        log.info("stores are up to date", seconds=round(time.monotonic() - began, 3), without_room=[*behind])
    return behind


def _opened(settings: Settings, partition: int, signs: Signs, *, is_known: bool) -> LmdbStore:
    path, size = partition_path(settings.data_dir, partition), settings.store.map_size_bytes
    try:
        return LmdbStore(
            path, partition_id=partition, map_size_bytes=size, create=not is_known, attached=True, signs=signs
        )
    except StoreMissing as error:
        text = f"{error}, but it has been made. Put it back, or a copy of it from a backup"
        if partition != HOME:
            text += (
                f'. To go on with an empty one, without its messages, remove {partition} from "stores" in '
                f"{settings.data_dir / DESCRIPTION_FILE}"
            )
        raise StoreDamaged(text) from error


def _known_stores(
    settings: Settings, left_out: frozenset[int], touching: TouchedPartition, signs: Signs
) -> frozenset[int]:
    """The partitions whose stores have been made, as far as the data directory knows it. Raises StoreError."""
    description = read_description(settings.data_dir)
    assert description is not None
    if description.stores is not None:
        return frozenset(description.stores)
    known: set[int] = set()
    for worker, directory in logs(settings.data_dir):
        with suppress(LogDamaged):  # a part that needs it finds it again
            known.update(LogOnDisk(directory, worker, signs).tables.positions)
    for partition in description.here:
        path = partition_path(settings.data_dir, partition)
        if partition not in left_out and (path / DATA_FILE).exists():
            touching.set(partition)
            known.update(_homes(path))
            signs.beat()
    return frozenset(known.intersection(description.here))


def _homes(path: Path) -> set[int]:
    """The partitions that entities live on, by the definitions in one store."""
    try:
        with TablesSnapshot(path) as snapshot:
            documents = [decode_document(value) for _, value in snapshot.items(Table.ENTITIES)]
    except (StoreError, CorruptRecord):  # a part that needs it finds it again, or nothing was committed yet
        return set()
    return {each for document in documents for each in document.get("partitions", ())}


class _Watched:
    """A store. Each access first notes its partition, and is a sign of life."""

    def __init__(self, store: Store, partition: int, touching: TouchedPartition, signs: Signs) -> None:
        self._store = store
        self._partition = partition
        self._touching = touching
        self._signs = signs

    def __getattr__(self, name: str) -> Any:
        self._touching.set(self._partition)
        self._signs.beat()
        return getattr(self._store, name)
