"""Messages of a transaction that are too many bytes for one commit: they are stored as they come."""

from typing import Any

import pytest

from broker import requests
from broker.errors import QuotaExceeded, TransactionRollback
from broker.partition.settings import PartitionSettings
from broker.wire import TRANSACTION_TIME_OUT_MS, SendOperation
from protocol.codec import encode
from storage.memory import MemoryStore
from storage.records import Field, Place, message_enqueued_ms, staged_key
from storage.store import Table
from tests.partition.accounts import problems
from tests.partition.driver import DEAD, MAIN, START_MS, Driver, message
from tests.partition.topic_driver import TOPIC, A, B, TopicDriver, event, rule, text

LARGE = b"x" * 1000
SETTINGS = PartitionSettings(commit_bytes=1500)


def send_in(driver: Driver, *messages: Any, queue: int = MAIN, key: str = "t") -> Any:
    [result] = driver.partition.transact(
        key, True, [SendOperation(queue, False, [[each] for each in messages])], driver.now_ms
    )
    driver.partition.commit()
    return result


def discharge(driver: Driver, commit: bool = True, key: str = "t") -> None:
    driver.partition.discharge(key, commit, driver.now_ms)
    driver.partition.commit()
    driver.partition.check()
    assert problems(driver.store) == []


def stored(driver: Driver) -> tuple[int, int]:
    """Records of messages, and of these staged ones."""
    staged = driver.store.scan(Table.META, staged_key(0), staged_key(1 << 60), 1000)
    return driver.store.record_count(Table.MESSAGES), len(staged)


def test_only_what_exceeds_a_commit_is_stored_as_it_comes():
    queue = Driver(settings=SETTINGS)
    send_in(queue, message(LARGE))
    assert stored(queue) == (0, 0)
    send_in(queue, message(LARGE), message(b"small"))
    assert stored(queue) == (1, 1)
    assert queue.held() == [0, 0, 0, 0]
    assert problems(queue.store) == []
    discharge(queue)
    assert stored(queue) == (3, 0)
    assert queue.bodies() == [LARGE.decode(), LARGE.decode(), "small"]


def test_messages_are_enqueued_and_begin_to_age_with_the_commit():
    queue = Driver(settings=PartitionSettings(commit_bytes=0))
    send_in(queue, message(LARGE, ttl_ms=1000), message(LARGE))
    queue.wait(5000)
    discharge(queue)
    first, second = queue.peek()
    assert first.overlay == {Field.ENQUEUED_MS: START_MS + 5000, Field.EXPIRES_MS: START_MS + 6000}
    assert second.overlay == {Field.ENQUEUED_MS: START_MS + 5000}
    queue.wait(1000)
    assert [delivery.number for delivery in queue.receive(10)] == [2]
    assert problems(queue.store) == []


@pytest.mark.parametrize("late_ms", [0, 100])
def test_scheduled_messages_wait_for_their_time(late_ms):
    queue = Driver(settings=PartitionSettings(commit_bytes=0))
    at_ms = START_MS + 50
    send_in(queue, message(LARGE, scheduled_ms=at_ms, ttl_ms=1000))
    numbers = queue.partition.request_in(
        "t", False, MAIN, requests.Schedule([message(LARGE, scheduled_ms=at_ms)]), START_MS
    )
    queue.partition.commit()
    assert numbers == [1]
    queue.now_ms += late_ms
    discharge(queue)
    if not late_ms:
        assert queue.held() == [0, 0, 2, 0]
        assert {message_enqueued_ms(delivery.record) for delivery in queue.peek()} == {at_ms}
        assert {delivery.place for delivery in queue.peek()} == {Place.SCHEDULED}
    queue.wait(100)
    assert queue.held() == [2, 0, 0, 0]
    assert problems(queue.store) == []


def test_one_that_is_cancelled_leaves_nothing():
    queue = Driver(settings=PartitionSettings(commit_bytes=0))
    later = [message(LARGE, scheduled_ms=START_MS + 50)]
    numbers = queue.partition.request_in("t", True, MAIN, requests.Schedule(later), START_MS)
    discharge(queue)
    queue.request("cancel-scheduled", numbers)
    assert stored(queue) == (0, 0)
    assert problems(queue.store) == []


@pytest.mark.parametrize("end", ["roll back", "time out", "restart"])
def test_what_is_not_committed_is_freed(end):
    queue = Driver(store=MemoryStore(), settings=PartitionSettings(commit_bytes=0, turn_work=10, step=3))
    for _ in range(10):
        send_in(queue, *[message(LARGE)] * 3)
    assert stored(queue) == (30, 30)
    if end == "roll back":
        discharge(queue, commit=False)
    elif end == "restart":
        queue.restart()
    queue.wait(TRANSACTION_TIME_OUT_MS)
    assert stored(queue) == (0, 0)
    assert queue.partition._core.transactions.message_bytes == 0
    queue.send("next")
    assert queue.bodies() == ["next"]


def test_a_repeated_message_is_freed_with_the_commit():
    queue = Driver(settings=PartitionSettings(commit_bytes=0), requires_duplicate_detection=True)
    send_in(queue, *[message(LARGE, message_id=encode("one"))] * 2)
    discharge(queue)
    queue.wait(0)
    assert stored(queue) == (1, 0)
    assert len(queue.peek()) == 1


def test_a_message_that_no_subscription_takes_is_freed_with_the_commit():
    topic = TopicDriver(A, settings=PartitionSettings(commit_bytes=0))
    topic.request("add-rule", rule("some", "p = 1"), queue=A)
    topic.request("remove-rule", "$Default", queue=A)
    send_in(topic, event("taken", p=1), event("not taken", p=2), queue=TOPIC)
    discharge(topic)
    topic.wait(0)
    assert [text(delivery.body) for delivery in topic.peek(A)] == ["taken"]
    assert stored(topic) == (1, 0)
    assert problems(topic.store) == []


def test_subscriptions_share_a_body_that_was_stored_before():
    topic = TopicDriver(A, B, settings=PartitionSettings(commit_bytes=0, turn_work=3))
    send_in(topic, *[event(str(number), ttl_ms=5000) for number in range(5)], queue=TOPIC)
    topic.wait(1000)
    discharge(topic)
    topic.wait(0)
    for queue in (A, B):
        assert [text(delivery.body) for delivery in topic.peek(queue)] == [*"01234"]
        assert {delivery.overlay[Field.EXPIRES_MS] for delivery in topic.peek(queue)} == {START_MS + 6000}
    assert stored(topic) == (5, 0)
    assert problems(topic.store) == []
    topic.wait(5000)
    assert stored(topic) == (0, 0)


def test_an_entity_deleted_meanwhile_leaves_nothing():
    queue = Driver(settings=PartitionSettings(commit_bytes=0))
    other = queue.add_queue(2)
    send_in(queue, message(LARGE), queue=other)
    queue.partition.delete_entity(2, queue.now_ms)
    with pytest.raises(TransactionRollback):
        queue.partition.discharge("t", True, queue.now_ms)
    queue.partition.commit()
    queue.wait(1)
    assert stored(queue) == (0, 0)


def test_what_is_refused_stores_nothing():
    queue = Driver(settings=PartitionSettings(commit_bytes=0, connection_transaction_bytes=1500))
    assert send_in(queue, message(LARGE), message(LARGE))[1][0] == QuotaExceeded.__name__
    assert stored(queue) == (1, 1)


def test_one_is_dead_lettered_received_and_deleted_as_any_other():
    queue = Driver(settings=PartitionSettings(commit_bytes=0), max_delivery_count=1)
    send_in(queue, message(LARGE))
    queue.wait(5)
    discharge(queue)
    queue.receive_one()
    queue.close(broken=True)
    assert queue.held(DEAD) == [1, 0, 0, 0]
    queue.open("d", DEAD, receive_and_delete=True)
    queue.grant(1, "d")
    [delivery] = queue.pump()["d"]
    assert delivery.body == LARGE
    assert delivery.overlay[Field.ENQUEUED_MS] == START_MS + 5
    assert stored(queue) == (0, 0)
