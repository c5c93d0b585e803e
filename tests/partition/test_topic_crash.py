"""The process stops at each write and commit of a topic's operations: an operation is on disk whole, or not at all."""

from collections.abc import Callable, Iterator

import pytest

from broker.partition.partition import Partition
from broker.partition.settings import PartitionSettings
from broker.wire import Outcome
from protocol.codec import Long, encode
from protocol.symbols import DELAY
from storage.lmdb_store import LmdbStore
from storage.log.snapshot import Snapshot
from storage.records import entity_key
from storage.store import Table
from storage.verification import verify_snapshot
from tests.partition.driver import LOCK_MS, START_MS
from tests.partition.test_crash import Stopped, StoppingStore, contents, open_store
from tests.partition.topic_driver import TOPIC, TOPIC_ENTITY, A, B, C, TopicDriver, assert_shared_rightly, event, rule

SUBSCRIPTIONS = {TOPIC_ENTITY: {A >> 3, B >> 3, C >> 3}}

Scenario = Callable[[TopicDriver], Iterator[None]]


def publishing(topic: TopicDriver) -> Iterator[None]:
    topic.subscribe(C, rule("red", sql="color = 'red'"), rule("mark", action="SET a = 1"))
    yield
    topic.publish(event("a", color="red"), event("b", ttl_ms=50), event("c", scheduled_ms=START_MS + 50), "d")
    topic.publish("e")


def publishing_over_several_turns(topic: TopicDriver) -> Iterator[None]:
    """More copies than a turn makes; what is sent and what is due meanwhile waits behind them."""
    topic.subscribe(C, rule("red", sql="color = 'red'"), rule("mark", action="SET a = 1"))
    topic.restart(settings=PartitionSettings(step=2, turn_work=5))
    topic.publish(event("s", scheduled_ms=START_MS + 50, ttl_ms=9000))
    yield
    topic.now_ms += 60
    topic.publish(event("a", color="red"), event("b", ttl_ms=5000), "c", "d")
    topic.publish("e")
    topic.wait(0)


def publishing_to_a_waiting_receiver(topic: TopicDriver) -> Iterator[None]:
    for queue_id in (A, B):
        topic.open(queue_id, queue_id)
        topic.grant(2, queue_id)
    yield
    topic.partition.send(TOPIC, [event("a"), event("b")], topic.now_ms)
    received = topic.pump()
    topic.settle(Outcome.ACCEPTED, *received[A], queue=A)
    topic.settle(Outcome.ACCEPTED, *received[B], queue=B)


def failing_rules(topic: TopicDriver) -> Iterator[None]:
    topic.subscribe(C, rule("div", sql="1 / n > 0"))
    yield
    topic.publish(event("a", n=0), event("b", n=1))


def publishing_what_is_due(topic: TopicDriver) -> Iterator[None]:
    topic.subscribe(C, rule("red", sql="color = 'red'"))
    topic.publish(*[event(body, scheduled_ms=START_MS + 50, ttl_ms=9000, color=body) for body in ("red", "b", "c")])
    yield
    topic.wait(60)


def dropping_what_nobody_wants_when_it_is_due(topic: TopicDriver) -> Iterator[None]:
    topic.publish(event("a", scheduled_ms=START_MS + 50), event("b", scheduled_ms=START_MS + 50))
    for queue_id in (A, B):
        topic.request("remove-rule", "$Default", queue=queue_id)
    yield
    topic.wait(60)


def completing_copies(topic: TopicDriver) -> Iterator[None]:
    topic.subscribe(C)
    topic.publish("a", "b", event("c", ttl_ms=9000))
    received = {queue_id: topic.receive(3, queue_id, queue_id) for queue_id in (A, B, C)}
    yield
    topic.settle(Outcome.ACCEPTED, *received[A][:2], queue=A)
    topic.settle(Outcome.DEAD_LETTERED, *received[B], queue=B)
    topic.settle(Outcome.ACCEPTED, *received[C], queue=C)
    topic.settle(Outcome.ACCEPTED, *topic.receive(3, "dead", B | 1), queue=B | 1)


def receiving_and_deleting_and_restoring(topic: TopicDriver) -> Iterator[None]:
    topic.publish("a", event("b", ttl_ms=9000))
    topic.open("r", A, receive_and_delete=True)
    yield
    topic.partition.grant("r", 2)
    [(_, _, items)] = topic.partition.pump(topic.now_ms).deliveries
    topic.partition.commit()
    topic.partition.restore(A, items[:5], topic.now_ms)
    topic.partition.commit()


def expiring_copies(topic: TopicDriver) -> Iterator[None]:
    topic.subscribe(C, default_message_time_to_live_ms=1000)
    topic.publish(*[event(body, ttl_ms=5000) for body in "abc"])
    yield
    topic.wait(1000)
    topic.wait(4000)


def abandoning_copies_for_a_while(topic: TopicDriver) -> Iterator[None]:
    topic.publish("a", event("b", ttl_ms=9000))
    received = topic.receive(2, "r", A)
    yield
    topic.settle(Outcome.ABANDONED, *received, properties={DELAY: encode(Long(50))}, queue=A)
    topic.wait(50)


def adding_and_removing_rules(topic: TopicDriver) -> Iterator[None]:
    yield
    topic.request("add-rule", rule("red", sql="color = 'red'"), queue=A)
    topic.request("remove-rule", "$Default", queue=A)


def creating_a_subscription(topic: TopicDriver) -> Iterator[None]:
    topic.publish("a")
    yield
    topic.subscribe(C, rule("one"), rule("two", sql="a = 1"))


def deleting_a_subscription(topic: TopicDriver) -> Iterator[None]:
    topic.publish(*"abcde", event("f", ttl_ms=9000))
    topic.settle(Outcome.DEAD_LETTERED, topic.receive_one("a", A), queue=A)
    topic.settle(Outcome.ACCEPTED, *topic.receive(2, "b", B), queue=B)
    yield
    topic.unsubscribe(A)
    topic.wait(1)


def deleting_a_topic(topic: TopicDriver) -> Iterator[None]:
    topic.publish(*"abc", event("s", scheduled_ms=START_MS + 10**6))
    topic.settle(Outcome.DEAD_LETTERED, topic.receive_one("a", A), queue=A)
    yield
    topic.partition.delete_entity(TOPIC_ENTITY, topic.now_ms)
    for entity_id in (TOPIC_ENTITY, A >> 3, B >> 3):
        topic.store.delete(Table.ENTITIES, entity_key(entity_id))
    topic.partition.commit()
    topic.wait(1)


SCENARIOS = [
    publishing,
    publishing_over_several_turns,
    publishing_to_a_waiting_receiver,
    failing_rules,
    publishing_what_is_due,
    dropping_what_nobody_wants_when_it_is_due,
    completing_copies,
    receiving_and_deleting_and_restoring,
    expiring_copies,
    abandoning_copies_for_a_while,
    adding_and_removing_rules,
    creating_a_subscription,
    deleting_a_subscription,
    deleting_a_topic,
]


def run(scenario: Scenario, path, stop_at):
    """Run it on a new store until the step; returns the stopping store, and the state it began with."""
    disk = open_store(path, create=True)
    store = StoppingStore(disk)
    topic = TopicDriver(A, B, store=store, settings=PartitionSettings(step=2, abandon_delays=True))
    story = scenario(topic)
    next(story)
    assert not disk.dirty
    start = contents(disk)
    store.steps, store.states, store.steps_left = 0, [], stop_at
    try:
        next(story, None)
    except Stopped:
        pass
    else:
        assert stop_at is None
    disk.close()
    return store, start


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_stopped_anywhere_it_holds_what_was_confirmed(scenario, tmp_path):
    whole, start = run(scenario, tmp_path / "whole", None)
    assert whole.states
    for step in range(1, whole.steps + 1):
        path = tmp_path / str(step)
        stopped, begun_with = run(scenario, path, step)
        assert begun_with == start
        assert stopped.states == whole.states[: len(stopped.states)]
        with Snapshot(path) as snapshot:
            assert not verify_snapshot(snapshot).problems
        disk = open_store(path)
        assert contents(disk) == [start, *whole.states][len(stopped.states)]
        all_is_received_and_nothing_left(disk)


def all_is_received_and_nothing_left(disk: LmdbStore) -> None:
    """It is opened anew and used: what is being deleted goes, the rest is received."""
    partition = Partition(5, disk, now_ms=START_MS, incarnation=b"crash!", settings=PartitionSettings())
    end_ms = START_MS + 100 * LOCK_MS
    while (due_ms := partition.next_timer_ms()) is not None and due_ms <= end_ms:
        partition.advance(max(due_ms, START_MS))
        partition.commit()
    assert_shared_rightly(
        disk, {topic: of for topic, of in SUBSCRIPTIONS.items() if topic in partition._core.entities.terms}
    )
    left = [entity_id for entity_id in (A >> 3, B >> 3, C >> 3) if entity_id in partition._core.entities.terms]
    for queue_id in (entity_id << 3 | part for entity_id in left for part in (0, 1)):
        partition.open_receiver(queue_id, queue_id, True, end_ms)
        partition.grant(queue_id, 100)
    while partition.pump(end_ms).more:
        pass
    partition.commit()
    state = contents(disk)
    for table in (Table.MESSAGES, Table.QUEUE, Table.DUE, Table.REFS):
        assert state[table] == []
    assert {int.from_bytes(key[:4], "big") for key, _ in state[Table.RULES]} <= {*left}
    disk.close()
