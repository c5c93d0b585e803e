"""docs/performance.md with its plots, made of documents of the bench: no figure on it is typed by hand.

`python -m bench.page DIR FILE…` makes it anew of files that `--json` wrote. Of a group that several files have, the
last one counts.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import plots
from bench.document import Document, broker_total, notable
from bench.plan import Plan
from bench.recording import BUSY_CORES, CLIENT, CPU
from bench.rows import BEFORE, PEEKLOCK
from bench.table import figure, number, ratio

DOUBTFUL = 0.1  # the share of disturbed runs above which the page says so
PAGE, FOLDER, RESULTS = "performance.md", "performance", "results.json"
MET = {True: "yes", False: "**no**", None: "not judged"}
TITLES = {
    "throughput": "Throughput",
    "confirmed": "Completions that the broker confirms",
    "unpipelined": "One message at a time",
    "openloop": "Open loop",
    "idle": "Start and idle",
    "connections": "Idle connections",
    "backlog": "Backlog",
    "topics": "Topics and forwarding",
    "sessions": "Sessions",
    "duplicates": "Duplicate detection",
    "transactions": "Transactions",
    "partitioned": "Partitioned queue",
    "instructions": "Instructions",
    "journal": "What a journal costs",
    "capture": "Capture",
    "spark-reads": "Reads by Spark",
    "spark-latency": "Micro-batches of Spark",
    "spark-sink": "Messages from Spark",
    "audit": "Audit",
}
PLOTS = {
    "throughput": ("sizes", "links"),
    "unpipelined": ("one-at-a-time",),
    "openloop": ("open-loop",),
    "backlog": ("backlog",),
}
INTRODUCTION = """# Performance

Peeklock beside RabbitMQ and ActiveMQ Artemis. All brokers and the client share one machine: compare figures of one
table with one another, and nothing with figures from elsewhere. Each figure is the median of the rounds, with
`[least..greatest]`. *÷* is Peeklock's median over the other's: above 1 is good for rates, below 1 for times, memory and
costs. Plots show medians, and the range of the rounds as a line. [How it was measured](#how-it-was-measured) is at the
end.

More figures: [where targets are missed, and why](performance/limits.md), [how the throughput grows with
processors](performance/scaling.md), and [what large messages cost](performance/large-messages.md).
"""
PROVENANCE = """## How it was measured

Made by the bench, with no figure typed by hand; [bench/README.md](../bench/README.md) says how to repeat it. Brokers
take turns in each round; one whose turn it is not is stopped (SIGSTOP).
"""


def write(documents: Sequence[Document], directory: Path) -> None:
    """`directory`/performance.md, and the plots and all figures in `directory`/performance."""
    folder = directory / FOLDER
    kept = latest(documents)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    drawn: dict[str, Any] = {}
    for made in kept:
        drawn |= plots.drawings(made)
    for name, drawing in drawn.items():
        plots.save(drawing, folder / f"{name}.png")
    (folder / RESULTS).write_text(json.dumps(kept, indent=1) + "\n")
    (directory / PAGE).write_text(page(kept, set(drawn)))


def latest(documents: Sequence[Document]) -> list[Document]:
    """The documents, each without the groups that a later one has too."""
    taken: set[str] = set()
    kept: list[Document] = []
    for made in reversed(documents):
        groups = [group for group in made["groups"] if group not in taken]
        taken.update(groups)
        if groups:
            rows = [row for row in made["rows"] if row["group"] in groups]
            costs = [cost for cost in made["costs"] if cost_group(cost["cell"]) in groups]
            kept.insert(0, made | {"groups": groups, "rows": rows, "costs": costs})
    return kept


def cost_group(cell: str) -> str:
    name = cell.partition("-")[0]
    if name == "spark":
        return "spark-sink" if cell.startswith("spark-sink") else "spark-reads"
    return name if name in ("unpipelined", "openloop", "partitioned", "journal") else "throughput"


def page(documents: Sequence[Document], drawn: set[str]) -> str:
    """The text of the page: figures first. Of an earlier version that ran beside Peeklock, it has nothing."""
    parts = [INTRODUCTION]
    for group, title in TITLES.items():
        for made in documents:
            if rows := [row for row in made["rows"] if row["group"] == group]:
                parts.append(f"## {title}\n")
                parts += [_plot(name) for name in PLOTS.get(group, ()) if name in drawn]
                parts.append(_rows(rows, _shown(made)))
                parts += _caveats(made)
    parts += _costs(documents, drawn)
    parts += [PROVENANCE, _durable(documents)]
    parts += (part for made in documents for part in _how(made))
    return "\n".join(parts)


def _shown(made: Document) -> list[str]:
    return [server for server in made["servers"] if server != BEFORE]


def _caveats(made: Document) -> Iterator[str]:
    """What a reader of the figures must know."""
    plan, usual = made["plan"], Plan()
    if plan["rounds"] < usual.rounds or plan["seconds"] < usual.seconds:
        yield (
            f"**This was a short run**: the targets are for at least {usual.rounds} rounds of {usual.seconds:g} s,"
            " with nobody else on the machine.\n"
        )
    if len(made["disturbed"]) > made["runs"] * DOUBTFUL:
        yield f"**Rates and latencies are doubtful**: {_disturbed(made, 'in')}\n"


def _disturbed(made: Document, first: str) -> str:
    runs = f"{len(made['disturbed'])} of {made['runs']} runs"
    return f"{first} {runs}, others used more than {BUSY_CORES} cores of the machine; `{FOLDER}/{RESULTS}` names them."


def _durable(documents: Sequence[Document]) -> str:
    """When a message is confirmed; of each broker as in the last document that has it."""
    texts = {name: of["durable"] for made in documents for name, of in made["servers"].items() if name != BEFORE}
    return _table(("", "where a message is when its sender is told that it was accepted"), iter(texts.items()))


def _how(made: Document) -> Iterator[str]:
    machine, plan = made["machine"], made["plan"]
    titles = [TITLES[group] for group in TITLES if group in made["groups"]]
    yield f"### {', '.join(titles)}\n"
    yield f"```sh\n{made['command']}\n```\n"
    versions = "; ".join(f"{name}: {made['servers'][name]['version']}" for name in _shown(made))
    yield (
        f"{made['began'][:10]}, {made['minutes']:g} minutes. {versions}.\n"
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['file_system']},"
        f" Linux {machine['linux']}, Python {machine['python']}. Rounds: {plan['rounds']}, of backlogs"
        f" {plan['backlog_rounds']}; {plan['seconds']:g} s for each run, {plan['rate_seconds']:g} s for each open loop."
        f" Warmed up with {plan['warm_up_rounds']} x {plan['warm_up_seconds']:g} s of sending and receiving at once.\n"
    )
    if made["disturbed"]:
        yield f"{_disturbed(made, 'In')}\n"
    if made["failed"]:
        yield "Failed, and left out:\n\n" + "".join(f"- {' '.join(line.split())}\n" for line in made["failed"])


def _plot(name: str) -> str:
    return f"![{name}]({FOLDER}/{name}.png)\n"


def _rows(rows: Sequence[Mapping[str, Any]], servers: Sequence[str]) -> str:
    shown = [server for server in servers if any(server in row["figures"] for row in rows)]
    others = [server for server in shown if any(server in row["ratios"] for row in rows)]
    targets = [[target for target in row["targets"] if not target["text"].endswith(f" x {BEFORE}")] for row in rows]
    judged = any(targets)
    head = ("", "unit", *shown, *(f"÷ {server}" for server in others), *(("target", "met") if judged else ()))

    def cells(row: Mapping[str, Any], targets: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        verdict = (
            "<br>".join(target["text"] for target in targets),
            "<br>".join(MET[target["met"]] for target in targets),
        )
        return (
            label(row["label"]),
            row["unit"],
            *(figure(row["figures"].get(server)) for server in shown),
            *(ratio(row["ratios"], server) for server in others),
            *(verdict if judged else ()),
        )

    return _table(head, map(cells, rows, targets))


def label(text: str) -> str:
    """Markdown drops the blanks that indent what belongs to the row above."""
    stripped = text.lstrip()
    return stripped if stripped == text else f"… {stripped}"


def _costs(documents: Sequence[Document], drawn: set[str]) -> Iterator[str]:
    if not any(made["costs"] for made in documents):
        return
    yield "## Cost of a message, by process\n"
    yield "In µs of CPU: all processes of the broker together, and in brackets each one. The client's is beside them.\n"
    if "cpu" in drawn:
        yield _plot("cpu")
    for made in documents:
        if made["costs"]:
            yield _cost_table(made, CPU, number)
            counted = [cost for cost in made["costs"] if cost["kind"] != CPU]
            if counted:
                yield "User instructions:\n"
                yield _cost_table(made, counted[0]["kind"], lambda value: f"{value:,.0f}")
    for reason in dict.fromkeys(made["perf_missing"] for made in documents if made["costs"] and made["perf_missing"]):
        yield f"User instructions were not counted: {reason}.\n"


def _cost_table(made: Document, kind: str, shown: Callable[[float], str]) -> str:
    servers = _shown(made)

    def cell(by_role: Mapping[str, float] | None) -> str:
        if by_role is None:
            return ""
        roles = notable(by_role)
        parts = f" ({', '.join(f'{role} {shown(cost)}' for role, cost in roles.items())})" if len(roles) > 1 else ""
        return shown(broker_total(by_role)) + parts

    def client(by_server: Mapping[str, Mapping[str, float]]) -> str:
        return shown(by_server[PEEKLOCK][CLIENT]) if CLIENT in by_server.get(PEEKLOCK, {}) else ""

    costs = [cost for cost in made["costs"] if cost["kind"] == kind]
    rows = (
        (cost["label"], *(cell(cost["by_server"].get(name)) for name in servers), client(cost["by_server"]))
        for cost in costs
    )
    return _table(("", *servers, f"client, with {PEEKLOCK}"), rows)


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.page", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("files", type=Path, nargs="+", help=f"of one run each, or {RESULTS} of a page")
    options = parser.parse_args(argv)
    read = [json.loads(path.read_text()) for path in options.files]
    write([made for each in read for made in (each if isinstance(each, list) else [each])], options.directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
