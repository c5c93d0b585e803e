"""Whether each message in each queue is accounted for: it entered once, and left at most once, or it is named.

Verdicts of a place (`ledger.PLACE`), the first that fits:

| verdict | meaning |
|---|---|
| entered_twice | two rows say that it entered |
| left_twice | two rows say that it left |
| unexplained | it left, and the broker itself does not know why |
| ghost | it left, was used, or is present, and did not enter before, though the ledger has all that was then |
| left_but_present | it left, and the snapshot has it |
| lost | it entered or was used, never left, and the snapshot does not have it |
| undecided | it would be one of these, but for a gap of the ledger, or because the snapshot was made while it changed |
| before | it entered before the ledger begins, as its number says, and all else is fine |
| ok | all is fine |

**Numbers say what is older than the ledger.** A queue gives ascending numbers, each when its message enters. So a
message whose number is above that of some message which entered within a segment, and that was seen in this segment,
must have entered in it. Below, it may have entered before the segment, and is no ghost.

A message that moved with its entity to another partition enters once and leaves once, in whatever partitions: the two
rows of the move are matched by `pipeline.jobs.auditing.moves`.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs.auditing.offsets import Offsets, local_table, to_micros
from pipeline.jobs.ledger import (
    ENDS,
    LOG,
    MOVED,
    MOVES,
    NAMES,
    PLACE,
    QUEUE,
    UNEXPLAINED,
    LedgerError,
    arrives,
    enters,
    has_place,
    is_restored,
    kept,
    queue,
)

FAULTS: Final = ("entered_twice", "left_twice", "unexplained", "ghost", "left_but_present", "lost")
VERDICTS: Final = (*FAULTS, "undecided", "before", "ok")

_VISIBLE: Final = pa.schema([("namespace", pa.string()), ("sinceMicros", pa.int64()), ("isUncut", pa.bool_())])
_SEPARATOR: Final = "\x00"  # in no name of an entity
_NEVER_SHOWN: Final = "transfer"  # the subqueue that no client can browse


class Snapshot(NamedTuple):
    """What was in queues when they were browsed.

    `messages` has the columns `entity`, `subQueue`, `sequenceNumber`, and may have `namespace`. They are of the newest
    entity that had this name.
    `covers` are the entities that were browsed, as patterns of SQL's LIKE: of others, no absence means anything.
    `queues`, if it is given, are those that were browsed, in place of `covers`: namespace, entity in lower case,
    subqueue.
    `began`: the journal offsets by partition when browsing began. A message that changed since then is not judged by
    the snapshot. Without them, the snapshot is exactly as of the ledger's end.
    """

    messages: DataFrame
    covers: Sequence[str] = ("%",)
    began: dict[int, int] | None = None
    queues: frozenset[tuple[str, str, str]] | None = None


# What rows may say of a place, in `sketches`. A row of another kind, such as `delivered`, says no more than that it was
# used.
_ENTERED, _ENDED, _MOVED_ON, _ODD, _PRESENT = 1, 2, 4, 8, 16


class _Signs(NamedTuple):
    """What is suspicious about a place, of `places`, before asking whether a gap explains it."""

    never_entered: Column
    left_first: Column
    left_but_present: Column
    absent: Column


def sketches(rows: DataFrame, snapshot: DataFrame | None = None, opening: DataFrame | None = None) -> DataFrame:
    """What the ledger says of each place, as far as it takes to see that all is fine: one row by PLACE.

    `kinds`: which of the five kinds of rows there are (`_ENTERED` and so on, as bits); `marks`: how many rows. So each
    kind was there once if there are as many rows as kinds. `span`: offsets at which it left, less those at which it
    entered. `partition`, `maxPartition`: the lowest and highest partition that told of it. `snapshot` and `opening` are
    as `keyed` gives them.

    These are few numbers, because to sum up each costs as much as to read the rows.
    """
    op = F.col("op")
    is_odd = arrives() | is_restored() | (op == MOVED) | _is_unexplained()
    kind = F.when(is_odd, _ODD).when(enters(), _ENTERED).when(_is_end(), _ENDED).when(op.isin(*MOVES), _MOVED_ON)
    way = F.when(F.col("kind") == _ENTERED, -F.col("journalOffset")).otherwise(F.col("journalOffset"))
    marks = rows.filter(has_place()).select(*PLACE, kind.alias("kind"), "journalOffset", "partition")
    marks = marks.select(*PLACE, "kind", F.when(F.col("kind").isNotNull(), way).alias("way"), "partition")
    is_under_way = (F.col("ahead") != 0) | (F.col("enteredBefore") == 0)
    for more, mark in ((snapshot, F.lit(_PRESENT)), (opening, F.when(is_under_way, _ODD).otherwise(_ENTERED))):
        if more is not None:
            told = more.select(*PLACE, mark.alias("kind"), "partition")
            marks = marks.unionByName(told, allowMissingColumns=True)
    return marks.groupBy(*PLACE).agg(
        F.bit_or("kind").alias("kinds"),
        F.count("kind").alias("marks"),
        F.try_sum("way").alias("span"),
        F.min("partition").alias("partition"),
        F.max("partition").alias("maxPartition"),
    )


def _is_end() -> Column:
    return F.col("op").isin(*ENDS) | ((F.col("op") == "published") & (F.coalesce("copies", F.lit(0)) == 0))


def _is_unexplained() -> Column:
    return (F.col("op") == "purged") & F.col("reason").eqNullSafe(UNEXPLAINED)


def places(rows: DataFrame, snapshot: DataFrame | None = None, opening: DataFrame | None = None) -> DataFrame:
    """All that the ledger says of each place: one row by PLACE. (Sums of numbers alone: strings would cost a sort.)

    `entered`, `arrived` (with its entity from another partition), `left`, `ended` (left for good), `unexplained`
    (left for no known reason), `moved` (away with its entity), `present`: how often; what was taken back
    (`ledger.is_restored`) does not count. `seen`: rows of the ledger.
    `firstOffset`, `lastOffset`: of these. `enteredOffset`, `leftOffset`: the first such. `partition`, `maxPartition`:
    the lowest and highest partition that told of it. `snapshot` and `opening` are as `keyed` gives them.
    """
    op, offset = F.col("op"), F.col("journalOffset")
    is_leaving = op.isin(*ENDS, *MOVES)
    events = rows.filter(has_place()).select(
        *PLACE,
        (enters() & ~arrives() & ~is_restored()).cast("int").alias("entered"),
        arrives().cast("int").alias("arrived"),
        (is_leaving.cast("int") - is_restored().cast("int")).alias("left"),
        (_is_end().cast("int") - is_restored().cast("int")).alias("ended"),
        _is_unexplained().cast("int").alias("unexplained"),
        (op == MOVED).cast("int").alias("moved"),
        F.lit(1).alias("seen"),
        F.lit(0).alias("present"),
        offset.alias("offset"),
        F.when(enters() & ~is_restored(), offset).alias("enteredOffset"),
        F.when(is_leaving, offset).alias("leftOffset"),
        "partition",
    )
    counts = ("entered", "arrived", "left", "ended", "unexplained", "moved", "seen", "present")
    ahead, none = F.col("ahead"), F.lit(0)
    # One that we have not seen entering has come from somewhere all the same.
    unseen = 1 - F.col("enteredBefore")
    before = {
        "entered": F.col("enteredBefore"),
        **{"arrived": F.greatest(ahead, none) + unseen, "moved": F.greatest(-ahead, none) + unseen},
        **dict.fromkeys(("left", "ended"), F.col("leftBefore")),
    }
    for more, counted in ((snapshot, {"present": F.lit(1)}), (opening, before)):
        if more is not None:
            columns = [counted.get(name, none).alias(name) for name in counts]
            events = events.unionByName(more.select(*PLACE, "partition", *columns), allowMissingColumns=True)
    return events.groupBy(*PLACE).agg(
        # What is taken back may have been before the ledger's first row.
        *(F.greatest(F.sum(name).cast("int"), F.lit(0)).alias(name) for name in counts),
        F.min("offset").alias("firstOffset"),
        F.max("offset").alias("lastOffset"),
        F.min("enteredOffset").alias("enteredOffset"),
        F.min("leftOffset").alias("leftOffset"),
        F.min("partition").alias("partition"),
        F.max("partition").alias("maxPartition"),
    )


def keyed(messages: DataFrame, what: str, namespace: str | None = None, newest: DataFrame | None = None) -> DataFrame:
    """NAMES and PLACE of messages; their `partition`, which may be null; `ahead` and others, as `Judged.open` has them.

    `namespace` is that of all, if it is given: a client knows a namespace by its host, which need not be its name.

    A client that browses an entity sees neither its id nor, of a plain one, its partition. So with `newest`, of
    `queues.newest_of`, the ids are those; without it, `messages` have both.

    Raises LedgerError: `what` is the name of `messages`.
    """
    given = set(messages.columns)
    if missing := [name for name in ("entity", "subQueue", "sequenceNumber") if name not in given]:
        raise LedgerError(f"{what} has no column {missing[0]}; it has {', '.join(messages.columns) or 'none'}")

    def column(name: str, kind: str, default: str | int | None) -> Column:
        value = F.lit(default).cast(kind)
        return (F.coalesce(F.col(name).cast(kind), value) if name in given else value).alias(name)

    named = messages.select(
        column("namespace", "string", "") if namespace is None else F.lit(namespace).alias("namespace"),
        F.lit(0).alias("generation"),
        "entity",
        "subQueue",
        F.col("sequenceNumber").cast("bigint").alias("sequenceNumber"),
        column("partition", "int", None) if newest is None else F.lit(None).cast("int").alias("partition"),
        *(column("ahead", "int", 0), column("left", "int", 0).alias("leftBefore")),
        column("entered", "int", 1).alias("enteredBefore"),
        *([column("entityId", "int", 0)] if newest is None else ()),
    )
    if newest is not None:
        named = named.withColumn("name", F.lower("entity")).join(F.broadcast(newest), ["namespace", "name"], "left")
        named = named.withColumn("entityId", F.coalesce("entityId", F.lit(0))).drop("name")
    return named.select("*", queue())


class Judged(NamedTuple):
    """All places with their `verdict`: `fine` are those that need no second look, `others` those that did. `isOpen` of
    the first: it has not left.

    `queues` has NAMES by `queue`.
    """

    fine: DataFrame
    others: DataFrame
    queues: DataFrame

    def all(self) -> DataFrame:
        """PLACE, `partition` (the highest that told of it), `left`, `ended`, `verdict`."""
        others = self.others.select(*PLACE, F.col("maxPartition").alias("partition"), "left", "ended", "verdict")
        return self.fine.drop("isOpen").unionByName(others)

    def open(self) -> DataFrame:
        """PLACE and `partition` of what is in the queues at the end: what has entered and not left, if it is not lost;
        and what the snapshot has, though it should not be there: an audit that goes on has told of it.

        `ahead`: so many times more often it has arrived with its entity than it has moved away, because partitions end
        at different times. With -1 it is in no queue yet. With another number than 0, it may also have `left`.
        `entered` is 0 if no row has told so: it is in a gap, or behind the end of the partition that it has come from.
        """
        verdict, ahead = F.col("verdict"), (F.col("arrived") - F.col("moved")).cast("int")
        none = F.lit(0)
        fine = self.fine.filter("isOpen").select(
            *PLACE, "partition", F.lit(1).alias("entered"), none.alias("ahead"), none.alias("left")
        )
        is_open = ((F.col("left") == 0) | (ahead != 0)) & ~verdict.isin("lost", "ghost")
        is_there = verdict.isin("ghost", "left_but_present") & (F.col("present") > 0)
        others = self.others.filter(is_open | is_there).select(
            *(*PLACE, F.col("maxPartition").alias("partition"), F.least("entered", F.lit(1)).alias("entered")),
            ahead.alias("ahead"),
            F.when(is_there, none).otherwise(F.least("left", F.lit(1))).alias("left"),
        )
        return fine.unionByName(others).filter(F.col("generation") == 0)

    def named(self, places: DataFrame) -> DataFrame:
        """The same rows with NAMES."""
        return places.join(F.broadcast(self.queues.select("queue", *NAMES)), "queue")


def judged(
    rows: DataFrame,
    queues: DataFrame,
    offsets: Offsets,
    present: DataFrame | None = None,
    opening: DataFrame | None = None,
    snapshot: Snapshot | None = None,
    *,
    is_whole: bool = False,
) -> Judged:
    """Judge all places that are in `rows`, `present` (the messages of `snapshot`) and `opening`, both as of `keyed`.

    `queues` are those that `queues.names_of` finds. `is_whole`: nothing had entered before the ledger's first rows, or
    an opening set has told what had.
    """
    queues = queues.withColumn("isCovered", _is_covered(snapshot))
    coverage = F.broadcast(queues.select("queue", "namespace", "isCovered"))
    # As rows: to keep them column by column takes longer than to make them.
    drawn = sketches(rows, present, opening).localCheckpoint(eager=False)
    covered = drawn if snapshot is None else drawn.join(coverage.drop("namespace"), "queue")
    is_fine = _is_surely_fine(snapshot)
    fine = covered.filter(is_fine).select(
        *PLACE,
        "partition",
        _has(_ENDED | _MOVED_ON).cast("int").alias("left"),
        _has(_ENDED).cast("int").alias("ended"),
        (~_has(_ENDED | _MOVED_ON)).alias("isOpen"),
        F.lit("ok").alias("verdict"),
    )
    doubtful = covered.filter(~is_fine).select(*PLACE).transform(kept)

    def looked_at(table: DataFrame) -> DataFrame:
        return table.join(doubtful, list(PLACE), "left_semi")

    more = (None if table is None else looked_at(table) for table in (present, opening))
    second = places(looked_at(rows), *more)
    if doubtful.isEmpty():
        return Judged(fine, second.withColumn("verdict", F.lit("ok")).transform(kept), queues)
    others = _decided(second.join(coverage, "queue"), offsets, _signs(snapshot), snapshot, is_whole)
    return Judged(fine, others.select(*second.columns, "verdict").transform(kept), queues)


def _has(kinds: int) -> Column:
    return F.col("kinds").bitwiseAND(F.lit(kinds)) != 0


def _is_surely_fine(snapshot: Snapshot | None) -> Column:
    """Decide for a sketch whether its message is fine: each kind of row was there once, in the order of a usual life,
    and the message is present if it has not left.
    """
    left = _has(_ENDED | _MOVED_ON)
    is_usual = (
        (F.col("marks") == F.bit_count("kinds"))
        & _has(_ENTERED)
        & ~_has(_ODD)
        & ~(_has(_ENDED) & _has(_MOVED_ON))
        & F.col("partition").eqNullSafe(F.col("maxPartition"))
        & (~left | (F.col("span") > 0))
    )
    if snapshot is not None:
        # Of an epoch that has ended nothing is present, and what was not browsed may be.
        is_usual &= F.when(left, ~_has(_PRESENT)).otherwise(
            _has(_PRESENT) | ~F.col("isCovered") | (F.col("generation") > 0)
        )
    return F.coalesce(is_usual, F.lit(False))


def _is_covered(snapshot: Snapshot | None) -> Column:
    """Decide for a queue whether a message that is not in the snapshot is not there."""
    if snapshot is not None and snapshot.queues is not None:
        browsed = [_SEPARATOR.join(each) for each in sorted(snapshot.queues)]
        return F.concat_ws(_SEPARATOR, "namespace", "name", "subQueue").isin(browsed)
    is_browsed = F.lit(False)
    for pattern in () if snapshot is None else snapshot.covers:
        is_browsed |= F.col("entity").like(pattern)
    return is_browsed & (F.col("subQueue") != _NEVER_SHOWN)


def _signs(snapshot: Snapshot | None) -> _Signs:
    left, moved, present = F.col("left"), F.col("moved"), F.col("present")
    never_entered = (F.col("entered") == 0) & (F.col("arrived") == 0)
    left_first = _is_in_one_log() & F.coalesce(F.col("leftOffset") < F.col("enteredOffset"), F.lit(False))
    if snapshot is None:
        return _Signs(never_entered, left_first, F.lit(False), F.lit(False))
    # A message that moved away and has not arrived yet is nowhere. Of an epoch that has ended nothing is present: it
    # went
    # on in the next one.
    is_gone = (left > 0) | (moved > F.col("arrived")) | (F.col("generation") > 0)
    return _Signs(never_entered, left_first, (left > 0) & (present > 0), F.col("isCovered") & ~is_gone & (present == 0))


def _is_in_one_log() -> Column:
    """All rows of the place are of one partition, so that their offsets can be compared."""
    return F.col("partition").eqNullSafe(F.col("maxPartition"))


def _decided(
    doubtful: DataFrame,
    offsets: Offsets,
    signs: _Signs,
    snapshot: Snapshot | None,
    is_whole: bool,
) -> DataFrame:
    segments = offsets.logs_table().select(*LOG, "segments")
    visible = local_table(doubtful.sparkSession, _visible(offsets), _VISIBLE)
    facts = (
        doubtful.join(F.broadcast(segments), list(LOG), "left")
        .withColumn("segment", F.expr("array_max(filter(segments, each -> each <= firstOffset))"))
        .join(F.broadcast(visible.select("namespace", "isUncut")), "namespace", "left")
    )
    was_seen = F.col("seen") > 0
    first, last = F.get("segments", F.lit(0)), F.element_at("segments", -1)
    # No row of it can be missing before those that we have: they are of the first segment, or there are no gaps at all.
    is_first = F.coalesce(F.when(was_seen, F.col("segment") == first).otherwise(F.col("isUncut")), F.lit(True))
    # Nor can one be missing behind them. If it moved away and no row tells where to, one is.
    is_last = F.when(was_seen, F.col("lastOffset") >= last).otherwise(F.size("segments") == 1)
    is_last = _is_in_one_log() & (F.col("moved") == 0) & F.coalesce(is_last, F.lit(False))
    is_last |= F.lit(is_whole) & F.coalesce("isUncut", F.lit(False)) & (F.col("moved") == F.col("arrived"))
    if is_whole and not _is_cut(offsets):
        must_have_entered = F.lit(True)  # and the ledger need not be read for what its numbers say
    else:
        known, newest = _numbers(offsets)
        facts = (
            facts.withColumn("highBits", _high_bits())
            .join(F.broadcast(known), [*QUEUE, "partition", "segment"], "left")
            .join(F.broadcast(newest), [*QUEUE, "highBits"], "left")
        )
        least = F.when(was_seen, F.col("leastEntered")).otherwise(F.col("leastOfNewest"))
        must_have_entered = _is_in_one_log() & F.coalesce(F.col("sequenceNumber") > least, F.lit(False))
        must_have_entered |= is_first & F.lit(is_whole)
    is_stable = F.lit(True)
    if snapshot is not None and snapshot.began is not None:
        began = F.create_map(*(F.lit(each) for pair in snapshot.began.items() for each in pair))
        is_stable = F.coalesce(F.col("lastOffset") < F.try_element_at(began, F.col("maxPartition")), F.lit(True))
    is_suspicious = signs.never_entered | signs.left_first | signs.left_but_present | signs.absent
    undecided = F.lit("undecided")
    verdict = (
        F.when(F.col("entered") > 1, "entered_twice")
        .when(F.col("left") > 1, "left_twice")
        .when(F.col("unexplained") > 0, "unexplained")
        .when(~is_suspicious, "ok")
        .when(signs.left_first | (signs.never_entered & must_have_entered), "ghost")
        .when(signs.left_but_present, F.when(is_stable, "left_but_present").otherwise(undecided))
        .when(signs.absent, F.when(is_stable & is_last, "lost").otherwise(undecided))
        .otherwise(F.when(is_first & F.lit(not is_whole), "before").otherwise(undecided))
    )
    return facts.withColumn("verdict", verdict)


def _is_cut(offsets: Offsets) -> bool:
    return any(len(log.segments) > 1 for log in offsets.logs)


def _high_bits() -> Column:
    """The partition, in numbers of partitioned entities; else 0."""
    return F.shiftright("sequenceNumber", 48)


def _numbers(offsets: Offsets) -> tuple[DataFrame, DataFrame]:
    """Numbers above which a message must have entered within the ledger.

    First, for messages that were seen in a segment, by QUEUE, `partition` and `segment`: `leastEntered`. Second, for
    those that only a snapshot has, by QUEUE and `highBits`: `leastOfNewest`, of numbers given when no partition had
    gaps any more. (An entity may have moved to any of them.)
    """
    segments = F.broadcast(offsets.logs_table().select(*LOG, "segments"))
    since = local_table(offsets.rows.sparkSession, _visible(offsets), _VISIBLE)
    gives_number = (F.col("op") == "enqueued") & ~arrives() & ~is_restored()
    rows = (
        offsets.rows.filter(has_place() & gives_number).join(segments, list(LOG)).join(F.broadcast(since), "namespace")
    )
    of_row = "array_max(filter(segments, each -> each <= journalOffset))" if _is_cut(offsets) else "segments[0]"
    is_new = F.unix_micros("eventTime") > F.col("sinceMicros")
    numbers = (
        rows.groupBy(*QUEUE, "partition", F.expr(of_row).alias("segment"), _high_bits().alias("highBits"))
        .agg(
            F.min("sequenceNumber").alias("least"),
            F.min(F.when(is_new, F.col("sequenceNumber"))).alias("leastNew"),
        )
        .transform(kept)
    )
    known = numbers.groupBy(*QUEUE, "partition", "segment").agg(F.min("least").alias("leastEntered"))
    newest = numbers.groupBy(*QUEUE, "highBits").agg(F.min("leastNew").alias("leastOfNewest"))
    return known, newest


def _visible(offsets: Offsets) -> list[dict[str, Any]]:
    """Return by namespace since when no partition hides anything, and whether none has gaps at all."""
    found: dict[str, dict[str, Any]] = {}
    for log in offsets.logs:
        row = found.setdefault(
            log.namespace, {"namespace": log.namespace, "sinceMicros": to_micros(log.first_time), "isUncut": True}
        )
        for time in (log.first_time, *(each.last_time for each in log.problems if each.hides)):
            row["sinceMicros"] = max(row["sinceMicros"], to_micros(time))
        row["isUncut"] &= len(log.segments) == 1
    return list(found.values())
