"""A varied load on a broker whose messages the jobs are to account for: some of everything that clients do.

Each *part* is a function that uses some entities of `CONFIG` once. `Traffic.run` does all of them side by side, each on
a connection of its own, and begins anew where the broker has gone away in the middle: so it can be killed meanwhile.
"""

import asyncio
import contextlib
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from broker.administration.address import parse_http_address
from broker.administration.client import HttpClient, HttpError, NotThere, Refused
from protocol.client.connection import Connection, connect_to
from protocol.client.connection_string import ConnectionString
from protocol.client.errors import ClientError, RequestFailed, SettlementRefused
from protocol.client.links import Receiver
from protocol.client.messages import Message
from protocol.codec import Symbol, Timestamp
from tests.brokers import Broker
from tests.patience import PATIENCE_S

CONFIG: Final = """
partitions = 4

[[queues]]
name = "orders"
max_delivery_count = 3
[[queues]]
name = "relay"
forward_to = "orders"
[[queues]]
name = "far-relay"
forward_to = "relay"
[[queues]]
name = "to-news"
forward_to = "news"
[[queues]]
name = "to-once"
forward_to = "once"
[[queues]]
name = "to-spread"
forward_to = "spread"
[[queues]]
name = "spread"
enable_partitioning = true
max_delivery_count = 3
[[queues]]
name = "carts"
requires_session = true
forward_dead_lettered_messages_to = "bin"
[[queues]]
name = "bin"
[[queues]]
name = "brief"
default_message_time_to_live_ms = 1000
dead_lettering_on_message_expiration = true
[[queues]]
name = "vapour"
default_message_time_to_live_ms = 1000
[[queues]]
name = "once"
requires_duplicate_detection = true
[[queues]]
name = "roaming"
[[topics]]
name = "news"
[[topics.subscriptions]]
name = "all"
[[topics.subscriptions]]
name = "large"
[[topics.subscriptions.rules]]
name = "large"
filter = { kind = "sql", expression = "amount > 50" }
[[topics.subscriptions]]
name = "copied"
forward_to = "archive"
[[queues]]
name = "archive"
enable_partitioning = true

[journal]
mode = "bodies"
"""
PASSING: Final = "passing"  # this queue is created, deleted, and created again
# Where messages wait, by entity and subqueue. In all other queues they are only for a moment.
WAITING: Final = (
    *((entity, "active") for entity in ("orders", "spread", "carts", "bin", "brief", "once", "roaming", "archive")),
    *((entity, "active") for entity in ("news/subscriptions/all", "news/subscriptions/large", PASSING)),
    *((entity, "deadletter") for entity in ("orders", "spread", "brief", "bin")),
)

REASONS: Final = ("NoSuchCustomer", "BadTotal", "CurrencyUnknown")
_DUE_MS: Final = 1000  # in which scheduled messages become due
_AWAY: Final = (ClientError, TimeoutError, OSError, HttpError)
_QUEUE: Final = (
    b'<entry xmlns="http://www.w3.org/2005/Atom"><content type="application/xml">'
    b'<QueueDescription xmlns="http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"/></content></entry>'
)


class Traffic:
    """`size`: about so many messages in each part of a round."""

    def __init__(self, broker: Broker, seed: int, size: int) -> None:
        self._target = ConnectionString.parse(broker.connection_string)
        self._http = parse_http_address(f"http://localhost:{broker.http_port}")
        self._seed = seed
        self.size = size
        self.sent = 0  # accepted and stored, as far as we heard
        self.interrupted = 0  # parts that the broker's end has cut off
        self.done = 0  # parts
        self._runs = 0
        self._step = asyncio.Event()

    async def run(self, rounds: int) -> None:
        """Each part so many times."""
        self._runs += 1
        chances = [random.Random(f"{self._seed} {self._runs} {part.__name__}") for part in self.parts()]
        await asyncio.gather(*map(self._repeat, self.parts(), chances, [rounds] * len(chances)))

    def parts(self) -> "Sequence[Part]":
        return (
            self.take_orders, self.relay, self.publish, self.fill_carts, self.schedule, self.let_expire,
            self.repeat_ids, self.spread, self.transact, self.read_dead_letters, self.roam, self.renew,
        )  # fmt: skip

    async def connect(self) -> Connection:
        return await connect_to(self._target, timeout_s=10.0)

    async def _repeat(self, part: "Part", chance: random.Random, rounds: int) -> None:
        for _ in range(rounds):
            async with await self._connect_again() as connection:
                try:
                    await part(connection, chance)
                except _AWAY:
                    self.interrupted += 1
            self.done += 1
            self._step.set()

    async def until(self, done: int) -> None:
        """Wait until so many parts are done."""
        while self.done < done:
            self._step.clear()
            await self._step.wait()

    async def _connect_again(self) -> Connection:
        """Connect as soon as the broker is there. Raises what it says after so long."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await self.connect()
            except _AWAY:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.2)

    # -- parts

    async def take_orders(self, connection: Connection, chance: random.Random) -> None:
        """A queue whose messages are completed, abandoned, dead-lettered, deferred and released."""
        await self._send(connection, "orders", [_order(chance) for _ in range(self.size)])
        receiver = await connection.receiver("orders", credit=0)
        deferred = []
        answers: list[Awaitable[None]] = []
        for received in await receiver.fetch(self.size, 1.0):
            kind = chance.random()
            if kind < 0.75:
                answers.append(receiver.accept(received))
            elif kind < 0.82:
                answers.append(receiver.modify(received))
            elif kind < 0.90:
                reason = chance.choice(REASONS)
                answers.append(receiver.reject(received, reason, f"{reason}: seen by the load"))
            elif kind < 0.96:
                deferred.append(received.message().sequence_number or 0)
                answers.append(receiver.modify(received, undeliverable_here=True))
            else:
                answers.append(receiver.release(received))
        await _settled(answers)
        management = await connection.management("orders")
        for number in deferred[::2]:
            with contextlib.suppress(RequestFailed):
                await management.complete(await management.lock_deferred([number]))

    async def relay(self, connection: Connection, chance: random.Random) -> None:
        """Queues that forward: to a queue, over two of them, to a topic, to a partitioned queue."""
        for entity in ("relay", "far-relay", "to-news", "to-spread"):
            await self._send(connection, entity, [_order(chance) for _ in range(self.size // 4)])

    async def publish(self, connection: Connection, chance: random.Random) -> None:
        await self._send(connection, "news", [_order(chance) for _ in range(self.size // 2)])
        for name in ("all", "large"):
            receiver = await connection.receiver(f"news/subscriptions/{name}", credit=0)
            await self._accept(receiver, self.size // 2, chance, 0.9)

    async def fill_carts(self, connection: Connection, chance: random.Random) -> None:
        """Sessions; what is dead-lettered of them is forwarded to another queue."""
        messages = [_order(chance, group_id=f"cart-{chance.randrange(5)}") for _ in range(self.size // 2)]
        await self._send(connection, "carts", messages)
        for _ in range(2):
            receiver = await connection.accept_next_session("carts", 0.5)
            if receiver is None:
                return
            answers = []
            for received in await receiver.fetch(self.size // 4, 0.5):
                is_bad = chance.random() < 0.2
                answers.append(receiver.reject(received, "CartLost") if is_bad else receiver.accept(received))
            await _settled(answers)
            await receiver.close()

    async def schedule(self, connection: Connection, chance: random.Random) -> None:
        """Messages that become due, at a queue and at a topic; some are cancelled."""
        for entity in ("orders", "news"):
            management = await connection.management(entity)
            due = datetime.now(UTC) + timedelta(milliseconds=chance.randrange(100, _DUE_MS))
            messages = [_order(chance, due=due) for _ in range(self.size // 4)]
            numbers = await management.schedule(messages)
            self.sent += len(numbers)
            if entity == "orders":  # if the broker goes away in between, it stays, and a topic cannot be browsed
                later = await management.schedule([_order(chance, due=due + timedelta(hours=1))])
                self.sent += len(later)
                await management.cancel_scheduled(later)

    async def let_expire(self, connection: Connection, chance: random.Random) -> None:
        """Expired messages are dropped, or dead-lettered when the next receiver comes."""
        await (await connection.receiver("brief", credit=0)).fetch(1, 0.1)
        for entity in ("brief", "vapour"):
            await self._send(connection, entity, [_order(chance) for _ in range(self.size // 4)])

    async def repeat_ids(self, connection: Connection, chance: random.Random) -> None:
        """Messages that come twice, sent or forwarded to a queue that detects it."""
        messages = [_order(chance) for _ in range(self.size // 4)]
        await self._send(connection, "once", messages)
        # Nothing is written of a duplicate, so that a kill may take what the journal was to say of it.
        sender = await connection.sender("once")
        await sender.send_all(each.encode() for each in messages[::2])
        await self._send(connection, "to-once", [*messages[1::2], *(_order(chance) for _ in messages)])
        await self._accept(await connection.receiver("once", credit=0), self.size // 4, chance, 0.7)

    async def spread(self, connection: Connection, chance: random.Random) -> None:
        """A partitioned queue."""
        keyed = [_order(chance, partition_key=f"key-{chance.randrange(8)}") for _ in range(self.size // 2)]
        await self._send(connection, "spread", [*keyed, *(_order(chance) for _ in range(self.size // 4))])
        await self._accept(await connection.receiver("spread", credit=0), self.size // 2, chance, 0.8)
        receiver = await connection.receiver("spread", credit=0, receive_and_delete=True)
        await receiver.fetch(self.size // 8, 0.5)
        await self._accept(await connection.receiver("archive", credit=0), self.size // 4, chance, 0.9)

    async def transact(self, connection: Connection, chance: random.Random) -> None:
        """In one transaction, messages are taken, and others sent to this queue and to one of another partition."""
        coordinator = await connection.coordinator()
        receiver = await connection.receiver("orders", credit=0)
        sender = await connection.sender("orders")
        onward = await connection.sender("roaming", through="orders")
        for is_committed in (True, False, True):
            transaction = await coordinator.declare()
            taken = await receiver.fetch(2, 0.5)
            answers = [receiver.accept(each, transaction) for each in taken]
            await sender.send(_order(chance).encode(), transaction)
            await onward.send(_order(chance).encode(), transaction)
            await _settled(answers)
            if is_committed:
                await coordinator.commit(transaction)
                self.sent += 2
            else:
                await coordinator.roll_back(transaction)

    async def read_dead_letters(self, connection: Connection, chance: random.Random) -> None:
        for entity in ("orders", "spread", "brief"):
            receiver = await connection.receiver(f"{entity}/$deadletterqueue", credit=0)
            await self._accept(receiver, 3, chance, 0.8)

    async def roam(self, connection: Connection, chance: random.Random) -> None:
        """A queue that moves from partition to partition while it has messages."""
        await self._send(connection, "roaming", [_order(chance) for _ in range(self.size // 2)])
        receiver = await connection.receiver("roaming", credit=0)
        await self._accept(receiver, self.size // 4, chance, 0.8)
        await receiver.close()
        with contextlib.suppress(RequestFailed):  # it lives there already, or partitions are not ready
            await connection.move("roaming", chance.randrange(4))

    async def renew(self, connection: Connection, chance: random.Random) -> None:
        """A queue that is deleted with its messages, and created again under its name."""
        async with HttpClient(self._http, self._target.credentials, ssl.create_default_context()) as http:
            with contextlib.suppress(NotThere):
                await http.delete(PASSING)
            await http.put(PASSING, _QUEUE, is_update=False)
        await self._send(connection, PASSING, [_order(chance) for _ in range(self.size // 4)])
        await self._accept(await connection.receiver(PASSING, credit=0), self.size // 8, chance, 0.9)

    # -- what they use

    async def _send(self, connection: Connection, entity: str, messages: Sequence[Message]) -> None:
        sender = await connection.sender(entity)
        await sender.send_all((each.encode() for each in messages), self._accepted)
        await sender.close()

    def _accepted(self) -> None:
        self.sent += 1

    async def _accept(self, receiver: Receiver, count: int, chance: random.Random, rate: float) -> None:
        """Complete some, give the others back."""
        taken = await receiver.fetch(count, 0.5)
        chosen = [chance.random() < rate for _ in taken]
        await _settled(
            [
                receiver.accept(each) if is_chosen else receiver.release(each)
                for each, is_chosen in zip(taken, chosen, strict=True)
            ]
        )

    # -- the end

    async def leave_some(self) -> None:
        """What nobody takes: messages and dead letters, however little the parts have left."""
        chance = random.Random(self._seed)
        async with await self.connect() as connection:
            await self._send(connection, "bin", [_order(chance) for _ in range(3 * len(REASONS))])
            receiver = await connection.receiver("bin", credit=0)
            taken = await receiver.fetch(len(REASONS), PATIENCE_S)
            await _settled(
                [receiver.reject(each, reason, "left over") for each, reason in zip(taken, REASONS, strict=True)]
            )

    async def settle_down(self) -> None:
        """Wait until nothing happens by itself any more: all is forwarded, and due messages are active.

        Then all messages are in WAITING, which all exist. Raises TimeoutError.
        """
        end = time.monotonic() + PATIENCE_S
        async with HttpClient(self._http, self._target.credentials, ssl.create_default_context()) as http:
            with contextlib.suppress(Refused):  # it is there
                await http.put(PASSING, _QUEUE, is_update=False)
        async with await self.connect() as connection:
            before = None
            while True:
                await asyncio.sleep(_DUE_MS / 1000)  # what was scheduled last is due after it
                counts = await connection.counts()
                is_busy = any(each.transfer for each in counts.values())
                is_busy |= any(each.active for name, each in counts.items() if (name.lower(), "active") not in WAITING)
                if counts == before and not is_busy:
                    dead = {name.lower() for name, each in counts.items() if each.dead_lettered}
                    assert all((name, "deadletter") in WAITING for name in dead), dead
                    assert not any(each.transfer_dead_lettered for each in counts.values()), counts
                    return
                if time.monotonic() > end:
                    raise TimeoutError(f"still busy: {counts}")
                before = counts


Part = Callable[[Connection, random.Random], Awaitable[None]]


async def _settled(answers: Sequence[Awaitable[None]]) -> None:
    """Wait for all. A lock that was lost meanwhile is a part of the load; raises what else went wrong."""
    for outcome in await asyncio.gather(*answers, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, SettlementRefused):
            raise outcome


def _order(
    chance: random.Random, *, group_id: str | None = None, partition_key: str | None = None, due: datetime | None = None
) -> Message:
    amount = chance.randrange(100)
    number = chance.getrandbits(48)
    message = Message.of(
        f'{{"order": {number}, "amount": {amount}, "customer": "c-{number % 97}"}}'.encode(),
        message_id=f"order-{number:012x}",
        subject="order",
        group_id=group_id,
        content_type="application/json",
        application_properties={"amount": amount},
    )
    if partition_key is not None:
        message.annotations[Symbol("x-opt-partition-key")] = partition_key
    if due is not None:
        message.annotations[Symbol("x-opt-scheduled-enqueue-time")] = Timestamp(int(due.timestamp() * 1000))
    return message
