"""One run of the bench as a JSON document: all figures, and what they were measured on."""

import platform
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from bench import counters
from bench.measure import Bench
from bench.plan import Plan
from bench.recording import CLIENT, CPU, INSTRUCTIONS
from bench.rows import Figure, Samples, Verdict, cell_labels, verdicts
from bench.servers import Server

Document = dict[str, Any]
FORMAT = 1


@dataclass(frozen=True)
class Run:
    """What was asked for, when, and of whom."""

    command: str
    groups: Sequence[str]
    began: datetime
    servers: Sequence[Server]


def document(bench: Bench, run: Run, now: datetime) -> Document:
    """`rows` in the order of the table, `costs` per message by cell, server and process."""
    return {
        "format": FORMAT,
        "command": run.command,
        "began": run.began.isoformat(timespec="minutes"),
        "minutes": round((now - run.began).total_seconds() / 60, 1),
        "machine": machine(),
        "servers": {server.name: {"version": server.version(), "durable": server.durable} for server in run.servers},
        "groups": list(run.groups),
        "plan": asdict(bench.plan),
        "rows": [row(verdict, bench.samples) for verdict in verdicts(bench.plan, bench.samples)],
        "costs": costs(bench.plan, bench.samples),
        "perf_missing": counters.reason_missing(),
        "runs": bench.runs,
        "disturbed": list(bench.disturbed),
        "failed": list(bench.failed),
    }


def row(verdict: Verdict, samples: Samples) -> Document:
    made = verdict.row
    return {
        "key": made.key,
        "group": made.group,
        "label": made.label,
        "unit": made.unit,
        "figures": {
            server: asdict(figure) | {"values": list(samples[server][made.key])}
            for server, figure in verdict.figures.items()
        },
        "ratios": dict(verdict.ratios),
        "targets": [{"text": str(target), "met": met} for target, met in verdict.met],
    }


def costs(plan: Plan, samples: Samples) -> list[Document]:
    """One entry for each cell and kind: median cost of a message by server and process, the client among them."""
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for server, by_key in samples.items():
        for key, values in by_key.items():
            cell, separator, rest = key.partition(":")
            if separator:
                kind, _, role = rest.partition(":")
                found.setdefault((cell, kind), {}).setdefault(server, {})[role] = Figure.of(values).median
    labels = cell_labels(plan)
    return [
        {"cell": cell, "label": label, "kind": kind, "by_server": found[cell, kind]}
        for kind in (CPU, INSTRUCTIONS)
        for cell, label in labels.items()
        if (cell, kind) in found
    ]


def broker_total(by_role: Mapping[str, float]) -> float:
    """Of all processes of the broker, without the client's."""
    return sum(cost for role, cost in by_role.items() if role != CLIENT)


def notable(by_role: Mapping[str, float]) -> dict[str, float]:
    """The broker's processes that took at least a hundredth of its cost: others say nothing."""
    least = broker_total(by_role) / 100
    return {role: cost for role, cost in sorted(by_role.items()) if role != CLIENT and cost >= least}


def machine() -> Document:
    return {
        "processor": _processor(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "linux": platform.release(),
        "file_system": _file_system(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system() -> str:
    """Of the directory in which the brokers' data lie."""
    done = subprocess.run(["df", "--output=fstype", tempfile.gettempdir()], capture_output=True, text=True)
    return done.stdout.split()[-1] if done.returncode == 0 else "unknown"
