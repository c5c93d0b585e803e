"""Restores a data directory from a capture with bodies: for when the machine and its disks are gone."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from broker.restoring.definitions import Definitions, entities_of
from broker.restoring.duplicates import Windows
from broker.settings.config import Settings
from storage.capture.manifest import TableName
from storage.capture.place import Place
from storage.capture.reading import Captured
from storage.capture.rebuilding import Rebuilder, Rebuilt
from storage.capture.survey import Survey, slices, survey
from storage.data_dir import Description, partition_path
from storage.findings import PartitionReport
from storage.lmdb_store import DATA_FILE, LmdbStore
from storage.maintenance import MaintenanceError, new_data_directory, verify_partition
from storage.store import Store

SLICE_BYTES: Final = 64 << 20  # of rows that are in memory at once
SLICE_ROWS: Final = 64 << 10
MAX_LISTED: Final = 50
_LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)


class NothingCaptured(MaintenanceError):
    """There is no row before the time."""


class NoDefinitions(MaintenanceError):
    """Neither the capture nor the configuration says which entities there are."""


class DoesNotFit(MaintenanceError):
    """The rows, or the wishes, are of more partitions than the definitions say that there are."""


class Incomplete(MaintenanceError):
    """The capture does not tell all that was there. `missing` says what."""

    def __init__(self, missing: Sequence[str]) -> None:
        listed = [*missing[:MAX_LISTED], *([f"and {len(missing) - MAX_LISTED} more"] if missing[MAX_LISTED:] else [])]
        super().__init__(
            "\n".join([*listed, "nothing was restored; --allow-gaps restores what is known"]),
        )
        self.missing = missing


class WronglyRebuilt(MaintenanceError):
    """What was written did not pass `verify`: a fault of this program, or of the disk."""


@dataclass
class Restored:
    """What was done, for the user. Texts are sorted."""

    namespace: str
    namespace_id: str | None  # of the broker that was captured, if it is known
    definitions: str  # where they come from
    partitions: int
    entities: int
    until: datetime | None = None  # the time of the last row
    rows: int = 0
    messages: Counter[tuple[str, str]] = field(default_factory=Counter)  # by entity, and by sub-queue and place
    bytes: int = 0
    states: int = 0  # of sessions
    duplicate_ids: int = 0
    taken_over: int = 0
    put_back: int = 0
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Wishes:
    """`until`: the time of the cut, None is the end of what is captured. `allows_gaps`: restore what is known.

    `owned`: these partitions only, for a worker of several machines; all, if it is empty.
    """

    until: datetime | None = None
    allows_gaps: bool = False
    owned: tuple[int, ...] = ()


def restore(
    url: str,
    data_directory: Path,
    settings: Settings,
    wishes: Wishes,
    now_ms: int,
    *,
    expect: Callable[[int], object] = lambda rows: None,
    advance: Callable[[int], object] = lambda rows: None,
) -> Restored:
    """Write the data directory, which is missing or empty. `settings` have the size of stores, and the entities if the
    capture has none.

    `expect` and `advance` are told of rows. Raises CaptureError, MaintenanceError, DataDirectoryError,
    ConfigurationError, StoreError, OSError.
    """
    place = Place.of(url)
    captured = Captured(place)
    if captured.namespace is None:
        raise NothingCaptured(f"{place.url}: nothing was captured there")
    found = _definitions(place, captured.namespace, settings, wishes.until, now_ms)
    expect(2 * sum(each.end - each.first for each in captured.ranges()))
    surveyed = survey(captured, wishes.until, advance)
    if not surveyed.cuts:
        raise NothingCaptured(f"{place.url}: nothing was captured up to {wishes.until}")
    if max(surveyed.cuts) >= found.partitions:
        raise DoesNotFit(
            f"the capture has rows of partition {max(surveyed.cuts)}, and {found.source} says that there are "
            f"{found.partitions} partitions"
        )
    owned = tuple(sorted(set(wishes.owned)))
    if owned and owned[-1] >= found.partitions:
        raise DoesNotFit(
            f"there is no partition {owned[-1]}: {found.source} says that there are {found.partitions} partitions"
        )
    if surveyed.missing and not wishes.allows_gaps:
        raise Incomplete(surveyed.missing)
    found = found.with_homes(surveyed.homes)
    description = Description(found.partitions, owned=owned)
    restored = Restored(
        captured.namespace, captured.namespace_id, found.source, len(description.here), len(found.entities)
    )
    restored.missing += surveyed.missing
    with new_data_directory(data_directory, description) as directory:
        with ExitStack() as stores:
            opened = {
                partition: stores.enter_context(
                    LmdbStore(
                        partition_path(directory, partition),
                        partition_id=partition,
                        map_size_bytes=settings.store.map_size_bytes,
                        create=True,
                    )
                )
                for partition in description.here
            }
            _rebuild(captured, surveyed, found, opened, restored, now_ms, advance)
        if len(restored.missing) > len(surveyed.missing) and not wishes.allows_gaps:
            raise Incomplete(restored.missing)
        for partition in opened:
            _verify(verify_partition(directory, partition))
            (partition_path(directory, partition) / DATA_FILE).chmod(0o600)
    return restored


def _definitions(place: Place, namespace: str, settings: Settings, until: datetime | None, now_ms: int) -> Definitions:
    found = Definitions.captured(place, namespace, until)
    if found is not None:
        return found
    if not (settings.queues or settings.topics):
        raise NoDefinitions(
            f"{place.url}: has no definitions of entities, because it was written by an earlier version; declare them "
            "in a configuration, and name it with --config"
        )
    return Definitions.declared(settings, now_ms)


def _rebuild(
    captured: Captured,
    surveyed: Survey,
    found: Definitions,
    stores: Mapping[int, Store],
    restored: Restored,
    now_ms: int,
    advance: Callable[[int], object],
) -> None:
    for store in stores.values():
        found.write(store)
    entities, windows = entities_of(found.entities), Windows(found.entities, stores, now_ms)
    rows_at_once = _rows_at_once(captured)
    for partition in sorted({*stores, *surveyed.cuts}):
        # Of others, too: entities that are here now may have been there, with their windows of duplicate detection.
        rebuilder = Rebuilder(stores[partition], partition, entities, surveyed) if partition in stores else None
        cut = surveyed.cuts.get(partition)
        for each in [] if cut is None else cut.before():
            for first, end in slices(each, rows_at_once):
                for batch in captured.batches(partition, each.epoch, first, end, records=rebuilder is not None):
                    if rebuilder is not None:
                        rebuilder.add(batch)
                    windows.add(partition, batch)
                    advance(len(batch))
        if rebuilder is None:
            continue
        if cut is not None:
            restored.rows += cut.rows
            restored.until = max(cut.last or _LONG_AGO, restored.until or _LONG_AGO)
        _tell(restored, partition, rebuilder.finish())
    for store in stores.values():
        store.commit()
    restored.duplicate_ids = windows.ids


def _rows_at_once(captured: Captured) -> int:
    """So many that rows of the usual size take SLICE_BYTES."""
    files = captured.files(TableName.MESSAGES)
    row_bytes = sum(each.memory_bytes for each in files) // max(1, sum(each.rows for each in files)) + 1
    return max(1, min(SLICE_ROWS, SLICE_BYTES // row_bytes))


def _tell(restored: Restored, partition: int, rebuilt: Rebuilt) -> None:
    restored.messages += rebuilt.messages
    restored.bytes += rebuilt.bytes
    restored.states += rebuilt.states
    restored.taken_over += rebuilt.taken_over
    restored.put_back += rebuilt.put_back
    where = f"partition {partition}"
    if rebuilt.unknown:
        restored.missing.append(
            f"{where}: {rebuilt.unknown} rows are about messages that the rows before them do not have"
        )
    restored.missing += [
        f"{where}: {count} messages of {path} are captured without their bodies (journal.mode must be bodies)"
        for path, count in sorted(rebuilt.without_body.items())
    ]
    restored.missing += [
        f"{where}: {count} states of sessions of {path} are not captured (journal.mode must be bodies)"
        for path, count in sorted(rebuilt.without_state.items())
    ]
    restored.missing += [
        f"{where}: {count} messages of {path}, of which there is no definition"
        for path, count in sorted(rebuilt.undefined.items())
    ]


def _verify(report: PartitionReport) -> None:
    if not report.ok:
        raise WronglyRebuilt(
            f"partition {report.partition}: {report.problems.total()} problems in what was written, the first of them: "
            f"{report.findings[0].text}"
        )
