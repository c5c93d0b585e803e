"""A client that connects again, as SDKs do."""

import asyncio
from typing import Self

from protocol.client.connection import Connection, connect_to
from protocol.client.errors import ClientError
from protocol.client.links import Sender
from tests.patience import PATIENCE_S


class Again:
    """Sends as an SDK does: over a new connection, or a new link, when one has ended, until the time is over."""

    def __init__(self, connection_string: str) -> None:
        self._connection_string = connection_string
        self._connection: Connection | None = None
        self._senders: dict[str, Sender] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def send(self, entity: str, message: bytes, timeout_s: float = PATIENCE_S) -> int:
        """Returns the number of attempts. Raises the last error."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        attempts = 0
        while True:
            attempts += 1
            try:
                async with asyncio.timeout_at(until):
                    await (await self._sender(entity)).send(message)
                return attempts
            except (ClientError, TimeoutError):
                if loop.time() > until:
                    raise
            await asyncio.sleep(0.05)

    async def _sender(self, entity: str) -> Sender:
        if self._connection is None or self._connection.closed:
            self._senders = {}
            self._connection = await connect_to(self._connection_string, timeout_s=3)
        sender = self._senders.get(entity)
        if sender is None or sender.closed:
            sender = self._senders[entity] = await self._connection.sender(entity)
        return sender
