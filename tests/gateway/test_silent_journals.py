"""A gateway that reads the journal of another machine, which gives no sign of life, or is only slow."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientConnectionError, ClientPayloadError

from broker.errors import ServerBusy
from broker.gateway.web.journals import Journals, Refused
from broker.journal_requests import SIGN_OF_LIFE, Overview, Range
from broker.settings.config import Settings
from tests.patience import PATIENCE_S

ROWS = Range(0, "0" * 16, 0, 10, 1000, False, None)
LOOK_S = 0.05
SILENT_LOOKS = 3
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class Journal:
    """A process that answers requests with `answers`, one after the other, and tells, or does not, that it is alive."""

    def __init__(self) -> None:
        self.is_alive = True
        self.asked = 0
        self._writers: list[asyncio.StreamWriter] = []
        self.answers: Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]] = self.nothing

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[Journals]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        address = f"127.0.0.1:{port}"
        cluster = {"workers": [address], "journals": [address], "heartbeat_timeout_ms": SILENT_LOOKS * 1000}
        journals = Journals(Settings.model_validate({"cluster": cluster}), "")
        try:
            yield journals
        finally:
            await journals.close()
            server.close()
            for each in self._writers:
                each.close()
            await asyncio.sleep(0.01)  # the loop takes some rounds for it

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(f"GET {SIGN_OF_LIFE.path} ".encode()):
                    self.asked += 1
                    if self.is_alive:
                        writer.write(NOT_FOUND)
                else:
                    await self.answers(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    async def nothing(self, writer: asyncio.StreamWriter) -> None: ...

    async def a_part(self, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"x" * 100)

    async def all_of_it_late(self, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(4 * SILENT_LOOKS * LOOK_S)
        writer.write(HEAD + b"x" * 500)
        await asyncio.sleep(4 * SILENT_LOOKS * LOOK_S)
        writer.write(b"x" * 500)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.gateway.web.journals.BEAT_SECONDS", LOOK_S)


async def test_who_waits_for_an_answer_of_a_silent_machine_is_told() -> None:
    journal = Journal()
    journal.is_alive = False
    async with journal.serve() as journals, asyncio.timeout(PATIENCE_S):
        with pytest.raises(ServerBusy):
            async with journals.rows(0, ROWS):
                pass
        with pytest.raises(ServerBusy):
            await journals.overview(Overview(False))


async def test_who_reads_an_answer_of_a_machine_that_falls_silent_is_told() -> None:
    journal = Journal()
    journal.answers = journal.a_part
    async with journal.serve() as journals, asyncio.timeout(PATIENCE_S):
        async with journals.rows(0, ROWS) as answer:
            assert len(await answer.content.readexactly(100)) == 100
            journal.is_alive = False
            with pytest.raises((ClientPayloadError, ClientConnectionError, TimeoutError)):
                await answer.content.readany()
        with pytest.raises(ServerBusy):
            await journals.overview(Overview(False))


async def test_a_slow_machine_is_waited_for() -> None:
    journal = Journal()
    journal.answers = journal.all_of_it_late
    async with journal.serve() as journals, asyncio.timeout(PATIENCE_S):
        async with journals.rows(0, ROWS) as answer:
            assert await answer.read() == b"x" * 1000
        assert journal.asked >= SILENT_LOOKS


async def test_nobody_is_asked_when_nothing_is_under_way() -> None:
    journal = Journal()

    async def refuse(writer: asyncio.StreamWriter) -> None:
        writer.write(NOT_FOUND)

    journal.answers = refuse
    async with journal.serve() as journals, asyncio.timeout(PATIENCE_S):
        for _ in range(3):
            with pytest.raises(Refused):
                async with journals.rows(0, ROWS):
                    pass
        await asyncio.sleep(3 * LOOK_S)  # nobody may ask meanwhile
        assert journal.asked == 0
        assert journals._watches == {}
