"""Kills processes of a broker that forwards through five queues, and accounts for every message.

By command: `python -m tests.forwarding.run --kills 100`. The queues are on three partitions of two workers. Messages
are sent to the first all the time, and each process is killed with SIGKILL in its turn, at random moments. In the end
all that was accepted must be in the last queue, once and in the order of the first; what was never answered may be.
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import psutil

from broker.catalog.catalog import definitions
from storage.maintenance import verify
from storage.records import (
    MESSAGE_HEADER_BYTES,
    Field,
    decode_entry,
    message_key,
    unpack_queue_key,
)
from storage.store import Table
from tests.brokers import KEY, KEY_NAME, Broker
from tests.crash_ledger import bodies
from tests.crash_ledger.ledger import Key, Ledger
from tests.crash_ledger.links import Login
from tests.crash_ledger.load import Load, Mix
from tests.crash_ledger.run import recover
from tests.logs import open_tables
from tests.patience import PATIENCE_S

PARTITIONS = 4
# To another partition of the same worker, to the other worker, within the partition, and to the first worker again.
CHAIN = {"orders": 3, "checked": 1, "billing": 2, "done": 2, "sorting": 1}  # their home partitions
FIRST, *_, LAST = CHAIN
CONFIG = f"partitions = {PARTITIONS}\n" + "\n".join(
    f'[[queues]]\nname = "{name}"\n' + (f'forward_to = "{to}"\n' if to else "")
    for name, to in zip_longest(CHAIN, list(CHAIN)[1:])
)


@dataclass
class Account:
    """What became of the messages. `problems` is empty if nothing was lost, doubled or reordered."""

    kills: Counter[str]
    sent: int
    accepted: int
    arrived: int
    seconds: float
    slowest_recovery_s: float
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kills = ", ".join(f"{name} {count}" for name, count in self.kills.items())
        return "\n".join(
            [
                f"{self.kills.total()} kills with SIGKILL in {self.seconds:.0f} s: {kills}",
                f"slowest recovery {self.slowest_recovery_s:.2f} s",
                f"sent {self.sent:,}, accepted {self.accepted:,}, arrived {self.arrived:,}",
                *(self.problems[:20] or ["nothing lost, nothing doubled, all in order"]),
            ]
        )


class SendLedger(Ledger):
    """Remembers what was accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted_keys: set[Key] = set()
        self.sent_keys: set[Key] = set()

    def sent(self, key: Key) -> None:
        super().sent(key)
        self.sent_keys.add(key)

    def accepted(self, key: Key) -> None:
        super().accepted(key)
        self.accepted_keys.add(key)


class Senders(Load):
    def close(self) -> None:
        self._close(self._slots)
        self._selector.close()


def run(
    directory: Path,
    kills: int,
    *,
    seed: int = 0,
    rate_per_s: float = 3000,
    longest_gap_s: float = 1.5,
    say: Callable[[str], None] = lambda text: None,
) -> Account:
    """Raises BrokerFailed or TimeoutError if the broker does not serve again after a kill."""
    chance = random.Random(seed)
    began = time.monotonic()
    killed: Counter[str] = Counter()
    problems: list[str] = []
    slowest = 0.0
    ledger = SendLedger()
    broker = Broker(directory, CONFIG, workers=2)
    mix = Mix(senders=2, receivers=0, most_waiting=1 << 30, rate_per_s=rate_per_s)
    load = Senders(Login(broker.amqp_port, KEY_NAME, KEY), FIRST, ledger, mix, seed)
    broker.start()
    try:
        turns = _turns()
        for number in range(kills):
            recover(load, broker)
            name = next(turns)
            since = _kill_under_load(load, broker, name, chance.uniform(0.05, longest_gap_s))
            killed[name] += 1
            problems += _verified(broker, f"after kill {number + 1} ({name})")
            if not broker.running or name in ("all", "supervisor"):
                broker.kill()
                broker.start()
            recover(load, broker)
            slowest = max(slowest, time.monotonic() - since)
            say(f"kill {number + 1} of {kills}, {name}: {load.accepted:,} accepted")
        load.run(0.3)
        load.sending = False
        load.run(1.0)
        _wait_until_arrived(broker)
        broker.stop()
    finally:
        load.close()
        broker.kill()
    problems += _verified(broker, "in the end")
    arrived, found = account(broker.data_dir, ledger)
    return Account(
        kills=killed,
        sent=len(ledger.sent_keys),
        accepted=len(ledger.accepted_keys),
        arrived=arrived,
        seconds=time.monotonic() - began,
        slowest_recovery_s=slowest,
        problems=problems + found,
    )


def _turns() -> Iterator[str]:
    while True:
        yield from ("worker 0", "worker 1", "worker 0", "gateway", "worker 1", "all", "both workers", "supervisor")


def _kill_under_load(load: Load, broker: Broker, name: str, after_s: float) -> float:
    """Kill from another thread, so that it hits any point of the broker's work. Returns when."""
    done = threading.Event()

    def act() -> None:
        time.sleep(after_s)
        load.ledger.outage = True
        _kill(broker, name)
        done.set()

    thread = threading.Thread(target=act)
    thread.start()
    load.run(after_s + 10, until=done.is_set)
    thread.join()
    load.new_epoch()
    return time.monotonic()


def _kill(broker: Broker, name: str) -> None:
    supervisor, *children = broker.processes()
    if name == "all":
        broker.kill()
        return
    workers = broker.worker_processes()
    victims = {
        "worker 0": workers[:1],
        "worker 1": workers[1:],
        "both workers": workers,
        "gateway": [broker.gateway()],
        "supervisor": [supervisor],
    }[name]
    for process in victims:
        process.kill()
    psutil.wait_procs(victims if name != "supervisor" else children, timeout=5)


def _verified(broker: Broker, when: str) -> list[str]:
    """What `peeklock verify` finds, also while the workers start again."""
    report = verify(broker.data_dir)
    return [
        f"{when}: partition {partition.partition}: {finding.text}"
        for partition in report.partitions
        for finding in partition.findings
    ]


def _wait_until_arrived(broker: Broker) -> None:
    end = time.monotonic() + PATIENCE_S
    while any(waiting(broker, name) for name in CHAIN if name != LAST):
        if time.monotonic() > end:
            raise TimeoutError(f"messages are still under way after {PATIENCE_S:.0f} s\n{broker.log()}")
        time.sleep(0.1)


def waiting(broker: Broker, name: str) -> int:
    """Messages in the queue and in its dead-letter queues, by the metrics."""
    _, text = broker.get("/metrics")
    line = next(line for line in text.splitlines() if line.startswith(f'peeklock_messages{{entity="{name}"}}'))
    return int(float(line.split()[-1]))


def account(data_dir: Path, ledger: SendLedger) -> tuple[int, list[str]]:
    """How many messages are in the last queue of a stopped broker, and what is wrong with them."""
    problems = []
    found: Counter[Key] = Counter()
    last_number = 0
    last_queue = 0
    for partition in range(PARTITIONS):
        with open_tables(data_dir, partition, map_size_bytes=1 << 34) as store:
            ids = {each.description.name: each.entity_id for each in definitions(store)}
            last_queue = ids[LAST] << 3
            for key, value in store.scan(Table.QUEUE, b"\0", b"\xff" * 14, 1 << 30):
                queue_id, _, number = unpack_queue_key(key)
                entry = decode_entry(value)
                record = store.get(Table.MESSAGES, message_key(entry.message_id)) or b""
                at = record.rindex(bodies.MARK, MESSAGE_HEADER_BYTES, MESSAGE_HEADER_BYTES + 200)
                name, _ = bodies.read(record[at:])
                found[name] += 1
                overlay = entry.overlay or {}
                if queue_id != last_queue or partition != CHAIN[LAST]:
                    problems.append(f"{name} is in queue {queue_id} on partition {partition}: {overlay}")
                    continue
                first_number = overlay[Field.ENQUEUE_SEQUENCE_NUMBER]
                if first_number <= last_number:
                    problems.append(f"{name}, {number} of the last queue, is {first_number} of the first: reordered")
                last_number = first_number
    problems += [f"{name} was accepted and is lost" for name in ledger.accepted_keys - found.keys()]
    problems += [f"{name} is there {count} times" for name, count in found.items() if count > 1]
    problems += [f"{name} was never sent" for name in found.keys() - ledger.sent_keys]
    return found.total(), problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.forwarding.run", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="repeats the moments (default: a new one)")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="peeklock-forwarding-") as directory:
        result = run(Path(directory), options.kills, seed=seed, say=lambda text: print(text, flush=True))
    print(result)
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
