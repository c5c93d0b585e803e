"""Whether each message that left one queue for another has arrived there, and each that arrived had left.

A row `deadlettered`, `activated`, `forwarded`, `moved` or `published` names the place that the message left; the row
`enqueued` at the other side names it as its origin. Verdicts of a move, of those that do not match:

| verdict | meaning |
|---|---|
| not_arrived | it left, and at the other side fewer have entered (of `published`: fewer than its copies) |
| arrived_twice | more have entered than had left |
| no_origin | it entered as one that comes from elsewhere, and had not left there |
| undecided | it would be one of these, but the other side may be in a gap, or before or behind the ledger |

Many *published* messages never were in their topic, and have no number there. Their copies enter in the same turn, so
both sides are compared for each turn, by its time. A *forwarded* message has also arrived if a topic published it at
once, or a queue dropped it as a duplicate: such a row has no number, and names the origin as `enqueued` does.

Both rows of a move within a partition are of one turn, and have one time. Between partitions (`forwarded`, `moved`) the
destination's row comes first or last, and the partitions' ledgers do not end at the same moment. So a move within
`grace` of a place where we are blind is undecided.
"""

from collections import defaultdict
from datetime import timedelta
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs.auditing.offsets import HIDING, Log, Offsets, local_table, to_micros
from pipeline.jobs.ledger import MOVED, MOVES, kept

MOVE_FAULTS: Final = ("not_arrived", "arrived_twice", "no_origin")
GRACE: Final = timedelta(minutes=5)

_BETWEEN_PARTITIONS = ("forwarded", MOVED)
# `turnMicros` is the time of a turn, of messages that are published.
_MOVE: Final = ("namespace", "generation", "kind", "entity", "entityId", "subQueue", "sequenceNumber", "turnMicros")
_MORE: Final = ("messageId", "eventTime", "partition")
_SHOWN: Final = (
    *("namespace", "generation", "kind", "entity", "entityId", "subQueue", "sequenceNumber", "messageId"),
    *("left", "expected", "arrived", "firstTime", "lastTime", "partition", "verdict"),
)
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


class Pending(NamedTuple):
    """What the audit before leaves to this one: the moves whose other side may come after its end, as `pending` gives
    them; and the problems near which it was blind, as `blind` gives them."""

    moves: DataFrame
    problems: DataFrame


def unmatched(
    offsets: Offsets, grace: timedelta = GRACE, *, is_whole: bool = False, before: Pending | None = None
) -> DataFrame:
    """Moves of which a side is missing, or doubled, by the place that the message left: `namespace`, `generation`,
    `kind`, `entity` (in lower case), `entityId`, `subQueue`, `sequenceNumber`. Of published ones the last two are null.

    `messageId`, where only one is known; `left`, `expected` and `arrived`: how often; `firstTime`, `lastTime`;
    `partition`: the lowest that told of it; `verdict`. `is_whole`: nothing had happened before the ledger's first rows,
    or it is known: what an audit `before` left is judged with them. `turnMicros`, and `isPending`: the other side may
    be behind the ledger's end.
    """
    sides = _sides(offsets.rows)
    if before is not None:
        sides = sides.unionByName(_left_over(before.moves))
    moves = sides.groupBy(*_MOVE).agg(
        *(F.sum(name).alias(name) for name in ("left", "expected", "arrived")),
        F.when(F.min("messageId") == F.max("messageId"), F.max("messageId")).alias("messageId"),
        F.min("eventTime").alias("firstTime"),
        F.max("eventTime").alias("lastTime"),
        F.min("partition").alias("partition"),
    )
    # A subscription may take several copies of a message, by several rules with actions.
    may_be_more = (F.col("kind") == "published") & (F.col("left") > 0)
    is_fine = (F.col("arrived") == F.col("expected")) | (may_be_more & (F.col("arrived") > F.col("expected")))
    verdict = (
        F.when(F.col("left") == 0, "no_origin")
        .when(F.col("arrived") < F.col("expected"), "not_arrived")
        .otherwise("arrived_twice")
    )
    moves = moves.filter(~is_fine).withColumn("verdict", verdict).transform(kept)
    if moves.isEmpty():
        return moves.select(*_SHOWN, "turnMicros", F.lit(False).alias("isPending"))
    micros = int(grace / timedelta(microseconds=1))
    is_wide = F.col("kind").isin(*_BETWEEN_PARTITIONS)
    slack = F.when(is_wide, F.lit(micros)).otherwise(F.lit(0)).cast("long")
    moves = (
        moves.withColumn("isWide", is_wide)
        .withColumn("fromMicros", F.unix_micros("firstTime") - slack)
        .withColumn("toMicros", F.unix_micros("lastTime") + slack)
        .join(F.broadcast(_blind(offsets, is_whole, before)), ["namespace"], "left")
    )

    def hides(each: Column) -> Column:
        return (
            (each["from"] <= F.col("toMicros"))
            & (each["to"] >= F.col("fromMicros"))
            & F.when(F.col("isWide"), F.lit(True)).otherwise(
                ~each["isWide"]
                & (each["generation"] == F.col("generation"))
                & (each["partition"] == F.col("partition"))
            )
        )

    verdict = F.when(F.exists("blind", hides), F.lit("undecided")).otherwise(F.col("verdict"))
    is_at_end = F.exists("blind", lambda each: hides(each) & (each["to"] == _NEVER) & (each["from"] > _LONG_AGO))
    moves = moves.withColumn("verdict", verdict).withColumn("isPending", is_at_end)
    return moves.select(*_SHOWN, "turnMicros", "isPending").transform(kept)


def pending(found: DataFrame) -> DataFrame:
    """Return those of the rows of `unmatched` that an audit that goes on from here has to know."""
    return found.filter("isPending").drop("verdict", "isPending")


def blind(offsets: Offsets, grace: timedelta, before: Pending | None) -> DataFrame:
    """The problems (`Offsets.problems_table`) that may hide a side of a move whose other side is behind the end."""
    own = offsets.problems_table()
    if before is None or not offsets.logs:
        return own
    since = min(to_micros(log.last_time) for log in offsets.logs) - 2 * int(grace / timedelta(microseconds=1))
    return own.unionByName(before.problems.filter(F.unix_micros("lastTime") >= since))


def shown(found: DataFrame) -> DataFrame:
    """What `unmatched` found, for people."""
    return found.select(*_SHOWN)


def _left_over(moves: DataFrame) -> DataFrame:
    """What `pending` gave as sides of moves: the sums with the first time, and nothing more with the last."""
    counts = ("left", "expected", "arrived")
    at_first = moves.select(*_MOVE, *counts, "messageId", F.col("firstTime").alias("eventTime"), "partition")
    none = [F.lit(0).cast("bigint").alias(name) for name in counts]
    at_last = moves.select(*_MOVE, *none, "messageId", F.col("lastTime").alias("eventTime"), "partition")
    return at_first.unionByName(at_last)


def _sides(rows: DataFrame) -> DataFrame:
    """Each side of each move, by _MOVE: how often it `left` and `arrived`, and how many are `expected` to arrive."""
    op, has_origin = F.col("op"), F.col("originEntity").isNotNull()
    # Published at once, or dropped.
    has_passed = has_origin & op.isin("published", "duplicate")
    has_arrived = has_passed | (has_origin & (op == "enqueued") & F.col("reason").isin(*MOVES, MOVED))
    has_left = op.isin(*MOVES, MOVED)
    copies = F.when(op == "published", F.coalesce("copies", F.lit(0))).otherwise(1)
    leaving = F.struct(
        *_move(op, "entity", "entityId", "subQueue", "sequenceNumber"),
        *(F.lit(1).alias("left"), copies.alias("expected"), F.lit(0).alias("arrived")),
    )
    kind = F.when(has_passed, "forwarded").otherwise(F.col("reason"))
    arriving = F.struct(
        *_move(kind, "originEntity", "originEntityId", "originSubQueue", "originSequenceNumber"),
        *(F.lit(0).alias("left"), F.lit(0).alias("expected"), F.lit(1).alias("arrived")),
    )
    # A row may be of two moves: of a message that was forwarded to a topic, and published there at once.
    sides = F.array_compact(F.array(F.when(has_left, leaving), F.when(has_arrived, arriving)))
    return rows.filter(has_left | has_arrived).select(F.explode(sides).alias("side"), *_MORE).select("side.*", *_MORE)


def _move(kind: Column, entity: str, entity_id: str, sub_queue: str, number: str) -> list[Column]:
    """_MOVE, of columns with these names."""
    is_published = kind == "published"
    is_of_one_log = ~kind.isin(*_BETWEEN_PARTITIONS)
    return [
        F.col("namespace"),
        # Partitions begin their epochs at different times, so that between them the numbers say nothing.
        F.when(is_of_one_log, F.col("generation")).otherwise(0).alias("generation"),
        kind.alias("kind"),
        F.lower(entity).alias("entity"),
        F.col(entity_id).alias("entityId"),
        F.when(~is_published, F.col(sub_queue)).alias("subQueue"),
        F.when(~is_published, F.col(number)).alias("sequenceNumber"),
        F.when(is_published, F.unix_micros("eventTime")).alias("turnMicros"),
    ]


def _blind(offsets: Offsets, is_whole: bool, before: Pending | None) -> DataFrame:
    """Return by namespace `blind`: intervals [from, to] (microseconds since 1970) in which a row may be missing.

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
    columns = ("namespace", "partition", "generation", F.unix_micros("firstTime"), F.unix_micros("lastTime"))
    problems = [] if before is None else before.problems.filter(F.col("kind").isin(*HIDING)).select(*columns).collect()
    for namespace, partition, generation, start, end in problems:
        own = {"partition": partition, "generation": generation, "isWide": False}
        intervals[namespace].append({"from": start, "to": end} | own)
    everywhere = {"partition": -1, "generation": -1, "isWide": True}
    for namespace, end in ends.items():
        intervals[namespace].append({"from": end, "to": _NEVER} | everywhere)
    for log in offsets.logs:
        if log.generation > 0:
            # After a restore, a message may have moved in an epoch that the other partition knows nothing of.
            intervals[log.namespace].append({"from": _LONG_AGO, "to": _NEVER} | everywhere)
    rows = [{"namespace": namespace, "blind": blind} for namespace, blind in intervals.items()]
    return local_table(offsets.rows.sparkSession, rows, _BLIND)
