"""What begins while a worker is being restarted waits for it, and is done then: no client is told to try again."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from protocol.client.connection import Connection, connect_to
from protocol.client.errors import MessageRefused
from protocol.client.messages import Message, data_section
from protocol.nodes.sas_tokens import generate
from protocol.symbols import PARTITION_KEY
from tests.brokers import KEY, KEY_NAME, Broker, running
from tests.patience import PATIENCE_S, eventually

WAIT_MS = 10_000  # as much as may be set: the machine of the tests may be busy, and the restart slow
AWAY_S = 0.8
SENDERS = 8
CONFIG = (
    "partitions = 2\n"
    + "".join(f'[[queues]]\nname = "{name}"\n' for name in ("orders", "in-order", "requests", "posted", "together"))
    + '[[queues]]\nname = "sessions"\nrequires_session = true\n'
    + '[[queues]]\nname = "partitioned"\nenable_partitioning = true\n'
)

ENTRY = (
    b'<entry xmlns="http://www.w3.org/2005/Atom"><content type="application/xml"><QueueDescription '
    b'xmlns="http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"/></content></entry>'
)

Operation = Callable[[], Coroutine[Any, Any, Any]]


def losses(broker: Broker) -> int:
    return broker.log_file.read_text(errors="replace").count("worker connection lost")


@contextmanager
def worker_away(broker: Broker) -> Iterator[None]:
    """The only worker is killed, and the supervisor starts it again at the end."""
    supervisor, before = broker.processes()[0], losses(broker)
    supervisor.suspend()
    try:
        broker.worker().kill()
        eventually(lambda: losses(broker) > before, "the gateway knows")
        yield
    finally:
        supervisor.resume()


@asynccontextmanager
async def connected(broker: Broker) -> AsyncIterator[Connection]:
    connection = await connect_to(broker.connection_string)
    async with connection:
        yield connection


async def done_after_the_restart(broker: Broker, *groups: Sequence[Operation]) -> list[list[Any]]:
    """The results of operations that begin while the worker is away."""
    with worker_away(broker):
        tasks = [[asyncio.create_task(operation()) for operation in group] for group in groups]
        done, _ = await asyncio.wait([task for group in tasks for task in group], timeout=AWAY_S)
        assert not done, [task.exception() for task in done]
    async with asyncio.timeout(PATIENCE_S):
        return [await asyncio.gather(*group) for group in tasks]


async def taken(connection: Connection, address: str, count: int) -> list[bytes]:
    """So many bodies, in the order in which they come."""
    receiver = await connection.receiver(address, receive_and_delete=True)
    async with asyncio.timeout(PATIENCE_S):
        received = [await receiver.receive() for _ in range(count)]
    return [each.message().body for each in received if each is not None]


def numbered(count: int) -> list[bytes]:
    return [b"%03d" % number for number in range(count)]


def with_sections(bodies: Sequence[bytes]) -> list[bytes]:
    return [data_section(body) for body in bodies]


def http(broker: Broker, method: str, path: str, body: bytes = b"") -> int:
    """The status of the answer."""
    connection = HTTPConnection("localhost", broker.http_port, timeout=PATIENCE_S)
    token = generate("http://localhost/", KEY_NAME, KEY, int(time.time()) + 600)
    try:
        connection.request(method, path, body, {"Authorization": token})
        return connection.getresponse().status
    finally:
        connection.close()


async def test_whatever_begins_waits_for_the_worker_and_is_done(tmp_path: Path) -> None:
    """All at once, because the supervisor waits the longer the more often a worker dies."""
    config = f"worker_restart_wait_ms = {WAIT_MS}\n{CONFIG}"
    with running(Broker(tmp_path, config, workers=1)) as broker:
        async with connected(broker) as connection:
            await done_at_once(broker, connection)


async def done_at_once(broker: Broker, connection: Connection) -> None:
    each_one, in_order = numbered(SENDERS), numbered(100)
    senders = [await connection.sender("orders") for _ in each_one]
    ordered, partitioned = await connection.sender("in-order"), await connection.sender("partitioned")
    management = await connection.management("requests")
    together, coordinator = await connection.sender("together"), await connection.coordinator()
    await (await connection.sender("requests")).send(Message.of(b"m").encode())
    await (await connection.sender("sessions")).send(Message.of(b"m", group_id="s").encode())
    keyed = [Message.of(b"m", annotations={PARTITION_KEY: key}) for key in ("one", "two", "three")]

    async def send_in_a_transaction() -> None:
        transaction = await coordinator.declare()
        await together.send(Message.of(b"m").encode(), transaction)
        await coordinator.commit(transaction)

    (scheduled, peeked, receiver, *statuses), *_ = await done_after_the_restart(
        broker,
        [
            partial(management.schedule, [Message.of(b"later")]),
            partial(management.peek, 10),
            partial(connection.accept_session, "sessions", "s"),
            partial(asyncio.to_thread, http, broker, "POST", "/posted/messages", b"m"),
            partial(asyncio.to_thread, http, broker, "GET", "/posted?api-version=2021-05"),
            partial(asyncio.to_thread, http, broker, "PUT", "/created?api-version=2021-05", ENTRY),
        ],
        [partial(each.send, Message.of(body).encode()) for each, body in zip(senders, each_one, strict=True)],
        [partial(ordered.send, Message.of(body).encode()) for body in in_order],
        [partial(partitioned.send, each.encode()) for each in (*keyed, Message.of(b"m"))],
        [send_in_a_transaction, connection.counts],
    )
    assert scheduled[0] > 0
    assert Message.decode(peeked[0]).body == data_section(b"m")
    assert receiver.session_id == "s"
    assert await receiver.fetch(1, PATIENCE_S)
    assert statuses == [201, 200, 201]
    assert sorted(await taken(connection, "orders", len(each_one))) == with_sections(each_one)
    assert await taken(connection, "in-order", len(in_order)) == with_sections(in_order)
    assert await taken(connection, "partitioned", len(keyed) + 1) == with_sections([b"m"] * (len(keyed) + 1))
    assert await taken(connection, "together", 1) == with_sections([b"m"])
    assert await taken(connection, "posted", 1) == with_sections([b"m"])


async def test_an_outage_that_lasts_longer_is_told(tmp_path: Path) -> None:
    config = f"worker_restart_wait_ms = 500\n{CONFIG}"
    with running(Broker(tmp_path, config, workers=1)) as broker:
        async with connected(broker) as connection:
            sender = await connection.sender("orders")
            with worker_away(broker):
                for _ in range(2):  # one that waits in vain, and one that does not wait any more
                    with pytest.raises(MessageRefused, match="server-busy"):
                        await sender.send(Message.of(b"refused").encode())
            eventually(lambda: broker.get("/readyz")[0] == 200, "it is back")
            await sender.send(Message.of(b"m").encode())
            assert await taken(connection, "orders", 1) == with_sections([b"m"])
