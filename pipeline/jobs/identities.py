"""What became of the message ids that were accepted: those that a fault of the ledger concerns, and how many there are.

As long as all places are fine and all moves match, each accepted message has its end, or waits. So only the ids of places
and moves with faults are followed: for each, how many messages were accepted with it, how many ended, how many wait.
A message without an id is known by its place alone.
"""

from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs.ledger import ENTERS, PLACE, has_place
from pipeline.jobs.moves import MOVE_FAULTS
from pipeline.jobs.offsets import local_table

_MAX_BROADCAST: Final = 100_000

_ID = ("namespace", "messageId")
_IDS = pa.schema(
    [
        *((name, pa.string()) for name in _ID),
        *((name, pa.int64()) for name in ("accepted", "ended", "waiting")),
        ("verdict", pa.string()),
    ]
)


def is_accepted() -> Column:
    """The row is of a message that a client has sent, and that is no copy of another one."""
    enters = F.col("op").isin(*ENTERS) & F.col("originEntity").isNull() & ~F.col("reason").eqNullSafe("moved")
    return enters | _is_published_at_once()


def _is_published_at_once() -> Column:
    return (F.col("op") == "published") & F.col("sequenceNumber").isNull()


def concerned(rows: DataFrame, judged: DataFrame, faults: DataFrame, moves: DataFrame) -> DataFrame:
    """The ids that a fault concerns: `namespace`, `messageId`, `accepted`, `ended`, `waiting`, `verdict`.

    `judged` are all places with their verdicts, `faults` those with a fault, `moves` those that do not match.

    The verdict is `unaccounted`: fewer have ended or wait than were accepted; `never_accepted`: no row says that it was
    accepted, which may be because it was before the ledger's beginning; or `accounted`.
    """
    faulty = moves.filter(F.col("verdict").isin(*MOVE_FAULTS))
    if faults.isEmpty() and faulty.isEmpty():
        return local_table(rows.sparkSession, [], _IDS)
    # Faults are few, as a rule; if they are not, Spark must see for itself how it joins them.
    small = F.broadcast if faults.count() + faulty.count() <= _MAX_BROADCAST else (lambda table: table)
    places = small(faults.select(*PLACE))
    left = small(
        faulty.filter(F.col("sequenceNumber").isNotNull()).select("namespace", "entity", "subQueue", "sequenceNumber")
    )
    brings = rows.filter(F.col("messageId").isNotNull())
    entering = brings.filter(F.col("op").isin(*ENTERS) & has_place())
    origin = {"entity": "originEntity", "subQueue": "originSubQueue", "sequenceNumber": "originSequenceNumber"}
    left_as_origin = small(left.withColumnsRenamed(origin))
    ids = (
        entering.join(places, list(PLACE), "left_semi")
        .select(*_ID)
        .union(entering.join(left, ["namespace", "entity", "subQueue", "sequenceNumber"], "left_semi").select(*_ID))
        .union(entering.join(left_as_origin, ["namespace", *origin.values()], "left_semi").select(*_ID))
        .union(faulty.filter(F.col("messageId").isNotNull()).select(*_ID))
        .distinct()
        .localCheckpoint()
    )
    ids = small(ids)
    states = (
        entering.join(ids, list(_ID), "left_semi")
        .groupBy(*PLACE)
        .agg(F.max("messageId").alias("messageId"), F.sum(is_accepted().cast("int")).alias("accepted"))
        .localCheckpoint()
    )
    states = (
        small(states).join(judged.select(*PLACE, "left", "ended", "verdict", "moved", "arrived"), list(PLACE))
    )
    waits = (F.col("left") == 0) & F.col("verdict").isin("ok", "undecided", "before", "entered_twice")
    of_places = states.select(
        *_ID, "accepted", F.least("ended", F.lit(1)).alias("ended"), waits.cast("int").alias("waiting")
    )
    at_once = brings.filter(_is_published_at_once()).join(ids, list(_ID), "left_semi")
    without_copies = F.col("copies").eqNullSafe(0).cast("int").alias("ended")
    of_topics = at_once.select(*_ID, F.lit(1).alias("accepted"), without_copies, F.lit(0).alias("waiting"))
    counts = of_places.unionByName(of_topics).groupBy(*_ID).agg(
        *(F.sum(name).alias(name) for name in ("accepted", "ended", "waiting"))
    )
    verdict = (
        F.when(F.col("accepted") == 0, "never_accepted")
        .when(F.col("ended") + F.col("waiting") < F.col("accepted"), "unaccounted")
        .otherwise("accounted")
    )
    return counts.withColumn("verdict", verdict).localCheckpoint()
