"""The pipeline from end to end, with faults that it must find: `make pipeline-demo`.

A broker of its own gets a varied load and is killed in the middle. Its journal is captured, and its queues are browsed.
Then the flow audit must say that each message is accounted for. After that, faults are planted in the broker's stores
and in the captured ledger, and the audit must name exactly these. Everything is done with the commands that users have.
"""

import argparse
import asyncio
import contextlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow.parquet as pq

from tests.brokers import Broker
from tests.pipeline import planting
from tests.pipeline.planting import GRACE_SECONDS, Fault, Ledger
from tests.pipeline.traffic import CONFIG, Traffic
from tests.processes import REPOSITORY

WORKERS: Final = 2
DEFAULT_OUTPUT: Final = REPOSITORY / "build" / "pipeline-demo"
JOBS: Final = ("dead-letters", "latency", "usage")
MOVE_FAULTS: Final = ("not_arrived", "arrived_twice", "no_origin")
Say = Callable[[str], None]


class Failed(Exception):
    """A command of the demo did not do what it should; the text has what it said."""


class Load(NamedTuple):
    """`rounds` before and while the broker is killed, with about so many messages in each part of a round."""

    rounds: int
    size: int


SHORT: Final = Load(2, 24)
FULL: Final = Load(8, 120)


class Commands:
    """Runs what a user would: `peeklock ...`, and the browsing of queues by Spark."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def run(self, *arguments: str) -> str:
        """What it wrote to standard output. Raises Failed."""
        with self._log.open("ab") as log:
            log.write(f"\n$ {' '.join(arguments)}\n".encode())
            log.flush()
            done = subprocess.run(
                arguments, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, check=False
            )
            log.write(done.stdout)
        if done.returncode != 0:
            said = self._log.read_text(errors="replace")[-3000:]
            raise Failed(f"{' '.join(arguments)}: exit code {done.returncode}\n{said}")
        return done.stdout.decode().strip()

    def peeklock(self, *arguments: str) -> str:
        return self.run(sys.executable, "-m", "broker.cli", *arguments)

    def browse(self, secret: Path, output: Path) -> None:
        self.run(sys.executable, "-m", "tests.pipeline.browsing", "--secret", str(secret), "--output", str(output))


class Played(NamedTuple):
    """What `play` leaves: a ledger and what is present, from before any fault was planted, and the same with faults."""

    sent: int
    interrupted: int
    clean: Path
    faulty: Path
    planted: list[Fault]


def play(work: Path, seed: int, load: Load, commands: Commands, say: Say) -> Played:
    """All but the jobs. `work` is an empty directory. Raises Failed, and what the broker raises."""
    chance = random.Random(seed)
    with Broker(work, CONFIG, workers=WORKERS) as broker:
        secret = work / "secret"
        secret.write_text(broker.connection_string)
        say(f"a broker with 4 partitions is up, at port {broker.amqp_port}")
        traffic = Traffic(broker, seed, load.size)
        asyncio.run(_under_kills(broker, traffic, load.rounds, say))
        say(f"the load has ended: {traffic.sent:,} messages accepted, {traffic.interrupted} of its steps cut off")
        clean, faulty = work / "clean", work / "faulty"
        _capture(broker, commands, clean / "ledger")
        commands.browse(secret, clean / "present")
        say("the journal is captured, the queues are browsed")
        broker.stop()
        faulty.mkdir()
        shutil.copytree(clean / "ledger", faulty / "ledger")
        ledger = Ledger(str(clean / "ledger"))
        planted = planting.plant_in_stores(broker.data_dir, ledger, chance)
        broker.start()
        _capture(broker, commands, faulty / "ledger")
        commands.browse(secret, faulty / "present")
        ledger = Ledger(str(faulty / "ledger"))
        planted += planting.plant_in_ledger(ledger, planted, chance)
        say(f"{len(planted)} faults are planted in the stores and in the ledger, by seed {seed}:")
        for fault in planted:
            say(f"    {fault}")
    return Played(traffic.sent, traffic.interrupted, clean, faulty, planted)


async def _under_kills(broker: Broker, traffic: Traffic, rounds: int, say: Say) -> None:
    await traffic.run(rounds)
    running = asyncio.create_task(traffic.run(rounds))
    half = asyncio.create_task(traffic.until(traffic.done + rounds * len(traffic.parts()) // 2))
    await asyncio.wait({running, half}, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.to_thread(broker.kill)
    say(f"kill -9 of the broker, after {traffic.sent:,} messages")
    await asyncio.to_thread(broker.start)
    await running
    await traffic.run(1)
    await traffic.leave_some()
    await traffic.settle_down()


def _capture(broker: Broker, commands: Commands, url: Path) -> None:
    endpoint = f"http://localhost:{broker.http_port}"
    options = ("--once", "--http-endpoint", endpoint, "--connection-string", broker.connection_string)
    rows = -1
    while rows != 0:  # the journal's process is a moment behind
        rows = int(commands.peeklock("capture", str(url), *options).split()[0])


def audit(commands: Commands, of: Path, output: Path) -> str:
    """Run the audit as a user does; returns its verdict."""
    options = ("--ledger", str(of / "ledger"), "--present", str(of / "present"), "--output", str(output))
    return commands.peeklock("jobs", "run", "audit", *options, "--whole", "--grace", str(GRACE_SECONDS))


def found_in(output: Path) -> list[Fault]:
    """The faults that an audit has named in its tables, also gaps of the ledger."""
    found = [
        Fault(row["verdict"], f"{row['entity']} ({row['subQueue']})", row["sequenceNumber"], row["partition"])
        for row in _rows(output / "faults")
    ]
    found += [
        Fault(row["verdict"], f"{row['entity']} ({row['subQueue']})", row["sequenceNumber"], row["partition"])
        for row in _rows(output / "moves")
        if row["verdict"] in MOVE_FAULTS
    ]
    return found + [Fault(row["kind"], "", row["fromOffset"], row["partition"]) for row in _rows(output / "problems")]


def _rows(table: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(table).to_pylist()
    return rows


def differences(planted: Sequence[Fault], found: Sequence[Fault]) -> list[str]:
    """Sentences; none if the audit has named what was planted, and nothing else."""

    def key(fault: Fault) -> Any:
        # Partitions are only certain in logs; a row that is there twice is found within 64 offsets.
        number = fault.number // 64 if fault.verdict == "repeated" else fault.number
        return fault.verdict, fault.queue.lower(), number, None if fault.queue else fault.partition

    named, wanted = {key(fault): fault for fault in found}, {key(fault): fault for fault in planted}
    missed = [f"planted and not found: {wanted[each]}" for each in wanted if each not in named]
    missed += [f"found and not planted: {named[each]}" for each in named if each not in wanted]
    if len(found) != len(named):
        missed.append(f"{len(found) - len(named)} faults are named twice")
    return missed


def run(work: Path, output: Path, seed: int, load: Load, commands: Commands, say: Say) -> list[str]:
    """Play, run all jobs, and compare. Returns what differs. Raises Failed, and what the broker raises."""
    played = play(work, seed, load, commands, say)
    verdict = audit(commands, played.clean, output / "audit-before")
    say(f"flow audit before faults were planted: {verdict}")
    found = [f"before faults were planted: {fault}" for fault in found_in(output / "audit-before")]
    verdict = audit(commands, played.faulty, output / "audit")
    say(f"flow audit with planted faults: {verdict}")
    found += differences(played.planted, found_in(output / "audit"))
    for job in JOBS:
        options = ("--ledger", str(played.clean / "ledger"), "--output", str(output / job))
        said = commands.peeklock("jobs", "run", job, *options)
        say(f"{job}: {said.splitlines()[-1] if said else 'done'}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="make pipeline-demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="which faults are planted, and what the load does")
    parser.add_argument("--short", action="store_true", help="a tenth of the load")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="where the reports are; replaced")
    options = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    output = options.output.absolute()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    work = Path(tempfile.mkdtemp(prefix="peeklock-demo-"))
    try:
        commands = Commands(output / "commands.log")
        wrong = run(work, output, options.seed, SHORT if options.short else FULL, commands, say)
    except KeyboardInterrupt:
        print("\nended by Ctrl-C; nothing of the demo runs any more", file=sys.stderr)
        return 130
    except Exception as error:
        with contextlib.suppress(OSError):
            shutil.copy(work / "broker.log", output)
        print(f"the demo failed: {error}\nlogs are in {output}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for text in wrong:
        say(text)
    say("the audit has named other faults than were planted" if wrong else "the audit named exactly the planted faults")
    print("\nReports:")
    for report in sorted(output.glob("*/report.html")):
        print(f"    {report}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
