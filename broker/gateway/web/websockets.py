"""AMQP over WebSockets: the bytes of one connection in binary messages, whose borders mean nothing (amqp.md 1.9).

The handshake is a request like others. After it the connection's bytes go to a `Tunnel`, which is the transport of an
ordinary `ClientConnection`.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, cast

from aiohttp import web
from websockets.datastructures import Headers
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import SERVER, State
from websockets.protocol import Protocol as Framing
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from broker.errors import InvalidArgument, ServerBusy
from broker.gateway.connection import CLOSE_GRACE_SECONDS, ClientConnection
from broker.gateway.web.endpoint import Carrier

PATH = "$servicebus/websocket"
# That of Service Bus' SDKs (amqp.md 1.9), and that of the binding of AMQP to WebSockets, which Go's programs offer.
SUBPROTOCOLS = [Subprotocol("AMQPWSB10"), Subprotocol("amqp")]
# Clients put what they have to write into one message; the frames in it have limits of their own.
MAX_MESSAGE_BYTES = 16 << 20


class Gateway(Protocol):
    def arrives(self, peer: str) -> ClientConnection | None:
        """A new connection, which counts from now on; None if there is no room."""

    def arrived(self, protocol: asyncio.BaseProtocol) -> None:
        """Its `connection_made` was called, or it has failed."""


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
            tunnel = Tunnel(connection, transport)
            connection.connection_made(cast(asyncio.BaseTransport, tunnel))
        finally:
            gateway.arrived(connection)
        carrier.carry(tunnel)
        await tunnel.ended.wait()
        return response

    return serve


def _accept(request: web.BaseRequest) -> dict[str, str]:
    """The headers of the answer to a handshake. Raises InvalidArgument."""
    if request.method != "GET":
        raise InvalidArgument("A WebSocket is opened by GET.")
    handshake = ServerProtocol(subprotocols=SUBPROTOCOLS)
    answer = handshake.accept(Request(request.raw_path, Headers(request.headers.items())))
    if answer.status_code != 101:
        raise InvalidArgument((answer.body or b"").decode().partition("\n")[0])
    if handshake.subprotocol is None:
        raise InvalidArgument(f"The client offers no subprotocol; {' or '.join(SUBPROTOCOLS)} is needed.")
    return {name: value for name, value in answer.headers.raw_items() if name not in ("Date", "Content-Type", "Server")}


class Tunnel:
    """A transport for a client's connection, over the messages of a WebSocket."""

    def __init__(self, connection: ClientConnection, transport: asyncio.Transport) -> None:
        self.ended = asyncio.Event()
        self._connection = connection
        self._transport = transport
        self._framing = Framing(SERVER, max_size=MAX_MESSAGE_BYTES)
        self._ending = False

    # -- what aiohttp calls on a parser of all further bytes

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        framing = self._framing
        framing.receive_data(data)
        self._send()  # pongs, and the answer to a close
        content = []
        for frame in cast(list[Frame], framing.events_received()):
            if frame.opcode is Opcode.BINARY or frame.opcode is Opcode.CONT:
                content.append(bytes(frame.data))
            elif frame.opcode is Opcode.TEXT:
                framing.fail(CloseCode.UNSUPPORTED_DATA, "AMQP is in binary messages")
                self._send()
        if content:
            self._connection.data_received(b"".join(content))
        if framing.state is not State.OPEN:
            self._end()
        return False, b""

    def _end(self) -> None:
        """Either side has sent a close. Wait shortly for the client's, so that it can still read ours."""
        if not self._ending:
            self._ending = True
            self._connection.eof_received()
            asyncio.get_running_loop().call_later(CLOSE_GRACE_SECONDS, self._transport.close)
        if self._framing.close_rcvd is not None:
            self._transport.close()

    def feed_eof(self) -> None:
        """The connection is lost."""
        if not self.ended.is_set():
            self.ended.set()
            self._connection.connection_lost(None)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    # -- the transport, as `ClientConnection` uses it

    def write(self, data: bytes) -> None:
        if self._framing.state is State.OPEN:
            self._framing.send_binary(data)
            self._send()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if self._framing.state is State.OPEN:
            self._framing.send_close(CloseCode.NORMAL_CLOSURE)
            self._send()

    def close(self) -> None:
        self.write_eof()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def _send(self) -> None:
        for data in self._framing.data_to_send():
            if data:  # the empty one is the end, which `close` brings
                self._transport.write(data)
