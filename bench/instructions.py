"""User instructions per message of all of Peeklock's processes, counted by Valgrind's callgrind.

Unlike seconds they hardly depend on the machine and on who else uses it, so that a test can hold them to a budget:
`budget.json` beside this file has the recorded figures, `python -m bench.instructions --update` records them anew. What
the kernel does, and waiting, is not counted.
"""

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from bench import load
from bench.plan import KIB
from bench.processes import role
from bench.servers import ROOT, Peeklock, ServerMissing

BUDGET = Path(__file__).parent / "budget.json"
MARGIN = 0.15  # over the recorded figure: builds of Python differ by up to 8 %
VALGRIND_START_S = 180.0
MAP_SIZE = 256 << 20  # Valgrind has little address space to give
SUMMARY = re.compile(r"^summary: (\d+)", re.MULTILINE)
COMMAND = re.compile(r"^cmd: +(.*)", re.MULTILINE)


@dataclass(frozen=True)
class Work:
    """What is counted: `messages` of 1 KiB in one run of the load tool, and twice as many in another.

    The difference of the two is the cost of the messages: what a connection and a link cost drops out. `workers` is the
    broker's setting.
    """

    name: str
    mode: str
    messages: int
    options: tuple[str, ...] = ()
    workers: int = 1


# After this time without work, the last checkpoint has begun. What was sent is received from the tables, and the
# checkpoints of a run count for it: else it would depend on the time.
CHECKPOINT_S = 3.5
ONE_AT_A_TIME = Work("send one at a time", "send", 200, ("--window", "1"))
EXPIRING = Work("send with a time to live", "send", 1000, ("--ttl", "86400000"))
WORKS = (ONE_AT_A_TIME, Work("send", "send", 1000), Work("receive", "recv", 1000), EXPIRING)
IN_ONE_PROCESS = tuple(replace(work, name=f"{work.name}, in one process", workers=0) for work in WORKS[:3])
PER_ROLE = Mapping[str, int]
"""Process (gateway, worker, …) → user instructions per message."""


class Counted(Peeklock):
    """Peeklock under callgrind, which counts only while it is told to."""

    start_timeout_s = VALGRIND_START_S

    def __init__(self, directory: Path, root: Path, workers: int) -> None:
        super().__init__(directory, root)
        self._workers = workers

    def _command(self) -> tuple[list[str], dict[str, str]]:
        command, environment = super()._command()
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--trace-children=yes", self._prefix]
        valgrind += [f"--callgrind-out-file={self.directory}/counts.%p", f"--log-file={self.directory}/valgrind.%p"]
        # Without the module that makes copies of its process: callgrind knows each process by its command.
        begin = command.index("-m")
        command[begin : begin + 2] = ["-c", "from broker.cli.commands import main; main()"]
        # Hashes decide about collisions, and so about instructions.
        return [*valgrind, *command], environment | {"PYTHONHASHSEED": "0"}

    @property
    def _prefix(self) -> str:
        return f"--vgdb-prefix={self.directory}/vgdb"

    def _settings(self) -> list[str]:
        # How often a process polls depends on the machine. Older commits do not poll.
        polls = "idle_poll_us" in (self.root / "broker" / "settings" / "config.py").read_text()
        return [
            f"workers = {self._workers}",
            "partitions = 1",
            "worker_stall_timeout_ms = 600000",
            *(["idle_poll_us = 0"] if polls else []),
            f"[store]\nmap_size_bytes = {MAP_SIZE}",
        ]

    def control(self, *options: str) -> None:
        """Tell all processes under callgrind."""
        done = subprocess.run(["callgrind_control", self._prefix, *options], capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise ServerMissing(f"callgrind_control {' '.join(options)}: {done.stdout}{done.stderr}")

    def counts(self, number: int) -> dict[str, int]:
        """What each role executed between dump `number - 1` and dump `number`, which count from 1."""
        counted: dict[str, int] = {}
        for path in self.directory.glob(f"counts.*.{number}"):
            text = path.read_text()
            command, instructions = COMMAND.search(text), SUMMARY.search(text)
            assert command is not None
            assert instructions is not None
            words = command[1].split()
            name = "supervisor" if "serve" in words else role(words)
            counted[name] = counted.get(name, 0) + int(instructions[1])
        return counted


def reason_missing() -> str | None:
    """Why nothing can be counted here, or None."""
    for tool in ("valgrind", "callgrind_control"):
        if shutil.which(tool) is None:
            return f"{tool} not found: install valgrind (Debian, Ubuntu: apt-get install valgrind)"
    return None


def measure(
    tools: load.Tools, root: Path = ROOT, works: Sequence[Work] = WORKS, brokers_at_once: int = 1
) -> dict[str, PER_ROLE]:
    """By the names of the works. Raises ServerMissing, ServerFailed, LoadFailed.

    So many brokers run at the same time. With more than one, each message takes longer and so has more of what the
    clock starts: one at a time costs 2 % more instructions.
    """
    if reason := reason_missing():
        raise ServerMissing(reason)
    counted: dict[str, PER_ROLE] = {}
    by_workers = groupby(works, lambda work: work.workers)
    with ThreadPoolExecutor(brokers_at_once) as pool:
        measuring = [pool.submit(_measure, tools, root, workers, list(of_one)) for workers, of_one in by_workers]
        for each in measuring:
            counted |= each.result()
    return counted


def _measure(tools: load.Tools, root: Path, workers: int, works: Sequence[Work]) -> dict[str, PER_ROLE]:
    with _counted(root, workers) as server:
        server.start()
        for mode in ("send", "recv"):  # what is done once, at the first message, is no message's
            _run(tools, server, mode, 300)
        server.control("-i", "on")
        dumps = _Dumps(server)
        return {work.name: _difference(tools, server, work, dumps) for work in works}


class _Dumps:
    """The dumps taken so far; each one sets the counters to zero."""

    def __init__(self, server: Counted) -> None:
        self._server = server
        self._taken = 0

    def take(self) -> dict[str, int]:
        self._server.control("--dump")
        self._taken += 1
        return self._server.counts(self._taken)


def _difference(tools: load.Tools, server: Counted, work: Work, dumps: _Dumps) -> PER_ROLE:
    counted = []
    for messages in (work.messages, 2 * work.messages):
        if work.mode == "recv":
            _run(tools, server, "send", messages)
        _checkpointed(server)
        dumps.take()
        _run(tools, server, work.mode, messages, *work.options)
        _checkpointed(server)
        counted.append(dumps.take())
    fewer, more = counted
    return {name: round((count - fewer.get(name, 0)) / work.messages) for name, count in sorted(more.items())}


def _checkpointed(server: Counted) -> None:
    """Wait until all changes are in the tables."""
    time.sleep(CHECKPOINT_S)
    server.settle(60)


def _run(tools: load.Tools, server: Counted, mode: str, messages: int, *options: str) -> None:
    count = ("-n", str(messages), "--size", str(KIB), "--idle", "60")
    load.run(tools.load, mode, server.endpoint, server.address(1), *count, *options)


@contextmanager
def _counted(root: Path, workers: int) -> Iterator[Counted]:
    with tempfile.TemporaryDirectory(prefix="peeklock-instructions-") as scratch:
        server = Counted(Path(scratch), root, workers)
        try:
            yield server
            server.stop()
        finally:
            server.close()


def total(counted: PER_ROLE) -> int:
    """Of all processes together."""
    return sum(counted.values())


# --- the budget


def budget() -> dict[str, dict[str, int]]:
    """The recorded figures, as `measure` returned them."""
    recorded: dict[str, dict[str, int]] = json.loads(BUDGET.read_text())["instructions_per_message"]
    return recorded


def recorded_python() -> str:
    """The version of Python whose figures are recorded: another one's interpreter executes other instructions."""
    return str(json.loads(BUDGET.read_text())["python"])


def this_python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def exceeded(counted: Mapping[str, PER_ROLE], allowed: Mapping[str, PER_ROLE]) -> list[str]:
    """A sentence for each work whose processes together are above what was recorded, plus the margin."""
    found = []
    for name, recorded in allowed.items():
        limit = round(total(recorded) * (1 + MARGIN))
        if total(counted[name]) > limit:
            found.append(
                f"{name}: {total(counted[name]):,} user instructions per message, the limit is {limit:,}"
                f" ({MARGIN:.0%} over what was recorded): {_parts(counted[name])}; recorded: {_parts(recorded)}"
            )
    return found


def _parts(counted: PER_ROLE) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counted.items()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.instructions", description=__doc__)
    parser.add_argument("--update", action="store_true", help=f"record what is counted in {BUDGET.name}")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to count (default: this one)")
    options = parser.parse_args(argv)
    try:
        counted = measure(load.build(), options.root.resolve(), (*WORKS, *IN_ONE_PROCESS))
    except (ServerMissing, load.LoadToolMissing) as missing:
        print(missing, file=sys.stderr)
        return 2
    for name, per_role in counted.items():
        print(f"{name}: {total(per_role):,} ({_parts(per_role)})")
    if options.update:
        recorded = {"python": this_python(), "instructions_per_message": counted}
        BUDGET.write_text(json.dumps(recorded, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
