"""How long messages wait: from when a queue has them to their first delivery, and to their completion.

A message counts from the row `enqueued` of the queue that delivers it: one that was scheduled from its activation,
one that was forwarded from its arrival. Messages that were enqueued before the ledger begins are not counted, and
dead-letter queues only on demand. It writes `latency`: by `namespace`, `entity`, `hour` (when it was enqueued, UTC;
null: all hours) and `measure` ("delivered", "completed"): `messages`, the percentiles `p50`, `p95`, `p99`, the same
by approximation (`approx50`, ...), and `longest`, all in milliseconds.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs import plots, running
from pipeline.jobs.ledger import has_place, kept, normalized
from pipeline.jobs.report import Duration, Headline, Report, Section, Table, counted, duration, labels

MEASURES: Final = ("delivered", "completed")
_SHARES: Final = {50: 0.5, 95: 0.95, 99: 0.99}
_ACCURACY = 10_000  # of approx_percentile: the rank is wrong by at most 1/10,000 of the messages
_PLACE = ("namespace", "partition", "epoch", "entity", "entityId", "subQueue", "sequenceNumber")
_GROUP = ("namespace", "entity", "measure")
_SHOWN_ENTITIES, _DRAWN_ENTITIES = 20, 12


def waits(ledger: DataFrame, sub_queues: Sequence[str] = ("active",)) -> DataFrame:
    """Return the wait of each message that was enqueued and delivered or completed: `namespace`, `entity`, `hour`,
    `measure`, `wait_ms`.

    A clock that was set back between the two rows makes no negative wait, but 0.
    """
    op, micros = F.col("op"), F.unix_micros("eventTime")
    # One that moved with its entity goes on waiting at its new partition: from when, its rows there do not say.
    enqueued = (op == "enqueued") & ~F.col("reason").eqNullSafe("moved")
    rows = normalized(ledger).filter(has_place() & F.col("subQueue").isin(*sub_queues))
    rows = rows.filter(op.isin("enqueued", *MEASURES)).select(
        *_PLACE,
        F.when(enqueued, micros).alias("enqueued"),
        *(F.when(op == name, micros).alias(name) for name in MEASURES),
    )
    messages = rows.groupBy(*_PLACE).agg(*(F.min(name).alias(name) for name in ("enqueued", *MEASURES)))
    # Received and deleted at once: that is a delivery, too.
    first_delivered = F.coalesce("delivered", "completed")
    times = F.array(
        F.struct(F.lit("delivered").alias("measure"), first_delivered.alias("at")),
        F.struct(F.lit("completed").alias("measure"), F.col("completed").alias("at")),
    )
    each = (
        messages.filter("enqueued is not null").select("*", F.explode(times).alias("end")).filter("end.at is not null")
    )
    return each.select(
        "namespace",
        "entity",
        F.date_trunc("hour", F.timestamp_micros("enqueued")).alias("hour"),
        F.col("end.measure").alias("measure"),
        (F.greatest(F.col("end.at") - F.col("enqueued"), F.lit(0)) / 1000).alias("wait_ms"),
    )


def latency(ledger: DataFrame, sub_queues: Sequence[str] = ("active",)) -> DataFrame:
    """The table of this module's docstring. Raises LedgerError."""
    # A hash of the group, because to sort by three texts takes much longer.
    each = waits(ledger, sub_queues).withColumn("group", F.xxhash64(*_GROUP))
    for name, keys in (("ofAll", ["group"]), ("ofHour", ["group", "hour"])):
        # Sorted, because Spark's own `percentile` holds each wait of a group in memory.
        group = Window.partitionBy(*keys).orderBy("wait_ms")
        whole = group.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
        place = F.struct((F.row_number().over(group) - 1).alias("rank"), F.count(F.lit(1)).over(whole).alias("count"))
        each = each.withColumn(name, place)
    of_all = F.struct(F.lit(None).cast("timestamp").alias("hour"), "ofAll.rank", "ofAll.count")
    both = F.explode(F.array(of_all, F.struct("hour", "ofHour.rank", "ofHour.count")))
    ranked = each.select(*_GROUP, "wait_ms", both.alias("place")).select(*_GROUP, "wait_ms", "place.*")
    found = ranked.groupBy(*_GROUP, "hour").agg(
        F.count(F.lit(1)).alias("messages"),
        *(_at(rounded(_position(share, F.col("count")))).alias(f"{side}{name}")
          for name, share in _SHARES.items() for side, rounded in (("low", F.floor), ("high", F.ceil))),
        F.percentile_approx("wait_ms", F.array(*map(F.lit, _SHARES.values())), _ACCURACY).alias("approx"),
        F.max("wait_ms").alias("longest"),
    )  # fmt: skip
    exact = [_between(name, share).alias(f"p{name}") for name, share in _SHARES.items()]
    approximate = [F.col("approx")[index].alias(f"approx{name}") for index, name in enumerate(_SHARES)]
    return found.select("namespace", "entity", "hour", "measure", "messages", *exact, *approximate, "longest")


def _position(share: float, count: Column) -> Column:
    """The rank of a percentile among so many, which may lie between two of them."""
    return (count - 1) * share


def _at(rank: Column) -> Column:
    """Aggregate a group to the wait of this rank."""
    return F.max(F.when(F.col("rank") == rank, F.col("wait_ms")))


def _between(name: int, share: float) -> Column:
    position = _position(share, F.col("messages"))
    low, high = F.floor(position), F.ceil(position)
    between = (high - position) * F.col(f"low{name}") + (position - low) * F.col(f"high{name}")
    return F.when(low == high, F.col(f"low{name}")).otherwise(between)


def report(found: DataFrame) -> Report:
    overall = found.filter("hour is null").sort(F.desc("messages"), "namespace", "entity").collect()
    messages = sum(row.messages for row in overall if row.measure == "delivered")
    sections = []
    for measure in MEASURES:
        own = [row for row in overall if row.measure == measure]
        names = labels((row.namespace, row.entity) for row in own)
        drawn = []
        if own:
            percentiles = {
                names[row.namespace, row.entity]: {"p50": row.p50, "p95": row.p95, "p99": row.p99}
                for row in own[:_DRAWN_ENTITIES]
            }
            drawn = [plots.points(f"Until {measure}, by entity", percentiles, "ms"), *_by_hour(found, measure, names)]
        table = Table(
            f"From enqueued to {'the first delivery' if measure == 'delivered' else 'completion'}",
            (
                "Namespace",
                "Entity",
                "Messages",
                "p50",
                "p95",
                "p99",
                "Longest",
            ),
            [
                (
                    row.namespace,
                    row.entity,
                    row.messages,
                    *map(Duration, (row.p50, row.p95, row.p99, row.longest)),
                )
                for row in own[:_SHOWN_ENTITIES]
            ],
            total=len(own),
        )
        sections.append(Section(f"Until {measure}", "", drawn, [table]))
    entities = [("Entities", len({(row.namespace, row.entity) for row in overall}))]
    delivered = [row for row in overall if row.measure == "delivered"]
    if not delivered:
        text, headline = "No message was delivered within the ledger.", None
    else:
        slowest = max(delivered, key=lambda row: row.p99)
        text = f"{counted(messages, 'message was', 'messages were')} delivered, at the latest after "
        text += f"{duration(max(row.longest for row in delivered))}."
        name = labels((row.namespace, row.entity) for row in delivered)[slowest.namespace, slowest.entity]
        of = f" of {name}, the slowest of {len(delivered):,}," if len(delivered) > 1 else f" of {name}"
        headline = Headline(Duration(slowest.p99), f"until 99 of 100 messages{of} were delivered")
    return Report("Delivery latency", text, "plain", entities, sections, headline)


def _by_hour(found: DataFrame, measure: str, names: Mapping[tuple[str, str], str]) -> list[str]:
    """Lines of the first of `names`, or none if the ledger is of one hour."""
    shown = dict(list(names.items())[: plots.MAX_LINES])
    rows = (
        found.filter((F.col("measure") == measure) & F.col("hour").isNotNull())
        .filter(F.col("entity").isin([entity for _, entity in shown]))
        .select("namespace", "entity", F.unix_seconds("hour").alias("seconds"), "p50", "p99")
        .collect()
    )
    wanted = {(row.namespace, row.entity, row.seconds): row for row in rows if (row.namespace, row.entity) in shown}
    times = running.hours_between([seconds for _, _, seconds in wanted])
    if len(times) < 2:
        return []
    drawn = []
    for share in ("p50", "p99"):
        series = {
            label: [row and row[share] for row in (wanted.get((*place, seconds)) for seconds in times)]
            for place, label in shown.items()
        }
        title = f"{share} until {measure}, by hour"
        drawn.append(plots.lines(title, [running.hour_of(seconds) for seconds in times], series, "ms", log=True))
    return drawn


def _job(arguments: Sequence[str]) -> int:
    parser = running.parser("pipeline.jobs.latency", __doc__)
    parser.add_argument(
        "--sub-queue",
        metavar="NAME",
        action="append",
        choices=("active", "deadletter", "transferdeadletter", "transfer"),
        help="Of these subqueues; may be repeated. Only the active messages, unless it is given.",
    )
    options = parser.parse_args(arguments)
    with running.step("starting Spark"):
        spark = running.session("peeklock delivery latency")
    with running.step("measuring"):
        rows = running.ledger_at(options.ledger).rows(spark)
        found = latency(rows, options.sub_queue or ("active",)).transform(kept)
    with running.step(f"writing {options.output}"):
        running.write_tables(options.output, {"latency": found})
        page = report(found)
        running.write_report(options.output, page)
    print(page.verdict)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return running.run(_job, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
