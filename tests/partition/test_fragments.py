"""A partition with a fragment of a partitioned entity: its sequence numbers say where its messages are."""

import pytest

from broker.wire import Outcome
from storage.records import Field
from tests.partition.driver import DEAD, ENTITY, MAIN, Driver, define, message

HERE = 5 << 48  # the driver's partition
FRAGMENTS = (2, 5)


def partitioned(**properties) -> Driver:
    queue = Driver(**properties)
    queue.partition.put_entity(1, queue.description, queue.now_ms, partitions=FRAGMENTS)
    queue.partition.commit()
    return queue


def test_a_fragment_gives_numbers_that_say_its_partition():
    queue = partitioned()
    queue.send("x", "y")
    assert [d.number for d in queue.peek()] == [HERE + 1, HERE + 2]
    delivery = queue.receive_one()
    queue.settle(Outcome.DEAD_LETTERED, delivery)
    assert [d.number for d in queue.peek(DEAD)] == [HERE + 1]
    assert queue.peek(DEAD)[0].overlay[Field.ENQUEUE_SEQUENCE_NUMBER] == HERE + 1


def test_the_numbers_of_a_fragment_go_on_after_a_restart():
    queue = partitioned()
    queue.send("x")
    queue.settle(Outcome.ACCEPTED, queue.receive_one())
    define(queue.store, ENTITY, queue.description, FRAGMENTS)
    queue.store.commit()
    queue.start()
    queue.send("y")
    assert [d.number for d in queue.peek()] == [HERE + 2]


@pytest.mark.parametrize("partitions", [(), (5,)])
def test_a_plain_entity_counts_from_one(partitions):
    queue = Driver()
    queue.partition.put_entity(1, queue.description, queue.now_ms, partitions=partitions)
    queue.send("x")
    assert [d.number for d in queue.peek(MAIN)] == [1]


def test_scheduled_deferred_and_cancelled_messages_are_found_by_their_numbers():
    queue = partitioned()
    [first, second] = queue.request("schedule", [message("x", scheduled_ms=queue.now_ms + 1000)] * 2)
    assert [first, second] == [HERE + 1, HERE + 2]
    queue.request("cancel-scheduled", [second])
    queue.wait(1000)
    delivery = queue.receive_one()
    queue.settle(Outcome.DEFERRED, delivery)
    [_, entries] = queue.request("receive-deferred", [delivery.number], True)
    assert entries[1] == delivery.number == HERE + 3
