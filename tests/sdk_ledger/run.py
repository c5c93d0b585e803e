"""Kills each process of a broker in turn under the .NET SDK's senders and processors: `python -m tests.sdk_ledger.run`.

The broker has partitions on two workers, two gateways and a journal. `judge.py` says what must be. Needs the .NET SDK:
`python tests/interop/sdks.py dotnet`.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.brokers import Broker
from tests.end_to_end.health import is_ready, metrics
from tests.interop.sdks import LEDGER
from tests.patience import eventually
from tests.sdk_ledger.judge import Entity, Judge, Outage, Report

LOCK_S = 15.0
# The delivery limit is out of reach, or messages that kills interrupt would be dead-lettered.
OF_QUEUE = f"max_delivery_count = 2000000000\nlock_duration_ms = {LOCK_S * 1000:.0f}\n"
CONFIG = f"""
partitions = 4
gateways = 2

[journal]
mode = "events"

[[queues]]
name = "plain"
{OF_QUEUE}
[[queues]]
name = "partitioned"
enable_partitioning = true
{OF_QUEUE}
[[queues]]
name = "sessions"
requires_session = true
requires_duplicate_detection = true
{OF_QUEUE}
[[topics]]
name = "topic"

[[topics.subscriptions]]
name = "all"
{OF_QUEUE}"""
ENTITIES = {
    "plain": Entity(LOCK_S),
    "partitioned": Entity(LOCK_S),
    "topic": Entity(LOCK_S),
    "sessions": Entity(LOCK_S, has_sessions=True, detects_duplicates=True),
}
OUTCOMES = ("complete", "abandon", "dead-letter")
WORKERS = 2
ALL, SUPERVISOR = "all", "supervisor"
# Processes by what is in their command, and whether locks end with them: those of a worker are in its memory, and those
# of a gateway's links may be freed when it is gone.
FREES = {
    "broker.gateway": True,
    "broker.worker": True,
    "storage.log.checkpointer": False,
    "broker.observer": False,
    "broker.journal": False,
}
LONGEST_GAP_S = 3.0
QUIET_S = 5.0
# For one step of the program or the broker, on a machine that may have much else to do.
STEP_S = 300.0


@dataclass
class Program:
    """The .NET program and what it has written into the ledger."""

    directory: Path
    connection_string: str
    seed: int
    _read: int = field(default=0, init=False)
    lines: list[dict[str, Any]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._ledger, self._errors = self.directory / "ledger.jsonl", self.directory / "program.err"
        with self._ledger.open("wb") as ledger, self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*map(str, LEDGER.command), self.connection_string, str(self.seed)],
                stdin=subprocess.PIPE,
                stdout=ledger,
                stderr=errors,
            )

    def command(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())
        self.process.stdin.flush()

    def read(self) -> None:
        """Take the lines that it has written meanwhile."""
        with self._ledger.open("rb") as ledger:
            ledger.seek(self._read)
            whole = ledger.read().rpartition(b"\n")[0]
        if whole:
            self._read += len(whole) + 1
            self.lines += map(json.loads, whole.split(b"\n"))

    def wait(self, what: str, condition: Callable[[], bool], timeout_s: float = STEP_S) -> None:
        """Raises TimeoutError, also when the program has ended before."""
        until = time.monotonic() + timeout_s
        while not condition():
            is_last = time.monotonic() > until or self.process.poll() is not None
            time.sleep(0.02)
            self.read()
            if is_last and not condition():
                ended = "" if self.process.poll() is None else f", the program ended with {self.process.returncode}"
                raise TimeoutError(f"not in {timeout_s:.0f} s: {what}{ended}\n{self._errors.read_text()[-4000:]}")

    def has_said(self, what: str) -> Callable[[], bool]:
        return lambda: any(line["what"] == what for line in reversed(self.lines))

    def works_since(self, at: float, what: str) -> bool:
        """On each entity a message was `sent`, or `settled`, by a call that began later."""
        done = set()
        for line in reversed(self.lines):
            if line.get("at", at) < at:
                break
            if line["what"] == what and not line["error"] and line["at"] - line["took"] > at:
                done.add(line["entity"])
        return done == set(ENTITIES)

    def is_quiet(self) -> bool:
        """It has received nothing for a time; what the broker says of counts may be that old."""
        last = next((line["at"] for line in reversed(self.lines) if line["what"] == "received"), 0.0)
        return time.time() - float(last) > QUIET_S

    def has_done_all(self) -> bool:
        confirmed = (line for line in self.lines if line["what"] == "settled" and not line["error"])
        return len({(line["entity"], line["outcome"]) for line in confirmed}) == len(OUTCOMES) * len(ENTITIES)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()  # closes its input


@contextmanager
def running(directory: Path, broker: Broker, seed: int) -> Iterator[Program]:
    program = Program(directory, broker.connection_string, seed)
    try:
        yield program
    finally:
        program.kill()


def run(
    directory: Path,
    kills: int,
    *,
    seed: int = 0,
    victims: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Kill something so many times, drain, and judge. `victims` are taken in turn; without any, all that there are.

    Raises BrokerFailed or TimeoutError if the broker, or the program on it, does not go on or come to its end.
    """
    chance = random.Random(seed)
    outages: list[Outage] = []
    broker = Broker(directory, CONFIG, workers=WORKERS)
    broker.start()
    try:
        with running(directory, broker, seed) as program:
            program.wait("it has begun", lambda: program.works_since(0.0, "settled"))
            victims = victims or everything(broker)
            say(f"victims in turn: {', '.join(victims)}")
            for number in range(kills):
                time.sleep(chance.uniform(0.2, LONGEST_GAP_S))
                outages.append(outage(program, broker, victims[number % len(victims)]))
                say(f"kill {number + 1} of {kills}, {outages[-1]}")
            program.wait("each outcome was confirmed on each entity", program.has_done_all)
            program.command("end sending")
            program.wait("all sends are answered", program.has_said("sending ended"))
            program.wait("the queues are empty", lambda: program.is_quiet() and has_no(broker, "active_messages"))
            program.command("end")
            program.wait("the program has ended", program.has_said("ended"))
        eventually(lambda: has_no(broker, "messages"), "the broker counts no message")
        broker.stop()
    except TimeoutError as timeout:
        raise TimeoutError(f"{timeout}\n{broker.log()}") from None
    finally:
        broker.kill()
    report = Judge(ENTITIES, outages).judge(program.lines)
    if "Traceback" in (log := broker.log_file.read_text(errors="replace")):
        report.breaches.append(log[log.index("Traceback") - 500 :][:3000])
    return report


def outage(program: Program, broker: Broker, victim: str) -> Outage:
    """Kill it, and wait until all works. The outage is over for the judge when all entities take messages again.

    Receivers may need longer, as those of sessions do: see docs/dotnet.md.
    """
    began = time.time()
    kill(broker, victim)
    if victim in (ALL, SUPERVISOR):
        broker.start()
    there = time.time()
    program.wait(f"sends after {victim} was killed", lambda: is_ready(broker) and program.works_since(there, "sent"))
    ended = time.time()
    program.wait(f"settlements after {victim} was killed", lambda: program.works_since(there, "settled"))
    return Outage(victim, began, ended, FREES.get(victim, True))


def everything(broker: Broker) -> list[str]:
    """The whole broker, its supervisor, and each process below it by its module, as often as it is there."""
    modules = [module for module in FREES for _ in broker.running_as(module)]
    others = [process for process in broker.processes()[1:] if process not in broker.running_as(*FREES)]
    assert not others, f"what are these? {others}"
    assert set(modules) == set(FREES), f"not all are there: {modules}"
    return [ALL, SUPERVISOR, *modules]


def kill(broker: Broker, victim: str) -> None:
    """SIGKILL, and return when it is gone: of several of one kind, the one that is there for the longest time."""
    if victim == ALL:
        broker.kill()
    elif victim == SUPERVISOR:
        supervisor, *below = broker.processes()
        supervisor.kill()
        _, alive = psutil.wait_procs(below, timeout=STEP_S)
        broker.kill()
        assert not alive, f"still running without their supervisor: {alive}"
    else:
        oldest = min(broker.running_as(victim), key=lambda process: float(process.create_time()))
        oldest.kill()
        psutil.wait_procs([oldest], timeout=STEP_S)


def has_no(broker: Broker, kind: str) -> bool:
    """Of all entities together; False while it does not say."""
    values = [value for labels, value in metrics(broker).items() if labels[0] == f"peeklock_{kind}"]
    return bool(values) and not any(values)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sdk_ledger.run", description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="repeats moments (default: a new one)")
    parser.add_argument("--victim", choices=[ALL, SUPERVISOR, *FREES], help="kill only these (default: each in turn)")
    parser.add_argument("--keep", type=Path, help="a folder for the ledger and the broker's log")
    options = parser.parse_args()
    LEDGER.toolchain.ensure()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**31)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="peeklock-sdk-ledger-") as temporary:
        directory = options.keep or Path(temporary)
        victims = [options.victim] if options.victim else []
        report = run(directory, options.kills, seed=seed, victims=victims, say=lambda text: print(text, flush=True))
    print(report)
    return 1 if report.breaches or report.long_calls else 0


if __name__ == "__main__":
    sys.exit(main())
