"""Syphons between two real brokers, of which both may be killed: every message reaches the primary once, in order."""

import asyncio
from collections import defaultdict

import pytest

from broker.pairing.aliases import to_backlog
from broker.pairing.syphon.checks import Found, check
from broker.pairing.syphon.options import SyphonOptions
from broker.pairing.syphon.syphon import Syphon
from protocol.client.connection import connect_to
from protocol.client.messages import Message
from protocol.message.batches import pack_batch
from tests.brokers import Broker
from tests.pairing.conftest import QUEUES, namespace, set_status, taken
from tests.patience import PATIENCE_S, until

QUEUE_COUNT = 2
SESSIONS = 7
PART = 100  # messages in one transfer
# Made before, so that a syphon need not wait a minute for the locks of one that died.
BACKLOG = "".join(
    f"""
[[queues]]
name = "main/x-servicebus-transfer/{index}"
lock_duration_ms = 5000
max_delivery_count = 1000
"""
    for index in range(QUEUE_COUNT)
)


@pytest.fixture
def brokers(tmp_path):
    """The primary and the secondary, which are killed at the end whatever state they are in."""
    pair = Broker(tmp_path / "primary", QUEUES), Broker(tmp_path / "secondary", BACKLOG)
    try:
        for broker in pair:
            broker.start()
        yield pair
    finally:
        for broker in pair:
            broker.kill()


async def found_for(primary: Broker, secondary: Broker) -> Found:
    return await check(namespace(primary), namespace(secondary), "main", SyphonOptions(backlog_queue_count=QUEUE_COUNT))


def syphon(brokers: tuple[Broker, Broker], found: Found, **options) -> Syphon:
    primary, secondary = brokers
    chosen = SyphonOptions(backlog_queue_count=QUEUE_COUNT, **options)
    return Syphon(namespace(primary), namespace(secondary), found, chosen)


async def fill(secondary: Broker, queue: str, path: str, numbers: range, **values) -> None:
    """Put messages for an entity of the primary into the queue. Sessions are by the number."""
    async with await connect_to(secondary.connection_string) as connection:
        sender = await connection.sender(queue)
        for start in range(numbers.start, numbers.stop, PART):
            part = [
                to_backlog(
                    Message.of(
                        b"%d" % number, message_id=f"{queue}:{number}", group_id=f"s{number % SESSIONS}", **values
                    ).encode(),
                    path,
                )
                for number in range(start, min(start + PART, numbers.stop))
            ]
            await sender.send(pack_batch(part), is_batch=True)


def assert_all_once_and_in_order(messages: list[Message], numbers: range) -> None:
    assert sorted(int(each.content()) for each in messages) == list(numbers)
    of_session: dict[str, list[int]] = defaultdict(list)
    for each in messages:
        of_session[each.group_id].append(int(each.content()))
    assert len(of_session) == SESSIONS
    for seen in of_session.values():
        assert seen == sorted(seen)


async def counts(broker: Broker, queue: str):
    async with await connect_to(broker.connection_string) as connection:
        return await (await connection.management(queue)).counts()


async def until_moved(syphons: list[Syphon], count: int) -> None:
    await until(lambda: sum(each.counters.moved for each in syphons) >= count)


async def until_there(broker: Broker, queue: str, count: int) -> None:
    """Wait until the queue has so many messages that can be received."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if (await counts(broker, queue)).active == count:
                return
            await asyncio.sleep(0.1)


async def test_once_moves_all_and_keeps_apart_what_cannot_be_moved(brokers):
    primary, secondary = brokers
    found = await found_for(primary, secondary)
    first, second = found.queues
    await fill(secondary, first, "orders", range(1000), ttl_ms=3_600_000)
    await fill(secondary, second, "news", range(50))
    await fill(secondary, second, "gone", range(3))
    async with await connect_to(secondary.connection_string) as connection:
        sender = await connection.sender(second)
        await sender.send(Message.of(b"no destination").encode())
        wrong = {"x-ms-path": "orders", "x-ms-timetolive": "an hour"}
        await sender.send(Message.of(b"wrong", application_properties=wrong).encode())
    moving = syphon(brokers, found, once=True)
    await asyncio.wait_for(moving.run(), PATIENCE_S)

    moved = await taken(primary, "orders")
    assert_all_once_and_in_order(moved, range(1000))
    assert_all_once_and_in_order(await taken(primary, "news/Subscriptions/all"), range(50))
    assert {each.ttl_ms for each in moved} == {3_600_000}
    assert {name for each in moved for name in each.application_properties} == set()
    assert moving.counters.dead_lettered == {"SyphonDestinationNotFound": 3, "SyphonNotRestorable": 2}
    dead = await taken(secondary, f"{second}/$DeadLetterQueue")
    reasons = sorted(each.application_properties["DeadLetterReason"] for each in dead)
    assert reasons == sorted(moving.counters.dead_lettered.elements())
    assert [(await counts(secondary, queue)).active for queue in found.queues] == [0, 0]


async def test_a_killed_primary_costs_no_message_and_no_order(brokers):
    primary, secondary = brokers
    found = await found_for(primary, secondary)
    numbers = range(20_000)
    await fill(secondary, found.queues[0], "orders", numbers)
    moving = syphon(brokers, found, rate=8000.0)
    task = asyncio.create_task(moving.run())
    for part in (2000, 9000):
        await until_moved([moving], part)
        primary.kill()
        primary.start()
    for queue in found.queues:
        await until_there(secondary, queue, 0)
    moving.stop()
    await asyncio.wait_for(task, PATIENCE_S)
    assert moving.counters.losses >= 2
    assert_all_once_and_in_order(await taken(primary, "orders"), numbers)


async def test_a_killed_secondary_and_a_second_syphon_cost_no_message_and_no_order(brokers):
    primary, secondary = brokers
    found = await found_for(primary, secondary)
    numbers = range(20_000)
    await fill(secondary, found.queues[0], "orders", numbers)
    await fill(secondary, found.queues[1], "news", range(500))
    moving = [syphon(brokers, found, rate=4000.0) for _ in range(2)]
    tasks = [asyncio.create_task(each.run()) for each in moving]
    await until_moved(moving, 3000)
    secondary.kill()
    secondary.start()
    await until_moved(moving, 9000)
    # One of them dies in the middle, and the other one takes over what it had.
    busy, other = sorted(moving, key=lambda each: each.counters.moved, reverse=True)
    moved_before = other.counters.moved
    tasks[moving.index(busy)].cancel()
    for queue in found.queues:
        await until_there(secondary, queue, 0)
    assert other.counters.moved > moved_before + 1000
    for each, task in zip(moving, tasks, strict=True):
        each.stop()
        await asyncio.wait([task], timeout=PATIENCE_S)
        assert task.done()
    assert_all_once_and_in_order(await taken(primary, "orders"), numbers)
    assert_all_once_and_in_order(await taken(primary, "news/Subscriptions/all"), range(500))


async def test_what_a_disabled_entity_must_wait_for_is_set_aside_and_comes_in_order(brokers):
    primary, secondary = brokers
    found = await found_for(primary, secondary)
    numbers = range(600)
    await fill(secondary, found.queues[0], "orders", numbers)
    await fill(secondary, found.queues[0], "news", range(100))
    await set_status(primary, "orders", "SendDisabled")
    moving = syphon(brokers, found)
    task = asyncio.create_task(moving.run())
    await until_there(primary, "news/Subscriptions/all", 100)
    await until(lambda: moving.counters.deferrals >= len(numbers))
    moving.stop()
    await asyncio.wait_for(task, PATIENCE_S)
    assert (await counts(secondary, found.queues[0])).deferred == len(numbers)
    await set_status(primary, "orders", "Active")
    last = syphon(brokers, found, once=True)
    await asyncio.wait_for(last.run(), PATIENCE_S)
    assert_all_once_and_in_order(await taken(primary, "orders"), numbers)
    assert (await counts(secondary, found.queues[0])).deferred == 0
