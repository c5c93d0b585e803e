"""A client's transactions: its link to the peer's coordinator (AMQP 1.0, 4)."""

import asyncio

from protocol.client.errors import ClientError, MessageRefused
from protocol.client.link_end import LinkConnection, LinkEnd
from protocol.codec import Described, ULong, encode
from protocol.engine.deliveries import ACCEPTED, DECLARED, Delivery, forget, rejection, transactional_state
from protocol.symbols import Descriptor


class Coordinator(LinkEnd):
    """Begins and ends transactions. Open transactions are rolled back when the link ends."""

    def __init__(self, connection: LinkConnection) -> None:
        super().__init__(connection, "the coordinator")
        self._count = 0
        self._answers: dict[bytes, asyncio.Future[bytes]] = {}

    async def declare(self) -> bytes:
        """Begin a transaction and return its id. Raises MessageRefused, or the reason if the link ended."""
        return await self._ask(Descriptor.DECLARE, [None])

    async def commit(self, transaction: bytes) -> None:
        """Commit the transaction. Raises MessageRefused if it was rolled back, or the reason if the link ended."""
        await self._ask(Descriptor.DISCHARGE, [transaction, False])

    async def roll_back(self, transaction: bytes) -> None:
        await self._ask(Descriptor.DISCHARGE, [transaction, True])

    async def _ask(self, kind: Descriptor, fields: list[object]) -> bytes:
        self.check()
        self._count += 1
        tag = self._count.to_bytes(8, "big")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[tag] = answer
        body = encode(Described(ULong(Descriptor.AMQP_VALUE), Described(ULong(kind), fields)))
        self.link.send(tag, body, b"", 0, False)
        self.connection.flush_soon(len(body))
        try:
            return await answer
        finally:
            del answer  # its error has this call, which must not have it

    def on_outcome(self, delivery: Delivery, tag: bytes, state: int, settled: bool) -> None:
        answer = self._answers.pop(tag, None)
        if answer is not None and not answer.done():
            if state == DECLARED:
                answer.set_result(transactional_state(delivery)[0])
            elif state == ACCEPTED:
                answer.set_result(b"")
            else:
                condition, description, _ = rejection(delivery)
                answer.set_exception(MessageRefused(condition, description or "the peer rejected it"))
        forget(delivery)

    def wake(self, error: ClientError) -> None:
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(error.again())
