"""An asyncio client: a connection on `protocol.engine.engine`, and the links on it.

    async with await connect_to("Endpoint=sb://localhost;...") as connection:
        sender = await connection.sender("orders")
        await sender.send(Message.of(b"hello", message_id="1").encode())

        receiver = await connection.receiver("orders", credit=100)
        async for received in receiver:
            print(received.message().content())
            await receiver.accept(received)

Errors are in `protocol.client.errors`. A lost connection stays lost; the caller connects again.
"""

import asyncio
import errno
import re
import socket
import ssl
import uuid
from collections.abc import Mapping
from typing import Any, Self, cast

from protocol import conditions
from protocol.client.connection_string import (
    Anonymous,
    ConnectionString,
    Credentials,
    Plain,
    SharedAccessKey,
    SharedAccessSignature,
)
from protocol.client.errors import AuthenticationFailed, ClientError, ConnectionLost, LinkClosed, LinkDetached
from protocol.client.link_end import LinkEnd
from protocol.client.links import Receiver, Sender
from protocol.client.requests import (
    MAX_REQUESTS,
    UINT_MAX,
    Claims,
    Management,
    QueueCounts,
    Requests,
    ResponseLink,
    needs_peeklock,
    queue_counts,
)
from protocol.client.session_receiver import SessionReceiver
from protocol.client.sockets import end_when_silent
from protocol.client.transactions import Coordinator
from protocol.codec import Symbol, UInt
from protocol.engine.deliveries import Delivery
from protocol.engine.engine import Engine
from protocol.engine.links import Link, Session
from protocol.engine.sasl import ANONYMOUS, PLAIN, SaslClient, SaslRefused, plain_response
from protocol.errors import ProtocolError
from protocol.symbols import SESSION_FILTER, TIMEOUT, TRANSFER_DESTINATION_ADDRESS

DEFAULT_TIMEOUT_SECONDS = 60.0
CLOSE_SECONDS = 2.0
IDLE_TIME_OUT_MS = 60_000
# Output that may wait for the socket; beyond it senders wait.
OUTPUT_HIGH_BYTES = 1 << 20
# Brokers allow some hundred links in a session; further links get another session.
MAX_LINKS_PER_SESSION = 200
MAX_COUNTS_PER_REQUEST = 1000


async def connect(
    host: str,
    port: int,
    credentials: Credentials = Anonymous(),  # noqa: B008 - it is frozen
    *,
    tls: ssl.SSLContext | None = None,
    hostname: str | None = None,
    container_id: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_SECONDS,
    idle_time_out_ms: int = IDLE_TIME_OUT_MS,
) -> "Connection":
    """Connect, authenticate and open. `hostname` is sent to the peer in place of `host`.

    `timeout_s` is for this, and for later answers of the peer that have no time-out of their own. If the peer is silent
    for `idle_time_out_ms`, the connection is closed. Tokens of a shared access key are put when a link needs one, not
    here. Raises ConnectionLost, or AuthenticationFailed.
    """
    hostname = hostname or host
    connection = Connection(credentials, hostname, container_id or uuid.uuid4().hex, timeout_s, idle_time_out_ms)
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().create_connection(
                lambda: connection, host, port, ssl=tls, server_hostname=hostname if tls else None
            )
            if not await connection.opened:
                connection._check()
    except TimeoutError:
        connection.abort()
        raise ConnectionLost("", f"cannot connect to {host} port {port} within {timeout_s} s") from None
    except ConnectionLost as error:
        connection.abort()
        text = f"cannot connect to {host} port {port}: {error.description}"
        raise ConnectionLost(error.condition, text) from error.__cause__
    except OSError as error:
        raise ConnectionLost("", f"cannot connect to {host} port {port}: {_reason(error)}") from error
    except BaseException:
        connection.abort()
        raise
    return connection


async def connect_to(
    connection_string: str | ConnectionString,
    *,
    tls: ssl.SSLContext | None = None,
    container_id: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_SECONDS,
) -> "Connection":
    """Connect as a connection string says. `tls` is used if it needs TLS; by default the system's authorities count.

    Raises InvalidConnectionString, and the errors of `connect`.
    """
    if isinstance(connection_string, str):
        connection_string = ConnectionString.parse(connection_string)
    target = connection_string
    if target.tls:
        tls = tls or ssl.create_default_context()
    return await connect(
        target.host,
        target.port,
        target.credentials,
        tls=tls if target.tls else None,
        container_id=container_id,
        timeout_s=timeout_s,
    )


class Connection(asyncio.Protocol):
    """One connection; made by `connect`. Also the engine's handler."""

    engine: Engine

    def __init__(
        self, credentials: Credentials, hostname: str, container_id: str, timeout_s: float, idle_time_out_ms: int
    ) -> None:
        self.hostname = hostname
        self.timeout_s = timeout_s
        # False if it ended before. Not the error: the call that raises it has the connection, which would keep it.
        self.opened: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._is_write_paused = False
        self._unwritten_bytes = 0  # bytes of messages in the engine
        self._container_id = container_id
        self._idle_time_out_ms = idle_time_out_ms
        self._sasl: SaslClient | None = _sasl(credentials, hostname)
        self._claims: Claims | None = None
        if isinstance(credentials, SharedAccessKey | SharedAccessSignature):
            self._claims = Claims(self, credentials)
        self._transport: asyncio.Transport | None = None
        self._failure: ClientError | None = None
        self._lost = asyncio.Event()
        self._flush_scheduled = False
        self._timer: asyncio.Handle | None = None
        self._sessions: list[Session] = []
        self._requests: dict[str, Requests] = {}
        self._requests_lock = asyncio.Lock()
        self._link_count = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- links

    async def sender(self, address: str, *, max_in_flight: int = 1000, through: str | None = None) -> Sender:
        """Attach a sender. At most `max_in_flight` of its messages wait for their outcome at once.

        With `through`, messages go to that queue or topic first, which hands them on to `address` (amqp.md 10.4): so
        they can be in one transaction with what is done there.

        Raises LinkDetached with the peer's reason, AuthenticationFailed, ConnectionLost or TimeoutError.
        """
        await self.authorize(address)
        if through is None:
            return await self._attach_sender(address, address, max_in_flight)
        await self.authorize(through)
        sender = Sender(self, through, max_in_flight)
        properties = {TRANSFER_DESTINATION_ADDRESS: address}
        await self._attach(sender, source=through, target=through, properties=properties)
        return sender

    async def receiver(self, address: str, *, credit: int = 100, receive_and_delete: bool = False) -> Receiver:
        """Attach a receiver, which may have `credit` messages that are not taken yet; raises as `sender`."""
        await self.authorize(address)
        receiver = Receiver(self, address, credit, receive_and_delete)
        await self._attach(receiver, source=address, target=self._next_name(), receive_and_delete=receive_and_delete)
        return receiver

    async def accept_session(self, address: str, session_id: str) -> SessionReceiver:
        """Lock a session of a queue or subscription that requires sessions, and receive its messages.

        The receiver has no credit: see `Receiver.fetch`. Raises as `sender`; LinkDetached with the condition
        SESSION_CANNOT_BE_LOCKED if another receiver has the session.
        """
        return await self._attach_session(address, session_id, 0.0)

    async def accept_next_session(self, address: str, wait_s: float) -> SessionReceiver | None:
        """Accept any session that has messages and no receiver; None if there is none in `wait_s`."""
        try:
            return await self._attach_session(address, None, wait_s)
        except LinkDetached as error:
            if error.condition == conditions.TIMEOUT:
                return None
            raise

    async def _attach_session(self, address: str, session_id: str | None, wait_s: float) -> SessionReceiver:
        await self.authorize(address)
        receiver = SessionReceiver(self, address)
        properties = {TIMEOUT: UInt(min(wait_s * 1000, UINT_MAX))} if session_id is None else None
        await self._attach(
            receiver,
            source=address,
            target=self._next_name(),
            properties=properties,
            filters={SESSION_FILTER: session_id},
            wait_s=wait_s,
        )
        return receiver

    async def coordinator(self) -> Coordinator:
        """Attach to the peer's coordinator of transactions; raises as `sender`."""
        self._check()
        coordinator = Coordinator(self)
        await self._attach(coordinator, source="", target="")
        return coordinator

    async def management(self, entity: str) -> Management:
        """The management node of `entity`, such as a queue or its dead-letter queue; raises as `sender`."""
        await self.authorize(entity)
        return Management(await self.requests(f"{entity}/$management" if entity else "$management"), self.timeout_s)

    async def requests(self, node: str) -> Requests:
        """The links to `node`, attached at the first call; raises as `sender`."""
        async with self._requests_lock:
            requests = self._requests.get(node)
            if requests is None or requests.closed:
                responses = ResponseLink(self, node)
                reply_to = self._next_name()
                await self._attach(responses, source=node, target=reply_to, receive_and_delete=True)
                sender = await self._attach_sender(node, reply_to, MAX_REQUESTS)
                self._check()
                requests = self._requests[node] = Requests(sender, responses, reply_to)
            return requests

    async def move(self, path: str, partition: int) -> None:
        """Move a queue, or a topic with its subscriptions, to this partition. Returns when that is done."""
        operation, body = "peeklock:move-entity", {"path": path, "partition": partition}
        management = await self._namespace(operation)
        await management.request_of_peeklock(operation, body, timeout_s=float("inf"))

    async def counts(self) -> dict[str, QueueCounts]:
        """The counts of all entities of a Peeklock namespace that hold messages, in the order of their names.

        Needs the right Manage; raises RequestFailed, and as `sender`.
        """
        operation = "peeklock:list-counts"
        management = await self._namespace(operation)
        found: dict[str, QueueCounts] = {}
        while True:
            body = {"after": next(reversed(found), ""), "count": MAX_COUNTS_PER_REQUEST}
            answer = await management.request_of_peeklock(operation, body)
            page = {str(item["name"]): queue_counts(item["counts"]) for item in answer["entities"]}
            found |= page
            if not page:
                return found

    async def _namespace(self, operation: str) -> Management:
        """The management node of the namespace, which only Peeklock has. Raises NeedsPeeklock, and as `sender`."""
        try:
            return await self.management("")
        except LinkDetached as error:
            if error.condition == conditions.UNAUTHORIZED_ACCESS or self.closed:
                raise
            raise needs_peeklock(operation, error) from error

    async def authorize(self, address: str) -> None:
        """Put a token for the entity of this address, or for the namespace if it is empty, as links do by themselves.

        Raises AuthenticationFailed, LinkDetached if there is no such entity, ConnectionLost or TimeoutError.
        """
        self._check()
        if self._claims is not None:
            await self._claims.ensure(address)

    async def _attach_sender(self, address: str, source: str, max_in_flight: int) -> Sender:
        sender = Sender(self, address, max_in_flight)
        await self._attach(sender, source=source, target=address)
        return sender

    async def _attach(
        self,
        end: LinkEnd,
        *,
        source: str,
        target: str,
        receive_and_delete: bool = False,
        properties: Mapping[Symbol, Any] | None = None,
        filters: Mapping[Symbol, Any] | None = None,
        wait_s: float = 0.0,
    ) -> None:
        """`wait_s` is how long the peer may take besides the time that every answer may take."""
        self._check()
        if isinstance(end, Coordinator):
            end.link = self.engine.attach_coordinator(self._session(), self._next_name())
        else:
            end.link = self.engine.attach(
                self._session(),
                self._next_name(),
                sender=isinstance(end, Sender),
                source=source,
                target=target,
                receive_and_delete=receive_and_delete,
                properties=properties,
                filters=filters,
            )
        end.link.context = end
        self.flush_soon()
        try:
            async with asyncio.timeout(wait_s + self.timeout_s):
                if not await end.attached:
                    end.check()
        except TimeoutError:
            raise TimeoutError(f"no answer to the attach of a link to {end.address}") from None
        finally:
            # The caller has stopped waiting and cannot use a link that is attached late.
            if not end.attached.done() or end.attached.cancelled():
                end.link.detach()
                self.flush_soon()

    def _session(self) -> Session:
        for session in self._sessions:
            if len(session.links) < MAX_LINKS_PER_SESSION:
                return session
        session = self.engine.begin()
        self._sessions.append(session)
        return session

    def _next_name(self) -> str:
        self._link_count += 1
        return f"{self._container_id}-{self._link_count}"

    # -- the end

    @property
    def closed(self) -> bool:
        return self._failure is not None

    async def wait_closed(self) -> ClientError:
        """Wait until the connection has ended; returns the reason."""
        await self._lost.wait()
        assert self._failure is not None
        return self._failure.again()

    async def close(self) -> None:
        """Close the connection; calls that wait on links fail with LinkClosed."""
        if self._failure is None:
            self._failure = LinkClosed("", "the connection was closed")
            for link in self.engine.links.values():
                if isinstance(link.context, LinkEnd) and not link.closed:
                    link.context.prepare_close()
                    link.context.fail(self._failure)
            self.engine.close()
            self.flush()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._lost.wait()
        except TimeoutError:
            self.abort()
            await self._lost.wait()

    def abort(self) -> None:
        """End the connection without a close, as if it had broken."""
        if self._transport is not None:
            self._transport.abort()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.again()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's has all methods, but not the base class
        self._transport = transport
        transport.set_write_buffer_limits(high=OUTPUT_HIGH_BYTES)
        end_when_silent(transport.get_extra_info("socket"))
        assert self._sasl is not None
        transport.write(self._sasl.start())

    def data_received(self, data: bytes) -> None:
        try:
            if self._sasl is not None:
                data = self._negotiate(data)
            if data and self._sasl is None:
                self.engine.push(data)
        except SaslRefused as error:
            self._fault(AuthenticationFailed(conditions.UNAUTHORIZED_ACCESS, str(error)))
        except ProtocolError as error:
            self._fault(ConnectionLost(conditions.DECODE_ERROR, f"the peer breaks the protocol: {error}"))
        else:
            self.flush()

    def eof_received(self) -> bool:
        if self._sasl is None:
            self.engine.input_ended()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        # Nothing of the connection refers to it any more, so its memory is free at once, as the engine's is.
        if self._claims is not None:
            self._claims.stop()
            self._claims = None
        self._requests.clear()
        if self._failure is None:
            reason = error.strerror if isinstance(error, OSError) else None
            self._failure = ConnectionLost("", reason or str(error or "the peer has closed the connection"))
        failure = self._failure
        if not self.opened.done():
            self.opened.set_result(False)
        if self._sasl is None:
            ends = [(link, link.context) for link in self.engine.links.values()]
            self.engine.free()
            for link, end in ends:
                link.closed = True
                if isinstance(end, LinkEnd):
                    end.on_detached(failure)
        self._lost.set()

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self.flush()
        if not self.is_congested:
            self._resume_senders()

    def _resume_senders(self) -> None:
        if self._sasl is None and self._transport is not None:
            for link in self.engine.links.values():
                if isinstance(link.context, LinkEnd) and not link.closed:
                    link.context.on_resumed()

    def _negotiate(self, data: bytes) -> bytes:
        """Feed the SASL layer; returns the rest, which belongs to AMQP."""
        sasl = self._sasl
        assert sasl is not None
        assert self._transport is not None
        answer = sasl.feed(data)
        if answer:
            self._transport.write(answer)
        if not sasl.finished:
            return b""
        self.engine = Engine(
            self,
            server=False,
            container_id=self._container_id,
            hostname=self.hostname,
            idle_time_out_ms=self._idle_time_out_ms,
        )
        self._sasl = None
        self.engine.open()
        return sasl.rest

    def _fault(self, error: ClientError) -> None:
        self._failure = self._failure or error
        assert self._transport is not None
        if self._sasl is None:
            self.engine.close(error.condition, error.description)
            self.flush()
        self._hang_up()

    def _hang_up(self) -> None:
        """Close the socket when all is written, or when the peer has not read it for a while."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.close()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(CLOSE_SECONDS, self.abort)

    # -- output

    @property
    def is_congested(self) -> bool:
        """True if too much output waits for the socket, so that messages must wait."""
        return self._is_write_paused or self._unwritten_bytes > OUTPUT_HIGH_BYTES

    def flush_soon(self, message_bytes: int = 0) -> None:
        """Write the output of all links of this turn of the loop, at once."""
        self._unwritten_bytes += message_bytes
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        self.flush()

    def flush(self) -> None:
        """Write the output now. Senders that waited for that go on."""
        transport = self._transport
        if transport is None or self._sasl is not None or self._is_write_paused:
            return
        was_congested = self.is_congested
        output = self.engine.pull()
        self._unwritten_bytes = 0
        if output:
            transport.write(output)
        if was_congested and not self.is_congested:
            self._resume_senders()
        if self.engine.finished:
            if self._failure is None:
                condition, description = self.engine.fault()
                self._failure = ConnectionLost(condition, description or "the connection was closed")
            self._hang_up()

    def _tick(self) -> None:
        """Send heartbeats, and check the peer's silence."""
        loop = asyncio.get_running_loop()
        now_ms = int(loop.time() * 1000)
        deadline_ms = self.engine.tick(now_ms)
        self.flush()
        if deadline_ms and self._transport is not None and not self._transport.is_closing():
            self._timer = loop.call_later(max(0, deadline_ms - now_ms) / 1000, self._tick)

    # -- protocol.engine.engine.Handler

    def on_open(self, container_id: str, hostname: str) -> None:
        if not self.opened.done():
            self.opened.set_result(True)
        self._timer = asyncio.get_running_loop().call_soon(self._tick)  # not here, inside the engine

    def on_session(self, session: Session) -> None: ...

    def on_session_end(self, session: Session) -> None:
        if session in self._sessions:
            self._sessions.remove(session)

    def on_attach(self, link: Link) -> None:
        if not isinstance(link.context, LinkEnd):
            link.refuse(conditions.NOT_ALLOWED, "This container attaches its links itself.")
        elif not link.is_refused:
            link.context.on_attached()

    def on_detach(self, link: Link, closed: bool, condition: str, description: str) -> None:
        end = link.context
        if isinstance(end, LinkEnd):
            end.on_detached(LinkDetached(condition, description or f"the peer has ended the link to {end.address}"))

    def on_flow(self, link: Link) -> None:
        if isinstance(link.context, LinkEnd):
            link.context.on_flow()

    def on_message(
        self, link: Link, delivery: Delivery, payload: bytes, batch: bool, settled: bool, state: int
    ) -> None:
        if isinstance(link.context, LinkEnd):
            link.context.on_message(delivery, payload, settled)

    def on_oversized(self, link: Link, delivery: Delivery, size_bytes: int, settled: bool) -> None:
        raise AssertionError("no link has a limit")

    def on_crowded(self, link: Link, delivery: Delivery, settled: bool) -> None:
        raise AssertionError("no connection has a limit")

    def on_aborted(self, link: Link) -> None:
        if isinstance(link.context, LinkEnd):
            link.context.on_aborted()

    def on_outcome(self, link: Link, delivery: Delivery, token: bytes, state: int, settled: bool) -> None:
        if isinstance(link.context, LinkEnd):
            link.context.on_outcome(delivery, token, state, settled)

    def on_close(self, condition: str, description: str) -> None:
        if self._failure is None:
            self._failure = ConnectionLost(condition, description or "the peer has closed the connection")


_REASONS = {
    errno.ECONNREFUSED: "Connection refused",
    errno.EHOSTUNREACH: "No route to host",
    errno.ENETUNREACH: "Network is unreachable",
}


def _reason(error: OSError) -> str:
    """asyncio has the addresses that it tried in the text, and the number of the error perhaps only there."""
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS there"
    if isinstance(error, ssl.SSLError | socket.gaierror):
        return error.strerror or str(error)
    found = re.search(r"\[Errno (\d+)\]", str(error))
    return _REASONS.get(int(found[1]) if found else 0, str(error))


def _sasl(credentials: Credentials, hostname: str) -> SaslClient:
    if isinstance(credentials, Plain):
        return SaslClient(PLAIN, plain_response(credentials.name, credentials.password), hostname)
    return SaslClient(ANONYMOUS, b"", hostname)
