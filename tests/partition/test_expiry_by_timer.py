"""Expired messages that are dead-lettered when their time comes, without a receiver; deferred ones, too."""

import pytest

from broker.errors import MessageNotFound
from broker.partition.settings import PartitionSettings
from broker.partition.state import deferrals as deferral_times
from broker.partition.state.deferrals import Deferrals
from broker.partition.state.timers import Due
from broker.wire import Outcome
from storage.queue_ids import Part
from storage.records import NEVER, Field
from storage.store import Table
from tests.partition.accounts import problems
from tests.partition.driver import DEAD, LOCK_MS, MAIN, Driver, deliveries, message
from tests.partition.forwarding_driver import Partitions, dead_letter
from tests.partition.session_driver import SessionDriver
from tests.partition.topic_driver import TOPIC_ENTITY, A, TopicDriver, assert_shared_rightly, event

TTL_MS = 1000
BY_TIMER = PartitionSettings(expiry_timer=True)
SMALL = PartitionSettings(expiry_timer=True, step=3, turn_work=20)


def dead_lettering(settings=BY_TIMER, **properties):
    return Driver(settings=settings, dead_lettering_on_message_expiration=True, **properties)


def by_number(queue, *numbers):
    _, items = queue.request("receive-deferred", numbers, False)
    return deliveries(items)


def deferred(queue, *messages):
    """Send these and defer them; their numbers."""
    queue.send(*messages)
    found = queue.receive(len(messages))
    for each in found:
        queue.settle(Outcome.DEFERRED, each)
    queue.close()
    return [each.number for each in found]


def test_with_the_setting_a_message_is_dead_lettered_when_its_time_comes():
    queue = dead_lettering()
    queue.send(message("a", ttl_ms=TTL_MS), "b")
    queue.wait(TTL_MS - 1)
    assert (queue.bodies(), queue.bodies(DEAD)) == (["a", "b"], [])
    queue.wait(1)
    assert (queue.bodies(), queue.bodies(DEAD)) == (["b"], ["a"])
    [dead] = queue.peek(DEAD)
    assert dead.properties["DeadLetterReason"] == "TTLExpiredException"
    assert (queue.counts()[:2], queue.counts(DEAD)[:2]) == ([1, 0], [1, 0])


@pytest.mark.parametrize("kind", ["queue", "subscription"])
@pytest.mark.parametrize("home", [0, 1])
def test_where_dead_letters_are_forwarded_it_is_so_by_default(kind, home):
    """The pattern of a retry queue: nobody receives there, and what has waited long enough goes back."""
    net = Partitions(2)
    work = net.queue("work", home)
    properties = {
        "default_message_time_to_live_ms": 3_600_000,
        "dead_lettering_on_message_expiration": True,
        "forward_dead_lettered_messages_to": "work",
    }
    if kind == "queue":
        sent = retry = net.queue("retry", 0, **properties)
    else:
        sent = net.topic("t", 0)
        retry = net.subscription("t", "retry", **properties)
    net.send(sent, event("a"))
    net.run()
    assert (net.counts(retry)[0], net.counts(work)[0]) == (1, 0)
    net.wait(3_600_000)
    net.run()
    assert (net.counts(retry)[0], net.counts(dead_letter(retry))[0], net.counts(work)[0]) == (0, 0, 1)
    [found] = net.peek(work)
    assert found.properties["DeadLetterReason"] == "TTLExpiredException"


def test_forwarding_of_dead_letters_that_begins_later_takes_what_has_expired():
    net = Partitions(1)
    work = net.queue("work", 0)
    retry = net.queue("retry", 0, dead_lettering_on_message_expiration=True)
    net.send(retry, message("a", ttl_ms=TTL_MS))
    net.wait(TTL_MS)
    assert net.counts(retry)[0] == 1
    net.queue("retry", 0, dead_lettering_on_message_expiration=True, forward_dead_lettered_messages_to="work")
    net.run()
    assert (net.counts(retry)[0], net.counts(work)[0]) == (0, 1)


def test_a_start_goes_on_with_it():
    queue = dead_lettering(PartitionSettings())
    queue.send(message("a", ttl_ms=TTL_MS))
    deferred(queue, message("d", ttl_ms=2 * TTL_MS))
    queue.wait(5 * TTL_MS)
    assert queue.counts()[:2] == [1, 1]
    queue.restart(BY_TIMER)
    queue.wait(0)
    assert (queue.counts()[:2], sorted(queue.bodies(DEAD))) == ([0, 0], ["a", "d"])


# ---- deferred messages


def test_a_deferred_message_is_dead_lettered_when_its_time_comes():
    queue = dead_lettering()
    [a, _, c] = deferred(queue, message("a", ttl_ms=TTL_MS), "b", message("c", ttl_ms=2 * TTL_MS))
    assert queue.store.last_key(Table.DUE) is None  # it has no timer in the store, as before
    queue.wait(TTL_MS - 1)
    assert (queue.counts()[:2], queue.counts(DEAD)[0]) == ([0, 3], 0)
    queue.wait(1)
    assert (queue.counts()[:2], queue.bodies(DEAD)) == ([0, 2], ["a"])
    [dead] = queue.peek(DEAD)
    assert dead.overlay[Field.ENQUEUE_SEQUENCE_NUMBER] == a
    queue.restart()
    queue.wait(TTL_MS)
    assert (queue.counts()[:2], queue.bodies(DEAD)) == ([0, 1], ["a", "c"])
    with pytest.raises(MessageNotFound):
        by_number(queue, c)


def test_by_default_it_waits_until_somebody_receives():
    queue = dead_lettering(PartitionSettings())
    deferred(queue, message("a", ttl_ms=TTL_MS))
    queue.wait(5 * TTL_MS)
    assert queue.counts()[:2] == [0, 1]
    queue.open()
    queue.grant(1)
    queue.wait(0)
    assert (queue.counts()[:2], queue.bodies(DEAD)) == ([0, 0], ["a"])


def test_a_deferred_message_that_expires_while_somebody_receives_moves_then():
    queue = dead_lettering(PartitionSettings())
    deferred(queue, message("a", ttl_ms=TTL_MS))
    queue.open()
    queue.grant(1)
    queue.wait(TTL_MS)
    assert (queue.counts()[:2], queue.bodies(DEAD)) == ([0, 0], ["a"])


def test_without_dead_lettering_it_stays():
    queue = Driver(settings=BY_TIMER)
    deferred(queue, message("a", ttl_ms=TTL_MS))
    queue.open()
    queue.grant(1)
    queue.wait(5 * TTL_MS)
    queue.restart()
    queue.wait(5 * TTL_MS)
    assert queue.counts()[:2] == [0, 1]
    queue.change(dead_lettering_on_message_expiration=True)
    queue.wait(0)
    assert (queue.counts()[:2], queue.bodies(DEAD)) == ([0, 0], ["a"])


def test_dead_lettering_that_is_turned_off_ends_it():
    queue = dead_lettering()
    deferred(queue, message("a", ttl_ms=TTL_MS))
    queue.change(dead_lettering_on_message_expiration=False)
    deferred(queue, message("b", ttl_ms=TTL_MS))
    queue.wait(5 * TTL_MS)
    assert queue.counts()[:2] == [0, 2]
    queue.change(dead_lettering_on_message_expiration=True)
    queue.wait(0)
    assert (queue.counts()[:2], queue.bodies(DEAD)) == ([0, 0], ["a", "b"])


@pytest.mark.parametrize("way", ["released", "abandoned", "deferred", "lock end", "accepted"])
def test_a_locked_deferred_message_moves_when_its_lock_ends(way):
    queue = dead_lettering()
    [number] = deferred(queue, message("a", ttl_ms=TTL_MS))
    [held] = by_number(queue, number)
    queue.wait(TTL_MS)
    assert (queue.counts()[:2], queue.bodies(DEAD)) == ([0, 1], [])
    if way == "lock end":
        queue.wait(LOCK_MS)
    else:
        queue.settle(Outcome[way.upper()], held)
    queue.wait(0)
    assert problems(queue.store) == []
    assert (queue.counts()[:2], queue.bodies(DEAD)) == ([0, 0], [] if way == "accepted" else ["a"])


def test_deferred_messages_of_a_subscription_move_too():
    topic = TopicDriver(settings=BY_TIMER)
    topic.subscribe(A, dead_lettering_on_message_expiration=True)
    topic.publish(event("m", ttl_ms=TTL_MS))
    topic.settle(Outcome.DEFERRED, topic.receive_one(queue=A), queue=A)
    topic.wait(TTL_MS)
    assert (topic.counts(A)[:2], topic.counts(A + Part.DEAD_LETTER)[0]) == ([0, 0], 1)
    assert_shared_rightly(topic.store, {TOPIC_ENTITY: {A >> 3}})


def test_many_deferred_messages_move_in_bounded_steps(monkeypatch):
    monkeypatch.setattr(deferral_times, "CAPACITY", 4)
    queue = dead_lettering(SMALL)
    for ttl_ms in (9, 3, 3, 3, 3, 3, 5, 5, 7, 1, 1, 20):
        deferred(queue, *[message(f"{ttl_ms}", ttl_ms=ttl_ms * 1000)] * 2)
    queue.wait(0)
    moved = []
    for _ in range(21):
        queue.wait(1000)
        for _ in range(60):
            queue.wait(0)
        moved.append(queue.counts(DEAD)[0])
    assert moved == [4, 4, 14, 14, 18, 18, 20, 20, 22] + [22] * 10 + [24, 24]
    assert queue.counts()[:2] == [0, 0]
    assert not queue.partition._core.timers.is_armed((MAIN, Due.EXPIRY))


def test_the_times_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr(deferral_times, "CAPACITY", 10)
    found = Deferrals()
    for number in range(1000):
        found.note(1000 - number, number)
    found.cursor = None
    assert found.next_ms() == 1
    taken = [time for time, _ in found.take_due(500, 1000)]
    assert taken == list(range(1, len(taken) + 1))
    assert 5 <= len(taken) <= 10
    assert found.cursor == 0  # and the others are looked for again
    assert found.next_ms() == 0


def test_all_known_and_nothing_expires():
    found = Deferrals()
    found.cursor = None
    assert (found.next_ms(), found.take_due(NEVER, 5), found.cursor) == (NEVER, [], None)


def test_deferred_messages_of_a_session_move_too():
    queue = SessionDriver(settings=BY_TIMER, dead_lettering_on_message_expiration=True)
    queue.put("s", "a", ttl_ms=TTL_MS)
    queue.accept()
    queue.grant(1)
    [found] = queue.pump()["r"]
    queue.settle_as("r", Outcome.DEFERRED, found)
    queue.wait(TTL_MS)
    assert (queue.counts()[:2], queue.bodies(DEAD)) == ([0, 0], ["a"])
    assert queue.listed() == []
    assert problems(queue.store) == []
