"""Brings the tables of partitions up to date from the logs that have their latest changes.

Everything here can be repeated: a turn that is in the tables already changes nothing when it is applied again together
with all turns after it, and one commit applies them all.

A partition that is damaged is left out when the others are brought up, and the log goes on without it. So before that,
its worker's log is copied to the partition's directory (`keep_log`). If the partition comes back with the same tables,
it is brought up from that copy.

A damaged log that no partition needs any more is put aside under another name (`put_aside`).
"""

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from storage.durable import sync_directory, sync_file
from storage.lmdb_store import LmdbStore
from storage.log.changes import Layer
from storage.log.frames import CorruptFrame, decode_turn
from storage.log.reading import LogDamaged, LogEnd, LogOnDisk
from storage.log.tables import LogPosition, position, write_net_effect, write_position
from storage.store import StoreError

LOGS = "logs"
KEPT_LOGS = "logs"  # in a partition's directory, by worker
ASIDE = "damaged"


def log_directory(data_directory: Path, worker: int) -> Path:
    return data_directory / LOGS / str(worker)


def log_of_partition(path: Path, at: LogPosition) -> Path:
    """The directory of the log that has the latest changes of the partition at `path`."""
    kept = _kept_log(path, at.worker)
    return kept if kept.exists() else log_directory(path.parent.parent, at.worker)


class Young:
    """What the log of one worker has for some of its partitions, and their tables have not."""

    def __init__(
        self,
        log: LogOnDisk,
        positions: Mapping[int, LogPosition],
        paths: Mapping[int, Path],
        works_on: Callable[[int], None] = lambda partition: None,
    ) -> None:
        """Raises LogDamaged if any turn is missing that one of the partitions may need; StoreError.

        `works_on` was called with a partition that does not fit the log, or with the first if the log is damaged.
        """
        after: dict[int, int] = {}
        for partition, at in positions.items():
            works_on(partition)
            path = paths[partition]
            if at.log_id != log.log_id:
                raise LogDamaged(f"{log.directory}: is not the log that has the latest changes of {path}")
            known = log.tables.positions.get(partition)
            if known is None:  # attached since, or left out since
                after[partition] = at.lsn
                continue
            if at.lsn < known:
                raise LogDamaged(
                    f"{path}: has the turns up to {at.lsn}, but {log.directory} knows that it had those up to {known}; "
                    "it is an older copy"
                )
            after[partition] = max(at.lsn, log.tables.lsn)
        if positions:
            works_on(min(positions))  # the home first: without it, nobody needs to look at the others
        self.layers = {partition: Layer() for partition in positions}
        for frame in log.turns(min(after.values(), default=log.tables.lsn)):
            try:
                _, changes, _ = decode_turn(frame.payload)
            except CorruptFrame as error:
                raise LogDamaged(f"{log.directory}: turn {frame.lsn}: {error}") from error
            for partition, operations in changes:
                if partition in after and frame.lsn > after[partition]:
                    self.layers[partition].apply(operations)
        assert log.end is not None
        self.end: LogEnd = log.end
        for partition, at in positions.items():
            works_on(partition)
            if at.lsn > self.end.lsn:
                raise LogDamaged(
                    f"{log.directory}: ends with turn {self.end.lsn}, but {paths[partition]} has the turns up to "
                    f"{at.lsn}; the log is an older copy"
                )


def bring_up(
    log: LogOnDisk, stores: Mapping[int, LmdbStore], *, leave: bool, works_on: Callable[[int], None]
) -> LogEnd:
    """Apply to the attached ones of these stores, by partition, what this log has for them; one commit for each.

    `leave`: detach them from it. `works_on` is called before each is changed. Raises LogDamaged, StoreError.
    """
    positions = {partition: at for partition, store in stores.items() if (at := position(store)) is not None}
    young = Young(log, positions, {partition: store.path for partition, store in stores.items()}, works_on)
    log.sync()  # before the tables, or later turns, say that this is done
    for partition, at in positions.items():
        works_on(partition)
        store = stores[partition]
        write_net_effect(store, young.layers[partition].net_effect())
        write_position(store, None if leave else at._replace(lsn=young.end.lsn))
        store.commit()
    return young.end


def detach(stores: Mapping[int, LmdbStore], works_on: Callable[[int], None]) -> None:
    """Bring all these stores up to date from their logs, and detach them. All their workers have ended.

    Raises LogDamaged, StoreError; `works_on` was called with a partition that needs the damaged log.
    """
    attached: dict[tuple[Path, int], dict[int, LmdbStore]] = {}
    for partition, store in stores.items():
        works_on(partition)
        at = position(store)
        if at is not None:
            attached.setdefault((log_of_partition(store.path, at), at.worker), {})[partition] = store
    for (directory, worker), of_log in attached.items():
        works_on(min(of_log))
        bring_up(LogOnDisk(directory, worker), of_log, leave=True, works_on=works_on)
    for store in stores.values():
        shutil.rmtree(store.path / KEPT_LOGS, ignore_errors=True)


def keep_log(directory: Path, worker: int, partition: int, path: Path) -> None:
    """Copy a worker's log for a partition at `path` that is left out, if the log may have changes of it.

    Raises StoreError.
    """
    kept = _kept_log(path, worker)
    partial = kept.with_name(f"{kept.name}.partial")
    try:
        if kept.exists() or not path.exists() or partition not in LogOnDisk(directory, worker).tables.positions:
            return
    except LogDamaged:
        pass  # it is kept as it is
    try:
        shutil.rmtree(partial, ignore_errors=True)
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.copytree(directory, partial)
        for file in partial.iterdir():
            sync_file(file)
        sync_directory(partial)
        partial.rename(kept)
        sync_directory(kept.parent)
        sync_directory(path)
    except OSError as error:
        raise StoreError(f"{directory}: the log cannot be kept for {path}: {error}") from error


def put_aside(directory: Path) -> Path:
    """Give a damaged log another name, under which no worker looks for it; returns that. Raises OSError."""
    names = (f"{directory.name}.{ASIDE}-{number}" for number in itertools.count(1))
    aside = next(path for name in names if not (path := directory.with_name(name)).exists())
    directory.rename(aside)
    sync_directory(directory.parent)
    return aside


def _kept_log(path: Path, worker: int) -> Path:
    return path / KEPT_LOGS / str(worker)


def logs(data_directory: Path) -> Iterator[tuple[int, Path]]:
    """The workers that have a log, and its directory."""
    directory = data_directory / LOGS
    if directory.exists():
        for path in directory.iterdir():
            if path.name.isdecimal():
                yield int(path.name), path
