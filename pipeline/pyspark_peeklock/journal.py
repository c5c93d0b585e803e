"""Reads the broker's journal, the record of all that happened to messages: `mode=journal`, in batch and as a stream.

Offsets are those of the journal, so Spark's checkpoint is the position, and a range can be read again as long as the
journal keeps it. `commit` does nothing: Spark calls it late, and for the last batch not at all.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

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
from pyspark_peeklock.errors import AnotherEpoch, OutOfRetention
from pyspark_peeklock.journal_client import Endpoint, JournalClient
from pyspark_peeklock.journal_offsets import (
    Loss,
    OffsetRange,
    PartitionState,
    Position,
    given_offsets,
    latest,
    places,
    position,
    ranges,
    split,
)
from pyspark_peeklock.logs import let_speak
from pyspark_peeklock.options import JournalOptions

log = logging.getLogger("pyspark_peeklock")


@dataclass
class JournalRange(InputPartition):
    namespace: str
    offsets: OffsetRange


class _Journal:
    """What both readers do."""

    def __init__(self, options: JournalOptions, schema: StructType) -> None:
        rows.check_schema(schema)
        self._options = options
        self._schema = schema
        self._endpoint = Endpoint(options.access, options.http_endpoint, options.retry_timeout_s)

    def _planned(self, start: Position, end: Position) -> list[JournalRange]:
        """The tasks for what is between two positions. Raises what is lost, unless losses are only to be reported."""
        client = JournalClient(self._endpoint)
        try:
            namespace, states = client.states()
        finally:
            client.close()
        found, losses = ranges(start, end, states)
        self._report(losses)
        return [JournalRange(namespace, each) for each in split(found, self._options.min_partitions)]

    def _report(self, losses: Sequence[Loss]) -> None:
        for loss in losses:
            if self._options.fails_on_data_loss:
                raise loss.error
        if losses:
            let_speak(log)
        for loss in losses:
            log.warning("peeklock journal: data loss: rows=%d: %s", loss.rows, loss.error)

    def _start(self, client: JournalClient, states: dict[int, PartitionState]) -> Position:
        instant = self._options.starting_timestamp
        if instant is None:
            return given_offsets("startingOffsets", self._options.starting_offsets, states)
        return position((each.partition, each.epoch, _offset_at(client, each, instant)) for each in states.values())

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one range. Raises the errors of the client."""
        if not isinstance(partition, JournalRange):  # Spark's, where there is no row at all
            return
        schema = rows.arrow_schema(self._schema)
        names = frozenset(schema.names)
        wanted = records.COLUMNS & names if self._options.includes_body else frozenset()
        with_records = bool(wanted) or (self._options.includes_record and bool({"record", "overlay"} & names))
        client = JournalClient(self._endpoint)
        try:
            for batch in self._batches(client, partition.offsets, with_records):
                yield self._converted(batch, partition, wanted, schema)
        finally:
            client.close()

    def _batches(self, client: JournalClient, wanted: OffsetRange, with_records: bool) -> Iterator[pa.RecordBatch]:
        """The range; what ended meanwhile is an error, or is reported and skipped."""
        while True:
            try:
                yield from client.batches(wanted, entity=self._options.entity, records=with_records)
                return
            except OutOfRetention as error:
                # The rows before `error.first` were read. Above the journal's end nothing will come any more.
                following = min(error.low, wanted.end) if error.low > error.first else wanted.end
                self._report([Loss(following - error.first, error)])
                if following == wanted.end:
                    return
                wanted = OffsetRange(wanted.partition, wanted.epoch, following, wanted.end)
            except AnotherEpoch as error:
                self._report([Loss(wanted.end - wanted.first, error)])
                return

    def _converted(
        self, batch: pa.RecordBatch, partition: JournalRange, wanted: frozenset[str], schema: pa.Schema
    ) -> pa.RecordBatch:
        """A batch of the journal as one of ours; the namespace and the epoch are the same for all its rows."""
        columns: dict[str, Any] = {
            name: batch.column(index)
            for index, name in enumerate(batch.schema.names)
            if self._options.includes_record or name not in ("record", "overlay")
        }
        count = batch.num_rows
        for name, value in (("namespace", partition.namespace), ("epoch", partition.offsets.epoch)):
            columns[name] = pa.repeat(value, count)
        index = batch.schema.get_field_index("record")
        if wanted and index >= 0:
            columns |= records.columns_of(batch.column(index).to_pylist(), wanted)
        return rows.batch_of(columns, count, schema)


class JournalReader(_Journal, DataSourceReader):
    def partitions(self) -> list[JournalRange]:
        """Both ends are found here, once, so that tasks that run again read the same."""
        client = JournalClient(self._endpoint)
        try:
            _, states = client.states()
            start = self._start(client, states)
        finally:
            client.close()
        return self._planned(start, given_offsets("endingOffsets", self._options.ending_offsets, states))


class JournalStreamReader(_Journal, DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: JournalOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._client = JournalClient(self._endpoint)
        self._target: dict[int, tuple[str, int]] | None = None

    def initialOffset(self) -> Position:  # noqa: N802 - Spark's names
        return self._start(self._client, self._client.states()[1])

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.max_messages is not None:
            return ReadMaxRows(self._options.max_messages)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: Position, limit: ReadLimit) -> Position:  # noqa: N802
        _, states = self._client.states()
        is_limited = not isinstance(limit, ReadAllAvailable)  # Trigger.Once wants all, whatever the options say
        return latest(
            start,
            states,
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
        places(end)

    def stop(self) -> None:
        self._client.close()


def _offset_at(client: JournalClient, state: PartitionState, instant: datetime) -> int:
    """The first offset whose time is not before `instant`; a binary search, because times rise with offsets."""
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
