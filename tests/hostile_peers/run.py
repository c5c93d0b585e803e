"""Hostile peers on one broker for a long time, watching each of its processes: `python -m tests.hostile_peers.run`.

Peers without any right say what costs the most, or begin what they never end; peers with a key end with much under
way. Meanwhile honest clients send, receive and complete: nothing of theirs may be lost or come twice, and none waits
long. In the end no process may have grown or have been replaced.
"""

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.brokers import KEY, KEY_NAME, Broker
from tests.crash_ledger.ledger import Ledger, Summary
from tests.crash_ledger.links import Login
from tests.crash_ledger.load import Load, Mix
from tests.end_to_end.health import serves
from tests.hostile_peers import clients, strangers
from tests.hostile_peers.peers import Kept, Place, Ports
from tests.hostile_peers.watch import Watch, plot, write_csv
from tests.operations.test_tls import Certificates
from tests.ports import free_ports

QUEUE = "honest"
MIX = Mix(senders=2, receivers=2, window=20, most_waiting=500, rate_per_s=40, dead_letter=0.01, has_keys=True)
CONFIG = f"""
partitions = 4
gateways = 2

[journal]
mode = "bodies"

[[queues]]
name = "{QUEUE}"
enable_partitioning = true
max_delivery_count = 2000000000
lock_duration_ms = 300000

[[queues]]
name = "witness"

[[queues]]
name = "{clients.TARGET}"
enable_partitioning = true
max_delivery_count = 2000000000
lock_duration_ms = 5000
default_message_time_to_live_ms = 5000

[[queues]]
name = "{clients.LARGE}"
max_delivery_count = 2000000000
lock_duration_ms = 5000
"""
THREADS = 4
KINDS = strangers.KINDS | clients.KINDS
LONGEST_WAIT_S = 20.0


@dataclass
class Guests:
    """The hostile peers: `THREADS` at once, `per_s` a second all together. Each kind comes once, then one at random."""

    ports: Ports
    seed: int
    per_s: float
    count: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # the peer's own code did not get what it waits for

    def __post_init__(self) -> None:
        self._ends = threading.Event()
        self._kept = Kept()
        first = random.Random(self.seed).sample(list(KINDS), len(KINDS))
        self._first = [first[n::THREADS] for n in range(THREADS)]
        self._threads = [threading.Thread(target=self._visit, args=(n,), daemon=True) for n in range(THREADS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _visit(self, number: int) -> None:
        chance = random.Random(f"{self.seed} {number}")
        place = Place(self.ports, chance, self._kept)
        while not self._ends.wait(chance.expovariate(self.per_s / THREADS)):
            name = self._first[number].pop() if self._first[number] else chance.choice(list(KINDS))
            try:
                KINDS[name](place)
            except Exception as error:
                self.refused[f"{name}: {type(error).__name__} {error}"] += 1
            self.count[name] += 1

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(60.0)
        self._kept.close()


@dataclass
class Visitor:
    """An honest client that connects anew each second, sends a message, gets it and completes it."""

    port: int
    waits_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.wait(1.0):
            began = time.monotonic()
            try:
                serves(self.port)
            except Exception as error:
                self.problems.append(f"a visitor was not served: {type(error).__name__} {error}")
                return
            self.waits_s.append(time.monotonic() - began)

    def stop(self) -> None:
        self._ends.set()
        self._thread.join(60.0)


@dataclass(frozen=True)
class Report:
    summary: Summary
    watch: Watch
    visits: Counter[str]
    refused: Counter[str]
    longest_s: float  # from a send to the first delivery, or for a visit of an honest client
    problems: list[str]

    @property
    def sound(self) -> bool:
        return not (self.problems or self.summary.violations)

    def __str__(self) -> str:
        lines = [
            f"{self.visits.total():,} hostile peers: "
            + ", ".join(f"{name} {count}" for name, count in sorted(self.visits.items())),
            f"{self.refused.total():,} of them were refused or not answered in time where they expected an answer",
            *(f"  {count} x {what}" for what, count in self.refused.most_common(10)),
            f"the longest wait of an honest client: {self.longest_s:.2f} s",
            str(self.summary),
            self.watch.table(),
        ]
        return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in self.problems)])


def run(
    directory: Path,
    seconds: float,
    *,
    seed: int = 0,
    per_s: float = 30.0,
    budget_mib: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Leaves `memory.csv`, and with matplotlib `memory.png`, in the directory."""
    made = Certificates(directory)
    amqps, https = free_ports(2)
    budget = "" if budget_mib is None else f"max_connections_bytes = {budget_mib << 20}\n"
    tls = f"[amqp]\ntls_port = {amqps}\n{budget}[http]\ntls_port = {https}\n{made.settings()}"
    found: list[str] = []
    ledger = Ledger()
    with Broker(directory / "broker", CONFIG + tls, workers=2) as broker:
        clients.put_large_messages(broker.amqp_port)
        load = Load(Login(broker.amqp_port, KEY_NAME, KEY), QUEUE, ledger, MIX, seed)
        ports = Ports(broker.amqp_port, amqps, broker.http_port, https, made.ca)
        guests, visitor = Guests(ports, seed, per_s), Visitor(broker.amqp_port)
        watch = Watch(broker)  # before anybody is connected
        longest = 0.0
        began = time.monotonic()
        guests.start()
        visitor.start()
        said = 0.0
        while (now := time.monotonic() - began) < seconds and broker.running:
            load.run(min(1.0, seconds / 40))
            watch.sample(now)
            longest = max([longest, *(each / 1000 for each in load.latencies_ms)])
            load.latencies_ms.clear()
            if now - said >= min(60.0, seconds / 10):
                said = now
                say(f"{now:6.0f} s  {guests.count.total():,} hostile peers, {load.accepted:,} accepted\n{watch.line()}")
        guests.stop()
        visitor.stop()
        drained = load.drained(found)
        longest = max([longest, *(each / 1000 for each in load.latencies_ms), *visitor.waits_s])
        watch.wait_for_descriptors()
        if {process.pid for process in broker.processes()} != watch.pids:
            found.append("a process of the broker died and was started again")
        log = broker.log_file.read_text(errors="replace")
        if "Traceback" in log:
            found.append(log[max(0, log.index("Traceback") - 500) :][:5000])
        lost = Counter(load.lost_links)
        found += [f"link lost {count} times: {reason}" for reason, count in lost.most_common(5)]
    write_csv(directory / "memory.csv", watch.samples)
    plot(directory / "memory.png", watch.samples)
    if longest > LONGEST_WAIT_S:
        found.append(f"an honest client waited for {longest:.1f} s")
    found += [*visitor.problems, *watch.problems()]
    return Report(ledger.close(drained=drained), watch, guests.count, guests.refused, longest, found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile_peers.run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=30.0, help="hostile peers per second (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="repeats the choices (default: a new one)")
    parser.add_argument("--budget-mib", type=int, default=None, help="amqp.max_connections_bytes (default: not set)")
    parser.add_argument("--output", type=Path, default=Path(), help="where memory.csv and memory.png go")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="peeklock-hostile-peers-") as name:
        directory = Path(name)
        report = run(
            directory,
            options.minutes * 60,
            seed=seed,
            per_s=options.rate,
            budget_mib=options.budget_mib,
            say=lambda text: print(text, flush=True),
        )
        options.output.mkdir(parents=True, exist_ok=True)
        for made in (directory / "memory.csv", directory / "memory.png"):
            if made.exists():
                shutil.copy(made, options.output)
                print(options.output / made.name)
    print(report)
    return 0 if report.sound else 1


if __name__ == "__main__":
    sys.exit(main())
