"""AccessedAt: what counts as an access of an entity, and what does not."""

import pytest

from broker import requests
from broker.partition.partition import Partition
from broker.wire import Outcome
from tests.partition.driver import DEAD, ENTITY, LOCK_MS, MAIN, START_MS, Driver, message
from tests.partition.forwarding_driver import Partitions
from tests.partition.idle_driver import USES, opened
from tests.partition.session_driver import SessionDriver
from tests.partition.topic_driver import TOPIC_ENTITY, A, B, TopicDriver
from tests.partition.topic_driver import rule as rule_document

NEVER = -START_MS
MINUTE_MS = 60_000
DAY_MS = 86_400_000
ACCESSES = {what: use for what, use in USES.items() if what != "a change of its properties"}


def accessed(partition: Partition, now_ms: int, entity_id: int = ENTITY) -> int:
    """Milliseconds after the start of the test."""
    opened_ms, found = partition.request(0, requests.Accessed([entity_id]), now_ms)
    assert opened_ms <= now_ms
    return int(found[entity_id]) - START_MS


def of(driver: Driver, entity_id: int = ENTITY) -> int:
    return accessed(driver.partition, driver.now_ms, entity_id)


def test_looks_and_changes_are_no_accesses():
    queue = Driver()
    queue.wait(MINUTE_MS)
    queue.change(max_delivery_count=7)
    queue.request("counts", queue=0)
    assert of(queue) == NEVER


@pytest.mark.parametrize("what", ACCESSES)
def test_a_use_is_an_access(what):
    queue = Driver(lock_duration_ms=300_000)
    opened(queue)
    assert of(queue) == 0
    queue.wait(MINUTE_MS)
    assert of(queue) == 0
    ACCESSES[what](queue)
    queue.wait(MINUTE_MS)
    assert of(queue) == MINUTE_MS


def test_work_of_the_broker_itself_is_no_access():
    queue = Driver(max_delivery_count=1, dead_lettering_on_message_expiration=True, lock_duration_ms=5000)
    queue.send("a", message("b", ttl_ms=100_000), message("c", scheduled_ms=START_MS + MINUTE_MS))
    queue.receive_one()
    queue.wait(DAY_MS)
    assert (queue.counts(DEAD)[0], queue.counts()[2]) == (1, 0), "it has worked"
    assert of(queue) == 0


def test_a_receiver_with_credit_accesses_it_until_the_credit_is_gone():
    queue = Driver()
    queue.open()
    queue.grant(1)
    queue.pump()
    queue.wait(DAY_MS)
    assert of(queue) == DAY_MS
    queue.partition.grant("r", 0)
    queue.pump()
    queue.wait(DAY_MS)
    assert of(queue) == DAY_MS


def test_a_browser_accesses_it_as_long_as_it_waits_for_more():
    queue = Driver(auto_delete_on_idle_ms=DAY_MS)
    queue.partition.await_more("b", MAIN, 1, queue.now_ms)
    queue.wait(2 * DAY_MS)
    assert of(queue) == 2 * DAY_MS
    queue.close("b")
    queue.wait(MINUTE_MS)
    assert of(queue) == 2 * DAY_MS


def test_a_receiver_of_a_session_accesses_it_until_its_lock_ends():
    queue = SessionDriver()
    queue.accept("r", "s")
    queue.grant(1)
    queue.turn()
    queue.wait(MINUTE_MS)
    queue.turn()
    assert ({*queue.closed}, of(queue)) == ({"r"}, LOCK_MS)


def test_a_delivery_of_a_session_is_an_access():
    queue = SessionDriver()
    queue.accept("r", "s")
    queue.grant(1)
    queue.wait(LOCK_MS - 1)
    queue.put("s", "a")
    queue.turn()
    queue.wait(DAY_MS)
    assert of(queue) == LOCK_MS - 1


def test_receivers_access_a_queue_until_it_is_disabled():
    queue = Driver()
    queue.open()
    queue.grant(1)
    queue.wait(MINUTE_MS)
    queue.change(status="Disabled")
    queue.wait(MINUTE_MS)
    assert of(queue) == MINUTE_MS


def test_a_topic_is_sent_to_and_a_subscription_received_from():
    topic = TopicDriver(A)
    topic.wait(MINUTE_MS)
    topic.publish("a")
    topic.request("add-rule", rule_document("more", "p = 1"), queue=A)
    topic.request("enumerate-rules", 0, 10, queue=A)
    assert (of(topic, TOPIC_ENTITY), of(topic, A >> 3)) == (MINUTE_MS, NEVER)
    topic.wait(MINUTE_MS)
    topic.settle(Outcome.ACCEPTED, topic.receive_one(queue=A), queue=A)
    assert (of(topic, TOPIC_ENTITY), of(topic, A >> 3)) == (MINUTE_MS, 2 * MINUTE_MS)


def test_a_new_subscription_is_an_access_of_its_topic():
    topic = TopicDriver(A)
    topic.wait(MINUTE_MS)
    topic.subscribe(B)
    topic.wait(MINUTE_MS)
    topic.subscribe(B, max_delivery_count=7)
    assert (of(topic, TOPIC_ENTITY), of(topic, A >> 3)) == (MINUTE_MS, NEVER)


@pytest.mark.parametrize("at", [0, 1])
def test_a_message_that_is_forwarded_to_a_queue_is_an_access(at):
    net = Partitions(2)
    target = net.queue("target", at)
    source = net.queue("source", 0, forward_to="target")
    net.wait(MINUTE_MS)
    net.send(source, "a")
    net.run()
    assert accessed(net.partitions[at], net.now_ms, target >> 3) == MINUTE_MS


def test_a_partition_knows_of_no_access_before_it_was_opened():
    queue = Driver()
    queue.send("a")
    queue.wait(MINUTE_MS)
    queue.restart()
    assert queue.partition.request(0, requests.Accessed([ENTITY]), queue.now_ms) == [queue.now_ms, {ENTITY: 0}]
    assert queue.partition.request(0, requests.Accessed([99]), queue.now_ms) == [queue.now_ms, {}]


def test_an_entity_that_is_moved_was_accessed_then_at_the_latest():
    net = Partitions(2)
    moved, _ = net.queue("moved", 0), net.queue("other", 1)
    net.wait(MINUTE_MS)
    net.begin_move("moved", 1)
    net.freeze("moved")
    net.finish_move("moved", 1)
    net.wait(MINUTE_MS)
    assert accessed(net.partitions[1], net.now_ms, moved >> 3) == MINUTE_MS
    assert net.partitions[0].request(0, requests.Accessed([moved >> 3]), net.now_ms) == [START_MS, {}]
    net.send(moved, "a")
    assert accessed(net.partitions[1], net.now_ms, moved >> 3) == 2 * MINUTE_MS


def test_a_deleted_entity_leaves_nothing():
    queue = Driver()
    queue.send("a")
    queue.partition.delete_entity(ENTITY, queue.now_ms)
    assert queue.partition.request(0, requests.Accessed([ENTITY]), queue.now_ms) == [START_MS, {}]
    assert MAIN not in queue.partition._core.queues
