"""Measures each group of rows.

Brokers take turns within every run. The broker that is not measured is stopped by a signal (SIGSTOP). The turn of a
broker ends when its background work has ended, because otherwise that work would count for the next broker.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench import load
from bench.features import FEATURES
from bench.processes import Memory
from bench.recording import Recorder
from bench.rows import KIB, MODE_NAMES
from bench.servers import ROOT, PeeklockWithFeatures, Server

MB = 1_000_000
KB = 1_000
Maker = Callable[[Path], Server]


@dataclass(kw_only=True)
class Bench(Recorder):
    """Measures all groups. The first of the makers is Peeklock's."""

    makers: Sequence[Maker]
    say: Callable[[str], None]

    def measure(self, groups: Sequence[str]) -> None:
        """Raises LoadFailed, ServerFailed."""
        if "idle" in groups:
            self._each_alone(self.plan.runs, self._idle)
        if "connections" in groups:
            self._each_alone(self.plan.runs, self._connections)
        together = [group for group in groups if group in ("throughput", "confirmed", "unpipelined", "openloop")]
        if together:
            self._interleaved(together)
        if "backlog" in groups:
            self._each_alone(self.plan.runs, self._backlog, peer_runs=self.plan.peer_backlog_runs)
        for group in [group for group in groups if group in FEATURES]:
            for number in range(self.plan.runs):
                with fresh(PeeklockWithFeatures) as server:
                    self.say(f"{group}: run {number + 1} of {self.plan.runs}")
                    FEATURES[group](self, server)

    # --- one broker at a time, each on a fresh data directory

    def _each_alone(self, runs: int, measure: Callable[[Server], None], peer_runs: int | None = None) -> None:
        for number in range(runs):
            for place, maker in enumerate(self.makers):
                if place and peer_runs is not None and number >= peer_runs:
                    continue
                with fresh(maker) as server:
                    self.say(f"{measure.__name__.strip('_')}: {server.name}, run {number + 1} of {runs}")
                    measure(server)

    def _idle(self, server: Server) -> None:
        self.add(server, "start", server.start())
        time.sleep(self.plan.rest_seconds)
        memory = server.memory()
        self.add(server, "idle-used", memory.used / MB)
        self.add(server, "idle-anonymous", memory.anonymous / MB)
        self.add(server, "idle-rss", memory.rss / MB)

    def _connections(self, server: Server) -> None:
        server.start()
        time.sleep(self.plan.rest_seconds)
        before = server.memory()
        with idle_connections(server, self.plan.connections):
            time.sleep(self.plan.rest_seconds)
            grown = server.memory() - before
        self.add(server, "connection-used", grown.used / self.plan.connections / KB)
        self.add(server, "connection-anonymous", grown.anonymous / self.plan.connections / KB)
        self.add(server, "connection-rss", grown.rss / self.plan.connections / KB)

    def _backlog(self, server: Server) -> None:
        server.start()
        time.sleep(self.plan.rest_seconds)
        before = server.memory()
        count = str(self.plan.backlog)
        loaded = self._run(server, "send", 1, "-n", count, "--size", str(KIB), "--idle", "60")
        self.add(server, "backlog-load", loaded.messages_per_s)
        time.sleep(self.plan.rest_seconds)
        self._add_growth(server, server.memory() - before)
        server.stop()
        self.add(server, "backlog-restart", self._first_message(server))
        left = str(self.plan.backlog - 1)
        drained = self._run(server, "recv", 1, "-n", left, "--size", str(KIB), "--idle", "60")
        self.add(server, "backlog-drain", drained.messages_per_s)

    def _add_growth(self, server: Server, grown: Memory) -> None:
        self.add(server, "backlog-used", grown.used / MB)
        self.add(server, "backlog-anonymous", grown.anonymous / MB)
        self.add(server, "backlog-cache", grown.store_cache / MB)
        self.add(server, "backlog-rss", grown.rss / MB)

    def _first_message(self, server: Server, timeout_s: float = 180.0) -> float:
        """Seconds from the start of the process until a client has a message; the client tries again and again."""
        began = time.monotonic()
        server.spawn()
        while True:
            try:
                load.run(
                    self.tools.load,
                    "recv",
                    server.endpoint,
                    server.address(1),
                    "-n",
                    "1",
                    "--window",
                    "1",
                    "--idle",
                    "1",
                )
                return time.monotonic() - began
            except load.LoadFailed:
                if time.monotonic() - began > timeout_s:
                    raise
                time.sleep(0.01)

    # --- taking turns

    def _interleaved(self, groups: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory(prefix="peeklock-bench-") as scratch:
            servers: list[Server] = []
            try:
                for number, maker in enumerate(self.makers):
                    directory = Path(scratch) / str(number)
                    directory.mkdir()
                    servers.append(maker(directory))
                    servers[-1].start()
                    self._warm_up(servers[-1])
                    servers[-1].pause()
                for number in range(self.plan.runs):
                    order = servers if number % 2 == 0 else servers[::-1]
                    for group in groups:
                        self.say(f"{group}: run {number + 1} of {self.plan.runs}")
                        self._turns(group, order)
            finally:
                for server in servers:
                    server.resume()
                    server.close()

    def _warm_up(self, server: Server) -> None:
        if self.plan.warm_up_seconds:
            self._run(server, "both", 16, "--size", str(KIB), "--seconds", str(self.plan.warm_up_seconds))
        server.settle()

    def _turns(self, group: str, servers: Sequence[Server]) -> None:
        if group == "throughput":
            for number, size in enumerate(self.plan.sizes):
                for server in servers:
                    with awake(server):
                        self._throughput(server, size, queue=1 + number)
            return
        measure = {"confirmed": self._confirmed, "unpipelined": self._unpipelined, "openloop": self._open_loop}[group]
        for server in servers:
            if group == "confirmed" and server.name != "Peeklock":
                continue  # RabbitMQ 3.10 refuses rcv-settle-mode second
            with awake(server):
                measure(server)

    def _throughput(self, server: Server, size: int, queue: int) -> None:
        seconds, body = ("--seconds", str(self.plan.seconds)), ("--size", str(size))
        sent = self._run(server, "send", queue, *body, *seconds)
        received = self._run(server, "recv", queue, *body, "-n", str(sent.messages), "--idle", "8")
        both = self._run(server, "both", queue, *body, *seconds)
        for mode, figures in zip(MODE_NAMES, (sent, received, both), strict=True):
            self.add(server, f"{mode}-{size}", figures.messages_per_s)

    def _confirmed(self, server: Server) -> None:
        seconds, body = ("--seconds", str(self.plan.seconds)), ("--size", str(KIB))
        sent = self._run(server, "send", 4, *body, *seconds)
        received = self._run(server, "recv", 4, *body, "--second", "-n", str(sent.messages), "--idle", "8")
        both = self._run(server, "both", 4, *body, "--second", *seconds)
        self.add(server, "confirmed-recv", received.messages_per_s)
        self.add(server, "confirmed-both", both.messages_per_s)

    def _unpipelined(self, server: Server) -> None:
        seconds = min(3.0, self.plan.seconds)
        figures = self._run(server, "send", 5, "--size", str(KIB), "--window", "1", "--seconds", str(seconds))
        assert figures.ack is not None
        self.add(server, "unpipelined-p50", figures.ack.p50)
        self.add(server, "unpipelined-p99", figures.ack.p99)

    def _open_loop(self, server: Server) -> None:
        count = int(self.plan.rate * self.plan.rate_seconds)
        rate = ("--rate", str(self.plan.rate), "-n", str(count), "--warmup", str(count // 20))
        figures = self._run(server, "both", 6, "--size", str(KIB), *rate, "--idle", "15")
        assert figures.end_to_end is not None
        self.add(server, "openloop-p50", figures.end_to_end.p50)
        self.add(server, "openloop-p99", figures.end_to_end.p99)

    def _run(self, server: Server, mode: str, queue: int, *options: str) -> load.Figures:
        return self.run_at(server, self.tools.load, mode, server.address(queue), *options)


AnyServer = TypeVar("AnyServer", bound=Server)


@contextmanager
def fresh(maker: Callable[[Path], AnyServer]) -> Iterator[AnyServer]:
    with tempfile.TemporaryDirectory(prefix="peeklock-bench-") as scratch:
        server = maker(Path(scratch))
        try:
            yield server
        finally:
            server.close()


@contextmanager
def awake(server: Server) -> Iterator[None]:
    server.resume()
    server.settle()
    try:
        yield
        server.settle()
    finally:
        server.pause()


@contextmanager
def idle_connections(server: Server, count: int) -> Iterator[None]:
    """`count` connections with a receiver each while the block runs. Raises ServerFailed."""
    addresses = ",".join(server.address(n) for n in range(1, 17))
    command = [sys.executable, "-m", "bench.idle_connections", "--port", str(server.endpoint.port)]
    command += ["--user", server.endpoint.user, "--password", server.endpoint.password]
    command += ["--addresses", addresses, "--count", str(count)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        if program.stdout.readline() != f"open {count}\n":
            program.stdin.close()
            raise load.LoadFailed(f"{server.name}: {count} idle connections could not be opened")
        yield
        program.stdin.close()
