"""Transactions on a real broker: what a client is told, and what is there after it, also after kills."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from broker.catalog.catalog import home_partition
from protocol import conditions
from protocol.client.connection import Connection, connect_to
from protocol.client.errors import ClientError, MessageRefused, RequestFailed, SettlementRefused
from protocol.client.links import Receiver
from protocol.client.messages import Message
from storage.maintenance import verify
from tests.brokers import Broker
from tests.patience import PATIENCE_S, eventually

QUEUES = [f"queue-{number}" for number in range(8)]
CONFIG = "partitions = 2\n" + "".join(f'[[queues]]\nname = "{name}"\nlock_duration_ms = 60000\n' for name in QUEUES)
HERE = QUEUES[0]
BESIDE = next(name for name in QUEUES[1:] if home_partition(name, 2) == home_partition(HERE, 2))
ELSEWHERE = next(name for name in QUEUES if home_partition(name, 2) != home_partition(HERE, 2))


@pytest.fixture(scope="module")
def transacting_broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("transactions"), CONFIG) as broker:
        yield broker


@pytest.fixture
def run(transacting_broker) -> Callable[[Callable[[Connection], Awaitable[None]]], None]:
    """Runs a story with a connection; the queues it used are emptied."""

    def run(story: Callable[[Connection], Awaitable[None]]) -> None:
        async def told() -> None:
            async with connected(transacting_broker) as connection:
                await story(connection)
            async with connected(transacting_broker) as connection:
                for name in QUEUES:
                    await (await connection.management(name)).request("peeklock:purge", {})

        asyncio.run(told())

    return run


@asynccontextmanager
async def connected(broker: Broker) -> AsyncIterator[Connection]:
    async with asyncio.timeout(PATIENCE_S), await connect_to(broker.connection_string) as connection:
        yield connection


def is_ready(broker: Broker) -> bool:
    try:
        return broker.get("/readyz")[0] == 200
    except OSError:
        return False


def message(text: str, **fields: str) -> bytes:
    return Message.of(text.encode(), **fields).encode()


async def texts(connection: Connection, queue: str = HERE, count: int = 100) -> list[str]:
    """What can be received now; it goes back."""
    receiver = await connection.receiver(queue, credit=0)
    received = await receiver.fetch(count, 0.1)
    found = [str(bytes(each.message().content()), "utf-8") for each in received]
    await asyncio.gather(*[receiver.release(each) for each in received])
    await receiver.close()
    return found


async def receive(receiver: Receiver):
    [received] = await receiver.fetch(1, PATIENCE_S)
    return received


def test_sends_and_completes_are_done_at_the_commit(run):
    async def story(connection):
        sender, coordinator = await connection.sender(HERE), await connection.coordinator()
        await sender.send(message("old"))
        receiver = await connection.receiver(HERE, credit=0)
        old = await receive(receiver)
        transaction = await coordinator.declare()
        for text in "ab":
            await sender.send(message(text), transaction)
        await receiver.accept(old, transaction)
        assert await texts(connection) == []
        await coordinator.commit(transaction)
        assert await texts(connection) == ["a", "b"]

    run(story)


def test_a_rollback_undoes_it_and_the_lock_is_kept(run):
    async def story(connection):
        sender, coordinator = await connection.sender(HERE), await connection.coordinator()
        await sender.send(message("old"))
        receiver = await connection.receiver(HERE, credit=0)
        old = await receive(receiver)
        transaction = await coordinator.declare()
        await sender.send(message("new"), transaction)
        await receiver.accept(old, transaction)
        await coordinator.roll_back(transaction)
        assert await texts(connection) == []
        management = await connection.management(HERE)
        body = {"disposition-status": "completed", "lock-tokens": [old.lock_token]}
        await management.request("com.microsoft:update-disposition", body)

    run(story)


def test_two_queues_of_one_partition_take_part_together(run):
    async def story(connection):
        coordinator = await connection.coordinator()
        senders = [await connection.sender(name) for name in (HERE, BESIDE)]
        transaction = await coordinator.declare()
        for sender in senders:
            await sender.send(message("m"), transaction)
        await coordinator.commit(transaction)
        assert [await texts(connection, name) for name in (HERE, BESIDE)] == [["m"], ["m"]]

    run(story)


async def refused(awaited: Awaitable[object], condition: str, error: type[ClientError] = MessageRefused) -> None:
    with pytest.raises(error) as raised:
        await awaited
    assert raised.value.condition == condition


def test_two_partitions_do_not_and_the_rest_is_rolled_back(run):
    """Not on a session on which the coordinator is not the first (amqp.md 10.4)."""

    async def story(connection):
        here, elsewhere = [await connection.sender(name) for name in (HERE, ELSEWHERE)]
        coordinator = await connection.coordinator()
        transaction = await coordinator.declare()
        await here.send(message("m"), transaction)
        await refused(elsewhere.send(message("m"), transaction), conditions.NOT_ALLOWED)
        await refused(coordinator.commit(transaction), conditions.TRANSACTION_ROLLBACK)
        assert [await texts(connection, name) for name in (HERE, ELSEWHERE)] == [[], []]

    run(story)


def test_ids_that_are_not_known_or_have_ended_are_refused(run):
    async def story(connection):
        sender, coordinator = await connection.sender(HERE), await connection.coordinator()
        transaction = await coordinator.declare()
        await coordinator.commit(transaction)
        for unknown in (transaction, b"x" * 16, b""):
            await refused(coordinator.commit(unknown), conditions.TRANSACTION_UNKNOWN_ID)
            await refused(coordinator.roll_back(unknown), conditions.TRANSACTION_UNKNOWN_ID)
            await refused(sender.send(message("m"), unknown), conditions.TRANSACTION_UNKNOWN_ID)
        await sender.send(message("old"))
        receiver = await connection.receiver(HERE, credit=0)
        answer = receiver.accept(await receive(receiver), transaction)
        await refused(answer, conditions.TRANSACTION_UNKNOWN_ID, SettlementRefused)

    run(story)


def test_a_transaction_of_another_connection_is_unknown(run, transacting_broker):
    async def story(connection):
        transaction = await (await connection.coordinator()).declare()
        async with connected(transacting_broker) as another:
            sender = await another.sender(HERE)
            await refused(sender.send(message("m"), transaction), conditions.TRANSACTION_UNKNOWN_ID)

    run(story)


def test_at_most_a_hundred_messages_are_sent_in_one(run):
    async def story(connection):
        sender, coordinator = await connection.sender(HERE), await connection.coordinator()
        transaction = await coordinator.declare()
        await asyncio.gather(*[await sender.post(message("m"), transaction) for _ in range(100)])
        await refused(sender.send(message("m"), transaction), conditions.RESOURCE_LIMIT_EXCEEDED)
        await refused(coordinator.commit(transaction), conditions.TRANSACTION_ROLLBACK)
        assert await texts(connection) == []
        transaction = await coordinator.declare()
        await asyncio.gather(*[await sender.post(message("m"), transaction) for _ in range(100)])
        await coordinator.commit(transaction)
        assert len(await texts(connection, count=200)) == 100

    run(story)


def test_a_message_settled_in_one_is_settled_by_nobody_else(run, transacting_broker):
    async def story(connection):
        sender = await connection.sender(HERE)
        await sender.send(message("old"))
        async with connected(transacting_broker) as another:
            receiver = await another.receiver(HERE, credit=0)
            received = await receive(receiver)
            token = received.lock_token
            coordinator = await another.coordinator()
            transaction = await coordinator.declare()
            await receiver.accept(received, transaction)
            management = await connection.management(HERE)
            body = {"disposition-status": "completed", "lock-tokens": [token]}
            await refused(
                management.request("com.microsoft:update-disposition", body), conditions.NOT_ALLOWED, RequestFailed
            )
            await coordinator.commit(transaction)
        assert await texts(connection) == []

    run(story)


@pytest.mark.parametrize("end", ["coordinator", "connection"])
def test_without_its_coordinator_it_is_rolled_back(run, transacting_broker, end):
    async def story(connection):
        async with connected(transacting_broker) as another:
            coordinator, sender = await another.coordinator(), await another.sender(HERE)
            await sender.send(message("lost"), await coordinator.declare())
            if end == "coordinator":
                await coordinator.close()
            else:
                another.abort()
        assert await texts(connection) == []
        sender = await connection.sender(HERE)
        await sender.send(message("kept"))
        assert await texts(connection) == ["kept"]

    run(story)


@pytest.mark.parametrize("victim", [Broker.worker, Broker.gateway])
def test_a_process_killed_at_any_time_leaves_all_of_a_transaction_or_nothing(tmp_path, victim):
    """Each transaction completes one message and sends two; kills come while many are under way.

    A client of a worker that was killed goes on with the next one. It ends in the middle of what it does there.
    """
    chance = random.Random(4)
    names = {str(number) for number in range(4000)}
    with Broker(tmp_path, CONFIG, workers=1) as broker:
        committed: set[str] = set()
        answered = 0  # at most so many commits before the process that is now under way

        async def work(goes_on: asyncio.Event) -> None:
            async with connected(broker) as connection:
                coordinator = await connection.coordinator()  # the first link, so that transactions may cross entities
                receiver = await connection.receiver(BESIDE, credit=20)
                sender = await connection.sender(HERE)

                async def one() -> None:
                    received = await receiver.receive()
                    assert received is not None
                    name = str(bytes(received.message().content()), "utf-8")
                    if len(committed) > answered:
                        goes_on.set()
                    transaction = await coordinator.declare()
                    sends = [await sender.post(message(name), transaction) for _ in range(2)]
                    results = await asyncio.gather(
                        *sends, receiver.accept(received, transaction), return_exceptions=True
                    )
                    with suppress(MessageRefused):  # it was rolled back, or the broker does not know
                        if results == [None, None, None]:
                            await coordinator.commit(transaction)
                            committed.add(name)
                        else:  # the worker that is back does not know the lock, for one
                            await coordinator.roll_back(transaction)

                try:
                    while True:
                        await asyncio.gather(*[one() for _ in range(10)])
                finally:
                    connection.abort()  # its locks end with it; had it closed in order, they would be kept

        async def prepare() -> None:
            async with connected(broker) as connection:
                await (await connection.sender(BESIDE)).send_all(map(message, names))

        asyncio.run(prepare())
        for _ in range(4):

            async def until_killed() -> None:
                nonlocal answered
                answered = len(committed)
                goes_on = asyncio.Event()
                working = asyncio.create_task(work(goes_on))
                working.add_done_callback(lambda _: goes_on.set())
                await asyncio.wait_for(goes_on.wait(), PATIENCE_S)
                await asyncio.sleep(chance.random() / 4)  # at any point of a transaction
                victim(broker).kill()
                answered = len(committed) + 10
                goes_on.clear()
                await asyncio.wait_for(goes_on.wait(), PATIENCE_S)
                working.cancel()
                with pytest.raises(asyncio.CancelledError if victim is Broker.worker else ClientError):
                    await working

            asyncio.run(until_killed())
            eventually(lambda: is_ready(broker), "ready")

        async def is_quiet() -> bool:
            async with connected(broker) as connection:
                counts = (await connection.counts()).values()
                return not any(each.locked or each.transfer for each in counts)

        async def judge() -> None:
            async with connected(broker) as connection:
                sent, left = await texts(connection, HERE, 8000), await texts(connection, BESIDE, 8000)
            done = set(sent)
            assert len(sent) == 2 * len(done)
            assert committed <= done
            assert done.isdisjoint(left)
            assert done | set(left) == names
            assert len(done) + len(left) == len(names)

        eventually(lambda: asyncio.run(is_quiet()), "nothing is locked or under way, and all can be received")
        asyncio.run(judge())
    assert len(committed) > 50
    assert verify(broker.data_dir).ok
