"""Browsing, deferred messages by number, deleting, counts."""

import pytest

from broker import requests
from broker.errors import (
    EntityDisabled,
    EntityNotFound,
    InvalidArgument,
    MessageNotFound,
    NotImplementedByBroker,
    OutOfRange,
)
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome
from storage.queue_ids import Part
from storage.records import Place
from storage.store import Table
from tests.partition.driver import DEAD, ENTITY, LOCK_MS, MAIN, START_MS, Driver, deliveries, message

LATER_MS = START_MS + 3_600_000


@pytest.fixture
def full() -> Driver:
    """1 available, 2 locked, 3 deferred, 4 scheduled, 5 available; another dead-lettered."""
    queue = Driver()
    queue.send("x", "b", "c")
    x, _, c = queue.receive(3)
    queue.settle(Outcome.DEFERRED, c)
    queue.settle(Outcome.RELEASED, x)
    queue.send(message("d", scheduled_ms=LATER_MS), "e")
    return queue


def test_browsing_shows_every_place_in_the_order_of_numbers(full):
    assert [(d.number, d.token, d.body) for d in full.peek()] == [
        (1, Place.AVAILABLE, b"x"),
        (2, Place.AVAILABLE, b"b"),
        (3, Place.DEFERRED, b"c"),
        (4, Place.SCHEDULED, b"d"),
        (5, Place.AVAILABLE, b"e"),
    ]
    assert full.held() == [3, 1, 1, 1]


def test_browsing_begins_at_a_number_and_ends_with_the_count(full):
    assert [d.number for d in full.peek(start=2, count=2)] == [2, 3]
    assert full.peek(start=6) == []


def test_browsing_ends_before_the_bytes_are_exceeded_but_shows_one_at_least(queue):
    queue.send(*[message(bytes(1000)) for _ in range(5)])
    assert len(deliveries(queue.request("peek", 0, 9, 3200))) == 3
    assert len(deliveries(queue.request("peek", 0, 9, 10))) == 1


def test_browsing_shows_a_bounded_number():
    queue = Driver(settings=PartitionSettings(peek_max=3))
    queue.send(*"abcde")
    assert len(queue.peek(count=2**31)) == 3


@pytest.mark.parametrize(("start", "count"), [(0, 0), (0, -1), (-1, 1), (2**63, 1)])
def test_browsing_with_nonsense(queue, start, count):
    with pytest.raises(InvalidArgument):
        queue.peek(start=start, count=count)


def test_browsing_the_dead_letter_queue(queue):
    queue.send("a")
    queue.settle(Outcome.DEAD_LETTERED, queue.receive_one())
    assert [(d.number, d.body) for d in queue.peek(DEAD)] == [(1, b"a")]


def test_deferred_messages_come_in_the_order_asked_for(queue):
    queue.send(*"abc")
    queue.settle(Outcome.DEFERRED, *queue.receive(3))
    _, items = queue.request("receive-deferred", [3, 1, 3], False)
    assert [d.body for d in deliveries(items)] == [b"c", b"a"]
    assert queue.held() == [0, 3, 0, 2]


@pytest.mark.parametrize("numbers", [[1, 2], [2], [1, 99], [-5], [2**64]])
def test_deferred_messages_are_had_all_or_none(queue, numbers):
    queue.send("a", "b")
    queue.settle(Outcome.DEFERRED, queue.receive_one())
    with pytest.raises(MessageNotFound):
        queue.request("receive-deferred", numbers, False)
    assert queue.held() == [1, 1, 0, 0]


def test_a_locked_deferred_message_is_not_had_twice(queue):
    queue.send("a")
    queue.settle(Outcome.DEFERRED, queue.receive_one())
    queue.request("receive-deferred", [1], False)
    with pytest.raises(MessageNotFound):
        queue.request("receive-deferred", [1], False)
    queue.wait(LOCK_MS)
    queue.request("receive-deferred", [1], False)


def test_a_deferred_message_can_be_received_and_deleted(queue):
    queue.send("a")
    queue.settle(Outcome.DEFERRED, queue.receive_one())
    until_ms, items = queue.request("receive-deferred", [1], True)
    assert (until_ms, [d.body for d in deliveries(items)]) == (0, [b"a"])
    assert queue.counts() == [0, 0, 0, 0, 0]


def test_deferred_messages_in_one_answer_have_bounded_bytes():
    queue = Driver(settings=PartitionSettings(request_bytes=2500))
    queue.send(*[message(bytes(2000)) for _ in range(2)], message(bytes(3000)))
    queue.settle(Outcome.DEFERRED, *queue.receive(3))
    with pytest.raises(OutOfRange):
        queue.request("receive-deferred", [1, 2], False)
    assert queue.held() == [0, 3, 0, 0]
    queue.request("receive-deferred", [3], False)


def test_deferred_messages_of_a_queue_disabled_for_receiving(queue):
    queue.send("a")
    queue.settle(Outcome.DEFERRED, queue.receive_one())
    queue.change(status="ReceiveDisabled")
    with pytest.raises(EntityDisabled):
        queue.request("receive-deferred", [1], False)


def test_deleting_a_batch_takes_the_oldest_and_passes_over_the_locked(full):
    assert full.request("delete-batch", 1, LATER_MS) == 1
    assert full.bodies() == ["b", "c", "d", "e"]
    assert full.request("delete-batch", 10, LATER_MS) == 1
    assert full.bodies() == ["b", "c", "d"]
    assert full.request("delete-batch", 10, LATER_MS) == 0


def test_deleting_a_batch_is_for_what_was_enqueued_before(queue):
    queue.send("a")
    queue.wait(10)
    queue.send("b", message("c", scheduled_ms=queue.now_ms + 5, ttl_ms=10**9))
    queue.wait(5)
    assert queue.request("delete-batch", 10, START_MS + 10) == 1
    assert queue.request("delete-batch", 10, START_MS + 15) == 1
    assert queue.request("delete-batch", 10, START_MS + 16) == 1
    assert queue.store.last_key(Table.DUE) is None


def test_deleted_messages_are_not_delivered_from_the_window(queue):
    queue.send(*"abcd")
    queue.receive_one()
    queue.settle(Outcome.RELEASED, queue.receive_one())
    assert queue.request("delete-batch", 2, LATER_MS) == 2
    assert [d.body for d in queue.receive(5)] == [b"d"]


@pytest.mark.parametrize("count", [0, -1])
def test_deleting_no_messages_is_no_request(queue, count):
    with pytest.raises(InvalidArgument):
        queue.request("delete-batch", count, LATER_MS)


def test_a_purge_deletes_all_but_the_locked(full):
    assert full.request("purge") == 4
    assert full.bodies() == ["b"]
    assert full.counts() == [1, 0, 0, 41, 1]
    assert full.store.last_key(Table.DUE) is None
    assert full.request("purge") == 0


def test_a_purge_goes_in_steps():
    queue = Driver(settings=PartitionSettings(step=2))
    queue.send(*["m"] * 45)
    assert [queue.request("purge") for _ in range(4)] == [20, 20, 5, 0]


def test_a_dead_letter_queue_can_be_purged(queue):
    queue.send("a")
    queue.settle(Outcome.DEAD_LETTERED, queue.receive_one())
    assert queue.request("purge", queue=DEAD) == 1
    assert queue.counts(DEAD) == [0, 0, 0, 0, 0]


def test_counts_of_all_queues_and_of_some(full):
    full.partition.put_entity(ENTITY + 1, full.description, full.now_ms)
    expected = [3, 1, 1, 5 * 41, 1]
    assert full.request("counts")[MAIN] == expected
    assert full.request("counts", MAIN, DEAD, 99 << 3) == {MAIN: expected, DEAD: [0, 0, 0, 0, 0]}
    full.restart()
    assert full.request("counts") == {MAIN: [3, 1, 1, 5 * 41, 0]}


def test_the_probe_writes_and_reads(queue):
    assert queue.partition.request(0, requests.Probe(), queue.now_ms) is None
    assert queue.store.dirty
    assert queue.partition.commit()
    assert not queue.partition.commit()


def test_unknown_requests_and_queues(queue):
    with pytest.raises(NotImplementedByBroker):
        requests.parsed("dance", [])
    with pytest.raises(EntityNotFound):
        queue.request("peek", 0, 1, 100, queue=99 << 3)


def test_settling_by_request_takes_each_token_once_and_known_outcomes_only(queue):
    queue.send("a")
    a = queue.receive_one()
    with pytest.raises(InvalidArgument):
        queue.request("settle", [a.token, a.token], Outcome.ACCEPTED, None)
    with pytest.raises(InvalidArgument):
        queue.request("settle", [a.token], 9, None)
    assert queue.held() == [1, 0, 0, 1]


def test_gauges_are_those_that_are_shown(queue):
    queue.change(dead_lettering_on_message_expiration=True, max_delivery_count=1)
    queue.send(message("a", ttl_ms=10), "b", "c", "d")
    queue.wait(10)
    b, c, _ = queue.receive(3)
    queue.settle(Outcome.ABANDONED, b)
    queue.settle(Outcome.DEAD_LETTERED, c)
    queue.wait(LOCK_MS)
    queue.send("e")
    queue.receive_one()
    gauges = queue.partition.gauges()
    assert gauges.pop("used_bytes") > 0
    assert gauges.pop("capacity_bytes") > 0
    expected = {
        "locks": 1,
        "receivers": 1,
        "quarantined": 0,
        "expired": 1,
        "dead_lettered": 3,
        "locks_expired": 1,
        "rules_failed": 0,
        "forwarded": 0,
        "duplicates": 0,
        "transactions": 0,
        "committed": 0,
        "rolled_back": 0,
        "auto_deleted": 0,
        "parked": 0,
        "refuses_sends": 0,
    }
    assert gauges == expected
    queue.partition.delete_entity(ENTITY, queue.now_ms)
    after = queue.partition.gauges()
    assert {name: after[name] for name in expected} == expected | {"locks": 0, "receivers": 0}


def test_counts_of_queues_that_nobody_uses_open_none(queue):
    queue.send("a", "b", message("c", scheduled_ms=queue.now_ms + 1000))
    queue.request("delete-batch", 1, queue.now_ms + 1)
    expected = queue.counts()
    queue.restart()
    asked = [MAIN, DEAD, MAIN | Part.TRANSFER, 99 << 3]
    assert queue.request("counts", *asked) == {MAIN: expected, DEAD: [0] * 5, MAIN | Part.TRANSFER: [0] * 5}
    assert queue.request("counts") == {MAIN: expected}
    assert queue.partition.tallies() == {}
