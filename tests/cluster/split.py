"""Clients on a host of their own use a namespace on four others, whose links are cut; the ledger says what came of it.

python -m tests.cluster.split --minutes 10
"""

import argparse
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tests.brokers import KEY, KEY_NAME
from tests.cluster.hosts import Network
from tests.cluster.machines import Certificates, Machine
from tests.crash_ledger.ledger import Breach, Ledger, Summary, Violation
from tests.crash_ledger.links import Login
from tests.crash_ledger.load import Load, Mix

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
LONGEST_CUT_S = 15.0  # longer than the silence after which a connection is lost
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


def wrong(summary: Summary) -> list[Violation]:
    """Breaches but of order: a worker may notice late that a gateway is gone, and then puts messages back late."""
    return [each for each in summary.violations if each.breach is not Breach.REORDERED]


def run(directory: Path, seconds: float, seed: int = 0) -> dict[str, Summary]:
    """The summaries by queue. Raises what the clients raised, AssertionError if nothing was cut."""
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
        cuts = 0
        while time.monotonic() < end and all(each.is_alive() for each in threads):
            time.sleep(chance.uniform(0.5, 1) * BETWEEN_S)
            for each in clients:
                each.ledger.link_lost()
            with network.cut(chance.choice(names[1:])):
                time.sleep(chance.uniform(0.2, 1) * min(LONGEST_CUT_S, max(1.0, end - time.monotonic())))
            cuts += 1
            for each in clients:
                each.ledger.link_back()
        for each in clients:
            each.ends = True
        for thread in threads:
            thread.join()
        for each in clients:
            if each.failed is not None:
                raise each.failed
        assert cuts
        print(f"{cuts} cuts", file=sys.stderr)
        return {each.load.queue: each.summary for each in clients if each.summary is not None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    print(f"seed {given.seed}")
    with tempfile.TemporaryDirectory(prefix="peeklock-split-") as directory:
        summaries = run(Path(directory), given.minutes * 60, given.seed)
    for queue, summary in summaries.items():
        print(f"{queue}:\n{replace(summary, violations=tuple(wrong(summary)))}")
    return any(wrong(summary) for summary in summaries.values())


if __name__ == "__main__":
    sys.exit(main())
