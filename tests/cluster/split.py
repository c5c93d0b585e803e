"""Clients on a host of their own use a namespace on four others; the ledger says what came of it.

Meanwhile links are cut, slowed, and lose packets, processes are killed and stopped, and a queue is moved to and fro.

python -m tests.cluster.split --minutes 10
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path

import psutil

from tests.brokers import KEY, KEY_NAME, REPOSITORY
from tests.cluster.hosts import Network
from tests.cluster.machines import Certificates, Machine
from tests.crash_ledger.ledger import Breach, Ledger, Summary, Violation
from tests.crash_ledger.links import Login
from tests.crash_ledger.load import Load, Mix
from tests.patience import eventually

PARTITIONS = 4
PORT = 5680
QUEUES = ("plain", "other", "wide")
CONFIG = f"""
partitions = {PARTITIONS}
worker_stall_timeout_ms = 6000
[[queues]]
name = "plain"
max_delivery_count = 2000000000
[[queues]]
name = "other"
max_delivery_count = 2000000000
[[queues]]
name = "wide"
enable_partitioning = true
requires_duplicate_detection = true
max_delivery_count = 2000000000
"""
LONGEST_S = 15.0  # longer than the silence after which a connection is lost
BETWEEN_S = 4.0
DRAIN_S = 120.0
QUIET_S = 15.0  # a worker may take 10 seconds to notice that a gateway is gone


class Clients:
    """A load on one queue over one gateway, in a thread of the clients' host."""

    def __init__(self, login: Login, queue: str, seed: int) -> None:
        self.ledger = Ledger()
        self.ledger.outage = True  # a refused settlement may have been done: a worker that is cut off cannot say it
        mix = Mix(senders=1, receivers=2, rate_per_s=100, window=50, has_keys=True)
        self.load = Load(login, queue, self.ledger, mix, seed)
        self.ends = False
        self.summary: Summary | None = None
        self.failed: BaseException | None = None

    def work(self) -> None:
        try:
            self.load.run(3600, lambda: self.ends)
            self.load.drain(DRAIN_S, QUIET_S)
            self.summary = self.ledger.close()
        except BaseException as error:
            self.failed = error


class Trouble(Enum):
    CUT = "cut"
    SLOW = "slowed"
    LOSSY = "lossy"
    KILL = "killed"
    STOP = "stopped"
    MOVE = "moved"


class Troubles:
    """What happens to the hosts, at random."""

    def __init__(self, network: Network, machines: Mapping[str, Machine], chance: random.Random) -> None:
        self._network = network
        self._machines = machines
        self._chance = chance
        self.counts: Counter[str] = Counter()

    def make(self, trouble: Trouble, longest_s: float) -> None:
        """Returns when it is over, but for what processes do to recover."""
        chance, name = self._chance, self._chance.choice([*self._machines])
        self.counts[trouble.value] += 1
        lasts_s = chance.uniform(0.2, 1) * longest_s
        match trouble:
            case Trouble.CUT | Trouble.SLOW | Trouble.LOSSY:
                network = self._network
                link = {Trouble.CUT: network.cut, Trouble.SLOW: network.slow, Trouble.LOSSY: network.lossy}[trouble]
                with link(name):
                    time.sleep(lasts_s)
            case Trouble.KILL:
                self._process(name).kill()
                time.sleep(chance.uniform(0, 3))
            case Trouble.STOP:
                stopped = self._process(name)
                stopped.suspend()
                time.sleep(lasts_s)
                with suppress(psutil.NoSuchProcess):  # it hung for too long, and was replaced
                    stopped.resume()
            case Trouble.MOVE:
                self._move()

    def _process(self, name: str) -> psutil.Process:
        machine = self._machines[name]
        kind = "broker.worker" if machine.owned else "broker.gateway"
        [process] = eventually(lambda: machine.running_as(kind), "it runs")
        return process

    def _move(self) -> None:
        gateway = self._machines[self._chance.choice(["gateway0", "gateway1"])]
        address = self._network.hosts[gateway.directory.name].address
        to = str(self._chance.randrange(PARTITIONS))
        login = f"Endpoint=sb://{address}:{gateway.amqp_port};SharedAccessKeyName={KEY_NAME};SharedAccessKey={KEY};"
        command = [sys.executable, "-m", "broker.cli", "move", "plain", "--to", to, "--connection-string"]
        prefix = self._network.hosts["clients"].prefix
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [*prefix, *command, f"{login}UseDevelopmentEmulator=true;"],
                cwd=REPOSITORY,
                capture_output=True,
                timeout=30,
                check=False,
            )
            self.counts["moved with success"] += done.returncode == 0


def wrong(summary: Summary) -> list[Violation]:
    """Breaches but of order: a worker may notice late that a gateway is gone, and then puts messages back late."""
    return [each for each in summary.violations if each.breach is not Breach.REORDERED]


def run(
    directory: Path, seconds: float, seed: int = 0, chosen: Sequence[Trouble] = tuple(Trouble)
) -> dict[str, Summary]:
    """The summaries by queue. Raises what the clients raised, AssertionError if nothing happened."""
    chance = random.Random(seed)
    names = ("clients", "worker0", "worker1", "gateway0", "gateway1")
    with Network(names) as network, ExitStack() as stack:
        certificates = Certificates(directory / "certificates")
        addresses = [f"{network.hosts[f'worker{number}'].address}:{PORT}" for number in range(2)]
        machines = []
        for name in names[1:]:
            host = network.hosts[name]
            number = int(name[-1])
            owned = range(number, PARTITIONS, 2) if name.startswith("worker") else ()
            listen = f"{host.address}:{PORT}"
            cluster = certificates.settings(name, host.address)
            machine = Machine(directory / name, CONFIG, cluster, addresses, owned, listen, host)
            stack.callback(machine.kill)
            machine.begin()
            machines.append(machine)
        for machine in machines:
            machine.wait_until_told()
        clients = []
        for at, queue in enumerate(QUEUES):
            gateway = machines[2 + at % 2]
            host = network.hosts[f"gateway{at % 2}"]
            clients.append(Clients(Login(gateway.amqp_port, KEY_NAME, KEY, host.address), queue, seed + at))
        threads = [network.hosts["clients"].run(each.work) for each in clients]
        end = time.monotonic() + seconds
        troubles = Troubles(network, dict(zip(names[1:], machines, strict=True)), chance)
        while time.monotonic() < end and all(each.is_alive() for each in threads):
            time.sleep(chance.uniform(0.5, 1) * BETWEEN_S)
            for each in clients:
                each.ledger.link_lost()
            troubles.make(chance.choice(chosen), min(LONGEST_S, max(1.0, end - time.monotonic())))
            for each in clients:
                each.ledger.link_back()
        for each in clients:
            each.ends = True
        for thread in threads:
            thread.join()
        for each in clients:
            if each.failed is not None:
                raise each.failed
        assert troubles.counts
        print(", ".join(f"{count} {what}" for what, count in troubles.counts.most_common()), file=sys.stderr)
        return {each.load.queue: each.summary for each in clients if each.summary is not None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument(
        "--only", choices=[each.value for each in Trouble], action="append", help="default: all of them"
    )
    given = parser.parse_args()
    print(f"seed {given.seed}")
    chosen = [each for each in Trouble if each.value in (given.only or [each.value])]
    with tempfile.TemporaryDirectory(prefix="peeklock-split-") as directory:
        summaries = run(Path(directory), given.minutes * 60, given.seed, chosen)
    for queue, summary in summaries.items():
        print(f"{queue}:\n{replace(summary, violations=tuple(wrong(summary)))}")
    return any(wrong(summary) for summary in summaries.values())


if __name__ == "__main__":
    sys.exit(main())
