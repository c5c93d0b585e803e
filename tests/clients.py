"""What a test does as a client of a real broker, over the project's own client."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from protocol.client.connection import Connection, connect_to
from protocol.client.messages import Message
from tests.brokers import Broker
from tests.patience import PATIENCE_S

SILENCE_SECONDS = 0.2


def run(broker: Broker, test: Callable[[Connection], Awaitable[Any]], connection_string: str | None = None) -> Any:
    """What the test returns; its connection ends with it."""

    async def connected() -> Any:
        async with await connect_to(connection_string or broker.connection_string) as connection:
            return await test(connection)

    return asyncio.run(connected())


async def send(connection: Connection, address: str, *messages: Message) -> None:
    async with await connection.sender(address) as sender:
        await sender.send_all(message.encode() for message in messages)


async def received(connection: Connection, address: str, count: int) -> list[Message]:
    """That many messages and no more, which are completed."""
    async with await connection.receiver(address) as receiver:
        found = []
        for _ in range(count):
            message = await receiver.receive(PATIENCE_S)
            assert message is not None, f"{len(found)} messages, not {count}, in {address}"
            await receiver.accept(message)
            found.append(message.message())
        assert await receiver.receive(SILENCE_SECONDS) is None
        return found
