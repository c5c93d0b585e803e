"""Peeklock beside RabbitMQ's quorum queues, ActiveMQ Artemis and another commit of itself: a table with the targets."""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from bench import load
from bench.artemis import Artemis
from bench.document import Document, Run, document
from bench.measure import Bench, Maker
from bench.pipeline import spark
from bench.plan import MODES, Plan, Shape
from bench.rabbitmq import RabbitMQ
from bench.rows import BEFORE, GROUPS, ON_SPARK, PEEKLOCK, PIPELINE
from bench.servers import ROOT, PeeklockInOneProcess, ServerFailed, ServerMissing
from bench.table import table

PEERS: dict[str, tuple[Callable[[], object], Maker]] = {
    "rabbitmq": (RabbitMQ.find_scripts, RabbitMQ),
    "artemis": (Artemis.find, Artemis),
    "one-process": (lambda: None, PeeklockInOneProcess),
}
DEFAULT_PEERS = ("rabbitmq", "artemis")
GIVEN = (
    *("rounds", "seconds", "modes", "sizes", "shapes", "cross", "rates", "rate_seconds", "connections", "backlogs"),
    *("backlog_rounds", "sessions", "ids", "pipeline_messages", "audit_messages", "warm_up_rounds", "warm_up_seconds"),
)
PIPELINE_ROWS = "pipeline"  # all groups of rows of the pipeline
WIDE = 220  # columns where the output is no terminal


def listed(kind: Callable[[str], object]) -> Callable[[str], tuple[object, ...]]:
    """A parser of comma-separated values."""

    def parse(text: str) -> tuple[object, ...]:
        return tuple(kind(part) for part in text.split(","))

    parse.__name__ = f"comma-separated {kind.__name__}"
    return parse


def shape(text: str) -> Shape:
    links, _, queues = text.partition("x")
    made = Shape(int(links), int(queues))
    if not 1 <= made.queues <= 16 or made.links < made.queues:
        raise ValueError
    return made


def mode(text: str) -> str:
    if text not in MODES:
        raise ValueError
    return text


def rate(text: str) -> str:
    return text if text == "half" else str(int(text))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    add = parser.add_argument
    add(
        "--rows",
        default=",".join(GROUPS),
        help=f"comma-separated groups (default: all: {','.join(GROUPS)}); {PIPELINE_ROWS}: {','.join(PIPELINE)}",
    )
    add(
        "--peers",
        default=",".join(DEFAULT_PEERS),
        help=f"comma-separated of {','.join(PEERS)} (default: %(default)s), or none",
    )
    add("--before", type=Path, metavar="DIR", help="a checkout of another commit, measured beside this one")
    add("--rounds", type=int, help="rounds of which the median is taken (default 5)")
    add("--seconds", type=float, help="duration of a throughput run (default 5)")
    add("--modes", type=listed(mode), help="send, recv, both (default: all)")
    add("--sizes", type=listed(int), help="bytes of bodies (default 100,1024,10240,102400)")
    add("--shapes", type=listed(shape), help="links x queues (default 1x1,4x1,16x1,16x16)")
    add("--cross", action="store_true", default=None, help="every size in every shape")
    add("--rates", type=listed(rate), help="open loops: msg/s, or half of the maximum (default 2000,8000,half)")
    add("--rate-seconds", type=float, help="duration of an open loop (default 10)")
    add("--backlogs", type=listed(int), help="messages (default 1000000,10000000)")
    add("--backlog-rounds", type=int, help="rounds of the backlogs, which take minutes (default 1)")
    add("--connections", type=int, help="idle connections (default 5,000)")
    add("--sessions", type=int, help="sessions of 10 messages each (default 100,000)")
    add("--ids", type=int, help="in the window of duplicate detection (default 1,000,000)")
    add("--pipeline-messages", type=int, help="in each measurement of capture and Spark (default 300,000)")
    add("--audit-messages", type=int, help="of which the ledger of an audit tells (default 1,000,000)")
    add("--warm-up-rounds", type=int, help="runs of `both` before anything counts (default 2)")
    add("--warm-up-seconds", type=float, help="duration of each (default 8)")
    add("--quick", action="store_true", help="everything tiny: shows that the bench works, no more")
    add("--json", type=Path, metavar="FILE", help="write all figures to this file, anew after each round")
    add(
        "--page", type=Path, metavar="DIR", help="write DIR/performance.md and DIR/performance/*.png (needs matplotlib)"
    )
    add("--check", action="store_true", help="exit with 1 when a target is missed")
    options = parser.parse_args(argv)
    asked = options.rows.split(",")
    options.rows = [group for name in asked for group in (PIPELINE if name == PIPELINE_ROWS else (name,))]
    options.peers = [] if options.peers == "none" else options.peers.split(",")
    for given, known, what in ((options.rows, GROUPS, "rows"), (options.peers, PEERS, "peers")):
        if unknown := set(given) - set(known):
            parser.error(f"unknown {what} {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    if options.before is not None and not (options.before / "broker").is_dir():
        parser.error(f"--before {options.before}: no checkout of Peeklock")
    return options


def plan(options: argparse.Namespace) -> Plan:
    base = Plan.tiny() if options.quick else Plan()
    return replace(base, **{name: getattr(options, name) for name in GIVEN if getattr(options, name) is not None})


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    console = Console(stderr=True)
    began = datetime.now(UTC)
    try:
        write_page = page_writer(options.page)
        tools = load.build()
        for name in options.peers:
            PEERS[name][0]()
        if set(options.rows) & set(ON_SPARK):
            spark.find()
    except (load.LoadToolMissing, ServerMissing) as problem:
        console.print(str(problem), style="red", markup=False)
        return 2
    bench = Bench(
        plan=plan(options),
        tools=tools,
        ours={PEEKLOCK: ROOT} | ({BEFORE: options.before.resolve()} if options.before else {}),
        peers=[PEERS[name][1] for name in options.peers],
        say=lambda text: console.print(text, style="dim", markup=False),
    )
    with tempfile.TemporaryDirectory(prefix="peeklock-bench-") as scratch:
        servers = [maker(Path(scratch)) for maker in bench.makers]
    words = command(sys.argv[1:] if argv is None else argv)
    run = Run(f"make bench ARGS={shlex.quote(words)}", options.rows, began, servers)

    def made() -> Document:
        return document(bench, run, datetime.now(UTC))

    def save() -> None:
        if options.json:
            options.json.write_text(json.dumps(made(), indent=1) + "\n")

    bench.after_round = save
    try:
        bench.measure(options.rows)
    except ServerFailed as problem:
        bench.failed.append(str(problem))
    save()
    final = made()
    out = Console(width=None if sys.stdout.isatty() else WIDE)
    out.print(table(final))
    for kind in ("disturbed", "failed"):
        for line in final[kind]:
            out.print(f"{kind}: {line}", style="yellow", markup=False)
    write_page(final)
    if final["failed"]:
        return 2
    missed = any(target["met"] is False for row in final["rows"] for target in row["targets"])
    return 1 if options.check and missed else 0


def command(words: Sequence[str]) -> str:
    """What was asked for, without where the files of this machine are."""
    shown = {"--json": "FILE"}
    return " ".join(
        shown.get(before, "DIR") if word.startswith("/") else word for before, word in pairwise(["", *words])
    )


def page_writer(directory: Path | None) -> Callable[[Document], None]:
    """Raises ServerMissing if a page is wanted and its plots cannot be drawn here."""
    if directory is None:
        return lambda made: None
    try:
        from bench.page import write
    except ImportError as missing:
        raise ServerMissing(f"--page: {missing}; install it: pip install --group bench") from missing
    return lambda made: write([made], directory)


if __name__ == "__main__":
    sys.exit(main())
