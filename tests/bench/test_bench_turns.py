"""How brokers take turns: here they are processes that only sleep, and the load tool only says figures."""

import sys
from pathlib import Path

import psutil
import pytest

from bench.load import Endpoint, Figures, Latency, LoadFailed, Tools
from bench.measure import Bench, rotated
from bench.plan import KIB, PLAIN, Plan
from bench.rows import PEEKLOCK
from bench.servers import Server

PLAN = Plan(rounds=3, sizes=(KIB,), shapes=(PLAIN,), modes=("send",), warm_up_rounds=2)


class Sleeper(Server):
    """A process that does nothing. `started` counts the directories on which one was started."""

    durable = ""
    started: list[str] = []

    def __init__(self, directory: Path, name: str) -> None:
        super().__init__(directory)
        self.name = name
        self.endpoint = Endpoint(1, "", "")

    def version(self) -> str:
        return ""

    def address(self, number: int) -> str:
        return f"q{number}"

    def _command(self) -> tuple[list[str], dict[str, str]]:
        self.started.append(self.name)
        assert not list(self.data_dir.iterdir())
        (self.data_dir / "used").touch()
        return [sys.executable, "-c", "import time; time.sleep(600)"], {}

    def _is_ready(self) -> bool:
        return True

    def settle(self, timeout_s: float = 10.0) -> None:
        pass


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


class Scripted(Bench):
    """Notes who was measured while who else ran; the run with the number `fails` fails."""

    def begin(self, fails: int | None) -> None:
        self.ran: list[tuple[str, str]] = []
        self.fails = fails
        self.at_once: set[int] = set()
        self.before = {process.pid for process in children()}  # such as Spark's, of other tests

    @property
    def makers(self):
        return [lambda directory, name=name: Sleeper(directory, name) for name in (PEEKLOCK, "b", "c")]

    def run_at(self, server, tool, mode, address, *options, cell=None):
        running = [
            process.pid
            for process in children()
            if process.pid not in self.before and process.status() != psutil.STATUS_STOPPED
        ]
        self.at_once.add(len(running))
        self.ran.append((server.name, mode))
        if self.fails == len(self.ran):
            raise LoadFailed("it broke")
        return Figures(10, float(len(self.ran)), 1.0, 0.1, Latency(1, 2, 3, 4), None)


@pytest.fixture
def bench():
    Sleeper.started = []
    tools = Tools(Path("load"), Path("work"))
    return Scripted(plan=PLAN, tools=tools, ours={PEEKLOCK: Path()}, peers=[], say=lambda text: None)


def test_each_begins_a_round_in_turn_and_only_one_runs_at_a_time(bench):
    bench.begin(fails=None)
    bench.measure(["throughput"])
    warm, rounds = bench.ran[:6], [name for name, _ in bench.ran[6:]]
    assert warm == [(name, "both") for name in (PEEKLOCK, "b", "c") for _ in range(2)]
    assert rounds == [PEEKLOCK, "b", "c", "b", "c", PEEKLOCK, "c", PEEKLOCK, "b"]
    assert bench.at_once == {1}
    assert bench.samples["b"]["send-1024-1x1"] == [8.0, 10.0, 15.0]
    assert {process.pid for process in children()} <= bench.before


def test_a_server_that_fails_starts_again_empty_and_the_others_go_on(bench):
    bench.begin(fails=8)  # b, in the first round
    bench.measure(["throughput"])
    assert bench.failed == ["throughput, b: it broke"]
    assert Sleeper.started == [PEEKLOCK, "b", "c", "b"]
    assert len(bench.samples["b"]["send-1024-1x1"]) == 2
    assert len(bench.samples["c"]["send-1024-1x1"]) == 3
    assert bench.at_once == {1}
    assert {process.pid for process in children()} <= bench.before


def test_what_was_measured_can_be_saved_after_each_round(bench):
    bench.begin(fails=None)
    saved = []
    bench.after_round = lambda: saved.append(len(bench.samples[PEEKLOCK]["send-1024-1x1"]))
    bench.measure(["throughput"])
    assert saved == [1, 2, 3]


def test_rotation_gives_each_its_turn_to_be_first():
    assert [rotated("abc", number)[0] for number in range(4)] == ["a", "b", "c", "a"]
