"""Sends dead letters to their entity again, repaired. By default it only shows what it would do.

It writes two tables:

- `dead_letters`, one row for each that is chosen: where it lay and why, `before`, a struct with the values of the
  columns that can be repaired, and these columns with their new values; `isValid`, or the `problem` for which no
  message could be made; the `id` under which it is sent; `amqpMessage`, the message as it lay, and `message`, as it is
  sent.
- `outcomes`, by `sequenceNumber` and `id`: the `outcome`.

What is sent is what `dead_letters` has: nothing is evaluated twice. A dead letter is completed when the target has
accepted all, and no other is. So a run that was killed has lost nothing; a repetition with the same round sends the
same ids, and where the target detects duplicates it drops them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

from pipeline.jobs import running
from pipeline.jobs.causes import told
from pipeline.jobs.changing.completing import Outcome, Wanted, complete
from pipeline.jobs.changing.destination import duplicates
from pipeline.jobs.changing.repairing import REPAIRABLE, Unrepairable, message_id, repaired
from pipeline.jobs.report import Headline, Report, Section, Table, counted, shown
from pipeline.jobs.running import NotDone, WrongUse
from protocol.errors import ProtocolError
from pyspark_peeklock.options import SUB_QUEUES, Access

PATIENCE_S: Final = 60.0  # for a broker that is away while dead letters are completed
ROWS_AT_ONCE: Final = 500  # whole messages, by a task of Python
ROWS_PER_TASK: Final = 1000  # at least, because each task makes a connection
_SHOWN: Final = 100
_SAMPLE_CHARACTERS: Final = 300
_KEPT: Final = (
    "namespace",
    "entity",
    "sequenceNumber",
    "enqueuedTime",
    "state",
    "deliveryCount",
    "deadLetterReason",
    "deadLetterDescription",
    "deadLetterSource",
    "messageId",
)
_BUILT: Final = T.StructType(
    [
        T.StructField("id", T.StringType()),
        T.StructField("message", T.BinaryType()),
        T.StructField("problem", T.StringType()),
    ]
)
_SUBSCRIPTION: Final = re.compile(r"(.+)/subscriptions/[^/]+", re.IGNORECASE)
_EXAMPLE: Final = """\
example, first without --apply:
  peeklock jobs run resubmit --connection-string-file /run/secrets/peeklock --entity orders \\
      --where "deadLetterReason = 'BadCurrency' AND enqueuedTime > '2026-01-31'" \\
      --set "body=replace(string(body), 'EURO', 'EUR')" \\
      --set "applicationProperties=map_concat(map_filter(applicationProperties, (k, v) -> k <> 'v'), map('v', '2'))" \\
      --valid "get_json_object(string(body), '$.currency') IN ('EUR', 'USD')" \\
      --output /tmp/resubmit

Exit codes: 0 done; 2 wrong use; 3 it could not be done, or dead letters that were sent are still there.
"""


class Work(NamedTuple):
    """What is asked for. `repairs` are expressions by column; `round` is a part of the ids."""

    entity: str
    target: str
    where: str
    repairs: Mapping[str, str]
    valid: str
    round: int
    most: int | None


class Counts(NamedTuple):
    """Dead letters: `chosen` by the filter, of these `valid` ones, which are sent, and `changed` ones."""

    chosen: int
    valid: int
    changed: int


# --- what is to be sent -----------------------------------------------------------------------------------------------


def planned(dead_letters: DataFrame, work: Work) -> DataFrame:
    """The table `dead_letters`, of rows of the source with whole messages. Raises WrongUse for an expression."""
    chosen = dead_letters.filter("state IN ('active', 'deferred')")
    chosen = chosen.filter(_condition(chosen, "--where", work.where))
    if work.most is not None:
        chosen = chosen.orderBy("sequenceNumber").limit(work.most)
    before = F.struct(*REPAIRABLE).alias("before")
    after = [_repair(chosen, name, work.repairs[name]) if name in work.repairs else F.col(name) for name in REPAIRABLE]
    repaired_rows = chosen.select(*_KEPT, before, *after, "amqpMessage")
    schema = T.StructType([*repaired_rows.schema.fields, *_BUILT.fields])
    entity, attempt = work.entity, work.round
    built = repaired_rows.mapInArrow(lambda batches: _built(batches, entity, attempt), schema)
    valid = _condition(built, "--valid", work.valid)
    return built.withColumn("isValid", F.coalesce(valid, F.lit(False)) & F.col("message").isNotNull())


def _condition(frame: DataFrame, option: str, text: str) -> Any:
    found = _expression(frame, option, text)
    if frame.select(found.alias("it")).schema["it"].dataType != T.BooleanType():
        raise WrongUse(f"{option}: {text!r} is no condition")
    return found


def _repair(frame: DataFrame, name: str, text: str) -> Any:
    """The new values of a column, in its type."""
    found = _expression(frame, f"--set {name}", text)
    kind, wanted = frame.select(found.alias("it")).schema["it"].dataType, frame.schema[name].dataType
    if isinstance(wanted, T.MapType):
        fits = isinstance(kind, (T.MapType, T.NullType))
    elif isinstance(wanted, T.BinaryType):
        fits = isinstance(kind, (T.BinaryType, T.StringType, T.NullType))
    else:
        fits = isinstance(kind, (T.AtomicType, T.NullType)) and not isinstance(kind, T.BinaryType)
    if not fits:
        hint = "; string(body) is its text" if isinstance(kind, T.BinaryType) else ""
        raise WrongUse(f"--set {name}: {text!r} is {kind.simpleString()}, not {wanted.simpleString()}{hint}")
    return found.cast(wanted).alias(name)


def _expression(frame: DataFrame, option: str, text: str) -> Any:
    try:
        found = F.expr(text)
        frame.select(found)
    except AnalysisException as error:  # also of what cannot be parsed
        raise WrongUse(f"{option}: {str(error).strip().partition(chr(10))[0]}") from None
    return found


def _built(batches: Iterable[pa.RecordBatch], entity: str, attempt: int) -> Iterator[pa.RecordBatch]:
    """Adds the columns of _BUILT."""
    for batch in batches:
        made = [_build(row, entity, attempt) for row in batch.to_pylist()]
        columns = [pa.array(values, kind) for values, kind in zip(zip(*made, strict=True), _TYPES, strict=True)]
        if made:
            names = [*batch.schema.names, *_BUILT.fieldNames()]
            yield pa.RecordBatch.from_arrays([*batch.columns, *columns], names)


_TYPES: Final = (pa.string(), pa.binary(), pa.string())


def _build(row: dict[str, Any], entity: str, attempt: int) -> tuple[str, bytes | None, str | None]:
    """The id, the message, and why there is none."""
    new_id = message_id(entity, _ms(row["enqueuedTime"]), row["sequenceNumber"], attempt)
    changes = {name: _plain(row[name]) for name in REPAIRABLE if _plain(row[name]) != _plain(row["before"][name])}
    try:
        return new_id, repaired(row["amqpMessage"], new_id, changes), None
    except (Unrepairable, ProtocolError, TypeError, ValueError) as error:
        return new_id, None, f"{', '.join(changes) or 'the message'}: {error}"


def _plain(value: Any) -> Any:
    """Arrow gives maps as lists of pairs."""
    return dict(value) if isinstance(value, list) else value


def _ms(time: Any) -> int:
    return 0 if time is None else round(time.timestamp() * 1000)


# --- the job ----------------------------------------------------------------------------------------------------------


def read(spark: SparkSession, access: Access, entity: str) -> DataFrame:
    """The dead letters of a queue or subscription as they are now."""
    options = {"connectionStringFile": access.connection_string_file, "entity": entity, "subQueue": "deadletter"}
    reader = spark.read.format("peeklock").options(**options, mode="browse", includeAmqpMessage="true")
    return (reader.option("caFile", access.ca_file) if access.ca_file else reader).load()


def send(plan: DataFrame, access: Access, target: str, count: int) -> None:
    """Send the valid ones, so many; messages of a session, or of a partition key, in the order of their numbers."""
    key = F.coalesce("sessionId", "partitionKey", F.col("sequenceNumber").cast("string"))
    tasks = min(max(count // ROWS_PER_TASK, 1), plan.sparkSession.sparkContext.defaultParallelism)
    messages = plan.filter("isValid").repartition(tasks, key).sortWithinPartitions("sequenceNumber")
    writer = messages.select(F.col("message").alias("amqpMessage")).write.format("peeklock").mode("append")
    options = {"connectionStringFile": access.connection_string_file, "entity": target, "sendAmqpMessage": "true"}
    # One transfer at a time: so the order holds also while the broker is busy.
    writer = writer.options(**options, maxInFlight="1")
    (writer.option("caFile", access.ca_file) if access.ca_file else writer).save()


def wanted(plan: DataFrame) -> list[Wanted]:
    """The dead letters that were sent."""
    size = F.length("amqpMessage")
    sent = plan.filter("isValid").select("sequenceNumber", "enqueuedTime", size.alias("size"), "state")
    return [
        Wanted(row["sequenceNumber"], _ms(row["enqueuedTime"]), row["size"], row["state"] == "active")
        for batch in sent.toArrow().to_batches()
        for row in batch.to_pylist()
    ]


def outcomes(plan: DataFrame, done: Outcome | None) -> DataFrame:
    """What became of each dead letter of the plan; `done` is None in a dry run."""
    spark = plan.sparkSession
    known = dict.fromkeys(done.gone, "gone") | dict.fromkeys(done.left, "left") if done else {}
    rest = spark.createDataFrame(list(known.items()), "sequenceNumber bigint, found string")
    texts = {"gone": "sent; it is not in the dead-letter queue any more", "left": "sent, and still a dead letter"}
    unsent = F.when(F.col("message").isNull(), F.col("problem")).otherwise("not valid: not sent")
    found = F.lit(None)
    for name, text in texts.items():
        found = F.when(F.col("found") == name, text).otherwise(found)
    sent = F.coalesce(found, F.lit("sent and completed" if done else "would be sent"))
    joined = plan.join(F.broadcast(rest), "sequenceNumber", "left")
    return joined.select("sequenceNumber", "id", F.when(F.col("isValid"), sent).otherwise(unsent).alias("outcome"))


def _job(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    work = _work(options)
    access = Access(options.connection_string_file, options.ca)
    found = duplicates(access, options.http_endpoint, work.target)
    with running.step("starting Spark"):
        spark = running.session("peeklock resubmit")
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(ROWS_AT_ONCE))
    with running.step(f"reading the dead letters of {work.entity}"):
        table = f"{options.output}/dead_letters"
        planned(read(spark, access, work.entity), work).write.mode("overwrite").parquet(table)
    plan = spark.read.parquet(table)
    counts = _counts(plan)
    samples = _samples(plan, options.samples)
    _print_samples(samples)
    done = None
    if options.apply and counts.valid:
        done = _apply(plan, access, work, counts)
    with running.step(f"writing {options.output}"):
        running.write_tables(options.output, {"outcomes": outcomes(plan, done)})
        page = report(work, counts, samples, plan, found, done, is_applied=options.apply)
        running.write_report(options.output, page)
    print(page.verdict)
    print(f"{work.target}: {found}")
    return running.NOT_DONE if done is not None and done.left else 0


def _apply(plan: DataFrame, access: Access, work: Work, counts: Counts) -> Outcome:
    again = f"Run it again with the same --round {work.round}: what is sent twice has the same id"
    try:
        with running.step(f"sending {counted(counts.valid, 'message')} to {work.target}"):
            send(plan, access, work.target, counts.valid)
    except (PySparkException, Py4JJavaError) as error:
        raise NotDone(f"{told(error)}. No dead letter was completed. {again}.") from error
    try:
        with running.step(f"completing {counts.valid} dead letters"):
            return complete(access, work.entity + SUB_QUEUES["deadletter"], wanted(plan), PATIENCE_S)
    except Exception as error:
        raise NotDone(f"all were sent, and dead letters could not be completed: {error}. {again}.") from error


def _counts(plan: DataFrame) -> Counts:
    differs = F.lit(False)
    for name in REPAIRABLE:
        differs = differs | _differs(name)
    row = plan.select(
        F.count(F.lit(1)), F.coalesce(F.sum(F.col("isValid").cast("int")), F.lit(0)), _count_if(differs)
    ).first()
    return Counts(*row)


def _count_if(condition: Any) -> Any:
    return F.coalesce(F.sum(F.when(condition, 1).otherwise(0)), F.lit(0))


def _differs(name: str) -> Any:
    before, after = F.col(f"before.{name}"), F.col(name)
    if name == "applicationProperties":  # maps cannot be compared
        before, after = (F.array_sort(F.map_entries(each)) for each in (before, after))
    return ~before.eqNullSafe(after)


def _samples(plan: DataFrame, most: int) -> list[Row]:
    """Return some rows that are sent and some that are not: at most so many of each."""
    columns = [*_KEPT, "before", *REPAIRABLE, "id", "isValid", "problem"]
    parts = [
        plan.filter(each).select(*columns).orderBy("sequenceNumber").head(most) for each in ("isValid", "!isValid")
    ]
    return [row for part in parts for row in part]


def _changes(row: Row) -> list[tuple[str, str, str]]:
    """Column, before and after, of those that differ; of a row that is not repaired, its body."""
    differing = [name for name in REPAIRABLE if row["before"][name] != row[name]] or ["body"]
    return [(name, _text(row["before"][name]), _text(row[name])) for name in differing]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, (bytes, bytearray)):
        try:
            text = bytes(value).decode()
        except UnicodeDecodeError:
            text = bytes(value).hex()
    else:
        text = str(value)
    return text if len(text) <= _SAMPLE_CHARACTERS else f"{text[:_SAMPLE_CHARACTERS]}…"


def _print_samples(samples: Sequence[Row]) -> None:
    for row in samples:
        fate = row["id"] if row["isValid"] else f"not sent: {row['problem'] or 'not valid'}"
        print(f"dead letter {row['sequenceNumber']} ({shown(row['deadLetterReason'])}): {shown(fate)}")
        for name, before, after in _changes(row):
            print(f"  {name}: {shown(before)}")
            if after != before:
                print(f"  {' ' * len(name)}  {shown(after)}")


def report(
    work: Work,
    counts: Counts,
    samples: Sequence[Row],
    plan: DataFrame,
    target: str,
    done: Outcome | None,
    *,
    is_applied: bool,
) -> Report:
    """The page of a run."""
    refused = counts.chosen - counts.valid
    chosen = counted(counts.chosen, "dead letter")
    if not is_applied:
        text = f"Dry run, nothing was changed: {counts.valid:,} of {chosen} of {work.entity}"
        text, mood = f"{text} would be sent to {work.target}.", "plain"
    elif done is None:
        text, mood = (
            f"Nothing to send: {chosen} of {work.entity} chosen, none valid.",
            "plain",
        )
    else:
        text = f"{counted(counts.valid, 'message')} sent to {work.target}, "
        text += f"{counted(len(done.completed), 'dead letter')} completed"
        text += f", {len(done.gone):,} gone meanwhile" if done.gone else ""
        text += f", {len(done.left):,} LEFT although they were sent" if done.left else ""
        text, mood = text + ".", "bad" if done.left else "good"
    if refused:
        text += f" {refused:,} not valid, not sent."
    facts = [
        ("Chosen", counts.chosen),
        ("Valid", counts.valid),
        ("Changed", counts.changed),
        ("Round", work.round),
        ("Target", work.target),
        ("Duplicates", target),
    ]
    asked = [("where", work.where), *((f"set {name}", each) for name, each in work.repairs.items())]
    before_and_after = [
        (row["sequenceNumber"], row["deadLetterReason"], name, before, after)
        for row in samples
        if row["isValid"]
        for name, before, after in _changes(row)
    ]
    not_sent = plan.filter("!isValid").orderBy("sequenceNumber")
    listed = [
        (row["sequenceNumber"], row["deadLetterReason"], row["messageId"], row["problem"] or "not valid")
        for row in not_sent.select("sequenceNumber", "deadLetterReason", "messageId", "problem").head(_SHOWN)
    ]
    sections = [
        Section("What was asked", "", (), [Table("Expressions", ("Option", "SQL"), [*asked, ("valid", work.valid)])]),
        Section(
            "Samples",
            "Only columns that change; the body, if none does.",
            (),
            [
                Table(
                    "Before and after",
                    ("Sequence number", "Reason", "Column", "Before", "After"),
                    before_and_after,
                )
            ],
        ),
        Section(
            "Not sent",
            "They stay dead letters.",
            (),
            [Table("Not valid", ("Sequence number", "Reason", "Message id", "Why"), listed, total=refused)],
        ),
    ]
    if done is not None and (done.left or done.gone):
        lines = [(number, "still there, mostly locked by another receiver") for number in done.left]
        lines += [
            (number, "not there any more: an answer was lost, or another receiver has it") for number in done.gone
        ]
        note = "Those that are still there: run it again with the same round."
        table = Table("Sent, and not completed here", ("Sequence number", "What"), lines[:_SHOWN], note, len(lines))
        sections.insert(0, Section("To look at", "", (), [table]))
    headline = Headline(counts.valid, "would be sent" if not is_applied else "sent" if done else "to send")
    return Report(f"Resubmission of {work.entity}", text, mood, facts, sections, headline)


def _parser() -> Any:
    text = (__doc__ or "").partition("\n\n")[0]
    columns = ", ".join(REPAIRABLE)
    parser = running.changing_parser("pipeline.jobs.resubmit", text, _EXAMPLE)
    add = parser.add_argument
    add(
        "--connection-string-file",
        required=True,
        metavar="PATH",
        help="File with the broker's connection string, on the driver and all executors. Needs Listen on the entity "
        "and Send on the target; with Manage it is also known whether the target detects duplicates.",
    )
    add("--ca", metavar="FILE", help="Certificates of the authorities to trust with TLS; by default the system's.")
    add("--http-endpoint", metavar="URL", help="The broker's address for HTTP; by default the usual one.")
    add("--entity", required=True, metavar="NAME", help="A queue, or TOPIC/subscriptions/NAME: whose dead letters.")
    add(
        "--to",
        metavar="NAME",
        help="Where to send; by default to the queue, or the subscription's topic, all of whose subscriptions get it.",
    )
    add(
        "--where",
        default="true",
        metavar="SQL",
        help="Only these, a condition on the columns of the source, such as deadLetterReason, enqueuedTime, "
        "deliveryCount, messageId, body; by default all.",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="COLUMN=SQL",
        help=f"The new value of a column, from the values before; may be repeated. Columns: {columns}. The body is "
        "binary: string(body) is its text. Properties that the expression leaves alone keep their types.",
    )
    add(
        "--valid",
        required=True,
        metavar="SQL",
        help="What a message must fulfil after the repairs; others are not sent, and listed. Columns have their new "
        "values, and before.body and so on the old ones.",
    )
    add(
        "--round",
        type=running.number_at_least(1),
        default=1,
        metavar="N",
        help="A part of the ids. With the same number a repeated run sends nothing twice, where the target detects "
        "duplicates; with another one it sends again what an interrupted run has sent.",
    )
    add("--limit", type=running.number_at_least(1), metavar="N", help="The N oldest at most.")
    add(
        "--samples",
        type=running.number_at_least(0),
        default=5,
        metavar="N",
        help="Show so many before and after, here and in the report.",
    )
    return parser


def _work(options: Any) -> Work:
    entity = options.entity.strip("/")
    topic = _SUBSCRIPTION.fullmatch(entity)
    if not entity or "$" in entity:
        raise WrongUse(f"--entity: {options.entity!r} is no queue, and no TOPIC/subscriptions/NAME")
    repairs: dict[str, str] = {}
    for each in options.set:
        name, is_given, text = each.partition("=")
        name = name.strip()
        if not is_given or name not in REPAIRABLE:
            raise WrongUse(f"--set {each[:60]!r}: it is COLUMN=SQL, and a column is one of {', '.join(REPAIRABLE)}")
        if name in repairs:
            raise WrongUse(f"--set {name} is given twice")
        repairs[name] = text
    target = options.to or (topic[1] if topic else entity)
    return Work(entity, target, options.where, repairs, options.valid, options.round, options.limit)


def main(arguments: Sequence[str] | None = None) -> int:
    return running.run(_job, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
