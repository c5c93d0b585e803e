"""The sink of `format("peeklock")`: a batch write and a streaming write, both on Arrow batches.

A task sends its rows and returns when the broker has accepted them. What was accepted stays sent, whatever Spark does
afterwards: it may run a task or a batch again. So each row has an id that a repetition does not change, and the
entity's duplicate detection makes the effect exactly once. Its window must be longer than the time to a repetition.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, DataType, IntegerType, LongType, StringType, StructType

from pyspark_peeklock import rows
from pyspark_peeklock.bad_rows import PLACE_COLUMNS
from pyspark_peeklock.errors import UnfitSchema
from pyspark_peeklock.identity import POSITION_COLUMNS, Identities
from pyspark_peeklock.logs import let_speak
from pyspark_peeklock.options import POSITION, SinkOptions
from pyspark_peeklock.sending import Counts, send_rows

# What `TaskContext` calls them; neither is documented, so their lack is an error and not a surprise.
_BATCH_ID: Final = "streaming.sql.batchId"
_QUERY_ID: Final = "sql.streaming.queryId"

_TEXT: Final = (StringType,)
_NUMBER: Final = (LongType, IntegerType)
_COLUMNS: Final[dict[str, tuple[type[DataType], ...]]] = {
    "body": (BinaryType, StringType),
    "applicationProperties": (type(rows.PROPERTIES),),
    "scheduledTime": (type(rows.TIME),),
    "timeToLiveMs": _NUMBER,
    "fanOut": _NUMBER,
    "partition": _NUMBER,
    "journalOffset": _NUMBER,
    **dict.fromkeys(
        (
            "messageId",
            "to",
            "subject",
            "replyTo",
            "correlationId",
            "contentType",
            "contentEncoding",
            "sessionId",
            "replyToSessionId",
            "partitionKey",
            "entity",
            "targetEntity",
            "namespace",
            "epoch",
        ),
        _TEXT,
    ),
}
# Columns of the source that say what became of a message: a new one does not have them.
_IGNORED: Final = frozenset(rows.SCHEMA.fieldNames()) - _COLUMNS.keys()
_WHOLE: Final = "amqpMessage"
_BY_LOWER: Final = {name.lower(): name for name in (*_COLUMNS, *_IGNORED)}

log = logging.getLogger("pyspark_peeklock")


@dataclass
class Accepted(WriterCommitMessage):
    """What one task has sent. `seconds` are from its first row to its last acceptance."""

    task: int
    counts: Counts
    seconds: float


class _Sending:
    """What both writers do; the columns are checked when the query is planned."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        self._options = options
        self._names = checked_columns(schema, options)
        self._write_id = uuid.uuid4().hex  # of this batch write; tasks that run again have the same

    def _send(self, batches: Iterator[pa.RecordBatch], write: str | None) -> Accepted:
        task = TaskContext.get().partitionId()
        prefix = f"{write}/{task}" if write is not None else None
        begun = time.monotonic()
        columns = (columns_of(batch, self._names) for batch in batches if batch.num_rows)
        counts = asyncio.run(send_rows(columns, self._options, Identities(prefix)))
        return Accepted(task, counts, time.monotonic() - begun)


class BatchWriter(_Sending, DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Accepted:
        """Send the rows of one task. Raises UnfitRow, SendFailed, InvalidOption."""
        return self._send(iterator, f"{self._write_id}/0" if self._options.is_id_from_position else None)

    def commit(self, messages: list[Any]) -> None:
        _report("written", messages)

    def abort(self, messages: list[Any]) -> None:
        _report("write failed; this much stays sent", messages)


class StreamWriter(_Sending, DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Accepted:
        """Send the rows, as the batch writer does."""
        return self._send(iterator, _of_query() if self._options.is_id_from_position else None)

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        _report(f"batch {batchId} written", messages)

    def abort(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        _report(f"batch {batchId} failed; this much stays sent", messages)


def _of_query() -> str:
    """The query's id and the batch's, which Spark keeps when it runs the batch again."""
    context = TaskContext.get()
    query, batch = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
    if not query or not batch:
        raise UnfitSchema(f"this Spark does not say the query's and the batch's id, so idFromPosition={POSITION} fails")
    return f"{query}/{batch}"


def checked_columns(schema: StructType, options: SinkOptions) -> dict[str, str]:
    """Our names of the columns that are used, and the names in the frame. Raises UnfitSchema."""
    theirs = _by_our_names(schema)
    types = {ours: schema[name].dataType for ours, name in theirs.items()}
    if options.sends_amqp_message:
        _check_whole_messages(types)
        return _with_target(dict(theirs), options)
    for name, kind in types.items():
        allowed = _COLUMNS.get(name)
        if allowed is None and name not in _IGNORED:
            near = get_close_matches(name, _COLUMNS, 1)
            hint = f"; did you mean '{near[0]}'?" if near else "; drop it, or put it into applicationProperties"
            raise UnfitSchema(f"the sink has no column '{name}'{hint}")
        if allowed is not None:
            _check_type(name, kind, allowed)
    properties = types.get("applicationProperties")
    if properties is not None and properties != rows.PROPERTIES and properties.simpleString() != "map<string,string>":
        raise UnfitSchema(f"column 'applicationProperties' must be map<string,string>, not {properties.simpleString()}")
    if "body" not in types:
        raise UnfitSchema("column 'body' is missing: a binary or a string")
    has_position = all(name in types for name in POSITION_COLUMNS)
    if "messageId" not in types and not has_position and not options.is_id_from_position:
        raise UnfitSchema(
            "rows have no id, so what Spark runs again would be sent twice: give a column 'messageId', or keep the "
            f"columns {', '.join(POSITION_COLUMNS)} of the source, or, for a plan without shuffle whose rows come in "
            f"the same order every time, set option idFromPosition={POSITION}"
        )
    return _with_target({ours: name for ours, name in theirs.items() if ours in _COLUMNS}, options)


def _check_type(name: str, kind: DataType, allowed: tuple[type[DataType], ...]) -> None:
    if not isinstance(kind, allowed):
        wanted = " or ".join(each.typeName() for each in allowed)
        raise UnfitSchema(f"column '{name}' must be {wanted}, not {kind.simpleString()}")


def _with_target(names: dict[str, str], options: SinkOptions) -> dict[str, str]:
    # A row of the journal has the entity that it came from in `entity`; to send it there again would be a circle.
    if "journalOffset" not in names and "entity" in names and "targetEntity" not in names:
        names["targetEntity"] = names.pop("entity")
    if "targetEntity" not in names and not options.entity:
        raise UnfitSchema("where to? Set option 'entity' to a queue or topic, or give a column 'targetEntity'")
    return names


def _by_our_names(schema: StructType) -> dict[str, str]:
    """The names of the frame by ours, which are in any case, as in all of Spark; unknown ones stay as they are."""
    found: dict[str, str] = {}
    for name in schema.fieldNames():
        ours = _BY_LOWER.get(name.lower(), name)
        if ours in found:
            raise UnfitSchema(f"columns '{found[ours]}' and '{name}' are both '{ours}': drop one")
        found[ours] = name
    return found


def _check_whole_messages(types: dict[str, DataType]) -> None:
    if not isinstance(types.get(_WHOLE), BinaryType):
        raise UnfitSchema(f"with sendAmqpMessage=true, a column '{_WHOLE}' must have the encoded messages as binary")
    others = types.keys() - {_WHOLE, "targetEntity", *PLACE_COLUMNS}
    if others:
        raise UnfitSchema(f"with sendAmqpMessage=true, column '{min(others)}' would not be sent: drop it")
    for name in types.keys() - {_WHOLE}:
        _check_type(name, types[name], _COLUMNS[name])


def columns_of(batch: pa.RecordBatch, names: dict[str, str]) -> dict[str, pa.Array]:
    """The columns as `encoding` takes them, by our names."""
    columns = {ours: batch.column(batch.schema.get_field_index(theirs)) for ours, theirs in names.items()}
    for name, column in columns.items():
        if pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type):
            columns[name] = column.cast(pa.string())
        elif pa.types.is_large_binary(column.type) or pa.types.is_binary_view(column.type):
            columns[name] = column.cast(pa.binary())
    return columns


def _report(what: str, messages: Sequence[Any]) -> None:
    """One line with the sums of all tasks; a failed task has no message."""
    let_speak(log)
    tasks = [message for message in messages if isinstance(message, Accepted)]
    accepted = sum(task.counts.messages for task in tasks)
    transfers = sum(task.counts.transfers for task in tasks)
    repeated = sum(task.counts.repeated for task in tasks)
    seconds = max((task.seconds for task in tasks), default=0.0)
    by_task = ", ".join(f"{task.task}: {task.counts.messages}" for task in tasks)
    log.info(
        "peeklock sink: %s: accepted=%d bad=%d tasks=%d of %d transfers=%d repeated=%d seconds=%.3f; by task {%s}",
        what,
        accepted,
        sum(task.counts.bad for task in tasks),
        len(tasks),
        len(messages),
        transfers,
        repeated,
        seconds,
        by_task,
    )
