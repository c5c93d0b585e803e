"""The offsets of a ledger: where each partition's rows begin and end, and what is missing in between.

Offsets of one partition and epoch are contiguous: each gap is a part of the ledger that we do not have. A capture's
manifest says where they begin and end: a missing head or tail, and a partition or an epoch without rows, are gaps, too,
and rows that it does not know are *foreign*, a fault. The journal itself tells of a part that it has lost by a row
`truncated`. What happened in any of these is unknown, so that nothing may be concluded from its absence there. A gap
divides the ledger of a partition into *segments*; a segment is known by the offset of its first row.

A partition may have several epochs: a store that was restored from a copy counts from 0 again. `generation` numbers
them from the newest, which is 0, in the order in which the manifest got to know them, or else by the time of their
first rows.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs.captured import DamagedLedger
from pipeline.jobs.ledger import LedgerError, kept, queue
from storage.capture.inventory import Expected, Span, without

MAX_PROBLEMS: Final = 100_000
HIDING: Final = ("gap", "truncated")  # kinds of problems that may hide what happened
SKEW: Final = timedelta(minutes=1)
LOST: Final = "lost before it was captured, as the manifest says"

_EPOCH: Final = ("namespace", "partition", "epoch")
# Offsets whose presence is held in one 64-bit number: 1,000,000 rows are 15,625 of them.
_BITS: Final = 64

_TIME = pa.timestamp("us", tz="UTC")
_LOG = [("namespace", pa.string()), ("partition", pa.int32()), ("epoch", pa.string()), ("generation", pa.int32())]
_LOGS: Final = pa.schema(
    [
        *_LOG,
        *((name, pa.int64()) for name in ("low", "end", "rows")),
        *((name, _TIME) for name in ("firstTime", "lastTime")),
        ("segments", pa.list_(pa.int64())),
        ("isWhole", pa.bool_()),
    ]
)
_PROBLEMS: Final = pa.schema(
    [
        *_LOG,
        ("kind", pa.string()),
        *((name, pa.int64()) for name in ("fromOffset", "toOffset", "count")),
        *((name, _TIME) for name in ("firstTime", "lastTime")),
        ("description", pa.string()),
    ]
)


class Problem(NamedTuple):
    """A problem of one partition's offsets.

    `kind` is "gap": `size` offsets are missing; "truncated": the journal itself lacks what was before `to_offset`;
    "repeated": `size` rows have the offset of another row; "foreign": so many were not captured, as the manifest says;
    or "backward": `size` rows have times before those of rows with lower offsets. `to_offset` is behind it.
    `first_time` and `last_time` are around it.
    """

    kind: str
    from_offset: int
    to_offset: int
    size: int
    first_time: datetime
    last_time: datetime
    description: str | None

    @property
    def hides(self) -> bool:
        """Something may have happened that the ledger does not have."""
        return self.kind in HIDING


class Log(NamedTuple):
    """The rows of one partition in one epoch: offsets from `low` to before `end`. Segments ascend.

    A ledger that begins where another one ended has a log also where there are no rows since.
    """

    namespace: str
    partition: int
    epoch: str
    generation: int
    low: int
    end: int
    rows: int
    first_time: datetime
    last_time: datetime
    problems: tuple[Problem, ...]

    @property
    def segments(self) -> list[int]:
        return sorted({self.low, *(each.to_offset for each in self.problems if each.hides)})


class Offsets(NamedTuple):
    """What a ledger has of each partition. `rows` are its rows, with `generation` in place of `epoch`, and `queue`.

    `foreign`: of epochs that the manifest does not know; their rows are not in `rows`. `ended`: of epochs without
    rows, which a restore had ended for the audit before.
    """

    rows: DataFrame
    logs: list[Log]
    foreign: list[Log] = []
    ended: list[Log] = []

    @property
    def is_uncut(self) -> bool:
        """True if nothing that happened within the ledger is hidden."""
        return not any(each.hides for log in self.logs for each in log.problems)

    @property
    def is_of_one_epoch(self) -> bool:
        return all(log.generation == 0 for log in self.logs)

    def logs_table(self, *, is_whole: bool = False) -> DataFrame:
        """The logs as `_LOGS`. `isWhole`, if nothing that happened before their ends is hidden or missing."""
        rows = [
            _of_log(log)
            | {"low": log.low, "end": log.end, "rows": log.rows, "segments": log.segments, "isWhole": is_whole}
            | {"firstTime": log.first_time, "lastTime": log.last_time}
            for log in (*self.ended, *self.logs)
        ]
        return local_table(self.rows.sparkSession, rows, _LOGS)

    def problems_table(self) -> DataFrame:
        """The problems as `_PROBLEMS`."""
        rows = [
            _of_log(log)
            | {"kind": each.kind, "count": each.size, "description": each.description}
            | {"fromOffset": each.from_offset, "toOffset": each.to_offset}
            | {"firstTime": each.first_time, "lastTime": each.last_time}
            for log in (*self.logs, *self.foreign)
            for each in log.problems
        ]
        return local_table(self.rows.sparkSession, rows, _PROBLEMS)


def _of_log(log: Log) -> dict[str, Any]:
    return {
        "namespace": log.namespace,
        "partition": log.partition,
        "epoch": log.epoch,
        "generation": log.generation,
    }


def local_table(spark: SparkSession, rows: Iterable[dict[str, Any]], schema: pa.Schema) -> DataFrame:
    """A small table that is part of the plans which use it."""
    return spark.createDataFrame(pa.Table.from_pylist(list(rows), schema=schema))


class Wanted(NamedTuple):
    """What a ledger should have: `expected` of a capture of this namespace. What it lacks at its end had happened by
    `known_at`, when the manifest was written."""

    namespace: str
    expected: Sequence[Expected]
    known_at: datetime = datetime.max.replace(tzinfo=UTC)


def offsets_of(
    ledger: DataFrame,
    cut: Mapping[tuple[int, str | None], int] | None = None,
    before: Sequence[Log] = (),
    wanted: Wanted | None = None,
    skew: timedelta = SKEW,
) -> Offsets:
    """Read the offsets of a normalized ledger, in one pass over it if nothing is missing.

    If its rows end before the cut (see `ledger.until`), the rest is a gap; so is what is missing behind the ends of the
    logs `before`, with whose epochs it goes on, and what is `wanted`. Times that go back by more than `skew` are told.
    Raises LedgerError.
    """
    bit = F.expr(f"shiftleft(1L, cast(journalOffset % {_BITS} as int))")
    is_truncated = F.col("op") == "truncated"
    buckets = ledger.groupBy(*_EPOCH, F.expr(f"journalOffset div {_BITS}").alias("bucket")).agg(
        F.bit_or(bit).alias("bits"),
        F.bit_or(F.when(is_truncated, bit).otherwise(0)).alias("truncated"),
        F.min("journalOffset").alias("low"),
        (F.max("journalOffset") + 1).alias("end"),
        F.count(F.lit(1)).alias("rows"),
        F.min("eventTime").alias("firstTime"),
        F.max("eventTime").alias("lastTime"),
    )
    # One row for 64, which is read again for the times. The columns are new ones, as of `ledger.kept`.
    buckets = buckets.localCheckpoint(eager=False).select(*(F.col(name).alias(name) for name in buckets.columns))
    found = (
        buckets.groupBy(*_EPOCH)
        .agg(
            F.min("low").alias("low"),
            F.max("end").alias("end"),
            F.sum("rows").alias("rows"),
            F.sum(F.bit_count("bits")).alias("offsets"),
            F.max(F.col("truncated") != 0).alias("isTruncated"),
            F.unix_micros(F.min("firstTime")).alias("firstTime"),
            F.unix_micros(F.max("lastTime")).alias("lastTime"),
        )
        .collect()
    )
    problems: dict[tuple[str, int, str], list[Problem]] = defaultdict(list)
    if any(row.offsets != row.end - row.low or row.rows != row.offsets or row.isTruncated for row in found):
        for row in _problems(buckets, ledger).head(MAX_PROBLEMS + 1):
            problems[row.namespace, row.partition, row.epoch].append(_problem(row))
        if sum(map(len, problems.values())) > MAX_PROBLEMS:
            raise LedgerError(f"the ledger has more than {MAX_PROBLEMS:,} gaps in its offsets (column journalOffset)")
    for row in _backward(buckets, ledger, skew).collect():
        problems[row.namespace, row.partition, row.epoch].append(_problem(row))
    logs: list[Log] = []
    foreign: list[Log] = []
    known = {(log.namespace, log.partition, log.epoch): log for log in before}
    _require_that_it_goes_on(found, before, wanted)
    order: dict[tuple[str, int, str], int] = {}
    expected: dict[tuple[str, int, str], Expected] = {}
    if wanted is not None:
        expected = {(wanted.namespace, *each.position): each for each in wanted.expected}
        order = {position: number for number, position in enumerate(expected)}
    rows: list[Row | _Found] = [*found, *_without_rows(found, expected, known)]
    rows.sort(key=lambda row: (order.get(_position(row), -1), row.firstTime, row.epoch), reverse=True)
    generations: dict[tuple[str, int], int] = defaultdict(int)
    for row in rows:
        own = problems[row.namespace, row.partition, row.epoch]
        if wanted is not None and _position(row) not in expected:
            first, last = from_micros(row.firstTime), from_micros(row.lastTime)
            foreign_epoch = Problem(
                "foreign", row.low, row.end, row.rows, first, last, "an epoch that was not captured"
            )
            foreign.append(_log(row, -1, row.low, row.end, [foreign_epoch]))
            continue
        last_known = known.pop(_position(row), None)
        if last_known is None:
            generation = generations[row.namespace, row.partition]
            generations[row.namespace, row.partition] += 1
        else:
            generation = last_known.generation
        until = (cut or {}).get((row.partition, row.epoch), (cut or {}).get((row.partition, None)))
        end = row.end
        if wanted is not None:
            each = expected[_position(row)]
            end, more = _compared(row, each, own, until, wanted.known_at, is_new=last_known is None)
            own[:] = [*(_told_why(problem, each) for problem in own), *more]
        if until is not None and until > end and generation == 0:
            last = from_micros(row.lastTime)
            own.append(Problem("gap", end, until, until - end, last, _AT_THE_END, "up to the cut"))
        low = row.low
        if wanted is not None and last_known is None:
            low = min(low, expected[_position(row)].first)
        if last_known is not None:
            low = last_known.end
            if row.low > low:
                since, first = last_known.last_time, from_micros(row.firstTime)
                own.append(Problem("gap", low, row.low, row.low - low, since, first, "since the audit before"))
        logs.append(_log(row, generation, low, end, own))
    # Nothing has happened there since.
    silent = [log._replace(low=log.end, rows=0, first_time=log.last_time, problems=()) for log in known.values()]
    logs += [log for log in silent if log.generation == 0]
    logs.sort(key=lambda log: (log.namespace, log.partition, -log.generation))
    ended = [log for log in silent if log.generation > 0]
    placed = _with_generation(ledger, logs, has_others=bool(foreign)).select("*", queue())
    return Offsets(placed, logs, foreign, ended)


class _Found(NamedTuple):
    """What is found of one partition in one epoch, as a row of the ledger's sums has it; times in microseconds."""

    namespace: str
    partition: int
    epoch: str
    low: int
    end: int
    rows: int
    firstTime: int  # noqa: N815 - a column
    lastTime: int  # noqa: N815


def _position(row: Row | _Found) -> tuple[str, int, str]:
    return row.namespace, row.partition, row.epoch


def _log(row: Row | _Found, generation: int, low: int, end: int, problems: Iterable[Problem]) -> Log:
    return Log(
        *(row.namespace, row.partition, row.epoch, generation, low, end, row.rows),
        *(from_micros(row.firstTime), from_micros(row.lastTime)),
        tuple(sorted(problems, key=lambda each: (each.from_offset, each.to_offset))),
    )


def _without_rows(
    found: Sequence[Row], expected: Mapping[tuple[str, int, str], Expected], known: Mapping[tuple[str, int, str], Log]
) -> Iterator[_Found]:
    """Yield the ranges that should have rows, and have none. Their times are those between which the others are."""
    first = min((row.firstTime for row in found), default=0)
    last = max((row.lastTime for row in found), default=first)
    have = {_position(row) for row in found}
    partitions = {position[:2] for position in known}
    for position, each in expected.items():
        if position in have:
            continue
        # Of an epoch that has ended before the audit before, nothing is missing.
        if known and position not in known and position[:2] in partitions:
            continue
        log = known.get(position)
        begin = each.first if log is None else log.end
        if begin < each.next:
            times = (first, last) if log is None else (to_micros(log.last_time),) * 2
            yield _Found(*position, begin, begin, 0, *times)


def _compared(
    row: Row | _Found,
    expected: Expected,
    own: Sequence[Problem],
    until: int | None,
    known_at: datetime,
    *,
    is_new: bool,
) -> tuple[int, list[Problem]]:
    """Where the rows should end, and what is missing before and behind them, or was not captured. `own` are the gaps
    between them. `is_new`: no audit before has had rows of the epoch."""
    first, last = from_micros(row.firstTime), from_micros(row.lastTime)
    end = expected.next if until is None else min(expected.next, until)
    more = []
    if is_new and row.low > expected.first and row.rows:
        more.append(_gap(expected, expected.first, row.low, _EPOCH_BEGIN, first))
    if row.end < end:
        more.append(_gap(expected, row.end, end, last if row.rows else _EPOCH_BEGIN, max(last, known_at)))
    present = without(
        [Span(row.low, row.end)], [Span(each.from_offset, each.to_offset) for each in own if each.kind == "gap"]
    )
    for span in without(present, expected.captured):
        more.append(Problem("foreign", *span, span.size, first, last, "offsets that were not captured"))
    return max(end, row.end), more


def _told_why(problem: Problem, expected: Expected) -> Problem:
    if problem.kind != "gap":
        return problem
    return _gap(expected, problem.from_offset, problem.to_offset, problem.first_time, problem.last_time)


def _gap(expected: Expected, first: int, end: int, first_time: datetime, last_time: datetime) -> Problem:
    is_lost = not without([Span(first, end)], expected.gaps)
    text = LOST if is_lost else "rows that the manifest says were captured"
    return Problem("gap", first, end, end - first, first_time, last_time, text)


def _require_that_it_goes_on(found: Sequence[Row], before: Sequence[Log], wanted: Wanted | None) -> None:
    """Check that the ledger goes on where the audit before ended.

    Raises LedgerError if a partition was restored since, or the ledger is of other namespaces; DamagedLedger if its
    manifest ends where it did not yet know what the audit before had.
    """
    if before and found and not {row.namespace for row in found} & {log.namespace for log in before}:
        name = found[0].namespace
        raise LedgerError(f"the ledger is of the namespace {name}, and the audit before is of {before[0].namespace}")
    epochs = {(log.namespace, log.partition): log.epoch for log in before if log.generation == 0}
    known = {(log.namespace, log.partition, log.epoch) for log in before}
    newest = {} if wanted is None else {(wanted.namespace, each.partition): each.epoch for each in wanted.expected}
    present = [((row.namespace, row.partition), row.epoch) for row in found if _position(row) not in known]
    for (namespace, partition), other in (*present, *newest.items()):
        if (epoch := epochs.get((namespace, partition), other)) != other:
            raise LedgerError(
                f"partition {partition} was restored since the audit before, which ended in its epoch {epoch}: "
                "begin a new series of audits"
            )
    ends = {} if wanted is None else {(wanted.namespace, *each.position): each.next for each in wanted.expected}
    for log in before if wanted is not None else ():
        if (end := ends.get((log.namespace, log.partition, log.epoch), 0)) < log.end:
            raise DamagedLedger(
                f"partition {log.partition}, epoch {log.epoch}: the manifest ends before offset {end}, and the audit "
                f"before had all up to {log.end - 1}: its newest entries are gone"
            )


_EPOCH_BEGIN: Final = datetime(1970, 1, 1, tzinfo=UTC)
_AT_THE_END: Final = datetime.max.replace(tzinfo=UTC)


def from_micros(micros: int) -> datetime:
    """The time that is so many microseconds after 1970, UTC; whatever the machine's zone is."""
    return _EPOCH_BEGIN + timedelta(microseconds=micros)


def to_micros(time: datetime) -> int:
    return (time - _EPOCH_BEGIN) // timedelta(microseconds=1)


def _with_generation(ledger: DataFrame, logs: list[Log], *, has_others: bool) -> DataFrame:
    """`has_others`: the ledger has rows of other logs, which are left out."""
    if not has_others and all(log.generation == 0 for log in logs):
        # A constant costs nothing as a part of a key.
        return ledger.drop("epoch").withColumn("generation", F.lit(0))
    generations = local_table(ledger.sparkSession, map(_of_log, logs), pa.schema(_LOG))
    return ledger.join(F.broadcast(generations), list(_EPOCH)).drop("epoch")


def _problem(row: Row) -> Problem:
    return Problem(
        *(row.kind, row.fromOffset, row.toOffset, row["count"]),
        *(from_micros(row.firstTime), from_micros(row.lastTime), row.description),
    )


def _problems(buckets: DataFrame, ledger: DataFrame) -> DataFrame:
    """Return by _EPOCH the fields of Problem, with times in microseconds since 1970."""
    runs = _runs(buckets)
    gaps = runs.filter("isTruncated or `from` > previousEnd")
    told = ledger.filter(F.col("op") == "truncated").select(
        *_EPOCH, F.col("journalOffset").alias("from"), F.col("description")
    )
    start = F.coalesce("previousEnd", "from")
    gaps = gaps.join(told.dropDuplicates([*_EPOCH, "from"]), [*_EPOCH, "from"], "left").select(
        *_EPOCH,
        F.when(F.col("isTruncated"), "truncated").otherwise("gap").alias("kind"),
        start.alias("fromOffset"),
        F.col("from").alias("toOffset"),
        (F.col("from") - start).alias("count"),
        F.unix_micros(F.coalesce("previousTime", "firstTime")).alias("firstTime"),
        F.unix_micros("lastTime").alias("lastTime"),
        "description",
    )
    extra = F.col("rows") - F.bit_count("bits")
    repeated = buckets.filter(extra > 0).select(
        *_EPOCH,
        F.lit("repeated").alias("kind"),
        F.col("low").alias("fromOffset"),
        F.col("end").alias("toOffset"),
        extra.cast("bigint").alias("count"),
        F.unix_micros("firstTime").alias("firstTime"),
        F.unix_micros("lastTime").alias("lastTime"),
        F.lit(None).cast("string").alias("description"),
    )
    return gaps.unionByName(repeated)


def _backward(buckets: DataFrame, ledger: DataFrame, skew: timedelta) -> DataFrame:
    """Count by _EPOCH the rows whose time is earlier than that of a row before by more than `skew`; see `_problems`.

    Only the rows of buckets are looked at that begin before another one has ended, or that are longer than `skew`. Of
    these there are few: in a time, not more than it has `skew`s.
    """
    micros = skew // timedelta(microseconds=1)
    latest = F.max(F.unix_micros("lastTime")).over(
        Window.partitionBy(*_EPOCH).orderBy("bucket").rowsBetween(Window.unboundedPreceding, -1)
    )
    first, last = F.unix_micros("firstTime"), F.unix_micros("lastTime")
    suspects = buckets.select(*_EPOCH, "bucket", first.alias("first"), last.alias("last"), latest.alias("latest"))
    is_suspect = (F.col("last") - F.col("first") > micros) | (F.col("latest") - F.col("first") > micros)
    # Mostly there are none, and then Spark need not read the ledger, if it knows.
    suspects = suspects.filter(is_suspect).select(*_EPOCH, "bucket", "latest").transform(kept)
    time = F.unix_micros("eventTime")
    rows = ledger.select(
        *_EPOCH, F.expr(f"journalOffset div {_BITS}").alias("bucket"), "journalOffset", time.alias("time")
    ).join(suspects, [*_EPOCH, "bucket"])
    within = Window.partitionBy(*_EPOCH, "bucket").orderBy("journalOffset").rowsBetween(Window.unboundedPreceding, -1)
    before = F.greatest("latest", F.max("time").over(within))
    back = rows.select(*_EPOCH, "journalOffset", "time", before.alias("before"))
    back = back.filter(F.col("before") - F.col("time") > micros)
    step = (F.max(F.col("before") - F.col("time")) / 1e6).cast("bigint").cast("string")
    return back.groupBy(*_EPOCH).agg(
        F.lit("backward").alias("kind"),
        F.min("journalOffset").alias("fromOffset"),
        (F.max("journalOffset") + 1).alias("toOffset"),
        F.count(F.lit(1)).alias("count"),
        F.min("time").alias("firstTime"),
        F.max("before").alias("lastTime"),
        F.concat(F.lit("times that go back by up to "), step, F.lit(" s")).alias("description"),
    )


def _runs(buckets: DataFrame) -> DataFrame:
    """Offsets that follow each other: `from`, `to` (behind it), whether `isTruncated`, and where the run before ended.

    Full buckets are one run each, the others one for each offset, so that the work is not larger than the ledger.
    `firstTime` and `lastTime` are those of the whole bucket, `previousTime` is the first of the bucket before.
    """
    first = F.col("bucket") * _BITS
    is_whole = (F.col("bits") == -1) & (F.col("truncated") == 0)

    def is_set(name: str) -> Column:
        return F.expr(f"(shiftrightunsigned({name}, position) & 1) = 1")

    positions = F.when(is_whole, F.array(F.lit(0))).otherwise(F.sequence(F.lit(0), F.lit(_BITS - 1)))
    each = buckets.select("*", F.explode(positions).alias("position")).filter(is_whole | is_set("bits"))
    runs = each.select(
        *_EPOCH,
        (first + F.col("position")).alias("from"),
        (first + F.when(is_whole, _BITS).otherwise(F.col("position") + 1)).alias("to"),
        (~is_whole & is_set("truncated")).alias("isTruncated"),
        "firstTime",
        "lastTime",
    )
    before = Window.partitionBy(*_EPOCH).orderBy("from")
    return runs.select(
        "*", F.lag("to").over(before).alias("previousEnd"), F.lag("firstTime").over(before).alias("previousTime")
    )
