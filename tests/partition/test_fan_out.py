"""What many copies of a message take: of a turn, and of a store that is nearly full."""

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

import pytest

from broker.errors import QuotaExceeded
from broker.namespace.entities import SubscriptionDescription
from broker.partition.settings import PartitionSettings
from broker.wire import Extra
from protocol.codec import encode
from storage.lmdb_store import LmdbStore
from storage.records import entity_key
from storage.store import Table
from tests.partition.accounts import problems
from tests.partition.driver import MAIN, Driver, define, message
from tests.partition.topic_driver import TOPIC, TOPIC_ENTITY, A, B, TopicDriver, assert_shared_rightly, event

MIB = 1 << 20
FIRST = 100  # entity id of the first subscription
SUBSCRIPTIONS = 200
MESSAGES = 300  # to all of them: more than the store can hold beside what is in it
DAY_MS = 86_400_000


@pytest.fixture
def store(tmp_path) -> Iterator[LmdbStore]:
    with LmdbStore(tmp_path / "0", partition_id=5, map_size_bytes=16 * MIB, create=True) as store:
        yield store


def wide(store: LmdbStore, subscriptions: int = SUBSCRIPTIONS, **topic) -> TopicDriver:
    """A topic with many subscriptions, all of which take all."""
    driver = TopicDriver(store=store, **topic)
    for number in range(subscriptions):
        description = SubscriptionDescription(topic="news", name=f"s{number}", lock_duration_ms=30_000)
        driver.partition.put_entity(FIRST + number, description, driver.now_ms)
        define(store, FIRST + number, description)
    driver.partition.commit()
    driver.send(*[message(bytes(100_000), scheduled_ms=driver.now_ms + DAY_MS) for _ in range(80)])
    return driver


def texts(count: int) -> list[str]:
    return [f"message {number:04d}" for number in range(count)]


def drain(driver: Driver, subscriptions: int = SUBSCRIPTIONS) -> dict[int, list[bytes]]:
    """Make room, and receive and delete all of all subscriptions as timers go on: queue id -> bodies."""
    while driver.request("purge"):
        pass
    found: dict[int, list[bytes]] = {FIRST + number << 3: [] for number in range(subscriptions)}
    for queue_id in found:
        driver.open(queue_id, queue_id, receive_and_delete=True)
        driver.grant(1 << 20, queue_id)
    for _ in range(1000):
        received = driver.pump()
        for queue_id, got in received.items():
            found[queue_id] += [delivery.body[-12:] for delivery in got]
        waiting = sum(driver.held(TOPIC))
        if not received and not waiting:
            return found
        driver.wait(1000)
    raise AssertionError(f"{driver.held(TOPIC)} wait at the topic")


def until_refused(things: Iterable[Any], send: Callable[[Any], None]) -> int:
    """How many could be sent."""
    sent = 0
    try:
        for thing in things:
            send(thing)
            sent += 1
    except QuotaExceeded:
        pass
    return sent


def assert_each_got_all(found: dict[int, list[bytes]], bodies: list[str]) -> None:
    wanted = [body.encode() for body in bodies]
    for queue_id, got in found.items():
        assert got == wanted, queue_id


def test_scheduled_messages_that_do_not_fit_are_published_as_room_comes(store):
    driver = wide(store)
    for at in range(0, MESSAGES, 100):
        due_ms = driver.now_ms + 1000 + at
        bodies = texts(MESSAGES)[at : at + 100]
        driver.publish(*[event(body, ttl_ms=DAY_MS // 2, scheduled_ms=due_ms) for body in bodies])
    driver.wait(5000)
    driver.restart()
    driver.wait(5000)
    assert sum(driver.held(TOPIC)) > 0  # there was no room for all of them
    assert problems(store) == []
    with pytest.raises(QuotaExceeded):
        driver.publish("one more")
    assert_each_got_all(drain(driver), texts(MESSAGES))
    driver.publish("and one more")
    assert driver.counts(FIRST << 3)[0] == 1


def test_messages_sent_to_a_topic_are_refused_if_their_copies_do_not_fit(store):
    driver = wide(store)
    batches = [texts(MESSAGES)[at : at + 10] for at in range(0, MESSAGES, 10)]
    sent = until_refused(batches, lambda batch: driver.publish(*[event(body, ttl_ms=DAY_MS) for body in batch]))
    assert 0 < sent < len(batches)
    driver.restart()
    driver.wait(1000)
    assert_each_got_all(drain(driver), texts(sent * 10))
    driver.publish("one more")


def test_messages_forwarded_to_a_topic_wait_for_room(store):
    driver = wide(store)
    driver.send(*[message(event(body)[1], ttl_ms=DAY_MS) for body in texts(2 * MESSAGES)])
    driver.change(forward_to="news")
    driver.pump()
    driver.wait(1000)
    driver.restart()
    driver.pump()
    driver.wait(1000)
    assert 0 < sum(driver.held(MAIN)) + sum(driver.held(TOPIC)) < 2 * MESSAGES
    assert_each_got_all(drain(driver), texts(2 * MESSAGES))


def test_a_full_store_still_lets_everything_out(store):
    """By the loss of entities, expiry, dead-lettering and completion, whatever its turns touch at once."""
    driver = wide(store)
    driver.send(*["in a queue"] * 100)
    until_refused(count(), lambda _: driver.publish(*[event("m" * 12, ttl_ms=60_000)] * 10))
    until_refused(count(), lambda _: driver.send("x" * 50_000))
    until_refused(count(), lambda _: driver.send("x" * 1000))
    for delivery in driver.receive(50):
        driver.partition.settle(MAIN, [delivery.token], 3, {"DeadLetterReason": "full"}, driver.now_ms)
    driver.partition.commit()
    for number in range(SUBSCRIPTIONS // 2):
        driver.partition.delete_entity(FIRST + number, driver.now_ms)
        store.delete(Table.ENTITIES, entity_key(FIRST + number))
    driver.partition.commit()
    driver.wait(60_000)
    for number in range(SUBSCRIPTIONS // 2, SUBSCRIPTIONS):
        assert driver.counts(FIRST + number << 3) == [0, 0, 0, 0, 0]
    while driver.request("purge"):
        pass
    driver.publish("one more")
    driver.wait(2000)
    assert driver.counts(FIRST + SUBSCRIPTIONS - 1 << 3)[0] == 1


def test_what_waits_at_a_topic_is_published_in_order_whatever_comes_meanwhile():
    """Sent after it, due, forwarded, sent again, over a restart; each as of the time it was accepted."""
    detecting: dict[str, Any] = {"requires_duplicate_detection": True, "default_message_time_to_live_ms": 5000}
    driver = TopicDriver(A, B, settings=PartitionSettings(turn_work=4), **detecting)

    def named(text: str, **given: Any) -> list[Any]:
        made = event(text, **given)
        return [*made[:3], {**(made[3] or {}), Extra.MESSAGE_ID: encode(text)}]

    driver.publish(named("0", scheduled_ms=driver.now_ms + 10))
    driver.publish(*[named(text) for text in "abcdef"])
    assert (driver.held(TOPIC)[0], driver.texts(A)) == (5, ["a"])
    driver.now_ms += 10
    driver.publish(named("g"), named("d"))
    driver.send(event("h"))
    driver.change(forward_to="news")
    driver.pump()
    driver.restart()
    driver.publish(named("a"))
    assert problems(driver.store) == []
    driver.wait(0)
    assert driver.texts(A) == driver.texts(B) == [*"abcdefg", "h", "0"]
    assert driver.held(TOPIC) == [0, 0, 0, 0]
    assert_shared_rightly(driver.store, {TOPIC_ENTITY: {A >> 3, B >> 3}})
    driver.wait(4990)
    assert driver.texts(A) == ["g", "h", "0"]
    driver.wait(10)
    assert driver.counts(A) == driver.counts(TOPIC) == [0, 0, 0, 0, 0]
