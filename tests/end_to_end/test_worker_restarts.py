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

from broker.namespace.fragments import fragment_of
from protocol.client.connection import Connection, connect_to
from protocol.client.errors import MessageRefused
from protocol.client.messages import Message, data_section
from protocol.nodes.sas_tokens import generate
from protocol.symbols import PARTITION_KEY
from tests.brokers import KEY, KEY_NAME, Broker, running
from tests.end_to_end.health import worker_of
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

CONFIG_OF_TWO = (
    "partitions = 2\n"
    + "".join(f'[[queues]]\nname = "{name}"\n' for name in ("changed", "changed-too", "deleted", "deleted-too"))
    + '[[topics]]\nname = "news"\nenable_partitioning = true\n[[topics.subscriptions]]\nname = "s"\n'
    + '[[queues]]\nname = "sessions"\nrequires_session = true\nenable_partitioning = true\n'
)
SERVICE_BUS = "http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"
VERSION = "?api-version=2021-05"


def entry(element: str, content: str = "") -> bytes:
    described = f'<{element} xmlns="{SERVICE_BUS}">{content}</{element}>'
    whole = f'<entry xmlns="http://www.w3.org/2005/Atom"><content type="application/xml">{described}</content></entry>'
    return whole.encode()


ENTRY = entry("QueueDescription")
CHANGED_ENTRY = entry("QueueDescription", "<MaxDeliveryCount>7</MaxDeliveryCount>")
RULE_ENTRY = entry(
    "RuleDescription",
    '<Filter xmlns:i="http://www.w3.org/2001/XMLSchema-instance" i:type="SqlFilter">'
    "<SqlExpression>size &gt; 5</SqlExpression></Filter>",
)

Operation = Callable[[], Coroutine[Any, Any, Any]]


def losses(broker: Broker) -> int:
    return broker.log_file.read_text(errors="replace").count("worker connection lost")


@contextmanager
def worker_away(broker: Broker, partition: int = 0) -> Iterator[None]:
    """The worker of this partition is killed, and the supervisor starts it again at the end."""
    supervisor, worker, before = broker.processes()[0], worker_of(broker, partition), losses(broker)
    supervisor.suspend()
    try:
        worker.kill()
        eventually(lambda: losses(broker) > before, "the gateway knows")
        yield
    finally:
        supervisor.resume()


@asynccontextmanager
async def connected(broker: Broker) -> AsyncIterator[Connection]:
    connection = await connect_to(broker.connection_string)
    async with connection:
        yield connection


async def done_after_the_restart(broker: Broker, *groups: Sequence[Operation], partition: int = 0) -> list[list[Any]]:
    """The results of operations that begin while the worker of the partition is away."""
    with worker_away(broker, partition):
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


def http(broker: Broker, method: str, path: str, body: bytes = b"", **headers: str) -> int:
    """The status of the answer."""
    connection = HTTPConnection("localhost", broker.http_port, timeout=PATIENCE_S)
    token = generate("http://localhost/", KEY_NAME, KEY, int(time.time()) + 600)
    try:
        connection.request(method, path, body, {"Authorization": token, **headers})
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
            partial(asyncio.to_thread, http, broker, "GET", f"/posted{VERSION}"),
            partial(asyncio.to_thread, http, broker, "PUT", f"/created{VERSION}", ENTRY),
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


async def changes_wait(broker: Broker, lost: int) -> None:
    """Those over HTTP and those over AMQP, of entities and of rules, while the worker of a partition is away."""

    def over_http(method: str, path: str, body: bytes = b"", **headers: str) -> Operation:
        return partial(asyncio.to_thread, http, broker, method, f"/{path}{VERSION}", body, **headers)

    async with connected(broker) as connection:
        namespace, rules = await connection.management(""), await connection.management("news/Subscriptions/s")
        rule = {"rule-name": f"over-amqp-{lost}", "rule-description": {"sql-filter": {"expression": "size > 5"}}}
        created = {"kind": "queue", "properties": {"name": f"over-amqp-{lost}"}}
        changed = {"path": "changed", "properties": {"max_delivery_count": 7 + lost}}
        statuses, answers = await done_after_the_restart(
            broker,
            [
                over_http("PUT", f"over-http-{lost}", ENTRY),
                over_http("PUT", "changed-too", CHANGED_ENTRY, **{"If-Match": "*"}),
                over_http("DELETE", ("deleted", "deleted-too")[lost]),
                over_http("PUT", f"news/Subscriptions/s/rules/over-http-{lost}", RULE_ENTRY),
            ],
            [
                partial(namespace.request, "peeklock:create-entity", created, PATIENCE_S),
                partial(namespace.request, "peeklock:update-entity", changed, PATIENCE_S),
                partial(rules.request, "com.microsoft:add-rule", rule, PATIENCE_S),
            ],
            partition=lost,
        )
        assert statuses == [201, 200, 200, 201]
        assert len(answers) == 3  # none was an error
        listed = await rules.request("com.microsoft:enumerate-rules", {"top": 10, "skip": 0}, PATIENCE_S)
        assert len(listed["rules"]) == 3 + 2 * lost
        for name in (f"over-amqp-{lost}", f"over-http-{lost}"):
            await (await connection.sender(name)).send(Message.of(b"m").encode())


async def test_changes_of_entities_wait_for_whichever_worker_is_away(tmp_path: Path) -> None:
    """First of the home, and then of the worker beside it."""
    with running(Broker(tmp_path, f"worker_restart_wait_ms = {WAIT_MS}\n{CONFIG_OF_TWO}", workers=2)) as broker:
        await changes_wait(broker, 0)
        eventually(lambda: broker.get("/readyz")[0] == 200, "it is back")
        await changes_wait(broker, 1)


async def test_a_change_of_entities_is_refused_when_a_worker_is_away_for_longer(tmp_path: Path) -> None:
    with running(Broker(tmp_path, f"worker_restart_wait_ms = 500\n{CONFIG_OF_TWO}", workers=2)) as broker:
        with worker_away(broker, 1):
            for _ in range(2):  # one that waits in vain, and one that does not wait any more
                assert await asyncio.to_thread(http, broker, "PUT", f"/created{VERSION}", ENTRY) == 503
        eventually(lambda: broker.get("/readyz")[0] == 200, "it is back")
        assert await asyncio.to_thread(http, broker, "PUT", f"/created{VERSION}", ENTRY) == 201


async def test_who_waits_for_a_session_when_the_worker_dies_gets_it_from_the_next_one(tmp_path: Path) -> None:
    """One by its name, and the next one, whose message comes afterwards."""
    with running(Broker(tmp_path, f"worker_restart_wait_ms = {WAIT_MS}\n{CONFIG_OF_TWO}", workers=2)) as broker:
        async with connected(broker) as connection:
            worker = worker_of(broker, 1)
            named = next(name for name in map("s-{}".format, range(100)) if fragment_of(name.encode(), range(2)) == 1)
            worker.suspend()
            tasks = [
                asyncio.create_task(connection.accept_session("sessions", named)),
                asyncio.create_task(connection.accept_next_session("sessions", PATIENCE_S)),
            ]
            done, _ = await asyncio.wait(tasks, timeout=AWAY_S)
            assert not done, "the worker has got what it does not answer"
            worker.kill()
            accepted = await asyncio.wait_for(tasks[0], PATIENCE_S)
            assert accepted.session_id == named
            await (await connection.sender("sessions")).send(Message.of(b"m", group_id="later").encode())
            following = await asyncio.wait_for(tasks[1], PATIENCE_S)
            assert following is not None
            assert following.session_id == "later"
