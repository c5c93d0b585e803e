"""Which connections are ended when all together hold too much."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from broker.gateway.limits.budget import HIGH, IDLE_BYTES, STRANGER, Budget, Holder

MIB = 1 << 20


class Connection(Holder):
    """Goes at once when it is cut off, and never when it is closed."""

    def __init__(self, budget: Budget, held: int, *, has_rights: bool = True) -> None:
        self.budget, self.held, self._has_rights = budget, held, has_rights
        self.closed: str | None = None
        self.is_cut_off = False
        budget.enter(self)

    @property
    def peer(self) -> str:
        return "127.0.0.1:1"

    @property
    def has_rights(self) -> bool:
        return self._has_rights

    def held_bytes(self) -> int:
        return self.held

    def end_for_room(self, text: str) -> None:
        assert self.closed is None
        assert not self.is_cut_off
        self.closed = text

    def cut_off(self, text: str) -> None:
        assert not self.is_cut_off
        assert text
        self.is_cut_off = True
        asyncio.get_running_loop().call_soon(self.budget.leave, self)

    def grow(self, size: int) -> None:
        self.held += size
        self.measure()

    @property
    def is_served(self) -> bool:
        return self.closed is None and not self.is_cut_off


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **named: Any) -> None:
        asyncio.run(test(*args, **named))

    return run


async def settled() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def budget_of(maximum: int) -> tuple[Budget, list[int]]:
    ended: list[int] = []
    return Budget(maximum, lambda _, held: ended.append(held)), ended


@on_a_loop
async def test_the_largest_are_closed_with_a_reason_and_the_others_stay():
    budget, ended = budget_of(80 * MIB)
    small = [Connection(budget, MIB) for _ in range(40)]
    large = [Connection(budget, size * MIB) for size in (10, 12)]
    await settled()
    assert not ended
    large[0].grow(12 * MIB)
    await settled()
    assert [each.is_served for each in large] == [False, True]
    assert ended == [22 * MIB]
    assert f"{22 * MIB}" in (large[0].closed or "")
    assert all(each.is_served for each in small)


@on_a_loop
async def test_nothing_happens_below_the_mark():
    budget, ended = budget_of(80 * MIB)
    all_ = [Connection(budget, MIB) for _ in range(70)]
    await settled()
    assert not ended
    all_[0].grow(1)
    await settled()
    assert len(ended) == 10  # down to three quarters


@on_a_loop
async def test_those_that_do_not_go_are_cut_off_before_others_are():
    budget, _ = budget_of(80 * MIB)
    stays = Connection(budget, 45 * MIB)
    large = Connection(budget, 50 * MIB)
    await settled()
    assert large.is_cut_off
    assert stays.is_served
    assert budget.held_bytes == 45 * MIB


@on_a_loop
async def test_a_closed_one_has_time_while_there_is_room():
    budget, _ = budget_of(80 * MIB)
    stays = Connection(budget, 30 * MIB)
    large = Connection(budget, 45 * MIB)
    await settled()
    assert large.closed
    assert not large.is_cut_off
    budget.leave(large)
    assert budget.held_bytes == 30 * MIB
    assert stays.is_served


@on_a_loop
async def test_strangers_go_before_those_with_rights():
    budget, _ = budget_of(80 * MIB)
    client = Connection(budget, MIB * (STRANGER - 1))
    strangers = [Connection(budget, MIB, has_rights=False) for _ in range(62)]
    await settled()
    assert client.is_served
    assert not all(each.is_served for each in strangers)


@on_a_loop
async def test_what_is_expected_counts():
    budget, ended = budget_of(80 * MIB)
    connection = Connection(budget, 60 * MIB)
    budget.expect(15 * MIB)
    connection.grow(0)
    await settled()
    assert ended == []  # those with their handshake cannot be ended, and the others are below the mark
    connection.grow(MIB)
    await settled()
    assert ended == [61 * MIB]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 300), st.booleans(), st.integers(0, 300)), min_size=1, max_size=40),
)
@on_a_loop
async def test_the_budget_is_kept(sizes):
    budget, ended = budget_of(1000)
    connections = []
    for held, has_rights, more in sizes:
        connections.append(Connection(budget, held, has_rights=has_rights))
        connections[len(connections) // 2].grow(more)
        await settled()
        assert budget.held_bytes <= 1000
        assert budget.held_bytes == sum(each.held for each in connections if not each.is_cut_off)
        served = [each.held for each in connections if each.is_served]
        assert sum(served) <= HIGH * 1000
    assert len(ended) == sum(not each.is_served for each in connections)


@on_a_loop
async def test_what_is_held_no_more_is_noticed_though_nothing_moves():
    """Also if it was measured in the midst of what moved last."""
    budget, _ = budget_of(80 * MIB)
    connection = Connection(budget, 0)
    connection.look_after()
    connection.moved_bytes = 1000
    connection.grow(IDLE_BYTES // 2)
    connection.held = 0
    for _ in range(2):
        connection.look_after()
    assert budget.held_bytes == 0
    connection.moved_bytes = 1000
    connection.held = IDLE_BYTES // 2
    connection.look_after()
    connection.held = 0
    for _ in range(2):
        connection.look_after()
    assert budget.held_bytes == 0


@on_a_loop
async def test_much_that_is_held_is_measured_again_and_again():
    budget, _ = budget_of(80 * MIB)
    connection = Connection(budget, 2 * IDLE_BYTES)
    for _ in range(5):
        connection.look_after()
    connection.held = 0
    connection.look_after()
    assert budget.held_bytes == 0


@on_a_loop
async def test_much_that_was_freed_is_told_once():
    budget, _ = budget_of(80 * MIB)
    connection = Connection(budget, 30 * MIB)
    connection.grow(-9 * MIB)
    assert not budget.has_freed_much()
    connection.grow(-1 * MIB)
    assert budget.has_freed_much()
    assert not budget.has_freed_much()
    connection.grow(20 * MIB)
    connection.grow(-10 * MIB)
    assert budget.has_freed_much()
