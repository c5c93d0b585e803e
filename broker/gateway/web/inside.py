"""A connection of the gateway to itself: what HTTP requests do with messages, they do over ordinary AMQP links.

So they meet the same rules as clients: credit, partitions that are busy or moved, sessions, limits. Rights are those of
the request, which were checked before; the connection itself has all.
"""

import asyncio
import socket
import uuid
from typing import TYPE_CHECKING, Protocol, TypeVar

from broker.gateway.connection import ClientConnection, Home
from broker.gateway.pinning import Pinning
from broker.gateway.rights import Rights
from protocol.client.errors import ConnectionLost, LinkDetached
from protocol.client.links import Sender

if TYPE_CHECKING:
    from protocol.client.connection import Connection

ANSWER_SECONDS = 60.0
IDLE_TIME_OUT_MS = 240_000
MAX_SENDERS = 1000  # kept links


class _Closing(Protocol):
    @property
    def closed(self) -> bool: ...


_ClosingT = TypeVar("_ClosingT", bound=_Closing)


def _is_over(made: asyncio.Task[_ClosingT]) -> bool:
    """It could not be made, or was closed since."""
    return made.done() and (made.cancelled() or made.exception() is not None or made.result().closed)


class Inside:
    """The connection, made when it is needed, and a sender for each entity that was lately sent to."""

    def __init__(self, gateway: Home) -> None:
        self._gateway = gateway
        self._connection: asyncio.Task[Connection] | None = None
        self._senders: dict[str, asyncio.Task[Sender]] = {}

    async def connection(self) -> "Connection":
        """Return the connection, which is made if there is none. Raises ConnectionLost."""
        made = self._connection
        if made is None or _is_over(made):
            made = self._connection = asyncio.get_running_loop().create_task(self._connect())
        return await asyncio.shield(made)

    async def sender(self, entity: str) -> Sender:
        """A sender to this entity, which may be that of other requests. Raises ClientError, TimeoutError."""
        made = self._senders.get(entity)
        if made is None or _is_over(made):
            if len(self._senders) >= MAX_SENDERS:
                await self._forget(next(iter(self._senders)))
            made = self._senders[entity] = asyncio.get_running_loop().create_task(self._attach(entity))
        try:
            return await asyncio.shield(made)
        except (LinkDetached, ConnectionLost, TimeoutError):
            if self._senders.get(entity) is made:
                del self._senders[entity]
            raise

    async def _attach(self, entity: str) -> Sender:
        return await (await self.connection()).sender(entity)

    async def _forget(self, entity: str) -> None:
        made = self._senders.pop(entity)
        if made.done() and not made.cancelled() and made.exception() is None and not made.result().in_flight:
            await made.result().close()

    async def _connect(self) -> "Connection":
        # Most gateways never need these.
        from protocol.client.connection import Connection
        from protocol.client.connection_string import Anonymous

        here, there = socket.socketpair()
        loop = asyncio.get_running_loop()
        inner = ClientConnection(self._gateway)
        inner.rights = Rights(everything=True)
        inner.pinning = Pinning.NEVER  # requests of all kinds share its sessions
        client = Connection(Anonymous(), "gateway", f"http-{uuid.uuid4().hex}", ANSWER_SECONDS, IDLE_TIME_OUT_MS)
        await loop.connect_accepted_socket(lambda: inner, there)
        await loop.create_unix_connection(lambda: client, sock=here)
        await client.opened
        return client
