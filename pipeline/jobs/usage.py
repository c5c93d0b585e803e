"""Who uses how much, and what it costs: operations and bytes by entity and day, and those of the syphon (PN11).

It writes two tables. `usage`, by `namespace`, `entity`, `day` (UTC):

- `sends`: messages that clients sent, pings and duplicates included; `receives`: deliveries; `pings`: of the sends.
- `sentBytes`, `receivedBytes`: of their bodies as they are stored; bytes of messages from before the ledger are not
  known.
- `operations`: sends and receives, each counted once for each begun 64 KiB; `cost`, if there is a table of prices.

`syphon`, by `namespace`, `entity` (a backlog queue), `day`: what syphoned messages cost, which is four operations each.
`sendBacklog` and `receiveBacklog` are in `usage`, too. `sendPrimary` and `receivePrimary` happen in the primary
namespace: its own ledger, if it is given as well, has them among the sends and receives of the destinations, and this
table must not be added to it. The polls of a syphon that finds nothing leave no row: `peeklock pair cost` tells how
many they are.

The prices are a TOML file: `currency = "EUR"`, and `operations`, `sends`, `receives` (each for a million) and
`gigabytes` (of 10^9 bytes sent or received), of which those that are left out are 0.
"""

import argparse
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs import plots, running
from pipeline.jobs.auditing.identities import is_accepted
from pipeline.jobs.ledger import enters, kept, normalized
from pipeline.jobs.report import Headline, Report, Section, Table, counted, labels
from storage.wording import plural

OPERATION_BYTES: Final = 64 << 10
# The names that a pairing gives its backlog queues: of the primary, then this, then an index.
BACKLOG_QUEUE: Final = r"^.+/x-servicebus-transfer/[0-9]+$"
_QUEUE = ("namespace", "partition", "epoch", "entity", "entityId", "subQueue")
_SHOWN = 30


class Prices(NamedTuple):
    """`operations`, `sends` and `receives` for a million each, `gigabytes` for 10^9 bytes."""

    currency: str
    operations: float = 0.0
    sends: float = 0.0
    receives: float = 0.0
    gigabytes: float = 0.0


def parsed_prices(path: str) -> Prices:
    """Read prices from a TOML file. Raises ArgumentTypeError that names the key."""
    try:
        given = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from error
    if unknown := sorted(set(given) - set(Prices._fields)):
        raise argparse.ArgumentTypeError(f"{path}: {unknown[0]} is none of {', '.join(Prices._fields)}")
    currency = given.pop("currency", None)
    if not isinstance(currency, str):
        raise argparse.ArgumentTypeError(f'{path}: currency must be given, such as "EUR"')
    for name, price in given.items():
        if isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 <= price < float("inf"):
            raise argparse.ArgumentTypeError(f"{path}: {name} is {price!r}; it must be a number of at least 0")
    return Prices(currency, **given)


def usage(ledger: DataFrame, prices: Prices | None = None) -> DataFrame:
    """The table `usage` of this module's docstring. Raises LedgerError."""
    rows = normalized(ledger)
    op = F.col("op")
    day = F.to_date("eventTime").alias("day")
    # What another queue has forwarded was sent once, to that one.
    is_send = is_accepted() | (op.isin("duplicate", "ping") & F.col("originEntity").isNull())
    size = F.coalesce("bodySize", F.lit(0))
    sends = rows.filter(is_send).select(
        *("namespace", "entity"),
        day,
        F.lit(1).alias("sends"),
        (op == "ping").cast("int").alias("pings"),
        size.alias("sentBytes"),
        _operations(size).alias("operations"),
    )
    receives = _receives(rows)
    counts = ("sends", "receives", "pings", "sentBytes", "receivedBytes", "operations")
    found = (
        sends.unionByName(receives, allowMissingColumns=True)
        .groupBy("namespace", "entity", "day")
        .agg(*(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in counts))
    )
    cost = F.lit(None).cast("double")
    if prices is not None:
        millions = F.col("operations") * prices.operations + F.col("sends") * prices.sends
        millions += F.col("receives") * prices.receives
        cost = millions / 1e6 + (F.col("sentBytes") + F.col("receivedBytes")) * prices.gigabytes / 1e9
    return found.withColumn("cost", cost)


def _receives(rows: DataFrame) -> DataFrame:
    """Deliveries of normalized rows, by queue and day: `namespace`, `entity`, `day`, `receives`, `receivedBytes` and
    their `operations`.
    """
    op = F.col("op")
    at_once = (op == "completed") & F.col("reason").eqNullSafe("receiveAndDelete")
    # Numbers alone, because to hash and exchange the texts of each place takes longer than all the rest.
    queue = F.xxhash64(*_QUEUE).alias("queue")
    message = ("queue", "sequenceNumber")
    days = (
        rows.filter(enters() | at_once | (op == "delivered"))
        .select(
            queue,
            "sequenceNumber",
            F.to_date("eventTime").alias("day"),
            F.when(enters(), F.col("bodySize")).alias("size"),
            (op == "delivered").cast("int").alias("locked"),
            at_once.cast("int").alias("deleted"),
        )
        .groupBy(*message, "day")
        .agg(F.max("size").alias("size"), F.sum("locked").alias("locked"), F.sum("deleted").alias("deleted"))
    )
    # A delivery does not say how large its message is: the row that brought it does, on whatever day.
    size = F.coalesce(F.max("size").over(Window.partitionBy(*message)), F.lit(0)).alias("size")
    # Whether a receive that deletes has a row `delivered` as well or not, it is one delivery.
    count = F.greatest("locked", "deleted").alias("count")
    each = days.select("queue", "day", size, count).filter("count > 0")
    sums = each.groupBy("queue", "day").agg(
        F.sum("count").alias("receives"),
        F.sum(F.col("count") * F.col("size")).alias("receivedBytes"),
        F.sum(F.col("count") * _operations(F.col("size"))).alias("operations"),
    )
    names = rows.select(queue, "namespace", "entity").distinct()
    return sums.join(names, "queue").drop("queue")


def _operations(size: Column) -> Column:
    return F.greatest(F.ceil(size / OPERATION_BYTES), F.lit(1)).cast("bigint")


def syphoned(ledger: DataFrame) -> DataFrame:
    """The table `syphon` of this module's docstring: `syphoned` messages, and their operations. Raises LedgerError."""
    op = F.col("op")
    rows = normalized(ledger).filter(F.col("entity").rlike(BACKLOG_QUEUE) & (F.col("subQueue") == "active"))
    found = rows.groupBy("namespace", "entity", F.to_date("eventTime").alias("day")).agg(
        F.sum(is_accepted().cast("int")).alias("sendBacklog"),
        F.sum((op == "delivered").cast("int")).alias("receiveBacklog"),
        F.sum((op == "completed").cast("int")).alias("syphoned"),
    )
    # It completes a message in the backlog only when the primary has taken it, whose receivers get it once, as a rule.
    primary = [F.col("syphoned").alias(name) for name in ("sendPrimary", "receivePrimary")]
    total = F.col("sendBacklog") + F.col("receiveBacklog") + 2 * F.col("syphoned")
    return found.select("*", *primary, total.alias("operations"))


def report(used: DataFrame, drained: DataFrame, prices: Prices | None) -> Report:
    counts = ("sends", "receives", "pings", "sentBytes", "receivedBytes", "operations", "cost")
    entities = (
        used.groupBy("namespace", "entity")
        .agg(*(F.sum(name).alias(name) for name in counts))
        .sort(F.desc("operations"), "namespace", "entity")
        .collect()
    )
    days = used.groupBy("day").agg(*(F.sum(name).alias(name) for name in counts)).sort("day").collect()
    total = {name: sum(row[name] or 0 for row in days) for name in counts}
    priced = "Cost" if prices is None else f"Cost ({prices.currency})"
    columns = ("Sends", "Receives", "Pings among sends", "Bytes sent", "Bytes received", "Operations", priced)
    drawn = []
    if entities:
        names = labels((row.namespace, row.entity) for row in entities)
        busiest = {
            names[row.namespace, row.entity]: {"sends": row.sends, "receives": row.receives} for row in entities[:12]
        }
        drawn.append(plots.bars("Sends and receives by entity", busiest, "messages"))
        drawn.append(
            plots.bars(
                "Sends and receives by day",
                {str(row.day): {"sends": row.sends, "receives": row.receives} for row in days[-14:]},
                "messages",
            )
        )
    lines = drained.sort("namespace", "entity", "day").collect()
    moved = sum(row.syphoned for row in lines)
    steps = ("sendBacklog", "receiveBacklog", "sendPrimary", "receivePrimary", "operations")
    sections = [
        Section(
            "Entities",
            "A message of more than 64 KiB counts as one operation for each begun 64 KiB.",
            drawn,
            [
                Table(
                    "Usage by entity",
                    ("Namespace", "Entity", *columns),
                    [(row.namespace, row.entity, *(row[name] for name in counts)) for row in entities[:_SHOWN]],
                    total=len(entities),
                ),
                Table(
                    "Usage by day", ("Day", *columns), [(str(row.day), *(row[name] for name in counts)) for row in days]
                ),
            ],
        ),
        Section(
            "Syphon",
            "Each syphoned message costs a send to the backlog and a receive from it, and a send and a receive in the "
            "primary. The latter two are not in the tables above, unless the ledger has the primary as well. "
            "Receives that find nothing are not in the ledger.",
            (),
            [
                Table(
                    "Operations of backlog queues",
                    (
                        "Namespace",
                        "Backlog queue",
                        "Day",
                        "Syphoned messages",
                        "Send to backlog",
                        "Receive from backlog",
                        "Send to primary",
                        "Receive from primary",
                        "Operations",
                    ),
                    [
                        (row.namespace, row.entity, str(row.day), row.syphoned, *(row[name] for name in steps))
                        for row in lines[:_SHOWN]
                    ],
                    total=len(lines),
                )
            ],
        ),
    ]
    text = f"{counted(total['operations'], 'operation')}: {counted(total['sends'], 'send')} and "
    text += f"{counted(total['receives'], 'receive')}."
    headline = Headline(total["operations"], plural(total["operations"], "operation"))
    if prices is not None:
        text += f" {plural(total['operations'], 'It costs', 'They cost')} {total['cost']:,.2f} {prices.currency}."
        headline = Headline(
            f"{total['cost']:,.2f} {prices.currency}", f"for {counted(total['operations'], 'operation')}"
        )
    facts = [("Days", len(days)), ("Entities", len(entities)), ("Pings", total["pings"]), ("Syphoned messages", moved)]
    return Report("Usage and cost", text, "plain", facts, sections, headline)


def _job(arguments: Sequence[str]) -> int:
    parser = running.parser("pipeline.jobs.usage", __doc__)
    parser.add_argument("--prices", metavar="FILE", type=parsed_prices, help="The prices, as TOML.")
    options = parser.parse_args(arguments)
    with running.step("starting Spark"):
        spark = running.session("peeklock usage and cost")
    ledger = running.ledger_at(options.ledger).rows(spark)
    with running.step("counting"):
        used = usage(ledger, options.prices).transform(kept)
        drained = syphoned(ledger).transform(kept)
    with running.step(f"writing {options.output}"):
        running.write_tables(options.output, {"usage": used, "syphon": drained})
        page = report(used, drained, options.prices)
        running.write_report(options.output, page)
    print(page.verdict)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return running.run(_job, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
