"""The flow audit: each message that was accepted is accounted for, or named.

It reads the ledger, and what was in the queues if that is given, and writes

| table | rows |
|---|---|
| `verdicts` | how many messages have which verdict, by entity, subqueue and partition (`auditing.verdicts`) |
| `faults` | each message in a queue with a fault |
| `moves` | each move of which a side is missing, and each that could not be decided (`auditing.moves`) |
| `ids` | what became of the message ids that a fault concerns (`auditing.identities`) |
| `offsets`, `problems` | which offsets the ledger has, and which it lacks (`auditing.offsets`) |
| `bodies` | with `--bodies`: each message whose body is not what was enqueued (`auditing.bodies`) |
| `open` | what is in the queues at the end (`Judged.open`): the `--opening` of an audit of the rows that follow |
| `pending`, `blind` | of a series: moves whose other side may come behind the end, and gaps that may hide one |
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs import running
from pipeline.jobs.auditing import bodies, checksum, identities, moves, series, verdicts
from pipeline.jobs.auditing.findings import Audit, Compared, summary, verdict_text
from pipeline.jobs.auditing.offsets import SKEW, Wanted, from_micros, offsets_of
from pipeline.jobs.auditing.page import FAULT_COLUMNS, report
from pipeline.jobs.auditing.presence import presence
from pipeline.jobs.auditing.queues import names_of, newest_of
from pipeline.jobs.auditing.series import Before
from pipeline.jobs.auditing.verdicts import FAULTS, Snapshot
from pipeline.jobs.captured import Manifest
from pipeline.jobs.ledger import NAMES, PLACE, LedgerError, Source, kept, normalized, read, until
from pyspark_peeklock.journal_client import Endpoint, JournalClient
from pyspark_peeklock.options import Access
from storage.capture.inventory import behind

PATIENCE_S = 120.0  # that the broker may be away


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
    wanted: Wanted | None = None,
    skew: timedelta = SKEW,
) -> Audit:
    """Audit the rows of a ledger before `cut` (see `ledger.until`), and where one is `before`, from its end on.

    `broker`: in place of a snapshot, what was in its queues where the ledger ends (`pipeline.jobs.auditing.presence`).
    `wanted`: what the ledger should have; `skew`: times that go back by more are told.
    `before`: its `opening` and `is_whole` count, and those given do not.
    `opening`: the table `open` of the audit of all rows before these. `is_whole`: before the ledger's first rows, all
    queues were empty. `flagged_only`: judge only messages of queues whose checksum is wrong, which needs a snapshot,
    and either `opening` or `is_whole`. Raises LedgerError, and what `presence` raises.
    """
    ledger = until(normalized(ledger), cut)
    if before is not None:
        ledger, opening = before.following(ledger), before.opening
    # Questions that do not wait for each other are asked at once: while one is planned, another has the processors.
    with ThreadPoolExecutor() as beside:
        named = beside.submit(names_of, ledger)
        offsets = offsets_of(ledger, cut, () if before is None else before.logs, wanted, skew)
        if before is None:
            # After a restore, the first rows of an epoch are not the first that happened.
            is_whole = (is_whole or opening is not None) and offsets.is_of_one_epoch
            unmatched = beside.submit(moves.unmatched, offsets, grace, is_whole=is_whole and opening is None)
        else:
            # Messages that entered in a gap of an audit before may leave now.
            is_whole = before.is_whole
            unmatched = beside.submit(moves.unmatched, offsets, grace, is_whole=True, before=before.moves)
        namespaces = {log.namespace for log in offsets.logs}
        only = namespaces.pop() if len(namespaces) == 1 else None
        queues, opened = named.result(), None
        if opening is not None:
            opened = verdicts.keyed(opening, "the opening set", only)
            queues, opened = names_of(opened, queues), opened.dropDuplicates([*PLACE])
        present = None
        hidden: Mapping[tuple[str, str], str] = {}
        if broker is not None:
            snapshot, hidden = presence(broker, offsets.logs, queues)
        if snapshot is not None:
            present = verdicts.keyed(snapshot.messages, "the snapshot", only, newest_of(queues))
            # A client may have browsed a message twice.
            queues, present = names_of(present, queues), present.dropDuplicates([*PLACE])
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
        faults = judged.named(judged.others.filter(F.col("verdict").isin(*FAULTS))).select(
            *FAULT_COLUMNS, "generation", "entityId"
        )
        ids = identities.concerned(offsets.rows, judged, unmatched.result())
        still = judged.named(judged.open()).select(*NAMES, "sequenceNumber", "partition", "entered", "ahead", "left")
        found = by_queue.result(), faults.transform(kept), moves.shown(unmatched.result())
        left = moves.pending(unmatched.result()), moves.blind(offsets, grace, None if before is None else before.moves)
        return Audit(offsets, judged, *found, ids, still, *left, hidden, is_whole and offsets.is_uncut)


def parsed_cut(text: str) -> dict[tuple[int, str | None], int]:
    """Read a cut: JSON {"partition" or "partition/epoch": offset}, or "@" and the path of a file with it."""
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
    parser.add_argument(
        "--skew",
        metavar="SECONDS",
        type=running.number_at_least(0),
        default=int(SKEW.total_seconds()),
        help="Tell of rows whose time is so much earlier than that of a row before.",
    )
    parser.add_argument(
        "--bodies", action="store_true", help="Compare captured bodies with the checksums that they were enqueued with."
    )
    parser.add_argument(
        "--consumer",
        metavar="NAME",
        help="With --connection-string-file: the name by which the capture tells the broker how far it has come; by "
        "default capture.",
    )
    parser.add_argument("--fail-on-faults", action="store_true", help="Exit with 1 if there are faults.")
    parser.add_argument(
        "--fail-on-gaps", action="store_true", help="Exit with 1 if rows are missing. A series tells each gap once."
    )
    parser.add_argument(
        "--fail-on-undecided", action="store_true", help="Exit with 1 if messages or moves could not be decided."
    )
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
    elif options.ca or options.http_endpoint or options.consumer:
        parser.error("--ca, --http-endpoint and --consumer need --connection-string-file")
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
    # Before the manifest is read: the capture may go on, and tells the broker of what the manifest has.
    told = {} if broker is None else _told(broker, options.consumer or "capture")
    source = running.ledger_at(options.ledger)
    manifest = source.manifest
    with running.step("judging"):
        found = audit(
            source.rows(spark, behind=None if before is None else before.ends()),
            snapshot,
            opening=opening,
            cut=options.cut,
            grace=timedelta(seconds=options.grace),
            is_whole=options.whole,
            flagged_only=options.flagged_only,
            broker=broker,
            before=before,
            wanted=None if manifest is None else _wanted(manifest, timedelta(seconds=options.skew)),
            skew=timedelta(seconds=options.skew),
        )
        if manifest is not None:
            found = found._replace(cut=[*behind(manifest.state, told)])
        if options.bodies:
            found = found._replace(bodies=_damaged_bodies(spark, source, options.cut, before))
        numbers = summary(found, is_of_series=options.series)
    compared = Compared.SNAPSHOT if snapshot is not None else Compared.NOTHING
    if broker is not None:
        compared = Compared.BROKER
    with running.step(f"writing {output}"):
        with ThreadPoolExecutor() as beside:
            written = beside.submit(running.write_tables, output, found.tables(is_of_series=options.series))
            page = report(found, numbers, compared, source.described())
            written.result()
        running.write_report(output, page)
    print(verdict_text(numbers, compared)[0])
    failures = (
        (options.fail_on_faults, numbers.faults),
        (options.fail_on_gaps, numbers.gaps),
        (options.fail_on_undecided, numbers.undecided),
    )
    return running.FAULTS_FOUND if any(is_asked and count for is_asked, count in failures) else 0


def _wanted(manifest: Manifest, skew: timedelta) -> Wanted:
    """`skew`: between the clocks of the broker and of the capture."""
    state = manifest.state
    if not state.written_ms:  # an earlier version did not say
        return Wanted(state.namespace, manifest.expected)
    return Wanted(state.namespace, manifest.expected, from_micros(state.written_ms * 1000) + skew)


def _told(broker: Endpoint, consumer: str) -> dict[tuple[int, str], int]:
    client = JournalClient(broker)
    try:
        return client.told(consumer)
    finally:
        client.close()


def _damaged_bodies(
    spark: SparkSession, source: Source, cut: Mapping[tuple[int, str | None], int] | None, before: Before | None
) -> DataFrame:
    """Find the messages up to the cut whose bodies are damaged. Raises LedgerError, DamagedLedger."""
    rows = normalized(source.rows(spark, "messages", None if before is None else before.ends()))
    rows = until(rows, cut)
    return bodies.damaged(rows if before is None else before.following(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    return running.run(_job, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
