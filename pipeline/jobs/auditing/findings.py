"""What an audit found: its tables, the same in numbers, and the verdict in a sentence."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs.auditing.moves import MOVE_FAULTS
from pipeline.jobs.auditing.offsets import Offsets
from pipeline.jobs.auditing.verdicts import FAULTS, Judged


class Audit(NamedTuple):
    """What the audit found. Tables as in the docstring of `pipeline.jobs.audit`.

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


class Summary(NamedTuple):
    """The audit in numbers: messages by verdict of each queue (namespace, entity, subqueue), moves by verdict, gaps and
    truncations, and rows with repeated offsets."""

    queues: Mapping[tuple[str, str, str], Counter[str]]
    moves: Counter[str]
    problems: Counter[str]

    @property
    def messages(self) -> Counter[str]:
        return sum(self.queues.values(), Counter())

    @property
    def faults(self) -> int:
        messages = self.messages
        places = sum(messages[verdict] for verdict in FAULTS)
        return places + sum(self.moves[verdict] for verdict in MOVE_FAULTS) + self.problems["repeated"]

    @property
    def gaps(self) -> int:
        return self.problems["gap"] + self.problems["truncated"]


def summary(found: Audit) -> Summary:
    # Queues are few, so that Python counts what is known of each; moves that do not match may be many.
    queues: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for row in found.verdicts.collect():
        queues[row.namespace, row.entity, row.subQueue][row.verdict] += row.messages
    if found.moves.isLocal():
        moves = Counter(row.verdict for row in found.moves.collect())
    else:
        moves = Counter(dict(found.moves.groupBy("verdict").agg(F.count(F.lit(1))).collect()))
    problems: Counter[str] = Counter()
    for log in found.offsets.logs:
        for problem in log.problems:
            problems[problem.kind] += 1 if problem.hides else problem.size
    return Summary(queues, moves, problems)


def verdict_text(numbers: Summary) -> tuple[str, str]:
    """The verdict in a sentence, and its mood."""
    messages = numbers.messages
    total = messages.total()
    gaps = ""
    if numbers.gaps:
        many = "a gap" if numbers.gaps == 1 else f"{numbers.gaps:,} gaps"
        gaps = f" The ledger has {many}: what happened there is not known, and is called no fault."
    if numbers.faults:
        named = {name: messages[name] for name in FAULTS if messages[name]}
        named |= {name: numbers.moves[name] for name in MOVE_FAULTS if numbers.moves[name]}
        if numbers.problems["repeated"]:
            named["repeated offsets"] = numbers.problems["repeated"]
        listed = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in named.items())
        counted = "1 fault" if numbers.faults == 1 else f"{numbers.faults:,} faults"
        return f"{counted} in {total:,} messages: {listed}.{gaps}", "bad"
    undecided = messages["undecided"] + numbers.moves["undecided"]
    if undecided:
        return f"No faults in {total:,} messages; {undecided:,} could not be decided.{gaps}", "plain"
    return f"All {total:,} messages are accounted for.{gaps}", "plain" if numbers.gaps else "good"
