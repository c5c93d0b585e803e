"""What was dead-lettered, where, when and why; and which of these messages are alike.

It writes three tables:

- `summary`, by `namespace`, `entity`, `reason`, `hour` (UTC): `messages`, `firstTime`, `lastTime`.
- `queues`, by `namespace`, `entity`, `subQueue`: `entered`, `left`, and `waiting`, the difference, of dead-letter
  queues.
- `poison`, by `namespace`, `entity`, `reason`, `fingerprint` (`pipeline.jobs.fingerprints`): `messages`, `firstTime`,
  `lastTime`, `masked`, and of up to three of them `samples` and `messageIds`. `isOfBody`: the fingerprint is of the
  body. It is of the description if the ledger has no bodies, as without `bodies` in the journal's mode. Of bodies that
  are no text, `masked` is "binary", and samples say the length and the first bytes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs import plots, running
from pipeline.jobs.auditing.identities import MAX_MOVES
from pipeline.jobs.fingerprints import BINARY, binary_sample, fingerprint, is_binary, masked, text_of
from pipeline.jobs.ledger import ENTERS, MOVED, LedgerError, Source, kept, normalized
from pipeline.jobs.report import Headline, Report, Section, Table, counted, labels, shortened
from pyspark_peeklock.errors import JournalRefused
from pyspark_peeklock.records import columns_of

MAX_HASHES: Final = 1_000_000  # of places; each process of Spark has them all, in some 100 MB
SAMPLES: Final = 3
SAMPLE_CHARACTERS: Final = 300
NO_REASON: Final = "(no reason given)"
_PLACE = ("namespace", "partition", "epoch", "entity", "entityId", "subQueue", "sequenceNumber")
_FIRST = {name: f"first_{name}" for name in _PLACE}
_ORIGIN = {
    **{"entity": "originEntity", "entityId": "originEntityId"},
    **{"subQueue": "originSubQueue", "sequenceNumber": "originSequenceNumber"},
}
_DEAD_LETTER_QUEUES = ("deadletter", "transferdeadletter")
_SHOWN = 30
_SHOWN_CHARACTERS = 120  # of what is masked; the table that is written has more


def dead_letters(ledger: DataFrame) -> DataFrame:
    """One row for each message that was dead-lettered: its place before, `eventTime`, `reason`, `description`."""
    rows = normalized(ledger).filter("op = 'deadlettered'")
    reason = F.coalesce("reason", F.lit(NO_REASON)).alias("reason")
    return rows.select(*_PLACE, "eventTime", reason, "description")


def summary(dead: DataFrame) -> DataFrame:
    return dead.groupBy("namespace", "entity", "reason", F.date_trunc("hour", "eventTime").alias("hour")).agg(
        F.count(F.lit(1)).alias("messages"), F.min("eventTime").alias("firstTime"), F.max("eventTime").alias("lastTime")
    )


def queues(ledger: DataFrame) -> DataFrame:
    """How many messages entered and left the dead-letter queues within the ledger."""
    rows = normalized(ledger).filter(F.col("subQueue").isin(*_DEAD_LETTER_QUEUES) & F.col("sequenceNumber").isNotNull())
    enters = (F.col("op") == "enqueued") & ~F.col("reason").eqNullSafe("moved")
    leaves = F.col("op").isin("completed", "expired", "purged", "quarantined", "forwarded")
    found = rows.groupBy("namespace", "entity", "subQueue").agg(
        F.sum(enters.cast("int")).alias("entered"), F.sum(leaves.cast("int")).alias("left")
    )
    return found.withColumn("waiting", F.greatest(F.col("entered") - F.col("left"), F.lit(0)))


def with_bodies(dead: DataFrame, messages: DataFrame | None, ledger: DataFrame) -> DataFrame:
    """`dead` with `body` and `messageId`, both null where the ledger does not have them.

    `messages` are rows with the stored `record`, or with a `body`. A message has one in the row that brought it to its
    partition; from queue to queue of that partition, the rows of the `ledger` name its origins. Raises LedgerError.
    """
    if messages is None:
        return dead.withColumn("body", F.lit(None).cast("binary")).withColumn("messageId", F.lit(None).cast("string"))
    has_body = "body" in messages.columns
    if not has_body and "record" not in messages.columns:
        raise LedgerError("the messages have neither a column record nor body")
    if has_body:
        messages = messages.withColumn("record", F.col("body").cast("binary"))
        messages = messages if "op" in messages.columns else messages.withColumn("op", F.lit("enqueued"))
    origins = _origins(dead, normalized(ledger))
    brought = normalized(messages).filter(F.col("op").isin(*ENTERS) & F.col("record").isNotNull())
    brought = brought.select(*_PLACE, "messageId", "record").withColumnsRenamed(_FIRST)
    brought = _of_places(brought, origins)
    # Spark guesses from the size of files how large bodies are, and sends all of them everywhere if it guesses wrong.
    each = origins.join(brought.hint("merge"), [*_FIRST.values()])
    nearest = each.groupBy(*_PLACE).agg(F.min_by(F.struct("messageId", "record"), "moves").alias("nearest"))
    found = dead.join(nearest.hint("merge"), list(_PLACE), "left").select(dead["*"], "nearest.*")
    if has_body:
        return found.withColumnRenamed("record", "body")
    schema = found.drop("record").schema.add("body", "binary")
    return found.mapInArrow(_decoded, schema)


def _origins(dead: DataFrame, ledger: DataFrame) -> DataFrame:
    """Return, by place of each dead-lettered message, the places (_FIRST) whose rows may have its body; the nearest
    counts: its own, with `moves` 0, and those that it came from within its partition.

    A message that waited to be due, or that another queue of the same partition has forwarded, has it there.
    """
    has_origin = F.col("originSequenceNumber").isNotNull() & ~F.col("reason").eqNullSafe(MOVED)
    moves = ledger.filter(F.col("op").isin(*ENTERS) & has_origin).select(
        *(F.col(name).alias(_FIRST[name]) for name in _PLACE),
        *(F.col(_ORIGIN.get(name, name)).alias(f"next_{name}") for name in _PLACE),
    )
    own = dead.select(*_PLACE, *(F.col(name).alias(_FIRST[name]) for name in _PLACE), F.lit(0).alias("moves"))
    found = fresh = own.distinct().transform(kept)
    for number in range(1, MAX_MOVES + 1):
        left = _of_places(moves, fresh).join(fresh, [*_FIRST.values()])
        before = (F.col(f"next_{name}").alias(_FIRST[name]) for name in _PLACE)
        fresh = left.select(*_PLACE, *before, F.lit(number).alias("moves")).transform(kept)
        if fresh.isEmpty():
            break
        found = found.unionByName(fresh)
    return found


def _of_places(rows: DataFrame, places: DataFrame) -> DataFrame:
    """Return the rows whose place (_FIRST) is one of `places`, and maybe some others.

    All rows come back if there are so many places that holding them in memory costs more than sorting the rows. Where
    the rows are read, only a hash of each place is compared, so that no others are moved between tasks.
    """
    if places.count() > MAX_HASHES:
        return rows
    place = F.xxhash64(*_FIRST.values()).alias("place")
    wanted = places.select(place).distinct()
    return rows.withColumn("place", place).join(F.broadcast(wanted), "place", "left_semi").drop("place")


def _decoded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        records = batch.column("record").to_pylist()
        try:
            bodies = columns_of(records, frozenset({"body"}))["body"]
        except JournalRefused:  # one of them is broken: the others are worth to be read
            bodies = [_body(record) for record in records]
        names = [name for name in batch.schema.names if name != "record"]
        columns = [batch.column(name) for name in names]
        yield pa.RecordBatch.from_arrays([*columns, pa.array(bodies, pa.binary())], [*names, "body"])


def _body(record: bytes | None) -> bytes | None:
    try:
        return columns_of([record], frozenset({"body"}))["body"][0]  # type: ignore[no-any-return]
    except JournalRefused:
        return None


def poison(dead: DataFrame, *, samples: bool = True) -> DataFrame:
    """Groups of messages that are alike. `dead` as `with_bodies` gives them; without `samples`, no text of bodies is
    kept.

    Masked texts and samples have at most SAMPLE_CHARACTERS.
    """
    text = F.coalesce(text_of(F.col("body")), F.make_valid_utf8("description"), F.lit(""))
    each = dead.withColumn("text", text).withColumn("maskedText", masked(F.col("text")))
    each = each.withColumn("isOfBody", F.col("body").isNotNull())
    # The fingerprint is of what the bytes are as text, as it was before they were told apart.
    is_no_text = F.col("isOfBody") & is_binary(F.col("body"))
    sampled = F.when(is_no_text, binary_sample(F.col("body"))).otherwise(F.substring("text", 1, SAMPLE_CHARACTERS))
    each = each.withColumn("sampled", sampled)
    shown_mask = F.when(is_no_text, F.lit(BINARY)).otherwise(F.substring("maskedText", 1, SAMPLE_CHARACTERS))
    each = each.withColumn("shownMask", shown_mask)
    sample = F.struct("eventTime", F.col("sampled").alias("text"), "messageId")
    groups = each.groupBy(
        *("namespace", "entity", "reason", "isOfBody"), fingerprint(F.col("maskedText")).alias("fingerprint")
    ).agg(
        F.count(F.lit(1)).alias("messages"),
        F.min("eventTime").alias("firstTime"),
        F.max("eventTime").alias("lastTime"),
        F.min("shownMask").alias("masked"),
        # The newest: `max_by` keeps one or a few, where a list would keep all.
        F.max_by(sample, "eventTime", SAMPLES).alias("found"),
    )
    kept = F.transform("found", lambda one: one["text"]) if samples else F.array().cast("array<string>")
    shown = F.col("masked") if samples else F.lit(None).cast("string")
    ids = F.filter(F.transform("found", lambda one: one["messageId"]), F.isnotnull)
    return groups.select(
        *("namespace", "entity", "reason", "fingerprint", "messages", "firstTime", "lastTime", "isOfBody"),
        shown.alias("masked"),
        kept.alias("samples"),
        ids.alias("messageIds"),
    )


def report(summed: DataFrame, waiting: DataFrame, alike: DataFrame) -> Report:
    messages = F.sum("messages").alias("messages")
    by_reason = summed.groupBy("reason").agg(messages).sort(F.desc("messages"), "reason")
    by_cell = summed.groupBy("namespace", "entity", "reason").agg(
        messages, F.min("firstTime").alias("first"), F.max("lastTime").alias("last")
    )
    reasons, reason_count = _first(by_reason, plots.MAX_LINES)
    cells, cell_count = _first(by_cell.sort(F.desc("messages"), "namespace", "entity", "reason"), _SHOWN)
    top = [row.reason for row in reasons]
    rest = f"{reason_count - len(top):,} others" if reason_count > len(top) else ""
    while rest in top:
        rest += " "
    by_entity = _by_entity(summed, top, rest)
    total = sum(sum(parts.values()) for parts in by_entity.values())
    seconds = F.unix_seconds("hour").alias("seconds")
    hours = summed.filter(F.col("reason").isin(top)).groupBy(seconds, "reason").agg(messages).collect()
    times = running.hours_between([row.seconds for row in hours])
    counts = {(row.seconds, row.reason): row.messages for row in hours}
    drawn = []
    if total:
        drawn.append(plots.bars("Dead letters by entity", dict(list(by_entity.items())[:12]), "messages", rest))
    if len(times) > 1:
        series = {reason: [counts.get((hour, reason), 0) for hour in times] for reason in top}
        title = "Dead letters by hour" + (f", the {len(top)} most frequent reasons" if rest else "")
        drawn.append(plots.lines(title, [running.hour_of(hour) for hour in times], series, "messages"))
    queue_rows = waiting.sort(F.desc("waiting"), "namespace", "entity").collect()
    groups, group_count = _first(alike.sort(F.desc("messages"), "namespace", "entity", "fingerprint"), _SHOWN)
    shown = [
        (
            row.messages,
            row.entity,
            row.reason,
            row.fingerprint,
            None if row.masked is None else shortened(row.masked, _SHOWN_CHARACTERS),
            "\n".join(row.messageIds),
            row.firstTime,
            row.lastTime,
        )
        for row in groups
    ]
    samples = [(row.fingerprint, sample) for row in groups for sample in row.samples]
    is_of_body = not alike.filter("isOfBody").isEmpty()
    sections = [
        Section(
            "Reasons",
            "",
            drawn,
            [
                Table(
                    "By entity and reason",
                    ("Namespace", "Entity", "Reason", "Messages", "First (UTC)", "Last (UTC)"),
                    [
                        (cell.namespace, cell.entity, cell.reason, cell.messages, cell.first, cell.last)
                        for cell in cells
                    ],
                    total=cell_count,
                ),
                Table(
                    "Dead-letter queues",
                    ("Namespace", "Entity", "Queue", "Entered", "Left", "Waiting"),
                    [
                        (row.namespace, row.entity, row.subQueue, row.entered, row.left, row.waiting)
                        for row in queue_rows[:_SHOWN]
                    ],
                    "Of messages that entered within the ledger.",
                    len(queue_rows),
                ),
            ],
        ),
        Section(
            "Alike",
            "Messages that are the same but for numbers and ids."
            if is_of_body
            else "The ledger has no bodies: these are alike in their descriptions, but for numbers and ids.",
            (),
            [
                Table(
                    "Fingerprints",
                    ("Messages", "Entity", "Reason", "Fingerprint", "Masked", "Ids", "First (UTC)", "Last (UTC)"),
                    shown,
                    total=group_count,
                ),
                *([Table("Samples", ("Fingerprint", "Text"), samples)] if samples else []),
            ],
        ),
    ]
    waiting_now = sum(row.waiting for row in queue_rows)
    text = "No message was dead-lettered."
    if total:
        text = f"{counted(total, 'message was', 'messages were')} dead-lettered, for {counted(reason_count, 'reason')}."
        text += f" Most often: {reasons[0].reason} ({reasons[0].messages:,})." if len(reasons) > 1 else ""
    facts = [("Entities", len(by_entity)), ("Fingerprints", group_count), ("Waiting", waiting_now)]
    headline = Headline(total, f"dead-lettered, of which {waiting_now:,} wait" if total else "dead-lettered")
    return Report("Dead letters", text, "plain" if total else "good", facts, sections, headline)


def _first(table: DataFrame, most: int) -> tuple[list[Row], int]:
    """The first rows of a table, and how many it has."""
    rows = table.head(most + 1)
    return rows[:most], len(rows) if len(rows) <= most else table.count()


def _by_entity(summed: DataFrame, top: Sequence[str], rest: str) -> dict[str, dict[str, int]]:
    """How many messages have which of the reasons, all others being `rest`, by the label of the entity; most first."""
    reason = F.when(F.col("reason").isin(*top), F.col("reason")).otherwise(rest).alias("reason")
    rows = summed.groupBy("namespace", "entity", reason).agg(F.sum("messages").alias("messages")).collect()
    totals = Counter[tuple[str, str]]()
    for row in rows:
        totals[row.namespace, row.entity] += row.messages
    names = labels(key for key, _ in totals.most_common())
    found: dict[str, dict[str, int]] = {name: {} for name in names.values()}
    for row in sorted(rows, key=lambda row: (row.reason == rest, -row.messages, row.reason)):
        found[names[row.namespace, row.entity]][row.reason] = row.messages
    return found


def _job(arguments: Sequence[str]) -> int:
    parser = running.parser("pipeline.jobs.dead_letters", __doc__)
    parser.add_argument(
        "--messages",
        metavar="PATH",
        help="Parquet with bodies. Without it, those of the capture at --ledger, if it has any.",
    )
    parser.add_argument(
        "--no-samples", action="store_true", help="Keep no text of bodies in the output, not even masked."
    )
    options = parser.parse_args(arguments)
    with running.step("starting Spark"):
        spark = running.session("peeklock dead letters")
    source = running.ledger_at(options.ledger)
    ledger = source.rows(spark)
    messages = None
    if options.messages is not None:
        messages = Source.at(options.messages).rows(spark, "messages")
    elif source.has("messages"):
        messages = source.rows(spark, "messages")
    with running.step("counting"):
        dead = dead_letters(ledger).transform(kept)
        alike = poison(with_bodies(dead, messages, ledger), samples=not options.no_samples)
        tables = {
            "summary": summary(dead).transform(kept),
            "queues": queues(ledger).transform(kept),
            "poison": kept(alike, is_costly=True),
        }
    with running.step(f"writing {options.output}"):
        running.write_tables(options.output, tables)
        page = report(tables["summary"], tables["queues"], tables["poison"])
        running.write_report(options.output, page)
    print(page.verdict)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return running.run(_job, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
