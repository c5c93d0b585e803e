"""What the sidecar answers itself: senders of entities that have failed over, and all while the primary is away.

Each message becomes a send of the pairing (`broker.pairing.sending`), and the client has its outcome when that is over.
"""

import asyncio
import time
import uuid
from typing import Final, Protocol

from broker.logging import get_logger
from broker.pairing.aliases import AliasTaken
from broker.pairing.pairing import Pairing
from broker.pairing.sending import PairedSender
from broker.pairing.sidecar.credentials import Credentials
from broker.pairing.sidecar.limits import Limits
from broker.pairing.sidecar.nodes import AWAY, RequestNode, Responses, claims_node, management_node
from broker.pairing.sidecar.trust import Trust
from protocol import conditions, error_texts
from protocol.addresses import Address, InvalidAddress, Node, Part, parse
from protocol.client.errors import AuthenticationFailed, ClientError, MessageRefused
from protocol.codec import Symbol
from protocol.engine.deliveries import ACCEPTED, Delivery, forget, reject, settle
from protocol.engine.engine import Engine
from protocol.engine.links import Link, Session
from protocol.engine.proton.incoming import FramingError, HandleInUse, IllegalState, WorkTooLarge
from protocol.engine.proton.state_bytes import StateTooLarge
from protocol.engine.unfinished import Pool, Unfinished
from protocol.errors import InvalidField, ProtocolError

log = get_logger("sidecar")

LOOK_AT_RIGHTS_MS: Final = 1000
BACK: Final = "The entity takes messages in the primary namespace again. Please attach the link again."
_FAULTS: Final[dict[type[ProtocolError], Symbol]] = {
    FramingError: conditions.CONNECTION_FRAMING_ERROR,
    InvalidField: conditions.INVALID_FIELD,
    IllegalState: conditions.ILLEGAL_STATE,
    HandleInUse: conditions.SESSION_HANDLE_IN_USE,
    StateTooLarge: conditions.RESOURCE_LIMIT_EXCEEDED,
    WorkTooLarge: conditions.RESOURCE_LIMIT_EXCEEDED,
}


class Shared(Protocol):
    """What all connections of a sidecar share."""

    limits: Limits
    pairing: Pairing
    trust: Trust
    unfinished: Pool
    container_id: str

    def take_room(self, size_bytes: int) -> bool:
        """Whether a message of this size may wait here."""

    def give_room_back(self, size_bytes: int) -> None: ...


class Host(Protocol):
    """The connection that the engine is a part of."""

    def write_here(self, data: bytes) -> None:
        """Output of the engine for the client."""

    def need_primary(self) -> bool:
        """The client wants what only the primary has. True if it is told to connect again, since that is there."""

    def close(self, condition: str, description: str) -> None: ...


class Here:
    """Implements `protocol.engine.engine.Handler`. `opens`: its open is the client's peer's, and heartbeats count."""

    def __init__(self, host: Host, shared: Shared, credentials: Credentials, *, opens: bool) -> None:
        limits = shared.limits
        self._host = host
        self._shared = shared
        self._credentials = credentials
        self._claims = claims_node(shared.trust, credentials)
        self._management = management_node()
        self.is_open = False
        self.is_closed = False
        self._is_busy = False
        self._is_freed = False
        self._flush: asyncio.Handle | None = None
        self._next_tick_ms = 0
        self._next_look_ms = 0
        self.senders: set[HereSender] = set()
        self.engine = Engine(
            self,
            server=True,
            container_id=shared.container_id,
            max_frame_size=limits.max_frame_bytes,
            channel_max=limits.channel_max,
            handle_max=limits.max_links - 1,
            idle_time_out_ms=limits.idle_time_out_ms if opens else 0,
            unfinished=Unfinished(shared.unfinished, limits.unfinished_bytes),
        )
        self.engine.limit_state(limits.state_bytes)

    # -- for the connection

    def feed(self, data: bytes) -> None:
        """Bytes of the client, from the protocol header on."""
        if self.is_closed:
            return
        self._is_busy = True
        try:
            self.engine.push(data)
        except ProtocolError as error:
            log.warning("protocol error", error=str(error))
            condition = next((each for kind, each in _FAULTS.items() if isinstance(error, kind)), None)
            self.close(condition or conditions.DECODE_ERROR, str(error))
        finally:
            self._is_busy = False
        self.flush()

    def flush(self) -> None:
        if self._is_busy or self._is_freed:
            return
        output = self.engine.pull()
        if output:
            self._host.write_here(output)

    def flush_soon(self) -> None:
        """Flush at the end of this turn of the event loop, for all outcomes that it brings."""
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flush = None
        self.flush()

    def tick(self, now_ms: int) -> None:
        """Send heartbeats, end the links whose rights are over."""
        if self._is_freed:
            return
        if self.is_open and now_ms >= self._next_tick_ms:
            self._next_tick_ms = self.engine.tick(now_ms) or now_ms + self._shared.limits.idle_time_out_ms
        if now_ms >= self._next_look_ms:
            self._next_look_ms = now_ms + LOOK_AT_RIGHTS_MS
            for sender in [*self.senders]:
                sender.check_right(self._credentials)
        self.flush()

    @property
    def paths(self) -> set[str]:
        """The entities that senders here send to."""
        return {sender.path for sender in self.senders}

    @property
    def outstanding(self) -> int:
        """Messages without an outcome."""
        return sum(sender.outstanding for sender in self.senders)

    def end_credit(self) -> None:
        """No more messages are wanted."""
        for sender in self.senders:
            sender.is_ending = True

    def give_back(self, path: str) -> None:
        """The entity takes messages in the primary: its links end when all messages have their outcomes."""
        for sender in [*self.senders]:
            if sender.path.lower() == path.lower():
                sender.give_back()
        self.flush()

    def close(self, condition: str | None, description: str) -> None:
        self.is_closed = True
        self.engine.close(condition, tracked(description))
        self.flush()

    def free(self) -> None:
        """The connection is gone."""
        self._is_freed = True
        for sender in [*self.senders]:
            sender.on_detached()
        if self._flush is not None:
            self._flush.cancel()
        for link in self.engine.links.values():
            link.closed = True
        for node in (self._claims, self._management):
            node.forget_all()
        self.engine.free()
        del self._host

    # -- protocol.engine.engine.Handler

    def on_open(self, container_id: str, hostname: str) -> None:
        self.is_open = True
        self.engine.open()
        self._next_tick_ms = 0

    def on_session(self, session: Session) -> None: ...

    def on_session_end(self, session: Session) -> None: ...

    def on_attach(self, link: Link) -> None:
        limits = self._shared.limits
        if len(self.engine.links) > limits.max_links:
            self._host.close(conditions.RESOURCE_LIMIT_EXCEEDED, f"There may be {limits.max_links} links.")
            return
        address = _address_of(link)
        if address is not None and address.node is Node.CBS:
            self._claims.attach(link)
        elif address is not None and address.node is Node.MANAGEMENT and not self._credentials.are_none:
            if not self._host.need_primary():
                self._management.attach(link)
        elif (
            link.is_sender
            or address is None
            or address.node is not Node.ENTITY
            or address.part is not Part.MAIN
            or address.subscription is not None
        ):
            if not self._host.need_primary():
                link.refuse(conditions.TIMEOUT, tracked(AWAY))
        elif not self._credentials.may_send(address.path):
            if self._credentials.are_none:
                text = f"Unauthorized access. 'Send' claim(s) are required to perform this operation on {address.path}."
                link.refuse(conditions.UNAUTHORIZED_ACCESS, tracked(text))
            elif not self._host.need_primary():
                text = f"The primary is away, and only it can tell who may send to {address.path}. Please try again."
                link.refuse(conditions.TIMEOUT, tracked(text))
        else:
            sender = self._shared.pairing.sender(address.path)
            self.senders.add(HereSender(self, self._shared, link, address.path, sender))
            link.accept(limits.max_message_bytes, limits.credit)

    def on_detach(self, link: Link, closed: bool, condition: str, description: str) -> None:
        if isinstance(link.context, HereSender | Responses):
            link.context.on_detached()
        link.context = None

    def on_flow(self, link: Link) -> None:
        if isinstance(link.context, Responses):
            link.context.on_flow()

    def on_message(
        self, link: Link, delivery: Delivery, payload: bytes, batch: bool, settled: bool, state: int
    ) -> None:
        end = link.context
        if isinstance(end, HereSender):
            end.on_message(delivery, payload, batch, settled, state)
        elif isinstance(end, RequestNode):
            end.on_message(link, delivery, payload, settled)
        else:
            forget(delivery)  # the client has sent it before it knew that the link is refused or gone

    def on_oversized(self, link: Link, delivery: Delivery, size_bytes: int, settled: bool) -> None:
        text = error_texts.message_too_large(0, size_bytes, link.max_message_bytes)
        self._refuse_unread(link, delivery, settled, conditions.LINK_MESSAGE_SIZE_EXCEEDED, text)

    def on_crowded(self, link: Link, delivery: Delivery, settled: bool) -> None:
        self._refuse_unread(link, delivery, settled, conditions.SERVER_BUSY, error_texts.UNFINISHED_TOO_MUCH)

    def _refuse_unread(self, link: Link, delivery: Delivery, settled: bool, condition: str, text: str) -> None:
        if isinstance(link.context, RequestNode):
            link.context.on_refused(link, delivery, settled)
            return
        _refuse(delivery, settled, condition, text)
        self.on_aborted(link)

    def on_aborted(self, link: Link) -> None:
        if isinstance(link.context, HereSender):
            link.context.level()

    def on_outcome(self, link: Link, delivery: Delivery, token: bytes, state: int, settled: bool) -> None:
        if settled:
            forget(delivery)

    def on_close(self, condition: str, description: str) -> None:
        self.is_closed = True


class HereSender:
    """A client's sender that is answered here."""

    def __init__(self, here: Here, shared: Shared, link: Link, path: str, sender: PairedSender) -> None:
        self.path = path
        self.outstanding = 0
        self.is_ending = False  # no more credit is given
        self._here = here
        self._shared = shared
        self._link = link
        self._sender = sender
        self._tasks: set[asyncio.Task[None]] = set()
        link.context = self

    def on_message(self, delivery: Delivery, payload: bytes, batch: bool, settled: bool, state: int) -> None:
        if state:
            _refuse(delivery, settled, conditions.TIMEOUT, "Only the primary takes part in transactions; it is away.")
        elif not self._shared.take_room(len(payload)):
            text = "Too many messages wait for a namespace that takes them."
            _refuse(delivery, settled, conditions.SERVER_BUSY, text)
        else:
            self.outstanding += 1
            task = asyncio.create_task(self._send(delivery, payload, batch, settled))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        self.level()

    async def _send(self, delivery: Delivery, payload: bytes, batch: bool, settled: bool) -> None:
        fault: Exception | None = None
        try:
            await self._sender.send(payload, self._shared.limits.held_seconds, is_batch=batch)
        except (ClientError, TimeoutError, AliasTaken, ProtocolError) as error:
            fault = error.with_traceback(None)  # which refers to this call
        except Exception as error:
            log.exception("sending failed", entity=self.path)
            fault = error.with_traceback(None)
        finally:
            self._shared.give_room_back(len(payload))
            self.outstanding -= 1
        if self._link.closed:
            return
        if fault is not None:
            _refuse(delivery, settled, _condition_of(fault), f"Neither the primary nor the backlog took it: {fault}")
        elif settled:
            forget(delivery)
        else:
            settle(delivery, ACCEPTED)
        self.level()
        if self.is_ending and not self.outstanding:
            self._end()
        self._here.flush_soon()

    def level(self) -> None:
        """Give the client the credit that it may have now."""
        window = self._shared.limits.credit
        free = window - self.outstanding - self._link.credit
        if 2 * free >= window and not self.is_ending and not self._link.closed:
            self._link.grant(free)

    def give_back(self) -> None:
        self.is_ending = True
        if not self.outstanding:
            self._end()

    def _end(self) -> None:
        if not self._link.closed:
            self._link.detach(conditions.LINK_DETACH_FORCED, tracked(BACK))

    def check_right(self, credentials: Credentials) -> None:
        """A token may be over."""
        if not self._link.closed and not credentials.may_send(self.path):
            text = f"The token that gave the right to send to {self.path} is over."
            self._link.detach(conditions.UNAUTHORIZED_ACCESS, tracked(text))

    def on_detached(self) -> None:
        """The client has ended the link, or is gone. What it has sent is sent on: it may have been told so."""
        self._here.senders.discard(self)


def _address_of(link: Link) -> Address | None:
    """None for what is no address of an entity or node."""
    if link.is_coordinator or link.is_dynamic:
        return None
    try:
        return parse(link.address or "")
    except InvalidAddress:
        return None


def _condition_of(fault: Exception) -> str:
    """What a client is told of a message that nobody took."""
    match fault:
        case AliasTaken():
            return conditions.NOT_ALLOWED
        case ProtocolError():
            return conditions.INVALID_FIELD
        case AuthenticationFailed():
            return conditions.INTERNAL_ERROR  # it is the sidecar's right that is missing, not the client's
        case MessageRefused(condition=condition) if condition:
            return condition
        case ClientError(condition=conditions.UNAUTHORIZED_ACCESS):
            return conditions.INTERNAL_ERROR
        case ClientError(condition=conditions.NOT_FOUND):
            return conditions.NOT_FOUND
    return conditions.TIMEOUT


def _refuse(delivery: Delivery, settled: bool, condition: str, text: str) -> None:
    if settled:
        forget(delivery)
    else:
        reject(delivery, condition, tracked(text))


def tracked(text: str) -> str:
    return error_texts.tracked(text, uuid.uuid4(), int(time.time() * 1000), "sidecar")
