"""Rows that Spark reads of the journal, by the clock and by CPU: `python -m bench.pipeline.rows_read`.

Events in six columns, bodies of 1 KiB in all columns and in three, and Spark's own `range` with a column of that size
take turns. A query costs something before its first row, so there are queries without rows among them; with many rows
it counts for little.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from bench import load
from bench.pipeline import spark as on_spark
from bench.pipeline.brokers import PeeklockWithJournal
from bench.pipeline.capturing import fill
from bench.pipeline.reads import NARROW, read_all, rows_of_1_kib
from bench.plan import Plan
from bench.processes import cpu_s_by_process, cpu_s_since, tree
from bench.recording import Recorder, alternating
from bench.servers import ROOT

SIX: Final = "sequenceNumber bigint, entity string, op string, eventTime timestamp, journalOffset bigint, partition int"
RANGE: Final = "Spark's range, 1 KiB"
WIDE: Final = 160  # columns where the output is no terminal


class Cost(NamedTuple):
    """Seconds: of the clock, and of CPU in Java, in Spark's Python and in the broker."""

    elapsed: float
    java: float
    python: float
    broker: float

    @property
    def cpu(self) -> float:
        return self.java + self.python + self.broker


Read = tuple[int, Callable[[], None]]
"""How many rows, and what reads them."""


def measured(messages: int, turns: int, warm_up: int) -> dict[str, tuple[int, list[Cost]]]:
    """What is read by name: the rows, and what each turn has cost."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peeklock-bench-")))
        brokers, places = [], {}
        bench = Recorder(plan=Plan(), tools=load.build())
        for mode in ("events", "bodies"):
            broker = PeeklockWithJournal(directory / mode, ROOT, mode, mode)
            broker.directory.mkdir()
            stack.callback(broker.close)
            broker.start()
            fill(bench, broker, "send", messages)
            places[mode] = stack.enter_context(on_spark.place(broker))
            brokers.append(broker)
        works = _works(places, messages)
        found: dict[str, tuple[int, list[Cost]]] = {name: (rows, []) for name, (rows, _) in works.items()}
        for turn, order in enumerate(alternating(list(works), warm_up + turns)):
            for name in order:
                cost = _cost(brokers, works[name][1])
                if turn >= warm_up:
                    found[name][1].append(cost)
        return found


def _works(places: dict[str, on_spark.Place], messages: int) -> dict[str, Read]:
    spark = on_spark.session()

    def of_journal(mode: str, schema: str | None = None, **options: str) -> Callable[[], None]:
        def read() -> None:
            source = spark.read.format("peeklock").options(**places[mode].journal(), **options)
            read_all((source if schema is None else source.schema(schema)).load())

        return read

    return {
        "events, six columns": (messages, of_journal("events", SIX)),
        "bodies of 1 KiB, all columns": (messages, of_journal("bodies")),
        "bodies of 1 KiB, three columns": (messages, of_journal("bodies", NARROW)),
        RANGE: (messages, lambda: read_all(rows_of_1_kib(spark, messages))),
        "journal, no rows": (0, of_journal("bodies", startingOffsets="latest")),
        "Spark's range, no rows": (0, lambda: read_all(rows_of_1_kib(spark, 0))),
    }


def _cost(brokers: list[PeeklockWithJournal], work: Callable[[], None]) -> Cost:
    before = {name: cpu_s_by_process(found) for name, found in _processes(brokers).items()}
    began = time.monotonic()
    work()
    elapsed = time.monotonic() - began
    used = {name: cpu_s_since(before[name], found) for name, found in _processes(brokers).items()}
    return Cost(elapsed, **used)


def _processes(brokers: list[PeeklockWithJournal]) -> dict[str, list[psutil.Process]]:
    of_brokers = [process for broker in brokers for process in broker.processes()]
    found: dict[str, list[psutil.Process]] = {"java": [], "python": [], "broker": of_brokers}
    for process in set(tree(os.getpid())) - set(of_brokers):
        try:
            found["java" if process.name() == "java" else "python"].append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def table(found: dict[str, tuple[int, list[Cost]]]) -> Table:
    """Medians of the turns; a read without rows has the cost of a query."""
    made = Table("read", "rows/s", "CPU a row, µs: Java", "Python", "broker", "all", "range, times that")
    rows, costs = found[RANGE]
    of_range = median(each.cpu for each in costs) / rows
    for name, (rows, costs) in found.items():
        java, python, broker, cpu = (
            median(values)
            for values in zip(*((each.java, each.python, each.broker, each.cpu) for each in costs), strict=True)
        )
        if rows:
            parts = [f"{seconds / rows * 1e6:.2f}" for seconds in (java, python, broker, cpu)]
            rate = f"{rows / median(each.elapsed for each in costs):,.0f}"
            made.add_row(name, rate, *parts, f"{of_range / (cpu / rows):.2f}")
        else:
            parts = [f"{seconds:.2f} s" for seconds in (java, python, broker, cpu)]
            made.add_row(name, f"in {median(each.elapsed for each in costs):.2f} s", *parts)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pipeline.rows_read", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--messages", type=int, default=1_000_000, help="in each journal (default 1,000,000)")
    parser.add_argument("--turns", type=int, default=3, help="of which the median is taken (default 3)")
    parser.add_argument("--warm-up", type=int, default=2, help="turns before these (default 2)")
    options = parser.parse_args()
    found = measured(options.messages, options.turns, options.warm_up)
    console = Console()
    (console if console.is_terminal else Console(width=WIDE)).print(table(found))


if __name__ == "__main__":
    main()
