"""A broker with every kind of entity and message, and what a client sees of it."""

import asyncio
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from broker.namespace.fragments import fragment_of
from protocol.client.browsing import browse
from protocol.client.connection import Connection, connect_to
from protocol.client.messages import Message
from protocol.codec import Symbol, Timestamp
from tests.brokers import Broker
from tests.patience import PATIENCE_S

PARTITIONS = 4
CONFIG = """
partitions = 4
[journal]
mode = "bodies"
[delivery]
abandon_delays = true
[[queues]]
name = "orders"
lock_duration_ms = 300000
[[queues]]
name = "ids"
requires_duplicate_detection = true
duplicate_detection_history_time_window_ms = 3600000
[[queues]]
name = "talks"
requires_session = true
lock_duration_ms = 300000
[[queues]]
name = "wide"
enable_partitioning = true
[[queues]]
name = "from"
forward_to = "to"
forward_dead_lettered_messages_to = "orders"
[[queues]]
name = "to"
[[topics]]
name = "news"
[[topics.subscriptions]]
name = "all"
[[topics.subscriptions]]
name = "red"
[[topics.subscriptions.rules]]
name = "only"
filter = {kind = "sql", expression = "color = @wanted", parameters = {"@wanted" = "red"}}
action = {expression = "SET sys.Label = 'is red'; SET extra = 1"}
"""
ENTITIES = ("orders", "ids", "talks", "wide", "from", "to", "news/subscriptions/all", "news/subscriptions/red")
PARTS = ("", "/$deadletterqueue", "/$Transfer/$DeadLetterQueue")
PLACES = [*(f"{entity}{part}" for entity in ENTITIES for part in PARTS)]
LATER_MS = 7 * 24 * 3600 * 1000


async def connected(broker: Broker) -> Connection:
    return await connect_to(broker.connection_string)


def made(name: str, size: int = 20, **values: Any) -> bytes:
    return Message.of(
        name.encode() * (1 + size // len(name)), message_id=name, application_properties={"n": name}, **values
    ).encode()


def later(name: str) -> Message:
    when = Timestamp(int(time.time() * 1000) + LATER_MS)
    return Message.of(name.encode(), message_id=name, annotations={Symbol("x-opt-scheduled-enqueue-time"): when})


def key_of_fragment(fragment: int) -> str:
    return next(key for key in map(str, range(10_000)) if fragment_of(key.encode(), range(PARTITIONS)) == fragment)


async def load(broker: Broker, count: int = 40) -> tuple[set[str], list[int]]:
    """Messages in all states in all entities.

    Returns the names of those that were accepted and did not end, and the numbers of those that wait at the topic until
    they are due.
    """
    accepted: set[str] = set()
    scheduled: list[int] = []
    async with await connected(broker) as client:

        async def send(entity: str, names: Iterable[str], **values: Any) -> None:
            async with await client.sender(entity) as sender:
                for number, name in enumerate(names):
                    await sender.send(made(name, 2000 if number % 7 == 0 else 20, **values))
                    accepted.add(name)

        for entity in ("orders", "ids", "from"):
            await send(entity, [f"{entity}-{number}" for number in range(count)])
        await send("ids", ["ids-1", "ids-2"])  # they are dropped
        await send("orders", ["short-lived"], ttl_ms=3_600_000)
        for session in "abc":
            await send("talks", [f"talks-{session}-{number}" for number in range(count // 4)], group_id=session)
        for fragment in range(PARTITIONS):
            key = key_of_fragment(fragment)
            annotations = {Symbol("x-opt-partition-key"): key}
            await send("wide", [f"wide-{fragment}-{number}" for number in range(count // 4)], annotations=annotations)
        for color in ("red", "blue"):
            async with await client.sender("news") as sender:
                for number in range(count // 4):
                    await sender.send(
                        Message.of(
                            f"news-{color}-{number}".encode(),
                            message_id=f"news-{color}-{number}",
                            application_properties={"color": color},
                        ).encode()
                    )
                    accepted.add(f"news-{color}-{number}")
        for entity in ("orders", "wide", "news"):
            management = await client.management(entity)
            names = [f"{entity}-later-{number}" for number in range(4)]
            numbers = await management.schedule([later(name) for name in names])
            await management.cancel_scheduled(numbers[:1])
            if entity == "news":
                scheduled = numbers[1:]  # nobody can peek at them
            else:
                accepted.update(names[1:])
        accepted -= await _settle(client, "orders", count)
        accepted -= await _settle(client, "news/subscriptions/red", count)
        receiver = await client.accept_session("talks", "b")
        first, second, third = await receiver.fetch(3, PATIENCE_S)
        await receiver.accept(first)
        await receiver.modify(second, undeliverable_here=True)
        await receiver.reject(third, "bad", "it was so")
        accepted.discard(_name(first.message()))
        management = await client.management("talks")
        await management.set_session_state("b", b"another state")
        await management.set_session_state("b", b"a state")
        await receiver.close()
        receiver = await client.accept_session("talks", "c")
        await management.set_session_state("c", b"will be cleared")
        await management.set_session_state("c", None)
        await receiver.close()
        # Sent by way of another entity, in a transaction: they are on their way, or have arrived.
        transactions = await client.coordinator()
        through = await client.sender("to", through="ids")
        transaction = await transactions.declare()
        for number in range(3):
            await through.send(made(f"via-{number}"), transaction)
        await transactions.commit(transaction)
        accepted.update(f"via-{number}" for number in range(3))
        # So large that their bodies are stored before the commit.
        transaction = await transactions.declare()
        async with await client.sender("orders") as sender:
            for number in range(3):
                await sender.send(made(f"large-{number}", 600_000), transaction)
        await transactions.commit(transaction)
        accepted.update(f"large-{number}" for number in range(3))
        held = await client.receiver("orders", credit=3)
        assert len(await held.fetch(3, PATIENCE_S)) == 3  # they are locked when it ends
    return accepted, scheduled


async def _settle(client: Connection, entity: str, count: int) -> set[str]:
    """Some of them in each way. Returns the names of those that have ended."""
    receiver = await client.receiver(entity, credit=count)
    received = await receiver.fetch(count // 5, PATIENCE_S)
    ended = set()
    for number, each in enumerate(received):
        match number % 5:
            case 0:
                await receiver.accept(each)
                ended.add(_name(each.message()))
            case 1:
                await receiver.modify(each, undeliverable_here=True, properties={"deferred": "yes"})
            case 2:
                await receiver.reject(each, "no good", "really", {"why": 7})
            case 3:
                await receiver.modify(each, properties={"again": number})
            case 4:
                await receiver.release(each)
    await receiver.close()
    return ended if "/" not in entity else set()  # its copies in other subscriptions stay


def _name(message: Message) -> str:
    return str(message.message_id)


async def mark(broker: Broker, name: str) -> None:
    """A message in each partition, behind all that has happened there."""
    async with await connected(broker) as client, await client.sender("wide") as sender:
        for fragment in range(PARTITIONS):
            annotations = {Symbol("x-opt-partition-key"): key_of_fragment(fragment)}
            await sender.send(Message.of(b"", message_id=f"{name}-{fragment}", annotations=annotations).encode())


Seen = dict[str, dict[int, Message]]


async def seen(broker: Broker) -> Seen:
    """All messages as a client peeks them, by place and number."""
    found: Seen = {}
    async with await connected(broker) as client:
        for place in PLACES:
            management = await client.management(place)
            found[place] = {each.sequence_number or 0: each async for each in browse(management)}
    return found


async def settled(broker: Broker) -> Seen:
    """What is seen when nothing is under way any more."""
    before = await seen(broker)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        await asyncio.sleep(0.1)  # what is under way changes something meanwhile
        now = await seen(broker)
        if now == before and not now["from"]:
            return now
        before = now
    raise AssertionError("it goes on")


def names_in(found: Seen) -> set[str]:
    return {_name(message) for messages in found.values() for message in messages.values()}


def now() -> datetime:
    return datetime.now(UTC)
