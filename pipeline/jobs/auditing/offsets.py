"""The offsets of a ledger: where each partition's rows begin and end, and what is missing in between.

Offsets of one partition and epoch are contiguous: each gap is a part of the ledger that we do not have. The journal
itself tells of a part that it has lost by a row `truncated`. What happened in either is unknown, so that nothing may be
concluded from its absence there. A gap divides the ledger of a partition into *segments*; a segment is known by the
offset of its first row.

A partition may have several epochs: a store that was restored from a copy counts from 0 again. `generation` numbers
them from the newest, which is 0, by the time of their first rows.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs.ledger import LedgerError, queue

MAX_PROBLEMS: Final = 100_000

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
    """Of one partition's offsets.

    `kind` is "gap": `size` offsets are missing; "truncated": the journal itself lacks what was before `to_offset`; or
    "repeated": `size` rows have the offset of another row. `to_offset` is behind it. `first_time` and `last_time` are
    around it.
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
        return self.kind != "repeated"


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
    """What a ledger has of each partition. `rows` are its rows, with `generation` in place of `epoch`, and `queue`."""

    rows: DataFrame
    logs: list[Log]

    @property
    def is_uncut(self) -> bool:
        """Nothing that happened within the ledger is hidden."""
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
            for log in self.logs
        ]
        return local_table(self.rows.sparkSession, rows, _LOGS)

    def problems_table(self) -> DataFrame:
        """The problems as `_PROBLEMS`."""
        rows = [
            _of_log(log)
            | {"kind": each.kind, "count": each.size, "description": each.description}
            | {"fromOffset": each.from_offset, "toOffset": each.to_offset}
            | {"firstTime": each.first_time, "lastTime": each.last_time}
            for log in self.logs
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


def offsets_of(
    ledger: DataFrame, cut: Mapping[tuple[int, str | None], int] | None = None, before: Sequence[Log] = ()
) -> Offsets:
    """Read the offsets of a normalized ledger, in one pass over it if nothing is missing.

    If its rows end before the cut (see `ledger.until`), the rest is a gap; so is what is missing behind the ends of the
    logs `before`, with whose epochs it goes on. Raises LedgerError.
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
    logs = []
    known = {(log.namespace, log.partition, log.epoch): log for log in before}
    _require_that_it_goes_on(found, before)
    generations: dict[tuple[str, int], int] = defaultdict(int)
    for row in sorted(found, key=lambda row: (row.firstTime, row.epoch), reverse=True):
        generation = generations[row.namespace, row.partition]
        generations[row.namespace, row.partition] += 1
        own = problems[row.namespace, row.partition, row.epoch]
        end = (cut or {}).get((row.partition, row.epoch), (cut or {}).get((row.partition, None), row.end))
        if end > row.end and generation == 0:
            last = from_micros(row.lastTime)
            own.append(
                Problem("gap", row.end, end, end - row.end, last, datetime.max.replace(tzinfo=UTC), "up to the cut")
            )
        low = row.low
        if (last_known := known.pop((row.namespace, row.partition, row.epoch), None)) is not None:
            low = last_known.end
            if row.low > low:
                since, first = last_known.last_time, from_micros(row.firstTime)
                own.append(Problem("gap", low, row.low, row.low - low, since, first, "since the audit before"))
        own.sort(key=lambda each: (each.from_offset, each.to_offset))
        logs.append(
            Log(
                *(row.namespace, row.partition, row.epoch, generation, low, row.end, row.rows),
                *(from_micros(row.firstTime), from_micros(row.lastTime), tuple(own)),
            )
        )
    for log in known.values():  # nothing has happened there since
        logs.append(log._replace(low=log.end, rows=0, first_time=log.last_time, problems=()))
    logs.sort(key=lambda log: (log.namespace, log.partition, -log.generation))
    return Offsets(_with_generation(ledger, logs).select("*", queue()), logs)


def _require_that_it_goes_on(found: Sequence[Row], before: Sequence[Log]) -> None:
    """Raises LedgerError if a partition was restored since, or the ledger is of other namespaces."""
    if before and found and not {row.namespace for row in found} & {log.namespace for log in before}:
        name = found[0].namespace
        raise LedgerError(f"the ledger is of the namespace {name}, and the audit before is of {before[0].namespace}")
    epochs = {(log.namespace, log.partition): log.epoch for log in before}
    for row in found:
        if (epoch := epochs.get((row.namespace, row.partition), row.epoch)) != row.epoch:
            raise LedgerError(
                f"partition {row.partition} was restored since the audit before, which ended in its epoch {epoch}: "
                "begin a new series of audits"
            )


_EPOCH_BEGIN: Final = datetime(1970, 1, 1, tzinfo=UTC)


def from_micros(micros: int) -> datetime:
    """The time that is so many microseconds after 1970, UTC; whatever the machine's zone is."""
    return _EPOCH_BEGIN + timedelta(microseconds=micros)


def to_micros(time: datetime) -> int:
    return (time - _EPOCH_BEGIN) // timedelta(microseconds=1)


def _with_generation(ledger: DataFrame, logs: list[Log]) -> DataFrame:
    if all(log.generation == 0 for log in logs):
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
    """By _EPOCH, the fields of Problem, with times in microseconds since 1970."""
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
