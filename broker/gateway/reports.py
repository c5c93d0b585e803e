"""The reports of processes to the one with the operations endpoint: those of several gateways, and of a syphon.

That one connects to the unix socket of the process, asks one question, and reads the answer until the process has
closed the connection. So a process that hangs holds up only those that wait for it, and nothing has to be mended after
either of the two was restarted.
"""

import asyncio
from typing import Any, Protocol, cast

import msgpack

from broker.listening import Listener
from broker.unix_socket import listen_at

BACKLOG = 16
# Questions of one byte, which comes whole.
READINESS, COUNTERS = b"r", b"c"


class NotReady(Exception):
    """The process does not do its work now; the text says why."""


class Reporter(Protocol):
    """The process: a gateway, or a syphon."""

    def problem(self) -> str:
        """Why it does not do its work now, for example which partition it does not reach; empty if all is well."""

    def snapshot(self) -> dict[str, Any]:
        """Its counters."""

    def accept_failed(self, error: OSError) -> None: ...


def report_at(path: str, reporter: Reporter) -> Listener:
    """Answer questions from now on. Raises OSError."""
    return Listener(_Reception(reporter), [listen_at(path, BACKLOG)])


class _Reception:
    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self.accept_failed = reporter.accept_failed

    def arrives(self, peer: str) -> asyncio.BaseProtocol:
        return _Report(self._reporter)

    def arrived(self, protocol: asyncio.BaseProtocol) -> None: ...


class _Report(asyncio.Protocol):
    """One connection of who has the endpoint."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if data == READINESS:
            self._transport.write(msgpack.packb(self._reporter.problem()))
        elif data == COUNTERS:
            self._transport.write(msgpack.packb(self._reporter.snapshot()))
        self._transport.close()


class ReportingProcess:
    """A reporting process as the endpoint sees it. The errors that it raises say what is wrong with the process."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def probe(self) -> None:
        problem: str = await self._ask(READINESS)
        if problem:
            raise NotReady(problem)

    async def snapshot(self) -> dict[str, Any]:
        counters: dict[str, Any] = await self._ask(COUNTERS)
        return counters

    async def _ask(self, question: bytes) -> Any:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except (FileNotFoundError, ConnectionRefusedError):
            raise NotReady("its process is starting, or has ended") from None
        try:
            writer.write(question)
            answer = await reader.read()
        except ConnectionError:
            answer = b""
        finally:
            writer.close()
        if not answer:
            raise NotReady("its process has ended")
        return msgpack.unpackb(answer)
