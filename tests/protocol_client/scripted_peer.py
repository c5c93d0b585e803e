"""A server that does what a test tells it to: on the loopback interface, with the engine's own server side."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, cast

from protocol.client.connection import Connection, connect
from protocol.client.connection_string import Anonymous, Credentials
from protocol.engine.deliveries import ACCEPTED, Delivery, forget, settle
from protocol.engine.engine import Engine
from protocol.engine.links import Link, Session
from protocol.engine.sasl import Identity, IdentityKind, SaslServer

CREDIT = 100


class ScriptedPeer:
    """Replace what it should do otherwise: `on_message`, `on_attach`, `on_flow`, `on_outcome`, `speak`."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.messages: list[bytes] = []
        self.outcomes: list[tuple[int, bool]] = []
        self.detached: list[str] = []
        self.closed: list[tuple[str, str]] = []
        self.credit = CREDIT
        self.idle_time_out_ms = 60_000
        self.silent = False
        self.on_message: Callable[[Link, Delivery], None] = lambda link, delivery: settle(delivery, ACCEPTED)
        self.on_attach: Callable[[Link], None] = lambda link: link.accept(0, 0 if link.is_sender else self.credit)
        self.on_flow: Callable[[Link], None] = lambda link: link.drained() if link.drain else None
        self.on_outcome: Callable[[Link, Delivery, int], None] = lambda link, delivery, state: settle(delivery, state)
        self.side: _Side | None = None

    @property
    def engine(self) -> Engine:
        assert self.side is not None
        return self.side.engine

    async def __aenter__(self) -> Self:
        self.server = await asyncio.get_running_loop().create_server(lambda: _Side(self), "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.close()
        if self.side is not None and self.side.transport is not None:
            self.side.transport.abort()
        self.side = None
        self.links.clear()
        await self.server.wait_closed()

    async def connect(self, credentials: Credentials = Anonymous(), **options: Any) -> Connection:  # noqa: B008
        return await connect("127.0.0.1", self.port, credentials, **options)

    def link(self, address: str) -> Link:
        """The link on which the client talks about `address`."""
        return next(link for link in self.links if link.address == address)

    def send(self, address: str, message: bytes, tag: bytes = b"t" * 16, settled: bool = False) -> Delivery:
        delivery = self.link(address).send(tag, message, b"", 0, settled)
        self.flush()
        return delivery

    def flush(self) -> None:
        assert self.side is not None
        self.side.flush()


class _Side(asyncio.Protocol):
    def __init__(self, peer: ScriptedPeer) -> None:
        self.peer = peer
        self.transport: asyncio.Transport | None = None
        self.sasl: SaslServer | None = SaslServer(
            lambda name, key: Identity(IdentityKind.KEY, name) if (name, key) == ("user", "password") else None
        )
        self.engine = Engine(self, server=True, container_id="peer", idle_time_out_ms=peer.idle_time_out_ms)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's has all methods, but not the base class
        self.peer.side = self

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        if self.sasl is not None:
            self.transport.write(self.sasl.feed(data))
            if not self.sasl.finished:
                return
            if self.sasl.identity is None:
                self.transport.close()
                return
            data, self.sasl = self.sasl.rest, None
        self.engine.push(data)
        self.flush()

    def flush(self) -> None:
        if self.transport is None or self.peer.silent:
            return
        self.transport.write(self.engine.pull())
        if self.engine.finished:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self.engine.free()

    # -- protocol.engine.engine.Handler

    def on_open(self, container_id: str, hostname: str) -> None:
        self.engine.open()

    def on_session(self, session: Session) -> None: ...

    def on_session_end(self, session: Session) -> None: ...

    def on_attach(self, link: Link) -> None:
        self.peer.links.append(link)
        self.peer.on_attach(link)

    def on_detach(self, link: Link, closed: bool, condition: str, description: str) -> None:
        self.peer.detached.append(link.address or "")

    def on_flow(self, link: Link) -> None:
        self.peer.on_flow(link)

    def on_message(
        self, link: Link, delivery: Delivery, payload: bytes, batch: bool, settled: bool, state: int
    ) -> None:
        self.peer.messages.append(payload)
        self.peer.on_message(link, delivery)

    def on_oversized(self, link: Link, delivery: Delivery, size_bytes: int, settled: bool) -> None:
        raise AssertionError("no limits here")

    def on_crowded(self, link: Link, delivery: Delivery, settled: bool) -> None: ...
    def on_aborted(self, link: Link) -> None: ...

    def on_outcome(self, link: Link, delivery: Delivery, token: bytes, state: int, settled: bool) -> None:
        self.peer.outcomes.append((state, settled))
        if settled:
            forget(delivery)
        else:
            self.peer.on_outcome(link, delivery, state)

    def on_close(self, condition: str, description: str) -> None:
        self.peer.closed.append((condition, description))
