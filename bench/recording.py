"""The common part of all measurements: their sizes, and runs of a load tool, whose figures are kept by row."""

import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from bench import load
from bench.processes import cpu_s, machine_cpu_s
from bench.rows import KIB, SIZES
from bench.servers import Server

BUSY_CORES = 0.3  # if others use more than this, the figures of a run are doubtful


@dataclass(frozen=True)
class Plan:
    """Sizes of the measurements; the targets are for the defaults."""

    runs: int = 3
    seconds: float = 5.0
    sizes: tuple[int, ...] = SIZES
    rate: int = 2000
    rate_seconds: float = 10.0
    connections: int = 5000
    backlog: int = 1_000_000
    sessions: int = 100_000
    ids: int = 1_000_000  # in the window of duplicate detection
    peer_backlog_runs: int = 1  # its load, restart and drain take minutes, and no target depends on them
    warm_up_seconds: float = 5.0
    rest_seconds: float = 2.0  # before memory is read

    @classmethod
    def tiny(cls) -> "Plan":
        """Everything once, in seconds: this shows that the measurements work, but tells nothing of the broker."""
        return cls(
            runs=1,
            seconds=0.2,
            sizes=(KIB,),
            rate_seconds=0.3,
            connections=50,
            backlog=2000,
            sessions=500,
            ids=2000,
            warm_up_seconds=0,
            rest_seconds=0.2,
        )


@dataclass(kw_only=True)
class Recorder:
    """Collects samples by (server name, row key)."""

    plan: Plan
    tools: load.Tools
    samples: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    disturbed: list[str] = field(default_factory=list)

    def add(self, server: Server, key: str, value: float) -> None:
        self.samples[server.name, key].append(value)

    def run_at(self, server: Server, tool: Path, mode: str, address: str, *options: str) -> load.Figures:
        """One run of a tool; notes it when somebody else used the machine meanwhile."""
        processes = server.processes()
        machine, broker, began = machine_cpu_s(), cpu_s(processes), time.monotonic()
        figures = load.run(tool, mode, server.endpoint, address, *options)
        elapsed = time.monotonic() - began
        used_here = cpu_s(processes) - broker + figures.client_cpu_s
        others = (machine_cpu_s() - machine - used_here) / elapsed
        if others > BUSY_CORES and elapsed > 1:
            self.disturbed.append(f"{server.name} {mode} {' '.join(options)}: others used {others:.2f} cores")
        return figures
