"""Which messages were in the queues at a time, found by replaying captured rows. Pure but for `present_at`.

A partition is replayed up to its first row that is later than the time. What happened in two partitions is put together
as far as it concerns one message: a message that is forwarded is stored at its destination first, so for a moment it is
in both places, and then counts as forwarded.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, NamedTuple

import pyarrow as pa

from storage.capture.manifest import Position
from storage.capture.reading import Captured, CapturedRange

ENTERING: Final = {"enqueued", "scheduled"}
LEAVING: Final = {
    "completed", "deadlettered", "expired", "purged", "cancelled", "activated", "forwarded", "published", "quarantined",
    "moved",
}  # fmt: skip


class PlaceName(StrEnum):
    AVAILABLE = "available"  # locked messages, too: locks end with the broker
    DEFERRED = "deferred"
    SCHEDULED = "scheduled"


class MessageKey(NamedTuple):
    entity: str
    sub_queue: str
    sequence_number: int


@dataclass(frozen=True, slots=True)
class PresentMessage:
    """`record` is None where the journal had no bodies. `overlay` is what differs from the record in this queue."""

    key: MessageKey
    place: PlaceName
    delivery_count: int
    enqueued: datetime | None
    scheduled: datetime | None
    expires: datetime | None  # may be over: then the broker had not yet noticed
    message_id: str | None
    session_id: str | None
    record: bytes | None
    overlay: bytes | None
    offset: int  # of the row that brought it


_COLUMNS: Final = [
    "journalOffset", "eventTime", "op", "entity", "subQueue", "sequenceNumber", "messageId", "sessionId",
    "enqueuedTime", "scheduledTime", "expiresAt", "deliveryCount", "originEntity", "originSubQueue",
    "originSequenceNumber", "record", "overlay",
]  # fmt: skip


class Replay:
    """The messages of one partition and epoch, row by row up to a time."""

    def __init__(self, until: datetime) -> None:
        self._until = until
        self.is_over = False  # a row that is later than the time has come
        self.present: dict[MessageKey, PresentMessage] = {}
        self.came_from: set[MessageKey] = set()  # where messages were before they were enqueued here
        self.unknown = 0  # rows about messages that were there before the first row, or in a gap
        self.truncated: list[int] = []  # offsets of rows before which the journal itself has a gap
        self._left: dict[MessageKey, PresentMessage] = {}  # in the turn of `_left_at`, whose next rows may name them
        self._left_at: datetime | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """The next rows, with the columns of SCHEMA."""
        for row in batch.select(_COLUMNS).to_pylist():
            if row["eventTime"] > self._until:
                self.is_over = True
            if self.is_over:
                return
            self._replay(row)

    def _replay(self, row: dict[str, Any]) -> None:
        op, number = row["op"], row["sequenceNumber"]
        if op == "truncated":
            self.truncated.append(row["journalOffset"])
        if number is None or row["entity"] is None:
            return
        key = MessageKey(row["entity"], row["subQueue"], number)
        if op in ENTERING:
            self._enter(key, row)
        elif (message := self.present.get(key)) is None:
            self.unknown += 1
        elif op in LEAVING:
            self._leave(message, row)
        else:
            self.present[key] = _changed(message, row)

    def _enter(self, key: MessageKey, row: dict[str, Any]) -> None:
        record = row["record"]
        count = row["deliveryCount"] or 0
        if row["originSequenceNumber"] is not None:
            origin = MessageKey(row["originEntity"], row["originSubQueue"], row["originSequenceNumber"])
            self.came_from.add(origin)
            before = self._left.get(origin) or self.present.get(origin)
            if record is None and before is not None:  # moved within the partition, which does not store it again
                record = before.record
        self.present[key] = PresentMessage(
            key,
            PlaceName.SCHEDULED if row["op"] == "scheduled" else PlaceName.AVAILABLE,
            count,
            row["enqueuedTime"],
            row["scheduledTime"],
            row["expiresAt"],
            row["messageId"],
            row["sessionId"],
            record,
            row["overlay"],
            row["journalOffset"],
        )

    def _leave(self, message: PresentMessage, row: dict[str, Any]) -> None:
        if row["eventTime"] != self._left_at:
            self._left.clear()
            self._left_at = row["eventTime"]
        self._left[message.key] = message
        del self.present[message.key]


def _changed(message: PresentMessage, row: dict[str, Any]) -> PresentMessage:
    """By a row that neither enters nor leaves."""
    place = {"deferred": PlaceName.DEFERRED, "returned": PlaceName.AVAILABLE}.get(row["op"], message.place)
    count = message.delivery_count if row["deliveryCount"] is None else row["deliveryCount"]
    overlay = message.overlay if row["overlay"] is None else row["overlay"]
    if (place, count, overlay) == (message.place, message.delivery_count, message.overlay):
        return message
    return replace(message, place=place, delivery_count=count, overlay=overlay)


@dataclass(slots=True)
class Presence:
    """The messages that were there, by partition, in the order in which they came; and what is not known.

    `missing` are offsets before the time that were not captured: what happened in them is not known. `other_epochs` are
    of partitions that were restored from a backup meanwhile: the messages that the backup had are not in the journal.
    """

    messages: dict[int, list[PresentMessage]] = field(default_factory=dict)
    missing: list[CapturedRange] = field(default_factory=list)
    unknown: int = 0
    truncated: list[tuple[int, int]] = field(default_factory=list)  # partition, offset
    other_epochs: list[Position] = field(default_factory=list)


def together(replays: dict[int, Replay]) -> Presence:
    """What the partitions have, without the messages that have arrived in another one already."""
    found = Presence()
    for partition, replay in sorted(replays.items()):
        elsewhere = {key for other, each in replays.items() if other != partition for key in each.came_from}
        # A message that was moved away with its entity, and back, has the same key in both; it is where it came last.
        found.messages[partition] = [
            message for key, message in replay.present.items() if key not in elsewhere or key in replay.came_from
        ]
        found.unknown += replay.unknown
        found.truncated += [(partition, offset) for offset in replay.truncated]
    return found


def present_at(captured: Captured, until: datetime) -> Presence:
    """Replay all that was captured, up to a time with a time zone. Raises DamagedFile, OSError."""
    by_position: dict[Position, list[CapturedRange]] = defaultdict(list)
    for each in captured.ranges():
        by_position[each.partition, each.epoch].append(each)
    replays: dict[int, Replay] = {}
    newest: dict[int, datetime] = {}
    missing: list[CapturedRange] = []
    other_epochs: list[Position] = []
    for (partition, epoch), ranges in by_position.items():
        begun = _first_time(captured, ranges[0])
        if begun > until:
            continue
        if partition in replays:
            other_epochs.append((partition, epoch))
            if begun <= newest[partition]:
                continue
        newest[partition] = begun
        replay = replays[partition] = Replay(until)
        end = 0
        for each in ranges:
            if each.first > end and not replay.is_over:
                missing.append(CapturedRange(partition, epoch, end, each.first))
            for batch in captured.batches(partition, epoch, each.first, each.end):
                replay.add(batch)
                if replay.is_over:
                    break
            end = each.end
    found = together(replays)
    found.missing, found.other_epochs = missing, other_epochs
    return found


def _first_time(captured: Captured, each: CapturedRange) -> datetime:
    [batch] = captured.batches(each.partition, each.epoch, each.first, each.first + 1, records=False)
    time: datetime = batch.column("eventTime")[0].as_py()
    return time
