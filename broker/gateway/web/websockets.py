"""AMQP over WebSockets: the bytes of one connection in binary messages, whose borders mean nothing (amqp.md 1.9).

The handshake is a request like others. After it the connection's bytes go to a `Tunnel`, which is the transport of an
ordinary `ClientConnection`.
"""

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

from aiohttp import web
from websockets.frames import Close, CloseCode, Opcode
from websockets.utils import accept_key

from broker.errors import InvalidArgument, ServerBusy
from broker.gateway.connection import CLOSE_GRACE_SECONDS, ClientConnection
from broker.gateway.limits.queued import Queued
from broker.gateway.web.endpoint import Carrier
from broker.gateway.web.websocket_frames import MAX_FRAME_BYTES, Broken, Incoming, frame_head

PATH = "$servicebus/websocket"
# That of Service Bus' SDKs (amqp.md 1.9), and that of the binding of AMQP to WebSockets, which Go's programs offer.
SUBPROTOCOLS = ("AMQPWSB10", "amqp")
VERSION = "13"
# Of a frame from a client that has not authenticated; then it may be larger, and the frames of AMQP in it have limits.
MAX_FIRST_FRAME_BYTES = 64 << 10
MAX_REASON_CHARACTERS = 100  # in a close, which may have 123 bytes
JOINED_BYTES = 16 << 10  # up to this, a copy of a payload costs less than to write it separately


_KEY = re.compile("[A-Za-z0-9+/]{22}==")


class Gateway(Protocol):
    def arrives(self, peer: str) -> ClientConnection | None:
        """A new connection, which counts from now on; None if there is no room."""

    def arrived(self, protocol: asyncio.BaseProtocol) -> None:
        """Its `connection_made` was called, or it has failed."""

    def queue(self, waiting: Queued) -> None:
        """Call its `go_on` when it is its turn."""


def is_handshake(_: web.BaseRequest, path: str) -> bool:
    return path.lower() == PATH


def websockets(gateway: Gateway) -> Callable[[web.BaseRequest, str], Any]:
    """The handler of handshakes. It returns when the connection has ended."""

    async def serve(request: web.BaseRequest, _: str) -> web.StreamResponse:
        headers = _accept(request)
        carrier, transport = request.protocol, request.transport
        if transport is None:
            raise ConnectionResetError
        assert isinstance(carrier, Carrier)
        connection = gateway.arrives(str(request.remote))
        if connection is None:
            raise ServerBusy("The namespace has as many connections as it may have.")
        try:
            response = web.StreamResponse(status=101, headers=headers)
            response.force_close()
            await response.prepare(request)
            tunnel = Tunnel(connection, transport, gateway)
            connection.connection_made(cast(asyncio.BaseTransport, tunnel))
        finally:
            gateway.arrived(connection)
        carrier.carry(tunnel)
        await tunnel.ended.wait()
        return response

    return serve


def _accept(request: web.BaseRequest) -> dict[str, str]:
    """The headers of the answer to a handshake (RFC 6455, 4.2). Raises InvalidArgument."""
    if request.method != "GET":
        raise InvalidArgument("A WebSocket is opened by GET.")
    if "websocket" not in _tokens(request, "Upgrade") or "upgrade" not in _tokens(request, "Connection"):
        raise InvalidArgument("A WebSocket is opened with 'Upgrade: websocket' and 'Connection: Upgrade'.")
    if _tokens(request, "Sec-WebSocket-Version") != [VERSION]:
        raise InvalidArgument(f"The only Sec-WebSocket-Version that is known here is {VERSION}.")
    key = request.headers.get("Sec-WebSocket-Key", "").strip()
    if not _KEY.fullmatch(key):
        raise InvalidArgument("The Sec-WebSocket-Key is missing, or is not the Base64 of 16 bytes.")
    offered = _tokens(request, "Sec-WebSocket-Protocol")
    subprotocol = next((each for each in SUBPROTOCOLS if each.lower() in offered), None)
    if subprotocol is None:
        raise InvalidArgument(f"The client offers no subprotocol; {' or '.join(SUBPROTOCOLS)} is needed.")
    return {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Accept": accept_key(key),
        "Sec-WebSocket-Protocol": subprotocol,
    }


def _tokens(request: web.BaseRequest, name: str) -> list[str]:
    """The parts of a header that may come several times, in lower case."""
    return [each.strip().lower() for value in request.headers.getall(name, ()) for each in value.split(",")]


class Tunnel:
    """A transport for a client's connection, over the messages of a WebSocket.

    What comes is passed on at once, up to the border of what was read. It is done in steps, and others are served
    between them: a read may have very many frames.
    """

    def __init__(self, connection: ClientConnection, transport: asyncio.Transport, gateway: Gateway) -> None:
        self.ended = asyncio.Event()
        self._connection: ClientConnection | None = connection
        self._transport = transport
        self._gateway = gateway
        self._incoming = Incoming(MAX_FIRST_FRAME_BYTES)
        self._late, self._late_at = b"", 0  # what was read and not looked at is late[late_at:]
        self._is_paused = False  # the connection wants no more now
        self._is_queued = False
        self._has_closed = False  # we have sent a close
        self._grace: asyncio.TimerHandle | None = None

    # -- what comes on the socket (`broker.gateway.web.endpoint.Carried`)

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        if self._late:
            self._late, self._late_at = self._late[self._late_at :] + data, 0
        else:
            self._step(data, 0)
            if self._late:
                self._transport.pause_reading()
                if not self._is_paused:
                    self._wait_for_turn()
        if self._connection is not None:
            self._connection.carrier_bytes = len(self._late)
        return False, b""

    def go_on(self, until_s: float) -> bool:
        """Go on with what was read, until this time of `time.monotonic`. True if there is more to do."""
        while self._late and not self._is_paused:
            late, self._late = self._late, b""
            self._step(late, self._late_at)
            if time.monotonic() >= until_s:
                break
        self._is_queued = bool(self._late) and not self._is_paused
        if self._connection is not None:
            self._connection.carrier_bytes = len(self._late)
        if not (self._late or self._is_paused or self._transport.is_closing()):
            self._transport.resume_reading()
        return self._is_queued

    def _wait_for_turn(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            self._gateway.queue(self)

    def _step(self, data: bytes, at: int) -> None:
        """Take some frames; the others are late."""
        connection, incoming = self._connection, self._incoming
        if connection is None:
            return
        if incoming.largest < MAX_FRAME_BYTES and connection.has_authenticated:
            incoming.largest = MAX_FRAME_BYTES
        try:
            content, at = incoming.take(data, at)
        except Broken as broken:
            if not self._has_closed:
                self._end(Close(broken.code, str(broken)[:MAX_REASON_CHARACTERS]))
            return
        if self._has_closed:  # only the client's close counts
            if incoming.closed is not None:
                self._transport.close()
            return
        if at < len(data):
            self._late, self._late_at = data, at
        if incoming.ping is not None:
            self._send(Opcode.PONG, incoming.ping)  # to the last one, which answers those before (RFC 6455, 5.5.3)
            incoming.ping = None
        if content:
            connection.data_received(content)
        if incoming.closed is not None:
            code = incoming.closed.code
            self._end(Close(CloseCode.NORMAL_CLOSURE if code == CloseCode.NO_STATUS_RCVD else code, ""))

    def _end(self, close: Close) -> None:
        """The client has closed, or has made a mistake. It has a short time to read what there is."""
        self._send_close(close)
        self._late = b""
        if self._connection is not None:
            self._connection.eof_received()
        if self._incoming.closed is not None:
            self._transport.close()
        elif self._grace is None:
            self._grace = asyncio.get_running_loop().call_later(CLOSE_GRACE_SECONDS, self._transport.close)

    def feed_eof(self) -> None:
        """The connection is lost."""
        connection, self._connection = self._connection, None
        self._late = b""
        if self._grace is not None:
            self._grace.cancel()
        if connection is not None:
            self.ended.set()
            connection.connection_lost(None)

    def pause_writing(self) -> None:
        if self._connection is not None:
            self._connection.pause_writing()

    def resume_writing(self) -> None:
        if self._connection is not None:
            self._connection.resume_writing()

    # -- the transport, as `ClientConnection` uses it

    def write(self, data: bytes | memoryview) -> None:
        if not self._has_closed:
            self._send(Opcode.BINARY, data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._send_close(Close(CloseCode.NORMAL_CLOSURE, ""))

    def close(self) -> None:
        self.write_eof()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._is_paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        if self._late:
            self._wait_for_turn()
        else:
            self._transport.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def _send_close(self, close: Close) -> None:
        if not self._has_closed:
            self._send(Opcode.CLOSE, close.serialize())
            self._has_closed = True

    def _send(self, opcode: Opcode, payload: bytes | memoryview) -> None:
        head = frame_head(opcode, len(payload))
        if len(payload) <= JOINED_BYTES:
            self._transport.write(head + payload)
        else:
            self._transport.writelines((head, payload))
