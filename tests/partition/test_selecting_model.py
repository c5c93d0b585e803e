"""Receivers with and without selectors of one queue, at random: each message goes to one that selects it, none is lost.

The model knows of each message its color and number, and who holds it. After each turn without more to do, no receiver
with credit waits beside a message that is free and that it selects.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from broker.partition.settings import PartitionSettings
from broker.wire import Outcome
from tests.examples import examples
from tests.partition.driver import LOCK_MS, Delivery, deliveries
from tests.partition.selective_driver import Selective, color_of, colored

COLORS = ("red", "blue", "green")
SELECTORS: dict[str | None, Callable[[str, int], bool]] = {
    None: lambda color, number: True,
    "color = 'red'": lambda color, number: color == "red",
    "color <> 'red' AND n < 5": lambda color, number: color != "red" and number < 5,
    "n BETWEEN 3 AND 6": lambda color, number: 3 <= number <= 6,
    "missing = 1": lambda color, number: False,
    "color LIKE '%e%'": lambda color, number: True,
}
RECEIVERS = {f"r{number}": selector for number, selector in enumerate([None, None, *SELECTORS, *SELECTORS])}
SMALL = PartitionSettings(window=3, step=2, turn_work=30)


class World(Selective):
    def __init__(self, partition_settings: PartitionSettings) -> None:
        super().__init__(settings=partition_settings, max_delivery_count=1000)
        self.free: dict[int, tuple[str, int]] = {}  # number -> color and n, of messages that nobody has
        self.of: dict[int, tuple[str, int]] = {}  # the same, of all that are there
        self.locked: dict[bytes, tuple[str, int, int]] = {}  # token -> receiver, number, end of the lock
        self.later: dict[int, tuple[str, int]] = {}  # scheduled ones
        self.gone: list[int] = []
        self.opened: dict[str, str | None] = {}
        self.credit: dict[str, int] = {}
        self.deletes: set[str] = set()
        self.number = 1

    def put(self, color: str, n: int, scheduled: bool) -> None:
        given: dict[str, Any] = {"scheduled_ms": self.now_ms + 1000} if scheduled else {}
        self.send(colored(color, n, **given))
        (self.later if scheduled else self.free)[self.number] = self.of[self.number] = (color, n)
        self.number += 1

    def enter(self, receiver: str, receive_and_delete: bool) -> None:
        selector = RECEIVERS[receiver]
        if receiver in self.opened:
            return
        if selector is None:
            self.open(receiver, receive_and_delete=receive_and_delete)
        else:
            self.open_selective(receiver, selector, receive_and_delete=receive_and_delete)
        self.opened[receiver] = selector
        self.credit[receiver] = 0
        if receive_and_delete:
            self.deletes.add(receiver)

    def go(self, receiver: str, broken: bool) -> None:
        if self.opened.pop(receiver, "none") == "none":
            return
        self.close(receiver, broken)
        del self.credit[receiver]
        self.deletes.discard(receiver)
        if broken:
            for token, (holder, number, _) in list(self.locked.items()):
                if holder == receiver:
                    del self.locked[token]
                    self.free[number] = self.of[number]
        else:
            self.locked = {
                token: ("nobody" if holder == receiver else holder, number, until_ms)
                for token, (holder, number, until_ms) in self.locked.items()
            }

    def set_credit(self, receiver: str, count: int) -> None:
        if receiver in self.opened:
            self.credit[receiver] = count
            self.partition.grant(receiver, self._delivered(receiver) + count)

    def _delivered(self, receiver: str) -> int:
        return self.partition._core.receivers[receiver].delivered

    def one_turn(self) -> bool:
        pumped = self.partition.pump(self.now_ms)
        self.partition.commit()
        self.partition.check()
        for receiver, _, items in pumped.deliveries:
            assert isinstance(receiver, str)
            for each in deliveries(items):
                self._deliver(receiver, each)
        return pumped.more

    def _deliver(self, receiver: str, each: Delivery) -> None:
        color, n = self.free.pop(each.number)  # nobody else has it
        assert color_of(each) == color
        selector = self.opened[receiver]
        assert SELECTORS[selector](color, n), f"{receiver} got {color} {n} by {selector}"
        self.credit[receiver] -= 1
        assert self.credit[receiver] >= 0
        if receiver in self.deletes:
            self.gone.append(each.number)
        else:
            self.locked[each.token] = (receiver, each.number, self.now_ms + LOCK_MS)

    def all_turns(self) -> None:
        turns = 0
        while self.one_turn():
            turns += 1
            assert turns < 10_000
        for receiver, selector in self.opened.items():
            if self.credit[receiver]:
                left = [number for number, (color, n) in self.free.items() if SELECTORS[selector](color, n)]
                assert not left, f"{receiver} waits for {left} by {selector}"

    def settle_one(self, at: int, outcome: Outcome) -> None:
        if not self.locked:
            return
        token = sorted(self.locked)[at % len(self.locked)]
        _, number, _ = self.locked.pop(token)
        assert self.settle(outcome, Delivery(token, number, 0, b"", {})) == [None]
        if outcome == Outcome.ACCEPTED:
            self.gone.append(number)
        else:
            self.free[number] = self.of[number]

    def let_time_pass(self, ms: int) -> None:
        self.wait(ms)
        for token, (_, number, until_ms) in list(self.locked.items()):
            if until_ms <= self.now_ms:
                del self.locked[token]
                self.free[number] = self.of[number]
        for number in [number for number in sorted(self.later) if self._is_due(number)]:
            del self.of[number]  # it has got another number
            self.free[self.number] = self.of[self.number] = self.later.pop(number)
            self.number += 1

    def _is_due(self, number: int) -> bool:
        scheduled = {each.number for each in self.peek(start=number, count=1) if each.number == number}
        return number not in scheduled

    def begin_again(self) -> None:
        self.restart()
        for _, number, _ in self.locked.values():
            self.free[number] = self.of[number]
        self.locked.clear()
        self.opened.clear()
        self.credit.clear()
        self.deletes.clear()


def drawn(random: Random, world: World) -> tuple[Any, ...]:
    """An operation. Most of them are about what goes on with messages while receivers stay."""
    if len(world.opened) < 4:
        return "enter", random.choice(sorted(RECEIVERS)), random.random() < 0.2
    receiver = random.choice(sorted(world.opened))
    match random.choices(
        ["put", "enter", "credit", "go", "settle", "turn", "turns", "wait", "restart"],
        [8, 1, 24, 1, 24, 6, 8, 3, 0.3],
    )[0]:
        case "put":
            count = random.randint(1, 6)
            return "put", [(random.choice(COLORS), random.randint(0, 8), random.random() < 0.1) for _ in range(count)]
        case "enter":
            return "enter", random.choice(sorted(RECEIVERS)), random.random() < 0.2
        case "credit":
            return "credit", receiver, random.choice([0, 1, 2, 3, 8])
        case "go":
            return "go", receiver, random.random() < 0.5
        case "settle":
            outcomes = [Outcome.ACCEPTED, Outcome.ABANDONED, Outcome.RELEASED, Outcome.RELEASED]
            return "settle", random.randint(0, 20), random.choice(outcomes)
        case "wait":
            return "wait", random.choice([1, 1000, LOCK_MS])
        case other:
            return (other,)


def do(world: World, operation: tuple[Any, ...]) -> None:
    name, *rest = operation
    match name:
        case "put":
            for color, n, scheduled in rest[0]:
                world.put(color, n, scheduled)
        case "enter":
            world.enter(*rest)
        case "credit":
            world.set_credit(*rest)
        case "go":
            world.go(*rest)
        case "settle":
            world.settle_one(*rest)
        case "turn":
            world.one_turn()
        case "turns":
            world.all_turns()
        case "wait":
            world.all_turns()
            world.let_time_pass(*rest)
        case "restart":
            world.begin_again()


@pytest.mark.parametrize("partition_settings", [SMALL, PartitionSettings()], ids=["small", "usual"])
@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**32 - 1))
def test_each_message_goes_to_one_that_selects_it(partition_settings, seed):
    random = Random(seed)
    world = World(partition_settings)
    for _ in range(120):
        operation = drawn(random, world)
        note(str(operation))
        do(world, operation)
    world.let_time_pass(LOCK_MS + 2000)
    for receiver in [*world.opened]:
        world.go(receiver, broken=True)
    world.enter("r0", receive_and_delete=False)
    world.set_credit("r0", 1000)
    world.all_turns()
    assert not world.free
    assert not world.later
    assert len(world.gone) == len(set(world.gone))
    assert {number for _, number, _ in world.locked.values()} == set(world.of) - set(world.gone)
