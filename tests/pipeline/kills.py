"""A stream from the journal into a queue, while its driver, its executors and the broker are killed.

    python -m tests.pipeline.kills --minutes 10

It runs on a standalone cluster of a master and two workers. A sender puts numbered messages into one queue, and the
stream copies them into another one, whose duplicate detection drops what comes twice. In the end each message that was
accepted must be there once, however often its copy was sent.
"""

import argparse
import asyncio
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import psutil

from protocol.client.connection import connect_to
from protocol.client.errors import ClientError
from protocol.client.messages import Message
from pyspark_peeklock.journal_client import Endpoint, JournalClient
from pyspark_peeklock.options import Access
from pyspark_peeklock.parts import OffsetRange
from tests.brokers import REPOSITORY, Broker
from tests.pipeline.standalone import ClusterFailed, Driver, StandaloneCluster, killed

CONFIG = """
[[queues]]
name = "orders"
requires_duplicate_detection = true
duplicate_detection_history_time_window_ms = 3600000
[[queues]]
name = "copies"
requires_duplicate_detection = true
duplicate_detection_history_time_window_ms = 3600000
[journal]
mode = "bodies"
"""
PROGRAM = Path(__file__).with_name("copying.py")
CHUNK = 50  # messages that are sent at once
PATIENCE_S = 180.0


class Victim(Enum):
    EXECUTOR = "executor"
    PYTHON_WORKER = "Python worker of an executor"
    BROKER = "broker"
    DRIVER_JVM = "driver: its JVM"
    DRIVER_PYTHON = "driver: its Python"
    PLANNER = "driver: the process that plans what is read"
    TWIN = "driver: a second one with the same checkpoint"


@dataclass
class Outcome:
    """`accepted`: numbers of messages that the broker has; `copies`: how often each was in the other queue."""

    accepted: int
    copies: Counter[int]
    duplicates: int  # copies that were sent again, and dropped
    kills: Counter[Victim]
    drivers: int
    faults: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Fill `faults`."""
        missing = [number for number in range(self.accepted) if not self.copies[number]]
        doubled = [number for number, count in self.copies.items() if count > 1]
        foreign = [number for number in self.copies if not 0 <= number < self.accepted]
        for what, numbers in (("missing", missing), ("doubled", doubled), ("never accepted", foreign)):
            if numbers:
                self.faults.append(f"{len(numbers)} {what}, such as {numbers[:5]}")

    def __str__(self) -> str:
        kills = "; ".join(f"{victim.value}: {count}" for victim, count in self.kills.items())
        text = f"{self.accepted} accepted, {self.copies.total()} copies, {self.duplicates} sent again and dropped"
        verdict = "; ".join(self.faults) or "each accepted message was copied exactly once"
        return f"struck {self.kills.total()} times ({kills}), {self.drivers} drivers\n{text}\n{verdict}"


class Sending(threading.Thread):
    """Sends numbered messages until it is told to stop, each until it is accepted."""

    def __init__(self, broker: Broker, per_second: float) -> None:
        super().__init__(daemon=True)
        self._broker = broker
        self._pause_s = CHUNK / per_second
        self._stopping = threading.Event()
        self._is_in_doubt = False  # the last ones may be accepted or not
        self.accepted = 0

    def run(self) -> None:
        asyncio.run(self._send())

    async def _send(self) -> None:
        while not self._stopping.is_set() or self._is_in_doubt:
            try:
                async with await connect_to(self._broker.connection_string, timeout_s=5.0) as connection:
                    sender = await connection.sender("orders")
                    while not self._stopping.is_set() or self._is_in_doubt:
                        numbers = range(self.accepted, self.accepted + CHUNK)
                        messages = [Message.of(b"%d" % number, message_id=str(number)).encode() for number in numbers]
                        self._is_in_doubt = True
                        async with asyncio.timeout(10.0):
                            await sender.send_all(messages)
                        self._is_in_doubt = False
                        self.accepted += CHUNK
                        await asyncio.sleep(self._pause_s)
            except (ClientError, OSError, TimeoutError):
                await asyncio.sleep(0.1)

    def stop(self) -> int:
        """How many messages were accepted."""
        self._stopping.set()
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self.accepted


class Scene:
    """Broker, cluster and driver, and what is done to them. `say` gets a line for all that happens."""

    def __init__(self, directory: Path, chance: random.Random, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._chance = chance
        self._say = say
        self.broker = Broker(directory / "broker", CONFIG)
        self.cluster = StandaloneCluster(directory / "spark")
        self.secret = directory / "secret"
        self.stop_file = directory / "stop"
        self.drivers = 0
        self.driver: Driver | None = None

    def submit(self, name: str | None = None) -> Driver:
        self.drivers += 1
        name = name or f"driver-{self.drivers}"
        options = ["--secret", self.secret, "--http", f"http://localhost:{self.broker.http_port}"]
        options += ["--checkpoint", self._directory / "checkpoint", "--stop-file", self.stop_file]
        driver = self.cluster.submit(name, PROGRAM, *options)
        self._say(f"spark-submit --master {self.cluster.url} {PROGRAM.name}: {name}, process {driver.pid}")
        return driver

    def copied(self) -> int:
        """Messages in the queue of copies. Raises ClientError, OSError while the broker is away."""

        async def count() -> int:
            async with await connect_to(self.broker.connection_string, timeout_s=5.0) as connection:
                return int((await (await connection.management("copies")).counts()).active)

        return asyncio.run(count())

    def wait_for_copies(self, more_than: int) -> int:
        """Until there are; a driver that has failed is started again, as an operator's scheduler does."""
        end = time.monotonic() + PATIENCE_S
        while True:
            if self.driver is None or self.driver.code is not None:
                if self.driver is not None:
                    self.tell_batches(self.driver)
                self.driver = self.submit()
            found = self.copied()
            if found > more_than:
                return found
            if time.monotonic() > end:
                raise ClusterFailed(f"no copy more than {found}\n{self.driver.log()[-6000:]}")
            time.sleep(0.2)

    def tell_batches(self, driver: Driver) -> None:
        """The first and the last that it has said."""
        lines = [line for line in driver.log().splitlines() if line.startswith("copying: ")]
        if len(lines) > 5:
            lines[2:-2] = [f"({len(lines) - 4} lines more)"]
        for line in lines:
            self._say(f"    {driver.log_file.stem}: {line}")

    def audit(self) -> str:
        """Capture the journal and audit it on the cluster, while an executor is killed. Raises ClusterFailed."""
        folder, output = self._directory / "captured", self._directory / "audit"
        http = f"http://localhost:{self.broker.http_port}"
        secret = {**os.environ, "PEEKLOCK_CONNECTION_STRING": self.broker.connection_string}
        command = [sys.executable, "-m", "broker.cli", "capture", str(folder), "--once", "--http-endpoint", http]
        captured = subprocess.run(command, cwd=REPOSITORY, env=secret, capture_output=True, text=True)
        if captured.returncode:
            raise ClusterFailed(captured.stderr)
        self._say(f"peeklock capture --once: {captured.stdout.strip()}")
        arguments = ["--ledger", folder, "--output", output, "--whole", "--fail-on-faults"]
        driver = self.cluster.submit("audit", REPOSITORY / "pipeline" / "jobs" / "audit.py", *arguments)
        self._say(f"spark-submit --master {self.cluster.url} pipeline/jobs/audit.py --whole: process {driver.pid}")
        while driver.code is None and "judging ..." not in driver.log():
            time.sleep(0.05)
        if found := self.cluster.executors():
            self._say(f"executor of the audit killed, process {killed(self._one_of(found))}")
        code = driver.wait(PATIENCE_S)
        verdict = [line for line in driver.log().splitlines() if " messages" in line]
        self._say(f"the audit has ended, exit code {code}: {' '.join(verdict[-1:])}")
        if code or not (output / "report.html").exists():
            raise ClusterFailed(driver.log()[-4000:])
        return verdict[-1]

    def strike(self, victim: Victim) -> None:
        """Kill it, and start what nobody else starts. Raises LookupError if there is none now."""
        assert self.driver is not None
        if victim is Victim.EXECUTOR:
            pid = killed(self._one_of(self.cluster.executors()))
            self._say(f"executor killed, process {pid}")
        elif victim is Victim.PYTHON_WORKER:
            pid = killed(self._one_of(self.cluster.python_workers()))
            self._say(f"Python worker of an executor killed, process {pid}")
        elif victim is Victim.BROKER:
            self.broker.kill()
            self._say("broker killed, all its processes")
            self.broker.start()
            self._say("broker started again")
        elif victim is Victim.DRIVER_JVM:
            self._kill_driver("JVM", self.driver.jvm())
        elif victim is Victim.DRIVER_PYTHON:
            self._kill_driver("Python", self.driver.python(PROGRAM.name))
        elif victim is Victim.PLANNER:
            self._say(f"planner of the driver killed, process {killed(self.driver.planner())}")
        else:
            self._two_drivers()

    def _one_of(self, found: list[psutil.Process]) -> psutil.Process:
        if not found:
            raise LookupError
        return self._chance.choice(found)

    def _kill_driver(self, what: str, process: psutil.Process) -> None:
        """Kill a part of it. Raises ClusterFailed if the rest does not end by itself."""
        assert self.driver is not None
        tree = self.driver.tree()
        self._say(f"{what} of the driver killed, process {killed(process)}")
        self.driver.wait()
        _, left = psutil.wait_procs(tree, timeout=PATIENCE_S)
        if left:
            raise ClusterFailed(f"without its {what} the driver goes on: {left}")
        self._say("the rest of the driver has ended by itself")

    def _two_drivers(self) -> None:
        """One of two with the same checkpoint must end, and say why."""
        assert self.driver is not None
        first, second = self.driver, self.submit()
        end = time.monotonic() + PATIENCE_S
        while first.code is None and second.code is None:
            if time.monotonic() > end:
                raise ClusterFailed("two drivers with one checkpoint go on\n" + second.log()[-4000:])
            time.sleep(0.2)
        ended, self.driver = (first, second) if first.code is not None else (second, first)
        self._say(f"of two drivers, process {ended.pid} has ended with exit code {ended.code}: {_why(ended)}")


def _why(driver: Driver) -> str:
    lines = [line for line in driver.log().splitlines() if line.startswith("copying: failed") or "Error" in line]
    return lines[-1][:300] if lines else "it says nothing"


def dropped(secret: Path, broker: Broker) -> int:
    """Copies that were sent again and dropped, as the journal has it."""
    endpoint = Endpoint(Access(str(secret), None), f"http://localhost:{broker.http_port}", PATIENCE_S)
    client = JournalClient(endpoint)
    try:
        found = 0
        for state in client.states()[1].values():
            wanted = OffsetRange(state.partition, state.epoch, state.low, state.stable)
            for batch in client.batches(wanted, entity="copies", records=False):
                found += batch.column("op").to_pylist().count("duplicate")
        return found
    finally:
        client.close()


def take_copies(broker: Broker) -> list[int]:
    async def work() -> list[int]:
        found: list[int] = []
        async with await connect_to(broker.connection_string) as connection:
            receiver = await connection.receiver("copies", credit=0, receive_and_delete=True)
            while received := await receiver.fetch(1000, timeout_s=1.0):
                found += [int(each.message().content()) for each in received]
        return found

    return asyncio.run(work())


def run(
    directory: Path,
    victims: Iterator[Victim],
    chance: random.Random,
    say: Callable[[str], None],
    *,
    per_second: float = 200.0,
    audits: bool = True,
) -> Outcome:
    """Strike the victims one after the other, each while copies are made; then audit. Raises ClusterFailed."""
    scene = Scene(directory, chance, say)
    kills: Counter[Victim] = Counter()
    with scene.broker, scene.cluster:
        scene.secret.write_text(scene.broker.connection_string)
        say(f"broker at amqp://localhost:{scene.broker.amqp_port}; master at {scene.cluster.url} with two workers")
        sending = Sending(scene.broker, per_second)
        sending.start()
        scene.wait_for_copies(0)
        for victim in victims:
            scene.wait_for_copies(scene.copied() + CHUNK)
            time.sleep(chance.uniform(0, 0.5))  # anywhere in a batch
            try:
                scene.strike(victim)
            except LookupError:
                continue
            kills[victim] += 1
        scene.wait_for_copies(scene.copied())
        accepted = sending.stop()
        say(f"{accepted} messages were accepted; no more are sent")
        scene.wait_for_copies(accepted - 1)
        scene.stop_file.touch()
        assert scene.driver is not None
        code = scene.driver.wait()
        scene.tell_batches(scene.driver)
        say(f"the driver has ended, exit code {code}")
        duplicates = dropped(scene.secret, scene.broker)
        outcome = Outcome(accepted, Counter(take_copies(scene.broker)), duplicates, kills, scene.drivers)
        if audits:
            scene.audit()
    outcome.check()
    return outcome


def until(end: float, chance: random.Random) -> Iterator[Victim]:
    """All of them in an order of chance, again and again."""
    while time.monotonic() < end:
        order = list(Victim)
        chance.shuffle(order)
        for victim in order:
            if time.monotonic() < end:
                yield victim


def said() -> Callable[[str], None]:
    """Prints lines with the seconds since now."""
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:7.1f} s] {text}", flush=True)

    return say


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--once", action="store_true", help="strike each once, in order, whatever time it takes")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--rate", type=float, default=200.0, help="messages per second")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 30)
    say, chance = said(), random.Random(seed)
    say(f"seed {seed}" + ("" if arguments.once else f", {arguments.minutes} minutes"))
    directory = Path(tempfile.mkdtemp(prefix="peeklock-kills-"))
    victims = iter(Victim) if arguments.once else until(time.monotonic() + 60 * arguments.minutes, chance)
    try:
        outcome = run(directory, victims, chance, say, per_second=arguments.rate)
    except BaseException:
        say(f"failed; what is left of it is in {directory}")
        raise
    shutil.rmtree(directory)
    for line in str(outcome).splitlines():
        say(line)
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
