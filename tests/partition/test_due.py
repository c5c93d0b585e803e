"""What is done when a timer is over, of each kind."""

import pytest

from broker.partition.due import OF_ENTITY, OF_QUEUE
from broker.partition.state.timers import Due
from storage.records import Place
from tests.partition.accounts import assert_counted_rightly
from tests.partition.driver import ENTITY, MAIN, Driver, message


def test_each_kind_of_timer_is_of_an_entity_or_of_a_queue() -> None:
    assert OF_ENTITY.keys() | OF_QUEUE.keys() == set(Due)
    assert OF_ENTITY.keys().isdisjoint(OF_QUEUE)


_NEVER = {(Due.SESSION_WAITS, False), (Due.PUBLISHING, False), (Due.PUBLISHING, True)}  # nothing arms these
CASES = [
    pytest.param(due, requires_session, id=f"{due.name.lower()}-{'sessions' if requires_session else 'plain'}")
    for due in Due
    for requires_session in (False, True)
    if (due, requires_session) not in _NEVER
]


@pytest.mark.parametrize(("due", "requires_session"), CASES)
def test_a_timer_that_is_over_too_early_is_harmless(due: Due, requires_session: bool) -> None:
    """One that is not needed any more stays armed: that of a queue which does not forward since it was moved, say."""
    driver = Driver(requires_session=requires_session)
    driver.send(message("there", ttl_ms=1000, session_id="s" if requires_session else None))
    partition = driver.partition
    partition._core.timers.arm(driver.now_ms, (MAIN, due))
    partition.advance(driver.now_ms)
    partition.pump(driver.now_ms)
    partition.commit()
    assert partition._core.queue(MAIN).counts[Place.AVAILABLE] == 1
    assert_counted_rightly(partition, driver.store, driver.now_ms)


@pytest.mark.parametrize("due", Due, ids=lambda due: due.name.lower())
def test_a_timer_of_an_entity_that_is_gone_is_harmless(due: Due) -> None:
    driver = Driver()
    driver.partition.delete_entity(ENTITY, driver.now_ms)
    driver.partition.commit()
    driver.partition._core.timers.arm(driver.now_ms, (MAIN, due))
    driver.partition.advance(driver.now_ms)
    driver.partition.commit()
    driver.partition.check()


def test_what_the_work_of_a_turn_does_not_allow_is_done_in_the_next_one() -> None:
    driver = Driver()
    driver.send(message("first", ttl_ms=1))
    partition, core = driver.partition, driver.partition._core
    driver.now_ms += 1000
    core.turn.work = core.turn.work_limit = 1
    partition.advance(driver.now_ms)
    assert core.queue(MAIN).counts[Place.AVAILABLE] == 1
    core.end_turn()
    partition.advance(driver.now_ms)
    partition.commit()
    assert core.queue(MAIN).counts[Place.AVAILABLE] == 0
