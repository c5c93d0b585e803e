"""A backlog queue as a syphon drains it, over the project's own client."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Self
from uuid import UUID

from broker.pairing.syphon.draining import Counts
from protocol.client.connection import Connection
from protocol.client.errors import RequestFailed
from protocol.client.links import Received, Receiver
from protocol.client.requests import Management

PEEK_MESSAGES: Final = 1000


class BacklogLink:
    """Implements `broker.pairing.syphon.draining.Backlog`. Everything raises what the client raises."""

    def __init__(self, path: str, receiver: Receiver, management: Management) -> None:
        self.path = path
        self._receiver = receiver
        self._management = management

    @classmethod
    async def open(cls, connection: Connection, path: str) -> Self:
        return cls(path, await connection.receiver(path, credit=0), await connection.management(path))

    async def close(self) -> None:
        await self._receiver.close()

    def watch(self, changed: Callable[[], None]) -> None:
        self._receiver.watch(changed)

    # -- receiving

    @property
    def credit(self) -> int:
        return max(0, self._receiver.link.credit)

    def grant(self, count: int) -> None:
        self._receiver.grant(count)

    def take_all(self) -> list[Received]:
        return self._receiver.take_all()

    async def withdraw(self) -> None:
        await self._receiver.drain()

    # -- settling

    def complete(self, received: Sequence[Received]) -> "asyncio.Future[list[Received]]":
        return self._receiver.accept_all(received)

    def release(self, received: Sequence[Received]) -> "asyncio.Future[list[Received]]":
        return self._receiver.release_all(received)

    def defer(self, received: Sequence[Received]) -> "asyncio.Future[list[Received]]":
        return self._receiver.defer_all(received)

    def dead_letter(self, received: Received, reason: str, text: str) -> "asyncio.Future[None]":
        return self._receiver.reject(received, reason, text)

    async def renew(self, received: Sequence[Received | UUID]) -> None:
        """Renew the locks of deliveries, and of deferred messages, which are given by their lock tokens."""
        await self._management.renew_locks([each if isinstance(each, UUID) else each.lock_token for each in received])

    # -- deferred messages

    async def peek(self, from_number: int) -> list[bytes]:
        return await self._management.peek(PEEK_MESSAGES, from_number, omit_body=True)

    async def lock(self, numbers: Sequence[int]) -> list[tuple[UUID, bytes]]:
        return await self._management.receive_deferred(numbers)

    async def complete_locked(self, locks: Sequence[UUID]) -> None:
        await self._management.complete(locks)

    async def put_back(self, locks: Sequence[UUID]) -> None:
        await self._management.abandon(locks)

    async def dead_letter_locked(self, lock: UUID, reason: str, text: str) -> None:
        await self._management.dead_letter([lock], reason, text)

    async def counts(self) -> Counts | None:
        """None if the service does not say, or not to us."""
        try:
            counts = await self._management.counts()
        except RequestFailed:
            return None
        return Counts(counts.active, counts.locked, counts.deferred)
