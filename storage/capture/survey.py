"""What captured rows say as a whole, before any message is looked at: where each partition is cut, and what is missing.

The cut is a time. In each partition it is before the first row that is later. Partitions are not cut at one instant,
so three things are found out here that only several partitions together know:

- *Forwarding.* A partition that takes over messages of another one says up to which number, in a row `takenOver`. A
  message is at its destination if that row is before the cut there, and else where it came from, whatever the rows of
  its origin say. So it is in one of the two.
- *Moves.* An entity that is moved to another partition is in both for a while. It is where the latest row before the
  cut shows it in use, and only that partition's messages of it count.
- *Numbers.* The highest sequence numbers, of all captured rows: clients have seen those behind the cut, too.

Rows are looked at in any order and by any process (`Look`); what was seen adds up to a `Survey`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc

from storage.capture.columns import ENTERS, coded, is_one_of, one
from storage.capture.reading import CapturedRange
from storage.records import PARTITION_SHIFT
from storage.wording import plural

MOVED: Final = "moved"
COLUMNS: Final = (
    "partition", "journalOffset", "eventTime", "op", "entity", "subQueue", "sequenceNumber", "reason", "description",
    "originEntity", "originSubQueue", "originSequenceNumber",
)  # fmt: skip
_COPIES: Final = "/subscriptions/"


class QueueName(NamedTuple):
    """The name of one queue of an entity, in lower case."""

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
    begins: datetime  # the time of the first row
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


# -- some rows

_NEVER: Final = -1


@dataclass(slots=True)
class OfQueue:
    """What rows say of one queue on one partition. Times in microseconds since 1970, -1 for never.

    The last three are those when rows show its entity there: in use, copied there from another partition, and gone.
    """

    partition: int
    entity: str | None
    sub_queue: str | None
    highest: int | None = None  # the highest number
    first: int | None = None  # the lowest number of those that entered, but for moved and restored messages
    given: int = 0
    used_us: int = _NEVER
    came_us: int = _NEVER
    left_us: int = _NEVER

    def add(self, other: "OfQueue") -> None:
        self.highest = _of_both(max, self.highest, other.highest)
        self.first = _of_both(min, self.first, other.first)
        self.given += other.given
        self.used_us = max(self.used_us, other.used_us)
        self.came_us = max(self.came_us, other.came_us)
        self.left_us = max(self.left_us, other.left_us)


def _of_both(choose: Any, one: int | None, other: int | None) -> int | None:
    found: int | None = choose((each for each in (one, other) if each is not None), default=None)
    return found


@dataclass(slots=True)
class Look:
    """What some rows say. Those of one queue are in `queues` once."""

    queues: dict[tuple[int, str | None, str | None], OfQueue] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=Counter)  # rows before the cut, by partition
    last: dict[int, tuple[int, int]] = field(default_factory=dict)  # offset and time, us, of the last of these
    marks: list[list[Any]] = field(default_factory=list)  # offset, partition, entity, sub-queue, number, time in us
    truncated: list[list[Any]] = field(default_factory=list)  # partition, offset, description, time in us

    def add(self, other: "Look") -> None:
        for key, each in other.queues.items():
            if (known := self.queues.get(key)) is None:
                self.queues[key] = each
            else:
                known.add(each)
        for partition, rows in other.before.items():
            self.before[partition] = self.before.get(partition, 0) + rows
        for partition, last in other.last.items():
            self.last[partition] = max(last, self.last.get(partition, last))
        self.marks += other.marks
        self.truncated += other.truncated

    def document(self) -> dict[str, Any]:
        """Return plain values, for JSON and the like."""
        return {
            "queues": [asdict(each) for each in self.queues.values()],
            "before": [*self.before.items()],
            "last": [[partition, *last] for partition, last in self.last.items()],
            "marks": self.marks,
            "truncated": self.truncated,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        queues = [OfQueue(**each) for each in document["queues"]]
        return cls(
            {(each.partition, each.entity, each.sub_queue): each for each in queues},
            dict(document["before"]),
            {partition: (offset, time_us) for partition, offset, time_us in document["last"]},
            document["marks"],
            document["truncated"],
        )


def look(rows: pa.Table | pa.RecordBatch, is_before: pa.Array | None = None) -> Look:
    """Look at rows with COLUMNS, of one epoch of each partition.

    `is_before`: of each row, whether it is before the cut; None if all are.
    """
    found = Look()
    if not len(rows):
        return found
    column = {name: one(rows.column(name)) for name in COLUMNS}
    queue, names = coded([column[name] for name in ("partition", "entity", "subQueue")])
    time_us = column["eventTime"].cast(pa.int64())
    before = pa.repeat(pa.scalar(True), len(rows)) if is_before is None else is_before
    op, reason = column["op"], column["reason"]
    enters, is_moved = is_one_of(op, ENTERS), is_one_of(reason, [MOVED])
    gives = pc.or_(
        pc.and_(enters, is_one_of(column["subQueue"], ["active"])),
        pc.and_(is_one_of(op, ["published"]), pc.is_null(column["sequenceNumber"])),
    )
    is_first = pc.and_(pc.and_(enters, before), pc.invert(is_one_of(reason, [MOVED, "restored"])))
    # A move also changes what has come already.
    comes = pc.or_(pc.and_(is_moved, is_one_of(op, [*ENTERS, "stateSet"])), is_one_of(op, ["changed"]))
    goes = pc.or_(is_one_of(op, [MOVED]), pc.and_(is_moved, is_one_of(op, ["stateCleared"])))
    # Rows that come also of an entity that is elsewhere.
    no_use = pc.or_(
        is_one_of(op, ["takenOver"]), pc.and_(is_one_of(op, ["stateCleared"]), is_one_of(reason, ["deleted"]))
    )
    uses = pc.invert(pc.or_(pc.or_(comes, goes), no_use))

    def where(condition: pa.Array, values: pa.Array) -> pa.Array:
        return pc.if_else(condition, values, pa.scalar(None, values.type))

    number = column["sequenceNumber"]
    wanted = pa.table(
        {
            "queue": queue,
            "before": before.cast(pa.int64()),
            "number": number,
            "entered": where(is_first, number),
            "gives": gives.cast(pa.int64()),
            "used": where(pc.and_(uses, before), time_us),
            "came": where(pc.and_(comes, before), time_us),
            "left": where(pc.and_(goes, before), time_us),
            "offset": where(before, column["journalOffset"]),
        }
    )
    measures = [
        ("number", "max"), ("entered", "min"), ("gives", "sum"), ("used", "max"), ("came", "max"),
        ("left", "max"), ("before", "sum"), ("offset", "max"),
    ]  # fmt: skip
    grouped = wanted.group_by("queue", use_threads=False).aggregate(measures).to_pylist()
    ends: dict[int, int] = {}
    for each in grouped:
        partition, entity, sub_queue = names[each["queue"]]
        times = (_NEVER if each[name] is None else each[name] for name in ("used_max", "came_max", "left_max"))
        found.queues[partition, entity, sub_queue] = OfQueue(
            partition, entity, sub_queue, each["number_max"], each["entered_min"], each["gives_sum"], *times
        )
        found.before[partition] = found.before.get(partition, 0) + each["before_sum"]
        if each["offset_max"] is not None:
            ends[partition] = max(each["offset_max"], ends.get(partition, 0))
    offsets, partitions = column["journalOffset"], column["partition"]
    for partition, offset in ends.items():
        at = pc.index(pc.and_(pc.equal(offsets, offset), pc.equal(partitions, partition)), True).as_py()
        found.last[partition] = (offset, time_us[at].as_py())
    special = pc.and_(before, is_one_of(op, ["truncated", "takenOver"]))
    if pc.any(special).as_py():
        _look_at_special(found, pa.table(column).filter(special))
    return found


def _look_at_special(found: Look, rows: pa.Table) -> None:
    times_us = rows.column("eventTime").cast(pa.int64()).to_pylist()
    for row, time_us in zip(rows.to_pylist(), times_us, strict=True):
        where = row["partition"], row["journalOffset"]
        if row["op"] == "truncated":
            found.truncated.append([*where, row["description"], time_us])
        elif row["originEntity"] is not None:
            origin = row["originEntity"], row["originSubQueue"], row["originSequenceNumber"]
            found.marks.append([row["journalOffset"], row["partition"], *origin, time_us])


# -- all of them


def survey(
    cuts: Mapping[int, Cut],
    seen: Look,
    since: datetime | None = None,
    wants: Callable[[str], bool] = lambda path: True,
) -> Survey:
    """`seen`: all rows of the epochs of `cuts`, which get what was seen of them.

    If only messages since a time are wanted, or those of some entities, it does not matter what else is missing.
    """
    found = Survey(dict(cuts))
    for partition, cut in cuts.items():
        cut.rows = seen.before.get(partition, 0)
        if partition in seen.last:
            cut.last = _EPOCH + timedelta(microseconds=seen.last[partition][1])
    for _, partition, entity, sub_queue, number, time_us in sorted(seen.marks, key=lambda mark: mark[:2]):
        found.marks[QueueName(entity.lower(), sub_queue), partition] = Mark(number, time_us // 1000)
    residences: dict[str, dict[int, OfQueue]] = defaultdict(dict)
    first: dict[tuple[int, QueueName], int] = {}
    for (partition, entity, sub_queue), of in seen.queues.items():
        if entity is None:
            continue
        family = family_of(entity)
        residence = residences[family].setdefault(partition, OfQueue(partition, family, None))
        residence.add(of)
        if sub_queue is None:
            continue
        key = partition, QueueName(entity.lower(), sub_queue)
        if of.highest is not None:
            found.highest[key] = max(found.highest.get(key, 0), of.highest)
        if of.given:
            found.given[key] += of.given
        if of.first is not None and wants(key[1].entity):
            first[key] = min(first.get(key, of.first), of.first)
    for family, of_family in residences.items():
        known = {partition: each for partition, each in of_family.items() if _is_known(each)}
        if known:
            found.homes[family] = _home(known)
    for partition, cut in sorted(cuts.items()):
        found.missing += _lost(partition, cut, seen, since)
    if since is None or any(cut.begins > since for cut in cuts.values()):
        found.missing += _late(first)
    return found


def _is_known(residence: OfQueue) -> bool:
    return max(residence.used_us, residence.came_us, residence.left_us) > _NEVER


def _lost(partition: int, cut: Cut, seen: Look, since: datetime | None) -> Iterator[str]:
    where = f"partition {partition}, epoch {cut.epoch}"
    for of, offset, description, time_us in sorted(seen.truncated):
        if of == partition and (since is None or time_us > to_us(since)):
            yield f"{where}: the journal has a gap before offset {offset}: {description}"
    end = 0 if since is None or cut.begins > since else cut.ranges[0].first
    for each in cut.before():
        if each.first > end:
            yield f"{where}: the offsets {end} to {each.first - 1} are not captured"
        end = each.end


def _late(first_by_partition: Mapping[tuple[int, QueueName], int]) -> Iterable[str]:
    """Queues that had messages before the first row."""
    first: dict[tuple[int, QueueName], int] = {}
    for (partition, queue), number in first_by_partition.items():
        fragment = number >> PARTITION_SHIFT
        key = (partition if fragment else -1, queue)
        first[key] = min(first.get(key, number), number)
    topics = {family_of(queue.entity) for _, queue in first if _COPIES in queue.entity}
    for (_, queue), number in sorted(first.items()):
        before = (number & (1 << PARTITION_SHIFT) - 1) - 1
        # A topic's numbers are also those of messages that were published at once, and never in its queue.
        if before > 0 and queue.entity not in topics:
            which = plural(before, "the message with a number", f"the {before} messages with numbers")
            yield (
                f"{queue.entity} ({queue.sub_queue}): {which} below {number} {plural(before, 'was', 'were')} there "
                "before the journal began, and may be there still"
            )


def _home(residences: Mapping[int, OfQueue]) -> int:
    """Where a family is: where it was used last, unless it has left since; else where it has come last."""
    stays = {partition: each for partition, each in residences.items() if each.left_us <= each.used_us}
    if stays:
        return max(stays, key=lambda partition: stays[partition].used_us)
    return max(residences, key=lambda partition: residences[partition].came_us)


def to_ms(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(milliseconds=1)


def to_us(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(microseconds=1)


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
