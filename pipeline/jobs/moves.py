"""Whether each message that left one queue for another has arrived there, and each that arrived had left.

A row `deadlettered`, `activated`, `forwarded`, `moved` or `published` names the place that the message left; the row
`enqueued` at the other side names it as its origin. Verdicts of a move, of those that do not match:

| verdict | meaning |
|---|---|
| not_arrived | it left, and at the other side fewer have entered (of `published`: fewer than its copies) |
| arrived_twice | more have entered than had left |
| no_origin | it entered as one that comes from elsewhere, and had not left there |
| undecided | it would be one of these, but the other side may be in a gap, or before or behind the ledger |

A message that is published at once never was in its topic: then both sides are known by the topic and the message id.

Both rows of a move within a partition are of one turn, and have one time. Between partitions (`forwarded`, `moved`) the
destination's row comes first or last, and the partitions' ledgers do not end at the same moment. So a move within
`grace` of a place where we are blind is undecided.
"""

from collections import defaultdict
from datetime import timedelta
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs.ledger import MOVED, MOVES, kept
from pipeline.jobs.offsets import Log, Offsets, local_table, to_micros

MOVE_FAULTS: Final = ("not_arrived", "arrived_twice", "no_origin")
GRACE: Final = timedelta(minutes=5)

_BETWEEN_PARTITIONS = ("forwarded", MOVED)
_MOVE: Final = ("namespace", "generation", "kind", "entity", "subQueue", "sequenceNumber", "messageId")
_LONG_AGO: Final = -(1 << 62)
_NEVER: Final = 1 << 62
_INTERVAL = pa.struct(
    [
        ("from", pa.int64()),
        ("to", pa.int64()),
        ("isWide", pa.bool_()),
        ("partition", pa.int32()),
        ("generation", pa.int32()),
    ]
)
_BLIND: Final = pa.schema([("namespace", pa.string()), ("blind", pa.list_(_INTERVAL))])


def unmatched(offsets: Offsets, grace: timedelta = GRACE, *, is_whole: bool = False) -> DataFrame:
    """Moves of which a side is missing, or doubled, by the place that the message left (`entity`, `subQueue`,
    `sequenceNumber`, or null and `messageId`).

    `left`, `expected` and `arrived`: how often; `firstTime`, `lastTime`; `partition`: the lowest that told of it;
    `verdict`. `is_whole`: nothing had happened before the ledger's first rows.
    """
    sides = _sides(offsets.rows)
    moves = sides.groupBy(*_MOVE).agg(
        F.sum("left").alias("left"),
        F.sum("expected").alias("expected"),
        F.sum("arrived").alias("arrived"),
        F.min("eventTime").alias("firstTime"),
        F.max("eventTime").alias("lastTime"),
        F.min("partition").alias("partition"),
        F.max("partition").alias("maxPartition"),
    )
    is_no_fault = (F.col("arrived") == F.col("expected")) | (
        # A subscription may take several copies of a message, by several rules with actions.
        (F.col("kind") == "published") & (F.col("left") > 0) & (F.col("arrived") > F.col("expected"))
    )
    moves = moves.filter(~F.coalesce(is_no_fault, F.lit(True)))
    verdict = (
        F.when(F.col("left") == 0, "no_origin")
        .when(F.col("arrived") < F.col("expected"), "not_arrived")
        .otherwise("arrived_twice")
    )
    moves = moves.withColumn("verdict", verdict).transform(kept)
    if moves.isEmpty():
        return moves.drop("maxPartition")
    micros = int(grace / timedelta(microseconds=1))
    is_wide = F.col("kind").isin(*_BETWEEN_PARTITIONS)
    slack = F.when(is_wide, F.lit(micros)).otherwise(F.lit(0)).cast("long")
    moves = (
        moves.withColumn("isWide", is_wide)
        .withColumn("fromMicros", F.unix_micros("firstTime") - slack)
        .withColumn("toMicros", F.unix_micros("lastTime") + slack)
        .join(F.broadcast(_blind(offsets, is_whole)), ["namespace"], "left")
    )
    is_hidden = F.exists(
        "blind",
        lambda each: (
            (each["from"] <= F.col("toMicros"))
            & (each["to"] >= F.col("fromMicros"))
            & F.when(F.col("isWide"), F.lit(True)).otherwise(
                ~each["isWide"]
                & (each["generation"] == F.col("generation"))
                & (each["partition"] == F.col("partition"))
            )
        ),
    )
    verdict = F.when(is_hidden, F.lit("undecided")).otherwise(F.col("verdict"))
    return moves.withColumn("verdict", verdict).select(
        *_MOVE, "left", "expected", "arrived", "firstTime", "lastTime", "partition", "verdict"
    )


def _sides(rows: DataFrame) -> DataFrame:
    """Each side of each move, by _MOVE; `expected` is how many enter for what left."""
    op, none = F.col("op"), F.lit(None)
    has_number = F.col("sequenceNumber").isNotNull()

    def generation(kind: str) -> Column:
        # Partitions begin their epochs at different times, so that between them the numbers say nothing.
        return F.when(F.col(kind).isin(*_BETWEEN_PARTITIONS), 0).otherwise(F.col("generation")).alias("generation")

    leaving = rows.filter(op.isin(*MOVES, MOVED)).select(
        "namespace",
        generation("op"),
        op.alias("kind"),
        "entity",
        F.when(has_number, F.col("subQueue")).alias("subQueue"),
        "sequenceNumber",
        F.when(~has_number, F.col("messageId")).otherwise(none).alias("messageId"),
        F.lit(1).alias("left"),
        F.when(op == "published", F.col("copies")).otherwise(1).alias("expected"),
        F.lit(0).alias("arrived"),
        "eventTime",
        "partition",
    )
    came = (op == "enqueued") & F.col("originEntity").isNotNull() & F.col("reason").isin(*MOVES, MOVED)
    arriving = rows.filter(came).select(
        "namespace",
        generation("reason"),
        F.col("reason").alias("kind"),
        F.col("originEntity").alias("entity"),
        F.when(F.col("originSequenceNumber").isNotNull(), F.col("originSubQueue")).alias("subQueue"),
        F.col("originSequenceNumber").alias("sequenceNumber"),
        F.when(F.col("originSequenceNumber").isNull(), F.col("messageId")).otherwise(none).alias("messageId"),
        F.lit(0).alias("left"),
        F.lit(0).alias("expected"),
        F.lit(1).alias("arrived"),
        "eventTime",
        "partition",
    )
    return leaving.unionByName(arriving)


def _blind(offsets: Offsets, is_whole: bool) -> DataFrame:
    """By namespace, `blind`: intervals of time [from, to] (microseconds since 1970) in which a row may be missing.

    `isWide`: only a row of another partition may be.
    """
    intervals: dict[str, list[dict[str, int | bool]]] = defaultdict(list)
    ends: dict[str, int] = defaultdict(lambda: _LONG_AGO)
    for log in offsets.logs:
        ends[log.namespace] = max(ends[log.namespace], to_micros(log.last_time))

        def hide(start: int, end: int, log: Log = log) -> None:
            own = {"partition": log.partition, "generation": log.generation, "isWide": False}
            intervals[log.namespace].append({"from": start, "to": end} | own)

        for problem in log.problems:
            if problem.hides:
                hide(to_micros(problem.first_time), to_micros(problem.last_time))
        if not is_whole:
            hide(_LONG_AGO, to_micros(log.first_time))
    everywhere = {"partition": -1, "generation": -1, "isWide": True}
    for namespace, end in ends.items():
        intervals[namespace].append({"from": end, "to": _NEVER} | everywhere)
    for log in offsets.logs:
        if log.generation > 0:
            # After a restore, a message may have moved in an epoch that the other partition knows nothing of.
            intervals[log.namespace].append({"from": _LONG_AGO, "to": _NEVER} | everywhere)
    rows = [{"namespace": namespace, "blind": blind} for namespace, blind in intervals.items()]
    return local_table(offsets.rows.sparkSession, rows, _BLIND)
