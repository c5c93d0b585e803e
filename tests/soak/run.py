"""Mixed load on one broker for a long time; memory, files, counts, time are watched: `python -m tests.soak.run`."""

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import psutil

from bench import idle_connections
from bench.processes import Memory, cpu_s, machine_cpu_s, memory_of
from tests.brokers import KEY, KEY_NAME, Broker
from tests.crash_ledger.ledger import Ledger, Summary
from tests.crash_ledger.links import Login
from tests.crash_ledger.load import BROKEN_BY_US, Load, Mix
from tests.crash_ledger.run import CONFIG, PARTITIONED, QUEUE
from tests.soak.checks import LEAST_SAMPLES, MB, Limits, Sample, problems, quantile

MIX = Mix(senders=3, receivers=4, window=50, rate_per_s=500, dead_letter=0.01, abandon=0.05, hold=0.1)
HELD_CONNECTIONS = 100
STEP_S = 0.1
LONGER_S = 120.0  # on a busy machine, what there is to judge takes so much longer at most


@dataclass(frozen=True)
class Report:
    samples: list[Sample]
    summary: Summary
    problems: list[str]

    def __str__(self) -> str:
        return "\n".join([str(self.summary), *(f"PROBLEM: {problem}" for problem in self.problems)])


def run(
    directory: Path,
    seconds: float,
    *,
    every_s: float = 10.0,
    break_every_s: float = 2.0,
    mix: Mix = MIX,
    limits: Limits | None = None,
    seed: int = 0,
    partitioned: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Load for `seconds`, a sample each `every_s`; one connection at random breaks each `break_every_s`.

    A break waits until all links have been there for so long, and most deliveries so far were judged. The run goes on
    until there is enough to judge.

    `partitioned`: the queue is, on 4 partitions and 2 workers, and clients use two gateways.
    """
    found: list[str] = []
    samples: list[Sample] = []
    limits = limits or Limits()
    ledger = Ledger()
    mix = replace(mix, has_keys=partitioned)
    made = Broker(directory, PARTITIONED, workers=2) if partitioned else Broker(directory, CONFIG)
    with made as broker, contextlib.ExitStack() as stack:
        login = Login(broker.amqp_port, KEY_NAME, KEY)
        held = idle_connections.open_all("127.0.0.1", login.port, KEY_NAME, KEY, [QUEUE], HELD_CONNECTIONS, credit=0)
        for connection in held:
            stack.callback(connection.socket.close)
        load = Load(login, QUEUE, ledger, mix, seed)
        began, now = time.monotonic(), 0.0
        pids = {process.pid for process in broker.processes()}
        watch = Watch(broker, load)
        next_sample, next_break = every_s, break_every_s

        def is_enough() -> bool:
            return len(samples) >= LEAST_SAMPLES and load.accepted >= limits.least_accepted

        while now < seconds or (now < seconds + LONGER_S and not is_enough()):
            load.run(STEP_S)
            now = time.monotonic() - began
            if not load.all_attached():
                next_break = now + break_every_s
            elif now >= next_break and 5 * ledger.judged > 3 * ledger.deliveries:
                load.break_a_connection()
                next_break = now + break_every_s
            if now >= next_sample:
                samples.append(watch.sample(now))
                say(line(samples[-1]))
                next_sample = now + every_s
        drained = load.drained(found)
        if {process.pid for process in broker.processes()} != pids:
            found.append("a process of the broker died and was started again")
    lost = Counter(reason for reason in load.lost_links if not reason.endswith(BROKEN_BY_US))
    found += [f"link lost {count} times: {reason}" for reason, count in lost.most_common(5)]
    summary = ledger.close(drained=drained)
    if 2 * summary.judged < summary.deliveries:  # links are lost for a small part of the time
        found.append(f"only {summary.judged:,} of {summary.deliveries:,} deliveries were judged by order and lock")
    found += [str(violation) for violation in summary.violations[:20]]
    return Report(samples, summary, problems(samples, limits) + found)


class Times(NamedTuple):
    """The clock, and processor time of the broker and of all others but this process."""

    at: float
    broker_s: float
    others_s: float


class Watch:
    """Takes samples, each with what has happened since the one before."""

    def __init__(self, broker: Broker, load: Load) -> None:
        self._broker, self._load = broker, load
        self._before = self._times()

    def sample(self, at_s: float) -> Sample:
        processes = self._broker.processes()
        latencies, self._load.latencies_ms = self._load.latencies_ms, []
        before, now = self._before, self._times()
        self._before = now
        memory: Memory = memory_of(processes, self._broker.data_dir)
        return Sample(
            at_s=at_s,
            memory_bytes=memory.used,
            open_files=sum(open_files(process) for process in processes),
            accepted=self._load.accepted,
            waiting=self._load.waiting(),
            p50_ms=quantile(latencies, 0.5),
            p99_ms=quantile(latencies, 0.99),
            cpu_s=now.broker_s,
            others=max(0.0, now.others_s - before.others_s) / (now.at - before.at),
        )

    def _times(self) -> Times:
        broker_s = cpu_s(self._broker.processes())
        return Times(time.monotonic(), broker_s, machine_cpu_s() - broker_s - time.process_time())


def open_files(process: psutil.Process) -> int:
    """0 for a process that has just ended."""
    try:
        return process.num_fds()
    except psutil.NoSuchProcess:
        return 0


def line(sample: Sample) -> str:
    return (
        f"{sample.at_s:7.0f} s  memory {sample.memory_bytes / MB:7.1f} MB  files {sample.open_files:4d}  "
        f"accepted {sample.accepted:9,}  waiting {sample.waiting:5,}  "
        f"p50 {sample.p50_ms:6.1f} ms  p99 {sample.p99_ms:6.1f} ms  "
        f"cpu {sample.cpu_s:7.1f} s  others {sample.others:4.1f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=MIX.rate_per_s, help="messages per second (default 500)")
    parser.add_argument(
        "--memory-growth", type=float, default=Limits().memory_growth_mb, help="MB allowed (default 20)"
    )
    parser.add_argument("--seed", type=int, default=None, help="repeats the choices (default: a new one)")
    parser.add_argument("--partitioned", action="store_true", help="the queue is, and there are two gateways")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    seconds = options.minutes * 60
    mix = Mix(**{**vars(MIX), "rate_per_s": options.rate})
    limits = Limits(memory_growth_mb=options.memory_growth)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="peeklock-soak-") as directory:
        report = run(
            Path(directory),
            seconds,
            every_s=max(1.0, min(10.0, seconds / 40)),
            mix=mix,
            limits=limits,
            seed=seed,
            partitioned=options.partitioned,
            say=lambda text: print(text, flush=True),
        )
    print(report)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
