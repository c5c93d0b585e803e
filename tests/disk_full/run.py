"""Fills the disk of a loaded broker again and again, and checks it against books: `python -m tests.disk_full.run`.

The disk is a small one of its own, and somebody else fills it. While it is full, messages are received and completed,
and processes are killed and start again; then there is room again. Nothing that was accepted may be lost, nothing that
was completed may come back, also not after a restart at the end, and `peeklock verify` finds nothing.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.brokers import KEY, KEY_NAME, Broker, BrokerFailed
from tests.crash_ledger import workers as ledger_workers
from tests.crash_ledger.ledger import Ledger, Summary
from tests.crash_ledger.links import Login
from tests.crash_ledger.load import Load, Mix
from tests.crash_ledger.run import CONFIG as PLAIN
from tests.crash_ledger.run import QUEUE, STARTED_BY_US, Victim, kill_during, recover
from tests.crash_ledger.workers import Workers
from tests.disk_full import load as more_load
from tests.disk_full.load import SUBSCRIPTIONS, TOPIC, MoreLoad
from tests.end_to_end.health import is_ready
from tests.end_to_end.raw_peer import TRANSFER, RawPeer
from tests.own_disk import MIB, OwnDisk, broker_on

DISK_BYTES = 384 * MIB
# Without a reserve: what was accepted before anybody could know that the disk is full is what finds no room.
CONFIG = (
    f"""
partitions = {more_load.PARTITIONS}
worker_stall_timeout_ms = 10000

[store]
min_free_disk_bytes = 0
send_watermark = 0.99
log_bytes = 67108864
{PLAIN}{more_load.CONFIG}"""
).replace(f'name = "{ledger_workers.COPIES}"', f'name = "{ledger_workers.COPIES}"\nenable_partitioning = true')
VICTIMS = (Victim.CHECKPOINTER, Victim.WORKER, Victim.ALL, Victim.GATEWAY)
VICTIMS_OF_ONE_PROCESS = (Victim.CHECKPOINTER, Victim.ONE_PROCESS, Victim.ALL)
LONGEST_FULL_S = 5.0
BACKLOG, BACKLOG_S = 150, 30.0  # so many more large messages wait before the disk is filled, or after so long it is
STARTED_S, ROOM_AGAIN_S = 60.0, 30.0
NO_ROOM = "its store has no room"  # in the answer of /readyz


@dataclass(frozen=True)
class Report:
    rounds: int
    summary: Summary
    others: Workers
    more: MoreLoad
    kills: Counter[str]
    full: int  # rounds in which a partition said that its tables have no room
    slowest_s: float  # from the time when there is room again until all partitions take messages
    problems: list[str]

    @property
    def sound(self) -> bool:
        return not (self.problems or self.summary.violations or self.others.breaches or self.more.breaches)

    def __str__(self) -> str:
        kills = ", ".join(f"{victim} {count}" for victim, count in self.kills.most_common())
        lines = [
            f"{self.rounds} times full, {self.full} of them with tables that had no room; kills: {kills or 'none'}",
            f"at the latest {self.slowest_s:.1f} s after there was room again all messages were taken",
            str(self.summary),
            str(self.others),
            str(self.more),
        ]
        return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in self.problems)])


class Run:
    def __init__(self, directory: Path, disk: OwnDisk, seed: int, workers: int, say: Callable[[str], None]) -> None:
        self.disk, self.say = disk, say
        self.chance = random.Random(seed)
        self.broker = broker_on(disk, directory, CONFIG, workers)
        self.ledger = Ledger()
        self.load = Load(Login(self.broker.amqp_port, KEY_NAME, KEY), QUEUE, self.ledger, Mix(most_waiting=1000), seed)
        self.others = Workers(self.broker.amqp_port, seed, self._epoch, has_keys=False)
        self.more = MoreLoad(self.broker.amqp_port, seed)
        self.victims = VICTIMS if workers else VICTIMS_OF_ONE_PROCESS
        self.kills: Counter[str] = Counter()
        self.largest_backlog = 0
        self.full = 0
        self.slowest_s = 0.0
        self.problems: list[str] = []

    def _epoch(self) -> int | None:
        return None if self.ledger.outage else self.ledger.epoch

    def start(self) -> None:
        self.broker.start()
        self.others.start()
        self.more.start()
        recover(self.load, self.broker)

    def round(self, number: int) -> None:
        """Load until there is a backlog, a full disk with more load, and room again; two kills at most.

        The backlog is larger each time, so the tables have no free pages for what was accepted when somebody fills the
        disk. In every fourth round it is drained while the disk is full.
        """
        chance, large = self.chance, self.more.large.receives
        large.clear()
        self.load.run(BACKLOG_S, until=lambda: self.more.backlog > self.largest_backlog + BACKLOG)
        self.disk.fill(chance.choice((64 << 10, 256 << 10, MIB)))
        if chance.random() < 0.5:
            self._beside(self.disk.fill)
        saw_full = self._load_while_full(chance.uniform(0.5, LONGEST_FULL_S))
        self.largest_backlog = max(self.largest_backlog, self.more.backlog)
        if number % 3:
            self._kill(self.victims[number % len(self.victims)], while_full=True)
            saw_full |= self._load_while_full(chance.uniform(0.5, LONGEST_FULL_S))
        if number % 4 == 1:
            large.set()
        saw_full |= self._load_while_full(chance.uniform(0.5, LONGEST_FULL_S))
        self.full += saw_full
        self.disk.empty()
        emptied = time.monotonic()
        if number % 4 == 3:
            self._kill(self.victims[(number + 1) % len(self.victims)], while_full=False)
            emptied = time.monotonic()
        self.load.run(ROOM_AGAIN_S, until=lambda: self._refusals() == {})
        refused = self._refusals()
        if refused != {}:
            raise TimeoutError(f"not all messages are taken {ROOM_AGAIN_S:.0f} s after there is room again: {refused}")
        recover(self.load, self.broker)
        self.slowest_s = max(self.slowest_s, time.monotonic() - emptied)

    def _beside(self, act: Callable[[], None]) -> None:
        """In another thread, while the load goes on."""
        thread = threading.Thread(target=act)
        thread.start()
        self.load.run(60.0, until=lambda: not thread.is_alive())
        thread.join()

    def _load_while_full(self, seconds: float) -> bool:
        """True if a partition said that its tables have no room."""
        self.load.run(seconds)
        return any(NO_ROOM in reason for reason in (self._refusals() or {}).values())

    def _kill(self, victim: Victim, while_full: bool) -> None:
        kill_during(self.load, self.broker, victim, after_s=self.chance.uniform(0.05, 1.0))
        self.kills[f"{victim.value} on the full disk" if while_full else victim.value] += 1
        if victim in STARTED_BY_US:
            self.verify("after a kill")
            self.broker.start()
        self.load.run(STARTED_S, until=lambda: self.load.all_attached() and is_ready(self.broker))
        if not is_ready(self.broker):
            self.problems.append(
                f"it does not serve {STARTED_S:.0f} s after a kill: {victim.value}\n{self.broker.log()}"
            )

    def _refusals(self) -> dict[str, str] | None:
        """Why partitions refuse messages; None if nobody tells."""
        with suppress(OSError, ValueError):
            status, body = self.broker.get("/readyz")
            if status == 200:
                return dict(json.loads(body).get("refuse_sends", {}))
        return None

    def verify(self, when: str) -> None:
        command = [*self.disk.prefix, sys.executable, "-m", "broker.cli", "verify", "--data-dir"]
        done = subprocess.run([*command, str(self.broker.data_dir)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            self.problems.append(f"verify {when}: {done.stdout}{done.stderr}")

    def finish(self) -> None:
        """Drain all, and see that a restarted broker has nothing."""
        self.load.run(0.5)
        self.more.large.receives.set()
        self.load.drain()
        self.others.finish()
        self.more.finish()
        self.broker.stop()
        self.verify("at the end")
        self.broker.start()
        for name, held in left(self.broker).items():
            self.problems.append(f"{name}: {held} messages came back after a restart")
        self.broker.stop()


def left(broker: Broker) -> dict[str, int]:
    """How many messages the queues have that have none any more."""
    names = [QUEUE, ledger_workers.IDS, ledger_workers.COPIES, more_load.SCHEDULED, more_load.LARGE]
    names += [f"{TOPIC}/Subscriptions/{name}" for name in SUBSCRIPTIONS]
    names += [f"{name}/$deadletterqueue" for name in [*names, ledger_workers.CHAINS, ledger_workers.SESSIONS]]
    found: Counter[str] = Counter()
    with RawPeer.connect(broker.amqp_port) as peer:
        handles = {peer.attach_receiver(name, credit=1000): name for name in names}
        with suppress(TimeoutError):
            while True:
                found[handles[int(peer.expect(TRANSFER, 1.0).fields[0])]] += 1
    return found


def run(
    directory: Path,
    disk: OwnDisk,
    rounds: int,
    *,
    seed: int = 0,
    workers: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Raises BrokerFailed if the broker does not start again."""
    made = Run(directory, disk, seed, workers, say)
    done = 0
    try:
        made.start()
        for number in range(rounds):
            made.round(number)
            done += 1
            say(f"round {number + 1} of {rounds}: {made.load.accepted:,} accepted, {made.load.gone:,} settled")
        made.finish()
    except (TimeoutError, BrokerFailed) as problem:
        made.problems.append(f"{problem}\n{made.broker.log()}")
    finally:
        made.broker.kill()
    summary = made.ledger.close(drained=not made.problems)
    return Report(done, summary, made.others, made.more, made.kills, made.full, made.slowest_s, made.problems)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.disk_full.run", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="repeats the choices (default: a new one)")
    parser.add_argument("--workers", type=int, default=1, help="0: all in one process (default: %(default)s)")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="peeklock-disk-full-") as directory,
        OwnDisk(Path(directory), DISK_BYTES) as disk,
    ):
        report = run(
            Path(directory) / "broker",
            disk,
            options.rounds,
            seed=seed,
            workers=options.workers,
            say=lambda text: print(text, flush=True),
        )
    print(report)
    return 0 if report.sound else 1


if __name__ == "__main__":
    sys.exit(main())
