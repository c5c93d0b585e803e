"""What captured rows say as a whole, before any message is looked at: where each partition is cut, and what is missing.

The cut is a time. In each partition it is before the first row that is later. Partitions are not cut at one instant,
so three things are found out here that only several partitions together know:

- *Forwarding.* A partition that takes over messages of another one says up to which number, in a row `takenOver`. A
  message is at its destination if that row is before the cut there, and else where it came from, whatever the rows of
  its origin say. So it is in one of the two.
- *Moves.* An entity that is moved to another partition is in both for a while. It is where the latest row before the
  cut shows it in use, and only that partition's messages of it count.
- *Numbers.* The highest sequence numbers, of all captured rows: clients have seen those behind the cut, too.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from storage.capture.manifest import Position
from storage.capture.reading import CapturedRange
from storage.records import PARTITION_SHIFT

SLICE_ROWS: Final = 256 << 10  # read at once, without bodies: 300 bytes each
MOVED: Final = "moved"
_COPIES: Final = "/subscriptions/"


class Rows(Protocol):
    """What is read of a capture: see `storage.capture.reading.Captured`."""

    def ranges(self) -> list[CapturedRange]: ...

    def batches(
        self, partition: int, epoch: str, first: int, end: int, *, records: bool = True
    ) -> Iterator[pa.RecordBatch]: ...


class QueueName(NamedTuple):
    """Of one queue of an entity, in lower case."""

    entity: str
    sub_queue: str


class Mark(NamedTuple):
    """The highest number that a partition has taken over from a queue, and when it said so."""

    number: int
    time_ms: int


@dataclass(slots=True)
class Cut:
    """What is known of one partition: the offsets first <= offset < end of `ranges`, of which those below `end` are
    before the cut."""

    partition: int
    epoch: str
    ranges: list[CapturedRange]
    end: int
    rows: int = 0  # before the cut
    last: datetime | None = None  # the time of the last of them

    def before(self) -> list[CapturedRange]:
        """The parts of the ranges that are before the cut."""
        return [each._replace(end=min(each.end, self.end)) for each in self.ranges if each.first < self.end]


@dataclass(slots=True)
class Survey:
    cuts: dict[int, Cut] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # what is not known, for users
    highest: dict[tuple[int, QueueName], int] = field(default_factory=dict)  # by partition; the highest number
    marks: dict[tuple[QueueName, int], Mark] = field(default_factory=dict)  # by the partition that has taken over
    # By partition, of topics that published messages at once: how many numbers they have given out.
    given: Counter[tuple[int, QueueName]] = field(default_factory=Counter)
    homes: dict[str, int] = field(default_factory=dict)  # by `family_of`: the partition of an entity that has but one

    def next_number(self, queue: QueueName, partitions: Iterable[int]) -> int:
        """Above all numbers that the queue had on these partitions; 1 if it is not in the rows."""
        return 1 + max((self.highest.get((each, queue), 0) for each in partitions), default=0)

    def next_of_topic(self, topic: QueueName, partitions: Iterable[int], first: int) -> int:
        """The same for a topic, whose numbers from `first` on are mostly of messages that were never in its queue."""
        return first + sum(self.given[each, topic] for each in partitions)


def family_of(entity: str) -> str:
    """The queue or topic that moves as a whole, in lower case."""
    return entity.lower().partition(_COPIES)[0]


@dataclass(slots=True)
class _Residence:
    """When the rows of a partition show that a family is there, milliseconds; -1 for never."""

    used: int = -1
    came: int = -1  # it was copied there from another partition
    left: int = -1


def survey(captured: Rows, until: datetime | None, advance: Callable[[int], object] = lambda rows: None) -> Survey:
    """Read the ledger once. `until`: with a time zone; None is the end of what is captured. `advance` is told of rows.

    Needs memory for SLICE_ROWS and for what there is of each queue. Raises DamagedFile, OSError.
    """
    found = Survey()
    for partition, cut in sorted(_newest(captured, until, found.missing).items()):
        found.cuts[partition] = cut
    surveying = _Surveying(found, until, advance)
    for cut in found.cuts.values():
        surveying.partition(captured, cut)
    surveying.finish()
    return found


def _newest(captured: Rows, until: datetime | None, missing: list[str]) -> dict[int, Cut]:
    """Of each partition the epoch that began last before the cut."""
    by_position: dict[Position, list[CapturedRange]] = defaultdict(list)
    for each in captured.ranges():
        by_position[each.partition, each.epoch].append(each)
    begun: dict[int, list[tuple[datetime, str]]] = defaultdict(list)
    for (partition, epoch), ranges in by_position.items():
        first = _first_time(captured, ranges[0])
        if until is None or first <= until:
            begun[partition].append((first, epoch))
    cuts = {}
    for partition, epochs in begun.items():
        *others, (first, epoch) = sorted(epochs)
        ranges = by_position[partition, epoch]
        cuts[partition] = Cut(partition, epoch, ranges, ranges[-1].end)
        missing += [
            f"partition {partition}: its journal began anew at {_shown(first)} (epoch {epoch}); what the partition had "
            f"then is not in it, and epoch {other} is not used"
            for _, other in others
        ]
    return cuts


def _first_time(captured: Rows, each: CapturedRange) -> datetime:
    [batch] = captured.batches(each.partition, each.epoch, each.first, each.first + 1, records=False)
    time: datetime = batch.column("eventTime")[0].as_py()
    return time


def slices(each: CapturedRange, rows: int) -> Iterable[tuple[int, int]]:
    """The offsets first <= offset < end of pieces of a range."""
    for first in range(each.first, each.end, rows):
        yield first, min(first + rows, each.end)


class _Surveying:
    def __init__(self, found: Survey, until: datetime | None, advance: Callable[[int], object]) -> None:
        self._advance = advance
        self._found = found
        self._until = until
        self._first: dict[tuple[int, QueueName], int] = {}  # the lowest number that entered, by partition
        self._residences: dict[str, dict[int, _Residence]] = defaultdict(lambda: defaultdict(_Residence))

    def partition(self, captured: Rows, cut: Cut) -> None:
        is_over = False
        for each in cut.ranges:
            for first, end in slices(each, SLICE_ROWS):
                for batch in captured.batches(cut.partition, cut.epoch, first, end, records=False):
                    self._numbers(cut.partition, batch)
                    self._advance(len(batch))
                    if not is_over:
                        before = self._before(batch)
                        is_over = len(before) < len(batch)
                        if is_over:
                            cut.end = batch.column("journalOffset")[len(before)].as_py()
                        self._look(cut, before)
        end = 0
        for each in cut.before():
            if each.first > end:
                where = f"partition {cut.partition}, epoch {cut.epoch}"
                self._found.missing.append(f"{where}: the offsets {end} to {each.first - 1} are not captured")
            end = each.end

    def _before(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._until is None:
            return batch
        later = pc.index(pc.greater(batch.column("eventTime"), pa.scalar(self._until, _TIME)), True).as_py()
        return batch if later < 0 else batch.slice(0, later)

    def _numbers(self, partition: int, batch: pa.RecordBatch) -> None:
        highest = self._found.highest
        for entity, sub_queue, number in _by_queue(batch, "max"):
            key = partition, QueueName(entity.lower(), sub_queue)
            highest[key] = max(highest.get(key, 0), number)
        op, is_of_topic = batch.column("op"), pc.equal(batch.column("subQueue"), "active")
        gives = pc.or_(
            pc.and_(pc.is_in(op, _ENTERING), is_of_topic),
            pc.and_(pc.equal(op, "published"), pc.is_null(batch.column("sequenceNumber"))),
        )
        for each in pc.value_counts(batch.column("entity").filter(gives)).to_pylist():
            if each["values"] is not None:
                self._found.given[partition, QueueName(each["values"].lower(), "active")] += each["counts"]

    def _look(self, cut: Cut, batch: pa.RecordBatch) -> None:
        if not len(batch):
            return
        cut.rows += len(batch)
        cut.last = batch.column("eventTime")[-1].as_py()
        op, reason = batch.column("op"), pc.fill_null(batch.column("reason"), "")
        for row in batch.filter(pc.is_in(op, pa.array(["truncated", "takenOver"]))).to_pylist():
            if row["op"] == "truncated":
                self._found.missing.append(
                    f"partition {cut.partition}, epoch {cut.epoch}: the journal has a gap before offset "
                    f"{row['journalOffset']}: {row['description']}"
                )
            elif row["originEntity"] is not None:
                self._mark(cut.partition, row)
        is_moved = pc.equal(reason, MOVED)
        comes = pc.and_(pc.is_in(op, _ENTERING), is_moved)
        entering = pc.and_(pc.is_in(op, _ENTERING), pc.invert(comes))
        entering = pc.and_(entering, pc.not_equal(reason, "restored"))
        for entity, sub_queue, number in _by_queue(batch.filter(entering), "min"):
            key = cut.partition, QueueName(entity.lower(), sub_queue)
            self._first[key] = min(self._first.get(key, number), number)
        # A move also changes what has come already.
        comes = pc.or_(pc.or_(comes, pc.equal(op, "changed")), pc.and_(pc.equal(op, "stateSet"), is_moved))
        goes = pc.or_(pc.equal(op, MOVED), pc.and_(pc.equal(op, "stateCleared"), is_moved))
        self._residence(cut.partition, batch, comes, goes)

    def _mark(self, partition: int, row: dict[str, Any]) -> None:
        key = QueueName(row["originEntity"].lower(), row["originSubQueue"]), partition
        self._found.marks[key] = Mark(row["originSequenceNumber"], to_ms(row["eventTime"]))

    def _residence(self, partition: int, batch: pa.RecordBatch, comes: pa.Array, goes: pa.Array) -> None:
        for what, rows in (
            ("used", pc.invert(pc.or_(pc.or_(comes, goes), _is_no_use(batch)))),
            ("came", comes),
            ("left", goes),
        ):
            if what != "used" and not pc.any(rows).as_py():
                continue
            found = pa.table([batch.filter(rows).column(name) for name in ("entity", "eventTime")], ["entity", "time"])
            for each in found.group_by("entity", use_threads=False).aggregate([("time", "max")]).to_pylist():
                if each["entity"] is not None:
                    residence = self._residences[family_of(each["entity"])][partition]
                    setattr(residence, what, max(getattr(residence, what), to_ms(each["time_max"])))

    def finish(self) -> None:
        for family, residences in self._residences.items():
            self._found.homes[family] = _home(residences)
        self._found.missing += self._late()

    def _late(self) -> Iterable[str]:
        """Queues that had messages before the first row."""
        first: dict[tuple[int, QueueName], int] = {}
        for (partition, queue), number in self._first.items():
            fragment = number >> PARTITION_SHIFT
            key = (partition if fragment else -1, queue)
            first[key] = min(first.get(key, number), number)
        topics = {family_of(queue.entity) for _, queue in first if _COPIES in queue.entity}
        for (_, queue), number in sorted(first.items()):
            before = (number & (1 << PARTITION_SHIFT) - 1) - 1
            # A topic's numbers are also those of messages that were published at once, and never in its queue.
            if before > 0 and queue.entity not in topics:
                yield (
                    f"{queue.entity} ({queue.sub_queue}): the {before} messages with numbers below {number} were there "
                    "before the journal began, and may be there still"
                )


_TIME: Final = pa.timestamp("us", tz="UTC")
_ENTERING: Final = pa.array(["enqueued", "scheduled"])


def _is_no_use(batch: pa.RecordBatch) -> pa.Array:
    """Rows that come also of an entity that is elsewhere."""
    op, reason = batch.column("op"), pc.fill_null(batch.column("reason"), "")
    return pc.or_(pc.equal(op, "takenOver"), pc.and_(pc.equal(op, "stateCleared"), pc.equal(reason, "deleted")))


def _by_queue(batch: pa.RecordBatch, what: str) -> Iterable[tuple[str, str, int]]:
    """Entity, sub-queue, and the `min` or `max` of the numbers."""
    names = ["entity", "subQueue", "sequenceNumber"]
    found = pa.table([batch.column(name) for name in names], names)
    grouped = found.group_by(names[:2], use_threads=False).aggregate([("sequenceNumber", what)])
    for entity, sub_queue, number in zip(
        *(grouped.column(name).to_pylist() for name in (*names[:2], f"sequenceNumber_{what}")), strict=True
    ):
        if entity is not None and number is not None:
            yield entity, sub_queue, number


def _home(residences: dict[int, _Residence]) -> int:
    """Where a family is: where it was used last, unless it has left since; else where it has come last."""
    stays = {partition: each for partition, each in residences.items() if each.left <= each.used}
    if stays:
        return max(stays, key=lambda partition: stays[partition].used)
    return max(residences, key=lambda partition: residences[partition].came)


def to_ms(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(milliseconds=1)


def _shown(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
