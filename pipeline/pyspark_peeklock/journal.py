"""Reads the broker's journal, the record of all that happened to messages: `mode=journal`, in batch and as a stream.

Offsets are those of the journal, so Spark's checkpoint is the position, and a range can be read again as long as the
journal keeps it, or with `capturePath` the capture. Spark calls `commit` late, and for the last batch not at all: it
only tells the journal what may be dropped.
"""

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from pyspark_peeklock import records, rows, whole
from pyspark_peeklock.conditions import NO_CONDITIONS
from pyspark_peeklock.errors import (
    AnotherEpoch,
    BehindEnd,
    CaptureChanged,
    InvalidOption,
    JournalDamaged,
    JournalTooShort,
    OutOfRetention,
)
from pyspark_peeklock.journal_client import Endpoint, JournalClient
from pyspark_peeklock.journal_offsets import (
    Loss,
    PartitionState,
    Position,
    TriggerDelay,
    check_written,
    first_offset,
    given_offsets,
    latest,
    needs_capture,
    places,
    position,
    ranges,
    rows_between,
    with_lag,
)
from pyspark_peeklock.logs import let_speak
from pyspark_peeklock.options import JournalOptions, Times
from pyspark_peeklock.parts import NOTHING_CAPTURED, Captured, OffsetRange, Part, Source, cut, parts, split

if TYPE_CHECKING:
    from pyspark_peeklock.captures import Capture

# A batch costs Spark and its reader some 0.4 ms; to copy bodies of 1 MiB into a larger one costs about as much.
JOINED_ROWS: Final = 4096  # of small batches that are joined, or so many bytes
JOINED_BYTES: Final = 1 << 20
_STORED: Final = frozenset({"record", "overlay"})
CAPTURED_TASK_ROWS: Final = 256 << 10  # what a task reads of a capture at least, if there is so much

log = logging.getLogger("pyspark_peeklock")


@dataclass
class JournalRange(InputPartition):
    namespace: str
    part: Part


class _Journal:
    """What both readers do."""

    def __init__(self, options: JournalOptions, schema: StructType) -> None:
        rows.check_schema(schema)
        self._options = options
        self._schema = schema
        self._endpoint = Endpoint(options.access, options.http_endpoint, options.retry_timeout_s)
        self._has_checked_capture = False
        self._conditions = NO_CONDITIONS

    def _states(self, client: JournalClient, *positions: Position) -> tuple[str, dict[int, PartitionState]]:
        """The namespace and its partitions. Raises JournalTooShort if one of these positions is behind the end, and at
        the start InvalidOption if there is no capture where one should be.
        """
        namespace, states = client.states()
        if not self._has_checked_capture:
            self._capture(namespace)
            self._has_checked_capture = True
        try:
            for each in positions:
                check_written(each, states)
        except JournalTooShort:  # an endpoint that has just started may not have read all of its files
            namespace, states = client.states(current=True)
            for each in positions:
                check_written(each, states)
        return namespace, states

    def _given(
        self,
        client: JournalClient,
        option: str,
        text: str,
        states: dict[int, PartitionState],
        captured: Captured = NOTHING_CAPTURED,
    ) -> Position:
        """Return what `given_offsets` does; ask the journal anew if an offset seems to be behind its end."""
        try:
            return given_offsets(option, text, states, captured)
        except BehindEnd:  # as above
            return given_offsets(option, text, client.states(current=True)[1], captured)

    def _capture(self, namespace: str) -> "Capture | None":
        """What the capture has now; None if there is none. Raises InvalidOption, CaptureFailed."""
        if self._options.capture_path is None:
            return None
        from pyspark_peeklock.captures import Capture

        return Capture(self._options.capture_path, namespace)

    def _captured(self, namespace: str) -> Captured:
        capture = self._capture(namespace)
        return NOTHING_CAPTURED if capture is None else capture.ranges()

    def _planned(self, start: Position, end: Position) -> list[JournalRange]:
        """The tasks for what is between two positions. Raises what is lost, unless losses are only to be reported."""
        client = JournalClient(self._endpoint)
        try:
            namespace, states = self._states(client, start, end)
        finally:
            client.close()
        capture = self._capture(namespace) if needs_capture(start, states) else None
        found, losses = ranges(start, end, states, NOTHING_CAPTURED if capture is None else capture.ranges())
        self._report(losses)
        if capture is not None:
            found = [piece for part in found for piece in _by_files(part, capture)]
        return [JournalRange(namespace, each) for each in split(found, self._options.min_partitions)]

    def _report(self, losses: Sequence[Loss]) -> None:
        for loss in losses:
            if self._options.fails_on_data_loss:
                raise loss.error
        if losses:
            let_speak(log)
        for loss in losses:
            log.warning("peeklock journal: data loss: rows=%d: %s", loss.rows, loss.error)

    def _start(self, client: JournalClient, namespace: str, states: dict[int, PartitionState]) -> Position:
        capture = self._capture(namespace)
        captured = NOTHING_CAPTURED if capture is None else capture.ranges()
        times = self._options.starting_times
        if times is None:
            return self._given(client, "startingOffsets", self._options.starting_offsets, states, captured)
        firsts = {each.partition: first_offset(each, captured) for each in states.values()}
        return _at_times(client, capture, states, "startingOffsetsByTimestamp", times, firsts)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one range. Raises the errors of the client and the capture."""
        if not isinstance(partition, JournalRange):  # Spark's, where there is no row at all
            return
        schema = rows.arrow_schema(self._schema)
        names = frozenset(schema.names)
        wanted = records.COLUMNS & names if self._options.includes_body else frozenset()
        columns = {*names, *self._conditions.values, "op"}
        if not self._options.includes_record:
            columns -= _STORED
        if wanted:
            columns.add("record")
        if self._options.includes_amqp_message and "amqpMessage" in names:
            columns |= whole.NEEDED
        client = JournalClient(self._endpoint)
        try:
            converted = (
                self._converted(chosen, partition.namespace, epoch, wanted, schema)
                for epoch, batch in self._batches(client, partition, columns)
                if (chosen := self._conditions.rows_of(batch)).num_rows
            )
            yield from _joined(converted)
        finally:
            client.close()

    def _batches(
        self, client: JournalClient, planned: JournalRange, columns: Collection[str]
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield the batches of the range, each with its epoch. Rows that are not any more where they were when the
        query was planned are looked for again; rows that are nowhere are an error, or are reported and skipped.
        """
        left, changed_at = [planned.part], -1
        while left:
            part = left.pop(0)
            try:
                for batch in self._batches_of(client, planned.namespace, part, columns):
                    yield part.offsets.epoch, batch
            except (OutOfRetention, AnotherEpoch, JournalDamaged, CaptureChanged) as error:
                if isinstance(error, CaptureChanged):
                    if error.first == changed_at:
                        raise
                    changed_at = error.first
                found, lost = self._elsewhere(client, planned.namespace, part.offsets, error)
                if isinstance(error, JournalDamaged) and any(each.end == error.end for each in lost):
                    yield part.offsets.epoch, error.row  # it has the offset of the last one
                left = found + left

    def _batches_of(
        self, client: JournalClient, namespace: str, part: Part, columns: Collection[str]
    ) -> Iterator[pa.RecordBatch]:
        entity = self._options.entity or self._conditions.entity
        has_records = not _STORED.isdisjoint(columns)
        if part.source is Source.JOURNAL:
            return client.batches(part.offsets, entity=entity, records=has_records, columns=columns)
        capture = self._capture(namespace)
        assert capture is not None, "nothing else makes such a part"
        return capture.batches(part.offsets, entity=entity, records=has_records, columns=columns)

    def _elsewhere(
        self,
        client: JournalClient,
        namespace: str,
        wanted: OffsetRange,
        error: OutOfRetention | AnotherEpoch | JournalDamaged | CaptureChanged,
    ) -> tuple[list[Part], list[OffsetRange]]:
        """Where the rest of a range is, and what of it is lost. Raises the error, if that is to fail the query.

        The range was read to before `error.first`.
        """
        low: int | None = None  # the first offset that the journal has of this epoch
        if isinstance(error, OutOfRetention):
            low = error.low if error.low > error.first else None  # above its end nothing will come any more
        elif isinstance(error, JournalDamaged):
            low = error.end
        elif isinstance(error, CaptureChanged):
            state = client.states()[1].get(wanted.partition)
            low = state.low if state is not None and state.epoch == wanted.epoch else None
        rest = OffsetRange(wanted.partition, wanted.epoch, error.first, wanted.end)
        found = parts(rest, low, self._captured(namespace))
        lost = [each.offsets for each in found if each.source is Source.NOWHERE]
        self._report([Loss(each.end - each.first, error) for each in lost])
        return [each for each in found if each.source is not Source.NOWHERE], lost

    def _converted(
        self, batch: pa.RecordBatch, namespace: str, epoch: str, wanted: frozenset[str], schema: pa.Schema
    ) -> pa.RecordBatch:
        """A batch of the journal as one of ours; the namespace and the epoch are the same for all its rows."""
        columns: dict[str, Any] = {
            name: batch.column(index)
            for index, name in enumerate(batch.schema.names)
            if self._options.includes_record or name not in _STORED
        }
        count = batch.num_rows
        for name, value in (("namespace", namespace), ("epoch", epoch)):
            if name in schema.names:
                columns[name] = pa.repeat(value, count)
        index = batch.schema.get_field_index("record")
        if index >= 0:  # the row in the place of damaged ones may have none
            if wanted:
                columns |= records.arrays_of(batch.column(index), wanted, _states(batch))
            if self._options.includes_amqp_message and "amqpMessage" in schema.names:
                columns["amqpMessage"] = whole.messages_of(batch, _states(batch))
        return rows.batch_of(columns, count, schema)


def _states(batch: pa.RecordBatch) -> list[int]:
    """The places of rows whose record is the state of a session."""
    index = batch.schema.get_field_index("op")
    if index < 0:
        return []
    found: list[int] = pc.indices_nonzero(pc.equal(batch.column(index), "stateSet")).to_pylist()
    return found


def _joined(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Small batches are joined, because each costs Spark as much as some hundred rows."""
    small: list[pa.RecordBatch] = []
    count = size = 0
    for batch in batches:
        small.append(batch)
        count, size = count + batch.num_rows, size + batch.nbytes
        if count >= JOINED_ROWS or size >= JOINED_BYTES:
            yield pa.concat_batches(small) if len(small) > 1 else batch
            small.clear()
            count = size = 0
    if small:
        yield pa.concat_batches(small)


class JournalReader(_Journal, DataSourceReader):
    def partitions(self) -> list[JournalRange]:
        """Plan the ranges. Both ends are found here, once, so that tasks that run again read the same."""
        client = JournalClient(self._endpoint)
        try:
            namespace, states = self._states(client)
            start, end = self._start(client, namespace, states), self._end(client, namespace, states)
            start, end = self._narrowed(client, namespace, states, start, end)
        finally:
            client.close()
        return self._planned(start, end)

    def _end(self, client: JournalClient, namespace: str, states: dict[int, PartitionState]) -> Position:
        times = self._options.ending_times
        if times is None:
            return self._given(client, "endingOffsets", self._options.ending_offsets, states)
        ends = {each.partition: each.stable for each in states.values()}
        return _at_times(client, self._capture(namespace), states, "endingOffsetsByTimestamp", times, ends)

    def _narrowed(
        self,
        client: JournalClient,
        namespace: str,
        states: dict[int, PartitionState],
        start: Position,
        end: Position,
    ) -> tuple[Position, Position]:
        """The range of each partition without offsets that do not meet the conditions."""
        wanted, ends = self._conditions, places(end)
        has_times = wanted.since is not None or wanted.until is not None
        capture = self._capture(namespace) if has_times else None
        found = []
        for number, (epoch, offset) in places(start).items():
            _, last = ends[number]
            first, behind = wanted.first, wanted.end
            if wanted.has(number) and number in states:
                if wanted.since is not None:
                    first = max(first, _offset_at(client, capture, states[number], wanted.since))
                if wanted.until is not None:
                    behind = min(behind, _offset_at(client, capture, states[number], wanted.until))
            else:
                behind = offset
            first = min(max(offset, first), last)
            found.append((number, epoch, first, max(first, min(last, behind))))
        return position(each[:3] for each in found), position((*each[:2], each[3]) for each in found)


class FilteringJournalReader(JournalReader):
    """Used only with option `filterPushdown`: Spark refuses a reader with `pushFilters` while its setting is off."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802 - Spark's name
        """Takes over conditions on offsets, partitions, times, entities and kinds of events; yields the others."""
        for each in filters:
            further = self._conditions.and_also(each)
            self._conditions = further or self._conditions
            # Of a time, Spark looks at the rows again: a clock may have been set back.
            if further is None or getattr(each, "attribute", ()) == ("eventTime",):
                yield each


class JournalStreamReader(_Journal, DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: JournalOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._client = JournalClient(self._endpoint)
        self._target: dict[int, tuple[str, int]] | None = None
        self._planned_to: Position = {}
        self._delay = TriggerDelay(options.min_messages or 0, options.max_trigger_delay_s)

    def initialOffset(self) -> Position:  # noqa: N802 - Spark's names
        return self._start(self._client, *self._states(self._client))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.max_messages is not None:
            return ReadMaxRows(self._options.max_messages)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        if self._options.min_messages is not None:
            return ReadMinRows(self._options.min_messages)
        return ReadAllAvailable()

    def latestOffset(self, start: Position, limit: ReadLimit) -> Position:  # noqa: N802
        namespace, states = self._states(self._client, start)
        is_limited = not isinstance(limit, ReadAllAvailable)  # Trigger.Once wants all, whatever the options say
        end = latest(
            start,
            states,
            self._captured(namespace) if needs_capture(start, states) else NOTHING_CAPTURED,
            max_rows=self._options.max_messages if is_limited else None,
            max_bytes=self._options.max_bytes if is_limited else None,
            target=self._target,
        )
        # A stream that is to end with what there is waits for no more.
        if self._target is None and is_limited and not self._delay.is_over(rows_between(start, end), time.monotonic()):
            end = start
        self._planned_to = end
        return end

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        _, states = self._client.states()
        self._target = {each.partition: (each.epoch, each.stable) for each in states.values()}

    def reportLatestOffset(self) -> Position:  # noqa: N802
        """The end of the journal, and how far the stream's last batch is from it: for its progress."""
        _, states = self._client.states()
        return with_lag(self._planned_to, states)

    def partitions(self, start: Position, end: Position) -> list[JournalRange]:
        self._planned_to = end
        return self._planned(start, end)

    def commit(self, end: Position) -> None:
        read = places(end)
        if self._options.consumer is not None:
            self._client.tell(self._options.consumer, read)

    def stop(self) -> None:
        self._client.close()


def _by_files(part: Part, capture: "Capture") -> list[Part]:
    """A captured part in pieces of whole files, so that no two tasks read the same one."""
    if part.source is not Source.CAPTURE:
        return [part]
    return cut(part, capture.file_starts(part.offsets), CAPTURED_TASK_ROWS)


def _at_times(
    client: JournalClient,
    capture: "Capture | None",
    states: dict[int, PartitionState],
    option: str,
    times: Times,
    others: dict[int, int],
) -> Position:
    """The first offsets that are not before these times; `others` where there is none. Raises InvalidOption."""
    if unknown := times.by_partition.keys() - states.keys():
        raise InvalidOption(f"option '{option}': there is no partition {min(unknown)}; there are {list(states)}")
    found = []
    for number, state in states.items():
        instant = times.of(number)
        offset = others[number] if instant is None else _offset_at(client, capture, state, instant)
        found.append((number, state.epoch, offset))
    return position(found)


def _offset_at(client: JournalClient, capture: "Capture | None", state: PartitionState, instant: datetime) -> int:
    """The first offset whose time is not before `instant`."""
    is_before = state.low_time is None or instant <= state.low_time
    if is_before and capture is not None and first_offset(state, capture.ranges()) < state.low:
        found = capture.first_offset_at(state.partition, state.epoch, instant)
        return state.low if found is None else min(found, state.low)
    return _offset_in_journal(client, state, instant)


def _offset_in_journal(client: JournalClient, state: PartitionState, instant: datetime) -> int:
    """A binary search, because times rise with offsets."""
    low, high = state.low, state.stable
    if state.low_time is not None and instant <= state.low_time:
        return low
    if state.stable_time is not None and instant > state.stable_time:
        return high
    while low < high:
        middle = (low + high) // 2
        wanted = OffsetRange(state.partition, state.epoch, middle, middle + 1)
        [batch] = list(client.batches(wanted, entity=None, records=False))
        event_time = pc.cast(batch.column(batch.schema.get_field_index("eventTime")), pa.timestamp("us", "UTC"))
        if event_time[0].as_py() < instant:
            low = middle + 1
        else:
            high = middle
    return low
