"""Peeklock beside a RabbitMQ quorum queue on this machine, as one table with the targets."""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from bench import load
from bench.measure import Bench, Maker
from bench.rabbitmq import RabbitMQ
from bench.recording import Plan
from bench.rows import GROUPS, Verdict, verdicts
from bench.servers import Peeklock, ServerFailed, ServerMissing


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    parser.add_argument(
        "--rows", default=",".join(GROUPS), help=f"comma-separated groups (default: all: {','.join(GROUPS)})"
    )
    parser.add_argument("--runs", type=int, help="runs of which the median is taken (default 3)")
    parser.add_argument("--seconds", type=float, help="duration of a throughput run (default 5)")
    parser.add_argument("--backlog", type=int, help="messages of the backlog (default 1,000,000)")
    parser.add_argument("--connections", type=int, help="idle connections (default 5,000)")
    parser.add_argument("--sessions", type=int, help="sessions of 10 messages each (default 100,000)")
    parser.add_argument("--quick", action="store_true", help="everything tiny: shows that the bench works, no more")
    parser.add_argument("--no-peer", action="store_true", help="without RabbitMQ: no ratios")
    parser.add_argument("--json", type=Path, help="write all samples and verdicts to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    options = parser.parse_args(argv)
    options.rows = options.rows.split(",")
    if unknown := set(options.rows) - set(GROUPS):
        parser.error(f"unknown rows {', '.join(sorted(unknown))}: choose from {', '.join(GROUPS)}")
    return options


def plan(options: argparse.Namespace) -> Plan:
    base = Plan.tiny() if options.quick else Plan()
    given = {name: getattr(options, name) for name in ("runs", "seconds", "backlog", "connections", "sessions")}
    return replace(base, **{name: value for name, value in given.items() if value is not None})


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    console = Console(stderr=True)
    makers: list[Maker] = [Peeklock]
    try:
        tools = load.build()
        if not options.no_peer:
            RabbitMQ.find_scripts()
            makers.append(RabbitMQ)
        bench = Bench(
            plan=plan(options),
            tools=tools,
            makers=makers,
            say=lambda text: console.print(text, style="dim"),
        )
        bench.measure(options.rows)
    except (load.LoadToolMissing, load.LoadFailed, ServerMissing, ServerFailed) as problem:
        console.print(str(problem), style="red", markup=False)
        return 2
    peer = None if options.no_peer else RabbitMQ.name
    results = verdicts(bench.samples, Peeklock.name, peer)
    wide = None if sys.stdout.isatty() else 150
    out = Console(width=wide)
    out.print(table(results, bench.plan, peer))
    for line in dict.fromkeys(bench.disturbed):
        out.print(f"disturbed: {line}", style="yellow", markup=False)
    if options.json:
        options.json.write_text(json.dumps(document(bench, results), indent=1))
    return 1 if options.check and any(verdict.met is False for verdict in results) else 0


def table(results: Sequence[Verdict], plan: Plan, peer: str | None) -> Table:
    memory_gib = psutil.virtual_memory().total / 2**30
    python = platform.python_version()
    machine = f"{psutil.cpu_count()} cores, {memory_gib:.0f} GiB, Linux {platform.release()}, Python {python}"
    sizes = f"{plan.backlog:,} messages of backlog, {plan.connections:,} idle connections"
    title = f"Medians of {plan.runs} \\[min..max]; {sizes}\n{machine}"
    made = Table(title=title)
    made.add_column("what")
    made.add_column("unit")
    made.add_column(Peeklock.name, justify="right")
    made.add_column(peer or "no peer", justify="right")
    made.add_column("ratio", justify="right")
    made.add_column("target")
    made.add_column("")
    group = ""
    for verdict in results:
        if group and verdict.row.group != group:
            made.add_section()
        group = verdict.row.group
        made.add_row(*cells(verdict))
    return made


def cells(verdict: Verdict) -> tuple[str, ...]:
    row = verdict.row
    target = " ".join(part for part in (str(row.target or ""), f"({row.note})" if row.note else "") if part)
    met = {True: "[green]pass[/]", False: "[red]FAIL[/]", None: "no peer" if row.target else ""}[verdict.met]
    return (
        row.label,
        row.unit,
        figure(verdict.ours, verdict.ours_range),
        figure(verdict.peer, verdict.peer_range),
        f"{verdict.ratio:.2f}" if verdict.ratio is not None else "",
        target,
        met,
    )


def figure(value: float | None, extent: tuple[float, float] | None) -> str:
    if value is None or extent is None:
        return ""
    if extent[0] == extent[1]:
        return number(value)
    return f"{number(value)} \\[{number(extent[0])}..{number(extent[1])}]"


def number(value: float) -> str:
    """Three significant digits below 100, whole numbers above."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def document(bench: Bench, results: Sequence[Verdict]) -> dict[str, object]:
    samples: dict[str, dict[str, list[float]]] = {}
    for (server, key), values in bench.samples.items():
        samples.setdefault(server, {})[key] = values
    judged = {
        verdict.row.key: {
            "ours": verdict.ours,
            "peer": verdict.peer,
            "ratio": verdict.ratio,
            "target": str(verdict.row.target or ""),
            "met": verdict.met,
        }
        for verdict in results
    }
    return {"plan": asdict(bench.plan), "samples": samples, "rows": judged, "disturbed": bench.disturbed}


if __name__ == "__main__":
    sys.exit(main())
