"""The flow audit: each message that was accepted is accounted for, or named.

It reads the ledger, and what was in the queues if that is given, and writes

| table | rows |
|---|---|
| `verdicts` | how many messages have which verdict, by entity, subqueue and partition (`auditing.verdicts`) |
| `faults` | each message in a queue with a fault |
| `moves` | each move of which a side is missing, and each that could not be decided (`auditing.moves`) |
| `ids` | what became of the message ids that a fault concerns (`auditing.identities`) |
| `offsets`, `problems` | which offsets the ledger has, and which it lacks (`auditing.offsets`) |
| `open` | what is in the queues at the end (`Judged.open`): the `--opening` of an audit of the rows that follow |
| `pending`, `blind` | of a series: moves whose other side may come behind the end, and gaps that may hide one |
"""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs import plots, running
from pipeline.jobs.auditing import checksum, identities, moves, series, verdicts
from pipeline.jobs.auditing.offsets import Offsets, offsets_of
from pipeline.jobs.auditing.presence import presence
from pipeline.jobs.auditing.queues import names_of, newest_of
from pipeline.jobs.auditing.series import Before
from pipeline.jobs.auditing.verdicts import FAULTS, VERDICTS, Judged, Snapshot
from pipeline.jobs.ledger import NAMES, LedgerError, kept, normalized, read, until
from pipeline.jobs.report import Report, Section, Table, labels
from pyspark_peeklock.journal_client import Endpoint
from pyspark_peeklock.options import Access

SHOWN_ROWS = 200
PATIENCE_S = 120.0  # that the broker may be away
_FAULT_COLUMNS = (
    *("verdict", "namespace", "entity", "subQueue", "partition", "sequenceNumber", "entered", "left", "present"),
    *("firstOffset", "lastOffset", "generation", "entityId"),
)


class Audit(NamedTuple):
    """What the audit found. Tables as in this module's docstring.

    `hidden`: why queues were not compared with what is in them, by entity and subqueue. `is_whole`: of all that had
    happened before the end, nothing is missing.
    """

    offsets: Offsets
    judged: Judged
    verdicts: DataFrame
    faults: DataFrame
    moves: DataFrame
    ids: DataFrame
    open: DataFrame
    pending: DataFrame
    blind: DataFrame
    hidden: Mapping[tuple[str, str], str]
    is_whole: bool

    def tables(self, *, is_of_series: bool = False) -> dict[str, DataFrame]:
        found = {
            "verdicts": self.verdicts,
            "faults": self.faults,
            "moves": self.moves,
            "ids": self.ids,
            "offsets": self.offsets.logs_table(is_whole=self.is_whole),
            "problems": self.offsets.problems_table(),
            "open": self.open,
        }
        return found | {"pending": self.pending, "blind": self.blind} if is_of_series else found


def audit(
    ledger: DataFrame,
    snapshot: Snapshot | None = None,
    *,
    opening: DataFrame | None = None,
    cut: Mapping[tuple[int, str | None], int] | None = None,
    grace: timedelta = moves.GRACE,
    is_whole: bool = False,
    flagged_only: bool = False,
    broker: Endpoint | None = None,
    before: Before | None = None,
) -> Audit:
    """Audit the rows of a ledger before `cut` (see `ledger.until`), and where one is `before`, from its end on.

    `broker`: in place of a snapshot, what was in its queues where the ledger ends (`pipeline.jobs.auditing.presence`).
    `before`: its `opening` and `is_whole` count, and those given do not.
    `opening`: the table `open` of the audit of all rows before these. `is_whole`: before the ledger's first rows, all
    queues were empty. `flagged_only`: judge only messages of queues whose checksum is wrong, which needs a snapshot,
    and either `opening` or `is_whole`. Raises LedgerError, and what `presence` raises.
    """
    ledger = until(normalized(ledger), cut)
    if before is not None:
        ledger, opening = before.following(ledger), before.opening
    # What does not wait for each other is asked at once: while one question is planned, another has the processors.
    with ThreadPoolExecutor() as beside:
        named = beside.submit(names_of, ledger)
        offsets = offsets_of(ledger, cut, () if before is None else before.logs)
        if before is None:
            # After a restore, the first rows of an epoch are not the first that happened.
            is_whole = (is_whole or opening is not None) and offsets.is_of_one_epoch
            unmatched = beside.submit(moves.unmatched, offsets, grace, is_whole=is_whole and opening is None)
        else:
            # What entered in a gap of an audit before may leave now.
            is_whole = before.is_whole
            unmatched = beside.submit(moves.unmatched, offsets, grace, is_whole=True, before=before.moves)
        namespaces = {log.namespace for log in offsets.logs}
        only = namespaces.pop() if len(namespaces) == 1 else None
        opened = None if opening is None else verdicts.keyed(opening, "the opening set", only)
        queues = named.result() if opened is None else names_of(named.result(), opened)
        present = None
        hidden: Mapping[tuple[str, str], str] = {}
        if broker is not None:
            snapshot, hidden = presence(broker, offsets.logs, queues)
        if snapshot is not None:
            present = verdicts.keyed(snapshot.messages, "the snapshot", only, newest_of(queues))
            queues = names_of(queues, present)
        rows = offsets.rows
        if flagged_only:
            if present is None or not is_whole:
                raise LedgerError("checksums need a snapshot, and a ledger from the beginning or an opening set")
            balances = checksum.balances(rows, present, opened).transform(kept)
            rows = checksum.flagged(rows, balances)
            present = checksum.flagged(present, balances)
            opened = None if opened is None else checksum.flagged(opened, balances)
        judged = verdicts.judged(rows, queues, offsets, present, opened, snapshot, is_whole=is_whole)
        counts = judged.all().groupBy("queue", "partition", "verdict").agg(F.count(F.lit(1)).alias("messages"))
        by_queue = beside.submit(kept, judged.named(counts).select(*NAMES, "partition", "verdict", "messages"))
        faults = judged.named(judged.others.filter(F.col("verdict").isin(*FAULTS))).select(*_FAULT_COLUMNS)
        ids = identities.concerned(offsets.rows, judged, unmatched.result())
        still = judged.named(judged.open()).select(*NAMES, "sequenceNumber", "partition", "entered", "ahead", "left")
        found = by_queue.result(), faults.transform(kept), moves.shown(unmatched.result())
        left = moves.pending(unmatched.result()), moves.blind(offsets, grace, None if before is None else before.moves)
        return Audit(offsets, judged, *found, ids, still, *left, hidden, is_whole and offsets.is_uncut)


class Summary(NamedTuple):
    """The audit in numbers: messages and moves by verdict, gaps and truncations, and rows with repeated offsets."""

    messages: Counter[str]
    moves: Counter[str]
    problems: Counter[str]

    @property
    def faults(self) -> int:
        places = sum(self.messages[verdict] for verdict in FAULTS)
        return places + sum(self.moves[verdict] for verdict in moves.MOVE_FAULTS) + self.problems["repeated"]

    @property
    def gaps(self) -> int:
        return self.problems["gap"] + self.problems["truncated"]


def summary(found: Audit) -> Summary:
    def counted(table: DataFrame, name: str, value: str | None = None) -> Counter[str]:
        count = F.count(F.lit(1)) if value is None else F.sum(value)
        return Counter({row[0]: row[1] for row in table.groupBy(name).agg(count).collect()})

    problems: Counter[str] = Counter()
    for log in found.offsets.logs:
        for problem in log.problems:
            problems[problem.kind] += 1 if problem.hides else problem.size
    return Summary(
        counted(found.verdicts, "verdict", "messages"),
        counted(found.moves, "verdict"),
        problems,
    )


def verdict_text(numbers: Summary) -> tuple[str, str]:
    """The verdict in a sentence, and its mood."""
    total = sum(numbers.messages.values())
    gaps = ""
    if numbers.gaps:
        many = "a gap" if numbers.gaps == 1 else f"{numbers.gaps:,} gaps"
        gaps = f" The ledger has {many}: what happened there is not known, and is called no fault."
    if numbers.faults:
        named = {name: numbers.messages[name] for name in FAULTS if numbers.messages[name]}
        named |= {name: numbers.moves[name] for name in moves.MOVE_FAULTS if numbers.moves[name]}
        if numbers.problems["repeated"]:
            named["repeated offsets"] = numbers.problems["repeated"]
        listed = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in named.items())
        counted = "1 fault" if numbers.faults == 1 else f"{numbers.faults:,} faults"
        return f"{counted} in {total:,} messages: {listed}.{gaps}", "bad"
    undecided = numbers.messages["undecided"] + numbers.moves["undecided"]
    if undecided:
        return f"No faults in {total:,} messages; {undecided:,} could not be decided.{gaps}", "plain"
    return f"All {total:,} messages are accounted for.{gaps}", "plain" if numbers.gaps else "good"


def report(found: Audit, numbers: Summary, snapshot_given: bool) -> Report:
    text, mood = verdict_text(numbers)
    logs = found.offsets.logs
    faults_by_entity: dict[str, dict[str, float]] = {}
    worst = (
        found.verdicts.filter(F.col("verdict").isin(*FAULTS))
        .groupBy("namespace", "entity", "verdict")
        .agg(F.sum("messages").alias("messages"))
        .sort(F.desc("messages"))
        .head(60)
    )
    busiest = (
        found.verdicts.groupBy("namespace", "entity", "subQueue")
        .agg(F.sum("messages").alias("messages"))
        .sort(F.desc("messages"), "namespace", "entity")
        .head(12)
    )
    names = labels((row.namespace, row.entity) for row in (*worst, *busiest))
    for row in worst:
        faults_by_entity.setdefault(names[row.namespace, row.entity], {})[row.verdict.replace("_", " ")] = row.messages
    flow = {
        names[row.namespace, row.entity] + ("" if row.subQueue == "active" else f" ({row.subQueue})"): {
            "messages": row.messages
        }
        for row in busiest
    }
    drawn = [plots.bars("Messages by queue", flow, "messages")] if flow else []
    if faults_by_entity:
        top = dict(list(faults_by_entity.items())[:12])
        drawn.insert(0, plots.bars("Faults by entity", top, "messages"))
    facts: list[tuple[str, Any]] = [
        ("Rows of the ledger", sum(log.rows for log in logs)),
        ("Messages in queues", sum(numbers.messages.values())),
        ("Partitions", len({(log.namespace, log.partition) for log in logs})),
        ("From (UTC)", min((log.first_time for log in logs), default=None)),
        ("To (UTC)", max((log.last_time for log in logs), default=None)),
        ("Compared with what is in the queues", snapshot_given),
    ]
    meaning = {
        "entered_twice": "two rows say that it entered",
        "left_twice": "two rows say that it left",
        "unexplained": "it left, and the broker does not know why",
        "ghost": "it left, was used, or is present, and never entered",
        "left_but_present": "it left, and is still in the queue",
        "lost": "it entered, never left, and is not in the queue",
        "undecided": "a gap hides whether it is a fault, or it changed while the queues were browsed",
        "before": "entered before the ledger begins; all else is fine",
        "ok": "entered once, left at most once" + (", and is there if it has not left" if snapshot_given else ""),
    }
    in_words = [(name.replace("_", " "), numbers.messages[name], meaning[name]) for name in VERDICTS]
    flagged = found.faults.sort("verdict", "namespace", "entity", "subQueue", "sequenceNumber")
    sections = [
        Section("Verdicts", "", drawn, [Table("Messages by verdict", ("Verdict", "Messages", "Meaning"), in_words)]),
        Section(
            "Faults",
            "Each message whose rows contradict each other, or what is in its queue.",
            (),
            [_table("Messages with faults", flagged, _FAULT_COLUMNS[:11])],
        ),
        Section(
            "Moves between queues",
            "Dead-lettered, forwarded, activated, published and moved messages whose other side is missing or doubled. "
            "A move "
            "near a gap, or near the ledger's beginning or end, is undecided.",
            (),
            [
                _table(
                    "Moves that do not match",
                    found.moves.sort("verdict", "namespace", "entity", "sequenceNumber", "messageId"),
                    (
                        "verdict",
                        "kind",
                        "namespace",
                        "entity",
                        "subQueue",
                        "sequenceNumber",
                        "messageId",
                        "left",
                        "expected",
                        "arrived",
                        "firstTime",
                    ),
                )
            ],
        ),
        *([_not_compared(found.hidden)] if found.hidden else []),
        Section(
            "Message ids",
            "What became of the ids that the faults concern: how many messages were accepted, ended, and wait.",
            (),
            [
                _table(
                    "Ids",
                    found.ids.sort("verdict", "namespace", "messageId"),
                    ("verdict", "namespace", "messageId", "accepted", "ended", "waiting"),
                )
            ],
        ),
        Section(
            "Offsets",
            "Verdicts are as of these ends. Offsets that are missing hide what happened there.",
            (),
            [
                _table(
                    "Gaps, truncations and repetitions",
                    found.offsets.problems_table().sort("namespace", "partition", "fromOffset"),
                    (
                        "kind",
                        "namespace",
                        "partition",
                        "epoch",
                        "fromOffset",
                        "toOffset",
                        "count",
                        "firstTime",
                        "lastTime",
                        "description",
                    ),
                ),
                _table(
                    "What the ledger has",
                    found.offsets.logs_table().sort("namespace", "partition", F.desc("generation")),
                    ("namespace", "partition", "epoch", "low", "end", "rows", "firstTime", "lastTime"),
                ),
            ],
        ),
    ]
    return Report("Flow audit", text, mood, facts, sections)


def _table(title: str, rows: DataFrame, columns: Sequence[str]) -> Table:
    shown_rows = [
        tuple(value.replace("_", " ") if name == "verdict" else value for name, value in row.asDict().items())
        for row in rows.select(*columns).head(SHOWN_ROWS)
    ]
    total = rows.count() if len(shown_rows) == SHOWN_ROWS else None
    return Table(title, columns, shown_rows, total=total)


def _not_compared(hidden: Mapping[tuple[str, str], str]) -> Section:
    rows = [(*place, reason) for place, reason in sorted(hidden.items())]
    table = Table("Not compared", ("Entity", "Subqueue", "Reason"), rows[:SHOWN_ROWS], total=len(rows))
    text = "Queues whose messages the broker does not show: whether something is lost there is not known."
    return Section("Queues that cannot be browsed", text, (), [table])


def parsed_cut(text: str) -> dict[tuple[int, str | None], int]:
    """Of JSON {"partition" or "partition/epoch": offset}, or of a file with it."""
    try:
        given = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
        cut: dict[tuple[int, str | None], int] = {}
        for key, offset in given.items():
            partition, _, epoch = key.partition("/")
            if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
                raise ValueError(f"the offset of {key} is {offset!r}")
            cut[int(partition), epoch or None] = offset
    except (AttributeError, ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(f'not like {{"0": 1200, "1": 900}}, nor @FILE with it: {error}') from error
    return cut


def _job(arguments: Sequence[str]) -> int:
    parser = running.parser(__spec__.name if __spec__ else "pipeline.jobs.audit", __doc__)
    parser.add_argument("--present", metavar="PATH", help="Parquet of what was in the queues when they were browsed.")
    parser.add_argument(
        "--present-covers",
        metavar="LIKE",
        action="append",
        help="The entities that were browsed, as a pattern of SQL's LIKE; may be repeated. All, unless it is given.",
    )
    parser.add_argument(
        "--present-began",
        metavar="JSON",
        type=parsed_cut,
        help="Journal offsets by partition when browsing began. Messages that changed since then are not judged by it.",
    )
    parser.add_argument(
        "--connection-string-file",
        metavar="PATH",
        help="In place of --present: compare with what is in the queues of this broker, as they were where the ledger "
        "ends. Messages may come and go meanwhile. A file with its connection string, on the driver and all executors; "
        "it needs Listen on the namespace.",
    )
    parser.add_argument(
        "--ca", metavar="FILE", help="Certificates of the authorities to trust with TLS; by default the system's."
    )
    parser.add_argument(
        "--http-endpoint", metavar="URL", help="The broker's address for HTTP; by default the usual one."
    )
    parser.add_argument("--opening", metavar="PATH", help="The table `open` of the audit of all rows before these.")
    parser.add_argument(
        "--cut", metavar="JSON", type=parsed_cut, help="By partition, the offset to end before, or @FILE."
    )
    parser.add_argument(
        "--series",
        action="store_true",
        help="The audits in --output are a series: this one goes on where the last one ended, and gets a folder there, "
        "named by its time. The first one reads all.",
    )
    parser.add_argument("--whole", action="store_true", help="All queues were empty before the ledger's first rows.")
    parser.add_argument(
        "--grace",
        metavar="SECONDS",
        type=running.number_at_least(0),
        default=int(moves.GRACE.total_seconds()),
        help="How far apart the two sides of a move between partitions may be.",
    )
    parser.add_argument(
        "--flagged-only",
        action="store_true",
        help="Judge only messages of queues whose checksum is wrong: much cheaper.",
    )
    parser.add_argument("--fail-on-faults", action="store_true", help="Exit with 1 if there are faults.")
    options = parser.parse_args(arguments)
    if options.present is None and (options.present_covers or options.present_began):
        parser.error("--present-covers and --present-began need --present")
    if options.series and options.opening is not None:
        parser.error("--series knows what was there before; leave out --opening")
    broker = None
    if options.connection_string_file is not None:
        if options.present is not None:
            parser.error("--connection-string-file takes the place of --present")
        access = Access(options.connection_string_file, options.ca)
        access.connection_string()  # what is wrong with it is said at once
        broker = Endpoint(access, options.http_endpoint or "", PATIENCE_S)
    elif options.ca or options.http_endpoint:
        parser.error("--ca and --http-endpoint need --connection-string-file")
    with running.step("starting Spark"):
        spark = running.session("peeklock flow audit")
    snapshot = None
    if options.present is not None:
        began = options.present_began and {
            partition: offset for (partition, _), offset in options.present_began.items()
        }
        snapshot = Snapshot(read(spark, options.present), options.present_covers or ("%",), began)
    opening = read(spark, options.opening) if options.opening is not None else None
    output, before = options.output, None
    if options.series:
        output, last = series.folder_for(options.output, datetime.now(UTC)), series.newest(options.output)
        if last is not None:
            running.say(f"going on where {last} ended")
            before = series.before(spark, last)
    with running.step("judging"):
        found = audit(
            read(spark, options.ledger, behind=None if before is None else before.ends()),
            snapshot,
            opening=opening,
            cut=options.cut,
            grace=timedelta(seconds=options.grace),
            is_whole=options.whole,
            flagged_only=options.flagged_only,
            broker=broker,
            before=before,
        )
        numbers = summary(found)
    with running.step(f"writing {output}"):
        with ThreadPoolExecutor() as beside:
            written = beside.submit(running.write_tables, output, found.tables(is_of_series=options.series))
            page = report(found, numbers, snapshot is not None or broker is not None)
            written.result()
        running.write_report(output, page)
    print(verdict_text(numbers)[0])
    return running.FAULTS_FOUND if numbers.faults and options.fail_on_faults else 0


def main(arguments: Sequence[str] | None = None) -> int:
    return running.run(_job, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
