"""A session whose lock has ended, but whose messages are too many to be put back in one turn."""

from collections.abc import Sequence
from typing import Any

import pytest

from broker.errors import EntityDisabled, LockLost, SessionCannotBeLocked, SessionLockLost, TransactionRollback
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome, SettleOperation
from tests.partition.driver import DEAD, MAIN, Delivery
from tests.partition.session_driver import SessionDriver, accepted_by

COUNT = 60
SETTINGS = PartitionSettings(turn_work=20)


def ending(broken: bool = True, given: int = COUNT, **properties: Any) -> tuple[SessionDriver, list[Delivery]]:
    """A queue whose receiver has just left the session `s`, and the messages that it had been given."""
    queue = SessionDriver(settings=SETTINGS, **properties)
    for _ in range(0, COUNT, 10):
        queue.put("s", *["m"] * 10)
    queue.accept("r", "s")
    received = queue.receive(given)
    queue.close("r", broken=broken)
    locked = queue.held()[3]
    assert 0 < locked < given
    queue.partition.check()
    return queue, received


def numbers(received: Sequence[Delivery]) -> list[int]:
    return [delivery.number for delivery in received]


@pytest.mark.parametrize("broken", [False, True])
def test_a_receiver_of_the_session_gets_it_when_all_its_messages_are_back(broken):
    queue, _ = ending(broken)
    queue.ask("next", "s")
    accepted, _ = queue.turn()
    assert not accepted
    assert queue.held()[3] > 0
    queue.wait(0)
    accepted, _ = queue.turn()
    assert accepted == {"next": ("s", queue.now_ms + queue.description.lock_duration_ms)}
    received = queue.receive(COUNT, "next")
    assert numbers(received) == [*range(1, COUNT + 1)]
    assert {delivery.delivery_count for delivery in received} == {int(broken)}


def test_a_receiver_of_any_session_does_not_get_one_whose_messages_are_not_back():
    queue, _ = ending()
    queue.put("s", "late")
    queue.ask("any")
    assert accepted_by(queue.partition, queue.now_ms) == {}
    assert queue.held()[3] > 0
    queue.partition.check()
    assert queue.turn()[0].keys() == {"any"}
    assert numbers(queue.receive(COUNT + 1, "any")) == [*range(1, COUNT + 2)]


def test_the_session_is_the_next_after_those_that_were_available_when_its_lock_ended():
    queue = SessionDriver(settings=SETTINGS)
    queue.put("s", *["m"] * COUNT)
    queue.put("before", "m")
    queue.accept("r", "s")
    queue.receive(COUNT)
    queue.close("r", broken=True)
    queue.put("behind", "m")
    assert [queue.accept(number) for number in range(3)] == ["before", "s", "behind"]


def test_a_receiver_that_does_not_wait_gets_the_session_whose_messages_are_not_back():
    queue, _ = ending()
    queue.ask("any", wait_ms=0)
    queue.wait(0)
    assert queue.turn()[0].keys() == {"any"}


def test_one_receiver_waits_for_the_session_and_others_are_refused():
    queue, _ = ending()
    queue.ask("next", "s")
    with pytest.raises(SessionCannotBeLocked):
        queue.ask("third", "s")
    queue.close("next")
    queue.ask("fourth", "s")
    queue.wait(0)
    assert queue.turn()[0].keys() == {"fourth"}


def test_the_session_is_offered_if_who_waits_for_it_has_left():
    queue, _ = ending()
    queue.ask("next", "s")
    queue.close("next", broken=True)
    queue.wait(0)
    assert queue.accept("any") == "s"


def test_a_receiver_that_waits_for_the_session_is_closed_when_the_queue_is_disabled():
    queue, _ = ending()
    queue.ask("next", "s")
    queue.change(status="ReceiveDisabled")
    assert queue.held() == [COUNT, 0, 0, 0]
    queue.turn()
    assert isinstance(queue.closed["next"], EntityDisabled)
    queue.change(status="Active")
    assert queue.accept("any") == "s"


def test_no_lock_of_the_session_can_be_used():
    queue, received = ending()
    assert all(isinstance(error, LockLost) for error in queue.settle(Outcome.ACCEPTED, *received))
    assert all(isinstance(error, SessionLockLost) for error in queue.settle_as("r", Outcome.ABANDONED, *received))
    with pytest.raises(SessionLockLost):
        queue.of_session("renew-session-lock", "s")
    queue.wait(0)
    assert queue.held() == [COUNT, 0, 0, 0]
    assert {delivery.delivery_count for delivery in queue.peek(count=COUNT)} == {1}


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("commit", [False, True])
def test_messages_settled_in_a_transaction_come_back_once(broken, commit):
    queue = SessionDriver(settings=SETTINGS)
    for _ in range(0, COUNT, 10):
        queue.put("s", *["m"] * 10)
    queue.accept("r", "s")
    tokens = [delivery.token for delivery in queue.receive(COUNT)]
    operation = SettleOperation(MAIN, True, tokens[-2:], Outcome.ACCEPTED)
    queue.partition.transact("t", True, [operation], queue.now_ms)
    queue.close("r", broken)
    if commit:
        with pytest.raises(TransactionRollback):
            queue.partition.discharge("t", commit, queue.now_ms)
    else:
        queue.partition.discharge("t", commit, queue.now_ms)
    queue.wait(0)
    assert queue.held() == [COUNT, 0, 0, 0]
    assert {delivery.delivery_count for delivery in queue.peek(count=COUNT)} == {int(broken)}


def test_the_last_failed_deliveries_are_dead_lettered_in_their_order():
    queue, _ = ending(max_delivery_count=1)
    queue.wait(0)
    assert queue.held() == [0, 0, 0, 0]
    assert [delivery.overlay[3] for delivery in queue.peek(DEAD, count=COUNT)] == [*range(1, COUNT + 1)]
    assert queue.accept("any") is None


def test_messages_that_are_not_back_are_not_deleted():
    queue, _ = ending()
    locked = queue.held()[3]
    deleted = queue.request("delete-batch", COUNT, queue.now_ms + 1)
    assert deleted >= COUNT - locked
    queue.wait(0)
    assert queue.held() == [COUNT - deleted, 0, 0, 0]
    left = numbers(queue.peek(count=COUNT))
    assert queue.accept("any") == "s"
    assert numbers(queue.receive(COUNT, "any")) == left


def test_a_restart_meanwhile_leaves_what_was_put_back_counted_and_the_rest_as_it_was():
    queue, _ = ending()
    locked = queue.held()[3]
    queue.restart()
    assert queue.accept("any") == "s"
    counts = [delivery.delivery_count for delivery in queue.receive(COUNT, "any")]
    assert counts == [1] * (COUNT - locked) + [0] * locked
