"""What became of the message ids that were accepted: those that a fault of the ledger concerns, and how many there are.

As long as all places are fine and all moves match, each accepted message has its end, or waits. So only the ids of
places and moves with faults are followed: for each, how many messages were accepted with it, how many ended, how many
wait. A message without an id is known by its place alone.

The id is in the first row of a message, and in those of its later places if the broker knew it there. So moves are
followed back to the first place, and from there to all others.
"""

from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs.auditing.moves import MOVE_FAULTS
from pipeline.jobs.auditing.offsets import local_table
from pipeline.jobs.auditing.verdicts import FAULTS, Judged
from pipeline.jobs.ledger import ENTERS, PLACE, arrives, has_place, is_restored, kept, queue

MAX_MOVES: Final = (
    12  # of one message that are followed: five entities, each with a transfer queue, and two dead-letter queues
)

_ID: Final = ("namespace", "messageId")
_IDS: Final = pa.schema(
    [
        *((name, pa.string()) for name in _ID),
        *((name, pa.int64()) for name in ("accepted", "ended", "waiting")),
        ("verdict", pa.string()),
    ]
)
_PARENT: Final = ("generation", "parentQueue", "parentNumber")


def is_accepted() -> Column:
    """The row is of a message that a client has sent, and that is no copy of another one."""
    enters = F.col("op").isin(*ENTERS) & F.col("originEntity").isNull()
    return (enters & ~arrives() & ~is_restored()) | _is_published_at_once()


def _is_published_at_once() -> Column:
    return (F.col("op") == "published") & F.col("sequenceNumber").isNull() & F.col("originEntity").isNull()


def concerned(rows: DataFrame, judged: Judged, moves: DataFrame) -> DataFrame:
    """The ids that a fault concerns: `namespace`, `messageId`, `accepted`, `ended`, `waiting`, `verdict`.

    `rows` are those of `Offsets`, `moves` those that do not match.

    The verdict is `unaccounted`: fewer have ended or wait than were accepted; `never_accepted`: no row says that it was
    accepted, which may be because it was before the ledger's beginning; or `accounted`.
    """
    faulty = moves.filter(F.col("verdict").isin(*MOVE_FAULTS))
    faults = judged.others.filter(F.col("verdict").isin(*FAULTS))
    if faults.isEmpty() and faulty.isEmpty():
        return local_table(rows.sparkSession, [], _IDS)
    is_entering = F.col("op").isin(*ENTERS) & ~is_restored() & has_place()
    moved = (
        rows.filter(is_entering & F.col("originSequenceNumber").isNotNull())
        .select(
            *PLACE,
            queue("originEntity", "originEntityId", "originSubQueue").alias("parentQueue"),
            F.col("originSequenceNumber").alias("parentNumber"),
        )
        .localCheckpoint(eager=False)  # each step along the moves reads it
    )
    left = faulty.filter(F.col("sequenceNumber").isNotNull()).select("generation", queue(), "sequenceNumber")
    as_parent = dict(zip(PLACE, _PARENT, strict=True))
    arrived = moved.join(left.withColumnsRenamed(as_parent), list(_PARENT), "left_semi").select(*PLACE)
    suspects = faults.select(*PLACE).union(left).union(arrived).distinct().transform(kept)
    origins = _with_parents(suspects, moved)
    named = rows.filter(F.col("messageId").isNotNull())
    ids = named.filter(is_entering).join(origins, list(PLACE), "left_semi").select(*_ID)
    ids = ids.union(faulty.filter(F.col("messageId").isNotNull()).select(*_ID)).distinct().transform(kept)
    is_dropped = _is_published_at_once() & (F.col("copies") == 0)
    told = named.filter(is_entering | is_dropped).select(
        *PLACE,
        *_ID,
        is_dropped.alias("isDropped"),
        # Of a message that was published at once, its copies are the first that the ledger has with its id.
        (is_accepted() | F.col("originSequenceNumber").isNull()).cast("int").alias("accepted"),
    )
    told = told.join(ids, list(_ID), "left_semi").transform(kept)
    first = told.filter(~F.col("isDropped"))
    # Of each place, the id of the first one that it came from.
    owners = first.groupBy(*PLACE).agg(*(F.max(name).alias(name) for name in _ID)).transform(kept)
    owned = _owned(owners, moved)
    accepted = first.groupBy(*_ID).agg(F.sum("accepted").alias("accepted"))
    states = owned.join(judged.all().select(*PLACE, "left", "ended", "verdict"), list(PLACE))
    waits = (F.col("left") == 0) & F.col("verdict").isin("ok", "undecided", "before", "entered_twice")
    none = F.lit(0)
    parts = [
        accepted.select(*_ID, "accepted", none.alias("ended"), none.alias("waiting")),
        states.select(
            *_ID, none.alias("accepted"), F.least("ended", F.lit(1)).alias("ended"), waits.cast("int").alias("waiting")
        ),
        told.filter("isDropped").select(
            *_ID, F.lit(1).alias("accepted"), F.lit(1).alias("ended"), none.alias("waiting")
        ),
    ]
    counts = parts[0].unionByName(parts[1]).unionByName(parts[2])
    sums = counts.groupBy(*_ID).agg(*(F.sum(name).alias(name) for name in ("accepted", "ended", "waiting")))
    verdict = (
        F.when(F.col("accepted") == 0, "never_accepted")
        .when(F.col("ended") + F.col("waiting") < F.col("accepted"), "unaccounted")
        .otherwise("accounted")
    )
    return sums.withColumn("verdict", verdict).transform(kept)


def _with_parents(places: DataFrame, moved: DataFrame) -> DataFrame:
    """Return these places, and all that they came from."""
    found = fresh = places
    for _ in range(MAX_MOVES):
        parents = moved.join(fresh, list(PLACE), "left_semi").select(
            "generation", F.col("parentQueue").alias("queue"), F.col("parentNumber").alias("sequenceNumber")
        )
        fresh = parents.join(found, list(PLACE), "left_anti").distinct().transform(kept)
        if fresh.isEmpty():
            break
        found = found.union(fresh)
    return found


def _owned(owners: DataFrame, moved: DataFrame) -> DataFrame:
    """PLACE with _ID: the owners, and all places that their messages went to."""
    found = fresh = owners
    for _ in range(MAX_MOVES):
        parents = fresh.withColumnsRenamed(dict(zip(PLACE, _PARENT, strict=True)))
        children = moved.join(parents, list(_PARENT)).select(*PLACE, *_ID)
        fresh = children.join(found.select(*PLACE), list(PLACE), "left_anti").distinct().transform(kept)
        if fresh.isEmpty():
            break
        found = found.union(fresh)
    return found
