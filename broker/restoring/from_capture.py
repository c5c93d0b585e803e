"""Restores a data directory from a capture with bodies: for when the machine and its disks are gone.

The steps are those of `storage.capture.sifting`; the last one rebuilds the store of each partition. Several processes
do their units, and what is done stays done: the same command goes on after a kill.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from broker.restoring.crew import Crew
from broker.restoring.definitions import Definitions
from broker.restoring.duplicates import Windows
from broker.restoring.steps import Files, Rebuilding, Steps
from broker.settings.config import Settings
from storage.capture.cutting import cuts
from storage.capture.manifest import DataFile, TableName
from storage.capture.place import Place
from storage.capture.reading import Captured, overlapping
from storage.capture.rebuilding import Rebuilt
from storage.capture.sifting import Sieve, Work
from storage.capture.survey import Cut, Survey, survey, to_us
from storage.data_dir import Description
from storage.maintenance import MaintenanceError, new_data_directory
from storage.wording import counted, plural

PLAN_VERSION: Final = 1  # of what units write down; an earlier one's are done anew
SMALL_BYTES: Final = 32 << 20  # of files: to read them takes as long as to start a process
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
    """`until`: the time of the cut, None is the end of what is captured. `since`: messages that were enqueued since,
    None for all. `allows_gaps`: restore what is known.

    `owned`: these partitions only, for a worker of several machines; all, if it is empty. `entities`: names of queues
    and topics; all, if it is empty.
    """

    until: datetime | None = None
    allows_gaps: bool = False
    owned: tuple[int, ...] = ()
    since: datetime | None = None
    entities: tuple[str, ...] = ()


def restore(
    url: str,
    data_directory: Path,
    settings: Settings,
    wishes: Wishes,
    now_ms: int,
    *,
    processes: int | None = None,
    expect: Callable[[int], object] = lambda rows: None,
    advance: Callable[[int], object] = lambda rows: None,
) -> Restored:
    """Write the data directory, which is missing or empty, or go on where an earlier call was ended. `settings` have
    the size of stores, and the entities if the capture has none. `processes`: None for one for each processor,
    but for a small capture, for which they are not worth their start.

    `expect` and `advance` are told of rows. Raises CaptureError, MaintenanceError, DataDirectoryError,
    ConfigurationError, StoreError, OSError.
    """
    place = Place.of(url)
    captured = Captured(place)
    if captured.namespace is None:
        raise NothingCaptured(f"{place.url}: nothing was captured there")
    captured.require_complete()
    found = _definitions(place, captured.namespace, settings, wishes.until, now_ms)
    if wishes.entities:
        found = found.only(wishes.entities)
    begun, missing = cuts(place, captured, wishes.until)
    if not begun:
        raise NothingCaptured(f"{place.url}: nothing was captured up to {wishes.until}")
    if max(begun) >= found.partitions:
        raise DoesNotFit(
            f"the capture has rows of partition {max(begun)}, and {found.source} says that there are "
            f"{counted(found.partitions, 'partition')}"
        )
    owned = tuple(sorted(set(wishes.owned)))
    if owned and owned[-1] >= found.partitions:
        raise DoesNotFit(
            f"there is no partition {owned[-1]}: {found.source} says that there are {found.partitions} partitions"
        )
    description = Description(found.partitions, owned=owned)
    files = Files(captured.files(TableName.LEDGER), captured.files(TableName.MESSAGES))
    expect(files.rows)
    if processes is None:
        processes = 1 if files.bytes < SMALL_BYTES else _processors()
    with new_data_directory(data_directory, description) as folder, Crew(processes, advance) as crew:
        now_ms = _taken_up(folder, _plan(captured, found, wishes), now_ms)
        sieve = _sieve(begun, found, wishes, now_ms)
        steps = Steps(url, sieve, folder)
        for _ in crew.each(steps.look_at, _with_overlaps(files.ledger, sieve)):
            pass
        surveyed = survey(begun, steps.seen(files.ledger), wishes.since, sieve.wants)
        surveyed.missing[:0] = missing
        if surveyed.missing and not wishes.allows_gaps:
            raise Incomplete(surveyed.missing)
        found = found.with_homes(surveyed.homes)
        here = [partition for partition in description.here if partition in begun]
        expect(sum(crew.each(steps.choose, [(partition, files.ledger) for partition in here])))
        for _ in crew.each(steps.fetch, [(file, here) for file in files.messages]):
            pass
        rebuilding = Rebuilding(sieve, surveyed, found, files, settings.store.map_size_bytes, now_ms, folder)
        rebuilding.begin()
        rebuilt = [*crew.each(rebuilding.partition, [(each,) for each in description.here])]
        restored = _restored(captured, found, surveyed, rebuilt)
        if len(restored.missing) > len(surveyed.missing) and not wishes.allows_gaps:
            raise Incomplete(restored.missing)
    return restored


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _plan(captured: Captured, found: Definitions, wishes: Wishes) -> dict[str, Any]:
    """Describe the restore: units that were done before count only if this is the same."""
    return {
        "version": PLAN_VERSION,
        "capture": captured.newest,
        "definitions": sha256(repr((found.partitions, found.entities, found.rules)).encode()).hexdigest(),
        "until": _text(wishes.until),
        "since": _text(wishes.since),
        "entities": sorted(map(str.lower, wishes.entities)),
        "owned": sorted(set(wishes.owned)),
    }


def _text(time: datetime | None) -> str | None:
    return None if time is None else time.astimezone(UTC).isoformat()


def _taken_up(folder: Path, plan: dict[str, Any], now_ms: int) -> int:
    """Keep what an earlier call has done, if it had this plan, and go on with its time, which is returned."""
    work = Work(folder)
    before = work.noted("plan")
    if before is not None and before["plan"] == plan:
        return int(before["now_ms"])
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    work.note("plan", {"plan": plan, "now_ms": now_ms})
    return now_ms


def _sieve(begun: Mapping[int, Cut], found: Definitions, wishes: Wishes, now_ms: int) -> Sieve:
    longest_ms = Windows(found.entities, {}, now_ms).longest_ms
    return Sieve(
        epochs={partition: cut.epoch for partition, cut in begun.items()},
        ends={partition: cut.end for partition, cut in begun.items()},
        entities=frozenset(map(str.lower, wishes.entities)) or None,
        since_us=None if wishes.since is None else to_us(wishes.since),
        ids_us=(now_ms - longest_ms) * 1000 if longest_ms else None,
    )


def _with_overlaps(ledger: Sequence[DataFile], sieve: Sieve) -> list[tuple[DataFile, bool]]:
    """Each file, and whether another one has offsets between its own."""
    runs = (run for position in sieve.epochs.items() for run in overlapping(ledger, *position) if len(run) > 1)
    others = {file.path for run in runs for file in run}
    return [(file, file.path in others) for file in ledger]


def _restored(
    captured: Captured, found: Definitions, surveyed: Survey, done: Sequence[tuple[int, Rebuilt, int]]
) -> Restored:
    assert captured.namespace is not None
    restored = Restored(captured.namespace, captured.namespace_id, found.source, len(done), len(found.entities))
    restored.missing += surveyed.missing
    for partition, rebuilt, ids in sorted(done, key=lambda each: each[0]):
        _tell(restored, partition, rebuilt)
        restored.duplicate_ids += ids
        if (cut := surveyed.cuts.get(partition)) is not None:
            restored.rows += cut.rows
            restored.until = max(cut.last or _LONG_AGO, restored.until or _LONG_AGO)
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


def _tell(restored: Restored, partition: int, rebuilt: Rebuilt) -> None:
    restored.messages += rebuilt.messages
    restored.bytes += rebuilt.bytes
    restored.states += rebuilt.states
    restored.taken_over += rebuilt.taken_over
    restored.put_back += rebuilt.put_back
    where = f"partition {partition}"
    if rebuilt.unknown:
        restored.missing.append(
            f"{where}: {counted(rebuilt.unknown, 'row is', 'rows are')} about messages that the rows before do not have"
        )
    restored.missing += [
        f"{where}: {counted(count, 'message')} of {path} {plural(count, 'is', 'are')} captured without "
        f"{plural(count, 'its body', 'their bodies')} (journal.mode must be bodies)"
        for path, count in sorted(rebuilt.without_body.items())
    ]
    restored.missing += [
        f"{where}: {counted(count, 'state of a session', 'states of sessions')} of {path} "
        f"{plural(count, 'is', 'are')} not captured (journal.mode must be bodies)"
        for path, count in sorted(rebuilt.without_state.items())
    ]
    restored.missing += [
        f"{where}: {counted(count, 'message')} of {path}, of which there is no definition"
        for path, count in sorted(rebuilt.undefined.items())
    ]
