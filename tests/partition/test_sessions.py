"""Sessions: who gets one and for how long, what is received of it and in which order."""

import pytest

from broker import requests
from broker.errors import (
    EntityDisabled,
    EntityNotFound,
    InvalidArgument,
    LockLost,
    MessageNotFound,
    NotAllowed,
    OperationTimeout,
    SessionCannotBeLocked,
    SessionLockLost,
)
from broker.partition.settings import PartitionSettings
from broker.partition.state.sessions import LENT_FORGOTTEN
from broker.wire import Outcome, SettleOperation
from storage.records import Field, Place, entity_key
from storage.store import Table
from tests.partition.driver import DEAD, ENTITY, LOCK_MS, MAIN, Driver, define, deliveries, describe, message
from tests.partition.session_driver import WAIT_MS, SessionDriver


@pytest.fixture
def queue() -> SessionDriver:
    return SessionDriver()


# -- who gets which session


def test_a_receiver_gets_the_session_it_names(queue):
    queue.put("a", "a1")
    queue.put("b", "b1")
    assert queue.accept("r", "b") == "b"
    assert queue.bodies_for("r") == ["b1"]


def test_a_session_without_messages_or_state_can_be_accepted_by_name(queue):
    assert queue.accept("r", "new") == "new"
    assert queue.receive(1, "r") == []
    queue.put("new", "first")
    assert queue.bodies_for("r") == ["first"]


def test_the_empty_string_is_a_session_like_any(queue):
    queue.put("", "e1")
    assert queue.accept("r") == ""
    assert queue.bodies_for("r") == ["e1"]


def test_a_session_is_one_receivers_at_a_time(queue):
    queue.put("a", "a1")
    queue.accept("r", "a")
    with pytest.raises(SessionCannotBeLocked, match="'a'"):
        queue.accept("s", "a")
    assert queue.accept("s") is None  # nor as the next available


def test_a_session_can_be_had_the_moment_its_lock_has_ended(queue):
    queue.put("a", "a1")
    queue.accept("r", "a")
    queue.now_ms += LOCK_MS - 1
    with pytest.raises(SessionCannotBeLocked):
        queue.ask("s", "a")
    queue.now_ms += 1  # and no timer has come by
    assert queue.accept("s", "a") == "a"
    assert isinstance(queue.closed["r"], SessionLockLost)


def test_the_next_available_session_is_the_one_with_the_oldest_claim(queue):
    for session in "bca":
        queue.put(session, "1", "2")
    assert [queue.accept(name) for name in "xyz"] == ["b", "c", "a"]


def test_sessions_that_are_locked_or_hold_only_a_state_are_not_available(queue):
    queue.accept("r", "stateful")
    queue.of_session("set-session-state", "stateful", b"x")
    queue.close("r")
    queue.put("busy", "1")
    queue.accept("r", "busy")
    assert queue.accept("s") is None


def test_a_receiver_waits_for_a_session_and_gets_the_first_that_is_there(queue):
    assert queue.accept("x") is None
    assert queue.accept("y") is None
    queue.put("a", "a1")
    accepted, _ = queue.turn()
    assert accepted == {"x": ("a", queue.now_ms + LOCK_MS)}
    queue.put("b", "b1")
    accepted, _ = queue.turn()
    assert accepted == {"y": ("b", queue.now_ms + LOCK_MS)}


def test_one_waits_for_a_session_that_is_released(queue):
    queue.put("a", "a1")
    queue.accept("x", "a")
    assert queue.accept("y") is None
    queue.close("x")
    accepted, _ = queue.turn()
    assert accepted == {"y": ("a", queue.now_ms + LOCK_MS)}


def test_a_wait_ends_after_the_time_given(queue):
    queue.accept("x", wait_ms=1000)
    queue.accept("y", wait_ms=500)
    queue.wait(499)
    queue.turn()
    assert queue.closed == {}
    queue.wait(1)
    queue.turn()
    assert [*queue.closed] == ["y"]
    queue.wait(500)
    queue.turn()
    assert [*queue.closed] == ["y", "x"]
    assert isinstance(queue.closed["x"], OperationTimeout)
    queue.put("a", "a1")
    assert queue.accept("z") == "a"


def test_without_time_to_wait_a_receiver_takes_what_is_there_or_nothing(queue):
    queue.put("a", "a1")
    assert queue.accept("x", wait_ms=0) == "a"
    queue.ask("y", wait_ms=0)
    queue.turn()
    queue.wait(0)
    queue.turn()
    assert isinstance(queue.closed["y"], OperationTimeout)


@pytest.mark.parametrize("wait_ms", [0, 10])
def test_at_the_end_of_a_wait_a_session_that_is_there_is_given(queue, wait_ms):
    queue.ask("x", wait_ms=wait_ms)
    queue.ask("y", wait_ms=wait_ms)
    queue.put("a", "a1")
    queue.now_ms += wait_ms  # a worker fires its timers before it offers sessions
    queue.partition.advance(queue.now_ms)
    assert queue.turn()[0] == {"x": ("a", queue.now_ms + LOCK_MS)}
    assert [*queue.closed] == ["y"]


def test_a_receiver_that_waits_again_waits_from_the_start(queue):
    queue.accept("x", wait_ms=1000)
    queue.close("x")
    queue.accept("x", wait_ms=3000)
    queue.wait(2999)
    queue.turn()
    assert queue.closed == {}


def test_a_receiver_that_has_left_does_not_wait_any_more(queue):
    queue.accept("x")
    queue.accept("y")
    queue.close("x", broken=True)
    queue.put("a", "a1")
    accepted, _ = queue.turn()
    assert [*accepted] == ["y"]
    queue.wait(WAIT_MS)
    queue.turn()
    assert "x" not in queue.closed


def test_a_receiver_accepted_and_closed_in_one_turn_is_not_told(queue):
    queue.ask("x", "a")
    queue.partition.close_receiver("x", False, queue.now_ms)
    assert queue.turn()[0] == {}
    assert queue.accept("y", "a") == "a"


def test_no_session_starves(queue):
    for session in "abc":
        queue.put(session, *[f"{session}{at}" for at in range(3)])
    got = []
    for _ in range(9):
        session = queue.accept("r")
        [delivery] = queue.receive(1)
        queue.settle(Outcome.ACCEPTED, delivery)
        got.append(delivery.body.decode())
        queue.close("r")
    assert got == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]
    assert queue.accept("r") is None


def test_one_receiver_per_session_and_each_its_own(queue):
    for session in "abcd":
        queue.put(session, f"{session}1", f"{session}2")
    for session in "abcd":
        queue.accept(session, session)
    for session in "abcd":
        queue.grant(5, session)
    found = queue.pump()
    assert {name: [d.body.decode() for d in got] for name, got in found.items()} == {
        name: [f"{name}1", f"{name}2"] for name in "abcd"
    }


def test_an_id_longer_than_a_key_takes_is_refused(queue):
    assert queue.accept("r", "ü" * 128) == "ü" * 128
    with pytest.raises(InvalidArgument, match="128"):
        queue.ask("s", "x" * 385)
    with pytest.raises(InvalidArgument, match="128"):
        queue.request("peek-session", "x" * 385, 0, 1, 1000)


# -- in which order


def test_messages_of_a_session_come_in_the_order_they_were_sent(queue):
    for at in range(10):
        queue.put("ab"[at % 2], f"m{at}")
    queue.accept("r", "a")
    assert queue.bodies_for("r", 2) == ["m0", "m2"]
    queue.put("a", "m10")
    assert queue.bodies_for("r", 1) == ["m4"]
    assert queue.bodies_for("r") == ["m6", "m8", "m10"]


def test_an_abandoned_message_comes_again_before_later_ones(queue):
    queue.put("a", "1", "2", "3", "4", "5")
    queue.accept("r", "a")
    one, two, three = queue.receive(3)
    queue.settle(Outcome.ABANDONED, three)
    queue.settle(Outcome.ABANDONED, one)
    again = queue.receive(9)
    assert [(d.body.decode(), d.delivery_count) for d in again] == [("1", 1), ("3", 1), ("4", 0), ("5", 0)]
    queue.settle(Outcome.RELEASED, two)
    assert [(d.body.decode(), d.delivery_count) for d in queue.receive(1)] == [("2", 0)]


def test_a_longer_session_than_fits_into_memory_keeps_its_order():
    queue = SessionDriver(settings=PartitionSettings(session_window=3, step=2))
    queue.put("a", *[f"{at:02}" for at in range(10)])
    queue.accept("r", "a")
    queue.put("a", "10", "11")
    first = queue.receive(7)
    queue.settle(Outcome.RELEASED, *first[1:])  # more than are kept
    queue.put("a", "12")
    assert queue.bodies_for("r", 4) == ["01", "02", "03", "04"]
    queue.settle(Outcome.ABANDONED, first[0])
    assert queue.bodies_for("r") == ["00", *[f"{at:02}" for at in range(5, 13)]]


def test_messages_that_come_while_a_session_is_received_are_received(queue):
    queue.accept("r", "a")
    queue.grant(100)
    queue.put("a", "1")
    queue.put("b", "other")
    assert [d.body for d in queue.pump()["r"]] == [b"1"]
    queue.put("a", "2", "3")
    assert [d.body for d in queue.pump()["r"]] == [b"2", b"3"]
    assert queue.pump() == {}


def test_credit_of_one_session_waits_while_another_has_messages(queue):
    queue.accept("r", "a")
    queue.accept("s", "b")
    queue.grant(1, "r")
    queue.put("b", "b1")
    assert queue.pump() == {}
    queue.grant(1, "s")
    assert [*queue.pump()] == ["s"]


def test_a_drain_takes_the_available_messages_and_voids_the_rest(queue):
    queue.put("a", "1")
    queue.accept("r", "a")
    queue.partition.drain("r", 5)
    pumped = queue.partition.pump(queue.now_ms)
    assert len(pumped.deliveries) == 1
    assert list(pumped.drained) == [("r", 1)]
    queue.put("a", "2")
    assert queue.pump() == {}


def test_turns_are_bounded_and_sessions_share_them():
    queue = SessionDriver(settings=PartitionSettings(pump_bytes=2000, pump_bytes_per_receiver=1500))
    for session in "abc":
        queue.put(session, *["x" * 400] * 4)
        queue.accept(session, session)
    for session in "abc":
        queue.grant(4, session)
    turns = []
    more = True
    while more:
        pumped = queue.partition.pump(queue.now_ms)
        turns.append({receiver: len(items) // 5 for receiver, _, items in pumped.deliveries})
        more = pumped.more
    assert all(sum(turn.values()) <= 3 for turn in turns)
    assert sum(sum(turn.values()) for turn in turns) == 12
    assert all(set(turns[at]) | set(turns[at + 1]) | set(turns[at + 2]) == {*"abc"} for at in range(len(turns) - 2))


# -- the lock


def test_all_messages_of_a_session_are_locked_until_its_lock_ends(queue):
    queue.put("a", "1", "2")
    queue.accept("r", "a")
    queue.now_ms += 100
    queue.grant(2)
    [(_, until_ms, _)] = queue.partition.pump(queue.now_ms).deliveries
    assert until_ms == queue.now_ms - 100 + LOCK_MS


def test_a_lock_that_runs_out_closes_its_receiver_and_counts_for_its_messages(queue):
    queue.put("a", "1", "2", "3")
    queue.accept("r", "a")
    queue.receive(2)
    queue.wait(LOCK_MS)
    queue.turn()
    assert isinstance(queue.closed["r"], SessionLockLost)
    assert queue.held() == [3, 0, 0, 0]
    assert queue.accept("s") == "a"
    assert [(d.body.decode(), d.delivery_count) for d in queue.receive(3, "s")] == [("1", 1), ("2", 1), ("3", 0)]


def test_settling_after_the_session_lock_was_lost_says_so(queue):
    queue.put("a", "1", "2")
    queue.accept("r", "a")
    one, two = queue.receive(2)
    queue.now_ms += LOCK_MS  # and no timer has come by
    for outcome in Outcome:
        [error] = queue.settle_as("r", outcome, one)
        assert isinstance(error, SessionLockLost)
    queue.wait(0)
    queue.turn()
    [error] = queue.settle_as("r", Outcome.ACCEPTED, two)
    assert isinstance(error, SessionLockLost)
    with pytest.raises(SessionLockLost):
        queue.request("settle", [two.token], Outcome.ACCEPTED, None, "r")
    assert queue.held() == [2, 0, 0, 0]


def test_settling_twice_is_no_lost_session(queue):
    queue.put("a", "1")
    queue.accept("r", "a")
    [one] = queue.receive(1)
    queue.settle(Outcome.ACCEPTED, one)
    [error] = queue.settle_as("r", Outcome.ACCEPTED, one)
    assert isinstance(error, LockLost)
    with pytest.raises(LockLost):
        queue.request("settle", [one.token], Outcome.ACCEPTED, None)


def test_a_renewed_lock_lasts_longer_and_with_it_its_messages(queue):
    queue.put("a", "1", "2")
    queue.accept("r", "a")
    one, _ = queue.receive(2)
    queue.wait(LOCK_MS - 1)
    assert queue.of_session("renew-session-lock", "a") == queue.now_ms + LOCK_MS
    queue.wait(LOCK_MS - 1)
    queue.turn()
    assert queue.closed == {}
    assert queue.settle(Outcome.ACCEPTED, one) == [None]
    queue.wait(1)
    queue.turn()
    assert [*queue.closed] == ["r"]


def test_neither_receiving_nor_settling_renews(queue):
    queue.put("a", "1", "2")
    queue.accept("r", "a")
    queue.wait(LOCK_MS - 1)
    queue.settle(Outcome.ACCEPTED, *queue.receive(1))
    queue.wait(1)
    queue.turn()
    assert [*queue.closed] == ["r"]


def test_locks_end_in_the_order_of_their_renewals(queue):
    queue.accept("r", "a")
    queue.wait(1000)
    queue.accept("s", "b")
    queue.wait(1000)
    queue.of_session("renew-session-lock", "a")
    queue.wait(LOCK_MS - 1000)
    queue.turn()
    assert [*queue.closed] == ["s"]
    queue.wait(1000)
    queue.turn()
    assert [*queue.closed] == ["s", "r"]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("renew-session-lock", []),
        ("get-session-state", []),
        ("set-session-state", [b"x"]),
        ("receive-session-deferred", [[1], False]),
    ],
)
def test_only_the_holder_of_the_lock_may_ask(queue, name, args):
    queue.put("a", "1")
    queue.accept("r", "a")
    queue.settle(Outcome.DEFERRED, *queue.receive(1))
    with pytest.raises(SessionLockLost):
        queue.of_session(name, "a", *args, receiver="s")
    with pytest.raises(SessionLockLost):
        queue.of_session(name, "b", *args)
    queue.now_ms += LOCK_MS  # and no timer has come by
    with pytest.raises(SessionLockLost):
        queue.of_session(name, "a", *args)


def test_a_message_of_a_session_has_no_lock_to_be_renewed(queue):
    queue.put("a", "1")
    queue.accept("r", "a")
    [one] = queue.receive(1)
    with pytest.raises(NotAllowed, match="lock of the session"):
        queue.request("renew-locks", [one.token])


def test_closing_a_receiver_gives_the_session_back_at_once_and_unharmed(queue):
    queue.put("a", "1", "2")
    queue.accept("r", "a")
    queue.receive(2)
    queue.close("r")
    assert queue.held() == [2, 0, 0, 0]
    assert queue.accept("s") == "a"
    assert [(d.body.decode(), d.delivery_count) for d in queue.receive(2, "s")] == [("1", 0), ("2", 0)]


def test_a_broken_connection_gives_the_session_back_and_counts_for_its_messages(queue):
    queue.put("a", "1", "2")
    queue.accept("r", "a")
    queue.receive(1)
    queue.close("r", broken=True)
    assert queue.accept("s") == "a"
    assert [(d.body.decode(), d.delivery_count) for d in queue.receive(2, "s")] == [("1", 1), ("2", 0)]


def test_what_of_a_session_never_reached_the_receiver_counts_as_nothing(queue):
    queue.put("a", "1", "2", "3")
    queue.accept("r", "a")
    _, two, _ = queue.receive(3)
    queue.close("r", broken=True, unsent_from=two.token)
    assert queue.accept("s") == "a"
    assert [(d.body.decode(), d.delivery_count) for d in queue.receive(3, "s")] == [("1", 1), ("2", 0), ("3", 0)]


def test_locks_of_broken_connections_may_be_kept():
    queue = SessionDriver(settings=PartitionSettings(keep_locks_of_broken_connections=True))
    queue.put("a", "1", "2")
    queue.accept("r", "a")
    one, _ = queue.receive(2)
    queue.close("r", broken=True)
    with pytest.raises(SessionCannotBeLocked):
        queue.ask("s", "a")
    with pytest.raises(SessionLockLost):
        queue.of_session("renew-session-lock", "a")
    assert queue.settle(Outcome.ACCEPTED, one) == [None]  # by its token
    queue.wait(LOCK_MS)
    assert queue.accept("s") == "a"
    assert [(d.body.decode(), d.delivery_count) for d in queue.receive(2, "s")] == [("2", 1)]


def test_a_restart_loses_locks_and_nothing_else(queue):
    queue.put("b", "b1")
    queue.put("a", "a1", "a2")
    queue.accept("r", "b")
    queue.of_session("set-session-state", "b", b"half")
    [one] = queue.receive(1)
    queue.restart()
    assert [queue.accept(name) for name in "xy"] == ["b", "a"]
    assert queue.of_session("get-session-state", "b", receiver="x") == b"half"
    [error] = queue.settle_as("r", Outcome.ACCEPTED, one)
    assert isinstance(error, SessionLockLost)
    assert queue.bodies_for("x") == ["b1"]


def test_after_a_restart_the_session_with_the_oldest_message_comes_first(queue):
    queue.put("a", "1")
    queue.put("b", "2")
    queue.put("a", "3")
    queue.accept("r", "a")
    queue.settle(Outcome.ACCEPTED, *queue.receive(1))
    queue.restart()
    assert queue.offered() == ["b", "a"]


# -- what settles a message


def test_a_message_that_fails_too_often_is_dead_lettered_and_read_by_ordinary_receivers():
    queue = SessionDriver(max_delivery_count=2)
    queue.put("a", "1", "2")
    queue.accept("r", "a")
    for _ in range(2):
        queue.settle(Outcome.ABANDONED, *queue.receive(1))
    assert queue.bodies_for("r") == ["2"]
    [dead] = queue.receive(5, "d", DEAD)
    assert dead.body == b"1"
    assert dead.properties["DeadLetterReason"] == "MaxDeliveryCountExceeded"
    assert Field.SESSION not in dead.overlay
    assert queue.settle(Outcome.ABANDONED, dead, queue=DEAD) == [None]
    assert queue.listed() == [(Place.AVAILABLE, "a", 2)]


def test_a_receiver_dead_letters_a_message_of_its_session(queue):
    queue.put("a", "1")
    queue.accept("r", "a")
    queue.settle(Outcome.DEAD_LETTERED, *queue.receive(1), properties={"DeadLetterReason": "bad"})
    assert queue.listed() == []
    [dead] = queue.receive(5, "d", DEAD)
    assert dead.properties == {"DeadLetterReason": "bad"}


def test_the_dead_letter_queue_has_no_sessions(queue):
    with pytest.raises(NotAllowed):
        queue.ask("r", "a", queue=DEAD)
    with pytest.raises(NotAllowed):
        queue.ask("r", queue=DEAD)


def test_a_deferred_message_is_received_by_number_under_the_lock_of_its_session(queue):
    queue.put("a", "1", "2")
    queue.put("b", "3")
    queue.accept("r", "a")
    queue.settle(Outcome.DEFERRED, *queue.receive(1))
    assert queue.bodies_for("r") == ["2"]
    assert queue.listed() == [(Place.AVAILABLE, "a", 2), (Place.AVAILABLE, "b", 3), (Place.DEFERRED, "a", 1)]
    queue.now_ms += 10
    until_ms, items = queue.of_session("receive-session-deferred", "a", [1], False)
    [one] = deliveries(items)
    assert (one.body, until_ms) == (b"1", queue.now_ms - 10 + LOCK_MS)
    with pytest.raises(MessageNotFound):
        queue.of_session("receive-session-deferred", "a", [1], False)  # locked
    assert queue.settle(Outcome.ABANDONED, one) == [None]
    [one] = deliveries(queue.of_session("receive-session-deferred", "a", [1], False)[1])
    assert one.delivery_count == 2
    assert queue.settle(Outcome.ACCEPTED, one) == [None]
    assert queue.listed() == [(Place.AVAILABLE, "a", 2), (Place.AVAILABLE, "b", 3)]


def test_a_deferred_message_is_not_found_in_another_session(queue):
    queue.put("a", "1")
    queue.accept("r", "a")
    queue.settle(Outcome.DEFERRED, *queue.receive(1))
    queue.accept("s", "b")
    with pytest.raises(MessageNotFound):
        queue.of_session("receive-session-deferred", "b", [1], False, receiver="s")
    with pytest.raises(NotAllowed):
        queue.request("receive-deferred", [1], False)


def lend(queue, session, *numbers, delete=False):
    """Receive deferred messages without the lock of their session."""
    until_ms, items = queue.of_session("receive-session-deferred", session, [*numbers], delete, receiver=None)
    return until_ms, deliveries(items)


def is_lost(queue, delivery):
    [error] = queue.settle(Outcome.ACCEPTED, delivery)
    return isinstance(error, LockLost)


def with_deferred(queue, *bodies, **given):
    """A receiver "r" holds session "a", whose messages are deferred."""
    queue.put("a", *bodies, **given)
    queue.accept("r", "a")
    queue.settle(Outcome.DEFERRED, *queue.receive(len(bodies)))


@pytest.mark.parametrize("is_held", [True, False])
def test_a_deferred_message_is_received_without_the_lock_of_its_session(queue, is_held):
    with_deferred(queue, "1", "2")
    if not is_held:
        queue.close("r")
    queue.now_ms += 10
    until_ms, [one] = lend(queue, "a", 1)
    assert (one.body, one.delivery_count, until_ms) == (b"1", 1, queue.now_ms + LOCK_MS)
    with pytest.raises(MessageNotFound):
        lend(queue, "a", 1)  # locked
    assert lend(queue, "a", 2, delete=True)[0] == 0
    assert queue.settle(Outcome.ABANDONED, one) == [None]
    _, [one] = lend(queue, "a", 1)
    assert one.delivery_count == 2
    assert queue.settle(Outcome.ACCEPTED, one) == [None]
    assert queue.listed() == []
    queue.wait(LOCK_MS)
    queue.turn()


def test_a_lent_message_is_back_when_its_lock_ends_and_the_lock_of_the_session_goes_on(queue):
    with_deferred(queue, "1", "2")
    queue.wait(1_000)
    _, [one] = lend(queue, "a", 1)
    queue.wait(1_000)
    _, [two] = lend(queue, "a", 2)
    queue.wait(LOCK_MS - 2_000)  # the session's lock ends first, and lends no longer
    queue.turn()
    assert "r" in queue.closed
    assert queue.settle(Outcome.DEFERRED, two) == [None]
    _, [two] = lend(queue, "a", 2)
    queue.wait(1_000)
    queue.turn()
    assert is_lost(queue, one)
    _, [one] = lend(queue, "a", 1)
    assert (one.delivery_count, two.delivery_count) == (2, 2)
    assert queue.settle(Outcome.ACCEPTED, one, two) == [None, None]
    assert queue.listed() == []


def test_who_holds_the_session_gets_a_lent_message_all_the_same(queue):
    with_deferred(queue, "1")
    _, [lent] = lend(queue, "a", 1)
    until_ms, items = queue.of_session("receive-session-deferred", "a", [1], False)
    [one] = deliveries(items)
    assert (one.delivery_count, until_ms) == (1, queue.now_ms + LOCK_MS)
    with pytest.raises(MessageNotFound):
        lend(queue, "a", 1)
    assert is_lost(queue, lent)
    assert queue.settle(Outcome.ACCEPTED, one) == [None]
    assert queue.listed() == []


def test_who_holds_another_session_does_not_end_the_lock_of_a_lent_message(queue):
    with_deferred(queue, "1")
    _, [lent] = lend(queue, "a", 1)
    queue.accept("s", "b")
    with pytest.raises(MessageNotFound):
        queue.of_session("receive-session-deferred", "b", [1], False, receiver="s")
    assert queue.settle(Outcome.ACCEPTED, lent) == [None]


def test_no_more_is_kept_of_messages_that_were_lent_than_of_those_that_are(queue):
    numbers = range(1, 400)
    with_deferred(queue, *map(str, numbers))
    _, [kept] = lend(queue, "a", 1)
    for number in numbers[1:]:
        queue.settle(Outcome.ABANDONED, *lend(queue, "a", number)[1])
        queue.partition.check()
    sessions = queue.partition._core.queue(MAIN).sessions
    assert len(sessions._lent_tokens) <= 2 + LENT_FORGOTTEN + 1
    assert sessions.lent_token(1) == kept.token
    assert queue.settle(Outcome.ACCEPTED, kept) == [None]


def test_a_message_that_is_settled_in_a_transaction_stays_lent(queue):
    with_deferred(queue, "1")
    _, [lent] = lend(queue, "a", 1)
    queue.partition.transact(b"t", True, [SettleOperation(MAIN, False, [lent.token], Outcome.ACCEPTED)], queue.now_ms)
    with pytest.raises(MessageNotFound):
        queue.of_session("receive-session-deferred", "a", [1], False)
    queue.partition.discharge(b"t", True, queue.now_ms)
    queue.partition.commit()
    assert queue.listed() == []


def test_a_lent_message_that_fails_too_often_is_dead_lettered():
    queue = SessionDriver(max_delivery_count=2)
    with_deferred(queue, "1")
    lend(queue, "a", 1)
    queue.wait(LOCK_MS)
    queue.turn()
    assert queue.listed() == []
    assert [each.body for each in queue.receive(5, "d", DEAD)] == [b"1"]


def test_lent_messages_are_those_of_the_session_and_only_deferred_ones(queue):
    with_deferred(queue, "1")
    queue.put("a", "2")
    queue.put("b", "3")
    for session, number in (("b", 1), ("a", 2), ("", 1), ("a", 3)):
        with pytest.raises(MessageNotFound):
            lend(queue, session, number)
    with pytest.raises(SessionLockLost):  # active ones are only for who holds the session
        queue.request("receive-session-deferred", None, "a", [1], False, True)
    assert lend(queue, "a", 1)[1]


def test_a_new_lock_duration_ends_the_locks_of_lent_messages(queue):
    with_deferred(queue, "1")
    _, [lent] = lend(queue, "a", 1)
    queue.change(lock_duration_ms=LOCK_MS // 2)
    assert is_lost(queue, lent)
    _, [again] = lend(queue, "a", 1)
    assert again.delivery_count == 1
    queue.wait(LOCK_MS // 2)
    queue.turn()
    assert is_lost(queue, again)


def test_other_requests_for_a_session_need_its_lock(queue):
    with_deferred(queue, "1")
    for name, args in (("renew-session-lock", []), ("get-session-state", []), ("set-session-state", [b"x"])):
        with pytest.raises(SessionLockLost):
            queue.of_session(name, "a", *args, receiver=None)


def test_locks_of_deferred_messages_end_with_that_of_the_session(queue):
    queue.put("a", "1", "2")
    queue.accept("r", "a")
    queue.settle(Outcome.DEFERRED, *queue.receive(2))
    queue.of_session("receive-session-deferred", "a", [1], False)
    queue.close("r")
    queue.accept("r", "a")
    [one] = deliveries(queue.of_session("receive-session-deferred", "a", [1], False)[1])
    assert one.delivery_count == 1
    queue.wait(LOCK_MS)
    queue.turn()
    queue.accept("r", "a")
    [one] = deliveries(queue.of_session("receive-session-deferred", "a", [1], True)[1])
    assert one.delivery_count == 2
    assert queue.held() == [0, 1, 0, 0]


def test_a_session_with_only_deferred_messages_is_not_offered(queue):
    queue.put("a", "1")
    queue.accept("r", "a")
    queue.settle(Outcome.DEFERRED, *queue.receive(1))
    queue.close("r")
    assert queue.accept("s") is None
    queue.restart()
    assert queue.accept("s") is None


def test_a_scheduled_message_comes_in_its_session_at_its_time(queue):
    queue.put("a", "later", scheduled_ms=queue.now_ms + 500)
    queue.put("b", "b1")
    assert queue.offered() == ["b"]
    assert queue.accept("s", "b") == "b"
    assert queue.accept("r") is None
    queue.wait(500)
    accepted, _ = queue.turn()
    assert accepted == {"r": ("a", queue.now_ms + LOCK_MS)}
    assert queue.bodies_for("r") == ["later"]
    assert queue.listed() == [(Place.AVAILABLE, "a", 3), (Place.AVAILABLE, "b", 2)]


def test_a_scheduled_message_comes_while_its_session_is_received(queue):
    queue.accept("r", "a")
    queue.grant(5)
    [number] = queue.request("schedule", [message("later", session_id="a", scheduled_ms=queue.now_ms + 500)])
    [gone] = queue.request("schedule", [message("gone", session_id="a", scheduled_ms=queue.now_ms + 500)])
    queue.request("cancel-scheduled", [gone])
    assert queue.listed() == [(Place.SCHEDULED, "a", number)]
    queue.wait(500)
    assert [d.body for d in queue.pump()["r"]] == [b"later"]


def test_received_and_deleted_messages_are_gone(queue):
    queue.put("a", "1", "2")
    queue.accept("r", "a", receive_and_delete=True)
    assert queue.bodies_for("r", 1) == ["1"]
    queue.close("r")
    assert queue.listed() == [(Place.AVAILABLE, "a", 2)]
    assert queue.accept("s") == "a"


def test_messages_received_and_deleted_but_never_sent_are_in_their_session_again(queue):
    queue.put("a", "1", "2")
    queue.accept("r", "a", receive_and_delete=True)
    queue.grant(1)
    [(_, _, items)] = queue.partition.pump(queue.now_ms).deliveries
    queue.close("r")
    queue.accept("r", "a")
    queue.settle(Outcome.ACCEPTED, *queue.receive(5))
    queue.close("r")
    assert queue.offered() == []
    queue.partition.restore(MAIN, items, queue.now_ms)
    assert queue.accept("r") == "a"
    assert queue.bodies_for("r") == ["1"]
    assert queue.listed() == [(Place.AVAILABLE, "a", 1)]


# -- time to live


def test_an_expired_message_is_not_received(queue):
    queue.put("a", "1", ttl_ms=100)
    queue.put("a", "2")
    queue.accept("r", "a")
    queue.now_ms += 100  # and no timer has come by
    assert queue.bodies_for("r") == ["2"]
    assert queue.listed() == [(Place.AVAILABLE, "a", 2)]


def test_a_session_whose_messages_have_all_expired_is_not_offered(queue):
    queue.put("a", "1", "2", ttl_ms=100)
    queue.put("b", "3")
    queue.now_ms += 100  # and no timer has come by
    assert queue.accept("r") == "b"
    assert queue.held() == [1, 0, 0, 0]
    assert queue.accept("s") is None


def test_a_session_whose_messages_expire_in_time_is_forgotten(queue):
    queue.put("a", "1", ttl_ms=100)
    queue.wait(100)
    assert queue.listed() == []
    assert queue.accept("r") is None


def test_expiring_many_messages_takes_several_turns():
    queue = SessionDriver(settings=PartitionSettings(step=3))
    queue.put("a", *"12345678", ttl_ms=100)
    queue.put("b", "9")
    queue.now_ms += 100
    queue.ask("r")
    pumped = queue.partition.pump(queue.now_ms)
    assert pumped.more
    assert queue.turn()[0] == {"r": ("b", queue.now_ms + LOCK_MS)}


def test_waiting_for_a_session_pulls_expired_messages_into_the_dead_letter_queue():
    queue = SessionDriver(dead_lettering_on_message_expiration=True)
    queue.put("a", "1", ttl_ms=100)
    queue.wait(200)
    assert queue.held() == [1, 0, 0, 0]
    queue.accept("r")
    queue.wait(0)
    assert queue.held() == [0, 0, 0, 0]
    assert queue.bodies(DEAD) == ["1"]


def test_a_message_that_expires_under_a_lock_goes_when_the_session_is_released(queue):
    queue.put("a", "1", ttl_ms=100)
    queue.accept("r", "a")
    queue.receive(1)
    queue.wait(200)
    queue.close("r")
    assert queue.held() == [0, 0, 0, 0]
    assert queue.listed() == []
    assert queue.accept("s") is None


def test_an_expired_message_at_the_head_of_a_locked_session_is_passed_over(queue):
    queue.put("a", "1", ttl_ms=100)
    queue.put("a", "2")
    queue.accept("r")
    queue.wait(100)
    assert queue.bodies_for("r") == ["2"]


# -- what comes in


def test_a_message_without_session_id_is_refused_and_all_sent_with_it(queue):
    with pytest.raises(NotAllowed, match="session id"):
        queue.send(message("1", session_id="a"), message("2"))
    with pytest.raises(NotAllowed, match="session id"):
        queue.send(message("1", partition_key="a"))
    with pytest.raises(NotAllowed, match="session id"):
        queue.request("schedule", [message("1", scheduled_ms=queue.now_ms + 5)])
    assert queue.held() == [0, 0, 0, 0]


def test_a_ping_needs_no_session(queue):
    queue.send(message("", ping=True))
    assert queue.held() == [0, 0, 0, 0]


def test_a_queue_with_sessions_has_no_receivers_without(queue):
    with pytest.raises(NotAllowed, match="requires sessions"):
        queue.open("r")


def test_a_queue_without_sessions_has_no_receivers_of_sessions_and_does_not_mind_session_ids():
    queue = Driver()
    queue.send(message("1", session_id="a"))
    assert [d.body for d in queue.receive(2)] == [b"1"]
    assert queue.store.scan(Table.SESSION_ENTRIES, b"\0", b"\xff" * 400, 1) == []
    with pytest.raises(NotAllowed):
        queue.partition.open_receiver("s", MAIN, False, queue.now_ms, ["a", 0])
    for name, args in [
        ("renew-session-lock", ["r", "a"]),
        ("get-session-state", ["r", "a"]),
        ("set-session-state", ["r", "a", b""]),
        ("receive-session-deferred", ["r", "a", [1], False]),
        ("get-message-sessions", [None, 0, 1]),
        ("peek-session", ["a", 0, 1, 1000]),
        ("delete-batch", [1, queue.now_ms, "a"]),
    ]:
        with pytest.raises(NotAllowed):
            queue.request(name, *args)


# -- deleting


def test_messages_of_one_session_are_deleted_alone(queue):
    queue.put("a", "1", "2")
    queue.put("b", "3")
    assert queue.request("delete-batch", 5, queue.now_ms + 1, "a") == 2
    assert queue.bodies() == ["3"]
    assert queue.offered() == ["b"]


def test_locked_messages_of_a_session_are_not_deleted(queue):
    queue.put("a", "1", "2", "3")
    queue.accept("r", "a")
    queue.receive(1)
    assert queue.request("delete-batch", 1, queue.now_ms + 1, "a") == 1
    assert queue.bodies() == ["1", "3"]
    assert queue.bodies_for("r") == ["3"]


def test_a_purged_queue_has_no_sessions_to_offer(queue):
    queue.put("a", "1", "2")
    queue.put("b", "3", scheduled_ms=queue.now_ms + 100)
    queue.accept("r", "a")
    queue.settle(Outcome.DEFERRED, *queue.receive(1))
    queue.close("r")
    assert queue.request("purge") == 3
    assert queue.listed() == []
    assert queue.offered() == []


# -- changes of the entity


def test_a_changed_lock_duration_drops_the_locks_of_sessions(queue):
    queue.put("a", "1")
    queue.accept("r", "a")
    queue.accept("w")
    queue.receive(1)
    queue.change(lock_duration_ms=10_000)
    accepted, _ = queue.turn()
    assert isinstance(queue.closed["r"], SessionLockLost)
    assert accepted == {"w": ("a", queue.now_ms + 10_000)}
    assert [d.delivery_count for d in queue.receive(1, "w")] == [0]


def test_a_disabled_queue_closes_receivers_and_who_waits_for_a_session(queue):
    queue.put("a", "1")
    queue.accept("r", "a")
    queue.receive(1)
    queue.accept("w")
    queue.change(status="ReceiveDisabled")
    queue.turn()
    assert {name: type(error) for name, error in queue.closed.items()} == {"r": EntityDisabled, "w": EntityDisabled}
    with pytest.raises(EntityDisabled):
        queue.ask("s", "a")
    queue.change(status="Active")
    assert queue.accept("s") == "a"
    assert [d.delivery_count for d in queue.receive(1, "s")] == [0]


def test_a_deleted_queue_leaves_nothing_behind(queue):
    queue.put("a", "1", "2", "3")
    queue.accept("r", "a")
    queue.settle(Outcome.DEFERRED, *queue.receive(1))
    queue.of_session("set-session-state", "a", b"x" * 100)
    queue.receive(1)
    queue.accept("w")
    queue.partition.delete_entity(ENTITY, queue.now_ms)
    queue.store.delete(Table.ENTITIES, entity_key(ENTITY))
    queue.turn()
    assert {name: type(error) for name, error in queue.closed.items()} == {"r": EntityNotFound, "w": EntityNotFound}
    queue.wait(100)
    for table in (Table.QUEUE, Table.MESSAGES, Table.SESSION_ENTRIES, Table.SESSIONS, Table.SESSION_STATES):
        assert queue.store.scan(table, b"\0", b"\xff" * 400, 10) == []


def test_whether_a_queue_requires_sessions_is_read_from_its_definition():
    queue = Driver()
    define(queue.store, ENTITY, describe(requires_session=True))
    queue.restart()
    with pytest.raises(NotAllowed):
        queue.open("r")


def test_sessions_are_counted(queue):
    queue.put("a", "1")
    queue.accept("r", "a")
    queue.accept("s", "b")
    queue.close("s")
    queue.wait(LOCK_MS)
    tally = queue.partition.tallies()[MAIN]
    assert (tally["sessions_accepted"], tally["session_locks_lost"]) == (2, 1)


def test_in_a_transaction_a_lost_session_lock_has_its_name_too(queue):
    queue.put("a", "1")
    queue.accept("r", "a")
    [one] = queue.receive(1)
    queue.now_ms += LOCK_MS  # and no timer has come by
    settle = SettleOperation(MAIN, False, [one.token], Outcome.ACCEPTED, None, "r")
    assert [error for [[error, _]] in queue.partition.transact("t", True, [settle], queue.now_ms)] == [
        "SessionLockLost"
    ]
    with pytest.raises(SessionLockLost):
        queue.partition.request_in(
            "t", False, MAIN, requests.Settle([one.token], Outcome.ACCEPTED, None, "r"), queue.now_ms
        )
