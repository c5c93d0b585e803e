"""Kills a broker at random moments under load and checks it against the ledger: `python -m tests.crash_ledger.run`."""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import psutil

from tests.brokers import KEY, KEY_NAME, Broker, BrokerFailed
from tests.crash_ledger import workers
from tests.crash_ledger.ledger import Ledger, Summary
from tests.crash_ledger.links import Login
from tests.crash_ledger.load import Load, Mix
from tests.crash_ledger.workers import Workers
from tests.end_to_end.health import is_ready
from tests.patience import PATIENCE_S

QUEUE = "ledger"
# The delivery limit is out of reach, or messages that crashes interrupt would be dead-lettered; locks outlive the run.
CONFIG = f"""
[[queues]]
name = "{QUEUE}"
max_delivery_count = 2000000000
lock_duration_ms = 300000
{workers.CONFIG}"""
PARTITIONED = f"""
partitions = 4
gateways = 2
worker_stall_timeout_ms = 6000
gateway_stall_timeout_ms = 6000

[partitioning]
default = true
{CONFIG}"""
LONGEST_PAUSE_S = 2.0
HUNG_TIMEOUT_S = 30.0
RECOVERY_TIMEOUT_S = 30.0


class Victim(Enum):
    """What is killed or stopped. Workers and gateways are started again by their supervisor, most others by us."""

    ALL = "all"
    STARTING = "starting"  # all, and all again while it starts
    SUPERVISOR = "supervisor"
    GATEWAY = "gateway"
    WORKER = "worker"
    CHECKPOINTER = "checkpointer"  # of a worker, which starts it again
    ONE_PROCESS = "one process"  # of a broker without processes for workers
    PAUSED_WORKER = "worker, stopped for a time"
    PAUSED_GATEWAY = "gateway, stopped for a time"
    HUNG_WORKER = "worker, stopped until it was replaced"
    HUNG_GATEWAY = "gateway, stopped until it was replaced"


MODULES = {
    Victim.GATEWAY: "broker.gateway",
    Victim.WORKER: "broker.worker",
    Victim.CHECKPOINTER: "storage.log.checkpointer",
    Victim.ONE_PROCESS: "broker.one_process",
    Victim.PAUSED_WORKER: "broker.worker",
    Victim.PAUSED_GATEWAY: "broker.gateway",
    Victim.HUNG_WORKER: "broker.worker",
    Victim.HUNG_GATEWAY: "broker.gateway",
}

WEIGHTS = {
    Victim.ALL: 4,
    Victim.STARTING: 1,
    Victim.SUPERVISOR: 1,
    Victim.GATEWAY: 2,
    Victim.WORKER: 2,
    Victim.CHECKPOINTER: 2,
}
WEIGHTS_OF_ONE_PROCESS = {
    Victim.ALL: 4,
    Victim.STARTING: 1,
    Victim.SUPERVISOR: 1,
    Victim.ONE_PROCESS: 4,
    Victim.CHECKPOINTER: 2,
}
WEIGHTS_OF_PARTITIONED = {
    Victim.ALL: 2,
    Victim.STARTING: 1,
    Victim.SUPERVISOR: 1,
    Victim.GATEWAY: 3,
    Victim.WORKER: 5,
    Victim.CHECKPOINTER: 1,
    Victim.PAUSED_WORKER: 3,
    Victim.PAUSED_GATEWAY: 2,
    Victim.HUNG_WORKER: 1,
}
STARTED_BY_US = (Victim.ALL, Victim.STARTING, Victim.SUPERVISOR)


@dataclass(frozen=True)
class Report:
    summary: Summary
    kills: Counter[Victim]
    links_lost: int
    seconds: float
    slowest_recovery_s: float  # from a kill until every link is attached again
    problem: str  # what ended the run early; empty if nothing did
    others: Workers  # of transactions, sessions and ids

    @property
    def sound(self) -> bool:
        return not self.summary.violations and not self.problem and not self.others.breaches

    def __str__(self) -> str:
        kills = ", ".join(f"{victim.value} {count}" for victim, count in self.kills.most_common())
        lines = [
            f"{self.kills.total()} kills and stops in {self.seconds:.0f} s: {kills}",
            f"links lost {self.links_lost:,}, slowest recovery {self.slowest_recovery_s:.2f} s",
            str(self.summary),
            str(self.others),
        ]
        return "\n".join([*lines, f"ended early: {self.problem}"] if self.problem else lines)


def run(
    directory: Path,
    kills: int,
    *,
    seed: int = 0,
    victims: Sequence[Victim] = (),
    mix: Mix | None = None,
    longest_gap_s: float = 1.5,
    workers: int = 1,
    partitioned: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Load a fresh broker with so many workers, kill something `kills` times, drain, and judge.

    `partitioned`: all queues are, on 4 partitions, and clients use two gateways.

    `victims` are taken in turn; without any they are drawn at random from those that this broker has. Raises
    BrokerFailed if it does not start again.
    """
    chance = random.Random(seed)
    began = time.monotonic()
    done: Counter[Victim] = Counter()
    slowest = 0.0
    problem = ""
    weights = WEIGHTS_OF_PARTITIONED if partitioned else WEIGHTS if workers else WEIGHTS_OF_ONE_PROCESS
    broker = Broker(directory, PARTITIONED if partitioned else CONFIG, workers=workers)
    ledger = Ledger()
    mix = mix or Mix(has_keys=partitioned)
    load = Load(Login(broker.amqp_port, KEY_NAME, KEY), QUEUE, ledger, mix, seed)
    others = Workers(broker.amqp_port, seed, lambda: None if ledger.outage else ledger.epoch, partitioned)
    broker.start()
    try:
        others.start()
        for number in range(kills):
            recover(load, broker)
            if victims:
                victim = victims[number % len(victims)]
            else:
                victim = chance.choices(list(weights), list(weights.values()))[0]
            kill_during(load, broker, victim, after_s=chance.uniform(0.05, longest_gap_s))
            done[victim] += 1
            killed = time.monotonic()
            if victim is Victim.STARTING:
                kill_while_starting(broker, after_s=chance.uniform(0.0, 1.0))
            if victim in STARTED_BY_US:
                broker.start()
            recover(load, broker)
            slowest = max(slowest, time.monotonic() - killed)
            say(f"kill {number + 1} of {kills}, {victim.value}: {load.accepted:,} accepted, {load.gone:,} settled")
        load.run(0.5)
        load.drain()
        others.finish()
        broker.stop()
    except TimeoutError as timeout:
        problem = f"{timeout}\n{broker.log()}"
    finally:
        broker.kill()
    return Report(
        ledger.close(drained=not problem),
        done,
        len(load.lost_links),
        time.monotonic() - began,
        slowest,
        problem,
        others,
    )


def recover(load: Load, broker: Broker) -> None:
    """Raises TimeoutError unless the broker serves every link again in time, with all partitions."""
    load.run(RECOVERY_TIMEOUT_S, until=lambda: load.serves() and is_ready(broker))
    if not (load.serves() and is_ready(broker)):
        lost = "; ".join(load.lost_links[-3:])
        raise TimeoutError(f"not serving {RECOVERY_TIMEOUT_S:.0f} s after a kill. Links lost last: {lost}")
    load.ledger.outage = False


def kill_during(load: Load, broker: Broker, victim: Victim, after_s: float) -> None:
    """Kill from another thread, so that it hits the broker at any point of its work, and ours at any of the loop."""
    killed = threading.Event()

    def act() -> None:
        time.sleep(after_s)
        load.ledger.outage = True
        kill(broker, victim)
        killed.set()

    thread = threading.Thread(target=act)
    thread.start()
    load.run(after_s + HUNG_TIMEOUT_S, until=killed.is_set)
    thread.join()
    load.new_epoch()
    if victim in STARTED_BY_US:
        load.run(0.5, until=load.all_lost)  # what it still wrote counts: read it before connections are made anew


def kill(broker: Broker, victim: Victim) -> None:
    """SIGKILL, or SIGSTOP, and return when the victim is gone, or goes on.

    A killed supervisor must take its children with it.
    """
    processes = broker.processes()
    if victim in (Victim.ALL, Victim.STARTING):
        broker.kill()
    elif victim is Victim.SUPERVISOR:
        processes[0].kill()
        _, alive = psutil.wait_procs(processes[1:], timeout=PATIENCE_S)
        broker.kill()
        assert not alive, f"still running without their supervisor: {alive}"
    else:
        of_kind = [process for process in processes[1:] if MODULES[victim] in _command(process)]
        assert of_kind, f"no {victim.value} among {[_command(process) for process in processes]}"
        chosen = random.choice(of_kind)
        if victim in (Victim.PAUSED_WORKER, Victim.PAUSED_GATEWAY):
            chosen.suspend()
            time.sleep(random.uniform(0.05, LONGEST_PAUSE_S))
            chosen.resume()
        elif victim in (Victim.HUNG_WORKER, Victim.HUNG_GATEWAY):
            chosen.suspend()
            _, alive = psutil.wait_procs([chosen], timeout=HUNG_TIMEOUT_S)
            assert not alive, "it was not replaced"
        else:
            chosen.kill()
            psutil.wait_procs([chosen], timeout=5)


def kill_while_starting(broker: Broker, after_s: float) -> None:
    """Start it and kill all of it after that time, whether it is ready by then or not."""

    def start() -> None:
        with contextlib.suppress(BrokerFailed):
            broker.start()

    thread = threading.Thread(target=start)
    thread.start()
    time.sleep(after_s)
    if broker.running:
        os.killpg(broker.pid, signal.SIGKILL)  # it leads its own process group
    thread.join()
    broker.kill()


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return " ".join(process.cmdline())
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash_ledger.run", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="repeats victims and moments (default: a new one)")
    parser.add_argument(
        "--victim", choices=[victim.value for victim in Victim], help="kill only these (default: mixed)"
    )
    parser.add_argument("--workers", type=int, default=1, help="0: all in one process (default: %(default)s)")
    parser.add_argument("--partitioned", action="store_true", help="all queues are partitioned; needs workers")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    victims = [Victim(options.victim)] if options.victim else []
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="peeklock-ledger-") as directory:
        report = run(
            Path(directory),
            options.kills,
            seed=seed,
            victims=victims,
            workers=options.workers,
            partitioned=options.partitioned,
            say=lambda text: print(text, flush=True),
        )
    print(report)
    return 0 if report.sound else 1


if __name__ == "__main__":
    sys.exit(main())
