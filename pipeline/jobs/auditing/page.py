"""The page of an audit: its verdict, plots, and the first rows of its tables."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from pyspark.sql import DataFrame

from pipeline.jobs import plots
from pipeline.jobs.auditing import bodies
from pipeline.jobs.auditing.findings import Audit, Compared, Summary, verdict_text
from pipeline.jobs.auditing.verdicts import FAULTS, VERDICTS
from pipeline.jobs.report import Headline, Report, Section, Table, labels
from storage.wording import plural

SHOWN_ROWS: Final = 200
SHOWN_QUEUES: Final = 12

_MEANING: Final = {
    "entered_twice": "two rows say that it entered",
    "left_twice": "two rows say that it left",
    "unexplained": "it left, and the broker does not know why",
    "ghost": "it left, was used, or is present, and never entered",
    "left_but_present": "it left, and is still in the queue",
    "lost": "it entered, never left, and is not in the queue",
    "undecided": "a gap hides whether it is a fault, or it changed while the queues were browsed",
    "before": "entered before the ledger begins; all else is fine",
}
FAULT_COLUMNS: Final = (
    *("verdict", "namespace", "entity", "subQueue", "partition", "sequenceNumber", "entered", "left", "present"),
    *("firstOffset", "lastOffset"),
)
_MOVE: Final = (
    *("verdict", "kind", "namespace", "entity", "subQueue", "sequenceNumber", "messageId"),
    *("left", "expected", "arrived", "firstTime"),
)
_ID: Final = ("verdict", "namespace", "messageId", "accepted", "ended", "waiting")
_PROBLEM: Final = (
    *("kind", "namespace", "partition", "epoch", "fromOffset", "toOffset", "count"),
    *("firstTime", "lastTime", "description"),
)
_LOG: Final = ("namespace", "partition", "epoch", "low", "end", "rows", "firstTime", "lastTime")
_Place = TypeVar("_Place", tuple[str, str], tuple[str, str, str])


def report(found: Audit, numbers: Summary, compared: Compared, source: str) -> Report:
    """`source` says what the ledger is."""
    text, mood = verdict_text(numbers, compared)
    snapshot_given = compared is not Compared.NOTHING
    logs = found.offsets.logs
    facts: list[tuple[str, Any]] = [
        ("Rows of the ledger", sum(log.rows for log in logs)),
        ("Messages in queues", numbers.messages.total()),
        ("Partitions", len({(log.namespace, log.partition) for log in logs})),
        ("From (UTC)", min((log.first_time for log in logs), default=None)),
        ("To (UTC)", max((log.last_time for log in logs), default=None)),
        ("Compared with what is in the queues", snapshot_given),
    ]
    fine = "entered once, left at most once" + (", and is there if it has not left" if snapshot_given else "")
    meaning, messages = _MEANING | {"ok": fine}, numbers.messages
    in_words = [(name.replace("_", " "), messages[name], meaning[name]) for name in VERDICTS]
    verdicts = Table("Messages by verdict", ("Verdict", "Messages", "Meaning"), in_words)
    by_place = ("verdict", "namespace", "entity")
    sections = [
        Section("Verdicts", source, _plots(numbers), [verdicts]),
        Section(
            "Faults",
            "Each message whose rows contradict each other, or what is in its queue.",
            (),
            [_table("Messages with faults", found.faults, FAULT_COLUMNS, (*by_place, "subQueue", "sequenceNumber"))],
        ),
        Section(
            "Moves between queues",
            "Dead-lettered, forwarded, activated, published and moved messages whose other side is missing or doubled. "
            "A move near a gap, or near the ledger's beginning or end, is undecided.",
            (),
            [_table("Moves that do not match", found.moves, _MOVE, (*by_place, "sequenceNumber", "messageId"))],
        ),
        *([_not_compared(found.hidden)] if found.hidden else []),
        *([] if found.bodies is None else [_bodies(found.bodies)]),
        *([_cut(found.cut)] if found.cut else []),
        Section(
            "Message ids",
            "What became of the ids that the faults concern: how many messages were accepted, ended, and wait.",
            (),
            [_table("Ids", found.ids, _ID, ("verdict", "namespace", "messageId"))],
        ),
        Section(
            "Offsets",
            "Verdicts are as of these ends. Offsets that are missing hide what happened there. Rows that are foreign "
            "are of an epoch, or have offsets, that the manifest does not know.",
            (),
            [
                _table("Gaps, and rows that should not be there", found.offsets.problems_table(), _PROBLEM),
                _table("What the ledger has", found.offsets.logs_table(), _LOG),
            ],
        ),
    ]
    return Report("Flow audit", text, mood, facts, sections, _headline(numbers))


def _headline(numbers: Summary) -> Headline:
    """What the reader has to look at; if there is nothing, how many messages are accounted for."""
    if numbers.faults:
        return Headline(numbers.faults, plural(numbers.faults, "fault"))
    if numbers.undecided:
        return Headline(numbers.undecided, "could not be decided")
    if numbers.gaps:
        return Headline(numbers.gaps, plural(numbers.gaps, "gap in the ledger", "gaps in the ledger"))
    total = numbers.messages.total()
    return Headline(total, plural(total, "message accounted for", "messages accounted for"))


def _plots(numbers: Summary) -> list[str]:
    by_entity: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for (namespace, entity, _), verdicts in numbers.queues.items():
        by_entity[namespace, entity].update({name: verdicts[name] for name in FAULTS if verdicts[name]})
    worst = _largest({place: faults for place, faults in by_entity.items() if faults})
    busiest = _largest(numbers.queues)
    names = labels([*worst, *((namespace, entity) for namespace, entity, _ in busiest)])
    drawn = []
    if worst:
        faults = {
            names[place]: {name.replace("_", " "): float(count) for name, count in verdicts.items()}
            for place, verdicts in worst.items()
        }
        drawn.append(plots.bars("Faults by entity", faults, "messages"))
    if busiest:
        flow = {
            names[namespace, entity] + ("" if sub_queue == "active" else f" ({sub_queue})"): {
                "messages": float(verdicts.total())
            }
            for (namespace, entity, sub_queue), verdicts in busiest.items()
        }
        drawn.append(plots.bars("Messages by queue", flow, "messages"))
    return drawn


def _largest(counts: Mapping[_Place, Counter[str]]) -> dict[_Place, Counter[str]]:
    order = sorted(counts.items(), key=lambda each: (-each[1].total(), each[0]))
    return dict(order[:SHOWN_QUEUES])


def _table(title: str, rows: DataFrame, columns: Sequence[str], order: Sequence[str] = ()) -> Table:
    """The first rows in this order, or else in their own. `order` is of `columns`."""
    chosen = rows.select(*columns)
    if rows.isLocal():
        # For Spark, to sort a few rows is three jobs.
        few = chosen.toArrow()
        few = few.sort_by([(name, "ascending") for name in order]) if order else few
        total = few.num_rows
    else:
        few = (chosen.sort(*order) if order else chosen).limit(SHOWN_ROWS).toArrow()
        total = rows.count()
    shown_rows = [
        tuple(value.replace("_", " ") if name == "verdict" else value for name, value in row.items())
        for row in few.slice(0, SHOWN_ROWS).to_pylist()
    ]
    return Table(title, columns, shown_rows, total=total)


def _bodies(damaged: DataFrame) -> Section:
    text = "Messages whose captured body is not what the broker had accepted."
    return Section("Bodies", text, (), [_table("Damaged bodies", damaged, bodies.SHOWN, bodies.SHOWN)])


def _cut(missing: Sequence[str]) -> Section:
    table = Table("Missing", ("What",), [(each,) for each in missing[:SHOWN_ROWS]], total=len(missing))
    return Section("The manifest's end", "What the broker was told is captured, and is not.", (), [table])


def _not_compared(hidden: Mapping[tuple[str, str], str]) -> Section:
    rows = [(*place, reason) for place, reason in sorted(hidden.items())]
    table = Table("Not compared", ("Entity", "Subqueue", "Reason"), rows[:SHOWN_ROWS], total=len(rows))
    text = "Queues whose messages the broker does not show: whether something is lost there is not known."
    return Section("Queues that cannot be browsed", text, (), [table])
