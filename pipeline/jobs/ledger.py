"""The ledger: one row for each thing that happened to a message in a queue. Its columns, its ops, and where it is read.

A message in a queue is known by its *place*: the queue (`QUEUE`), and the sequence number that it has there.

A ledger may have columns that the rows of the journal do not have:

- `namespace` and `epoch` (of the partition's offsets), which captures add. A store that was restored from a copy begins
  another epoch. Without the column, all rows of a partition are of one epoch.

An entity that is deleted and created again under its name numbers its messages from 1 again. It has another
`entityId`, so that the two are different queues. Without this column, all entities of one name are one.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple, Self

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody does
from pyspark.sql import types as T  # noqa: N812

from pipeline.jobs.captured import Manifest, NoCapture
from storage.capture.manifest import TableName

# What ends, or moves on, a message's stay in a queue. `published` does so only with a sequence number: without one, the
# message never waited in its topic.
ENDS: Final = ("completed", "expired", "purged", "cancelled", "quarantined")
MOVES: Final = ("deadlettered", "activated", "forwarded", "published")  # each has its `enqueued` at the other side
# The reason of a row `enqueued`: it had left by receive-and-delete, could not be transferred, and is there again.
RESTORED: Final = "restored"
MOVED: Final = "moved"  # with its entity to another partition; there `enqueued` with this reason and the same number
ENTERS: Final = ("enqueued", "scheduled")

UNEXPLAINED: Final = "unexplained"  # the reason of a row `purged` of which the broker does not know why it left

NAMES: Final = ("namespace", "entity", "entityId", "subQueue")
# `queue` is a hash of NAMES: to compare, group and keep strings costs most of the audit's time. `generation`: see
# `auditing.offsets`.
QUEUE: Final = ("generation", "queue")
PLACE: Final = (*QUEUE, "sequenceNumber")
LOG: Final = ("namespace", "partition", "generation")  # of one partition's offsets in one epoch

_REQUIRED: Final[dict[str, T.DataType]] = {
    "partition": T.IntegerType(),
    "journalOffset": T.LongType(),
    "eventTime": T.TimestampType(),
    "op": T.StringType(),
    "entity": T.StringType(),
    "subQueue": T.StringType(),
    "sequenceNumber": T.LongType(),
}
_OPTIONAL: Final[dict[str, T.DataType]] = {
    "entityId": T.IntegerType(),
    "messageId": T.StringType(),
    "reason": T.StringType(),
    "description": T.StringType(),
    "deliveryCount": T.IntegerType(),
    "bodySize": T.LongType(),
    "originEntity": T.StringType(),
    "originEntityId": T.IntegerType(),
    "originSubQueue": T.StringType(),
    "originSequenceNumber": T.LongType(),
    "copies": T.IntegerType(),
    "record": T.BinaryType(),
}
_KEYS: Final[dict[str, T.DataType]] = {
    "namespace": T.StringType(),
    "epoch": T.StringType(),
}
_WHERE_NULL: Final[dict[str, str | int]] = {"namespace": "", "epoch": "", "entityId": 0, "originEntityId": 0}

MAX_LOCAL = 10_000  # rows of a table that is held in Python

_PARTITIONS: Final = "spark.sql.shuffle.partitions"
_COMPRESSION: Final = "spark.sql.sources.fileCompressionFactor"  # so many times larger Spark takes rows for
_PARTITION_BYTES: Final = 32 << 20  # of Parquet: a million messages
_MAX_PARTITIONS: Final = 4000


class LedgerError(Exception):
    """The rows are not a ledger; the text names the column."""


class Source(NamedTuple):
    """Where a ledger is read. Without a manifest, nothing says which files count, and what they should have."""

    path: str
    manifest: Manifest | None

    @classmethod
    def at(cls, path: str) -> Self:
        """Open the ledger at `path`. Raises LedgerError, DamagedLedger."""
        try:
            return cls(path, Manifest.at(path))
        except NoCapture as error:
            raise LedgerError(f"{path}: {error}") from error

    def described(self) -> str:
        if self.manifest is None:
            return f"{self.path}: no manifest, so that nobody can say whether files are missing or damaged"
        return f"{self.path}: {self.manifest.described()}"

    def has(self, table: str) -> bool:
        """Whether a capture has rows of the table."""
        return self.manifest is not None and bool(self.manifest.files(TableName(table)))

    def rows(
        self, spark: SparkSession, table: str = "ledger", behind: Mapping[tuple[int, str], int] | None = None
    ) -> DataFrame:
        """The rows of all files of the table that the manifest names, when they were compared with it. Without a
        manifest, of all Parquet files below the path, or below its folder `table=...` if it has one.

        `behind`: rows before these offsets, by partition and epoch, are not wanted. Files of a capture that have no
        others are left out, but for one, so that there are columns. Shuffles of the session get more partitions if the
        files are large. Raises LedgerError, DamagedLedger.
        """
        from pyspark.errors import AnalysisException

        reader = spark.read.option("parquet.page.verify-checksum.enabled", "true")
        if self.manifest is not None:
            files = self.manifest.files(TableName(table), behind)
            if not files:
                raise LedgerError(f"{self.path}: the capture has no rows of the table {table} yet")
            return _divided(reader.parquet(*self.manifest.uris(spark, files)))
        for folder in (f"{self.path.rstrip('/')}/table={table}", self.path):
            try:
                return _divided(reader.parquet(folder))
            except AnalysisException as error:
                reason = error
        raise LedgerError(f"{self.path}: no Parquet that can be read ({reason.getCondition()})")


def read(spark: SparkSession, path: str) -> DataFrame:
    """The rows of a ledger. Raises LedgerError, DamagedLedger."""
    return Source.at(path).rows(spark)


def _divided(rows: DataFrame) -> DataFrame:
    """The same rows; shuffles have as many partitions as so large files need, if they had fewer."""
    spark = rows.sparkSession
    # What Spark's planner knows of its files. There is no public way to ask it.
    size = int(rows._jdf.queryExecution().optimizedPlan().stats().sizeInBytes())
    size = int(size / float(spark.conf.get(_COMPRESSION) or 1))
    wanted = min(size // _PARTITION_BYTES, _MAX_PARTITIONS)
    if wanted > int(spark.conf.get(_PARTITIONS) or 0):
        spark.conf.set(_PARTITIONS, wanted)
    return rows


def normalized(rows: DataFrame) -> DataFrame:
    """The columns that jobs use, of the types that they expect; those that are missing and may be, with their defaults.

    Raises LedgerError that names a column which is missing or of another type.
    """
    given = {field.name: field.dataType for field in rows.schema.fields}
    if missing := [name for name in _REQUIRED if name not in given]:
        raise LedgerError(f"the ledger has no column {missing[0]}; it has {', '.join(given) or 'none'}")
    columns: list[Column] = []
    for name, wanted in (_REQUIRED | _OPTIONAL | _KEYS).items():
        value = F.col(name) if name in given else F.lit(_WHERE_NULL.get(name))
        if name in given and not _fits(given[name], wanted):
            kind = given[name].simpleString()
            raise LedgerError(f"column {name} of the ledger is {kind}; it must be {wanted.simpleString()}")
        value = value.cast(wanted)
        if name in given and name in _WHERE_NULL:
            value = F.coalesce(value, F.lit(_WHERE_NULL[name]).cast(wanted))
        columns.append(value.alias(name))
    return rows.select(*columns)


def _fits(given: T.DataType, wanted: T.DataType) -> bool:
    if isinstance(wanted, (T.IntegerType, T.LongType)):
        return isinstance(given, (T.ByteType, T.ShortType, T.IntegerType, T.LongType))
    if isinstance(wanted, T.TimestampType):
        return isinstance(given, (T.TimestampType, T.TimestampNTZType))
    return isinstance(given, type(wanted))


def until(rows: DataFrame, cut: Mapping[tuple[int, str | None], int] | None) -> DataFrame:
    """The rows before the cut: by (partition, epoch), the offset behind the last row that counts.

    An epoch of None means all of the partition's. Raises LedgerError if there are rows of a partition that the cut does
    not name.
    """
    if cut is None:
        return rows
    named = sorted({partition for partition, _ in cut})
    others = rows.filter(~F.col("partition").isin(named)).select("partition").distinct().sort("partition").head(4)
    if others:
        unnamed = ", ".join(str(row.partition) for row in others)
        raise LedgerError(f"the cut has no offset for partition {unnamed}")
    within = F.lit(False)
    for (partition, epoch), offset in cut.items():
        fits = (F.col("partition") == partition) & (F.col("journalOffset") < offset)
        within |= fits if epoch is None else fits & (F.col("epoch") == epoch)
    return rows.filter(within)


def kept(table: DataFrame, *, is_costly: bool = False) -> DataFrame:
    """The same rows, computed now, once. For tables that are small, or used more than once.

    A small table is held in Python and is a part of the plans that use it, so that Spark knows how small it is: it
    broadcasts it, filters it without a job, and leaves out a join with nothing. Of a table with more than MAX_LOCAL
    rows, the first ones are computed twice; not of one that `is_costly`, which takes a job more.

    The columns are new ones for Spark. Otherwise a join of a kept table with one that it was made of finds them
    ambiguous, with some settings.
    """
    if is_costly:
        table = table.localCheckpoint()
    few = table.limit(MAX_LOCAL + 1).toArrow()
    if few.num_rows <= MAX_LOCAL:
        return table.sparkSession.createDataFrame(few, table.schema)
    rows = table if is_costly else table.localCheckpoint()
    return rows.select(*(F.col(name).alias(name) for name in rows.columns))


def queue(entity: str = "entity", entity_id: str = "entityId", sub_queue: str = "subQueue") -> Column:
    """A hash of NAMES. Names of entities are the same in whatever case: clients write them as they like."""
    return F.xxhash64("namespace", F.lower(entity), entity_id, sub_queue).alias("queue")


def enters() -> Column:
    return F.col("op").isin(*ENTERS)


def arrives() -> Column:
    """It came with its entity from another partition, and has the number that it had there."""
    return (F.col("op") == "enqueued") & F.col("reason").eqNullSafe(MOVED)


def is_restored() -> Column:
    """It takes back that the message had left."""
    return (F.col("op") == "enqueued") & F.col("reason").eqNullSafe(RESTORED)


def has_place() -> Column:
    """The row is about a message in a queue."""
    return F.col("sequenceNumber").isNotNull() & F.col("entity").isNotNull() & F.col("subQueue").isNotNull()
