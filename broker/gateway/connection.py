"""One client's connection: SASL, then an engine whose links are bound to entities and nodes.

A connection never blocks: a delivery that needs an answer from a partition is settled when the answer comes. An error
ends as little as possible: the delivery, else the link, else the connection.
"""

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, cast

from broker.errors import BrokerError, EntityNotFound
from broker.gateway.bound_links import MAX_LINKS_WITHOUT_RIGHTS, BoundLinks
from broker.gateway.conditions import condition_of
from broker.gateway.connection_timers import Timer, Timers
from broker.gateway.credentials import Credentials
from broker.gateway.holding import Holding
from broker.gateway.host import Responder, SessionHolder, Shared
from broker.gateway.life import (
    CLIENT_CLOSED,
    HAS_ENGINE,
    HAS_SOCKET,
    HEARS,
    NEXT,
    READS,
    WAS_OPEN,
    WRITES,
    Event,
    State,
)
from broker.gateway.limits.budget import CONNECTION_BYTES, ENGINE_BYTES, MEASURED_BYTES, TLS_BYTES, Budget, Holder
from broker.gateway.limits.large_answers import LargeAnswers
from broker.gateway.limits.queued import Queued
from broker.gateway.links.browsers import Browser
from broker.gateway.links.intake import Intake
from broker.gateway.links.receivers import ClientReceiver
from broker.gateway.links.senders import ClientSender
from broker.gateway.links.subscription_ends import SubscriptionEnd
from broker.gateway.namespace import Entity
from broker.gateway.output import Output
from broker.gateway.pinning import Pinning
from broker.gateway.reading import Reading
from broker.gateway.rights import Rights
from broker.gateway.transactions import Transactions
from broker.gateway.turn import Gathering
from broker.gateway.unsent import UnsentOutput
from broker.listening import no_delay
from broker.logging import get_logger
from broker.repeated_warning import RepeatedWarning
from broker.tls import names_of
from protocol import conditions, error_texts
from protocol.addresses import Node
from protocol.codec import Symbol
from protocol.engine.deliveries import Delivery, forget, reject
from protocol.engine.engine import Engine
from protocol.engine.links import Link, Session
from protocol.engine.proton.incoming import FramingError, HandleInUse, IllegalState, WorkTooLarge
from protocol.engine.proton.state_bytes import StateTooLarge
from protocol.engine.sasl import Identity, SaslServer
from protocol.engine.unfinished import Pool, Unfinished
from protocol.errors import InvalidField, ProtocolError
from protocol.nodes.sas_tokens import Claim
from protocol.symbols import DELAYED_DELIVERY, SHARED_SUBSCRIPTIONS

log = get_logger("gateway")


# A read of so many bytes is not followed by another before others are served: the event loop would go on reading from a
# socket that has more.
LARGE_READ_BYTES = 128 << 10
# After a close the peer has this long to answer before the socket is closed.
CLOSE_GRACE_SECONDS = 2.0
# Tokens end by the wall clock, which may be set meanwhile; so rights are checked at least this often.
LOOK_AT_RIGHTS_SECONDS = 60.0
# Capabilities of connections. They are told to who asks for them: others may not be able to read them.
OFFERED = (DELAYED_DELIVERY, SHARED_SUBSCRIPTIONS)
_KEY_CHANGED = "The key that the client has shown no longer gives this right: it was changed or removed."
# Refused links count until the client has detached them. A client with this many times the allowed links never does.
LINKS_OVERRUN = 2
# State of a client without rights: 40 links with the properties that SDKs send take half of it.
STATE_BYTES_WITHOUT_RIGHTS = 512 << 10
UNFINISHED_BYTES_WITHOUT_RIGHTS = 256 << 10  # of messages to $cbs, which hold tokens
BYTES_PER_LINK = 256  # which go through a connection until its links are measured again

_FAULTS: dict[type[ProtocolError], Symbol] = {
    FramingError: conditions.CONNECTION_FRAMING_ERROR,
    InvalidField: conditions.INVALID_FIELD,
    IllegalState: conditions.ILLEGAL_STATE,
    HandleInUse: conditions.SESSION_HANDLE_IN_USE,
    StateTooLarge: conditions.RESOURCE_LIMIT_EXCEEDED,
    WorkTooLarge: conditions.RESOURCE_LIMIT_EXCEEDED,
}

_SASL, _OPEN = State.SASL, State.OPEN  # to look up a member of an enum takes as long as a call

_P = ParamSpec("_P")


def _contained(
    method: Callable[Concatenate["ClientConnection", _P], None],
) -> Callable[Concatenate["ClientConnection", _P], None]:
    """For methods that the event loop and others call on a connection: an exception ends only this connection."""

    @wraps(method)
    def contained(self: "ClientConnection", /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.fail(error)

    return contained


class Home(Shared, Protocol):
    """The gateway as its connections see it."""

    container_id: str
    max_connections: int
    waiting: set["ClientConnection"]  # those to regulate when a worker has caught up
    refusals: RepeatedWarning
    unfinished: Pool
    budget: Budget

    def admit(self, connection: "ClientConnection") -> None:
        """It is connected, after TLS, and to be ticked and shut down."""

    def leave(self, connection: "ClientConnection") -> None: ...

    def queue(self, waiting: Queued) -> None:
        """Call its `go_on` when it is its turn."""

    @property
    def is_full(self) -> bool:
        """There are more connections than are allowed."""


class ClientConnection(Holder, asyncio.Protocol):
    """Implements `protocol.engine.engine.Handler` on an asyncio transport, and is the host of its links.

    `carrier_bytes` is what the transport keeps of the input, if it carries more than these bytes.

    An unforeseen exception ends this connection. It never reaches the caller: the event loop, the connection to a
    worker (which all clients share), or a loop over all connections.
    """

    engine: Engine  # from SASL's end on
    _transport: asyncio.Transport  # while there is a socket
    _output: Output  # the same

    def __init__(self, gateway: Home) -> None:
        self.gateway = gateway
        self.budget = gateway.budget
        self.active: OrderedDict[Gathering, None] = OrderedDict()
        self.transactions = Transactions()
        self.rights = Rights(everything=gateway.settings.security.allow_anonymous)
        self.is_stalled = False
        self.waiting_bytes = 0
        self.large_answers = LargeAnswers()
        self.reading = Reading()
        self.overrun = self.reading.overrun
        self.blocked: set[Gathering] = set()
        self.shut: set[Gathering] = set()
        self.next_tick_ms = 0
        self.state = State.NEW
        self._sasl: SaslServer | None = None
        self._has_failed = False
        self._busy = False  # inside the engine: flushes wait until it returns
        self._flush_again = False
        self._timers = Timers()
        self.sessions: dict[tuple[int, str], SessionHolder] = {}
        self._peer = ""
        self.client_name = ""
        most = gateway.settings.amqp.max_temporary_entities_per_connection
        self.holding = Holding(gateway.router, gateway.holders, most)
        self.pinning = Pinning.BY_RECEIVERS
        self.carrier_bytes = 0
        self._socket_bytes = CONNECTION_BYTES
        self._read_bytes = 0  # TLS keeps a buffer as large as the largest read
        self._is_tls = False
        self._reason = ""

    def _step(self, event: Event) -> None:
        self.state = NEXT[self.state][event]

    # -- asyncio.Protocol

    @_contained
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's has all methods, but not the base class
        self._transport = transport
        self._step(Event.CONNECTED)
        self.unsent = UnsentOutput(transport)
        self._output = Output(transport, self.unsent)
        amqp = self.gateway.settings.amqp
        transport.set_write_buffer_limits(high=amqp.max_output_buffer_bytes)
        peer = transport.get_extra_info("peername")
        self._peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "unix"
        names = names_of(transport.get_extra_info("peercert"))
        credentials = self._credentials = Credentials(self.gateway.keyring, names, self.rights)
        self._sasl = SaslServer(credentials.verify_plain, credentials.external)
        no_delay(transport)
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        if self._is_tls:
            self._socket_bytes += TLS_BYTES
        self._set_deadline(amqp.sasl_timeout_ms, "SASL was not finished in time")
        self.gateway.admit(self)

    @_contained
    def connection_lost(self, error: Exception | None) -> None:
        before = self.state
        self._step(Event.LOST)
        self.reading.is_behind = False
        self._timers.stop_all()
        self.gateway.leave(self)
        if before in HAS_ENGINE:
            self._links.unbind_all(before not in CLIENT_CLOSED, self._unsent_deliveries())
            self.gateway.metrics.sessions -= len(self.engine.sessions)
            for forgotten in (self.active, self.overrun, self.blocked, self.sessions):
                forgotten.clear()
            self._links.let_go()
            self.gateway.router.drop_waiting(self)
            self.engine.free()
        elif self._sasl is not None:
            self._sasl.end()
        self.unsent.forget()
        del self._transport, self._output
        if before in WAS_OPEN:
            log.info("connection ended", peer=self._peer, reason=self._reason or str(error or "closed by the client"))

    def data_received(self, data: bytes) -> None:
        self.gateway.metrics.bytes_in += len(data)
        if self.state not in HEARS:
            return
        reading = self.reading
        was_behind = reading.is_behind
        self._push(data)
        self.moved_bytes += len(data)
        if self.moved_bytes > MEASURED_BYTES:
            if self._is_tls and len(data) > self._read_bytes:
                self._read_bytes = len(data)
            self._measure_at_times()
        if reading.is_behind and not was_behind:
            self.gateway.queue(self)
        elif len(data) >= LARGE_READ_BYTES:
            reading.rests = True
            self.regulate()
            asyncio.get_running_loop().call_soon(self._read_on)

    @_contained
    def _read_on(self) -> None:
        self.reading.rests = False
        self.regulate()

    def go_on(self, until_s: float) -> bool:
        """Go on with what was read, until this time of `time.monotonic`. True if there is more to do."""
        while self.reading.is_behind:
            self._push(b"")
            if time.monotonic() >= until_s:
                break
        return self.reading.is_behind

    def _push(self, data: bytes) -> None:
        """Begin to do what was read, or go on with it: one step, which takes a few milliseconds at most."""
        router, reading = self.gateway.router, self.reading
        posted_behind = router.posted_behind
        if posted_behind:
            posted_behind.clear()  # these were added for other connections
        router.begin_turn()
        self._busy = True
        try:
            try:
                if self.state is _SASL:
                    data = self._negotiate(data)
                reading.is_behind = self.state in READS and self.engine.push_some(data)
                if self.shut and self.engine.has_flow:
                    self.active.update(dict.fromkeys(self.shut))
                    self.shut.clear()
            except ProtocolError as error:
                reading.is_behind = False
                self._fault(error)
            finally:
                self._busy = False
            self.flush()
            if posted_behind:
                reading.workers |= posted_behind
                posted_behind.clear()
                self.regulate()
        except Exception as error:
            reading.is_behind = False
            self.fail(error)
        finally:
            router.end_turn()

    @_contained
    def eof_received(self) -> None:
        if self.state in HAS_ENGINE:
            self.engine.input_ended()

    @_contained
    def pause_writing(self) -> None:
        """The client does not read: hand out nothing more, do not read from it, close the connection in the end."""
        self.is_stalled = True
        if self.state in HAS_ENGINE:
            self._links.ask_again()  # they take back the credit that they gave to partitions
        self.flush()
        timeout_s = self.gateway.settings.amqp.write_stall_timeout_ms / 1000
        self._timers.start(Timer.STALL, timeout_s, partial(self._abort, "the client does not read"))

    @_contained
    def resume_writing(self) -> None:
        self.is_stalled = False
        self._timers.stop(Timer.STALL)
        if self.state in HAS_ENGINE:
            self._links.ask_again()
            self._links.respond()
            self.large_answers.go_on()
        self.flush()

    @_contained
    def regulate(self) -> None:
        """Read from the client, or do not, as its reasons are now; see `reading`."""
        if self.state not in HAS_SOCKET or self._transport.is_closing():
            return
        self.reading.regulate(self._transport, self.is_stalled, self.gateway.router.behind)
        if self.reading.workers:
            self.gateway.waiting.add(self)

    # -- broker.gateway.limits.budget.Holder

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def has_rights(self) -> bool:
        return not self.rights.is_empty

    def held_bytes(self) -> int:
        if self.state not in HAS_SOCKET:
            return 0
        output_bytes = self._output.held_bytes()
        held = self._socket_bytes + self._read_bytes + self.carrier_bytes + self.waiting_bytes + output_bytes
        return held + ENGINE_BYTES + self.engine.held_bytes if self.state in HAS_ENGINE else held

    @_contained
    def end_for_room(self, text: str) -> None:
        if self.is_stalled:
            self._abort(text)
        else:
            self.close(conditions.RESOURCE_LIMIT_EXCEEDED, text)

    def cut_off(self, text: str) -> None:
        self._abort(text)

    def _measure_at_times(self) -> None:
        """With many links it takes longer, and is done less often."""
        links = len(self.engine.links) if self.state in HAS_ENGINE else 0
        if self.moved_bytes > links * BYTES_PER_LINK:
            self.measure()

    def look_after(self) -> None:
        """Also drop output that the kernel has sent, which is not needed any more."""
        if self.state in HAS_ENGINE and self.unsent:
            self.unsent.trim()
        super().look_after()

    @property
    def has_authenticated(self) -> bool:
        """SASL is over, perhaps without credentials."""
        return self.state in HAS_ENGINE

    # -- SASL

    def _negotiate(self, data: bytes) -> bytes:
        """Feed the SASL layer; returns the rest, which belongs to AMQP."""
        sasl = self._sasl
        assert sasl is not None
        answer = sasl.feed(data)
        if answer:
            self._write(answer)
        if not sasl.finished:
            return b""
        if sasl.identity is None:
            self.gateway.metrics.authentication_failures += 1
            self._reason = "authentication failed"
            self.gateway.denials.happened(self._credentials.problem, peer=self._peer)
            self._hang_up(self._reason)
            return b""
        self._start_engine(sasl.identity)
        self._step(Event.AUTHENTICATED)
        self._sasl = None
        return sasl.rest

    def _start_engine(self, identity: Identity) -> None:
        amqp = self.gateway.settings.amqp
        self._credentials.accept(identity)
        self.engine = Engine(
            self,
            server=True,
            container_id=self.gateway.container_id,
            max_frame_size=amqp.max_frame_size_bytes,
            channel_max=amqp.channel_max,
            handle_max=amqp.handle_max,
            idle_time_out_ms=amqp.idle_time_out_ms,
            unfinished=Unfinished(self.gateway.unfinished, 0),
        )
        self._limit_state()
        self._links = BoundLinks(self, self.engine.links)
        self._set_deadline(amqp.open_timeout_ms, "open was not sent in time")

    def _limit_state(self) -> None:
        """Set the limit of kept state by the rights that the connection has now."""
        amqp = self.gateway.settings.amqp
        state, unfinished = amqp.max_state_bytes_per_connection, amqp.unfinished_bytes_per_connection
        if self.rights.is_empty:
            state, unfinished = min(state, STATE_BYTES_WITHOUT_RIGHTS), UNFINISHED_BYTES_WITHOUT_RIGHTS
        self.engine.limit_state(state)
        self.engine.unfinished.maximum_bytes = unfinished

    # -- protocol.engine.engine.Handler

    def on_open(self, container_id: str, hostname: str) -> None:
        self._step(Event.OPENED)
        self.client_name = container_id
        self.next_tick_ms = 0  # the client may want heartbeats more often than we check its own
        desired = self.engine.desired_capabilities()
        self.engine.open([each for each in OFFERED if each in desired])
        log.info("connection opened", peer=self._peer, container=container_id[:100])
        if self.pinning is not Pinning.NEVER:
            self.pinning = Pinning.of(self.client_properties)
        if self.gateway.is_full:
            self.gateway.metrics.connections_refused += 1
            limit = self.gateway.max_connections
            self.gateway.refusals.happened("connection limit reached", last_peer=self._peer)
            self.close(
                conditions.RESOURCE_LIMIT_EXCEEDED, f"The namespace has {limit} connections, which is its limit."
            )
        elif self.rights.is_empty and not self._credentials.has_key:
            self._set_deadline(self.gateway.settings.amqp.cbs_timeout_ms, "no valid token was put in time")
        else:
            self._timers.stop(Timer.DEADLINE)

    def on_session(self, session: Session) -> None:
        self.gateway.metrics.sessions += 1

    def on_session_end(self, session: Session) -> None:
        self.gateway.metrics.sessions -= 1

    def on_attach(self, link: Link) -> None:
        allowed = self.gateway.settings.amqp.max_links_per_connection
        if self.rights.is_empty:
            allowed = min(allowed, MAX_LINKS_WITHOUT_RIGHTS)
        if len(self.engine.links) > LINKS_OVERRUN * allowed:
            self.close(conditions.RESOURCE_LIMIT_EXCEEDED, "Links are attached although they are refused.")
        else:
            self._links.attach(link)

    def on_detach(self, link: Link, closed: bool, condition: str, description: str) -> None:
        if closed and isinstance(link.context, SubscriptionEnd):
            link.context.on_close()
        # Deliveries that wait for the session's window end with the link; those that wait for the client are written.
        self._links.unbind(link, unsent=0 if self.is_stalled or not link.is_sender else link.queued)

    def on_flow(self, link: Link) -> None:
        if link.context is not None:
            link.context.on_flow()

    def on_message(
        self, link: Link, delivery: Delivery, payload: bytes, batch: bool, settled: bool, state: int
    ) -> None:
        bound: Intake | None = link.context
        if bound is not None:
            bound.on_message(delivery, payload, batch, settled, state)
            self.active[bound] = None
        else:
            forget(delivery)  # the client sent it before it knew that the link is refused or gone

    def on_oversized(self, link: Link, delivery: Delivery, size_bytes: int, settled: bool) -> None:
        bound: Intake | None = link.context
        if bound is not None:
            bound.on_oversized(delivery, size_bytes, settled)
            self.active[bound] = None
        else:
            forget(delivery)

    def on_crowded(self, link: Link, delivery: Delivery, settled: bool) -> None:
        bound: Intake | None = link.context
        if bound is not None:
            bound.on_crowded(delivery, settled)
            self.active[bound] = None
        else:
            forget(delivery)

    def on_aborted(self, link: Link) -> None:
        if link.context is not None:
            self.active[link.context] = None

    def on_outcome(self, link: Link, delivery: Delivery, token: bytes, state: int, settled: bool) -> None:
        if isinstance(link.context, ClientReceiver | Browser):
            link.context.on_outcome(delivery, token, state, settled)
        elif settled:
            forget(delivery)

    def on_close(self, condition: str, description: str) -> None:
        self._step(Event.CLOSED)
        self._reason = self._reason or description or "closed by the client"

    # -- for bound links

    @property
    def client_properties(self) -> Mapping[Any, Any]:
        return self.engine.remote_properties()

    def bind_made(self, link: Link, bind: Callable[[], Any]) -> None:
        self._links.bind_made(link, bind)
        self.flush()

    @property
    def output_room_bytes(self) -> int:
        """How much can be written before the client must read; never too low, if its transport does not tell."""
        most = self.gateway.settings.amqp.max_output_buffer_bytes
        return most - self._output.waiting_bytes() if self.state in HAS_SOCKET else 0

    def flush(self) -> None:
        """Post what the links have gathered, and write the output of the engine.

        The engine calls handlers while it is fed and read, and these may flush. Writing then would put later frames
        before those that the engine is just returning. A frame of a worker may have more for this connection.
        """
        to_flush = self.gateway.router.to_flush
        if to_flush is not None:
            to_flush.add(self)
            return
        if self._busy:
            self._flush_again = True
            return
        self._busy = True
        try:
            self._flush_again = False
            self._flush()
            while self._flush_again:
                self._flush_again = False
                self._flush()
            self._busy = False
            reading = self.reading
            if reading.is_paused or reading.is_behind or reading.overrun or self.is_stalled or reading.workers:
                self.regulate()
        except Exception as error:
            self._busy = False
            self.fail(error)

    def post_gathered(self) -> None:
        """Let the links send what they have gathered to the partitions, so that later commands come after it."""
        while self.active:
            bound, _ = self.active.popitem(last=False)
            bound.post()

    def _flush(self) -> None:
        if self.active:
            self.post_gathered()
        if self.is_stalled or self.state not in WRITES:
            if self.is_stalled:  # the engine keeps what comes for the client
                self.moved_bytes += MEASURED_BYTES
                self._measure_at_times()
            return
        engine = self.engine
        output = engine.pull_pieces()
        if output:
            size = self._output.write(output)
            self.gateway.metrics.bytes_out += size
            self.moved_bytes += size
            if self.moved_bytes > MEASURED_BYTES:
                self._measure_at_times()
            if self.blocked:
                self.active.update(dict.fromkeys(self.blocked))
                self.blocked.clear()
                self._flush_again = True
        if engine.finished:
            self._hang_up(" ".join(self.engine.fault()) or "closed")

    def reject(self, delivery: Delivery, condition: str, text: str, tracker: str = "NoSystemTracker") -> None:
        self.gateway.metrics.errors[condition] += 1
        reject(delivery, condition, self.tracked(text, tracker))

    def detach(self, link: Link, error: BrokerError, tracker: str = "NoSystemTracker") -> None:
        condition = condition_of(error)
        self.gateway.metrics.errors[condition] += 1
        self._links.end(link, condition, self.tracked(str(error), tracker))

    def let_go(self, link: Link, error: BrokerError, tracker: str, delay_s: float) -> None:
        """The link has nothing to do any more, and is detached later, unless the client detaches it before."""
        self._links.unbind(link)

        def detach() -> None:
            if not link.closed:
                self.detach(link, error, tracker)
                self.flush()

        self.later(delay_s, detach)

    @_contained
    def detach_from(self, entities: Collection[Entity]) -> None:
        """These entities were deleted: detach links to them (through others, too) and to their $management nodes."""
        if self.state not in HAS_ENGINE:
            return
        namespace = self.gateway.namespace.name
        for link in list(self.engine.links.values()):
            bound = link.context
            linked: list[Entity | None] = [getattr(bound, "entity", None), getattr(bound, "destination", None)]
            entity = next((each for each in linked if each is not None and each in entities), None)
            if entity is not None and not link.closed:
                kind = "Subscription" if entity.kind == "subscription" else "Queue"
                error = EntityNotFound(error_texts.entity_not_found(namespace, entity.name, kind))
                self.detach(link, error, entity.tracker(namespace))
        self.flush()

    @_contained
    def follow(self, entity: Entity) -> None:
        """The entity was moved to another partition: messages go there from now on."""
        if self.state not in HAS_ENGINE:
            return
        for link in list(self.engine.links.values()):
            if isinstance(link.context, ClientSender) and link.context.entity is entity:
                link.context.follow()

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        if self.state in HAS_SOCKET:
            self._timers.add(delay_s, partial(self._call, call))

    @_contained
    def _call(self, call: Callable[[], None]) -> None:
        call()
        if self.state in HAS_ENGINE:
            self.flush()

    def tracked(self, text: str, tracker: str = "NoSystemTracker") -> str:
        return error_texts.tracked(text, uuid.uuid4(), int(time.time() * 1000), tracker)

    def response_link(self, node: tuple[Node, str], reply_to: str | None, request: Link) -> Responder | None:
        return self._links.response_link(node, reply_to, request)

    def put_claim(self, claim: Claim, now_s: float) -> None:
        """Take the rights of a token that was verified at `now_s`; they hold until it expires."""
        self.rights.put(claim)
        self._limit_state()
        self._timers.stop(Timer.DEADLINE)
        self._watch_expiry(now_s)

    def key_shown(self) -> None:
        """A token was signed with a key of the broker, and brings no right: it is for an entity that is not there yet.

        Clients keep such a connection, and put a token for another entity, or for this one when it is created.
        """
        self._timers.stop(Timer.DEADLINE)

    @_contained
    def rules_changed(self) -> None:
        """Authorization rules or certificates' rights are others now: what a client no longer has ends at once."""
        if self.state in HAS_ENGINE and self.rights.refresh(self._credentials.granted_now):
            self._links.detach_uncovered(time.time(), _KEY_CHANGED)
            self._limit_state()
            self.flush()

    # -- time

    @_contained
    def tick(self, now_ms: int) -> None:
        """Send heartbeats, and check how long the client has been silent."""
        if self.state in HAS_ENGINE:
            # More often than the engine asks for, because it measures the client's silence between two calls.
            most_ms = self.gateway.settings.amqp.idle_time_out_ms // 4
            self.next_tick_ms = min(self.engine.tick(now_ms), now_ms + most_ms)
            self.flush()

    def close(self, condition: str | None = None, description: str = "") -> None:
        """Close the connection, and soon after that its socket, whether or not the client answers."""
        if self.state is _SASL:
            self._abort(description)
            return
        if self.state not in READS:
            return
        self._reason = description
        if condition:
            self.gateway.metrics.errors[condition] += 1
        if self.state is State.OPENING:
            self._write(self.engine.refusal(condition or conditions.CONNECTION_FORCED, self.tracked(description)))
            self._hang_up(description)
            return
        self.engine.close(condition, self.tracked(description))
        self.flush()
        self.later(CLOSE_GRACE_SECONDS, partial(self._abort, description))

    @_contained
    def shut_down(self) -> None:
        """The gateway is stopping: detach the links, then close the connection."""
        if self.state in HAS_ENGINE:
            self._links.detach_all(conditions.CONNECTION_FORCED, "The broker is shutting down.")
        self.close(conditions.CONNECTION_FORCED, "The broker is shutting down.")

    def fail(self, error: Exception) -> None:
        """End this connection and nothing else, because of an unforeseen `error`, which is being handled."""
        self.gateway.metrics.connection_failures += 1
        log.exception("connection failed", peer=self._peer, error=repr(error))
        if not self._has_failed:
            self._has_failed = True
            try:
                self.close(conditions.INTERNAL_ERROR, "The broker has failed to serve this connection.")
                return
            except Exception:
                log.exception("connection could not be closed", peer=self._peer)
        self._abort("the broker has failed")

    def _fault(self, error: ProtocolError) -> None:
        """The peer's bytes are invalid: answer so if there is an engine, and read no more."""
        self._reason = str(error)
        log.warning("protocol error", peer=self._peer, error=str(error))
        if self.state not in HAS_ENGINE:
            self._abort(str(error))
            return
        condition = next((each for kind, each in _FAULTS.items() if isinstance(error, kind)), conditions.DECODE_ERROR)
        self.close(condition, str(error))

    def _set_deadline(self, after_ms: int, reason: str) -> None:
        """The client must have done the next thing by then, or its connection is closed for this reason."""
        self._timers.start(Timer.DEADLINE, after_ms / 1000, partial(self._too_late, reason))

    @_contained
    def _too_late(self, reason: str) -> None:
        self.close(conditions.UNAUTHORIZED_ACCESS if self.state is _OPEN else conditions.CONNECTION_FORCED, reason)

    def _watch_expiry(self, now_s: float) -> None:
        """Check the rights again when the next of those held at `now_s` ends."""
        self._timers.stop(Timer.EXPIRY)
        next_s = self.rights.next_expiry_s(now_s)
        if next_s is not None:
            delay_s = max(0.0, min(next_s - time.time(), LOOK_AT_RIGHTS_SECONDS))
            self._timers.start(Timer.EXPIRY, delay_s, self._check_rights)

    @_contained
    def _check_rights(self) -> None:
        """A token has ended: detach the links that no right covers any more."""
        now_s = time.time()
        self._links.detach_uncovered(now_s)
        # With the same time as above: if the timer came early, a right that ends now must still be checked.
        self._watch_expiry(now_s)
        self.flush()

    # -- the socket

    def _unsent_deliveries(self) -> dict[Link, int]:
        """The connection is gone: for each link the number of its last deliveries that the client cannot have received.

        If the broker failed, one of the deliveries may be the cause. Then the result is empty, so that all count as
        failed.
        """
        if self._has_failed:
            return {}
        on_socket = self.unsent.deliveries()
        links = [link for link in self.engine.links.values() if isinstance(link.context, ClientReceiver)]
        return {link: link.queued + on_socket.get(link.own_handle or (-1, -1), 0) for link in links}

    def _write(self, data: bytes) -> None:
        """Write what is not the engine's."""
        self.gateway.metrics.bytes_out += len(data)
        self._output.write_other(data)

    def _hang_up(self, reason: str) -> None:
        """Close the socket when everything is written and the client has closed its side, or after a short time.

        If the socket were closed while the client is still sending, the kernel would answer with a reset. The client
        would then lose output that it has not read yet, which says why the connection was closed.
        """
        if self.state not in HEARS:
            return
        self._step(Event.HUNG_UP)
        self._reason = self._reason or reason
        if self.state in CLIENT_CLOSED:
            self._transport.close()
        elif self._transport.can_write_eof():
            self._transport.write_eof()
        self.later(CLOSE_GRACE_SECONDS, partial(self._abort, reason))

    def _abort(self, reason: str) -> None:
        if self.state in HAS_SOCKET:
            self._reason = self._reason or reason
            self._transport.abort()
