"""Reads the broker's journal, the record of all that happened to messages: `mode=journal`, in batch and as a stream.

Offsets are those of the journal, so Spark's checkpoint is the position, and a range can be read again as long as the
journal keeps it, or with `capturePath` the capture. Spark calls `commit` late, and for the last batch not at all: it
only tells the journal what may be dropped.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from pyspark_peeklock import records, rows
from pyspark_peeklock.errors import AnotherEpoch, CaptureChanged, JournalDamaged, OutOfRetention
from pyspark_peeklock.journal_client import Endpoint, JournalClient
from pyspark_peeklock.journal_offsets import (
    Loss,
    PartitionState,
    Position,
    first_offset,
    given_offsets,
    latest,
    needs_capture,
    places,
    position,
    ranges,
)
from pyspark_peeklock.logs import let_speak
from pyspark_peeklock.options import JournalOptions
from pyspark_peeklock.parts import NOTHING_CAPTURED, Captured, OffsetRange, Part, Source, cut, parts, split

if TYPE_CHECKING:
    from pyspark_peeklock.captures import Capture

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
            namespace, states = client.states()
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
        instant = self._options.starting_timestamp
        capture = self._capture(namespace)
        if instant is None:
            captured = NOTHING_CAPTURED if capture is None else capture.ranges()
            return given_offsets("startingOffsets", self._options.starting_offsets, states, captured)
        return position(
            (each.partition, each.epoch, _offset_at(client, capture, each, instant)) for each in states.values()
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one range. Raises the errors of the client and the capture."""
        if not isinstance(partition, JournalRange):  # Spark's, where there is no row at all
            return
        schema = rows.arrow_schema(self._schema)
        names = frozenset(schema.names)
        wanted = records.COLUMNS & names if self._options.includes_body else frozenset()
        with_records = bool(wanted) or (self._options.includes_record and bool({"record", "overlay"} & names))
        client = JournalClient(self._endpoint)
        try:
            for epoch, batch in self._batches(client, partition, with_records):
                yield self._converted(batch, partition.namespace, epoch, wanted, schema)
        finally:
            client.close()

    def _batches(
        self, client: JournalClient, planned: JournalRange, with_records: bool
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The range, with the epoch of each batch. What is not any more where it was when the query was planned, is
        looked for again; what is nowhere is an error, or is reported and skipped.
        """
        left, changed_at = [planned.part], -1
        while left:
            part = left.pop(0)
            try:
                for batch in self._batches_of(client, planned.namespace, part, with_records):
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
        self, client: JournalClient, namespace: str, part: Part, with_records: bool
    ) -> Iterator[pa.RecordBatch]:
        entity = self._options.entity
        if part.source is Source.JOURNAL:
            return client.batches(part.offsets, entity=entity, records=with_records)
        capture = self._capture(namespace)
        assert capture is not None, "nothing else makes such a part"
        return capture.batches(part.offsets, entity=entity, records=with_records)

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
            if self._options.includes_record or name not in ("record", "overlay")
        }
        count = batch.num_rows
        for name, value in (("namespace", namespace), ("epoch", epoch)):
            columns[name] = pa.repeat(value, count)
        index = batch.schema.get_field_index("record")
        if wanted and index >= 0:
            columns |= records.columns_of(batch.column(index).to_pylist(), wanted, _states(batch))
        return rows.batch_of(columns, count, schema)


def _states(batch: pa.RecordBatch) -> list[int]:
    """The places of rows whose record is the state of a session."""
    index = batch.schema.get_field_index("op")
    if index < 0:
        return []
    found: list[int] = pc.indices_nonzero(pc.equal(batch.column(index), "stateSet")).to_pylist()
    return found


class JournalReader(_Journal, DataSourceReader):
    def partitions(self) -> list[JournalRange]:
        """Both ends are found here, once, so that tasks that run again read the same."""
        client = JournalClient(self._endpoint)
        try:
            namespace, states = client.states()
            start = self._start(client, namespace, states)
        finally:
            client.close()
        return self._planned(start, given_offsets("endingOffsets", self._options.ending_offsets, states))


class JournalStreamReader(_Journal, DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: JournalOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._client = JournalClient(self._endpoint)
        self._target: dict[int, tuple[str, int]] | None = None

    def initialOffset(self) -> Position:  # noqa: N802 - Spark's names
        return self._start(self._client, *self._client.states())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.max_messages is not None:
            return ReadMaxRows(self._options.max_messages)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: Position, limit: ReadLimit) -> Position:  # noqa: N802
        namespace, states = self._client.states()
        is_limited = not isinstance(limit, ReadAllAvailable)  # Trigger.Once wants all, whatever the options say
        return latest(
            start,
            states,
            self._captured(namespace) if needs_capture(start, states) else NOTHING_CAPTURED,
            max_rows=self._options.max_messages if is_limited else None,
            max_bytes=self._options.max_bytes if is_limited else None,
            target=self._target,
        )

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        _, states = self._client.states()
        self._target = {each.partition: (each.epoch, each.stable) for each in states.values()}

    def reportLatestOffset(self) -> Position:  # noqa: N802
        _, states = self._client.states()
        return position((each.partition, each.epoch, each.stable) for each in states.values())

    def partitions(self, start: Position, end: Position) -> list[JournalRange]:
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
