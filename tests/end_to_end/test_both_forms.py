"""What every client needs works alike with a worker of its own process and without (`workers = 0`)."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from protocol.client.connection import Connection, connect_to
from protocol.client.links import Received
from protocol.client.messages import Message
from protocol.codec import Timestamp
from tests.brokers import Broker
from tests.end_to_end.health import elsewhere
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, RawPeer
from tests.end_to_end.raw_requests import Node
from tests.patience import PATIENCE_S
from tests.sessions.raw_sessions import accept, receive, send, session_of

HERE, THERE = "orders", elsewhere("orders")  # on two partitions
DEAD = "/$deadletterqueue"
CONFIG = f"""
partitions = 2

[[queues]]
name = "{HERE}"
max_delivery_count = 2

[[queues]]
name = "{THERE}"

[[queues]]
name = "passes-on"
forward_to = "{HERE}"

[[queues]]
name = "passes-on-too"
forward_to = "{THERE}"

[[queues]]
name = "sessions"
requires_session = true

[[topics]]
name = "news"

  [[topics.subscriptions]]
  name = "all"

  [[topics.subscriptions]]
  name = "high"

    [[topics.subscriptions.rules]]
    name = "priority"

      [topics.subscriptions.rules.filter]
      kind = "sql"
      expression = "priority = 'high'"
"""
Story = Callable[[Connection], Awaitable[None]]


@pytest.fixture(scope="module", params=[1, 0], ids=["two processes", "one process"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("form"), CONFIG, workers=request.param) as broker:
        yield broker
    assert "Traceback" not in broker.log_file.read_text(), broker.log()


@pytest.fixture
def run(broker: Broker) -> Callable[[Story], None]:
    def run(story: Story) -> None:
        async def told() -> None:
            async with asyncio.timeout(PATIENCE_S), await connect_to(broker.connection_string) as connection:
                await story(connection)

        asyncio.run(told())

    return run


def said(text: str, **fields: object) -> bytes:
    return Message.of(text.encode(), **fields).encode()


def text_of(received: Received) -> str:
    return str(bytes(received.message().content()), "utf-8")


async def taken(connection: Connection, address: str, count: int) -> list[str]:
    """Receive so many and complete them."""
    async with receiving(connection, address) as receiver:
        found: list[Received] = []
        while len(found) < count:
            found += await receiver.fetch(count - len(found), PATIENCE_S)
        await asyncio.gather(*map(receiver.accept, found))
        assert await receiver.fetch(1, 0.1) == []
        return [text_of(each) for each in found]


@asynccontextmanager
async def receiving(connection: Connection, address: str) -> AsyncIterator:
    async with await connection.receiver(address, credit=0) as receiver:
        yield receiver


def test_messages_are_sent_received_and_settled_in_order(run):
    async def story(connection: Connection) -> None:
        texts = [f"{number}" for number in range(300)]
        for queue in (HERE, THERE):
            assert await (await connection.sender(queue)).send_all(map(said, texts)) == 300
        assert await taken(connection, HERE, 300) == texts
        assert await taken(connection, THERE, 300) == texts

    run(story)


def test_a_message_is_abandoned_and_then_dead_lettered_by_its_delivery_count(run):
    async def story(connection: Connection) -> None:
        await (await connection.sender(HERE)).send(said("tried"))
        async with receiving(connection, HERE) as receiver:
            for count in range(2):
                [received] = await receiver.fetch(1, PATIENCE_S)
                assert received.message().delivery_count == count
                await receiver.modify(received)
            assert await receiver.fetch(1, 0.1) == []
        assert await taken(connection, HERE + DEAD, 1) == ["tried"]

    run(story)


def test_a_message_is_dead_lettered_with_a_reason(run):
    async def story(connection: Connection) -> None:
        await (await connection.sender(THERE)).send(said("bad"))
        async with receiving(connection, THERE) as receiver:
            [received] = await receiver.fetch(1, PATIENCE_S)
            await receiver.reject(received, "bad", "very bad")
        async with receiving(connection, THERE + DEAD) as receiver:
            [received] = await receiver.fetch(1, PATIENCE_S)
            assert received.message().application_properties["DeadLetterReason"] == "bad"
            await receiver.accept(received)

    run(story)


def test_a_scheduled_message_comes_when_it_is_due_and_a_cancelled_one_does_not(run):
    async def story(connection: Connection) -> None:
        management = await connection.management(THERE)
        due_ms = int(time.time() * 1000) + 300
        scheduled = [
            Message.of(text.encode(), annotations={"x-opt-scheduled-enqueue-time": Timestamp(due_ms)})
            for text in ("comes", "cancelled")
        ]
        _, cancelled = await management.schedule(scheduled)
        await management.cancel_scheduled([cancelled])
        assert await taken(connection, THERE, 1) == ["comes"]
        assert time.time() * 1000 >= due_ms

    run(story)


def test_a_transaction_is_done_or_undone_as_a_whole(run):
    async def story(connection: Connection) -> None:
        sender, coordinator = await connection.sender(HERE), await connection.coordinator()
        await sender.send(said("first"))
        async with receiving(connection, HERE) as receiver:
            [received] = await receiver.fetch(1, PATIENCE_S)
            undone = await coordinator.declare()
            await sender.send(said("undone"), undone)
            await coordinator.roll_back(undone)
            transaction = await coordinator.declare()
            await sender.send(said("second"), transaction)
            await receiver.accept(received, transaction)
            assert await receiver.fetch(1, 0.1) == []
            await coordinator.commit(transaction)
        assert await taken(connection, HERE, 1) == ["second"]

    run(story)


def test_a_topic_publishes_to_the_subscriptions_whose_rules_match(run):
    async def story(connection: Connection) -> None:
        sender = await connection.sender("news")
        await sender.send(said("low", application_properties={"priority": "low"}))
        await sender.send(said("high", application_properties={"priority": "high"}))
        assert await taken(connection, "news/subscriptions/all", 2) == ["low", "high"]
        assert await taken(connection, "news/subscriptions/high", 1) == ["high"]

    run(story)


def test_messages_are_forwarded_in_order_inside_a_partition_and_to_another(run):
    async def story(connection: Connection) -> None:
        texts = [f"{number}" for number in range(50)]
        for queue, destination in (("passes-on", HERE), ("passes-on-too", THERE)):
            await (await connection.sender(queue)).send_all(map(said, texts))
            assert await taken(connection, destination, 50) == texts

    run(story)


def test_a_session_is_locked_in_order_and_has_a_state(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        send(peer, "sessions", ("a", b"1"), ("b", b"other"), ("a", b"2"))
        handle, attached = accept(peer, "sessions", None)
        assert session_of(attached) == "a"
        assert session_of(accept(peer, "sessions", None)[1]) == "b"
        deliveries = receive(peer, handle, 2)
        assert [body for _, body in deliveries] == [b"1", b"2"]
        for frame, _ in deliveries:
            peer.settle(frame.fields[1])
            assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
        node = Node(peer, "sessions/$management")
        node.ask("com.microsoft:set-session-state", {"session-id": "a", "session-state": b"state"})
        answer = node.ask("com.microsoft:get-session-state", {"session-id": "a"})
        assert answer.body["session-state"] == b"state"
        peer.close()
