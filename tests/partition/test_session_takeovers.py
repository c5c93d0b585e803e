"""Sessions that are not exclusive: who names the token of the lock takes the session over, with its locks."""

import pytest

from broker import requests
from broker.errors import LockLost, SessionCannotBeLocked, SessionLockLost, SessionTakenOver
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome
from tests.partition.driver import MAIN
from tests.partition.session_driver import SessionDriver

TOKEN, OTHER = bytes(16), bytes(15) + b"\1"
LOCK_MS = 60_000


@pytest.fixture
def queue():
    queue = SessionDriver(lock_duration_ms=LOCK_MS)
    queue.put("s", "1", "2", "3")
    yield queue
    queue.partition.check()


def ask(queue, receiver, session="s", token=TOKEN, takes_over=False, **given):
    queue.ask(receiver, session, token=token, takes_over=takes_over, **given)


def accept(queue, receiver, session="s", token=TOKEN, takes_over=False):
    """The session that it has, and the end of the lock; None if it waits."""
    ask(queue, receiver, session, token, takes_over)
    return queue.turn()[0].get(receiver)


def take_over(queue, receiver="new", former="old", unsent_from=None, broken=False):
    """As gateways do: the former one is told, and what never reached its client comes back with its close."""
    assert accept(queue, receiver, takes_over=True) is None
    assert isinstance(queue.closed.pop(former), SessionTakenOver)
    queue.partition.close_receiver(former, broken, queue.now_ms, unsent_from)
    accepted, _ = queue.turn()
    assert accepted == {receiver: ("s", queue.now_ms + LOCK_MS)}


def settle(queue, receiver, delivery, outcome=Outcome.ACCEPTED):
    queue.request("settle", [delivery.token], outcome, None, receiver)


def test_who_names_the_token_gets_the_session_and_settles_what_the_other_one_was_given(queue):
    accept(queue, "old")
    held = queue.receive(2, "old")
    queue.wait(LOCK_MS - 1)
    take_over(queue)
    queue.wait(LOCK_MS - 1)  # the lock begins anew
    assert queue.bodies_for("new") == ["3"]
    settle(queue, "new", held[0])
    settle(queue, "new", held[1], Outcome.DEAD_LETTERED)
    queue.of_session("set-session-state", "s", b"state", receiver="new")
    queue.of_session("renew-session-lock", "s", receiver="new")
    assert queue.held()[3] == 1
    queue.partition.check()


def test_the_other_one_has_lost_the_session(queue):
    accept(queue, "old")
    [held] = queue.receive(1, "old")
    take_over(queue)
    with pytest.raises(SessionLockLost):
        settle(queue, "old", held)
    for request in (("renew-session-lock", "s"), ("get-session-state", "s"), ("set-session-state", "s", b"")):
        with pytest.raises(SessionLockLost):
            queue.of_session(*request, receiver="old")
    settle(queue, "new", held)


def test_what_never_reached_the_client_comes_first_and_in_order(queue):
    accept(queue, "old")
    held = queue.receive(3, "old")
    take_over(queue, unsent_from=held[1].token)
    received = queue.receive(3, "new")
    assert [(each.body, each.delivery_count) for each in received] == [(b"2", 0), (b"3", 0)]
    settle(queue, "new", held[0])
    with pytest.raises(LockLost):
        settle(queue, "new", held[1])


def test_until_the_other_one_has_left_nobody_is_given_messages(queue):
    accept(queue, "old")
    assert accept(queue, "new", takes_over=True) is None
    queue.partition.grant("old", 3)
    queue.grant(3, "new")
    assert queue.pump() == {}
    queue.partition.close_receiver("old", False, queue.now_ms)
    queue.turn()
    assert queue.bodies_for("new") == ["1", "2", "3"]


def test_a_broken_connection_of_the_other_one_fails_no_delivery(queue):
    accept(queue, "old")
    [held] = queue.receive(1, "old")
    take_over(queue, broken=True)
    settle(queue, "new", held)


def test_a_gateway_that_never_answers_holds_the_session_no_longer_than_the_lock(queue):
    accept(queue, "old")
    queue.receive(1, "old")
    assert accept(queue, "new", takes_over=True) is None
    queue.wait(LOCK_MS)
    accepted, _ = queue.turn()
    assert accepted == {"new": ("s", queue.now_ms + LOCK_MS)}
    received = queue.receive(3, "new")
    assert [(each.body, each.delivery_count) for each in received] == [(b"1", 1), (b"2", 0), (b"3", 0)]
    take_over(queue, "third", "new")  # it has kept the token


def test_the_last_who_names_the_token_gets_it(queue):
    accept(queue, "old")
    assert accept(queue, "new", takes_over=True) is None
    assert accept(queue, "newest", takes_over=True) is None
    assert isinstance(queue.closed["new"], SessionLockLost)
    queue.partition.close_receiver("old", False, queue.now_ms)
    assert queue.turn()[0].keys() == {"newest"}


def test_one_that_has_given_up_meanwhile_does_not_get_it(queue):
    accept(queue, "old")
    [held] = queue.receive(1, "old")
    assert accept(queue, "new", takes_over=True) is None
    queue.close("new")
    queue.partition.close_receiver("old", False, queue.now_ms)
    assert queue.turn()[0] == {}
    assert queue.accept("any") == "s"
    assert queue.bodies_for("any") == ["1", "2", "3"]
    with pytest.raises(SessionLockLost):
        settle(queue, "new", held)


@pytest.mark.parametrize("token", [OTHER, None])
@pytest.mark.parametrize("takes_over", [False, True])
def test_without_the_token_the_session_is_taken(queue, token, takes_over):
    accept(queue, "old")
    with pytest.raises(SessionCannotBeLocked):
        ask(queue, "new", token=token, takes_over=takes_over)
    with pytest.raises(SessionCannotBeLocked):
        ask(queue, "new")  # it does not say that it takes over


def test_an_exclusive_session_cannot_be_taken_over(queue):
    queue.accept("old", "s")
    for token in (TOKEN, None):
        with pytest.raises(SessionCannotBeLocked):
            ask(queue, "new", token=token, takes_over=True)


def test_a_token_of_a_lock_that_has_ended_does_no_harm(queue):
    accept(queue, "old")
    [held] = queue.receive(1, "old")
    queue.close("old")
    assert accept(queue, "new", token=OTHER, takes_over=True) is not None
    assert queue.bodies_for("new") == ["1", "2", "3"]
    with pytest.raises(LockLost):
        settle(queue, "new", held)


def test_the_next_session_is_taken_over_alike(queue):
    assert accept(queue, "old", session=None) == ("s", queue.now_ms + LOCK_MS)
    take_over(queue)
    assert queue.bodies_for("new") == ["1", "2", "3"]


def test_a_lock_that_was_kept_for_a_broken_connection_is_taken_over_at_once():
    queue = SessionDriver(settings=PartitionSettings(keep_locks_of_broken_connections=True), lock_duration_ms=LOCK_MS)
    queue.put("s", "1", "2", "3")
    accept(queue, "old")
    held = queue.receive(2, "old")
    queue.partition.close_receiver("old", True, queue.now_ms, held[1].token)
    assert accept(queue, "new", takes_over=True) is not None
    settle(queue, "new", held[0])
    assert queue.bodies_for("new") == ["2", "3"]
    queue.partition.check()


def test_a_transaction_of_the_other_one_goes_on(queue):
    accept(queue, "old")
    held = queue.receive(2, "old")
    transaction = b"t" * 16
    queue.partition.request_in(transaction, True, MAIN, requests.Settle([held[0].token], 0, None, "old"), queue.now_ms)
    take_over(queue)
    with pytest.raises(SessionLockLost):
        queue.partition.request_in(
            transaction, False, MAIN, requests.Settle([held[1].token], 0, None, "old"), queue.now_ms
        )
