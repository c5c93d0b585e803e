"""Time to live, and scheduled messages."""

import pytest

from broker.errors import MessageNotFound
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome
from storage.records import Field, message_expires_ms
from storage.store import Table
from tests.partition.driver import DEAD, LOCK_MS, MAIN, START_MS, Driver, message

TTL_MS = 1000


def dead_lettering(**properties):
    return Driver(dead_lettering_on_message_expiration=True, **properties)


def test_an_expired_message_is_dropped(queue):
    queue.send(message("a", ttl_ms=TTL_MS), "b")
    queue.wait(TTL_MS - 1)
    assert queue.bodies() == ["a", "b"]
    queue.wait(1)
    assert queue.bodies() == ["b"]
    assert queue.counts() == [1, 0, 0, 41, 0]
    assert queue.store.last_key(Table.DUE) is None
    assert queue.partition.tallies()[MAIN]["expired"] == 1


def test_an_expired_message_is_not_delivered_even_if_no_timer_came_by(queue):
    queue.send(message("a", ttl_ms=TTL_MS), "b")
    queue.now_ms += TTL_MS
    assert [d.body for d in queue.receive(5)] == [b"b"]
    assert queue.held() == [1, 0, 0, 1]


def test_a_time_to_live_of_zero_is_over_at_once(queue):
    queue.open()
    queue.grant(5)
    queue.send(message("a", ttl_ms=0))
    assert queue.pump() == {}
    queue.wait(0)
    assert queue.bodies() == []


@pytest.mark.parametrize(
    ("of_message", "of_queue", "smaller"), [(None, 2000, 2000), (1000, 2000, 1000), (9000, 2000, 2000)]
)
def test_the_smaller_of_message_and_queue_counts(of_message, of_queue, smaller):
    queue = Driver(default_message_time_to_live_ms=of_queue)
    queue.send(message("a", ttl_ms=of_message))
    [peeked] = queue.peek()
    assert message_expires_ms(peeked.record) == START_MS + smaller
    queue.wait(smaller)
    assert queue.bodies() == []


def test_a_time_to_live_beyond_all_times_is_none(queue):
    queue.send(message("a", ttl_ms=2**63))
    queue.wait(10**12)
    assert queue.bodies() == ["a"]


def test_a_locked_message_does_not_expire(queue):
    queue.send(message("a", ttl_ms=TTL_MS))
    a = queue.receive_one()
    queue.wait(TTL_MS + 1)
    assert queue.bodies() == ["a"]
    assert queue.settle(Outcome.ACCEPTED, a) == [None]
    assert queue.store.last_key(Table.DUE) is None


@pytest.mark.parametrize("way", ["released", "abandoned", "lock end", "broken"])
def test_it_expires_as_soon_as_its_lock_is_gone(queue, way):
    queue.send(message("a", ttl_ms=TTL_MS))
    a = queue.receive_one()
    queue.wait(TTL_MS)
    if way == "lock end":
        queue.wait(LOCK_MS)
    elif way == "broken":
        queue.close(broken=True)
    else:
        queue.settle(Outcome[way.upper()], a)
    assert queue.bodies() == []
    assert queue.store.last_key(Table.DUE) is None


def test_expired_messages_are_dead_lettered_when_a_receiver_pulls():
    queue = dead_lettering()
    queue.send(message("a", ttl_ms=TTL_MS), "b")
    queue.wait(TTL_MS * 5)
    assert (queue.bodies(), queue.bodies(DEAD)) == (["a", "b"], [])
    assert [d.body for d in queue.receive(1)] == [b"b"]
    [dead] = queue.receive(5, "d", DEAD)
    assert dead.properties == {
        "DeadLetterReason": "TTLExpiredException",
        "DeadLetterErrorDescription": "The message expired and was dead lettered.",
    }
    assert (dead.delivery_count, dead.overlay[Field.ENQUEUE_SEQUENCE_NUMBER]) == (0, 1)


def test_a_receiver_without_credit_does_not_pull():
    queue = dead_lettering()
    queue.send(message("a", ttl_ms=TTL_MS))
    queue.open()
    queue.wait(TTL_MS)
    assert (queue.bodies(), queue.bodies(DEAD)) == (["a"], [])
    queue.grant(1)
    queue.wait(0)
    assert (queue.bodies(), queue.bodies(DEAD)) == ([], ["a"])


def test_grants_expire_messages_that_expired_long_ago_behind_others():
    queue = dead_lettering()
    queue.send(*"abc", message("d", ttl_ms=TTL_MS))
    queue.wait(TTL_MS)
    queue.open()
    queue.grant(1)
    queue.wait(0)
    assert queue.bodies(DEAD) == ["d"]


def test_expired_under_lock_with_nobody_pulling_it_waits_for_a_receiver():
    queue = dead_lettering()
    queue.send(message("a", ttl_ms=TTL_MS))
    a = queue.receive_one()
    queue.wait(TTL_MS)
    queue.settle(Outcome.RELEASED, a)
    assert queue.bodies() == ["a"]
    assert queue.receive(1) == []
    assert queue.bodies(DEAD) == ["a"]


def test_expired_under_lock_it_goes_when_dead_lettering_is_turned_off():
    queue = dead_lettering()
    queue.send(message("a", ttl_ms=TTL_MS), message("b", ttl_ms=TTL_MS))
    a, _ = queue.receive(2)
    queue.open("x")
    queue.grant(1, "x")
    queue.wait(TTL_MS)  # the timer comes by, and leaves what is locked
    queue.partition.grant("x", 0)
    queue.settle(Outcome.RELEASED, a)
    assert queue.bodies() == ["a", "b"]
    queue.change(dead_lettering_on_message_expiration=False)
    queue.wait(0)
    assert queue.bodies() == ["b"]


def test_time_to_live_ends_in_time_after_the_clock_was_set_back(queue):
    queue.send(message("a", ttl_ms=TTL_MS))
    queue.wait(TTL_MS)
    queue.now_ms = START_MS - 10 * TTL_MS
    queue.send(message("b", ttl_ms=TTL_MS))
    queue.wait(TTL_MS)
    assert queue.bodies() == []


def test_expired_in_the_window_it_is_gone_from_there_too(queue):
    queue.send(message("a", ttl_ms=TTL_MS), message("b", ttl_ms=TTL_MS), "c")
    queue.settle(Outcome.RELEASED, queue.receive_one())
    queue.wait(TTL_MS)
    assert [d.body for d in queue.receive(5)] == [b"c"]
    assert queue.partition.tallies()[MAIN]["quarantined"] == 0


def test_a_dead_lettered_message_does_not_expire():
    queue = dead_lettering()
    queue.send(message("a", ttl_ms=TTL_MS))
    queue.settle(Outcome.DEAD_LETTERED, queue.receive_one())
    queue.wait(TTL_MS * 10)
    queue.restart()
    assert queue.receive_one("d", DEAD).body == b"a"


def test_a_deferred_message_stays_until_it_is_asked_for_after_its_time(queue):
    queue.send(message("a", ttl_ms=TTL_MS))
    queue.settle(Outcome.DEFERRED, queue.receive_one())
    queue.wait(TTL_MS * 5)
    assert queue.held() == [0, 1, 0, 0]
    with pytest.raises(MessageNotFound):
        queue.request("receive-deferred", [1], False)
    assert queue.held() == [0, 0, 0, 0]


def test_a_deferred_message_asked_for_after_its_time_is_dead_lettered():
    queue = dead_lettering()
    queue.send(message("a", ttl_ms=TTL_MS))
    queue.settle(Outcome.DEFERRED, queue.receive_one())
    queue.wait(TTL_MS)
    with pytest.raises(MessageNotFound):
        queue.request("receive-deferred", [1], False)
    assert queue.bodies(DEAD) == ["a"]


def test_expiry_goes_on_after_a_restart(queue):
    queue.send(message("a", ttl_ms=TTL_MS), message("b", ttl_ms=TTL_MS * 3))
    queue.restart()
    assert queue.partition.next_timer_ms() == START_MS + TTL_MS
    queue.wait(TTL_MS)
    assert queue.bodies() == ["b"]
    assert queue.partition.next_timer_ms() == START_MS + TTL_MS * 3


def test_many_expire_in_bounded_steps():
    queue = Driver(settings=PartitionSettings(step=10))
    queue.send(*[message("m", ttl_ms=TTL_MS) for _ in range(35)])
    queue.now_ms += TTL_MS
    left = []
    while (due_ms := queue.partition.next_timer_ms()) is not None and due_ms <= queue.now_ms:
        queue.partition.advance(queue.now_ms)
        left.append(queue.held()[0])
    assert left[:4] == [25, 15, 5, 0]


def test_a_locked_message_does_not_stop_others_from_expiring():
    queue = Driver(settings=PartitionSettings(step=2))
    queue.send(*[message(body, ttl_ms=TTL_MS) for body in "abcdef"])
    queue.receive(3)
    queue.wait(TTL_MS)
    assert queue.bodies() == ["a", "b", "c"]
    assert queue.partition.next_timer_ms() == START_MS + LOCK_MS


def test_messages_that_expire_in_the_window_are_not_delivered_and_cost_no_credit(queue):
    queue.send(*[message(body, ttl_ms=TTL_MS if body in "bd" else None) for body in "abcde"])
    queue.receive_one()
    queue.wait(TTL_MS)
    assert [d.body for d in queue.receive(5)] == [b"c", b"e"]


# -- scheduled


def test_a_scheduled_message_is_not_delivered_before_its_time(queue):
    queue.open()
    queue.grant(1)
    queue.send(message("a", scheduled_ms=START_MS + 5000))
    queue.wait(4999)
    assert queue.pump() == {}
    assert queue.held() == [0, 0, 1, 0]
    queue.wait(1)
    [a] = queue.pump()["r"]
    assert (a.number, a.body) == (2, b"a")
    assert a.overlay == {Field.ENQUEUED_MS: START_MS + 5000, Field.ENQUEUE_SEQUENCE_NUMBER: 1}


def test_schedule_answers_with_the_numbers(queue):
    queue.send("x")
    later = START_MS + 1000
    assert queue.request("schedule", [message("a", scheduled_ms=later), message("b", scheduled_ms=later)]) == [2, 3]
    assert queue.bodies() == ["x", "a", "b"]


def test_a_time_in_the_past_is_now(queue):
    assert queue.request("schedule", [message("a", scheduled_ms=START_MS)]) == [1]
    assert queue.held() == [1, 0, 0, 0]
    assert queue.receive_one().overlay == {}


def test_scheduled_messages_come_in_the_order_of_their_times(queue):
    queue.send(*[message(str(n), scheduled_ms=START_MS + n) for n in (30, 10, 20)])
    queue.wait(100)
    assert [d.body for d in queue.receive(5)] == [b"10", b"20", b"30"]


def test_a_scheduled_message_lives_from_its_activation(queue):
    queue.send(message("a", scheduled_ms=START_MS + 5000, ttl_ms=TTL_MS))
    queue.wait(5000 + TTL_MS - 1)
    assert queue.bodies() == ["a"]
    assert queue.peek()[0].overlay[Field.EXPIRES_MS] == START_MS + 5000 + TTL_MS
    queue.wait(1)
    assert queue.bodies() == []


def test_a_message_activated_late_lives_as_long(queue):
    queue.send(message("a", scheduled_ms=START_MS + 5000, ttl_ms=TTL_MS))
    queue.now_ms += 60_000
    queue.restart()
    queue.wait(TTL_MS - 1)
    assert queue.receive_one().overlay[Field.EXPIRES_MS] == START_MS + 60_000 + TTL_MS


def test_a_cancelled_message_is_gone(queue):
    queue.send(message("a", scheduled_ms=START_MS + 5000), message("b", scheduled_ms=START_MS + 5000))
    assert queue.request("cancel-scheduled", [1]) is None
    assert queue.bodies() == ["b"]
    queue.wait(5000)
    assert queue.bodies() == ["b"]


def test_cancelling_is_for_all_or_none(queue):
    queue.send(message("a", scheduled_ms=START_MS + 5000), "b")
    for numbers in ([1, 2], [1, 99], [1, -1], [1, 2**64]):
        with pytest.raises(MessageNotFound):
            queue.request("cancel-scheduled", numbers)
    assert queue.held() == [1, 0, 1, 0]


def test_an_activated_message_cannot_be_cancelled(queue):
    queue.send(message("a", scheduled_ms=START_MS + 5000))
    queue.wait(5000)
    for number in (1, 2):
        with pytest.raises(MessageNotFound):
            queue.request("cancel-scheduled", [number])


def test_many_are_activated_in_bounded_steps():
    queue = Driver(settings=PartitionSettings(step=10))
    queue.send(*[message(str(n), scheduled_ms=START_MS + 100) for n in range(25)])
    queue.now_ms += 100
    queue.partition.advance(queue.now_ms)
    assert queue.held() == [10, 0, 15, 0]
    queue.wait(0)
    assert [d.body for d in queue.receive(30)] == [str(n).encode() for n in range(25)]


def test_the_first_number_is_told_of_what_was_scheduled_and_dead_lettered(queue):
    queue.send("x", message("a", scheduled_ms=START_MS + 100))
    queue.wait(100)
    _, a = queue.receive(2)
    queue.settle(Outcome.DEAD_LETTERED, a)
    assert queue.receive_one("d", DEAD).overlay[Field.ENQUEUE_SEQUENCE_NUMBER] == 2


def test_timers_do_not_pile_up_when_each_is_earlier_than_the_last(queue):
    for n in range(1000, 0, -1):
        queue.send(message("a", scheduled_ms=START_MS + n * 1000))
    assert len(queue.partition._core.timers.heap) < 200
    assert queue.partition.next_timer_ms() == START_MS + 1000
