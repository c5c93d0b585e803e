"""What is in a queue, taken by a client."""

import asyncio

from protocol.client.connection import connect_to
from tests.patience import PATIENCE_S


def take_all(broker, queue, at_least=0):
    """All messages of the queue in their order, received and deleted; waits for `at_least` of them."""

    async def work():
        found = []
        async with await connect_to(broker.connection_string) as connection:
            receiver = await connection.receiver(queue, credit=0, receive_and_delete=True)
            while received := await receiver.fetch(1000, timeout_s=PATIENCE_S if len(found) < at_least else 0.1):
                found += [each.message() for each in received]
        return found

    return asyncio.run(work())


def peek_count(broker, queue):
    async def work():
        async with await connect_to(broker.connection_string) as connection:
            return (await (await connection.management(queue)).counts()).active

    return asyncio.run(work())
