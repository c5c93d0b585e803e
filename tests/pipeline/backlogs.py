"""The backlog of a pairing on two real brokers: filled as paired senders do it, and looked for in the primary."""

import asyncio
from collections import defaultdict
from random import Random

from broker.administration.address import Address
from broker.pairing.aliases import to_backlog
from broker.pairing.backlog import backlog_queues
from broker.pairing.pairing import Namespace
from broker.pairing.provisioning import create_missing
from protocol.client.connection import connect_to
from protocol.client.messages import Message
from protocol.message.batches import pack_batch

NAME = "main"
QUEUES = backlog_queues(NAME, 2)
SESSIONS = 9
ENTITIES = """
[[queues]]
name = "orders"
requires_duplicate_detection = true
[[queues]]
name = "talks"
requires_session = true
requires_duplicate_detection = true
[[topics]]
name = "news"
requires_duplicate_detection = true
[[topics.subscriptions]]
name = "all"
"""


def in_broker(broker, work):
    async def connected():
        async with await connect_to(broker.connection_string) as connection:
            return await work(connection)

    return asyncio.run(connected())


def namespace(broker):
    return Namespace(broker.connection_string, http=Address("http", "localhost", broker.http_port))


def fill(secondary, count, run, entities=("orders", "talks", "news")):
    """As senders do it while the primary is away: each session through one of the backlog queues. Bodies are numbers.

    `run` is a part of the ids, which duplicate detection must not know.
    """
    chance = Random(count)
    parts = defaultdict(list)
    for number in range(count):
        entity = chance.choice(entities)
        session = chance.randrange(SESSIONS) if entity == "talks" else None
        group = None if session is None else f"s{session}"
        message = Message.of(b"%d" % number, message_id=f"{run}-{number}", group_id=group)
        queue = QUEUES[(session if session is not None else number) % len(QUEUES)]
        parts[queue].append(to_backlog(message.encode(), entity))

    async def send(connection):
        async with namespace(secondary).management() as client:
            await create_missing(client, NAME, len(QUEUES))
        for queue, messages in parts.items():
            sender = await connection.sender(queue)
            for start in range(0, len(messages), 200):
                await sender.send(pack_batch(messages[start : start + 200]), is_batch=True)

    in_broker(secondary, send)


def taken(primary):
    """The numbers of all messages in the primary, by entity and session, in their order; they are received."""
    found = defaultdict(list)

    async def take(connection):
        for path in ("orders", "news/subscriptions/all"):
            receiver = await connection.receiver(path, credit=0, receive_and_delete=True)
            while received := await receiver.fetch(1000, 0.2):
                found[path] += [int(each.message().content()) for each in received]
        while (session := await connection.accept_next_session("talks", 0.2)) is not None:
            async with session:
                while received := await session.fetch(1000, 0.2):
                    found[session.session_id] += [int(each.message().content()) for each in received]
                    await session.accept_all(received)

    in_broker(primary, take)
    return found


def check_all_are_there_once(primary, count):
    """Each message of `fill` once, those of a session in their order; all are received."""
    found = taken(primary)
    assert sorted(number for numbers in found.values() for number in numbers) == list(range(count))
    sessions = [f"s{n}" for n in range(SESSIONS)]
    assert set(found) == {"orders", "news/subscriptions/all", *sessions}
    for session in sessions:
        assert found[session] == sorted(found[session])


def left(secondary):
    """Messages and dead letters in the backlog."""

    async def work(connection):
        counts = [await (await connection.management(queue)).counts() for queue in QUEUES]
        return sum(each.active + each.dead_lettered for each in counts)

    return in_broker(secondary, work)


def arrived(primary):
    """Messages in the primary."""

    async def work(connection):
        return sum(each.active for each in (await connection.counts()).values())

    return in_broker(primary, work)
