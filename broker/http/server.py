"""A small HTTP/1.1 server for an endpoint that is only read: answers that fit memory, and a limit for everything.

Written on asyncio's streams, because an HTTP framework costs 0.2 s at every start and bounds neither the time that a
peer takes for its request nor the number of connections.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple


class Limits(NamedTuple):
    """What one server allows its peers."""

    connections: int = 64  # at once; one more takes the place of the one that has kept us waiting for longest
    head_bytes: int = 16 << 10  # request line and header fields
    head_seconds: float = 10.0  # from connecting, or from a later request's first byte, to the end of the head
    keep_alive_seconds: float = 75.0  # between two requests; longer than the usual interval of scrapes
    write_seconds: float = 30.0  # for the peer to read its answer
    close_seconds: float = 2.0  # for the peer to close after the last answer


DEFAULT_LIMITS = Limits()

_REQUEST_LINE = re.compile(r"([!-~]+) ([!-~]+) HTTP/1\.([01])")
METHODS = ("GET", "HEAD")


class Answer(NamedTuple):
    """What a request is answered with; `headers` are beside Content-Type and those of the connection."""

    status: int
    body: bytes
    content_type: str
    headers: Mapping[str, str] = {}


class Request(NamedTuple):
    method: str
    path: str  # without the query
    keeps_alive: bool


Respond = Callable[[Request], Awaitable[Answer]]


class BadRequest(Exception):
    """What came is no request that this server reads; `status` says why."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class HttpServer:
    """Listens, and asks `respond` for the answer to each request; what that raises ends the connection."""

    def __init__(
        self, respond: Respond, error_answer: Callable[[int, str], Answer], limits: Limits = DEFAULT_LIMITS
    ) -> None:
        """`error_answer` makes the answer to what is no proper request, of its status and reason."""
        self._respond = respond
        self._error_answer = error_answer
        self._limits = limits
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        # Those that we wait for, in the order in which that began; the values have no meaning.
        self._waiting: dict[asyncio.Task[None], None] = {}
        self.refused = 0  # connections that came or stayed in vain because of the limit

    async def listen(self, host: str, port: int) -> int:
        """Returns the port; 0 takes any free one. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=self._limits.head_bytes)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop listening and cut off all connections."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if self._make_room():
                await self._serve_requests(task, reader, writer)
        except (OSError, TimeoutError, EOFError, asyncio.CancelledError):
            pass  # the peer is gone or too slow, or this server ends
        finally:
            self._waiting.pop(task, None)
            self._connections.discard(task)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    def _make_room(self) -> bool:
        """Whether one more connection may stay. The one that has kept us waiting for longest goes for it."""
        if len(self._connections) <= self._limits.connections:
            return True
        self.refused += 1
        longest = next(iter(self._waiting), None)
        if longest is None:
            return False
        del self._waiting[longest]
        longest.cancel()
        return True

    async def _serve_requests(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        limits = self._limits
        first_byte_seconds = limits.head_seconds
        while True:
            self._waiting[task] = None
            try:
                request = _parsed(await self._read_head(reader, first_byte_seconds))
                del self._waiting[task]
                answer = await self._respond(request)
            except BadRequest as error:
                request = Request("GET", "", keeps_alive=False)
                answer = self._error_answer(error.status, error.status.phrase)
            self._waiting.setdefault(task)
            writer.write(_encoded(request, answer))
            async with asyncio.timeout(limits.write_seconds):
                await writer.drain()
            if not request.keeps_alive:
                writer.write_eof()
                # Closing while bytes of the peer are unread would reset the connection, and take the answer with it.
                async with asyncio.timeout(limits.close_seconds):
                    while await reader.read(limits.head_bytes):
                        pass
                return
            del self._waiting[task]  # its wait for the next request begins now
            first_byte_seconds = limits.keep_alive_seconds

    async def _read_head(self, reader: asyncio.StreamReader, first_byte_seconds: float) -> bytes:
        """Up to and with the empty line. Raises BadRequest, TimeoutError, EOFError."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(first_byte_seconds) as time_out:
                first = await reader.readexactly(1)
                time_out.reschedule(loop.time() + self._limits.head_seconds)
                return first + await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE) from None


def _parsed(head: bytes) -> Request:
    """Raises BadRequest."""
    line, *fields = head.decode("latin-1").split("\r\n")[:-2]
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise BadRequest(HTTPStatus.BAD_REQUEST)
    method, target, minor = match.groups()
    headers: dict[str, str] = {}
    for field in fields:
        name, colon, value = field.partition(":")
        if not colon or not name or name != name.strip():
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        headers[name.lower()] = value.strip().lower()
    # A body is not read, so what follows it could not be told from it.
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    keeps_alive = minor == "1" and headers.get("connection") != "close" and not has_body
    return Request(method, target.partition("?")[0], keeps_alive)


def _encoded(request: Request, answer: Answer) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        *(f"{name}: {value}" for name, value in answer.headers.items()),
        *(() if request.keeps_alive else ("Connection: close",)),
    ]
    head = "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n"
    return head if request.method == "HEAD" else head + answer.body
