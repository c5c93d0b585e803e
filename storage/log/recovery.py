"""Brings the tables of partitions up to date from the logs that have their latest changes.

Everything here can be repeated: a turn that is in the tables already changes nothing when it is applied again together
with all turns after it, and one commit applies them all.

Tables without room stay as they are, and attached to their log (`Behind`). The worker that goes on with that log has
in memory what they lack, as the worker had it that logged it.

A partition that is damaged is left out when the others are brought up, and the log goes on without it. So before that,
its worker's log is copied to the partition's directory (`keep_log`); or, if that is missing, beside the log, so that
the directory can be put back. If the partition comes back with the same tables, it is brought up from that copy.

A damaged log that no partition needs any more is put aside under another name (`put_aside`).
"""

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from storage.data_dir import LOGS
from storage.durable import sync_directory, sync_file
from storage.liveness import SILENT, Signs
from storage.lmdb_store import LmdbStore, store_error
from storage.log.changes import Layer
from storage.log.frames import FRAME_HEAD_BYTES, CorruptFrame, decode_turn, padded
from storage.log.reading import LogDamaged, LogEnd, LogOnDisk
from storage.log.tables import LogPosition, position, write_net_effect, write_position
from storage.store import StoreFull

KEPT_LOGS = "logs"  # in a partition's directory, by worker
ASIDE = "damaged"
_BESIDE = ".partition-"


def log_directory(data_directory: Path, worker: int) -> Path:
    return data_directory / LOGS / str(worker)


def log_of_partition(path: Path, at: LogPosition) -> Path:
    """The directory of the log that has the latest changes of the partition at `path`."""
    kept = next((each for each in _kept_logs(path, at.worker) if each.exists()), None)
    return log_directory(path.parent.parent, at.worker) if kept is None else kept


class Behind(NamedTuple):
    """A partition whose tables have no room for what its log has for them: the turns above `lsn`, in `log_bytes`.

    `layer` is what these have changed, `problem` says why there is no room.
    """

    layer: Layer
    lsn: int
    log_bytes: int
    problem: str


class BroughtUp(NamedTuple):
    end: LogEnd
    behind: dict[int, Behind]  # by partition; all others are up to date


class Detached(NamedTuple):
    torn: list[str]  # see `LogEnd`
    behind: dict[int, Behind]  # by partition: they stay attached


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
        self.after = after  # by partition: its tables need no turn up to this one
        self.log_bytes = dict.fromkeys(positions, 0)  # of the frames with later turns, which may be of others
        # Whom nobody needs may have been used again already, up to the newest segment.
        for frame in log.turns(min(after.values(), default=log.newest_lsn)):
            try:
                _, changes, _ = decode_turn(frame.payload)
            except CorruptFrame as error:
                raise LogDamaged(f"{log.directory}: turn {frame.lsn}: {error}") from error
            for partition, lsn in after.items():
                if frame.lsn > lsn:
                    self.log_bytes[partition] += padded(FRAME_HEAD_BYTES + len(frame.payload))
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
) -> BroughtUp:
    """Apply to the attached ones of these stores, by partition, what this log has for them; one commit for each.

    `leave`: detach them from it. `works_on` is called before each is changed. Raises LogDamaged, StoreError.
    """
    positions = {partition: at for partition, store in stores.items() if (at := position(store)) is not None}
    young = Young(log, positions, {partition: store.path for partition, store in stores.items()}, works_on)
    log.sync()  # before the tables, or later turns, say that this is done
    behind = {}
    for partition, at in positions.items():
        works_on(partition)
        store, layer = stores[partition], young.layers[partition]
        try:
            write_net_effect(store, layer.net_effect())
            write_position(store, None if leave else at._replace(lsn=young.end.lsn))
            store.commit()
        except StoreFull as error:
            behind[partition] = Behind(layer, young.after[partition], young.log_bytes[partition], str(error))
    return BroughtUp(young.end, behind)


def detach(stores: Mapping[int, LmdbStore], works_on: Callable[[int], None], signs: Signs = SILENT) -> Detached:
    """Bring all these stores up to date from their logs, and detach them. All their workers have ended.

    Raises LogDamaged, StoreError; `works_on` was called with a partition that needs the damaged log.
    """
    attached: dict[tuple[Path, int], dict[int, LmdbStore]] = {}
    for partition, store in stores.items():
        works_on(partition)
        at = position(store)
        if at is not None:
            attached.setdefault((log_of_partition(store.path, at), at.worker), {})[partition] = store
    torn, behind = [], {}
    for (directory, worker), of_log in attached.items():
        works_on(min(of_log))
        log = LogOnDisk(directory, worker, signs)
        found = bring_up(log, of_log, leave=True, works_on=works_on)
        torn.append(found.end.torn)
        behind.update(found.behind)
    for partition, store in stores.items():
        if partition in behind:
            continue
        shutil.rmtree(store.path / KEPT_LOGS, ignore_errors=True)
        for beside in store.path.parent.parent.glob(f"{LOGS}/*{_BESIDE}{store.path.name}"):
            shutil.rmtree(beside, ignore_errors=True)
    return Detached(list(filter(None, torn)), behind)


def keep_log(directory: Path, worker: int, partition: int, path: Path, signs: Signs = SILENT) -> None:
    """Copy a worker's log for a partition at `path` that is left out, if the log may have changes of it.

    Raises StoreError.
    """

    def copy(source: str, target: str) -> None:
        with signs.waiting_for_disk():
            shutil.copy2(source, target)
            sync_file(Path(target))

    within, beside = _kept_logs(path, worker)
    kept = within if path.exists() else beside
    partial = kept.with_name(f"{kept.name}.partial")
    try:
        if within.exists() or beside.exists():
            return
        if partition not in LogOnDisk(directory, worker, signs).tables.positions:
            return
    except LogDamaged:
        pass  # it is kept as it is
    try:
        shutil.rmtree(partial, ignore_errors=True)
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.copytree(directory, partial, copy_function=copy)
        with signs.waiting_for_disk():
            sync_directory(partial)
            partial.rename(kept)
            sync_directory(kept.parent)
            sync_directory(kept.parent.parent)
    except OSError as error:
        raise store_error(directory, f"the log cannot be kept for {path}", error) from error


def put_aside(directory: Path) -> Path:
    """Give a damaged log another name, under which no worker looks for it; returns that. Raises OSError."""
    names = (f"{directory.name}.{ASIDE}-{number}" for number in itertools.count(1))
    aside = next(path for name in names if not (path := directory.with_name(name)).exists())
    directory.rename(aside)
    sync_directory(directory.parent)
    return aside


def _kept_logs(path: Path, worker: int) -> tuple[Path, Path]:
    """Where a log is kept for the partition at `path`: in its directory, or if there was none, beside the log."""
    return path / KEPT_LOGS / str(worker), path.parent.parent / LOGS / f"{worker}{_BESIDE}{path.name}"


def logs(data_directory: Path) -> Iterator[tuple[int, Path]]:
    """The workers that have a log, and its directory."""
    directory = data_directory / LOGS
    if directory.exists():
        for path in directory.iterdir():
            if path.name.isdecimal():
                yield int(path.name), path
