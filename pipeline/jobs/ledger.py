"""The ledger: one row for each thing that happened to a message in a queue. Its columns, its ops, and where it is read.

A message in a queue is known by its *place*: `PLACE`, with the sequence number. The sequence number alone is not enough
even within an entity: dead-letter and transfer queues number their messages themselves.

A ledger may have two columns that the schema of the journal does not demand:

- `epoch` (string): of the partition's offsets. A store that was restored from a copy begins another epoch. Without the
  column, all rows of a partition are of one epoch.
- `entityId` (long): of the entity that had this name at the time. An entity that is deleted and created again numbers
  its messages from 1 again: without this column, such numbers look as if they had entered twice.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody does
from pyspark.sql import types as T  # noqa: N812

# What ends, or moves on, a message's stay in a queue. `published` does so only with a sequence number: without one, the
# message never waited in its topic.
ENDS: Final = ("completed", "expired", "purged", "cancelled", "quarantined")
MOVES: Final = ("deadlettered", "activated", "forwarded", "published")  # each has its `enqueued` at the other side
MOVED: Final = "moved"  # with its entity to another partition; there `enqueued` with this reason and the same number
NEITHER: Final = (
    *("delivered", "abandoned", "released", "deferred", "lockExpired", "lockLost", "returned"),
    *("duplicate", "ping", "truncated"),
)
ENTERS: Final = ("enqueued", "scheduled")
OPS: Final = frozenset((*ENTERS, *ENDS, *MOVES, MOVED, *NEITHER))

QUEUE: Final = ("namespace", "generation", "entity", "entityId", "subQueue")
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
    "messageId": T.StringType(),
    "reason": T.StringType(),
    "description": T.StringType(),
    "deliveryCount": T.IntegerType(),
    "bodySize": T.LongType(),
    "originEntity": T.StringType(),
    "originSubQueue": T.StringType(),
    "originSequenceNumber": T.LongType(),
    "copies": T.IntegerType(),
}
_KEYS: Final[dict[str, T.DataType]] = {
    "namespace": T.StringType(),
    "epoch": T.StringType(),
    "entityId": T.LongType(),
}
_WHERE_NULL: Final[dict[str, str | int]] = {"namespace": "", "epoch": "", "entityId": 0}


class LedgerError(Exception):
    """The rows are not a ledger; the text names the column."""


def read(spark: SparkSession, path: str) -> DataFrame:
    """Rows of all Parquet files below `path`: of its `table=ledger` if it is where capture writes.

    Raises LedgerError.
    """
    from pyspark.errors import AnalysisException

    for each in (str(PurePosixPath(path) / "table=ledger") if "://" not in path else f"{path}/table=ledger", path):
        try:
            return spark.read.parquet(each)
        except AnalysisException as error:
            reason = error
    raise LedgerError(f"{path}: no Parquet that can be read ({reason.getCondition()})")


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
            value = F.coalesce(value, F.lit(_WHERE_NULL[name]))
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


def enters() -> Column:
    return F.col("op").isin(*ENTERS)


def arrives() -> Column:
    """It came with its entity from another partition, and has the number that it had there."""
    return (F.col("op") == "enqueued") & F.col("reason").eqNullSafe(MOVED)


def has_place() -> Column:
    """The row is about a message in a queue."""
    return F.col("sequenceNumber").isNotNull() & F.col("entity").isNotNull() & F.col("subQueue").isNotNull()


def same(left: DataFrame, right: DataFrame, names: Sequence[str]) -> Column:
    """The condition of a join: all these columns are equal, or both null."""
    condition = F.lit(True)
    for name in names:
        condition &= left[name].eqNullSafe(right[name])
    return condition
