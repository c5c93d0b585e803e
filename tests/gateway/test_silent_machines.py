"""When a gateway takes a worker on another machine for gone, though nothing has ended the connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from broker import requests, wire
from broker.cluster.silence import Patience
from broker.errors import BrokerError, OutcomeUnknown
from broker.gateway.router import Router
from broker.gateway.worker_tcp import TcpConnection
from broker.metrics import GatewayMetrics
from broker.wire import Op
from tests.gateway.in_process import gateway_with_workers
from tests.patience import PATIENCE_S, until

PATIENCE = Patience(silence_ms=3000, stall_ms=9000)
SILENT_LOOKS = 3
LONGEST_LOOKS = 12
NEVER_S = 1000.0


class Worker:
    """One that says what the test wants; the gateway's side of the connection is real."""

    def __init__(self) -> None:
        self._connections: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []
        self._heard: list[list[Any]] = []
        self.replies: list[tuple[Any, BrokerError | None]] = []

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        await self._connections.put((reader, writer))

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        self.router = Router(
            [f"127.0.0.1:{port}"],
            1,
            GatewayMetrics(),
            lambda _: None,
            lambda address, router: TcpConnection(address, router, None, PATIENCE),
            busy_seconds=2 * NEVER_S,
        )
        [connection] = self.router.workers
        assert isinstance(connection, TcpConnection)
        self.connection = connection
        keeping = asyncio.create_task(connection.keep_connected())
        try:
            yield
        finally:
            keeping.cancel()
            server.close()
            self.connection._end()
            for writer in self._writers:
                writer.close()
            await asyncio.sleep(0.01)  # the loop takes some rounds for it

    async def accept(self) -> None:
        self._reader, self._writer = await asyncio.wait_for(self._connections.get(), PATIENCE_S)

    async def greet(self, version: int = wire.VERSION) -> None:
        await self.accept()
        await self.say([Op.HELLO, version, [0]])
        await asyncio.wait_for(self.connection.connected.wait(), PATIENCE_S)

    def write(self, *messages: list[Any]) -> None:
        frame = msgpack.packb(messages)
        self._writer.write(len(frame).to_bytes(4, "big") + frame)

    async def say(self, *messages: list[Any]) -> None:
        self.write(*messages)
        await self._writer.drain()

    async def beat(self) -> None:
        """It is heard."""
        self.connection._is_heard = False
        await self.say([Op.BEAT])
        await until(lambda: self.connection._is_heard)

    async def hear(self, op: Op) -> list[Any]:
        """The next message of this kind."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                while self._heard:
                    if (message := self._heard.pop(0))[0] == op:
                        return message
                length = int.from_bytes(await self._reader.readexactly(4), "big")
                self._heard += msgpack.unpackb(await self._reader.readexactly(length), strict_map_key=False)

    async def is_cut(self) -> bool:
        """The gateway has ended the connection, and at once."""
        try:
            while await asyncio.wait_for(self._reader.read(1000), PATIENCE_S):
                pass
        except ConnectionResetError:
            return True
        return False

    def ask(self) -> None:
        """Something is under way."""
        self.router.request(0, 8, requests.Counts(), lambda result, error: self.replies.append((result, error)))

    def look(self, times: int) -> None:
        for _ in range(times):
            self.connection._look()


@pytest.fixture(autouse=True)
def _no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """But those that tests make."""
    monkeypatch.setattr("broker.gateway.router.LOOK_SECONDS", NEVER_S)


async def test_what_is_under_way_to_a_silent_worker_is_answered_as_at_its_death() -> None:
    worker = Worker()
    async with worker.serve():
        await worker.greet()
        await worker.hear(Op.BEAT)
        await worker.say([Op.BEAT], [Op.DELETED, 1, []])
        await worker.hear(Op.FOLLOWED)
        worker.ask()
        request = await worker.hear(Op.REQUEST)
        worker.look(SILENT_LOOKS)
        assert worker.replies == []
        worker.write([Op.REPLY, request[2], {}])  # it goes on, too late: the gateway has not read it yet
        worker.look(1)
        await until(lambda: worker.replies)
        [(_, error)] = worker.replies
        assert isinstance(error, OutcomeUnknown)
        assert not worker.connection.is_usable
        assert await worker.is_cut()
        await worker.greet()  # on a new connection
        assert worker.connection.is_usable
        assert len(worker.replies) == 1


async def test_a_worker_that_beats_stays_and_does_not_count_as_answering() -> None:
    worker = Worker()
    async with worker.serve():
        await worker.greet()
        worker.ask()
        request = await worker.hear(Op.REQUEST)
        for _ in range(3 * SILENT_LOOKS):
            await worker.beat()
            worker.look(1)
        assert worker.connection.is_stalled
        assert worker.connection.connected.is_set()
        await worker.say([Op.BEAT], [Op.REPLY, request[2], {}])
        await until(lambda: worker.replies == [({}, None)])
        assert worker.connection.is_usable


async def test_a_worker_that_has_not_begun_to_beat_may_wait_for_its_disk() -> None:
    worker = Worker()
    async with worker.serve():
        await worker.greet()
        worker.ask()
        worker.look(LONGEST_LOOKS)  # the first of which has heard the greeting
        await asyncio.sleep(0)  # for what would be answered
        assert worker.replies == []
        worker.look(1)
        await until(lambda: worker.replies)
        assert await worker.is_cut()


async def test_each_look_gives_the_worker_a_sign_of_life() -> None:
    worker = Worker()
    async with worker.serve():
        await worker.greet()
        await worker.hear(Op.BEAT)
        for _ in range(3):
            worker.look(1)
            assert await worker.hear(Op.BEAT) == [Op.BEAT]


async def test_a_worker_of_the_version_before_is_neither_beaten_to_nor_watched() -> None:
    worker = Worker()
    async with worker.serve():
        await worker.greet(wire.VERSION_WITH_BEATS - 1)
        worker.look(3 * LONGEST_LOOKS)
        worker.ask()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await worker.hear(Op.BEAT)
        assert worker.connection.connected.is_set()
        assert worker.replies == []


async def test_nobody_beats_on_one_machine(tmp_path: Path) -> None:
    gateway, [worker] = gateway_with_workers(tmp_path, 1)
    [connection] = gateway.router.workers
    for _ in range(3 * LONGEST_LOOKS):
        connection._look()
    assert [each for each in await worker.commands() if each[0] == Op.BEAT] == []
    assert connection.is_usable
