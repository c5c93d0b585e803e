"""The ends of locks beside peeked messages, by number, whatever becomes of the locks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.partition.state import locks
from broker.partition.state.locks import INDEX_FORGOTTEN, end_of, ref_of
from broker.partition.state.window import number_of
from broker.wire import Outcome, SettleOperation
from tests.partition.driver import DEAD, LOCK_MS, MAIN, Driver, deliveries
from tests.partition.session_driver import SessionDriver

MUCH = 1 << 20


def ends(queue: Driver, of: int = MAIN, count: int = 1000) -> dict[int, int]:
    """By peek, and the same by browse."""
    items, found = queue.request("peek", 0, count, MUCH, True, queue=of)
    assert [each.number for each in deliveries(items)] == [each.number for each in queue.peek(of, count=count)]
    browsed: dict[int, int] = {}
    start, shown, is_end = 0, 0, False
    while shown < count and not is_end:
        some, start, is_end, some_ends = queue.request("browse", start, count - shown, MUCH, None, None, True, queue=of)
        browsed |= some_ends
        shown += len(deliveries(some))
    assert browsed == found
    queue.partition.check()
    return dict(found)


def test_a_locked_message_has_its_end_and_an_older_gateway_gets_what_it_ever_got():
    queue = Driver()
    queue.send("a", "b", "c")
    assert ends(queue) == {}
    first, second = queue.receive(2)
    until_ms = queue.now_ms + LOCK_MS
    assert ends(queue) == {1: until_ms, 2: until_ms}
    assert ends(queue, count=1) == {1: until_ms}
    assert deliveries(queue.request("peek", 0, 10, MUCH)) == queue.peek()
    assert len(queue.request("browse", 0, 10, MUCH, None)) == 3
    queue.wait(1000)
    assert queue.request("renew-locks", [first.token]) == [until_ms + 1000]
    assert ends(queue) == {1: until_ms + 1000, 2: until_ms}
    queue.settle(Outcome.RELEASED, second)
    assert ends(queue) == {1: until_ms + 1000}
    queue.wait(LOCK_MS)
    assert ends(queue) == {}


def test_a_lock_that_has_ended_unnoticed_is_none():
    queue = Driver()
    queue.send("a")
    queue.receive_one()
    queue.now_ms += LOCK_MS
    assert ends(queue) == {}


def test_a_deferred_message_has_one_while_it_is_locked_by_its_number():
    queue = Driver()
    queue.send("a")
    queue.settle(Outcome.DEFERRED, queue.receive_one())
    assert ends(queue) == {}
    until_ms, items = queue.request("receive-deferred", [1], False)
    assert ends(queue) == {1: until_ms}
    queue.settle(Outcome.ABANDONED, *deliveries(items))
    assert ends(queue) == {}


def test_dead_letters_have_their_own():
    queue = Driver()
    queue.send("a", "b")
    one, _ = queue.receive(2)
    queue.settle(Outcome.DEAD_LETTERED, one)
    assert ends(queue, DEAD) == {}
    [dead] = queue.receive(1, "dead", DEAD)
    assert ends(queue, DEAD) == {dead.number: queue.now_ms + LOCK_MS}
    assert ends(queue) == {2: queue.now_ms + LOCK_MS}


def test_a_message_that_a_transaction_completes_is_locked_until_the_commit():
    queue = Driver()
    queue.send("a")
    received = queue.receive_one()
    operation = SettleOperation(MAIN, False, [received.token], Outcome.ACCEPTED)
    assert queue.partition.transact("t", True, [operation], queue.now_ms) == [None]
    queue.partition.commit()
    assert ends(queue) == {1: queue.now_ms + LOCK_MS}
    queue.partition.discharge("t", True, queue.now_ms)
    queue.partition.commit()
    assert ends(queue) == {}


def test_after_a_shorter_lock_duration_new_locks_are_found():
    queue = Driver()
    queue.send("a", "b")
    queue.receive(2)
    assert len(ends(queue)) == 2
    queue.change(lock_duration_ms=LOCK_MS // 2)
    queue.pump()
    assert ends(queue) == {}
    queue.receive(2)
    assert ends(queue) == dict.fromkeys((1, 2), queue.now_ms + LOCK_MS // 2)


def test_all_of_a_locked_session_have_its_end_but_for_what_is_scheduled_or_lent():
    queue = SessionDriver()
    queue.put("a", "1", "2", "3")
    queue.put("a", "later", scheduled_ms=queue.now_ms + 60_000)
    queue.put("b", "5")
    queue.ask("r", "a")
    (accepted, _) = queue.turn()
    _, until_ms = accepted["r"]
    session = {1: until_ms, 2: until_ms, 3: until_ms}
    assert ends(queue) == session
    queue.settle(Outcome.DEFERRED, *queue.receive(1))
    assert ends(queue) == session
    items, found = queue.request("peek-session", "a", 0, 10, MUCH, True)
    assert (len(deliveries(items)), dict(found)) == (4, session)
    assert len(deliveries(queue.request("peek-session", "a", 0, 10, MUCH))) == 4
    queue.wait(1000)
    lent_ms, _ = queue.request("receive-session-deferred", None, "a", [1], False)
    assert lent_ms == until_ms + 1000
    assert ends(queue) == {**session, 1: lent_ms}
    queue.close()
    queue.turn()
    assert ends(queue) == {1: lent_ms}


STEPS = st.lists(
    st.tuples(st.sampled_from(["receive", "settle", "renew", "defer"]), st.integers(0, 40), st.integers(1, 6))
    | st.tuples(st.sampled_from(["later", "close", "peek", "change", "expire"]), st.just(0), st.integers(1, 3)),
    max_size=30,
)


@pytest.mark.parametrize("is_native", [True, False])
@given(STEPS)
def test_they_are_those_of_all_locks(is_native: bool, steps: Any):
    with pytest.MonkeyPatch.context() as patch:
        if not is_native:
            patch.setattr(locks, "extension", None)
        check_steps(steps)


def check_steps(steps: Any) -> None:
    queue = Driver()
    queue.send(*map(str, range(40)))
    duration_ms = LOCK_MS
    received: list[Any] = []
    for kind, at, count in steps:
        chosen = received[at % len(received) :][:count] if received else []
        if kind == "receive":
            received += queue.receive(count, f"r{at % 2}")
        elif kind == "settle":
            queue.settle(Outcome.RELEASED if at % 2 else Outcome.ACCEPTED, *chosen)
            received = [each for each in received if each not in chosen]
        elif kind == "defer":
            queue.settle(Outcome.DEFERRED, *chosen)
            received = [each for each in received if each not in chosen]
            deferred = [each.number for each in queue.peek() if each.place == 1][:1]
            if deferred and not locked(queue).keys() & set(deferred):
                received += deliveries(queue.request("receive-deferred", deferred, False)[1])
        elif kind == "renew":
            held = [each.token for each in chosen if each.number in locked(queue)]
            if held:
                queue.request("renew-locks", held)
        elif kind == "later":
            queue.wait(count)
        elif kind == "expire":
            queue.wait(LOCK_MS)
            received = []
        elif kind == "close":
            queue.close(f"r{count % 2}")
            queue.pump()
            received = [each for each in received if each.number in locked(queue)]
        elif kind == "change":
            duration_ms = LOCK_MS + LOCK_MS // 2 - duration_ms
            queue.change(lock_duration_ms=duration_ms)
            queue.pump()
            received = []
        else:
            assert ends(queue, count=1000 if count > 1 else 3) == {
                number: until_ms
                for number, until_ms in locked(queue).items()
                if count > 1 or number in [each.number for each in queue.peek(count=3)]
            }
    assert ends(queue) == locked(queue)


def locked(queue: Driver) -> dict[int, int]:
    """By a look at each lock."""
    held = queue.partition._core.queue(MAIN).locks.held.values()
    return {number_of(ref_of(each)): end_of(each) for each in held if end_of(each) > queue.now_ms}


def test_numbers_of_locks_that_are_gone_are_forgotten():
    queue = Driver()
    queue.send(*map(str, range(3 * INDEX_FORGOTTEN)))
    received = queue.receive(3 * INDEX_FORGOTTEN)
    assert len(ends(queue)) == 3 * INDEX_FORGOTTEN
    found = queue.partition._core.queue(MAIN).locks
    queue.settle(Outcome.ACCEPTED, *received[1:])
    queue.wait(LOCK_MS)
    assert not found._by_number
    assert ends(queue) == {}
