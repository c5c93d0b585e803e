"""How the cost of a message grows with workers and gateways, and what follows from that for more processors.

The broker's processes are pinned to some processors and the load tool to another, so that the tool takes none of the
broker's time. With two processors all processes of the broker share one: their rate says nothing of more processors,
but the time that they take for a message does. If it stays nearly the same while processes are added, more processors
do as much more. `bench.scaling_model` fits a model to these times.

    python -m bench.scaling --json FILE --page docs     # measure, keep the figures, write docs/performance/scaling.md
    python -m bench.scaling --from FILE --page docs     # write the page anew
"""

import argparse
import json
import os
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bench import load
from bench.document import machine
from bench.plan import KIB, MODES
from bench.processes import command_of, cpu_s, machine_cpu_s, role
from bench.recording import BUSY_CORES
from bench.scaling_model import Layout, page
from bench.servers import PARTITIONED_QUEUE, PeeklockPartitioned, ServerMissing, awake

# Those of the grid, and others that say what the model cannot see in the grid: few links, and many partitions.
LAYOUTS = (
    Layout(1, 1),
    Layout(2, 1),
    Layout(4, 1),
    Layout(1, 2),
    Layout(2, 2),
    Layout(1, 4),
    Layout(4, 4),
    Layout(1, 1, links=2),
    Layout(2, 2, links=2),
    Layout(4, 4, links=4),
    Layout(1, 2, partitions=16),
    Layout(1, 4, partitions=32),
)
ROLES = ("gateway", "worker", "checkpointer")
PAGE = "scaling.md"


class Scaled(PeeklockPartitioned):
    """Peeklock with these processes on these processors."""

    start_timeout_s = 120.0

    def __init__(self, directory: Path, layout: Layout, processors: Sequence[int]) -> None:
        super().__init__(directory)
        self.layout = layout
        self._processors = processors

    def _command(self) -> tuple[list[str], dict[str, str]]:
        command, environment = super()._command()
        return ["taskset", "--cpu-list", ",".join(map(str, self._processors)), *command], environment

    def _settings(self) -> list[str]:
        layout = self.layout
        return [f"gateways = {layout.gateways}", f"workers = {layout.workers}", f"partitions = {layout.partitions}"]

    def commits(self) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ops_port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("peeklock_worker_commits_total{"))


@dataclass
class Samples:
    """One value for each round. `cost` is in microseconds of CPU for a message, by role.

    `gateways` is how many gateways were used: links are distributed at random. A gateway with half of another's work
    counts as less than one.
    """

    cost: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ROLES})
    gateways: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)  # for 1,000 messages
    rate: list[float] = field(default_factory=list)  # messages per second
    others: list[float] = field(default_factory=list)  # processors that others used


def spread(shares: Sequence[float]) -> float:
    """Among how many the work was divided, if it had been divided equally."""
    return sum(shares) ** 2 / sum(share**2 for share in shares) if any(shares) else 1.0


class Measured:
    """Runs of one server, with the time that each of its processes took."""

    def __init__(self, server: Scaled, tool: Path, seconds: float) -> None:
        self._server = server
        self._tool = tool
        self._seconds = seconds
        self.samples = {mode: Samples() for mode in MODES}

    def warm_up(self) -> None:
        self._load("both", "--seconds", str(self._seconds / 2))

    def round(self) -> None:
        sent = self._run("send", "--seconds", str(self._seconds))
        self._run("recv", "-n", str(sent.messages), "--idle", "15")
        self._run("both", "--seconds", str(self._seconds))

    def _load(self, mode: str, *options: str) -> load.Figures:
        links = ("--links", str(self._server.layout.links))
        return load.run(
            self._tool, mode, self._server.endpoint, PARTITIONED_QUEUE, "--size", str(KIB), *links, *options
        )

    def _run(self, mode: str, *options: str) -> load.Figures:
        with awake(self._server):
            processes = [(role(command_of(each)), each) for each in self._server.processes()]
            commits, machine_s = self._server.commits(), machine_cpu_s()
            before = [cpu_s([process]) for _, process in processes]
            figures = self._load(mode, *options)
            used = [(name, cpu_s([process]) - was) for (name, process), was in zip(processes, before, strict=True)]
            machine_s = machine_cpu_s() - machine_s
            commits = self._server.commits() - commits
        samples, count = self.samples[mode], figures.messages
        for name in ROLES:
            samples.cost[name].append(sum(s for each, s in used if each == name) / count * 1e6)
        samples.gateways.append(spread([s for name, s in used if name == "gateway"]))
        samples.commits.append(commits / count * 1e3)
        samples.rate.append(figures.messages_per_s)
        samples.others.append((machine_s - sum(s for _, s in used) - figures.client_cpu_s) / figures.seconds)
        return figures


@contextmanager
def pinned(processors: Sequence[int]) -> Iterator[None]:
    """This process, and those that it starts, run on these processors."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def measure(layouts: Sequence[Layout], rounds: int, seconds: float) -> dict[str, Any]:
    """All layouts in each round, so that what changes with time changes for all. Raises LoadFailed, ServerFailed."""
    tools = load.build()
    tool_on, *broker_on = sorted(os.sched_getaffinity(0))
    if not broker_on:
        raise ServerMissing("two processors are needed: one for the load tool, the others for the broker")
    began = datetime.now(UTC)
    with pinned([tool_on]), tempfile.TemporaryDirectory(prefix="peeklock-scaling-") as scratch:
        servers: list[Scaled] = []
        try:
            measured = []
            for number, layout in enumerate(layouts):
                server = Scaled(Path(scratch) / str(number), layout, broker_on)
                server.directory.mkdir()
                servers.append(server)
                server.start()
                measured.append(Measured(server, tools.load, seconds))
                measured[-1].warm_up()
                server.settle()
                server.pause()
                print(f"{layout}: started", file=sys.stderr)
            for number in range(rounds):
                for at in range(len(layouts)):
                    measured[(at + number) % len(layouts)].round()
                print(f"round {number + 1} of {rounds}", file=sys.stderr)
        finally:
            for server in servers:
                server.resume()
                server.close()
    return {
        "began": began.isoformat(timespec="minutes"),
        "machine": machine(),
        "broker": servers[0].version(),
        "rounds": rounds,
        "seconds": seconds,
        "tool_on": [tool_on],
        "broker_on": broker_on,
        "layouts": [
            {"layout": asdict(layout), "modes": {mode: asdict(samples) for mode, samples in each.samples.items()}}
            for layout, each in zip(layouts, measured, strict=True)
        ],
    }


def disturbed(made: dict[str, Any]) -> tuple[int, int]:
    """How many runs others disturbed, of how many."""
    others = [busy for of in made["layouts"] for mode in of["modes"].values() for busy in mode["others"]]
    return sum(busy > BUSY_CORES for busy in others), len(others)


def medians(made: dict[str, Any]) -> dict[str, list[tuple[Layout, dict[str, float]]]]:
    """By mode: each layout, with the gateways that were used, and what was measured."""
    found: dict[str, list[tuple[Layout, dict[str, float]]]] = {mode: [] for mode in MODES}
    for of in made["layouts"]:
        for mode, samples in of["modes"].items():
            figures = {name: median(values) for name, values in samples["cost"].items()}
            figures |= {name: median(samples[name]) for name in ("gateways", "commits", "rate")}
            found[mode].append((Layout(**of["layout"]), figures))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description="The cost of a message by processes.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of sending in each run (default 4)")
    parser.add_argument("--quick", action="store_true", help="tiny: shows that it works, no more")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep what was measured")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="use what was kept")
    parser.add_argument("--page", type=Path, metavar="DIR", help=f"write DIR/performance/{PAGE}")
    options = parser.parse_args(argv)
    if options.source:
        made = json.loads(options.source.read_text())
    else:
        try:
            quick = (LAYOUTS[:6], 1, 0.3)
            made = measure(*(quick if options.quick else (LAYOUTS, options.rounds, options.seconds)))
        except (load.LoadToolMissing, ServerMissing) as problem:
            print(problem, file=sys.stderr)
            return 2
        if options.json:
            options.json.write_text(json.dumps(made, indent=1) + "\n")
    text = page(made, medians(made), disturbed(made))
    if options.page:
        (options.page / "performance" / PAGE).write_text(text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
