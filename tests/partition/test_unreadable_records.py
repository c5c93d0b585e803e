"""A record that cannot be read is set aside, counted, and the rest is served."""

import pytest

from broker.errors import MessageNotFound
from broker.wire import Outcome
from storage.quarantine import quarantined
from storage.records import Place, entity_key, message_key, queue_key
from storage.store import Table
from tests.partition.driver import DEAD, MAIN, START_MS, Driver, deliveries, message


def damage(queue, table, key):
    value = bytearray(queue.store.get(table, key))
    value[-1] ^= 1
    queue.store.put(table, key, bytes(value))
    queue.store.commit()


def damage_body(queue, message_id):
    damage(queue, Table.MESSAGES, message_key(message_id))


def damage_entry(queue, number, place=Place.AVAILABLE, queue_id=MAIN):
    damage(queue, Table.QUEUE, queue_key(queue_id, place, number))


def set_aside(queue):
    return [table for table, _, _ in quarantined(queue.store)]


def test_a_corrupt_body_is_set_aside_with_its_entry(queue):
    queue.send(message("a", ttl_ms=1000), "b", "c")
    damage_body(queue, 1)
    damage_body(queue, 2)
    assert [d.body for d in queue.receive(5)] == [b"c"]
    assert set_aside(queue) == [Table.MESSAGES] * 2 + [Table.QUEUE] * 2
    assert queue.counts() == [1, 0, 0, 41, 1]
    assert queue.stored_counts().available == 1
    assert queue.partition.tallies()[MAIN]["quarantined"] == 2
    assert queue.partition.gauges()["quarantined"] == 4
    queue.wait(1000)
    assert queue.store.last_key(Table.DUE) is None


def test_a_missing_body_is_no_message(queue):
    queue.send("a", "b")
    queue.store.delete(Table.MESSAGES, message_key(1))
    assert [d.body for d in queue.receive(5)] == [b"b"]
    assert set_aside(queue) == [Table.QUEUE]


def test_a_corrupt_entry_is_set_aside(queue):
    queue.send("a", "b", "c")
    damage_entry(queue, 2)
    assert [d.body for d in queue.receive(5)] == [b"a", b"c"]
    assert set_aside(queue) == [Table.QUEUE]
    assert queue.held() == [2, 0, 0, 2]


def test_credit_is_not_spent_on_unreadable_messages(queue):
    queue.open()
    queue.send("a", "b")
    damage_body(queue, 1)
    queue.grant(1)
    assert [d.body for d in queue.pump()["r"]] == [b"b"]


def test_browsing_skips_unreadable_messages(queue):
    queue.send("a", "b", "c", "d", "e")
    queue.settle(Outcome.DEFERRED, queue.receive_one())
    queue.receive_one()
    for message_id in (1, 2, 3):
        damage_body(queue, message_id)
    damage_entry(queue, 4)
    assert queue.bodies() == ["e"]
    assert queue.held() == [2, 0, 0, 1]  # the locked one is its receiver's
    assert [d.body for d in queue.receive(5)] == [b"e"]


def test_a_locked_message_whose_body_was_damaged_can_be_settled(queue):
    queue.send("a")
    a = queue.receive_one()
    damage_body(queue, 1)
    assert queue.settle(Outcome.ACCEPTED, a) == [None]
    assert queue.counts() == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("damaged", ["body", "entry"])
def test_an_unreadable_deferred_message_is_not_found(queue, damaged):
    queue.send("a", "b")
    queue.settle(Outcome.DEFERRED, *queue.receive(2))
    damage_body(queue, 1) if damaged == "body" else damage_entry(queue, 1, Place.DEFERRED)
    with pytest.raises(MessageNotFound):
        queue.request("receive-deferred", [1, 2], False)
    assert queue.held() == [0, 1, 0, 0]
    _, items = queue.request("receive-deferred", [2], False)
    assert [d.body for d in deliveries(items)] == [b"b"]


@pytest.mark.parametrize("damaged", ["body", "entry"])
def test_an_unreadable_scheduled_message_cannot_be_cancelled_and_does_no_harm(queue, damaged):
    queue.send(*[message(body, scheduled_ms=START_MS + 100) for body in "ab"])
    damage_body(queue, 1) if damaged == "body" else damage_entry(queue, 1, Place.SCHEDULED)
    with pytest.raises(MessageNotFound):
        queue.request("cancel-scheduled", [1, 2])
    assert queue.held() == [0, 0, 1, 0]
    queue.wait(100)
    assert [d.body for d in queue.receive(5)] == [b"b"]


def test_a_corrupt_entry_is_not_activated(queue):
    queue.send(*[message(body, scheduled_ms=START_MS + 100) for body in "ab"])
    damage_entry(queue, 1, Place.SCHEDULED)
    queue.wait(100)
    assert queue.held() == [1, 0, 0, 0]
    assert set_aside(queue) == [Table.MESSAGES, Table.QUEUE]


@pytest.mark.parametrize("damaged", ["body", "entry", "no body"])
def test_an_unreadable_message_is_subtracted_from_the_counts_once(queue, damaged):
    queue.send(*[message(body, ttl_ms=100) for body in "ab"])
    if damaged == "body":
        damage_body(queue, 1)
    elif damaged == "entry":
        damage_entry(queue, 1)
    else:
        queue.store.delete(Table.MESSAGES, message_key(1))
    queue.wait(100)
    assert queue.held() == [0, 0, 0, 0]
    assert queue.store.last_key(Table.QUEUE) is None
    queue.wait(1000)
    assert queue.store.last_key(Table.DUE) is None


@pytest.mark.parametrize("request_", [("delete-batch", 10, START_MS + 1), ("purge",)])
def test_deleting_quarantines_unreadable_messages(queue, request_):
    queue.send("a", "b", "c")
    damage_body(queue, 1)
    damage_entry(queue, 2)
    assert queue.request(*request_) == 1
    assert queue.held() == [0, 0, 0, 0]
    assert queue.receive(5) == []


def test_corrupt_counts_are_counted_anew(queue):
    queue.send(*"abcd", message("s", scheduled_ms=START_MS + 10**6))
    a, b, _, _ = queue.receive(4)
    queue.settle(Outcome.DEFERRED, a)
    queue.settle(Outcome.DEAD_LETTERED, b)
    damage(queue, Table.COUNTS, entity_key(MAIN))
    damage(queue, Table.COUNTS, entity_key(DEAD))
    queue.restart()
    counts = queue.request("counts")
    assert counts == {MAIN: [2, 1, 1, 4 * 41, 0], DEAD: [1, 0, 0, 41, 0]}
    queue.send("e")
    received = queue.receive(9)
    assert [d.body for d in received] == [b"c", b"d", b"e"]
    assert received[-1].number > 5  # never a number given before
    assert set_aside(queue) == [Table.COUNTS] * 2


def test_a_deleted_queue_with_a_corrupt_entry_is_freed():
    queue = Driver()
    queue.send("a", "b")
    damage_entry(queue, 1)
    queue.partition.delete_entity(1, queue.now_ms)
    queue.wait(0)
    assert queue.store.last_key(Table.QUEUE) is None
    assert set_aside(queue) == [Table.QUEUE]
