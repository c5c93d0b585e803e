"""Two brokers, to be paired."""

import uuid

import pytest

from broker.administration.address import Address
from broker.atom.client_documents import change, write_entry
from broker.pairing.aliases import to_backlog
from broker.pairing.pairing import Namespace
from protocol.client.connection import connect_to
from protocol.client.messages import Message
from protocol.message.batches import pack_batch
from tests.brokers import Broker

QUEUES = """
[[queues]]
name = "orders"
requires_duplicate_detection = true
[[queues]]
name = "sessions"
requires_session = true
requires_duplicate_detection = true
[[queues]]
name = "small"
max_message_size_kb = 1
[[topics]]
name = "news"
requires_duplicate_detection = true
[[topics.subscriptions]]
name = "all"
"""


@pytest.fixture(scope="module")
def primary(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("primary"), QUEUES) as broker:
        yield broker


@pytest.fixture(scope="module")
def secondary(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("secondary")) as broker:
        yield broker


def namespace(broker: Broker, connection_string: str | None = None) -> Namespace:
    return Namespace(connection_string or broker.connection_string, http=Address("http", "localhost", broker.http_port))


async def set_status(broker: Broker, queue: str, status: str) -> None:
    async with namespace(broker).management() as client:
        description = (await client.get(queue)).description
        change("queue", description, {"Status": status})
        await client.put(queue, write_entry(description), is_update=True)


async def fill(secondary: Broker, queue: str, path: str, count: int) -> None:
    """Put messages for an entity of the primary into the queue, with ids that nobody has used."""
    one_of = uuid.uuid4()
    async with await connect_to(secondary.connection_string) as connection:
        sender = await connection.sender(queue)
        for start in range(0, count, 100):
            part = [
                to_backlog(Message.of(b"%d" % number, message_id=f"{one_of} {number}").encode(), path)
                for number in range(start, min(start + 100, count))
            ]
            await sender.send(pack_batch(part), is_batch=True)


async def taken(broker: Broker, queue: str) -> list[Message]:
    """Take all messages out of a queue."""
    found = []
    async with await connect_to(broker.connection_string) as connection:
        receiver = await connection.receiver(queue, credit=0, receive_and_delete=True)
        while part := await receiver.fetch(500):
            found += [received.message() for received in part]
    return found


async def contents(broker: Broker, queue: str) -> list[bytes]:
    """Take all messages out of a queue; their bodies."""
    return [message.content() for message in await taken(broker, queue)]
