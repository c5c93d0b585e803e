"""What a journal costs the broker: brokers without one, with one of events and with one of bodies take turns.

On few processors a journal that lags behind makes a broker look fast, and its work falls into the next run. So a run
begins when the journal has all rows; what it lacked at the end of the run is a figure, and what it then did counts for
the cost of a message.
"""

import contextlib
from collections import defaultdict
from statistics import mean
from typing import NamedTuple

from bench.pipeline.brokers import MODES as JOURNALS
from bench.pipeline.brokers import ROWS, PeeklockWithJournal
from bench.plan import KIB, MODES
from bench.processes import cpu_s_by_role
from bench.recording import CLIENT, CPU, Recorder, alternating, cost_key
from bench.servers import Peeklock

LINKS = 4


class Run(NamedTuple):
    """Messages per second, alone and with the time until all was journaled; `waiting`: the share of the run's rows
    that were not journaled at its end."""

    messages: int
    rate: float
    whole_rate: float
    waiting: float


def journal(bench: Recorder, server: Peeklock) -> None:
    """Each has some turns in a round, in alternating order."""
    assert isinstance(server, PeeklockWithJournal)
    with contextlib.ExitStack() as stack:
        brokers = {}
        for mode in JOURNALS:
            broker = server
            if mode != server.mode:
                broker = PeeklockWithJournal(server.directory / mode, server.root, server.name, mode)
                broker.directory.mkdir()
                stack.callback(broker.close)
            brokers[mode] = broker
            _begin(bench, broker)
        runs: dict[tuple[str, str], list[Run]] = defaultdict(list)
        for order in alternating(JOURNALS, bench.plan.turns):
            for phase in MODES:
                for mode in order:
                    sent = runs[mode, "send"][-1].messages if phase == "recv" else 0
                    runs[mode, phase].append(_run(bench, brokers[mode], phase, sent))
        server.resume()
    for phase in MODES:
        rates = {mode: mean(run.rate for run in runs[mode, phase]) for mode in JOURNALS}
        for mode in JOURNALS:
            key = f"journal-{mode}"
            bench.add(server, f"{key}-{phase}", rates[mode])
            if mode != "off":
                bench.add(server, f"{key}-share-{phase}", rates[mode] / rates["off"])
                bench.add(server, f"{key}-waiting-{phase}", max(run.waiting for run in runs[mode, phase]))
                bench.add(server, f"{key}-whole-{phase}", mean(run.whole_rate for run in runs[mode, phase]))


def _begin(bench: Recorder, broker: PeeklockWithJournal) -> None:
    """Start and warm up a broker, and stop it by a signal."""
    broker.start()
    options = ("--size", str(KIB), "--links", str(LINKS), "--seconds", str(bench.plan.warm_up_seconds))
    warm = bench.run_at(broker, bench.tools.load, "both", broker.address(1), *options)
    if broker.mode != "off":
        broker.wait_until_journaled(warm.messages * ROWS["both"])
    broker.settle()
    broker.pause()


def _run(bench: Recorder, broker: PeeklockWithJournal, phase: str, sent: int) -> Run:
    """One run of a broker that is paused; it ends when the broker has nothing more to do, and is paused again."""
    broker.resume()
    broker.settle()
    size = ("--size", str(KIB), "--links", str(LINKS))
    limit = ("-n", str(sent), "--idle", "8") if phase == "recv" else ("--seconds", str(bench.plan.seconds))
    journaled = broker.journaled_rows()
    used = cpu_s_by_role(broker.processes())
    figures = bench.run_at(broker, bench.tools.load, phase, broker.address(1), *size, *limit)
    waiting, catch_up_s = 0.0, 0.0
    if broker.mode != "off":
        made = figures.messages * ROWS[phase]
        waiting = max(0.0, 1 - (broker.journaled_rows() - journaled) / made)
        catch_up_s = broker.wait_until_journaled(journaled + made)
    broker.settle()
    broker.pause()
    cell = f"journal-{broker.mode}-{phase}"
    for role, seconds in cpu_s_by_role(broker.processes()).items():
        cost_us = (seconds - used.get(role, 0.0)) / figures.messages * 1e6
        bench.add(broker, cost_key(cell, CPU, role), cost_us)
    bench.add(broker, cost_key(cell, CPU, CLIENT), figures.client_cpu_s / figures.messages * 1e6)
    whole_rate = figures.messages / (figures.messages / figures.messages_per_s + catch_up_s)
    return Run(figures.messages, figures.messages_per_s, whole_rate, waiting)
