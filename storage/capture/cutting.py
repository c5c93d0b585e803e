"""Where each partition is cut: before its first row that is later than a time."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from math import floor

import pyarrow.compute as pc

from storage.capture import files
from storage.capture.manifest import DataFile, Position
from storage.capture.place import Place
from storage.capture.reading import Captured, CapturedRange
from storage.capture.survey import Cut, to_us
from storage.capture.tables import HOUR_US


def cuts(place: Place, captured: Captured, until: datetime | None) -> tuple[dict[int, Cut], list[str]]:
    """Return for each partition the epoch that began last before the cut; and for users, what is missing for that.

    `until`: with a time zone; None is the end of what is captured. Raises DamagedFile, OSError.
    """
    by_position: dict[Position, list[CapturedRange]] = defaultdict(list)
    for each in captured.ranges():
        by_position[each.partition, each.epoch].append(each)
    begun: dict[int, list[tuple[datetime, str]]] = defaultdict(list)
    for (partition, epoch), ranges in by_position.items():
        first = _first_time(captured, ranges[0])
        if until is None or first <= until:
            begun[partition].append((first, epoch))
    later = {} if until is None else _first_later(place, captured.files(), to_us(until))
    found, missing = {}, []
    for partition, epochs in sorted(begun.items()):
        *others, (first, epoch) = sorted(epochs)
        ranges = by_position[partition, epoch]
        end = later.get((partition, epoch), ranges[-1].end)
        found[partition] = Cut(partition, epoch, ranges, end, first)
        missing += [
            f"partition {partition}: its journal began anew at {_shown(first)} (epoch {epoch}); what the partition had "
            f"then is not in it, and epoch {other} is not used"
            for _, other in others
        ]
    return found, missing


def _first_time(captured: Captured, each: CapturedRange) -> datetime:
    [batch] = captured.batches(*each[:3], each.first + 1, records=False, columns=["eventTime"])
    time: datetime = batch.column("eventTime")[0].as_py()
    return time


def _first_later(place: Place, ledger: Iterable[DataFile], until_us: int) -> dict[Position, int]:
    """The first offset of each partition and epoch that is later. Only files of the hour of the time are read."""
    hour = floor(until_us / HOUR_US)
    found: dict[Position, int] = {}

    def see(position: Position, offset: int) -> None:
        found[position] = min(offset, found.get(position, offset))

    for file in ledger:
        if file.hour > hour:
            for each in file.ranges:
                see(each.position, each.first)
        elif file.hour == hour:
            for group in files.groups(place, file):
                rows = group.read(["partition", "epoch", "journalOffset", "eventTime"])
                is_later = pc.greater(rows.column("eventTime").cast("int64"), until_us)
                by = rows.filter(is_later).group_by(["partition", "epoch"], use_threads=False)
                for row in by.aggregate([("journalOffset", "min")]).to_pylist():
                    see((row["partition"], row["epoch"]), row["journalOffset_min"])
    return found


def _shown(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
