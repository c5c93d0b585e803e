"""What waits for a worker that is away: its order, its bounds, and when it is over."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.gateway.waiting_room import Bounds, Waiting, WaitingRoom
from tests.models import model_settings

BOUNDS = Bounds(seconds=3.0, operations=10, size_bytes=1000)


def operation(number: int = 0, *askers: str, partition: int = 0, count: int = 1, size_bytes: int = 1) -> Waiting:
    return Waiting(partition, None, askers, count, size_bytes, lambda: number, lambda error: None)


def numbers(waited: Iterator[Waiting]) -> list[Any]:
    return [each.begin() for each in waited]


def test_nothing_waits_before_the_worker_is_lost() -> None:
    assert not WaitingRoom(BOUNDS).enter(operation(), 0.0)


def test_what_waits_comes_out_in_its_order() -> None:
    room = WaitingRoom(BOUNDS)
    room.open(0.0)
    assert all(room.enter(operation(number), 0.1 * number) for number in range(5))
    assert numbers(room.close()) == [0, 1, 2, 3, 4]
    assert numbers(room.close()) == []


def test_what_is_dropped_while_others_leave_does_not() -> None:
    room = WaitingRoom(BOUNDS)
    room.open(0.0)
    for number, asker in enumerate("abab"):
        room.enter(operation(number, asker), 0.0)
    leaving = room.close()
    assert next(leaving).begin() == 0
    room.drop("b")
    assert numbers(leaving) == [2]


def test_nothing_waits_at_the_instant_the_time_is_over() -> None:
    room = WaitingRoom(BOUNDS)
    assert room.open(7.0) == 10.0
    assert room.enter(operation(), 9.999)
    assert not room.enter(operation(), 10.0)


def test_no_more_wait_than_may() -> None:
    room = WaitingRoom(BOUNDS)
    room.open(0.0)
    assert room.enter(operation(count=9), 0.0)
    assert not room.enter(operation(count=2), 0.0)
    assert room.enter(operation(count=1), 0.0)
    assert not room.enter(operation(count=1), 0.0)


def test_no_more_bytes_wait_than_may() -> None:
    room = WaitingRoom(BOUNDS)
    room.open(0.0)
    assert room.enter(operation(0, "a", size_bytes=600), 0.0)
    assert not room.enter(operation(size_bytes=401), 0.0)
    assert room.enter(operation(size_bytes=400), 0.0)
    room.drop("a")
    assert room.enter(operation(size_bytes=600), 0.0)


def test_what_waits_for_a_partition_goes_with_it() -> None:
    here, there = WaitingRoom(BOUNDS), WaitingRoom(BOUNDS)
    here.open(0.0)
    for number in range(4):
        here.enter(operation(number, "a", partition=number % 2), 0.0)
    here.hand_over(1, there)
    assert numbers(there.close()) == [1, 3]
    assert numbers(here.close()) == [0, 2]


@dataclass
class _Known:
    waiting: Waiting
    askers: tuple[str, ...]


class Rooms(RuleBasedStateMachine):
    """Against a list."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.room = WaitingRoom(BOUNDS)
        self.until_s: float | None = None
        self.known: list[_Known] = []
        self.count = 0

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.until_s is None)
    @rule()
    def lose(self) -> None:
        self.until_s = self.room.open(self.now_s)
        assert self.until_s == self.now_s + BOUNDS.seconds

    @rule(
        askers=st.sampled_from([("link-1", "a"), ("link-2", "a"), ("link-3", "b"), ("b",), ()]),
        count=st.integers(1, 4),
        size_bytes=st.integers(0, 400),
    )
    def enter(self, askers: tuple[str, ...], count: int, size_bytes: int) -> None:
        self.count += 1
        waiting = operation(self.count, *askers, count=count, size_bytes=size_bytes)
        fits = (
            sum(each.waiting.operations for each in self.known) + count <= BOUNDS.operations
            and sum(each.waiting.size_bytes for each in self.known) + size_bytes <= BOUNDS.size_bytes
        )
        is_open = self.until_s is not None and self.now_s < self.until_s
        assert self.room.enter(waiting, self.now_s) == (is_open and fits)
        if is_open and fits:
            self.known.append(_Known(waiting, askers))

    @rule(asker=st.sampled_from(["link-1", "link-2", "a", "b", "unknown"]))
    def drop(self, asker: str) -> None:
        dropped = [each.waiting for each in self.known if asker in each.askers]
        assert self.room.drop(asker) == dropped
        self.known = [each for each in self.known if asker not in each.askers]

    @rule()
    def close(self) -> None:
        assert [*self.room.close()] == [each.waiting for each in self.known]
        self.until_s, self.known = None, []

    @invariant()
    def holds(self) -> None:
        self.room.check()
        assert len(self.room) == len(self.known)


TestRooms = Rooms.TestCase
TestRooms.settings = model_settings(examples=200, steps=40)
