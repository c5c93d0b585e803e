"""Moves messages to another entity, each in a transaction: it is completed here and sent there, or neither."""

import asyncio
from typing import Self

from protocol import conditions
from protocol.client.connection import Connection
from protocol.client.errors import ClientError, MessageRefused
from protocol.client.links import Received, Receiver, Sender
from protocol.client.messages import Message
from protocol.client.transactions import Coordinator


class Mover:
    """Made by `attach`. After the first message that is refused no other is moved."""

    def __init__(self, coordinator: Coordinator, sender: Sender, completes_first: bool) -> None:
        self._coordinator = coordinator
        self._sender = sender
        self._completes_first = completes_first
        self._in_turn = asyncio.Lock()  # so that messages keep their order
        self._failure: ClientError | None = None

    @classmethod
    async def attach(cls, connection: Connection, through: str, to: str) -> Self:
        """For messages of the entity `through`, or of its subscriptions and dead-letter queues; raises as `sender`."""
        sender = await connection.sender(to, through=through)
        coordinator = await connection.coordinator()
        return cls(coordinator, sender, await _is_partitioned(connection, coordinator, through))

    async def move(self, receiver: Receiver, received: Received, message: bytes) -> None:
        """Complete what was received, and send the message. Raises ClientError."""
        async with self._in_turn:
            if self._failure is not None:
                raise self._failure.again()
            try:
                await self._move(receiver, received, message)
            except ClientError as error:
                self._failure = error
                raise

    async def _move(self, receiver: Receiver, received: Received, message: bytes) -> None:
        """The first operation says where the transaction is. So for a partitioned entity it is the completion.

        Else the message is sent first: if it is refused, the other one can be given back. A completion that is rolled
        back leaves its lock until that ends.
        """
        transaction = await self._coordinator.declare()
        try:
            if self._completes_first:
                await receiver.accept(received, transaction)
            await self._sender.send(message, transaction)
            if not self._completes_first:
                await receiver.accept(received, transaction)
        except ClientError:
            await self._coordinator.roll_back(transaction)
            raise
        await self._coordinator.commit(transaction)


async def _is_partitioned(connection: Connection, coordinator: Coordinator, entity: str) -> bool:
    """True if in a transaction it takes only messages with keys. Nothing is sent: the transaction is rolled back.

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
