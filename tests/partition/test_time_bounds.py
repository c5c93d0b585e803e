"""Times as extreme as clients can say them, and stores that hold times which no key should have."""

import struct
from typing import Any

import pytest

from broker import requests
from broker.namespace.entities import SubscriptionDescription, TopicDescription
from broker.partition.partition import Partition
from broker.partition.settings import PartitionSettings
from broker.wire import Extra, SendOperation
from protocol.codec import Described, Symbol, Timestamp, UInt, encode
from protocol.message.intake import take_apart
from storage.lmdb_store import LmdbStore
from storage.memory import MemoryStore
from storage.queue_ids import Part, queue_id_of
from storage.records import (
    NEVER,
    Counts,
    Field,
    Place,
    encode_counts,
    encode_entry,
    encode_message,
    entity_key,
    message_key,
    queue_key,
)
from storage.store import Store, Table
from tests.partition.driver import ENTITY, MAIN, START_MS, Driver, define, deliveries, describe
from tests.partition.topic_driver import TOPIC, TOPIC_ENTITY, A, TopicDriver

YEAR_1 = -62_135_596_800_000  # .NET's DateTime.MinValue
YEAR_9999 = 253_402_300_799_999  # .NET's DateTime.MaxValue
PAST = [-(1 << 63), YEAR_1, -1, 0]
FUTURE = [YEAR_9999, YEAR_9999 + 1, (1 << 63) - 1]
T = "transaction"


class BoundedStore(MemoryStore):
    """Fails after so many reads that only something endless can have made them."""

    reads = 0

    def scan(self, table: Table, start: bytes, end: bytes, limit: int, reverse: bool = False):
        self.reads += 1
        assert self.reads < 10_000, "it reads for ever"
        return super().scan(table, start, end, limit, reverse)


def scheduled(time_ms: int, ttl_ms: int | None = None) -> list:
    """An incoming message as the gateway makes it of what a client sent."""
    header = Described(0x70, [None, None, None if ttl_ms is None else UInt(ttl_ms)])
    annotations = Described(0x72, {Symbol("x-opt-scheduled-enqueue-time"): Timestamp(time_ms)})
    return list(take_apart(b"".join(map(encode, (header, annotations, Described(0x75, b"m"))))))


def driver(of: str) -> tuple[Driver, int, int]:
    """A driver; where is sent to, and where messages arrive."""
    store = BoundedStore()
    if of == "topic":
        return TopicDriver(A, store=store), TOPIC, A
    return Driver(store=store), MAIN, MAIN


def settle_down(driver: Driver) -> None:
    """Do what is due at this moment. Fails if that never ends."""
    for _ in range(100):
        due_ms = driver.partition.next_timer_ms()
        if due_ms is None or due_ms > driver.now_ms:
            return
        driver.partition.advance(driver.now_ms)
        driver.partition.commit()
    raise AssertionError("its timers are due for ever")


def ask(driver: Driver, way: str, queue: int, *messages: list) -> None:
    if way == "sent":
        driver.send(*messages, queue=queue)
        return
    if way == "scheduled":
        driver.request("schedule", list(messages), queue=queue)
        return
    if way == "sent in a transaction":
        driver.partition.transact(T, True, [SendOperation(queue, False, [list(messages)])], driver.now_ms)
    else:
        driver.partition.request_in(T, True, queue, requests.Schedule(list(messages)), driver.now_ms)
    driver.partition.discharge(T, True, driver.now_ms)
    driver.partition.commit()


WAYS = ["sent", "scheduled", "sent in a transaction", "scheduled in a transaction"]


@pytest.mark.parametrize("of", ["queue", "topic"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("time_ms", PAST)
def test_a_message_scheduled_for_the_past_is_available_at_once(of, way, time_ms):
    partition, to, at = driver(of)
    ask(partition, way, to, scheduled(time_ms), scheduled(time_ms, ttl_ms=5000))
    settle_down(partition)
    assert partition.held(at) == [2, 0, 0, 0]
    partition.wait(5000)
    assert partition.held(at) == [1, 0, 0, 0]
    partition.restart()
    assert partition.held(at) == [1, 0, 0, 0]


@pytest.mark.parametrize("of", ["queue", "topic"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("time_ms", FUTURE)
def test_a_message_scheduled_for_the_end_of_time_waits_and_can_be_cancelled(of, way, time_ms):
    partition, to, _ = driver(of)
    ask(partition, way, to, scheduled(time_ms), scheduled(time_ms, ttl_ms=5000))
    settle_down(partition)
    partition.restart()
    assert partition.held(to) == [0, 0, 2, 0]
    [first, second] = [delivery.number for delivery in partition.peek(MAIN)] if of == "queue" else [1, 2]
    partition.request("cancel-scheduled", [first, second], queue=to)
    assert partition.held(to) == [0, 0, 0, 0]
    assert partition.store.last_key(Table.DUE) is None


# --- a store that has such a key already ------------------------------------------------------------------------------


def plant(store: Store, queue_id: int, number: int, time_ms: int, ttl_ms: int | None, topic: bool) -> None:
    """A message scheduled in a transaction, as it was stored before times had bounds."""
    enqueued_ms = START_MS if topic else time_ms
    expires_ms = NEVER if ttl_ms is None else enqueued_ms + ttl_ms
    overlay: dict[int, Any] | None = {Field.EXPIRES_MS: expires_ms} if ttl_ms is not None and not topic else None
    layout, body, _, _ = scheduled(time_ms)
    store.append(Table.MESSAGES, [(message_key(number), encode_message(enqueued_ms, expires_ms, layout, body))])
    store.put(Table.QUEUE, queue_key(queue_id, Place.SCHEDULED, number), encode_entry(number, 0, overlay))
    store.put(Table.DUE, struct.pack(">IBqQ", queue_id, 0, time_ms, number), message_key(number))


@pytest.mark.parametrize("of", ["queue", "topic"])
def test_a_store_with_timers_before_1970_opens_and_their_messages_are_there(tmp_path, of, monkeypatch):
    path = tmp_path / "store"
    queue_id, at = (TOPIC, A) if of == "topic" else (MAIN, MAIN)
    with LmdbStore(path, partition_id=5, map_size_bytes=1 << 24, create=True) as store:
        define(store, ENTITY, describe())
        before = Partition(5, store, now_ms=START_MS, incarnation=bytes(6), settings=PartitionSettings())
        for entity_id, description in (
            (TOPIC_ENTITY, TopicDescription(name="News")),
            (A >> 3, SubscriptionDescription(topic="news", name="a")),
        ):
            before.put_entity(entity_id, description, START_MS)
            define(store, entity_id, description)
        layout, body, _, _ = scheduled(YEAR_1)
        size = len(encode_message(0, 0, layout, body))
        store.put(Table.COUNTS, entity_key(queue_id), encode_counts(Counts(4, 0, 0, 3, 3 * size)))
        plant(store, queue_id, 1, YEAR_1, None, of == "topic")
        plant(store, queue_id, 2, YEAR_1, 5000, of == "topic")
        plant(store, queue_id, 3, START_MS + 1000, None, of == "topic")
        store.commit()

    with LmdbStore(path, partition_id=5, map_size_bytes=1 << 24, create=False) as store:
        reads, scan = [], LmdbStore.scan

        def counted(*args, **named):
            reads.append(None)
            assert len(reads) < 10_000, "it reads for ever"
            return scan(*args, **named)

        monkeypatch.setattr(LmdbStore, "scan", counted)
        now_ms = START_MS
        partition = Partition(5, store, now_ms=now_ms, incarnation=bytes(6), settings=PartitionSettings())

        def held(queue: int) -> list[int]:
            counts = partition.request(0, requests.Counts([queue]), now_ms)[queue]
            return [counts[0], counts[2]]

        for now_ms, available in ((START_MS, 2), (START_MS + 1000, 3), (START_MS + 5000, 2)):
            for _ in range(10):
                partition.advance(now_ms)
                partition.commit()
            assert held(at)[0] == available
            assert held(queue_id)[1] == (1 if now_ms == START_MS else 0)
            due_ms = partition.next_timer_ms()
            assert due_ms is None or due_ms > now_ms
        found = deliveries(partition.request(at, requests.Peek(0, 10, 1 << 20), now_ms))
        assert [each.overlay[Field.ENQUEUE_SEQUENCE_NUMBER] for each in found] == [1, 3]


@pytest.mark.parametrize("key", [b"\0", bytes(20), bytes(22), b"\0\0\0\x08\x07" + bytes(16), b"\xff" * 21])
def test_a_timer_whose_key_cannot_be_read_is_set_aside_at_the_start(key):
    queue = Driver(store=BoundedStore())
    queue.send(scheduled(START_MS + 1000))
    queue.store.put(Table.DUE, key, message_key(1))
    queue.store.commit()
    queue.restart()
    queue.wait(1000)
    assert queue.held() == [1, 0, 0, 0]
    assert queue.store.last_key(Table.DUE) is None
    assert queue.partition.gauges()["quarantined"] == 1


@pytest.mark.parametrize("of", ["queue", "topic"])
def test_messages_that_a_transaction_schedules_for_the_past_come_in_the_order_of_their_times(of):
    partition, to, at = driver(of)
    times = [START_MS - 1, START_MS - 3, YEAR_1, START_MS - 2]
    ask(partition, WAYS[-1], to, *map(scheduled, times))
    settle_down(partition)
    assert [each.overlay[Field.ENQUEUE_SEQUENCE_NUMBER] for each in partition.peek(at)] == [3, 2, 4, 1]


@pytest.mark.parametrize("time_ms", [*PAST, *FUTURE])
@pytest.mark.parametrize("way", ["sent", "sent in a transaction"])
def test_a_message_sent_through_an_entity_moves_on_at_once_or_waits(way, time_ms):
    queue = Driver(store=BoundedStore())
    transfer = queue_id_of(ENTITY, Part.TRANSFER)
    messages = [scheduled(time_ms), scheduled(time_ms, ttl_ms=5000)]
    for each in messages:
        each[3] = {**each[3], Extra.DESTINATION: "orders"}
    ask(queue, way, transfer, *messages)
    settle_down(queue)
    queue.pump()
    waits = time_ms in FUTURE
    assert queue.held(transfer) == ([0, 0, 2, 0] if waits else [0, 0, 0, 0])
    queue.wait(5000)
    assert queue.held() == ([0, 0, 0, 0] if waits else [1, 0, 0, 0])
    queue.restart()
    assert queue.held(transfer)[2] == (2 if waits else 0)
