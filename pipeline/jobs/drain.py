"""Brings the backlog of a pairing to its primary, by a task for each backlog queue. Without --apply it is only counted.

Each task takes the lease that a syphon would take, and waits for it if a syphon has it: so no queue is drained by two.
It sends the messages to their entities in the primary, in order within a session, and completes each when the primary
has accepted it. A run that was killed has lost nothing: run it again. What it had sent and not completed comes again
with the same id, and entities that detect duplicates drop it.

It is for backlogs that are too large for one syphon. Stop the syphons first, or those of some queues stay with them.
"""

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from broker.administration.address import Address, parse_http_address
from broker.logging import configure_logging
from broker.pairing.aliases import PATH, SESSION_ID
from broker.pairing.backlog import backlog_queues
from broker.pairing.namespaces import Namespace, name_of
from broker.pairing.options import MAX_BACKLOG_QUEUES, InvalidPairing
from broker.pairing.syphon.checks import Found, check
from broker.pairing.syphon.options import SyphonOptions
from broker.settings.log import Log, LogLevel
from pipeline.jobs import running
from pipeline.jobs.changing.draining import Drained, End, Plan, drain
from pipeline.jobs.report import Duration, Headline, Report, Section, Table, counted
from pipeline.jobs.running import WrongUse
from protocol import conditions
from protocol.client.connection import connect_to
from protocol.client.errors import LinkDetached
from pyspark_peeklock.options import Access
from storage.wording import plural

TELL_S: Final = 10.0
CONNECT_S: Final = 10.0
BACKLOG_SCHEMA: Final = (
    "queue string, entity string, messages bigint, deferred bigint, sessions bigint, oldest timestamp"
)
QUEUES_SCHEMA: Final = (
    "queue string, end string, moved bigint, deadLettered map<string,bigint>, left bigint, seconds double, text string"
)
_EXAMPLE: Final = """\
It writes the tables `before` and `after`, what lies in the backlog by queue and entity, and `queues`, what became of
each queue.

example, first without --apply:
  peeklock jobs run drain --primary-file /run/secrets/primary --secondary-file /run/secrets/secondary \\
      --output /tmp/drain --apply

Exit codes: 0 done; 2 wrong use; 3 it could not be done, or a queue was not drained to its end.
"""


def surveyed(spark: SparkSession, secondary: Access, queues: Sequence[str]) -> DataFrame:
    """What lies in these backlog queues, by queue and entity; as BACKLOG_SCHEMA."""
    if not queues:
        return spark.createDataFrame([], BACKLOG_SCHEMA)
    messages = _read(spark, secondary, queues[0])
    for queue in queues[1:]:
        messages = messages.union(_read(spark, secondary, queue))
    return messages.groupBy("queue", "entity").agg(
        F.count(F.lit(1)).alias("messages"),
        F.sum(F.when(F.col("state") == "deferred", 1).otherwise(0)).alias("deferred"),
        F.countDistinct("session").alias("sessions"),
        F.min("enqueuedTime").alias("oldest"),
    )


def _read(spark: SparkSession, secondary: Access, queue: str) -> DataFrame:
    reader = spark.read.format("peeklock").schema(
        "entity string, state string, enqueuedTime timestamp, applicationProperties map<string,string>"
    )
    reader = reader.options(connectionStringFile=secondary.connection_string_file, entity=queue, includeBody="false")
    rows = (reader.option("caFile", secondary.ca_file) if secondary.ca_file else reader).load()
    return rows.select(
        F.col("entity").alias("queue"),
        F.col("applicationProperties")[PATH].alias("entity"),
        F.col("applicationProperties")[SESSION_ID].alias("session"),
        "state",
        "enqueuedTime",
    )


def drained(spark: SparkSession, plan: Plan) -> list[Drained]:
    """Drain all queues, a task for each."""
    queues = plan.found.queues
    with _telling(spark, len(queues)):
        return list(spark.sparkContext.parallelize(queues, len(queues)).map(partial(drain, plan=plan)).collect())


@contextmanager
def _telling(spark: SparkSession, count: int) -> Iterator[None]:
    """Say now and then how many queues are drained."""
    group, ended = "peeklock drain", threading.Event()
    spark.sparkContext.setJobGroup(group, "drain of the backlog")
    tracker = spark.sparkContext.statusTracker()

    def tell() -> None:
        while not ended.wait(TELL_S):
            jobs = filter(None, map(tracker.getJobInfo, tracker.getJobIdsForGroup(group)))
            stages = filter(None, (tracker.getStageInfo(stage) for job in jobs for stage in job.stageIds))
            running.say(f"{sum(stage.numCompletedTasks for stage in stages)} of {counted(count, 'queue')} done")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _job(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    configure_logging(Log(level=LogLevel.WARNING), sys.__stderr__)
    accesses = [Access(each, options.ca) for each in (options.primary_file, options.secondary_file)]
    primary, secondary = (
        _namespace(access, http, option)
        for access, http, option in zip(
            accesses,
            (options.primary_http, options.secondary_http),
            ("--primary-http", "--secondary-http"),
            strict=True,
        )
    )
    try:
        name = name_of(primary, secondary, options.primary_name)
        syphon = SyphonOptions(options.backlog_queues, options.rate, once=True)
        with running.step("looking for the backlog queues"):
            if options.apply:
                found = asyncio.run(check(primary, secondary, name, syphon))
                queues = found.queues
            else:
                queues = asyncio.run(_there(accesses[1], backlog_queues(name, options.backlog_queues)))
                found = Found(queues, "", {}, 0)
    except InvalidPairing as error:
        raise WrongUse(str(error)) from error
    with running.step("starting Spark"):
        spark = running.session("peeklock drain")
    before = _survey(spark, accesses[1], queues, options.output, "before")
    results: list[Drained] = []
    after = before
    if options.apply:
        rate = None if options.rate is None else options.rate / len(queues)
        plan = Plan(accesses[0], accesses[1], found, rate, options.wait_for_lease, options.patience)
        with running.step(f"draining {counted(len(queues), 'backlog queue')} of {name}"):
            results = drained(spark, plan)
        after = _survey(spark, accesses[1], queues, options.output, "after")
        table = spark.createDataFrame([_row(each) for each in results], QUEUES_SCHEMA)
        running.write_tables(options.output, {"queues": table})
    page = report(name, before, after, results, is_applied=options.apply)
    running.write_report(options.output, page)
    print(page.verdict)
    return running.NOT_DONE if any(each.end is not End.DRAINED for each in results) else 0


def _survey(spark: SparkSession, secondary: Access, queues: Sequence[str], output: str, name: str) -> DataFrame:
    with running.step("counting the backlog"):
        running.write_tables(output, {name: surveyed(spark, secondary, queues)})
        return spark.read.parquet(f"{output}/{name}")


def _row(each: Drained) -> tuple[Any, ...]:
    return (each.queue, str(each.end), each.moved, each.dead_lettered, each.left, each.seconds, each.text)


async def _there(secondary: Access, queues: Sequence[str]) -> list[str]:
    """Return those of the queues that exist."""
    target = secondary.connection_string()
    found = []
    trust = secondary.trust() if target.tls else None
    async with await connect_to(target, tls=trust, timeout_s=CONNECT_S) as connection:
        for queue in queues:
            try:
                await connection.management(queue)
            except LinkDetached as error:
                if error.condition != conditions.NOT_FOUND:
                    raise
            else:
                found.append(queue)
    return found


def _namespace(access: Access, http: str | None, option: str) -> Namespace:
    access.connection_string()  # says what is wrong with the file
    address: Address | None = None
    if http is not None:
        try:
            address = parse_http_address(http)
        except ValueError as error:
            raise WrongUse(f"{option}: {http!r} {error}") from None
    return Namespace(Path(access.connection_string_file).read_text().strip(), http=address, trust=access.trust())


def report(name: str, before: DataFrame, after: DataFrame, results: Sequence[Drained], *, is_applied: bool) -> Report:
    """The page of a run."""
    lay, lies = before.orderBy("queue", "entity").collect(), after.orderBy("queue", "entity").collect()
    there, left = (sum(row.messages for row in rows) for rows in (lay, lies))
    moved = sum(each.moved for each in results)
    dead: Counter[str] = Counter()
    for each in results:
        dead.update(each.dead_lettered)
    undone = [each for each in results if each.end is not End.DRAINED]
    if not is_applied:
        text, mood = (
            f"Dry run, nothing was changed: {counted(there, 'message is', 'messages are')} in the backlog of {name}.",
            "plain",
        )
    else:
        text = f"{counted(moved, 'message')} moved to {name}, {left:,} {plural(left, 'is', 'are')} left in its backlog."
        text += f" {dead.total():,} dead-lettered." if dead else ""
        if undone:
            text += f" {len(undone)} of {counted(len(results), 'queue')} not drained to the end."
        mood = "bad" if undone or dead else "good"
    columns = ("Queue", "Entity", "Messages", "Deferred", "Sessions", "Oldest (UTC)")
    tables = [("Before", lay), *([("After", lies)] if is_applied else [])]
    sections = [
        Section("Backlog", "", (), [Table(title, columns, [tuple(row) for row in rows]) for title, rows in tables])
    ]
    if results:
        done = [
            (
                each.queue,
                each.end,
                each.moved,
                Duration(each.seconds * 1000),
                each.moved / max(each.seconds, 0.001),
                each.text,
            )
            for each in results
        ]
        shown = Table("Queues", ("Queue", "End", "Moved", "Time", "Per second", "What is known"), done)
        dead_letters = Table(
            "Dead letters of backlog queues",
            ("Reason", "Messages"),
            dead.most_common(),
            "`peeklock peek QUEUE --dead-letter` shows them.",
        )
        sections.append(Section("What was done", "", (), [shown, *([dead_letters] if dead else [])]))
    facts = [("Before", there), ("Moved", moved), ("Left", left), ("Dead-lettered", dead.total())]
    headline = Headline(moved, "moved") if is_applied else Headline(there, "in the backlog")
    return Report(f"Drain of the backlog of {name}", text, mood, facts, sections, headline)


def _parser() -> Any:
    parser = running.changing_parser("pipeline.jobs.drain", __doc__ or "", _EXAMPLE)
    add = parser.add_argument
    for side, rights in (("primary", "Send"), ("secondary", "Listen; Manage, if queues are missing")):
        add(
            f"--{side}-file",
            required=True,
            metavar="PATH",
            help=f"File with the connection string of the {side}, on the driver and all executors. Needs {rights}.",
        )
    for side in ("primary", "secondary"):
        add(f"--{side}-http", metavar="URL", help=f"The {side}'s address for HTTP; by default the usual one.")
    add("--ca", metavar="FILE", help="Certificates of the authorities to trust with TLS; by default the system's.")
    add(
        "--primary-name",
        metavar="NAME",
        help="The primary's name in the paths of the backlog queues; by default the first part of its host name.",
    )
    number = running.number_at_least
    add("--backlog-queues", type=_count, default=10, metavar="N", help="Backlog queues in the secondary.")
    add("--rate", type=number(1), metavar="N", help="At most N messages per second, of all queues together.")
    add(
        "--wait-for-lease",
        type=number(0),
        default=60,
        metavar="S",
        help="Seconds to wait for the lease of a queue, which another syphon may have.",
    )
    add(
        "--patience",
        type=number(1),
        default=300,
        metavar="S",
        help="Give a queue up when nothing has moved for so many seconds: its primary is away, or an entity full. More "
        "than locks last in the backlog queues, a minute: those of a killed task must end first.",
    )
    return parser


def _count(text: str) -> int:
    value = running.number_at_least(1)(text)
    if value > MAX_BACKLOG_QUEUES:
        raise ValueError
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    return running.run(_job, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
