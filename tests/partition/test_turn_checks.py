"""The check of a turn's work lists finds what must not be."""

from collections.abc import Callable

import pytest

from broker.partition.state.queue import Queue
from broker.partition.state.turn import Turn
from tests.partition.driver import MAIN, Driver

WRONG: dict[str, Callable[[Turn, Queue], None]] = {
    "a queue that is closed": lambda turn, queue: turn.awake.update({MAIN + 1: queue}),
    "another queue of this id": lambda turn, queue: turn.touched.update({MAIN: Driver().partition._core.queue(MAIN)}),
    "nothing to forward with": lambda turn, queue: turn.outgoing.update({MAIN: queue}),
    "no sessions": lambda turn, queue: turn.offering.update({MAIN: queue}),
    "work of less than nothing": lambda turn, queue: setattr(turn, "work", -1),
    "no share of the work": lambda turn, queue: setattr(turn, "work_limit", 5),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_must_not_be_is_found(wrong: str) -> None:
    driver = Driver()
    driver.send("m")
    core = driver.partition._core
    driver.partition.check()
    core.turn.part_limit = 0
    WRONG[wrong](core.turn, core.queue(MAIN))
    with pytest.raises(AssertionError):
        driver.partition.check()
