"""Measures the rows of features, for Peeklock alone: the peer has different features, or none."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import mean

from bench.plan import KIB, MODES
from bench.recording import Recorder
from bench.servers import PARTITIONED_QUEUE, Peeklock, PeeklockPartitioned, PeeklockWithFeatures, awake

MB = 1_000_000
PER_SESSION = 10
RECEIVERS = 200
ACCEPTS_PER_S = 400  # by all receivers: each takes a session and its messages, and works for the rest of half a second
ACTIVE_SESSIONS = 1000
IN_TRANSACTION = 10  # sends, and completions
TRANSACTIONS_AT_ONCE = 16


def topics(bench: Recorder, server: Peeklock) -> None:
    """Publishing and forwarding."""
    server.start()
    body = ("--size", str(KIB), "--subject", "wanted", "--seconds", str(bench.plan.seconds))
    stored = {}
    for key, address in (
        ("", server.address(1)),
        ("topic-10", "ten"),
        ("topic-1", "one"),
        ("topic-1000", "thousand"),
        ("topic-sql", "sql"),
    ):
        used = server.stored_bytes()
        figures = bench.run_at(server, bench.tools.load, "send", address, *body)
        stored[key] = (server.stored_bytes() - used) / figures.messages
        if key:
            bench.add(server, key, figures.messages_per_s)
    bench.add(server, "topic-10-bytes", stored["topic-10"] / (1.3 * stored[""] + 10 * 150))
    bench.add(server, "topic-1000-share", bench.last(server, "topic-1000") / bench.last(server, "topic-1"))
    count = str(int(20_000 * bench.plan.seconds))
    chain = ("--from", "third", "--size", str(KIB), "-n", count, "--idle", "20")
    bench.add(server, "forward-3", bench.run_at(server, bench.tools.load, "both", "first", *chain).messages_per_s)


def sessions(bench: Recorder, server: Peeklock) -> None:
    """Many sessions that wait, and many that are received at once."""
    server.start()
    plan, work = bench.plan, bench.tools.work
    time.sleep(plan.rest_seconds)
    before = server.memory()
    size, idle = ("--size", str(KIB)), ("--idle", "60")
    filled = ("--sessions", str(plan.sessions), "-n", str(plan.sessions * PER_SESSION))
    bench.run_at(server, work, "fill", "sessions", *filled, *size, *idle)
    receivers = ("--receivers", str(RECEIVERS), "--per", str(PER_SESSION))
    count = min(int(ACCEPTS_PER_S * plan.seconds), plan.sessions // 2)
    paced = ("-n", str(count), "--rate", str(ACCEPTS_PER_S))
    accepted = bench.run_at(server, work, "accept", "sessions", *receivers, *paced)
    assert accepted.ack is not None
    bench.add(server, "accept-p50", accepted.ack.p50)
    bench.add(server, "accept-p99", accepted.ack.p99)
    time.sleep(plan.rest_seconds)
    bench.add(server, "sessions-used", (server.memory() - before).used / MB)
    unpaced = ("-n", str(min(5000, (plan.sessions - count) // 2)))
    bench.add(
        server, "accept-rate", bench.run_at(server, work, "accept", "sessions", *receivers, *unpaced).messages_per_s
    )
    server.stop()
    server.empty()
    server.start()
    stream = ("--sessions", str(ACTIVE_SESSIONS), *size, "--seconds", str(plan.seconds))
    plain = bench.run_at(server, work, "stream", server.address(1), *stream, "--plain").messages_per_s
    active = bench.run_at(server, work, "stream", "sessions", *stream).messages_per_s
    bench.add(server, "sessions-plain", plain)
    bench.add(server, "sessions-1000", active)
    bench.add(server, "sessions-share", active / plain)


def duplicates(bench: Recorder, server: Peeklock) -> None:
    """The cost of remembering ids, all of them new."""
    server.start()
    plan, tool = bench.plan, bench.tools.load
    time.sleep(plan.rest_seconds)
    before = server.memory()
    body = ("--size", str(KIB), "--message-id")
    bench.run_at(server, tool, "send", "ids", *body, "-n", str(plan.ids), "--idle", "60")
    time.sleep(plan.rest_seconds)
    bench.add(server, "duplicates-used", (server.memory() - before).used / MB)
    sent: dict[str, list[float]] = {"plain": [], "send": []}
    for _ in range(2):
        for key, address in (("plain", server.address(1)), ("send", "ids")):
            server.settle()  # earlier ids are still being merged
            figures = bench.run_at(server, tool, "send", address, *body, "--seconds", str(plan.seconds))
            sent[key].append(figures.messages_per_s)
    plain, detected = mean(sent["plain"]), mean(sent["send"])
    bench.add(server, "duplicates-plain", plain)
    bench.add(server, "duplicates-send", detected)
    bench.add(server, "duplicates-share", detected / plain)


def transactions(bench: Recorder, server: Peeklock) -> None:
    server.start()
    options = ("--receivers", str(TRANSACTIONS_AT_ONCE), "--per", str(IN_TRANSACTION), "--size", str(KIB))
    seconds = ("--seconds", str(bench.plan.seconds))
    figures = bench.run_at(server, bench.tools.work, "transact", server.address(1), *options, *seconds)
    assert figures.ack is not None
    bench.add(server, "transactions", figures.messages_per_s)
    bench.add(server, "transactions-p50", figures.ack.p50)


def partitioned(bench: Recorder, server: Peeklock) -> None:
    """A partitioned queue beside a plain one of the same broker, and one of a broker with default settings.

    Each is measured twice in a round, the second time in the opposite order, so that what changes steadily counts for
    none of them.
    """
    server.start()
    usual = Peeklock(server.directory / "default", server.root, server.name)
    usual.directory.mkdir()
    try:
        usual.start()
        queues = {
            "partitioned-plain": (server, server.address(1)),
            "partitioned": (server, PARTITIONED_QUEUE),
            "partitioned-default": (usual, usual.address(1)),
        }
        for which, address in queues.values():
            warm_up = ("--size", str(KIB), "--seconds", str(bench.plan.warm_up_seconds))
            bench.run_at(which, bench.tools.load, "both", address, *warm_up)
        for which in (server, usual):
            which.settle()
            which.pause()
        rates = _in_turn(bench, queues)
    finally:
        usual.resume()
        usual.close()
    server.resume()
    for mode in MODES:
        of = {name: mean(rates[name, mode]) for name in queues}
        for name, rate in of.items():
            bench.add(server, f"{name}-{mode}", rate)
        bench.add(server, f"partitioned-share-{mode}", of["partitioned"] / of["partitioned-plain"])
        bench.add(server, f"partitioned-of-default-{mode}", of["partitioned"] / of["partitioned-default"])


def _in_turn(bench: Recorder, queues: Mapping[str, tuple[Peeklock, str]]) -> dict[tuple[str, str], list[float]]:
    """The rates by queue and mode. All servers are paused before and after."""
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    size = ("--size", str(KIB))
    for order in (list(queues), list(queues)[::-1]):
        sent: dict[str, int] = {}
        for mode in MODES:
            for name in order:
                server, address = queues[name]
                limit = (
                    ("-n", str(sent[name]), "--idle", "8") if mode == "recv" else ("--seconds", str(bench.plan.seconds))
                )
                with awake(server):
                    figures = bench.run_at(
                        server, bench.tools.load, mode, address, *size, *limit, cell=f"{name}-{mode}"
                    )
                rates[name, mode].append(figures.messages_per_s)
                if mode == "send":
                    sent[name] = figures.messages
    return rates


FEATURES: dict[str, tuple[type[Peeklock], Callable[[Recorder, Peeklock], None]]] = {
    "topics": (PeeklockWithFeatures, topics),
    "sessions": (PeeklockWithFeatures, sessions),
    "duplicates": (PeeklockWithFeatures, duplicates),
    "transactions": (PeeklockWithFeatures, transactions),
    "partitioned": (PeeklockPartitioned, partitioned),
}
