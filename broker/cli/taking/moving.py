"""Moves messages to another entity, each in a transaction: it is completed here and sent there, or neither."""

import asyncio
from typing import Final, Self

from protocol import conditions
from protocol.client.connection import Connection
from protocol.client.errors import ClientError, MessageRefused
from protocol.client.links import Received, Receiver, Sender
from protocol.client.messages import Message
from protocol.client.transactions import Coordinator

MOST_BYTES: Final = 16 << 20  # of messages in open transactions at once; Peeklock's limit for a connection is 64 MiB


class Mover:
    """Made by `attach`. Messages keep their order. After a failure no other message is begun."""

    def __init__(self, coordinator: Coordinator, sender: Sender, is_partitioned: bool) -> None:
        self._coordinator = coordinator
        self._sender = sender
        self._is_partitioned = is_partitioned
        self._beginning = asyncio.Lock()
        self._open_bytes = 0  # of messages in open transactions
        self._ends = asyncio.Event()  # set when one of them ends
        self._before = asyncio.Event()  # the transaction that was begun last has ended, or its end is on its way
        self._before.set()
        self._failure: ClientError | None = None

    @classmethod
    async def attach(cls, connection: Connection, through: str, to: str) -> Self:
        """Make a mover for the entity `through`, its subscriptions and dead-letter queues. Raises as `sender`."""
        sender = await connection.sender(to, through=through)
        coordinator = await connection.coordinator()
        return cls(coordinator, sender, await _is_partitioned(connection, coordinator, through))

    async def move(self, receiver: Receiver, received: Received, message: bytes) -> None:
        """Complete what was received, and send the message. Raises ClientError."""
        try:
            if self._is_partitioned:
                await self._complete_and_send(receiver, received, message)
            else:
                await self._send_and_complete(receiver, received, message)
        except ClientError as error:
            self._failure = self._failure or error
            raise

    async def _send_and_complete(self, receiver: Receiver, received: Received, message: bytes) -> None:
        """Several transactions are open at once. They are committed in the order in which they were begun."""
        async with self._beginning:
            while self._open_bytes and self._open_bytes + len(message) > MOST_BYTES:
                self._ends.clear()
                await self._ends.wait()
            self._check()
            transaction = await self._coordinator.declare()
            sent = await self._sender.post(message, transaction)
            self._open_bytes += len(message)
            before, self._before = self._before, asyncio.Event()
            ended = self._before
        try:
            await sent
            await receiver.accept(received, transaction)
            await before.wait()
        except ClientError:
            await self._coordinator.roll_back(transaction)
            raise
        else:
            ended.set()  # for the next one, when this commit is on its way
            await self._coordinator.commit(transaction)
        finally:
            ended.set()
            self._open_bytes -= len(message)
            self._ends.set()

    async def _complete_and_send(self, receiver: Receiver, received: Received, message: bytes) -> None:
        """The first operation says on which partition the transaction is: the one that has the message.

        One after the other, because a completion that is rolled back leaves its lock until that ends.
        """
        async with self._beginning:
            self._check()
            transaction = await self._coordinator.declare()
            try:
                await receiver.accept(received, transaction)
                await self._sender.send(message, transaction)
            except ClientError:
                await self._coordinator.roll_back(transaction)
                raise
            await self._coordinator.commit(transaction)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.again()


async def _is_partitioned(connection: Connection, coordinator: Coordinator, entity: str) -> bool:
    """Return True if it takes only messages with keys in a transaction. Nothing is sent: that is rolled back.

    Those that require sessions say the same, and it does them no harm: their messages have keys.
    """
    sender = await connection.sender(entity)
    transaction = await coordinator.declare()
    try:
        await sender.send(Message.of(b"").encode(), transaction)
    except MessageRefused as error:
        return error.condition == conditions.NOT_ALLOWED
    else:
        return False
    finally:
        await coordinator.roll_back(transaction)
