"""The rows of the table, each with its unit and its targets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.plan import KIB, MODES, Cell, Plan, load_name

PEEKLOCK = "Peeklock"
BEFORE = "before"
RABBITMQ = "RabbitMQ quorum"
ARTEMIS = "Artemis"
ONE_PROCESS = "Peeklock, one process"


@dataclass(frozen=True)
class Target:
    """A bound on our median, or on our median over that of `against`, the name of another server."""

    bound: float
    against: str = ""
    at_least: bool = False

    def met(self, ours: float, ratios: Mapping[str, float]) -> bool | None:
        """True if the target is met; None if it needs a server that was not measured."""
        value = ratios.get(self.against) if self.against else ours
        if value is None:
            return None
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{sign} {self.bound:g}{f' x {self.against}' if self.against else ''}"


@dataclass(frozen=True)
class Row:
    """`group` is what --rows selects."""

    key: str
    group: str
    label: str
    unit: str
    targets: tuple[Target, ...] = ()


def _at_least(bound: float, against: str = "") -> Target:
    return Target(bound, against, at_least=True)


def _rabbit_x(factor: float) -> Target:
    return _at_least(factor, RABBITMQ)


ON_SPARK = ("spark-reads", "spark-latency", "spark-sink", "audit")
PIPELINE = ("journal", "capture", *ON_SPARK)
GROUPS = (
    *("throughput", "confirmed", "unpipelined", "openloop", "idle", "connections", "backlog"),
    *("topics", "sessions", "duplicates", "transactions", "partitioned", "instructions"),
    *PIPELINE,
)
NOT_SLOWER = _at_least(1.0, BEFORE)
MODE_NAMES = dict(zip(MODES, ("send", "receive, lock and complete", "send and receive at once"), strict=True))
_THROUGHPUT = {
    ("send", 100): (_rabbit_x(2.0),),
    ("recv", 100): (_rabbit_x(2.0),),
    ("both", 100): (_rabbit_x(2.0),),
    ("send", KIB): (_rabbit_x(1.8), _at_least(1.25, BEFORE)),
    ("recv", KIB): (_rabbit_x(2.2), NOT_SLOWER),
    ("both", KIB): (_rabbit_x(2.0), _at_least(1.25, BEFORE)),
    ("send", 10 * KIB): (_rabbit_x(1.3),),
    ("recv", 10 * KIB): (_rabbit_x(1.3),),
    ("both", 10 * KIB): (_rabbit_x(1.3),),
}
_OPEN_LOOP = {
    ("2000", "end-p50"): (Target(1.0), Target(0.6, BEFORE)),
    ("2000", "end-p99"): (Target(2.5), Target(0.6, BEFORE)),
    ("8000", "end-p50"): (Target(0.5, BEFORE),),
}
_BACKLOG = {(1_000_000, "used"): (Target(150),), (1_000_000, "restart"): (Target(2.0),)}
LATENCIES = {"ack": "send to accept", "end": "send to receive"}
QUANTILES = {"p50": "p50", "p99": "p99", "p999": "p99.9", "most": "longest"}


def throughput_rows(cell: Cell) -> Iterator[Row]:
    for mode in MODES:
        targets = _THROUGHPUT.get((mode, cell.size), ()) if cell.is_plain else ()
        yield Row(cell.key(mode), "throughput", f"{cell}: {MODE_NAMES[mode]}", "msg/s", targets)


def open_loop_rows(rate: str) -> Iterator[Row]:
    key = f"openloop-{rate}"
    if rate == "half":
        yield Row(f"{key}-rate", "openloop", f"open loop, {load_name(rate)}", "msg/s")
    for way, path in LATENCIES.items():
        for quantile, name in QUANTILES.items():
            targets = _OPEN_LOOP.get((rate, f"{way}-{quantile}"), ())
            label = f"open loop, {load_name(rate)}: {path}, {name}"
            yield Row(f"{key}-{way}-{quantile}", "openloop", label, "ms", targets)


def backlog_rows(count: int) -> Iterator[Row]:
    for part, label, unit in (
        ("load", f"backlog of {count:,}, 1 KiB: load", "msg/s"),
        ("used", "  growth of memory", "MB"),
        ("anonymous", "    of it anonymous", "MB"),
        ("cache", "    not in it: mapped page cache of the store", "MB"),
        ("rss", "    as growth of RSS", "MB"),
        ("disk", "  on disk", "MB"),
        ("restart", "  restart to first message, after SIGKILL under load", "s"),
        ("drain", "  drain after the restart", "msg/s"),
    ):
        yield Row(f"backlog-{count}-{part}", "backlog", label, unit, _BACKLOG.get((count, part), ()))


_SATURATION = tuple(
    Row(f"saturation-{mode}-{quantile}", "throughput", f"1 KiB, 1,000 in flight, {name}: ack {shown}", "ms", targets)
    for mode, name in (("send", "send"), ("both", "send and receive"))
    for quantile, shown in QUANTILES.items()
    for targets in ((Target(100),) if quantile == "p99" else (),)
)
_ONE_LINK = (
    Row("confirmed-recv", "confirmed", "1 KiB: receive, completion confirmed (second)", "msg/s"),
    Row("confirmed-both", "confirmed", "1 KiB: both at once, completion confirmed (second)", "msg/s"),
    Row(
        "unpipelined-rate",
        "unpipelined",
        "one send at a time, 1 KiB",
        "msg/s",
        (_at_least(2.0, BEFORE), _rabbit_x(1.0)),
    ),
    Row("unpipelined-p50", "unpipelined", "  p50", "ms", (Target(0.5),)),
    Row("unpipelined-p99", "unpipelined", "  p99", "ms"),
    Row("unpipelined-p999", "unpipelined", "  p99.9", "ms"),
    Row("unpipelined-most", "unpipelined", "  longest", "ms"),
)
_ALONE = (
    Row("start", "idle", "start to ready, empty", "s", (Target(1.0),)),
    Row("idle-used", "idle", "idle, all processes: memory", "MB", (Target(200),)),
    Row("idle-anonymous", "idle", "  of it anonymous", "MB"),
    Row("idle-rss", "idle", "  as sum of RSS", "MB"),
    Row("idle-disk", "idle", "idle: on disk, for each worker", "MiB", (Target(64),)),
    Row("connection-used", "connections", "an idle connection: memory", "KB", (Target(60),)),
    Row("connection-anonymous", "connections", "  of it anonymous", "KB"),
    Row("connection-rss", "connections", "  as growth of RSS", "KB"),
)


def partitioned_rows() -> Iterator[Row]:
    for mode, name in MODE_NAMES.items():
        made = (
            ("partitioned-plain", f"4 partitions, 2 workers: {name}, plain queue", "msg/s", ()),
            ("partitioned", "  partitioned queue", "msg/s", ()),
            ("partitioned-share", "    of the plain queue's", "", (_at_least(0.9),)),
            ("partitioned-default", "  plain queue with default settings", "msg/s", ()),
            ("partitioned-of-default", "    partitioned queue, of that", "", (_at_least(0.9),)),
        )
        for key, label, unit, targets in made:
            yield Row(f"{key}-{mode}", "partitioned", label, unit, targets)


_FEATURES = (
    Row("topic-10", "topics", "topic, 10 subscriptions: published", "msg/s", (_at_least(8000), NOT_SLOWER)),
    Row("topic-10-bytes", "topics", "  stored, over 1.3 copies and 150 B each", "", (Target(1.0),)),
    Row("topic-1", "topics", "topic, 1 subscription with 1 correlation filter", "msg/s"),
    Row("topic-1000", "topics", "topic, 1,000 such, one of them matching", "msg/s"),
    Row("topic-1000-share", "topics", "  of the rate with one", "", (_at_least(0.6),)),
    Row("topic-sql", "topics", "topic, 100 SQL filters: published", "msg/s", (_at_least(5000),)),
    Row(
        "forward-3",
        "topics",
        "forwarded through 3 queues, end to end",
        "msg/s",
        (_at_least(15_000), NOT_SLOWER),
    ),
    Row("sessions-used", "sessions", "sessions of 10 messages, 200 receivers: growth of memory", "MB", (Target(200),)),
    Row("accept-p50", "sessions", "  accept the next session, 400/s: p50", "ms", (Target(2.0),)),
    Row("accept-p99", "sessions", "  accept the next session, 400/s: p99", "ms"),
    Row("accept-rate", "sessions", "  accepted, emptied and closed, as fast as it goes", "session/s"),
    Row("sessions-plain", "sessions", "send and receive at once, plain queue", "msg/s"),
    Row("sessions-1000", "sessions", "the same messages, 1,000 active sessions", "msg/s", (NOT_SLOWER,)),
    Row("sessions-share", "sessions", "  of the plain queue's", "", (_at_least(0.6),)),
    Row("duplicates-plain", "duplicates", "send with message ids, plain queue", "msg/s"),
    Row("duplicates-send", "duplicates", "the same with duplicate detection", "msg/s", (NOT_SLOWER,)),
    Row("duplicates-share", "duplicates", "  of the plain queue's", "", (_at_least(0.7),)),
    Row("duplicates-used", "duplicates", "a window full of ids: growth of memory", "MB", (Target(100),)),
    Row("transactions", "transactions", "10 sends and 10 completions each", "commit/s", (_at_least(1500), NOT_SLOWER)),
    Row("transactions-p50", "transactions", "  declare to discharged: p50", "ms"),
    *partitioned_rows(),
    Row(
        "instructions-one",
        "instructions",
        "user instructions, one send at a time, all processes",
        "per msg",
        (Target(350_000),),
    ),
    Row("instructions-send", "instructions", "user instructions, send in bulk", "per msg"),
    Row("instructions-recv", "instructions", "user instructions, receive in bulk", "per msg"),
)


_JOURNAL_SHARES = {"events": 0.85, "bodies": 0.75}
KEEPS_UP = 0.1  # of a run of five seconds the journal may be half a second behind


def journal_rows() -> Iterator[Row]:
    for mode, name in MODE_NAMES.items():
        yield Row(f"journal-off-{mode}", "journal", f"1 KiB, 4 links: {name}, no journal", "msg/s")
        for kind, share in _JOURNAL_SHARES.items():
            made: tuple[tuple[str, str, str, tuple[Target, ...]], ...] = (
                ("", f"  journal of {kind}", "msg/s", ()),
                ("share-", "    of the rate without", "", (_at_least(share),)),
                ("waiting-", "    rows that it lacked at the end, of all", "", (Target(KEEPS_UP),)),
                ("whole-", "    with the time until it had them", "msg/s", ()),
            )
            for part, label, unit, targets in made:
                yield Row(f"journal-{kind}-{part}{mode}", "journal", label, unit, targets)


_PIPELINE = (
    *journal_rows(),
    Row("capture-message", "capture", "capture, bodies of 1 KiB: CPU of a message (3 rows)", "µs"),
    Row("capture-row", "capture", "  of a row", "µs"),
    Row("capture-processors", "capture", "  processors at 40,000 messages/s", "", (Target(0.5),)),
    Row("capture-floor", "capture", "  pyarrow alone, the same rows: CPU of a message", "µs"),
    Row("capture-of-floor", "capture", "  capture, of that", ""),
    Row("capture-broker", "capture", "  the broker, which serves the rows: CPU of a message", "µs"),
    Row("spark-stream", "spark-reads", "journal as a stream, 1 KiB", "row/s", (_at_least(60_000),)),
    Row("spark-stream-rate", "spark-reads", "  Spark's rate source, rows of that size", "row/s"),
    Row("spark-stream-share", "spark-reads", "  journal, of that", ""),
    Row("spark-stream-narrow", "spark-reads", "  body, op and offset alone", "row/s"),
    Row("spark-batch", "spark-reads", "journal in batch, 1 KiB", "row/s", (_at_least(60_000),)),
    Row("spark-batch-range", "spark-reads", "  Spark's range, rows of that size", "row/s"),
    Row("spark-batch-share", "spark-reads", "  journal, of that", ""),
    Row("spark-captured", "spark-reads", "captured events", "row/s", (_at_least(300_000),)),
    Row("spark-captured-files", "spark-reads", "  Spark's file source, the same files", "row/s"),
    Row("spark-captured-share", "spark-reads", "  captured events, of that", ""),
    Row("spark-latency-journal", "spark-latency", "journal, 400/s: micro-batch, p50", "ms", (Target(500),)),
    Row("spark-latency-rate", "spark-latency", "  Spark's rate source", "ms"),
    Row("spark-latency-of-rate", "spark-latency", "    journal, of that", ""),
    Row("spark-latency-files", "spark-latency", "  Spark's file source, 10 files/s", "ms"),
    Row("spark-latency-of-files", "spark-latency", "    journal, of that", ""),
    Row("spark-latency-journal-event", "spark-latency", "journal, 400/s: event to end of its batch, p50", "ms"),
    Row("spark-latency-rate-event", "spark-latency", "  Spark's rate source, which makes rows each second", "ms"),
    Row("spark-latency-files-event", "spark-latency", "  Spark's file source", "ms"),
    Row("spark-sink", "spark-sink", "Spark writes messages of 1 KiB to a queue", "msg/s", (_at_least(15_000),)),
    Row("spark-sink-ids", "spark-sink", "  with duplicate detection", "msg/s", (_at_least(15_000),)),
    Row("spark-sink-files", "spark-sink", "  the same rows as Parquet", "row/s"),
    Row("spark-sink-share", "spark-sink", "    queue, of that", ""),
    Row("spark-sink-ids-share", "spark-sink", "    queue with duplicate detection, of that", ""),
    Row("audit-audit", "audit", "exact audit, without the start of Spark", "s", (Target(30),)),
    Row("audit-count", "audit", "  messages counted by queue and number, the same files", "s"),
    Row("audit-ratio", "audit", "  audit, over that", ""),
    Row("audit-audit-cpu", "audit", "exact audit: CPU", "s"),
    Row("audit-count-cpu", "audit", "  messages counted by queue and number", "s"),
    Row("audit-ratio-cpu", "audit", "  audit, over that", ""),
)


def rows(plan: Plan) -> tuple[Row, ...]:
    """All that can be measured by the plan, in the order of the table."""
    return (
        *(row for cell in plan.cells for row in throughput_rows(cell)),
        *_SATURATION,
        *_ONE_LINK,
        *(row for rate in plan.rates for row in open_loop_rows(rate)),
        *_ALONE,
        *(row for count in plan.backlogs for row in backlog_rows(count)),
        *_FEATURES,
        *_PIPELINE,
    )


def cell_labels(plan: Plan) -> dict[str, str]:
    """The names of the cells for which the cost of a message is kept, by their keys."""
    throughput = {row.key: row.label for cell in plan.cells for row in throughput_rows(cell)}
    open_loops = {f"openloop-{rate}": f"open loop, {load_name(rate)}" for rate in plan.rates}
    partitioned = {
        f"partitioned{kind}-{mode}": f"4 partitions, 2 workers, {queue}: {name}"
        for mode, name in MODE_NAMES.items()
        for kind, queue in (("-plain", "plain queue"), ("", "partitioned queue"))
    } | {f"partitioned-default-{mode}": f"default settings, plain queue: {name}" for mode, name in MODE_NAMES.items()}
    journals = {
        f"journal-{kind}-{mode}": f"1 KiB, 4 links, {said}: {name}"
        for mode, name in MODE_NAMES.items()
        for kind, said in (("off", "no journal"), ("events", "journal of events"), ("bodies", "journal of bodies"))
    }
    on_spark = {row.key: row.label.strip() for row in _PIPELINE if row.group in ON_SPARK}
    return journals | on_spark | throughput | partitioned | {"unpipelined": "one send at a time, 1 KiB"} | open_loops


@dataclass(frozen=True)
class Figure:
    """The median of all rounds, and the least and the greatest."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Verdict:
    """A row's figures by server; `ratios`: our median over another's; each target with whether it is met."""

    row: Row
    figures: Mapping[str, Figure]
    ratios: Mapping[str, float]
    met: tuple[tuple[Target, bool | None], ...]

    @property
    def failed(self) -> bool:
        return any(met is False for _, met in self.met)


Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""Server name → row key → one value per round."""


def judge(row: Row, values: Mapping[str, Sequence[float]]) -> Verdict:
    """`values` by server; of servers without any, nothing is said."""
    figures = {server: Figure.of(each) for server, each in values.items() if each}
    ours = figures.get(PEEKLOCK)
    ratios = {}
    if ours is not None:
        ratios = {
            server: ours.median / figure.median
            for server, figure in figures.items()
            if server != PEEKLOCK and figure.median
        }
    met = tuple((target, target.met(ours.median, ratios)) for target in row.targets) if ours else ()
    return Verdict(row, figures, ratios, met)


def verdicts(plan: Plan, samples: Samples) -> list[Verdict]:
    """In the order of the table; rows that were not measured are left out."""
    judged = [
        judge(row, {server: of[row.key] for server, of in samples.items() if row.key in of}) for row in rows(plan)
    ]
    return [verdict for verdict in judged if verdict.figures]
