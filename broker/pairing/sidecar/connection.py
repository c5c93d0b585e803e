"""One client's connection, and the one to the primary that is made for it.

While the primary answers, bytes go through (`through`); a client that comes while it is away is answered here (`here`).
When that changes, the client is told to connect again, as it would be by a service that moves it: connection-forced.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Final, Protocol, cast

from broker.listening import no_delay
from broker.logging import get_logger
from broker.pairing.availability import Path
from broker.pairing.failures import Verdict, verdict
from broker.pairing.sidecar.credentials import Credentials
from broker.pairing.sidecar.frames import write
from broker.pairing.sidecar.here import Here, Shared, tracked
from broker.pairing.sidecar.through import Through
from protocol import conditions
from protocol.amqp_error import amqp_error
from protocol.client.connection_string import ConnectionString
from protocol.client.errors import ClientError
from protocol.client.sockets import end_when_silent
from protocol.engine.sasl import Identity, IdentityKind, SaslServer
from protocol.errors import ProtocolError
from protocol.symbols import Descriptor

log = get_logger("sidecar")

CLOSE_GRACE_SECONDS: Final = 2.0
LOST: Final = "The connection to the primary namespace was lost. Please connect again."
IS_BACK: Final = "The primary namespace is back. Please connect again."
SILENT: Final = "The primary namespace does not answer. Please connect again."
STOPPING: Final = "The sidecar is shutting down."


class Home(Shared, Protocol):
    """The sidecar as its connections see it."""

    primary: ConnectionString
    primary_tls: ssl.SSLContext | None
    is_away: bool

    def admit(self, client: "Client") -> None:
        """It is connected, after TLS."""

    def leave(self, client: "Client") -> None: ...

    def primary_failed(self, reason: str) -> None:
        """A connection to the primary could not be made, or does not answer."""

    def primary_answers(self) -> None: ...


class Primary(asyncio.Protocol):
    """The socket to the primary of one client. `heard_s` is when it was last read, on the event loop's clock."""

    def __init__(self, client: "Client", output_bytes: int) -> None:
        self._client = client
        self._output_bytes = output_bytes
        self.transport: asyncio.Transport | None = None
        self.heard_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=self._output_bytes)
        end_when_silent(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        self.heard_s = asyncio.get_running_loop().time()
        self._client.on_primary_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._client.on_primary_lost(str(error or "the primary has closed the connection"))

    def pause_writing(self) -> None:
        self._client.read_client(False)

    def resume_writing(self) -> None:
        self._client.read_client(True)


class Client(asyncio.Protocol):
    """Implements the owner of a `Through` and the host of a `Here`.

    First bytes go to the primary and are kept, until it has answered. Then there is only the way through; or, if it
    does not answer, only `here`, which gets what was kept.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._transport: asyncio.Transport | None = None
        self._primary: Primary | None = None
        self._through: Through | None = None
        self._here: Here | None = None
        self._sasl: SaslServer | None = None  # while a client that is answered here shows credentials
        self._kept: bytes | None = b""  # None when it is decided who answers
        self._connecting: asyncio.Task[None] | None = None
        self._credentials = Credentials(home.trust)
        self._deadline: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None  # a look for the primary's answer, or the end
        self._told: dict[str, int] = {}  # since when sends to an entity were overdue that count already
        self._opened_ms: int | None = None  # when the client's open went to the primary
        self._stalled_s: float | None = None
        self._is_ending = False
        self.peer = ""
        self.reason = ""

    # -- the client's socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._home.limits.output_bytes)
        no_delay(transport)
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "unix"
        self._home.admit(self)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._home.limits.sasl_seconds, self._end, "no credentials were shown in time")
        if self._home.is_away:
            self._answer_here()
        else:
            self._connecting = asyncio.create_task(self._connect())

    def data_received(self, data: bytes) -> None:
        if self._is_ending:
            return
        try:
            if self._kept is not None:
                self._kept += data
                if len(self._kept) > self._home.limits.greeting_bytes:
                    self._end("the client sends before it is answered")
                    return
            if self._through is not None:
                self._to_primary(data)
            elif self._kept is None:
                self._feed_here(data)
        except ProtocolError as error:
            self._fault(error)
        except Exception as error:
            self._fail(error)

    def eof_received(self) -> bool:
        return False  # so that the socket is closed

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._is_ending = True
        for timer in (self._deadline, self._timer, self._connecting):
            if timer is not None:
                timer.cancel()
        if self._primary is not None and self._primary.transport is not None:
            self._primary.transport.close()
        if self._here is not None:
            self._here.free()
        # These refer to the connection, so that nothing of it would be freed before Python searches for cycles.
        self._connecting = self._primary = self._through = self._here = self._sasl = None
        self._kept = None
        self._home.leave(self)
        log.debug("connection ended", peer=self.peer, reason=self.reason or str(error or "closed by the client"))

    def pause_writing(self) -> None:
        # As without a sidecar, the primary gives up in the end.
        if self._primary is not None and self._primary.transport is not None:
            self._primary.transport.pause_reading()
        else:
            self._stalled_s = asyncio.get_running_loop().time()

    def resume_writing(self) -> None:
        self._stalled_s = None
        if self._primary is not None and self._primary.transport is not None:
            self._primary.transport.resume_reading()

    def read_client(self, wanted: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # -- the primary

    async def _connect(self) -> None:
        """Connect to the primary, and decide when it has answered or not."""
        home = self._home
        try:
            async with asyncio.timeout(home.limits.connect_seconds):
                _, primary = await asyncio.get_running_loop().create_connection(
                    lambda: Primary(self, home.limits.output_bytes),
                    home.primary.host,
                    home.primary.port,
                    ssl=home.primary_tls,
                    server_hostname=home.primary.host if home.primary_tls else None,
                )
        except (OSError, TimeoutError) as error:
            error.with_traceback(None)  # the event loop may keep the error, and with its traceback this call
            home.primary_failed(str(error) or "it does not answer")
            self._answer_here()
            return
        if self._transport is None:
            if primary.transport is not None:
                primary.transport.abort()
            return
        self._primary = primary
        self._through = Through(self, home.primary.host)
        self._later(home.limits.connect_seconds, self._look_for_answer)
        if self._kept:
            try:
                self._to_primary(self._kept)
            except ProtocolError as error:
                self._fault(error)
            except Exception as error:
                self._fail(error)

    def _look_for_answer(self) -> None:
        """The primary has had its time, if the client has said anything."""
        if self._kept is None or self._is_ending:
            return
        if not self._kept:
            self._later(self._home.limits.connect_seconds, self._look_for_answer)
            return
        self._home.primary_failed("it accepts connections, and does not answer")
        self._drop_primary()
        self._answer_here()

    def _drop_primary(self) -> None:
        primary, self._primary, self._through = self._primary, None, None
        if primary is not None and primary.transport is not None:
            primary.transport.abort()

    def _to_primary(self, data: bytes) -> None:
        through, primary = self._through, self._primary
        assert through is not None
        assert primary is not None
        now_ms = int(asyncio.get_running_loop().time() * 1000)
        output = through.from_client(data, now_ms)
        if output and primary.transport is not None:
            primary.transport.write(output)
        if self._opened_ms is None and through.is_open:
            self._opened_ms = now_ms

    def on_primary_data(self, data: bytes) -> None:
        through = self._through
        if through is None or self._transport is None or self._is_ending:
            return
        if self._kept is not None:
            self._kept = None
            self._clear_deadline()
            self._home.primary_answers()
        try:
            output = through.from_primary(data)
        except ProtocolError as error:
            log.warning("protocol error of the primary", error=str(error))
            self._end(str(error))
            return
        except Exception as error:
            self._fail(error)
            return
        if output:
            self._transport.write(output)

    def on_primary_lost(self, reason: str) -> None:
        through = self._through
        if through is None or self._transport is None:
            return
        if self._kept is not None:
            self._home.primary_failed(reason)
            self._drop_primary()
            self._answer_here()
            return
        self.reason = reason
        now_ms = int(asyncio.get_running_loop().time() * 1000)
        for name, began_ms in through.unanswered(now_ms):
            self._failed(name, began_ms)
        self._close(None if through.is_closed else conditions.CONNECTION_FORCED, LOST)

    # -- the end

    def _close(self, condition: str | None, description: str) -> None:
        """Close the client's connection: with a condition if it may be sent one, and soon its socket."""
        if self._is_ending or self._transport is None:
            return
        self._is_ending = True
        self.reason = self.reason or description
        through = self._through
        if self._here is not None and through is None:
            self._here.close(condition, description)
        elif through is not None and through.is_open and through.is_answered and condition is not None:
            self._transport.write(write(0, Descriptor.CLOSE, [amqp_error(condition, tracked(description))]))
        if self._primary is not None and self._primary.transport is not None:
            self._primary.transport.abort()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._later(CLOSE_GRACE_SECONDS, self._abort)

    def _end(self, reason: str) -> None:
        """Close the socket at once."""
        self.reason = self.reason or reason
        self._is_ending = True
        if self._transport is not None:
            self._transport.close()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _fault(self, error: ProtocolError) -> None:
        log.warning("protocol error", peer=self.peer, error=str(error))
        self._close(conditions.CONNECTION_FRAMING_ERROR, str(error))

    def _fail(self, error: Exception) -> None:
        log.exception("connection failed", peer=self.peer)
        self.reason = str(error)
        self._abort()

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call this later; only the last such call counts."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, call)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def close(self, condition: str, description: str) -> None:
        self._close(condition, description)

    def shut_down(self) -> None:
        self._close(conditions.CONNECTION_FORCED, STOPPING)

    # -- without the primary

    @property
    def is_answered_here(self) -> bool:
        """No bytes go to the primary."""
        return self._through is None and self._kept is None

    def _answer_here(self) -> None:
        kept, self._kept = self._kept, None
        if self._transport is None or self._is_ending:
            return
        self._sasl = SaslServer(self._verify)
        if kept:
            try:
                self._feed_here(kept)
            except ProtocolError as error:
                self._fault(error)

    def _feed_here(self, data: bytes) -> None:
        sasl = self._sasl
        if sasl is not None:
            try:
                answer = sasl.feed(data)
            except ProtocolError as error:
                self._end(str(error))  # also of a key that only the primary can verify: there is no outcome for that
                return
            assert self._transport is not None
            self._transport.write(answer)
            if not sasl.finished:
                return
            self._clear_deadline()
            self._sasl = None
            if sasl.identity is None:
                self._end("authentication failed")
                return
            self._here = Here(self, self._home, self._credentials, opens=True)
            data = sasl.rest
        if data and self._here is not None:
            self._here.feed(data)
            if self._here.is_closed:
                self._closed_here()

    def _closed_here(self) -> None:
        """The client has closed the connection, or has sent what is no AMQP, and was told so."""
        self._is_ending = True
        self._later(CLOSE_GRACE_SECONDS, self._abort)

    def _verify(self, key_name: str, key: str) -> Identity | None:
        if not self._home.trust.check_key(key_name, key, time.time()):
            return None
        self._credentials.has_key(key_name, key)
        return Identity(IdentityKind.KEY, key_name)

    # -- broker.pairing.sidecar.here.Host

    def write_here(self, data: bytes) -> None:
        if self._transport is None:
            return
        if self._through is not None:
            data = self._through.from_local(data)
        if data:
            self._transport.write(data)

    def need_primary(self) -> bool:
        if self._through is not None or self._home.is_away:
            return False
        asyncio.get_running_loop().call_soon(self._close, conditions.CONNECTION_FORCED, IS_BACK)
        return True

    # -- broker.pairing.sidecar.through.Owner

    def is_here(self, path: str) -> bool:
        found = self._home.pairing.availability.find(path)
        return found is not None and found.health.has_failed_over and self._credentials.may_send(path)

    def to_local(self, data: bytes) -> None:
        if self._here is None:
            self._here = Here(self, self._home, self._credentials, opens=False)
        self._here.feed(data)
        if self._here.is_closed:
            self._closed_here()

    def on_key(self, key_name: str, key: str, accepted: bool) -> None:
        self._home.trust.key_answered(key_name, key, accepted, time.time())
        if accepted:
            self._credentials.has_key(key_name, key)

    def on_token(self, audience: str, token: str) -> None:
        self._home.trust.token_accepted(audience, token, time.time())
        self._credentials.has_token(audience, token)

    def on_unread_token(self) -> None:
        self._credentials.has_more()

    def on_sender(self, path: str, error: ClientError | None, began_ms: int) -> None:
        if error is None:
            self._credentials.sender_answered(path, accepted=True)
        elif error.condition == conditions.UNAUTHORIZED_ACCESS:
            self._credentials.sender_answered(path, accepted=False)
        elif verdict(error) is Verdict.UNAVAILABLE:
            self._failed(path, began_ms)

    def on_taken(self, path: str, count: int) -> None:
        self._home.pairing.counters.sent_to_primary += count
        self._home.pairing.availability.succeeded(self._path(path))

    def on_refused(self, path: str, error: ClientError, began_ms: int) -> None:
        if verdict(error) is Verdict.UNAVAILABLE:
            self._failed(path, began_ms)

    def _failed(self, name: str, began_ms: int) -> None:
        """A send that began then has failed in a way that counts."""
        self._home.pairing.availability.failed(self._path(name), began_ms)

    def _path(self, name: str) -> Path:
        return self._home.pairing.availability.path(name)

    # -- for the sidecar

    def tick(self, now_ms: int) -> None:
        """Called a few times in a second."""
        try:
            self._tick(now_ms)
        except Exception as error:
            self._fail(error)

    def _tick(self, now_ms: int) -> None:
        limits = self._home.limits
        if self._here is not None:
            self._here.tick(now_ms)
        through = self._through
        if self._stalled_s is not None and now_ms / 1000 - self._stalled_s > limits.stall_seconds:
            self.reason = "the client does not read"
            self._abort()
        if self._is_ending:
            return
        if through is None:
            self._recycle()
            return
        overdue_ms = now_ms - self._home.pairing.options.attempt_timeout_ms
        for name, began_ms in through.unanswered(overdue_ms):
            if self._told.get(name) != began_ms:
                self._told[name] = began_ms
                self._failed(name, began_ms)
        if self._opened_ms is not None and not through.is_answered and self._opened_ms < overdue_ms:
            self._home.primary_failed("it does not open connections")
            self._end(SILENT)

    def _recycle(self) -> None:
        """Let a client go that was answered here, when the primary takes what it sends."""
        here = self._here
        if here is None or self._home.is_away or any(self._path(path).health.has_failed_over for path in here.paths):
            return
        if here.outstanding:
            here.end_credit()
        elif here.is_open:
            self._close(conditions.CONNECTION_FORCED, IS_BACK)

    def failed_over(self, name: str, now_s: float) -> None:
        """An entity has failed over: its senders are to come here."""
        try:
            self._move(name, now_s)
        except Exception as error:
            self._fail(error)

    def _move(self, name: str, now_s: float) -> None:
        through, primary = self._through, self._primary
        if through is None or primary is None or self._is_ending:
            return
        if name.lower() not in {path.lower() for path in through.paths()}:
            return
        if now_s - primary.heard_s > self._home.pairing.options.attempt_timeout_ms / 1000:
            self._home.primary_failed("it does not answer")
            self._close(conditions.CONNECTION_FORCED, SILENT)
            return
        if any(path.lower() == name.lower() for path in through.accepted_paths()):
            self._credentials.sender_answered(
                name, accepted=True
            )  # also by a token that has come since it was attached
        moved = through.move(name, tracked("The entity has failed over. Please attach the link again."))
        if self._transport is not None and moved.to_client:
            self._transport.write(moved.to_client)
        if primary.transport is not None and moved.to_primary:
            primary.transport.write(moved.to_primary)

    def is_back(self, name: str) -> None:
        """An entity takes messages again: its senders are to go to the primary."""
        if self._through is None or self._here is None:
            return
        try:
            self._here.give_back(name)
        except Exception as error:
            self._fail(error)
