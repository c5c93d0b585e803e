"""The common part of all measurements: runs of a load tool, whose figures are kept by server and row."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import counters, load
from bench.plan import Plan
from bench.processes import cpu_s_by_role, machine_cpu_s
from bench.servers import Server

BUSY_CORES = 0.3  # if others use more than this, the figures of a run are doubtful
CLIENT = "client"
CPU, INSTRUCTIONS = "cpu", "instructions"


def cost_key(cell: str, kind: str, role: str) -> str:
    """Where the cost of a message is kept: microseconds of CPU or user instructions of the processes of one role."""
    return f"{cell}:{kind}:{role}"


def alternating(names: Sequence[str], turns: int) -> Iterator[Sequence[str]]:
    """Their order, as often, every second time backwards: then what changes steadily counts for none of them."""
    for turn in range(turns):
        yield names[::-1] if turn % 2 else names


@dataclass(kw_only=True)
class Recorder:
    """Collects samples by server name and row key."""

    plan: Plan
    tools: load.Tools
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    runs: int = 0
    disturbed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, server: Server, key: str, value: float) -> None:
        self.samples.setdefault(server.name, defaultdict(list))[key].append(value)

    def last(self, server: Server, key: str) -> float:
        return self.samples[server.name][key][-1]

    def run_at(
        self, server: Server, tool: Path, mode: str, address: str, *options: str, cell: str | None = None
    ) -> load.Figures:
        """One run of a tool. Notes it when somebody else used the machine meanwhile, and keeps costs under `cell`."""
        self.runs += 1
        processes = server.processes()
        with self._instructions(server, cell is not None) as counted:
            machine, before, began = machine_cpu_s(), cpu_s_by_role(processes), time.monotonic()
            figures = load.run(tool, mode, server.endpoint, address, *options)
            elapsed = time.monotonic() - began
            used = {role: after - before.get(role, 0.0) for role, after in cpu_s_by_role(processes).items()}
            used[CLIENT] = figures.client_cpu_s
            others = (machine_cpu_s() - machine - sum(used.values())) / elapsed
        if others > BUSY_CORES and elapsed > 1:
            self.disturbed.append(f"{server.name} {mode} {' '.join(options)}: others used {others:.2f} cores")
        if cell is not None and figures.messages:
            for role, seconds in used.items():
                self.add(server, cost_key(cell, CPU, role), seconds / figures.messages * 1e6)
            for role, count in counted.items():
                self.add(server, cost_key(cell, INSTRUCTIONS, role), count / figures.messages)
        return figures

    @contextlib.contextmanager
    def _instructions(self, server: Server, wanted: bool) -> Iterator[dict[str, int]]:
        """Filled at the end of the block; stays empty where perf does not count."""
        if not wanted or counters.reason_missing():
            yield {}
            return
        with counters.counting(server.processes()) as counted:
            yield counted
