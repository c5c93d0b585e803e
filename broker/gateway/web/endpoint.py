"""The HTTP endpoint of a gateway: management, sending and receiving by requests, AMQP over WebSockets.

It listens on ports of its own. Requests are told apart by their method and path. Whatever goes wrong with one is
answered with a status and an XML body that say why.
"""

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, Protocol, cast

from aiohttp import HttpVersion10, HttpVersion11, StreamReader, web
from aiohttp.http_exceptions import InvalidURLError, LineTooLong
from aiohttp.web_log import AccessLogger
from aiohttp.web_protocol import RequestHandler

from broker import __version__
from broker.atom.documents import ERROR_TYPE, write_error
from broker.errors import BrokerError, InvalidArgument, ServerBusy
from broker.gateway.limits.budget import CONNECTION_BYTES, MEASURED_BYTES, TLS_BYTES, Budget, Holder
from broker.gateway.limits.queued import Queued
from broker.gateway.web.statuses import RequestRefused, Status, status_of
from broker.gateway.web.targets import decoded, path_of
from broker.http.connections import HttpConnection, HttpServer
from broker.listening import Listener, listen
from broker.logging import get_logger
from broker.metrics import GatewayMetrics
from broker.repeated_warning import RepeatedWarning
from broker.settings.listeners import Http
from broker.tls import ServerTls
from protocol.engine.unfinished import Pool, Unfinished
from protocol.error_texts import tracked
from protocol.errors import ProtocolError

BACKLOG = 1024
# The time within which a request must come, on a new connection and after the last answer; and then its body.
KEEP_ALIVE_SECONDS = 75.0
BODY_SECONDS = 30.0
SHUTDOWN_SECONDS = 1.0
MAX_LINE_BYTES = 16 << 10  # of the first line of a request
MAX_FIELD_BYTES = 64 << 10  # of one header
MAX_HEAD_BYTES = 128 << 10  # of a request's first line and headers, as long as they are not complete
PARSED_BYTES = 128 << 10  # of a body, or of further requests, that aiohttp keeps until they are asked for, at most
PIECE_BYTES = 16 << 10  # so much of a read is parsed at once: in small chunks it takes some milliseconds

_SERVER = f"Peeklock/{__version__}"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TOO_LONG = Status(431, 43100)
_TOO_LONG_TEXT = "The first line of the request or a header is longer than allowed, or there are too many headers."
_VERSIONS = (HttpVersion10, HttpVersion11)
_HOST = re.compile(r"[A-Za-z0-9._~-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")

log = get_logger("gateway")

Serve = Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]
"""Answers a request, given its decoded path. Raises BrokerError, ProtocolError or RequestRefused."""


class _Request(web.BaseRequest):
    is_known = True  # its version


def _is_known(request: web.BaseRequest) -> bool:
    return isinstance(request, _Request) and request.is_known


class Route:
    """Requests of one kind. `takes` is asked with the method and the decoded path. `close` is awaited at the end."""

    def __init__(
        self,
        name: str,
        takes: Callable[[web.BaseRequest, str], bool],
        serve: Serve,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.name = name
        self.takes = takes
        self.serve = serve
        self.close = close


class HttpEndpoint:
    """Listening sockets, and the connections that they have accepted."""

    def __init__(
        self,
        http: Http,
        routes: Sequence[Route],
        metrics: GatewayMetrics,
        denials: RepeatedWarning,
        max_body_bytes: int,
        queue: Callable[[Queued], None],
        budget: Budget,
    ) -> None:
        """The first of the routes that takes a request answers it; the last takes all. `queue`: see `Home`."""
        self._http = http
        self._routes = routes
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._queue = queue
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self._server = _Server(self._handle, request_factory=self._request)
        self._listeners: list[Listener] = []
        self._count = 0  # connections of HTTP, from accept on, that carry nothing else
        self._busy: set[RequestHandler] = set()  # connections with a request that is being answered
        self._denials = denials
        self._full = RepeatedWarning("HTTP connections refused")
        self._failures = RepeatedWarning("no HTTP connection can be accepted")

    async def listen(self, host: str, port: int, tls: ServerTls | None, *, reuse_port: bool) -> int:
        """Returns the port. Raises OSError."""
        sockets = await listen(host, port, backlog=BACKLOG, reuse_port=reuse_port)
        listener = Listener(self, sockets, tls)
        self._listeners.append(listener)
        return listener.port

    def stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()

    async def close(self) -> None:
        """Let requests that are being answered end, for a short time."""
        await self._server.shutdown(SHUTDOWN_SECONDS)
        for route in self._routes:
            if route.close is not None:
                await route.close()

    # -- broker.listening.Reception

    def arrives(self, peer: str) -> asyncio.BaseProtocol | None:
        if self._count >= self._http.max_connections and not self._make_room():
            self._metrics.connections_refused += 1
            self._full.happened("http.max_connections reached", last_peer=peer)
            return None
        carrier = self._server()
        carrier.on_left = self._left
        carrier.queue = self._queue
        carrier.budget = self._budget
        self._count += 1
        self._budget.expect(TLS_BYTES)
        return carrier

    def arrived(self, protocol: asyncio.BaseProtocol) -> None:
        self._budget.expect(-TLS_BYTES)
        carrier = cast(Carrier, protocol)
        if carrier.transport is None:  # the TLS handshake has failed
            carrier.leave()

    def _left(self) -> None:
        self._count -= 1

    def look_after(self) -> None:
        """Some times a second: measure what connections hold."""
        for connection in self._server.connections:
            cast(Carrier, connection).look_after()

    @property
    def count(self) -> int:
        """Connections of HTTP that carry nothing else."""
        return self._count

    def accept_failed(self, error: OSError) -> None:
        self._metrics.accept_failures += 1
        self._failures.happened(error.strerror or str(error))

    def _make_room(self) -> bool:
        """Close the connection that has been without a request for the longest time, if there is one."""
        for connection in self._server.connections:
            transport = connection.transport
            if connection not in self._busy and transport is not None and not transport.is_closing():
                transport.abort()
                return True
        return False

    # -- requests

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        """Make the request. Nothing may fail here: nobody would answer."""
        is_known = message.version in _VERSIONS
        if not is_known:  # its answer would be of this version, too
            message = message._replace(version=HttpVersion11)
        request = _Request(message, payload, protocol, writer, task, self._loop, client_max_size=self._max_body_bytes)
        request.is_known = is_known
        return request

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        response = await self._answer(request)
        response.headers.setdefault("Server", _SERVER)
        if "Transfer-Encoding" in request.headers or not _is_known(request):
            # aiohttp takes the last trailer of a chunked body for a header of the next request.
            response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = cast(Carrier, request.protocol)
        self._busy.add(connection)
        name = "none"
        try:
            _require_framing(request)
            path = decoded(path_of(request.raw_path))
            route = next(each for each in self._routes if each.takes(request, path))
            name = route.name
            response = await route.serve(request, path)
            if "Authorization" in request.headers:
                connection.is_authorized = True
        except (BrokerError, ProtocolError, RequestRefused) as error:
            status = status_of(error)
            if status.http == 401:
                self._metrics.authentication_failures += 1
                self._denials.happened(str(error)[:200], peer=str(request.remote))
            response = error_response(status, str(error))
            if connection.refusal:
                response.force_close()
        except web.HTTPException as error:
            response = error_response(Status(error.status, error.status * 100), f"{error.reason}.")
            if allowed := error.headers.get("Allow"):
                response.headers["Allow"] = allowed
        except TimeoutError:
            response = error_response(Status(408, 40800), f"The body did not come within {BODY_SECONDS:g} s.")
            response.force_close()
        except (ConnectionError, asyncio.CancelledError):
            raise  # the client is gone
        except Exception:
            log.exception("HTTP request failed", method=request.method, route=name)
            response = error_response(Status(500, 50000), "The service was unable to process the request.")
        finally:
            self._busy.discard(connection)
        self._metrics.http_requests[f"{name} {response.status}"] += 1
        return response


def _require_framing(request: web.BaseRequest) -> None:
    """Raise InvalidArgument for what another HTTP server, or a proxy in front, may read in another way."""
    if not _is_known(request):
        raise InvalidArgument("Only HTTP/1.1 and HTTP/1.0 are spoken here.")
    coding = request.headers.get("Transfer-Encoding", "chunked")
    if coding.strip().lower() != "chunked":
        raise InvalidArgument("The only Transfer-Encoding that is known here is chunked.")


async def body_of(request: web.BaseRequest, max_bytes: int, pool: Pool) -> bytes:
    """The body as it was sent, whatever its Content-Encoding is. While it comes, it takes its bytes from `pool`.

    Raises InvalidArgument, ServerBusy, TimeoutError, HTTPRequestEntityTooLarge.
    """
    if (request.content_length or 0) > max_bytes:
        raise web.HTTPRequestEntityTooLarge(max_bytes, request.content_length or 0)
    if request.headers.get("Expect", "").strip().lower() == "100-continue" and request.version == HttpVersion11:
        assert request.transport is not None
        request.transport.write(_CONTINUE)
    body, held = bytearray(), Unfinished(pool, max_bytes)
    carrier = cast(Carrier, request.protocol)
    try:
        async with asyncio.timeout(BODY_SECONDS) as limit:
            carrier.body = limit, held
            while piece := await _read(request.content):
                if len(body) + len(piece) > max_bytes:
                    raise web.HTTPRequestEntityTooLarge(max_bytes, len(body) + len(piece))
                if not held.take(len(piece)):
                    raise ServerBusy("The bodies of all requests that are coming in take as much as they may.")
                body += piece
    except TimeoutError:
        if not carrier.refusal:
            raise
    finally:
        held.give_back_all()
        carrier.body = None
    if carrier.refusal:
        raise ServerBusy(carrier.refusal)
    return bytes(body)


async def _read(content: StreamReader) -> bytes:
    """Read what has come of a body. Raises InvalidArgument, ConnectionError."""
    try:
        return await content.readany()
    except (web.RequestPayloadError, ConnectionError) as error:
        # The stream keeps its error, which would refer to all that called this, and so to the stream.
        error.with_traceback(None)
        is_gone = isinstance(error, ConnectionError)
    if is_gone:
        raise ConnectionResetError("The client is gone.")
    raise InvalidArgument("The body cannot be read: it ends early, or is not chunked as it should be.")


def base_url(request: web.BaseRequest) -> tuple[str, str]:
    """Scheme and host by which the client has reached the broker. Raises InvalidArgument."""
    host = request.headers.get("Host", "")
    if not _HOST.fullmatch(host):
        raise InvalidArgument("The Host header is missing or is no host.")
    return request.scheme, host


def error_response(status: Status, text: str) -> web.Response:
    """The text is for the user. It says what happened; sub code and tracking id go with it."""
    headers = {"Content-Type": ERROR_TYPE, "Server": _SERVER}
    if status.http == 503:
        headers["Retry-After"] = "1"
    return web.Response(status=status.http, text=None, body=_error(status, text), headers=headers)


def _error(status: Status, text: str) -> bytes:
    if not text.startswith("SubCode="):  # some texts of the service have it with a colon
        text = f"SubCode={status.sub_code}. {text}"
    detail = tracked(text, uuid.uuid4(), int(time.time() * 1000))
    return write_error(status.http, detail).encode()


class Carried(Protocol):
    """Takes over a connection whose client has switched to another protocol."""

    def feed_data(self, data: bytes) -> tuple[bool, bytes]: ...

    def feed_eof(self) -> None:
        """The connection is lost."""

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


class Carrier(Holder, HttpConnection):
    """A connection whose malformed requests are answered in the form of all other errors.

    It counts for the budget until it carries something else.
    """

    carried: Carried | None = None
    body: tuple[asyncio.Timeout, Unfinished] | None = None  # that of the request which is being answered, as it comes
    refusal = ""  # why the rest of it is not taken
    is_authorized = False  # a token of the client gave it what it asked for
    head_bytes = 0  # of a request whose head is not complete
    on_left: Callable[[], None] | None = None  # it is called when the connection ends, or carries something else
    queue: Callable[[Queued], None]
    _unanswered_bytes = 0  # read since a request is being answered; aiohttp keeps some of them
    _late, _late_at = b"", 0  # what was read and not parsed is late[late_at:]
    _is_queued = False

    def leave(self) -> None:
        self.budget.leave(self)
        if self.on_left is not None:
            self.on_left()
            self.on_left = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.budget.enter(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._late = b""
        super().connection_lost(exc)
        self.leave()

    def data_received(self, data: bytes) -> None:
        """A large read is parsed piece by piece, and others are served between."""
        self.moved_bytes += len(data)
        if self._late and data:
            self._late, self._late_at = self._late[self._late_at :] + data, 0
        elif len(data) <= PIECE_BYTES or self.carried is not None:
            self._parse(data)
        else:
            self._late, self._late_at = data, 0
            self._parse_piece()
            self._hold()
            self._wait_for_turn()

    # -- broker.gateway.limits.budget.Holder

    @property
    def peer(self) -> str:
        return str(self.peername)

    @property
    def has_rights(self) -> bool:
        return self.is_authorized

    def held_bytes(self) -> int:
        transport = self.transport
        if transport is None:
            return 0
        held = CONNECTION_BYTES + len(self._late) + self.head_bytes + transport.get_write_buffer_size()
        if self.ssl_context is not None:
            held += TLS_BYTES
        return held + (min(self._unanswered_bytes, PARSED_BYTES) if self.body is None else self.body[1].held_bytes)

    def end_for_room(self, text: str) -> None:
        """Refuse the body that is coming; nothing else can be answered."""
        if self.body is None:
            self.cut_off(text)
        else:
            self.refusal = text
            self.body[0].reschedule(0.0)

    def cut_off(self, text: str) -> None:
        if self.transport is not None:
            self.transport.abort()

    def go_on(self, until_s: float) -> bool:
        while self._late and not self._is_held:
            self._parse_piece()
            if time.monotonic() >= until_s:
                break
        self._is_queued = bool(self._late) and not self._is_held
        if self.transport is not None and not (self._late or self._is_held):
            self.transport.resume_reading()
        return self._is_queued

    @property
    def _is_held(self) -> bool:
        """aiohttp wants no more now. It has the second reason from 3.14 on."""
        return self._reading_paused or getattr(self, "_buffer_paused", False)

    def _hold(self) -> None:
        if self.transport is not None:
            self.transport.pause_reading()

    def _wait_for_turn(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            self.queue(self)

    def resume_reading(self, *options: bool, **named: bool) -> None:
        """Called by aiohttp when it wants more again."""
        super().resume_reading(*options, **named)
        if self._late:  # aiohttp before 3.14 has resumed the transport itself
            self._hold()
            self._wait_for_turn()

    def _resume_transport_reading(self) -> None:
        """The same, from 3.14 on; `resume_reading` calls it, too."""
        if self._late:
            self._wait_for_turn()
        else:
            super()._resume_transport_reading()

    def _parse_piece(self) -> None:
        piece = self._late[self._late_at : self._late_at + PIECE_BYTES]
        self._late_at += len(piece)
        if self._late_at == len(self._late):
            self._late = b""
        self._parse(piece)

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if self.carried is not None:
            return
        is_awaited = self._waiter is not None and not self._waiter.done()  # the next request
        self.head_bytes = self.head_bytes + len(data) if is_awaited else 0
        self._unanswered_bytes = 0 if is_awaited else self._unanswered_bytes + len(data)
        if self.moved_bytes > MEASURED_BYTES:
            self.measure()
        if self.head_bytes > MAX_HEAD_BYTES and self.transport is not None:
            content = _error(_TOO_LONG, _TOO_LONG_TEXT)
            lines = (f"HTTP/1.1 431 {HTTPStatus(431).phrase}", f"Content-Type: {ERROR_TYPE}", "Connection: close")
            head = "\r\n".join((*lines, f"Server: {_SERVER}", f"Content-Length: {len(content)}", "", ""))
            self.transport.write(head.encode() + content)
            self.force_close()

    def carry(self, carried: Carried) -> None:
        """All further bytes are for this, also those that have come already."""
        self.leave()
        self.carried = carried
        self.set_parser(cast(Any, carried))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.carried is not None:
            self.carried.pause_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.carried is not None:
            self.carried.resume_writing()

    def error_answer(
        self, request: web.BaseRequest, status: int, exc: BaseException | None, message: str | None
    ) -> web.StreamResponse:
        if isinstance(exc, LineTooLong) or message == "Too many headers received":
            response = error_response(_TOO_LONG, _TOO_LONG_TEXT)
        elif isinstance(exc, InvalidURLError):
            response = error_response(Status(400, 40000), "The target of the request is no URL.")
        else:
            [text, *_] = (message or "").splitlines() or [""]  # the rest shows what was sent
            why = f": {text.rstrip(': ')}" if text and status < 500 else ""
            response = error_response(Status(status, status * 100), f"The request cannot be read{why}.")
        response.force_close()
        return response


class _Server(HttpServer):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(
            *arguments,
            **options,
            keepalive_timeout=KEEP_ALIVE_SECONDS,
            lingering_time=1.0,
            access_log=None,
            access_log_class=AccessLogger,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_FIELD_BYTES,
            auto_decompress=False,  # a body is what was sent, and no small one becomes a large one
        )

    def __call__(self) -> Carrier:
        return Carrier(self, loop=self._loop, **self._kwargs)
