"""What an audit found: its tables, the same in numbers, and the verdict in a sentence."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs.auditing.moves import MOVE_FAULTS
from pipeline.jobs.auditing.offsets import Offsets
from pipeline.jobs.auditing.verdicts import FAULTS, Judged
from pipeline.jobs.report import counted
from storage.wording import plural


class Audit(NamedTuple):
    """What the audit found. Tables as in the docstring of `pipeline.jobs.audit`.

    `hidden`: why queues were not compared with what is in them, by entity and subqueue. `is_whole`: of all that had
    happened before the end, nothing is missing. `bodies`: places whose bodies are not what was enqueued, if that was
    asked. `cut`: what the broker was told is captured, and the manifest does not have.
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
    bodies: DataFrame | None = None
    cut: Sequence[str] = ()

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
        if self.bodies is not None:
            found["bodies"] = self.bodies
        return found | {"pending": self.pending, "blind": self.blind} if is_of_series else found


class Summary(NamedTuple):
    """The audit in numbers: messages by verdict of each queue (namespace, entity, subqueue), moves by verdict, gaps and
    truncations, and rows with repeated or foreign offsets, or with times that go back. `moves` are without those that
    the next audit of a series decides. `bodies`: those that are not what was enqueued. `missing`: offsets in gaps."""

    queues: Mapping[tuple[str, str, str], Counter[str]]
    moves: Counter[str]
    problems: Counter[str]
    bodies: int = 0
    missing: int = 0
    cut: int = 0

    @property
    def messages(self) -> Counter[str]:
        return sum(self.queues.values(), Counter())

    @property
    def faults(self) -> int:
        messages = self.messages
        places = sum(messages[verdict] for verdict in FAULTS)
        rows = self.problems["repeated"] + self.problems["foreign"]
        return places + sum(self.moves[verdict] for verdict in MOVE_FAULTS) + rows + self.bodies

    @property
    def gaps(self) -> int:
        return self.problems["gap"] + self.problems["truncated"] + self.cut

    @property
    def undecided(self) -> int:
        return self.messages["undecided"] + self.moves["undecided"]


def summary(found: Audit, *, is_of_series: bool = False) -> Summary:
    # Queues are few, so that Python counts what is known of each; moves that do not match may be many.
    queues: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for row in found.verdicts.collect():
        queues[row.namespace, row.entity, row.subQueue][row.verdict] += row.messages
    if found.moves.isLocal():
        moves = Counter(row.verdict for row in found.moves.collect())
    else:
        moves = Counter(dict(found.moves.groupBy("verdict").agg(F.count(F.lit(1))).collect()))
    if is_of_series:
        moves["undecided"] -= found.pending.count()
    problems: Counter[str] = Counter()
    missing = 0
    for log in (*found.offsets.logs, *found.offsets.foreign):
        for problem in log.problems:
            problems[problem.kind] += 1 if problem.hides else problem.size
            missing += problem.size if problem.hides else 0
    bodies = 0 if found.bodies is None else found.bodies.count()
    return Summary(queues, moves, problems, bodies, missing, len(found.cut))


class Compared(StrEnum):
    """What the ledger was compared with, as a sentence."""

    BROKER = "The broker was asked what is in its queues."
    SNAPSHOT = "It was compared with a snapshot; the broker was not asked."
    NOTHING = "The broker was not asked."


def verdict_text(numbers: Summary, compared: Compared = Compared.NOTHING) -> tuple[str, str]:
    """The verdict in one line, and its mood."""
    verdict, mood = _verdict(numbers)
    return " ".join([verdict, *_reservations(numbers), compared]), mood


def _reservations(numbers: Summary) -> Iterator[str]:
    if numbers.gaps:
        many = plural(numbers.gaps, "a gap", f"{numbers.gaps:,} gaps")
        rows = f" of {counted(numbers.missing, 'row')}" if numbers.missing else ""
        yield f"The ledger has {many}{rows}: what happened there is not known, and is called no fault."
    if numbers.cut:
        yield "The newest entries of the manifest are gone: the broker was told that more is captured."
    if backward := numbers.problems["backward"]:
        yield f"Times go back in {plural(backward, 'a row', f'{backward:,} rows')}."


def _verdict(numbers: Summary) -> tuple[str, str]:
    messages = numbers.messages
    total = messages.total()
    if numbers.faults:
        named = {name: messages[name] for name in FAULTS if messages[name]}
        named |= {name: numbers.moves[name] for name in MOVE_FAULTS if numbers.moves[name]}
        if numbers.problems["repeated"]:
            named["repeated offsets"] = numbers.problems["repeated"]
        if numbers.problems["foreign"]:
            named["rows that were not captured"] = numbers.problems["foreign"]
        if numbers.bodies:
            named["damaged bodies"] = numbers.bodies
        listed = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in named.items())
        return f"{counted(numbers.faults, 'fault')} in {counted(total, 'message')}: {listed}.", "bad"
    if numbers.undecided or numbers.gaps:
        return f"No faults in {counted(total, 'message')}; {numbers.undecided:,} could not be decided.", "plain"
    return f"All {counted(total, 'message is', 'messages are')} accounted for.", "plain" if numbers.problems[
        "backward"
    ] else "good"
