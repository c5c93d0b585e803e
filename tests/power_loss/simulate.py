"""Loses the power at many moments of a trace, and checks what is then found: `python -m tests.power_loss.simulate`.

The trace is read once. At each chosen moment a process is forked, which writes an image of what may be left, opens it
as a broker does, and compares it with the books. Its choices follow from the seed and the number of the loss. In some
losses the power is lost again while the image is being recovered: the process traces its own recovery, for which it
runs under the shim itself.
"""

import argparse
import ctypes
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from broker.settings.config import Settings
from broker.settings.sources import load
from tests.brokers import REPOSITORY
from tests.power_loss.books import Books, Found
from tests.power_loss.disk import Deaf, Disk, Metadata
from tests.power_loss.found import look, look_at_backup, read_in_this_process
from tests.power_loss.record import CONFIG_FILE, TRACE_FILE
from tests.power_loss.trace import Kind, Trace, mark_of
from tests.power_loss.workload import PARTITIONS, WORKERS

LONGEST_CHECK_S = 120
MOST_NAMED = 20  # breaches of one loss
AGAIN = 3  # losses during one recovery
IDS_SENT_AGAIN = 3
# Shares of the losses
AS_BROKERS_DO = 0.02  # after which stores are read in processes of their own, as a broker reads them
BACKED_UP = 0.05  # after which the directory is verified and backed up before a broker opens it
MEMORY = Path("/dev/shm")


@dataclass
class Report:
    """`breaches`: loss number and text. `messages`: that had to be there, in all losses together; `missing` of them.

    Where a directory cannot be opened, all of them are missing.
    """

    losses: int = 0
    again: int = 0
    busy: int = 0  # losses while a write or a sync was under way
    messages: int = 0
    missing: int = 0
    breaches: list[tuple[int, str]] = field(default_factory=list)
    acknowledged: int = 0
    seconds: float = 0.0

    def add(self, other: "Report") -> None:
        self.losses += other.losses
        self.again += other.again
        self.busy += other.busy
        self.messages += other.messages
        self.missing += other.missing
        self.breaches += other.breaches
        self.acknowledged += other.acknowledged
        self.seconds += other.seconds

    def __str__(self) -> str:
        bad = len({loss for loss, _ in self.breaches})
        return (
            f"{self.losses:,} losses of power, {self.again:,} of them during a recovery, {self.busy:,} while a write "
            f"or a sync was under way; {self.acknowledged:,} operations acknowledged; {self.messages:,} messages "
            f"looked for, {self.missing:,} missing; {bad:,} losses with breaches; {self.seconds:.0f} s"
        )


@dataclass(frozen=True)
class Plan:
    """`again`: share of the losses in which the power is lost again, AGAIN times. `only`: the numbers of losses.

    `deaf` and `early` make the disk or the broker a bad one, for tests of the simulation: with `early`, everything
    counts as acknowledged when it was asked for.
    """

    losses: int
    seed: int
    jobs: int = 2
    again: float = 0.0
    deaf: tuple[Deaf, ...] = ()
    early: bool = False
    only: tuple[int, ...] = ()


def run(recorded: Path, shim: Path, plan: Plan) -> Report:
    """Simulate in a process of its own, under the shim."""
    command = [sys.executable, "-m", "tests.power_loss.simulate", str(recorded), "--shim", str(shim), "--json"]
    command += ["--losses", str(plan.losses), "--seed", str(plan.seed), "--jobs", str(plan.jobs)]
    command += ["--again", str(plan.again), *(f"--deaf={each.value}" for each in plan.deaf), *["--early"] * plan.early]
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "PYTHONPATH": str(REPOSITORY),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        raise AssertionError(f"the simulation ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    document = json.loads(done.stdout.splitlines()[-1])
    document["breaches"] = [tuple(each) for each in document["breaches"]]
    return Report(**document)


class Simulation:
    def __init__(self, recorded: Path, shim: Path, plan: Plan, scratch: Path) -> None:
        self._trace = Trace(recorded / TRACE_FILE)
        flags = {"--partitions": str(PARTITIONS), "--workers": str(WORKERS), "--emulator": "true"}
        self._settings = load(recorded / CONFIG_FILE, flags).settings
        self._plan, self._scratch = plan, scratch
        self._shim = ctypes.CDLL(str(shim))
        self._disk = Disk()
        if Deaf.DIRECTORIES in plan.deaf:  # most names are made in the first start
            self._disk.go_deaf([Deaf.DIRECTORIES])
        self._books = Books()
        self._running: dict[int, tuple[int, int]] = {}  # process id -> number of the loss, pipe
        self._missing = 0  # messages, in the forked process
        self.report = Report()

    def run(self) -> Report:
        began = time.monotonic()
        moments = self._moments()
        gc.collect()
        gc.freeze()  # else each forked process would copy what the collector touches
        at = 0
        for number, moment in sorted(enumerate(moments), key=lambda each: each[1]):
            while at <= moment:
                self._tell(at)
                at += 1
            if not self._plan.only or number in self._plan.only:
                self._lose(number)
        while self._running:
            self._collect()
        self.report.acknowledged = self._books.acknowledged
        self.report.seconds = time.monotonic() - began
        return self.report

    def _moments(self) -> list[int]:
        """For each loss the last record before it. Half of them follow an acknowledgement at once."""
        chance = random.Random(self._plan.seed)
        answered = [number for number, record in enumerate(self._trace) if record.kind == Kind.MARK]
        return [
            chance.choice(answered) if chance.random() < 0.5 else chance.randrange(len(self._trace))
            for _ in range(self._plan.losses)
        ]

    def _tell(self, at: int) -> None:
        record = self._trace[at]
        if record.kind != Kind.MARK:
            self._disk.tell(record)
            return
        mark = mark_of(record)
        if "root" in mark:
            self._disk.set_root(mark["root"])
        if self._plan.early:
            mark = {name: value for name, value in mark.items() if name not in ("done", "doubtful")}
        self._books.tell(mark)
        if self._plan.early and "begin" in mark:
            self._books.tell({"done": mark["begin"]})
        if self._books.acknowledged == 1:  # else no start would come to its end
            self._disk.go_deaf(self._plan.deaf)

    def _lose(self, number: int) -> None:
        while len(self._running) >= self._plan.jobs:
            self._collect()
        self.report.losses += 1
        self.report.busy += self._disk.busy
        self.report.messages += len(self._books)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            signal.alarm(LONGEST_CHECK_S)
            with os.fdopen(writer, "w") as pipe:
                json.dump(self._loss(number), pipe)
            os._exit(0)
        os.close(writer)
        self._running[child] = number, reader

    def _collect(self) -> None:
        child, status = os.wait()
        number, reader = self._running.pop(child)
        with os.fdopen(reader) as pipe:
            said = pipe.read()
        if status != 0 or not said:
            self.report.breaches.append((number, f"died: the process that opened it ended with status {status}"))
            self.report.missing += len(self._books)
        else:
            again, missing, breaches = json.loads(said)
            self.report.missing += missing
            self.report.again += again
            self.report.losses += again
            self.report.breaches += [(number, text) for text in breaches]
        shutil.rmtree(self._scratch / str(number), ignore_errors=True)

    # -- in a process of its own

    def _loss(self, number: int) -> tuple[int, int, list[str]]:
        """The number of further losses, of messages that are missing, and the breaches."""
        chance = random.Random(f"{self._plan.seed}/{number}")
        folder = self._scratch / str(number)
        folder.mkdir()
        image = folder / "image"
        metadata = chance.choice(list(Metadata))
        self._disk.image(image, chance, metadata)
        if chance.random() >= AS_BROKERS_DO:
            read_in_this_process()
        again = chance.random() < self._plan.again
        if not again:
            if self._books.acknowledged and chance.random() < BACKED_UP:
                breaches = self._check_backup(image, folder)
                return 0, self._missing, breaches[:MOST_NAMED]
            breaches = self._check(image, chance, f"[{metadata.value}]")
            return 0, self._missing, breaches[:MOST_NAMED]
        disk, recovery = Disk.of(image), folder / "recovery"
        self._trace_here(image, recovery)
        breaches = self._check(image, chance, f"[{metadata.value}, traced]")
        self._trace_here(None, recovery)
        breaches += self._lose_again(disk, Trace(recovery), folder, chance)
        return AGAIN, self._missing, breaches[:MOST_NAMED]

    def _lose_again(self, disk: Disk, recovery: Trace, folder: Path, chance: random.Random) -> list[str]:
        breaches: list[str] = []
        at = 0
        for moment in sorted(chance.randrange(len(recovery)) for _ in range(AGAIN)):
            while at <= moment:
                disk.tell(recovery[at])
                at += 1
            image = folder / f"again-{moment}"
            metadata = chance.choice(list(Metadata))
            shutil.rmtree(image, ignore_errors=True)
            disk.image(image, chance, metadata)
            breaches += self._check(image, chance, f"[{metadata.value}, again at {moment} of {len(recovery)}]")
        return breaches

    def _check(self, image: Path, chance: random.Random, how: str) -> list[str]:
        ids = self._books.ids
        again = chance.sample(ids, min(IDS_SENT_AGAIN, len(ids)))
        return self._compare(lambda settings: look(settings, again), image, how)

    def _check_backup(self, image: Path, folder: Path) -> list[str]:
        return self._compare(lambda settings: look_at_backup(settings, folder), image, "[backup]")

    def _compare(self, find: Callable[[Settings], Found], image: Path, how: str) -> list[str]:
        try:
            found = find(self._settings.model_copy(update={"data_dir": image}))
        except Exception:
            self._missing += len(self._books)
            return [f"not opened {how}: {traceback.format_exc(limit=-4)}"]
        breaches = self._books.breaches(found)
        self._missing += sum(breach.startswith("missing") for breach in breaches)
        return [f"{breach} {how}" for breach in breaches]

    def _trace_here(self, image: Path | None, trace: Path) -> None:
        path = b"" if image is None else os.fsencode(image.resolve())
        self._shim.power_loss_trace(ctypes.c_char_p(path), ctypes.c_char_p(os.fsencode(trace)))


def scratch_folder() -> "tempfile.TemporaryDirectory[str]":
    """In memory, where there is a file system for that: the images are written for nobody to keep."""
    place = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="peeklock-power-loss-", dir=place)


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.power_loss.simulate", description=__doc__)
    parser.add_argument("recorded", type=Path, help="directory that tests.power_loss.record made")
    parser.add_argument("--shim", type=Path, required=True, help="the compiled shim; LD_PRELOAD must name it, too")
    parser.add_argument("--losses", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--again", type=float, default=0.0)
    parser.add_argument("--deaf", action="append", default=[], choices=[each.value for each in Deaf])
    parser.add_argument("--early", action="store_true")
    parser.add_argument("--only", type=int, action="append", default=[], help="numbers of losses to repeat")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(None if arguments is None else list(arguments))
    deaf = tuple(map(Deaf, options.deaf))
    plan = Plan(options.losses, options.seed, options.jobs, options.again, deaf, options.early, tuple(options.only))
    with scratch_folder() as scratch:
        report = Simulation(options.recorded, options.shim, plan, Path(scratch)).run()
    if options.json:
        print(json.dumps(asdict(report)))
    else:
        for number, text in report.breaches[:MOST_NAMED]:
            print(f"loss {number}: {text}")
        print(report)
    return 1 if report.breaches else 0


if __name__ == "__main__":
    sys.exit(main())
