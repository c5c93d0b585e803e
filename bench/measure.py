"""Measures each group of rows.

Brokers take turns within every round. A broker whose turn it is not is stopped by a signal (SIGSTOP), or does not run.
The turn of a broker ends when its background work has ended: otherwise that work would count for the next broker.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from bench import instructions, load
from bench.features import FEATURES
from bench.pipeline.groups import PIPELINE, PIPELINE_OF_COMMITS
from bench.plan import KIB, Cell
from bench.processes import Memory, command_of, role
from bench.recording import Recorder
from bench.rows import LATENCIES, QUANTILES
from bench.servers import ROOT, Peeklock, Server, ServerFailed, ServerMissing, awake

MB = 1_000_000
KB = 1_000
FIRST_MESSAGE_TIMEOUT_S = 1800.0  # a backlog may have to be read first
LOAD_BEFORE_KILL_S = 3.0
TOGETHER = ("throughput", "confirmed", "unpipelined", "openloop")
Maker = Callable[[Path], Server]


@dataclass(kw_only=True)
class Bench(Recorder):
    """Measures all groups: `ours` are checkouts of Peeklock by the names of their columns, `peers` other brokers."""

    ours: dict[str, Path]
    peers: Sequence[Maker]
    say: Callable[[str], None]
    after_round: Callable[[], None] = lambda: None  # what was measured so far can be saved
    _maximum: dict[str, float] = field(default_factory=dict)  # `both` at the end of the warm-up, msg/s, by server

    @property
    def makers(self) -> list[Maker]:
        return [*self._ours(Peeklock), *self.peers]

    def _ours(self, kind: type[Peeklock]) -> list[Maker]:
        def maker(name: str, root: Path) -> Maker:
            return lambda directory: kind(directory, root, name)

        return [maker(name, root) for name, root in self.ours.items()]

    def measure(self, groups: Sequence[str]) -> None:
        """Raises ServerFailed when a broker does not start."""
        plan = self.plan
        if "idle" in groups:
            self._each_alone(plan.rounds, self.makers, "idle", self._idle)
        if "instructions" in groups:
            self._instructions_per_message()
        if "connections" in groups:
            self._each_alone(plan.rounds, self.makers, "connections", self._connections)
        if together := [group for group in TOGETHER if group in groups]:
            self._interleaved(together)
        for group in [group for group in groups if group in FEATURES]:
            kind, feature = FEATURES[group]
            self._each_alone(plan.rounds, self._ours(kind), group, self._feature(feature))
        for group in [group for group in groups if group in PIPELINE]:
            kind, feature = PIPELINE[group]
            makers = self._ours(kind) if group in PIPELINE_OF_COMMITS else self._ours(kind)[:1]
            self._each_alone(plan.rounds, makers, group, self._feature(feature))
        if "backlog" in groups:
            for count in plan.backlogs:
                self._each_alone(plan.backlog_rounds, self.makers, f"backlog of {count:,}", self._backlog(count))

    # --- one broker at a time, each on a fresh data directory

    def _each_alone(self, rounds: int, makers: Sequence[Maker], what: str, measure: Callable[[Server], None]) -> None:
        for number in range(rounds):
            for maker in rotated(makers, number):
                with fresh(maker) as server:
                    self.say(f"{what}: {server.name}, round {number + 1} of {rounds}")
                    try:
                        measure(server)
                    except load.LoadFailed as problem:
                        self._failed(what, server, problem)
            self.after_round()

    def _failed(self, what: str, server: Server, problem: Exception) -> None:
        self.failed.append(f"{what}, {server.name}: {problem}")
        self.say(self.failed[-1])

    def _feature(self, feature: Callable[[Recorder, Peeklock], None]) -> Callable[[Server], None]:
        def measure(server: Server) -> None:
            assert isinstance(server, Peeklock)
            feature(self, server)

        return measure

    def _idle(self, server: Server) -> None:
        self.add(server, "start", server.start())
        time.sleep(self.plan.rest_seconds)
        memory = server.memory()
        self.add(server, "idle-used", memory.used / MB)
        self.add(server, "idle-anonymous", memory.anonymous / MB)
        self.add(server, "idle-rss", memory.rss / MB)
        workers = sum(role(command_of(process)) == "worker" for process in server.processes())
        self.add(server, "idle-disk", server.disk_bytes() / (1 << 20) / max(workers, 1))

    def _instructions_per_message(self) -> None:
        self.say("instructions")
        keys = dict(zip((work.name for work in instructions.WORKS), ("one", "send", "recv"), strict=True))
        for name, root in self.ours.items():
            try:
                counted = instructions.measure(self.tools, root)
            except ServerMissing as missing:
                self.failed.append(f"instructions: {missing}")
                return
            for work, per_role in counted.items():
                each = self.samples.setdefault(name, {})
                each[f"instructions-{keys[work]}"] = [instructions.total(per_role)]

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

    def _backlog(self, count: int) -> Callable[[Server], None]:
        def measure(server: Server) -> None:
            server.start()
            time.sleep(self.plan.rest_seconds)
            before = server.memory()
            body = ("--size", str(KIB), "--idle", "60")
            loaded = self._run(server, "send", 1, "-n", str(count), *body)
            key = f"backlog-{count}"
            self.add(server, f"{key}-load", loaded.messages_per_s)
            time.sleep(self.plan.rest_seconds)
            self._add_growth(server, key, server.memory() - before)
            self.add(server, f"{key}-disk", server.disk_bytes() / MB)
            self._kill_under_load(server)
            self.add(server, f"{key}-restart", self._first_message(server))
            drained = self._run(server, "recv", 1, "-n", str(count - 1), *body)
            self.add(server, f"{key}-drain", drained.messages_per_s)

        return measure

    def _add_growth(self, server: Server, key: str, grown: Memory) -> None:
        self.add(server, f"{key}-used", grown.used / MB)
        self.add(server, f"{key}-anonymous", grown.anonymous / MB)
        self.add(server, f"{key}-cache", grown.store_cache / MB)
        self.add(server, f"{key}-rss", grown.rss / MB)

    def _kill_under_load(self, server: Server) -> None:
        options = ("--size", str(KIB), "--seconds", "60")
        command = load.command(self.tools.load, "send", server.endpoint, server.address(1), *options)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as sender:
            time.sleep(LOAD_BEFORE_KILL_S)
            still_sending = sender.poll() is None
            server.kill()
        if not still_sending:
            raise load.LoadFailed("the sender ended before the broker was killed")

    def _first_message(self, server: Server) -> float:
        """Seconds from the start of the process until a client has a message; the client tries again and again."""
        began = time.monotonic()
        server.spawn()
        one = ("-n", "1", "--window", "1", "--idle", "1")
        while True:
            try:
                load.run(self.tools.load, "recv", server.endpoint, server.address(1), *one)
                return time.monotonic() - began
            except load.LoadFailed:
                if time.monotonic() - began > FIRST_MESSAGE_TIMEOUT_S:
                    raise
                time.sleep(0.01)

    # --- taking turns

    def _interleaved(self, groups: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory(prefix="peeklock-bench-") as scratch:
            turns = [Turn(maker, Path(scratch) / str(number)) for number, maker in enumerate(self.makers)]
            try:
                for turn in turns:
                    self._begin(turn)
                for number in range(self.plan.rounds):
                    for group in groups:
                        self.say(f"{group}: round {number + 1} of {self.plan.rounds}")
                        for measure in self._measurements(group):
                            for turn in rotated(turns, number):
                                self._take(turn, group, measure)
                    self.after_round()
            finally:
                for turn in turns:
                    turn.end()

    def _begin(self, turn: "Turn") -> None:
        """Start and warm up a server, and stop it by a signal."""
        server = turn.begin()
        server.start()
        self.say(f"{server.name}: warm-up")
        for _ in range(self.plan.warm_up_rounds):
            seconds = ("--seconds", str(self.plan.warm_up_seconds))
            figures = self._run(server, "both", 1, "--size", str(KIB), *seconds)
            self._maximum[server.name] = figures.messages_per_s
        server.settle()
        server.pause()

    def _take(self, turn: "Turn", group: str, measure: Callable[[Server], None]) -> None:
        """A server that has failed starts again, empty: what it failed at must not show in what follows."""
        try:
            with awake(turn.server):
                measure(turn.server)
        except load.LoadFailed as problem:
            self._failed(group, turn.server, problem)
            turn.end()
            self._begin(turn)

    def _measurements(self, group: str) -> Iterator[Callable[[Server], None]]:
        if group == "throughput":
            yield from (self._throughput(cell) for cell in self.plan.cells)
        elif group == "confirmed":
            yield self._confirmed
        elif group == "unpipelined":
            yield self._unpipelined
        else:
            yield from (self._open_loop(rate) for rate in self.plan.rates)

    def _throughput(self, cell: Cell) -> Callable[[Server], None]:
        def measure(server: Server) -> None:
            plan, size = self.plan, ("--size", str(cell.size))
            shape = (*size, "--links", str(cell.shape.links))
            for mode in ("send", "both"):
                if mode not in plan.modes and not (mode == "send" and "recv" in plan.modes):
                    continue
                figures = self._run_cell(server, mode, cell, *shape, "--seconds", str(plan.seconds))
                if cell.is_plain and cell.size == KIB and mode in plan.modes:
                    self._add_latency(server, f"saturation-{mode}", figures.ack)
                if mode == "send" and "recv" in plan.modes:
                    self._run_cell(server, "recv", cell, *shape, "-n", str(figures.messages), "--idle", "8")

        return measure

    def _run_cell(self, server: Server, mode: str, cell: Cell, *options: str) -> load.Figures:
        addresses = ",".join(server.address(n) for n in range(1, cell.shape.queues + 1))
        wanted = mode in self.plan.modes
        key = cell.key(mode) if wanted else None
        figures = self.run_at(server, self.tools.load, mode, addresses, *options, cell=key)
        if key:
            self.add(server, key, figures.messages_per_s)
        return figures

    def _confirmed(self, server: Server) -> None:
        if server.name not in self.ours:
            return  # RabbitMQ 3.10 refuses rcv-settle-mode second
        seconds, body = ("--seconds", str(self.plan.seconds)), ("--size", str(KIB))
        sent = self._run(server, "send", 4, *body, *seconds)
        received = self._run(server, "recv", 4, *body, "--second", "-n", str(sent.messages), "--idle", "8")
        both = self._run(server, "both", 4, *body, "--second", *seconds)
        self.add(server, "confirmed-recv", received.messages_per_s)
        self.add(server, "confirmed-both", both.messages_per_s)

    def _unpipelined(self, server: Server) -> None:
        options = ("--size", str(KIB), "--window", "1", "--seconds", str(self.plan.seconds))
        figures = self._run(server, "send", 5, *options, cell="unpipelined")
        self.add(server, "unpipelined-rate", figures.messages_per_s)
        self._add_latency(server, "unpipelined", figures.ack)

    def _open_loop(self, rate: str) -> Callable[[Server], None]:
        def measure(server: Server) -> None:
            per_s = round(self._maximum[server.name] / 2) if rate == "half" else int(rate)
            count = int(per_s * self.plan.rate_seconds)
            paced = ("--rate", str(per_s), "-n", str(count), "--warmup", str(count // 20))
            key = f"openloop-{rate}"
            figures = self._run(server, "both", 6, "--size", str(KIB), *paced, "--idle", "15", cell=key)
            if rate == "half":
                self.add(server, f"{key}-rate", per_s)
            for way, latency in zip(LATENCIES, (figures.ack, figures.end_to_end), strict=True):
                self._add_latency(server, f"{key}-{way}", latency)

        return measure

    def _add_latency(self, server: Server, key: str, latency: load.Latency | None) -> None:
        assert latency is not None
        for quantile in QUANTILES:
            self.add(server, f"{key}-{quantile}", getattr(latency, quantile))

    def _run(self, server: Server, mode: str, queue: int, *options: str, cell: str | None = None) -> load.Figures:
        return self.run_at(server, self.tools.load, mode, server.address(queue), *options, cell=cell)


class Turn:
    """The place of one server among those that take turns."""

    def __init__(self, maker: Maker, directory: Path) -> None:
        self._maker = maker
        self._directory = directory
        self._server: Server | None = None

    @property
    def server(self) -> Server:
        if self._server is None:
            raise ServerFailed("used before it was started")
        return self._server

    def begin(self) -> Server:
        """A new server on a fresh directory, not started yet."""
        self._directory.mkdir()
        self._server = self._maker(self._directory)
        return self._server

    def end(self) -> None:
        if self._server is not None:
            self._server.resume()
            self._server.close()
            self._server = None


Item = TypeVar("Item")
AnyServer = TypeVar("AnyServer", bound=Server)


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """The items, beginning with another one in each round, so that each comes first equally often."""
    at = number % len(items)
    return [*items[at:], *items[:at]]


@contextmanager
def fresh(maker: Callable[[Path], AnyServer]) -> Iterator[AnyServer]:
    with tempfile.TemporaryDirectory(prefix="peeklock-bench-") as scratch:
        server = maker(Path(scratch) / "server")
        server.directory.mkdir()
        try:
            yield server
        finally:
            server.close()


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
