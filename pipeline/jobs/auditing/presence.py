"""What was in a broker's queues where a ledger of its journal ends.

A queue cannot be browsed as it was. So all are browsed as they are, and then the journal tells what has changed since
the ledger's last rows: what has come is left out, and what has gone is put back. Messages may come and go meanwhile.
That is exact, because all that a browse saw or missed had happened before it ended, and the journal is read up to all
that was confirmed by then.

Only queues are browsed that the ledger knows. Those that the broker does not show are left out: topics, whose scheduled
messages nobody can see, entities that are disabled, and those that were deleted, or deleted and made anew, since.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs.auditing.offsets import Log, local_table
from pipeline.jobs.auditing.queues import newest_of
from pipeline.jobs.auditing.verdicts import Snapshot
from pipeline.jobs.ledger import LedgerError
from protocol.client.browsing import browse, last_numbers
from protocol.client.connection import Connection
from protocol.client.errors import AuthenticationFailed, ClientError
from pyspark_peeklock.as_of import ENTERING, LEAVING
from pyspark_peeklock.as_of import MOVED as WITH_ITS_ENTITY
from pyspark_peeklock.browse import ATTEMPTS, PAGE, PAUSE_S, connected
from pyspark_peeklock.errors import BrowseFailed
from pyspark_peeklock.journal_client import Endpoint, JournalClient
from pyspark_peeklock.journal_offsets import PartitionState
from pyspark_peeklock.options import SUB_QUEUES, Access
from pyspark_peeklock.parts import OffsetRange

ROWS_AT_ONCE: Final = 50_000
MAX_TASKS: Final = 16  # connections that browse at once
_HIDDEN: Final = frozenset({"amqp:not-found", "amqp:not-allowed", "com.microsoft:entity-disabled"})

_PLACE: Final = ("name", "subQueue", "sequenceNumber")
_CHANGE_TYPES: Final = (
    "partition int, journalOffset bigint, op string, entity string, entityId int, subQueue string, "
    "sequenceNumber bigint, description string"
)
_CHANGE_SCHEMA: Final = pa.schema(
    [
        *(("partition", pa.int32()), ("journalOffset", pa.int64()), ("op", pa.string()), ("entity", pa.string())),
        *(("entityId", pa.int32()), ("subQueue", pa.string()), ("sequenceNumber", pa.int64())),
        ("description", pa.string()),
    ]
)
_SEEN: Final = "entity string, subQueue string, sequenceNumber bigint, refused string"
_SEEN_SCHEMA: Final = pa.schema(
    [("entity", pa.string()), ("subQueue", pa.string()), ("sequenceNumber", pa.int64()), ("refused", pa.string())]
)
_QUEUES: Final = pa.schema([("entity", pa.string()), ("subQueue", pa.string())])
_IDS: Final = pa.schema([("name", pa.string()), ("entityId", pa.int32())])
_RANGES: Final = pa.schema(
    [("partition", pa.int32()), ("epoch", pa.string()), ("first", pa.int64()), ("end", pa.int64())]
)


class Presence(NamedTuple):
    """`refused`: why queues could not be browsed, by entity and subqueue."""

    snapshot: Snapshot
    refused: dict[tuple[str, str], str]


def presence(endpoint: Endpoint, logs: Sequence[Log], queues: DataFrame) -> Presence:
    """The messages that were there where the ledger ends; `logs` are its, and `queues` those of `queues.names_of`.

    Raises LedgerError if the ledger is not of this broker, and what the client of the journal raises; what tasks raise,
    as BrowseFailed, comes as Spark's exception.
    """
    spark = queues.sparkSession
    client = JournalClient(endpoint)
    try:
        namespace, cut = _cut(client, logs)
        newest = {row.name: row.entityId for row in newest_of(queues).collect() if row.namespace == namespace}
        wanted = {
            (row.name, row.subQueue): row.entity
            for row in queues.collect()
            if row.namespace == namespace and newest[row.name] == row.entityId and row.subQueue in SUB_QUEUES
        }
        seen = _browsed(spark, endpoint, [(entity, sub_queue) for (_, sub_queue), entity in sorted(wanted.items())])
        changes = _changes(spark, endpoint, client, cut)
    finally:
        client.close()
    refused = {
        (row.name, row.subQueue): str(row.refused)
        for row in seen.filter("refused is not null").select(F.lower("entity").alias("name"), "*").collect()
    }
    remade = {
        row.name
        for row in changes.select("name", "entityId").distinct().collect()
        if row.entityId != newest.get(row.name, row.entityId)
    }
    refused |= {place: "another entity has its name now" for place in wanted if place[0] in remade}
    messages = _as_of(seen.filter("refused is null"), changes, newest).withColumn("namespace", F.lit(namespace))
    shown = frozenset((namespace, *place) for place in wanted.keys() - refused.keys())
    return Presence(Snapshot(messages, queues=shown), refused)


def _cut(client: JournalClient, logs: Sequence[Log]) -> tuple[str, list[OffsetRange]]:
    """The namespace, and where the ledger ends, as ranges that begin there and have no end yet."""
    namespace, states = client.states()
    own = {log.partition: log for log in logs if log.namespace == namespace and log.generation == 0}
    if not own:
        others = ", ".join(sorted({log.namespace for log in logs})) or "none"
        raise LedgerError(f"the ledger has no rows of the namespace {namespace}, which the broker is; it has {others}")
    found = []
    for partition, log in own.items():
        state = states.get(partition)
        if state is None or state.epoch != log.epoch:
            raise LedgerError(
                f"the ledger ends in the epoch {log.epoch} of partition {partition}, and the broker's journal is in "
                f"{state.epoch if state else 'none'}: capture again"
            )
        _require_kept(log.end, state)
        found.append(OffsetRange(partition, log.epoch, log.end, log.end))
    for partition in states.keys() - own.keys():  # it had no rows yet
        _require_kept(0, states[partition])
        found.append(OffsetRange(partition, states[partition].epoch, 0, 0))
    return namespace, found


def _require_kept(end: int, state: PartitionState) -> None:
    """Raise LedgerError if rows behind the ledger's end are gone."""
    if end < state.low:
        raise LedgerError(
            f"the ledger ends before offset {end} of partition {state.partition}, and the journal keeps rows from "
            f"{state.low} on: capture again"
        )


# -- what is there now


def _browsed(spark: SparkSession, endpoint: Endpoint, queues: Sequence[tuple[str, str]]) -> DataFrame:
    """All messages of these queues: looked at once, because they would be others the next time."""
    rows = [{"entity": entity, "subQueue": sub_queue} for entity, sub_queue in queues]
    tasks = max(1, min(MAX_TASKS, spark.sparkContext.defaultParallelism, len(rows)))
    spread = local_table(spark, rows, _QUEUES).repartition(tasks)
    return spread.mapInArrow(lambda batches: _looked_at(endpoint, batches), _SEEN).localCheckpoint()


def _looked_at(endpoint: Endpoint, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    browser = _Browser(endpoint.access)
    with asyncio.Runner() as runner:
        for row in (row for batch in batches for row in batch.to_pylist()):
            numbers = browser.numbers(row["entity"], row["subQueue"])
            try:
                while found := runner.run(_some(numbers)):
                    yield _batch(row, found, None)
            except _Refused as error:
                yield _batch(row, [None], str(error))
            except (ClientError, TimeoutError) as error:
                raise BrowseFailed(f"{row['entity']} ({row['subQueue']}): {error or 'no answer'}") from error
        runner.run(browser.close())


async def _some(numbers: AsyncGenerator[int, None]) -> list[int]:
    found: list[int] = []
    while len(found) < ROWS_AT_ONCE and (number := await anext(numbers, None)) is not None:
        found.append(number)
    return found


def _batch(queue: dict[str, str], numbers: Sequence[int | None], refused: str | None) -> pa.RecordBatch:
    count = len(numbers)
    columns = [[queue["entity"]] * count, [queue["subQueue"]] * count, numbers, [refused] * count]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, _SEEN_SCHEMA, strict=True)], schema=_SEEN_SCHEMA
    )


class _Refused(Exception):
    """The broker does not show this queue."""


class _Browser:
    """Has one connection for one queue after the other."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._connection: Connection | None = None

    async def numbers(self, entity: str, sub_queue: str) -> AsyncGenerator[int, None]:
        """Yield the numbers of all messages that were there when this began and still are.

        Raises _Refused, ClientError, TimeoutError.
        """
        start, attempts = 0, 0
        last: dict[int, int] | None = None
        while True:
            try:
                management = await (await self._connected()).management(f"{entity}{SUB_QUEUES[sub_queue]}")
                last = await last_numbers(management) if last is None else last
                async for message in browse(management, start, page=PAGE, omit_body=True, last=last):
                    start, attempts = (message.sequence_number or 0) + 1, 0
                    yield start - 1
                return
            except AuthenticationFailed:
                raise
            except (ClientError, TimeoutError) as error:
                if isinstance(error, ClientError) and error.condition in _HIDDEN:
                    raise _Refused(error.description.partition(" TrackingId:")[0]) from None
                attempts += 1
                if attempts == ATTEMPTS:
                    raise
                await self.close()
                await asyncio.sleep(PAUSE_S)

    async def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = await connected(self._access)
        return self._connection

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


# -- what has changed since


def _changes(spark: SparkSession, endpoint: Endpoint, client: JournalClient, cut: Sequence[OffsetRange]) -> DataFrame:
    """What came and went from the cut until now: `name`, `entityId`, `subQueue`, `sequenceNumber`, and `hadCome`: it
    was not there before. Once each.

    A message that has gone comes back only when the broker takes back that it went. Raises LedgerError if the journal
    has a gap there.
    """
    _, states = client.states(current=True)
    rows: list[dict[str, Any]] = []
    for each in cut:
        state = states.get(each.partition)
        if state is None or state.epoch != each.epoch:
            raise LedgerError(f"partition {each.partition} was restored meanwhile: capture again")
        if each.first < state.stable:
            rows.append({"partition": each.partition, "epoch": each.epoch, "first": each.first, "end": state.stable})
    spread = local_table(spark, rows, _RANGES).repartition(max(1, len(rows)))
    read = spread.mapInArrow(lambda batches: _rows_of(endpoint, batches), _CHANGE_TYPES).localCheckpoint()
    gaps = read.filter("op = 'truncated'").select("description").head(1)
    if gaps:
        raise LedgerError(f"the journal has a gap since the ledger ends: {gaps[0].description}")
    place = (F.lower("entity").alias("name"), "entityId", "subQueue", "sequenceNumber")
    firsts = read.groupBy(*place, "partition").agg(
        F.min_by(F.col("op").isin(*ENTERING), "journalOffset").alias("hadCome")
    )
    # Only one that moved with its entity has rows of two partitions, and it came in the first of these if at all.
    return firsts.groupBy("name", "entityId", "subQueue", "sequenceNumber").agg(F.max("hadCome").alias("hadCome"))


def _rows_of(endpoint: Endpoint, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of these ranges about messages that have come or gone, and gaps."""
    entering, wanted = pa.array([*ENTERING]), pa.array([*ENTERING, *LEAVING, "truncated"])
    client = JournalClient(endpoint)
    try:
        for row in (row for batch in batches for row in batch.to_pylist()):
            place = OffsetRange(row["partition"], row["epoch"], row["first"], row["end"])
            for batch in client.batches(place, entity=None, records=False):
                op, reason = (batch.column(name).cast(pa.string()) for name in ("op", "reason"))
                # One that moved with its entity has not come.
                has_moved = pc.and_(pc.is_in(op, entering), pc.fill_null(pc.equal(reason, WITH_ITS_ENTITY), False))
                yield _as_told(batch.filter(pc.and_(pc.is_in(op, wanted), pc.invert(has_moved))))
    finally:
        client.close()


def _as_told(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Cast the columns to the types that Spark was told of: texts are dictionaries in the journal."""
    columns = [batch.column(field.name).cast(field.type) for field in _CHANGE_SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=_CHANGE_SCHEMA)


def _as_of(seen: DataFrame, changes: DataFrame, newest: Mapping[str, int]) -> DataFrame:
    """`entity`, `subQueue`, `sequenceNumber` of what was there before the changes.

    A message that came and went since was not there. `newest` has the ids of entities by their names in lower case: of
    others of the same name, nothing is put back.
    """
    came = changes.filter("hadCome").select(*_PLACE)
    ids = local_table(seen.sparkSession, [{"name": name, "entityId": each} for name, each in newest.items()], _IDS)
    went = changes.filter("not hadCome").join(F.broadcast(ids), ["name", "entityId"], "left_semi")
    there = seen.withColumn("name", F.lower("entity")).select(*_PLACE).union(went.select(*_PLACE)).distinct()
    return there.join(came, list(_PLACE), "left_anti").withColumnRenamed("name", "entity")
