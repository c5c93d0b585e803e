"""Mixed load on one broker for a long time, watching memory, files, counts and latency: `python -m tests.soak.run`."""

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

import psutil

from bench import idle_connections
from bench.processes import Memory, memory_of
from tests.brokers import KEY, KEY_NAME, Broker
from tests.crash_ledger.ledger import Ledger, Summary
from tests.crash_ledger.links import Login
from tests.crash_ledger.load import BROKEN_BY_US, Load, Mix
from tests.crash_ledger.run import CONFIG, PARTITIONED, QUEUE
from tests.soak.checks import MB, Limits, Sample, problems, quantile

MIX = Mix(senders=3, receivers=4, window=50, rate_per_s=500, dead_letter=0.01, abandon=0.05, hold=0.1)
HELD_CONNECTIONS = 100


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

    `partitioned`: the queue is, on 4 partitions and 2 workers, and clients use two gateways.
    """
    found: list[str] = []
    samples: list[Sample] = []
    ledger = Ledger()
    mix = replace(mix, has_keys=partitioned)
    made = Broker(directory, PARTITIONED, workers=2) if partitioned else Broker(directory, CONFIG)
    with made as broker, contextlib.ExitStack() as stack:
        login = Login(broker.amqp_port, KEY_NAME, KEY)
        held = idle_connections.open_all("127.0.0.1", login.port, KEY_NAME, KEY, [QUEUE], HELD_CONNECTIONS, credit=0)
        for connection in held:
            stack.callback(connection.socket.close)
        load = Load(login, QUEUE, ledger, mix, seed)
        began = time.monotonic()
        pids = {process.pid for process in broker.processes()}
        next_sample, next_break = every_s, break_every_s
        while (now := time.monotonic() - began) < seconds:
            load.run(min(next_sample, next_break, seconds) - now)
            now = time.monotonic() - began
            if now >= next_break:
                load.break_a_connection()
                next_break += break_every_s
            if now >= next_sample:
                samples.append(sample(broker, load, now))
                say(line(samples[-1]))
                next_sample += every_s
        drained = load.drained(found)
        if {process.pid for process in broker.processes()} != pids:
            found.append("a process of the broker died and was started again")
    lost = Counter(reason for reason in load.lost_links if not reason.endswith(BROKEN_BY_US))
    found += [f"link lost {count} times: {reason}" for reason, count in lost.most_common(5)]
    summary = ledger.close(drained=drained)
    if 2 * summary.judged < summary.deliveries:  # links are lost for a small part of the time
        found.append(f"only {summary.judged:,} of {summary.deliveries:,} deliveries were judged by order and lock")
    found += [str(violation) for violation in summary.violations[:20]]
    return Report(samples, summary, problems(samples, limits or Limits()) + found)


def sample(broker: Broker, load: Load, at_s: float) -> Sample:
    """Takes the latencies since the last one."""
    processes = broker.processes()
    latencies, load.latencies_ms = load.latencies_ms, []
    memory: Memory = memory_of(processes, broker.data_dir)
    return Sample(
        at_s=at_s,
        memory_bytes=memory.used,
        open_files=sum(open_files(process) for process in processes),
        accepted=load.accepted,
        waiting=load.waiting(),
        p50_ms=quantile(latencies, 0.5),
        p99_ms=quantile(latencies, 0.99),
    )


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
        f"p50 {sample.p50_ms:6.1f} ms  p99 {sample.p99_ms:6.1f} ms"
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
