"""Processes poll for what comes soon before they sleep, and only then."""

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.gateway.idle_loop import IdleLoop
from broker.idle_polling import FIRST_SECONDS, IdlePolling
from broker.settings import placement
from broker.settings.config import IDLE_POLL_SECONDS, Settings
from broker.worker.process import events_of

MOST = 400e-6
TIMES = st.floats(-1e6, 1e9) | st.floats(0, 2 * MOST)


@given(st.sampled_from([0.0, 1e-9, 30e-6, MOST, 0.1]), st.lists(TIMES, max_size=40))
def test_nobody_polls_for_longer_than_allowed(most, waited):
    polling = IdlePolling(most)
    for seconds in waited:
        polling.waited(seconds)
        assert 0 <= polling.window <= most


def test_what_comes_soon_is_polled_for_and_what_comes_late_is_not():
    polling = IdlePolling(MOST)
    assert polling.window == 0
    windows = []
    for _ in range(6):
        polling.waited(MOST)
        windows.append(polling.window)
    assert windows[0] == FIRST_SECONDS
    assert windows == sorted(windows)
    assert windows[-1] == MOST
    for _ in range(6):
        polling.waited(0.1)
    assert polling.window == 0


def test_a_steady_load_with_long_pauses_is_hardly_polled_for():
    """An answer that comes soon after each command that comes late."""
    polling = IdlePolling(MOST)
    for _ in range(100):
        polling.waited(0.01)
        polling.waited(200e-6)
        assert polling.window <= 2 * FIRST_SECONDS


class Clock:
    """Stands for the module `time`. Each look at it takes a millisecond."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("broker.worker.process.time", clock)
    monkeypatch.setattr("broker.gateway.idle_loop.time", clock)
    return clock


class Worker:
    """A worker as far as `events_of` needs one, and for how long it was asked to wait."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.asked: list[float] = []
        self.when: Callable[[int], list[tuple[int, int]]] = lambda count: []

    def wait_seconds(self) -> float:
        return self.seconds

    def poll(self, seconds: float = 0) -> list[tuple[int, int]]:
        self.asked.append(seconds)
        if found := self.when(len(self.asked)):
            return found
        self.clock.now += seconds
        return []


def ready(most: float) -> IdlePolling:
    polling = IdlePolling(most)
    for _ in range(20):
        polling.waited(0)
    return polling


def test_a_worker_takes_what_comes_while_it_polls(clock: Clock) -> None:
    worker = Worker(clock, 60)
    worker.when = lambda count: [(7, 1)] if count == 5 else []
    assert events_of(worker, ready(0.05)) == [(7, 1)]  # type: ignore[arg-type] # as much of one as it uses
    assert worker.asked == [0] * 5


def test_a_worker_that_polls_in_vain_sleeps_until_it_has_something_to_do(clock: Clock) -> None:
    worker, polling = Worker(clock, 0.1), ready(0.05)
    began = clock.now
    assert events_of(worker, polling) == []  # type: ignore[arg-type] # as much of one as it uses
    assert clock.now - began == pytest.approx(0.1, abs=0.005)
    assert len(worker.asked) > 40
    assert worker.asked[:-1] == [0] * (len(worker.asked) - 1)
    assert worker.asked[-1] == pytest.approx(0.05, abs=0.005)
    assert polling.window == 0.025


def test_a_worker_with_something_to_do_waits_for_nothing(clock: Clock) -> None:
    worker, polling = Worker(clock, 0), ready(0.05)
    assert events_of(worker, polling) == []  # type: ignore[arg-type] # as much of one as it uses
    assert worker.asked == [0]
    assert polling.window == 0.05, "it did not wait, so it learns nothing"


def test_a_worker_that_must_do_something_soon_polls_for_no_longer(clock: Clock) -> None:
    worker = Worker(clock, 0.01)
    began = clock.now
    assert events_of(worker, ready(0.5)) == []  # type: ignore[arg-type] # as much of one as it uses
    assert clock.now - began == pytest.approx(0.01, abs=0.005)
    assert worker.asked[-1] == 0


async def test_a_loop_makes_rounds_for_a_while_and_then_sleeps(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[float] = []
    yielding = SimpleNamespace(sched_yield=lambda: rounds.append(clock.now))
    monkeypatch.setattr("broker.gateway.idle_loop.os", yielding)
    idle = IdleLoop(0.03)
    for window in (0.03, 0.015):
        for _ in range(1 if rounds else 20):
            idle.begins()
            idle.handled()
        handled = clock.now
        rounds.clear()
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(rounds) == pytest.approx(window * 1000, abs=2)
        assert rounds[-1] - handled < window
        clock.now += 0.1  # what comes next comes late


async def test_a_loop_that_may_not_poll_makes_no_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.gateway.idle_loop.os", None)
    idle = IdleLoop(0)
    for _ in range(3):
        idle.begins()
        idle.handled()
        await asyncio.sleep(0)


async def test_what_comes_while_a_loop_polls_is_handled_at_once() -> None:
    idle, heard = IdleLoop(5), asyncio.Event()
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        asyncio.get_running_loop().add_reader(here, heard.set)
        for _ in range(20):
            idle.begins()
            idle.handled()
        await asyncio.sleep(0)
        there.send(b"x")
        began = time.monotonic()
        await heard.wait()
        asyncio.get_running_loop().remove_reader(here)
    assert time.monotonic() - began < 4


# -- where nobody polls


def tree(root: Path, groups: str, **files: str) -> str:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return f"{root}/"


@pytest.mark.parametrize(
    ("groups", "files", "limited"),
    [
        ("0::/\n", {"cpu_max": "150000 100000\n"}, True),  # a container sees its group as the root
        ("0::/\n", {"cpu_max": "max 100000\n"}, False),
        ("0::/\n", {}, False),
        ("0::/a/b\n", {"a__cpu_max": "50000 100000\n", "a__b__cpu_max": "max 100000\n"}, True),
        ("0::/a/b\n", {"c__cpu_max": "50000 100000\n"}, False),
        ("0::/../..\n", {"cpu_max": "50000 100000\n"}, True),
        ("0::/a\n", {"a__cpu_max": ""}, False),
        ("4:cpu,cpuacct:/a\n3:memory:/a\n", {"cpu__a__cpu_cfs__quota__us": "50000\n"}, False),
        ("3:memory:/a\n", {"cpu_max": "max 100000\n"}, False),
        ("", {}, False),
    ],
)
def test_limits_of_processor_time_are_found(tmp_path: Path, groups: str, files: dict[str, str], limited: bool) -> None:
    assert placement.has_processor_limit(tree(tmp_path, groups, **files)) is limited


def test_a_limit_of_the_older_control_groups_is_found(tmp_path: Path) -> None:
    root = tree(tmp_path, "4:cpu,cpuacct:/a\n")
    quota = tmp_path / "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us"
    quota.parent.mkdir(parents=True)
    quota.write_text("-1\n")
    assert not placement.has_processor_limit(root)
    quota.write_text("200000\n")
    assert placement.has_processor_limit(root)


def test_a_machine_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert not placement.has_processor_limit(f"{tmp_path}/")


def test_polling_is_the_default_where_processors_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(processors: int, limited: bool, **given: Any) -> float:
        monkeypatch.setattr(placement, "processors", lambda: processors)
        monkeypatch.setattr(placement, "has_processor_limit", lambda: limited)
        return Settings(**given).poll_seconds

    assert seconds(2, False) == IDLE_POLL_SECONDS
    assert seconds(1, False) == 0
    assert seconds(8, True) == 0
    assert seconds(1, True, idle_poll_us=50) == 50e-6
    assert seconds(8, False, idle_poll_us=0) == 0
