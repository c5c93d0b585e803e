"""One AMQP connection without I/O, either side of it: bytes in, calls on a handler, bytes out.

The only module that knows `cproton_ffi`, which is internal to python-qpid-proton: pinned to one minor version. Proton's
Python classes cost ten times the engine they wrap, so the hot path calls the C functions directly.

What proton does not do is added here: message formats and flows that want an answer (`protocol.frames`), performatives
at full width for peers that need them (`protocol.padding`), error lists with all three elements (an error always
carries an info map, or proton would drop it and azure-servicebus would hang).
"""

import struct
from functools import lru_cache
from typing import Any, Protocol

from cproton_ffi import ffi, lib

from protocol import codec
from protocol.codec import Described, Symbol, ULong
from protocol.errors import ProtocolError
from protocol.frames import FrameWalk, IllegalState
from protocol.padding import CONTROL, EVERYTHING, pad, reads_by_position

ACCEPTED: int = lib.PN_ACCEPTED
REJECTED: int = lib.PN_REJECTED
RELEASED: int = lib.PN_RELEASED
MODIFIED: int = lib.PN_MODIFIED
DECLARED = 0x33  # outcomes and states of transactions (4.5.5, 4.5.8), of which proton has no names
TRANSACTIONAL = 0x34
SETTLED_BY_SENDER: int = lib.PN_SND_SETTLED
SECOND: int = lib.PN_RCV_SECOND

Pointer = Any  # a cffi pointer: hashes and compares by address
Delivery = Pointer

# One thread, one loop: one scratch buffer and one delivery tag serve all connections.
_SCRATCH_BYTES = 1 << 20
_scratch = ffi.new("char[]", _SCRATCH_BYTES)
_scratch_view = ffi.buffer(_scratch)
_tag_bytes = ffi.new("char[32]")
_tag_view = ffi.buffer(_tag_bytes)
_tag = ffi.new("pn_delivery_tag_t *")
_tag.start = _tag_bytes

# What arrives is taken out of the engine at once, so a session's window can stay wide open; a change from one of these
# to the other makes proton say so once more. They are bytes, of which proton keeps 31 bits and tells the whole frames:
# they differ by the largest frame there can be.
_OPEN_WINDOWS = (0x7FFF_0000, 0x7FEF_0000)

_flow_frame = struct.Struct(">IBBH")


class Handler(Protocol):
    """What a connection tells its owner. Payloads and strings are copies, deliveries are valid until settled."""

    def on_open(self, container_id: str, hostname: str) -> None: ...

    def on_session(self, session: "Session") -> None: ...

    def on_session_end(self, session: "Session") -> None: ...

    def on_attach(self, link: "Link") -> None:
        """The peer's attach: answer with `accept` or `refuse`, at once or later. For own links: it is attached now."""

    def on_detach(self, link: "Link", closed: bool, condition: str, description: str) -> None:
        """The peer's detach, already answered; the link is of no further use."""

    def on_flow(self, link: "Link") -> None:
        """Credit or drain of a link on which we send has changed, or a link on which we receive is drained."""

    def on_message(self, link: "Link", delivery: Delivery, payload: bytes, batch: bool, settled: bool) -> None: ...

    def on_oversized(self, link: "Link", delivery: Delivery, size_bytes: int, settled: bool) -> None:
        """A message over the link's limit was received whole and thrown away; it waits for its outcome."""

    def on_outcome(self, link: "Link", delivery: Delivery, token: bytes, state: int, settled: bool) -> None:
        """The peer's outcome for what we sent; `state` is 0 when it settled without one. `settled` by the peer.

        On a link on which we receive: its answer to what was offered.
        """

    def on_close(self, condition: str, description: str) -> None:
        """The peer's close, already answered."""


class Session:
    """One AMQP session. `context` is the owner's."""

    __slots__ = ("channel", "context", "engine", "links", "pointer")

    def __init__(self, engine: "Engine", pointer: Pointer) -> None:
        self.engine = engine
        self.pointer = pointer
        self.channel: int | None = None  # the peer's, once it has begun
        self.links: list[Link] = []
        self.context: Any = None

    @property
    def outgoing_bytes(self) -> int:
        """Of deliveries that wait for the peer to open its window."""
        return int(lib.pn_session_outgoing_bytes(self.pointer))

    def end(self, condition: str | None = None, description: str = "") -> None:
        if condition:
            _set_condition(lib.pn_session_condition(self.pointer), condition, description)
        lib.pn_session_close(self.pointer)
        self.engine.needs_padding = True


class Link:
    """One end of a link; `is_sender` is our role. `context` is the owner's.

    `address` is the peer's word for the node: the target's on a link we receive from, else the source's; None if null.
    """

    __slots__ = (
        "address",
        "answered",
        "channel_handle",
        "closed",
        "context",
        "drain_limit",
        "draining",
        "engine",
        "is_sender",
        "max_message_bytes",
        "name",
        "oversized_bytes",
        "partial",
        "pointer",
        "session",
    )

    def __init__(self, engine: "Engine", session: Session, pointer: Pointer) -> None:
        self.engine = engine
        self.session = session
        self.pointer = pointer
        self.name = _text(lib.pn_link_name(pointer))
        self.is_sender = bool(lib.pn_link_is_sender(pointer))
        self.address: str | None = None
        self.channel_handle: tuple[int, int] = (0, 0)
        self.max_message_bytes = 0
        self.partial: bytes | bytearray = b""
        self.oversized_bytes = 0
        self.answered = False  # the peer's attach was; own links need no answer
        self.closed = False
        self.draining = False  # we have asked for our credit back
        self.drain_limit: int | None = None  # the delivery-count at which a drain that found credit has used it up
        self.context: Any = None

    # -- what the peer's attach said

    @property
    def is_refused(self) -> bool:
        """The peer attached without the terminus that is its own: its detach, with the reason, follows (2.6.3)."""
        terminus = lib.pn_link_remote_target if self.is_sender else lib.pn_link_remote_source
        return bool(lib.pn_terminus_get_type(terminus(self.pointer)) == lib.PN_UNSPECIFIED)

    @property
    def settles_second(self) -> bool:
        """On a link on which we receive: the peer settles once it has our outcome, which then waits for its answer."""
        return bool(lib.pn_link_remote_rcv_settle_mode(self.pointer) == SECOND)

    @property
    def source_address(self) -> str | None:
        return _text_or_none(lib.pn_terminus_get_address(lib.pn_link_remote_source(self.pointer)))

    @property
    def target_address(self) -> str | None:
        return _text_or_none(lib.pn_terminus_get_address(lib.pn_link_remote_target(self.pointer)))

    @property
    def is_coordinator(self) -> bool:
        """The target is a transaction coordinator (4.5.1)."""
        return bool(lib.pn_terminus_get_type(lib.pn_link_remote_target(self.pointer)) == lib.PN_COORDINATOR)

    @property
    def is_dynamic(self) -> bool:
        """The peer asks for a node to be created (3.5.3)."""
        terminus = lib.pn_link_remote_source if self.is_sender else lib.pn_link_remote_target
        return bool(lib.pn_terminus_is_dynamic(terminus(self.pointer)))

    @property
    def settled_by_sender(self) -> bool:
        """The peer asked for snd-settle-mode settled: on a link we send on, receive-and-delete."""
        return bool(lib.pn_link_remote_snd_settle_mode(self.pointer) == SETTLED_BY_SENDER)

    @property
    def remote_max_message_bytes(self) -> int:
        return int(lib.pn_link_remote_max_message_size(self.pointer))

    def remote_properties(self) -> dict[Any, Any]:
        value = _value(lib.pn_link_remote_properties(self.pointer))
        return value if isinstance(value, dict) else {}

    def source_filter(self) -> dict[Any, Any]:
        value = _value(lib.pn_terminus_filter(lib.pn_link_remote_source(self.pointer)))
        return value if isinstance(value, dict) else {}

    # -- answering it

    def accept(
        self,
        max_message_bytes: int = 0,
        credit: int = 0,
        *,
        filters: dict[Any, Any] | None = None,
        properties: dict[Any, Any] | None = None,
    ) -> None:
        """Answer the attach: termini and settle modes as received, then grant `credit` if we receive.

        `filters` are those of the source, if they are others than received.
        """
        pointer = self.pointer
        self.answered = True
        lib.pn_terminus_copy(lib.pn_link_source(pointer), lib.pn_link_remote_source(pointer))
        lib.pn_terminus_copy(lib.pn_link_target(pointer), lib.pn_link_remote_target(pointer))
        lib.pn_link_set_snd_settle_mode(pointer, lib.pn_link_remote_snd_settle_mode(pointer))
        lib.pn_link_set_rcv_settle_mode(pointer, lib.pn_link_remote_rcv_settle_mode(pointer))
        if filters is not None:
            _set_value(lib.pn_terminus_filter(lib.pn_link_source(pointer)), filters)
        if properties:
            _set_value(lib.pn_link_properties(pointer), properties)
        self.max_message_bytes = max_message_bytes
        if max_message_bytes:
            lib.pn_link_set_max_message_size(pointer, max_message_bytes)
        lib.pn_link_open(pointer)
        if credit:
            lib.pn_link_flow(pointer, credit)
        self.engine.attaching.append(self)
        self.engine.needs_padding = True

    def refuse(self, condition: str, description: str) -> None:
        """Answer with an attach without a terminus, then a detach that says why (2.6.3)."""
        assert not self.answered
        self.detach(condition, description)

    def detach(self, condition: str | None = None, description: str = "") -> None:
        """Close the link from our side; an attach not answered yet is refused."""
        if self.closed:
            return
        if not self.answered:
            self.answer_without_terminus()
            self.engine.attaching.append(self)
        self.closed = True
        if condition:
            _set_condition(lib.pn_link_condition(self.pointer), condition, description)
        lib.pn_link_close(self.pointer)
        self.engine.needs_padding = True

    def answer_without_terminus(self) -> None:
        """Say that there is no link (2.6.3); a detach is to follow."""
        self.answered = True
        for terminus in (lib.pn_link_source(self.pointer), lib.pn_link_target(self.pointer)):
            lib.pn_terminus_set_type(terminus, lib.PN_UNSPECIFIED)
        lib.pn_link_open(self.pointer)

    # -- receiving

    @property
    def credit(self) -> int:
        """Credit the sender holds: ours to give when we receive, ours to use when we send. Negative: overrun."""
        return int(lib.pn_link_credit(self.pointer))

    def grant(self, credit: int) -> None:
        """Add to the credit of the sender."""
        lib.pn_link_flow(self.pointer, credit)

    def ask_drain(self) -> None:
        """Have the sender use up its credit now; `on_flow` tells when that is 0, unless messages use it up (2.6.7)."""
        self.draining = True
        lib.pn_link_drain(self.pointer, 0)

    # -- sending

    @property
    def drain(self) -> bool:
        return bool(lib.pn_link_get_drain(self.pointer))

    def drained(self) -> None:
        """Use up the credit that is left, and tell the peer, also when deliveries have used it up (2.6.7)."""
        if self.credit > 0:
            self.drain_limit = None
            lib.pn_link_drained(self.pointer)
        elif self.drain_limit is not None:
            self.engine.used_up.append(self)

    def send(
        self, tag: bytes, prefix: bytes, body: bytes, offset: int, settled: bool, transaction: bytes | None = None
    ) -> Delivery:
        """One delivery of `prefix` and `body[offset:]`; needs credit. `tag` has 1 to 32 bytes.

        `transaction`: the id of the one it is a part of.
        """
        pointer = self.pointer
        size = _tag.size = len(tag)
        _tag_view[0:size] = tag
        delivery = lib.pn_delivery(pointer, _tag[0])
        if transaction is not None:
            _set_value(lib.pn_disposition_data(lib.pn_delivery_local(delivery)), [transaction])
            lib.pn_delivery_update(delivery, TRANSACTIONAL)
        lib.pn_link_send(pointer, prefix, len(prefix))
        if length := len(body) - offset:
            lib.pn_link_send(pointer, ffi.from_buffer(body) + offset, length)
        if settled:
            lib.pn_delivery_settle(delivery)
        else:
            self.engine.sent[delivery] = (self, tag)
        lib.pn_link_advance(pointer)
        return delivery


class Engine:
    """One connection. Feed it with `push`, write what `pull` gives, call `tick` in time.

    `needs_padding` is set by whoever makes proton say something else than transfers, flows and dispositions.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        server: bool,
        container_id: str,
        hostname: str | None = None,
        max_frame_size: int = 65536,
        channel_max: int = 4999,
        idle_time_out_ms: int = 240_000,
    ) -> None:
        self._handler = handler
        self._walk = FrameWalk(max_frame_size)
        self.sent: dict[Delivery, tuple[Link, bytes]] = {}
        self.offered: dict[Delivery, Link] = {}
        self.links: dict[Pointer, Link] = {}
        self.sessions: dict[Pointer, Session] = {}
        self.attaching: list[Link] = []
        self.used_up: list[Link] = []  # by deliveries during a drain; the peer is still to be told
        self.needs_padding = False
        self._widths = CONTROL
        self._flow_answers: list[tuple[int, bytes]] = []
        self._saying: set[Session] = set()  # whose flow is among the next output
        self._abandoned = False  # unsettled deliveries ended with their link, and proton will say that they are settled
        self._handles: dict[Link, tuple[int, int]] = {}
        self._header_taken = False
        self._container_id = container_id
        self._freed = False
        transport = self._transport = lib.pn_transport()
        if server:
            lib.pn_transport_set_server(transport)
        lib.pn_transport_set_max_frame(transport, max_frame_size)
        lib.pn_transport_set_channel_max(transport, channel_max)
        # Proton advertises half of what it enforces, so that a peer's heartbeat may be late.
        lib.pn_transport_set_idle_timeout(transport, 2 * idle_time_out_ms)
        connection = self._connection = lib.pn_connection()
        lib.pn_connection_set_container(connection, container_id.encode())
        if hostname:
            lib.pn_connection_set_hostname(connection, hostname.encode())
        self._collector = lib.pn_collector()
        lib.pn_connection_collect(connection, self._collector)
        lib.pn_transport_bind(transport, connection)

    # -- bytes

    def push(self, data: bytes) -> None:
        """Take what the peer sent and call the handler for what is in it.

        Raises ProtocolError for what is not as AMQP has it, after all that came before it: close with it (`close`, or
        with `refusal` before the peer's open); whatever is pushed after it is thrown away.
        """
        whole = self._walk.feed(data)
        view = ffi.from_buffer(whole)
        offset = 0
        size = len(whole)
        transport = self._transport
        for stop in (*self._walk.ends, size):
            while offset < stop:
                taken = lib.pn_transport_push(transport, view + offset, stop - offset)
                if taken <= 0:
                    # The engine found a fault, queued a close that names it, and reads no more.
                    self.needs_padding = True
                    self._dispatch()
                    return
                offset += taken
                self._dispatch()
        if self._walk.flows:
            self._answer_flows()
        if self._walk.error:
            raise self._walk.error

    def pull(self) -> bytes:
        """What is to be written now, whole frames; empty if nothing is."""
        output = self._take_output()
        if self.used_up:
            # Proton writes flows before transfers; this one tells of them.
            self._answer_used_up()
            output += self._take_output()
        return output

    def _take_output(self) -> bytes:
        transport = self._transport
        pending = lib.pn_transport_pending(transport)
        if pending <= 0:
            return b""
        chunks = []
        while pending > 0:
            size = lib.pn_transport_peek(transport, _scratch, min(pending, _SCRATCH_BYTES))
            chunks.append(_scratch_view[0:size])
            lib.pn_transport_pop(transport, size)
            pending = lib.pn_transport_pending(transport)
        self._saying.clear()
        self._header_taken = True
        # Taking output makes events of no interest (PN_TRANSPORT); they must not pile up.
        self._dispatch()
        output = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if self.needs_padding or self._flow_answers or self._widths is EVERYTHING:
            output = self._finish(output)
        return output

    @property
    def finished(self) -> bool:
        """Nothing will be written any more: the socket can be closed."""
        return bool(lib.pn_transport_pending(self._transport) < 0)

    def tick(self, now_ms: int) -> int:
        """Heartbeats and the peer's silence: call at `now_ms` at the latest that it returned; 0 is never."""
        deadline = int(lib.pn_transport_tick(self._transport, now_ms))
        self._dispatch()
        return deadline

    def input_ended(self) -> None:
        lib.pn_transport_close_tail(self._transport)
        self._dispatch()

    # -- the connection

    def open(self) -> None:
        lib.pn_connection_open(self._connection)
        self.needs_padding = True

    def close(self, condition: str | None = None, description: str = "") -> None:
        """Close the connection from our side; what was not opened yet is opened first (2.4.6)."""
        lib.pn_connection_open(self._connection)
        if condition:
            _set_condition(lib.pn_connection_condition(self._connection), condition, description)
        lib.pn_connection_close(self._connection)
        self.needs_padding = True

    def refusal(self, condition: str, description: str) -> bytes:
        """All that is to be written to a peer that has not sent its open: proton says no close before that."""
        error = Described(0x1D, [Symbol(condition), description, {}])
        frames = b"" if self._header_taken else b"AMQP\x00\x01\x00\x00"
        for code, fields in ((0x10, [self._container_id]), (0x18, [error])):
            body = codec.encode(Described(code, fields))
            frames += _flow_frame.pack(8 + len(body), 2, 0, 0) + body
        return pad(frames)

    @property
    def remote_idle_time_out_ms(self) -> int:
        return int(lib.pn_transport_get_remote_idle_timeout(self._transport))

    def fault(self) -> tuple[str, str]:
        """Condition and text of what proton found wrong with the peer's frames; empty if nothing."""
        return _condition(lib.pn_transport_condition(self._transport))

    def free(self) -> None:
        """Give the C objects back. The last call."""
        if self._freed:
            return
        self._freed = True
        self.sent.clear()
        self.offered.clear()
        self.links.clear()
        self.sessions.clear()
        self.attaching.clear()
        self.used_up.clear()
        self._handles.clear()
        lib.pn_transport_unbind(self._transport)
        lib.pn_collector_release(self._collector)
        lib.pn_connection_release(self._connection)
        lib.pn_decref(self._connection)  # released is not yet given back
        lib.pn_decref(self._transport)
        lib.pn_collector_free(self._collector)

    # -- settling what was received

    def settle(self, delivery: Delivery, state: int) -> None:
        """Settle with an outcome that has no fields to tell: accepted, released, modified, or rejected without error.

        For deliveries in either direction.
        """
        lib.pn_delivery_update(delivery, state)
        lib.pn_delivery_settle(delivery)

    def reject(self, delivery: Delivery, condition: str, description: str) -> None:
        disposition = lib.pn_delivery_local(delivery)
        _set_condition(lib.pn_disposition_condition(disposition), condition, description)
        lib.pn_delivery_update(delivery, REJECTED)
        lib.pn_delivery_settle(delivery)

    def offer(self, link: Link, delivery: Delivery, state: int) -> None:
        """Tell the outcome of what was received and let the peer settle first; `on_outcome` has its answer (2.6.12)."""
        lib.pn_delivery_update(delivery, state)
        self.offered[delivery] = link

    def tag(self, delivery: Delivery) -> bytes:
        return _tag_of(delivery)

    def is_settled(self, delivery: Delivery) -> bool:
        """The peer has settled it."""
        return bool(lib.pn_delivery_settled(delivery))

    def describe_rejected(self, delivery: Delivery, condition: str, description: str, info: dict[Any, Any]) -> None:
        """What `rejected` will say when it is settled with or offered (3.4.2)."""
        _set_condition(lib.pn_disposition_condition(lib.pn_delivery_local(delivery)), condition, description, info)

    def describe_modified(
        self, delivery: Delivery, failed: bool, undeliverable_here: bool, annotations: dict[Any, Any]
    ) -> None:
        """What `modified` will say when it is settled with or offered (3.4.5)."""
        disposition = lib.pn_delivery_local(delivery)
        lib.pn_disposition_set_failed(disposition, failed)
        lib.pn_disposition_set_undeliverable(disposition, undeliverable_here)
        if annotations:
            _set_value(lib.pn_disposition_annotations(disposition), annotations)

    def forget(self, delivery: Delivery) -> None:
        """Settle what the peer has settled; nothing goes out."""
        lib.pn_delivery_settle(delivery)

    def rejection(self, delivery: Delivery) -> tuple[str, str, dict[Any, Any]]:
        """Condition, description and info of the peer's `rejected` (3.4.2)."""
        condition = lib.pn_disposition_condition(lib.pn_delivery_remote(delivery))
        info = _value(lib.pn_condition_info(condition))
        return (*_condition(condition), info if isinstance(info, dict) else {})

    def modification(self, delivery: Delivery) -> tuple[bool, dict[Any, Any]]:
        """Undeliverable-here and message-annotations of the peer's `modified` (3.4.5)."""
        disposition = lib.pn_delivery_remote(delivery)
        annotations = _value(lib.pn_disposition_annotations(disposition))
        undeliverable = bool(lib.pn_disposition_is_undeliverable(disposition))
        return undeliverable, annotations if isinstance(annotations, dict) else {}

    # -- transactions (4.4)

    def transaction_of(self, delivery: Delivery) -> bytes | None:
        """The id of the transaction that a message received is a part of, empty if it says none; else None."""
        if lib.pn_delivery_remote_state(delivery) != TRANSACTIONAL:
            return None
        return self.transactional_state(delivery)[0]

    def transactional_state(self, delivery: Delivery) -> tuple[bytes, Described | None]:
        """Transaction id, empty if there is none, and outcome of the peer's transactional-state (4.5.8)."""
        size = lib.pn_data_encode(lib.pn_disposition_data(lib.pn_delivery_remote(delivery)), _scratch, _SCRATCH_BYTES)
        if size <= 0:
            return b"", None
        read = _transactional_state if size <= _SHORT_STATE_BYTES else _transactional_state.__wrapped__
        return read(_scratch_view[0:size])

    def settle_in(self, transaction: bytes, delivery: Delivery, outcome: int) -> None:
        """Settle with the outcome, which has no fields to tell, as a part of the transaction."""
        data = lib.pn_disposition_data(lib.pn_delivery_local(delivery))
        encoded = _transactional_outcome(transaction, outcome)
        lib.pn_data_clear(data)
        lib.pn_data_decode(data, encoded, len(encoded))
        self.settle(delivery, TRANSACTIONAL)

    def describe_in(self, transaction: bytes, delivery: Delivery, outcome: Described) -> None:
        """What `TRANSACTIONAL` will say when it is settled with or offered."""
        _set_value(lib.pn_disposition_data(lib.pn_delivery_local(delivery)), [transaction, outcome])

    def declare(self, delivery: Delivery, transaction: bytes) -> None:
        """Answer a declare (4.5.5)."""
        _set_value(lib.pn_disposition_data(lib.pn_delivery_local(delivery)), [transaction])
        self.settle(delivery, DECLARED)

    # -- own sessions and links (client side)

    def begin(self) -> Session:
        pointer = lib.pn_session(self._connection)
        lib.pn_session_open(pointer)
        session = self.sessions[pointer] = Session(self, pointer)
        return session

    def attach(
        self,
        session: Session,
        name: str,
        *,
        sender: bool,
        source: str,
        target: str,
        receive_and_delete: bool = False,
        credit: int = 0,
    ) -> Link:
        """Attach an own link; `on_attach` tells when the peer has answered."""
        make = lib.pn_sender if sender else lib.pn_receiver
        pointer = make(session.pointer, name.encode())
        for terminus, address in ((lib.pn_link_source(pointer), source), (lib.pn_link_target(pointer), target)):
            lib.pn_terminus_set_address(terminus, address.encode())
        if not sender:
            lib.pn_link_set_snd_settle_mode(pointer, lib.PN_SND_SETTLED if receive_and_delete else lib.PN_SND_UNSETTLED)
            lib.pn_link_set_rcv_settle_mode(pointer, lib.PN_RCV_FIRST if receive_and_delete else lib.PN_RCV_SECOND)
        lib.pn_link_open(pointer)
        if credit:
            lib.pn_link_flow(pointer, credit)
        link = self.links[pointer] = Link(self, session, pointer)
        link.answered = True
        session.links.append(link)
        self.attaching.append(link)
        return link

    def attach_coordinator(self, session: Session, name: str) -> Link:
        """Attach an own link to the peer's coordinator of transactions (4.5.1)."""
        pointer = lib.pn_sender(session.pointer, name.encode())
        lib.pn_terminus_set_address(lib.pn_link_source(pointer), name.encode())
        lib.pn_terminus_set_type(lib.pn_link_target(pointer), lib.PN_COORDINATOR)
        lib.pn_link_open(pointer)
        link = self.links[pointer] = Link(self, session, pointer)
        session.links.append(link)
        self.attaching.append(link)
        return link

    # -- events

    def _dispatch(self) -> None:
        try:
            self._dispatch_events()
        except BaseException:
            lib.pn_collector_pop(self._collector)  # or it would be met again
            raise

    def _dispatch_events(self) -> None:
        collector = self._collector
        handler = self._handler
        sent = self.sent
        peek, pop, kind_of = lib.pn_collector_peek, lib.pn_collector_pop, lib.pn_event_type
        while event := peek(collector):
            kind = kind_of(event)
            if kind == _DELIVERY:
                delivery = lib.pn_event_delivery(event)
                entry = sent.get(delivery)
                if entry is None:
                    self._received(delivery)
                elif lib.pn_delivery_updated(delivery):
                    settled = lib.pn_delivery_settled(delivery)
                    state = lib.pn_delivery_remote_state(delivery)
                    if settled or state >= ACCEPTED:  # `received` (3.4.1) is no outcome
                        del sent[delivery]
                        handler.on_outcome(entry[0], delivery, entry[1], state, settled)
            elif kind == _LINK_FLOW:
                link = self.links.get(lib.pn_event_link(event))
                if link is None or link.closed:
                    pass
                elif link.is_sender:
                    handler.on_flow(link)
                elif link.draining and link.credit <= 0:
                    link.draining = False
                    handler.on_flow(link)
            elif kind in _LIFECYCLE:
                self._lifecycle(kind, event)
            pop(collector)

    def _received(self, delivery: Delivery) -> None:
        pointer = lib.pn_delivery_link(delivery)
        link = self.links.get(pointer)
        if link is None or link.is_sender or not lib.pn_delivery_readable(delivery):
            if delivery in self.offered:
                self._answered(delivery)
            elif link is not None and link.is_sender and not lib.pn_delivery_updated(delivery):
                # The engine may tell so late that nothing is being pushed.
                self._walk.fail(IllegalState("A transfer came on a link to its sender."))
            return
        pending = lib.pn_delivery_pending(delivery)
        partial = lib.pn_delivery_partial(delivery)
        if pending <= _SCRATCH_BYTES and not partial and not link.partial and not link.oversized_bytes:
            # The usual case: the whole message is here.
            lib.pn_link_recv(pointer, _scratch, pending)
            payload = _scratch_view[0:pending]
            if link.max_message_bytes and pending > link.max_message_bytes:
                link.oversized_bytes = pending
        else:
            self._read_part(link, pending)
            if partial and not lib.pn_delivery_aborted(delivery):
                return
            payload = bytes(link.partial)
        link.partial = b""
        batches = self._walk.batches
        batch = False
        if batches:
            key = (*link.channel_handle, _tag_of(delivery))
            batch = key in batches
            batches.discard(key)
        oversized_bytes, link.oversized_bytes = link.oversized_bytes, 0
        if lib.pn_delivery_aborted(delivery):
            lib.pn_link_advance(pointer)
            lib.pn_delivery_settle(delivery)
            return
        lib.pn_link_advance(pointer)
        settled = lib.pn_delivery_settled(delivery)
        if oversized_bytes:
            self._handler.on_oversized(link, delivery, oversized_bytes, settled)
        else:
            self._handler.on_message(link, delivery, payload, batch, settled)

    def _answered(self, delivery: Delivery) -> None:
        settled = lib.pn_delivery_settled(delivery)
        state = lib.pn_delivery_remote_state(delivery)
        if settled or state >= ACCEPTED:
            self._handler.on_outcome(self.offered.pop(delivery), delivery, _tag_of(delivery), state, settled)

    def _read_part(self, link: Link, pending: int) -> None:
        """Read on in a delivery of several transfers; beyond the link's limit only its size is kept."""
        parts = link.partial if isinstance(link.partial, bytearray) else bytearray(link.partial)
        while pending > 0:
            count = lib.pn_link_recv(link.pointer, _scratch, min(pending, _SCRATCH_BYTES))
            if count <= 0:
                break
            pending -= count
            if link.oversized_bytes:
                link.oversized_bytes += count
            else:
                parts += _scratch_view[0:count]
                if link.max_message_bytes and len(parts) > link.max_message_bytes:
                    link.oversized_bytes = len(parts)
                    parts = bytearray()
        link.partial = parts

    def _lifecycle(self, kind: int, event: Pointer) -> None:
        handler = self._handler
        if kind == lib.PN_LINK_REMOTE_OPEN:
            pointer = lib.pn_event_link(event)
            link = self.links.get(pointer)
            if link is None:
                session = self.sessions[lib.pn_link_session(pointer)]
                link = self.links[pointer] = Link(self, session, pointer)
                session.links.append(link)
            if self._walk.attached:
                link.channel_handle = self._walk.attached.popleft()
            link.address = link.source_address if link.is_sender else link.target_address
            handler.on_attach(link)
        elif kind in (lib.PN_LINK_REMOTE_CLOSE, lib.PN_LINK_REMOTE_DETACH):
            pointer = lib.pn_event_link(event)
            link = self.links.pop(pointer, None)
            if link is not None:
                self._detached(link, kind == lib.PN_LINK_REMOTE_CLOSE)
        elif kind == lib.PN_SESSION_REMOTE_OPEN:
            pointer = lib.pn_event_session(event)
            channel = self._walk.begun.popleft()
            if pointer in self.sessions:
                self.sessions[pointer].channel = channel
                return  # ours, answered
            session = self.sessions[pointer] = Session(self, pointer)
            session.channel = channel
            lib.pn_session_open(pointer)
            self.needs_padding = True
            handler.on_session(session)
        elif kind == lib.PN_SESSION_REMOTE_CLOSE:
            self._ended(lib.pn_event_session(event))
        elif kind == lib.PN_CONNECTION_REMOTE_OPEN:
            properties = _value(lib.pn_connection_remote_properties(self._connection))
            if isinstance(properties, dict) and reads_by_position(properties):
                self._widths = EVERYTHING
            handler.on_open(
                _text(lib.pn_connection_remote_container(self._connection)),
                _text(lib.pn_connection_remote_hostname(self._connection)),
            )
        elif kind == lib.PN_CONNECTION_REMOTE_CLOSE:
            condition, description = _condition(lib.pn_connection_remote_condition(self._connection))
            lib.pn_connection_close(self._connection)
            self.needs_padding = True
            handler.on_close(condition, description)

    def _detached(self, link: Link, closed: bool) -> None:
        condition, description = _condition(lib.pn_link_remote_condition(link.pointer))
        answered = link.closed
        link.closed = True
        link.session.links.remove(link)
        self._forget_deliveries(link)
        self._handler.on_detach(link, closed, condition, description)
        if not answered:
            if not link.answered:
                link.answer_without_terminus()
            if closed:
                lib.pn_link_close(link.pointer)
            else:
                lib.pn_link_detach(link.pointer)
        self._handles.pop(link, None)
        lib.pn_link_free(link.pointer)
        self.needs_padding = True

    def _ended(self, pointer: Pointer) -> None:
        session = self.sessions.pop(pointer, None)
        if session is None:
            return
        condition, description = _condition(lib.pn_session_remote_condition(pointer))
        for link in list(session.links):
            self.links.pop(link.pointer, None)
            link.closed = True
            self._forget_deliveries(link)
            self._handler.on_detach(link, True, condition, description)
            self._handles.pop(link, None)
        session.links.clear()
        self._handler.on_session_end(session)
        lib.pn_session_close(pointer)
        lib.pn_session_free(pointer)
        self.needs_padding = True

    def _forget_deliveries(self, link: Link) -> None:
        """Proton frees a link's deliveries with it, and settles them in doing so."""
        if link.is_sender:
            for delivery in [delivery for delivery, (owner, _) in self.sent.items() if owner is link]:
                del self.sent[delivery]
                self._abandoned = True
        elif self.offered:
            self.offered = {delivery: owner for delivery, owner in self.offered.items() if owner is not link}

    # -- flows that proton leaves unanswered

    def _answer_flows(self) -> None:
        """Queue answers to `echo`, and to a drain that finds no credit to give back.

        Proton answers a drain that uses up credit. For the others it is made to say the session's flow (by a change of
        the session's window that is taken back), which `_finish` completes with the link's fields.
        """
        flows, self._walk.flows = self._walk.flows, []
        by_handle = {link.channel_handle: link for link in self.links.values()}
        for flow in flows:
            if flow.handle is None:
                session = next((each for each in self.sessions.values() if each.channel == flow.channel), None)
                if session is not None:
                    self._say_session_flow(session)
                continue
            link = by_handle.get((flow.channel, flow.handle))
            if link is None or link.closed:
                continue
            if flow.drain and link.is_sender:
                link.drain_limit = flow.limit if link.credit > 0 else None
            if link.credit > 0 and flow.drain:
                continue
            count = (flow.limit - link.credit) & 0xFFFFFFFF if link.is_sender else 0
            if not link.is_sender:
                if flow.drain:
                    continue  # a sender answers with it, and asks nothing
                link.grant(0)
                self._say_session_flow(link.session)
                continue
            self._say_link_flow(link, count, max(link.credit, 0), flow.drain)

    def _answer_used_up(self) -> None:
        """Answer drains whose credit went into deliveries, of which proton says nothing, once those are written."""
        waiting, self.used_up = self.used_up, []
        for link in waiting:
            if link.closed or link.drain_limit is None:
                continue
            if lib.pn_link_queued(link.pointer):
                self.used_up.append(link)  # the session's window holds them back
            else:
                self._say_link_flow(link, link.drain_limit, 0, True)
                link.drain_limit = None

    def _say_link_flow(self, link: Link, delivery_count: int, credit: int, drain: bool) -> None:
        handle = self._handles.get(link)
        if handle is None:
            return
        values = (codec.encode(codec.UInt(value)) for value in (handle[1], delivery_count, credit))
        self._say_session_flow(link.session)
        self._flow_answers.append((handle[0], b"".join(values) + b"\x43" + (b"\x41" if drain else b"\x42")))

    def _say_session_flow(self, session: Session) -> None:
        if session in self._saying:
            return
        self._saying.add(session)
        first, second = _OPEN_WINDOWS
        capacity = lib.pn_session_get_incoming_capacity(session.pointer)
        lib.pn_session_set_incoming_capacity(session.pointer, second if capacity == first else first)

    def _finish(self, output: bytes) -> bytes:
        """Note handles of our attaches, complete flow answers, leave out what was not settled, pad what needs it."""
        answers, self._flow_answers = self._flow_answers, []
        if self.attaching or answers or self._abandoned:
            output = self._walk_output(output, answers)
            self._abandoned = False
        self.needs_padding = False
        return pad(output, self._widths)

    def _walk_output(self, output: bytes, answers: list[tuple[int, bytes]]) -> bytes:
        frames = []
        at = 8 if output[:4] == b"AMQP" else 0
        frames.append(output[:at])
        while at < len(output):
            size = int.from_bytes(output[at : at + 4], "big")
            frame = output[at : at + size]
            at += size
            channel = int.from_bytes(frame[6:8], "big")
            code = frame[10] if size > 10 else 0
            if code == 0x12 and self.attaching:
                fields = codec.decode(frame, 8)[0].value
                for link in self.attaching:
                    if link.name == fields[0] and link.is_sender is not bool(fields[2]):
                        if not link.closed:  # it may be gone already, and would stay here for ever
                            self._handles[link] = (channel, fields[1])
                        self.attaching.remove(link)
                        break
            elif code == 0x15 and self._abandoned:
                role, _, _, _, state = (*codec.decode(frame, 8)[0].value, None, None, None, None)[:5]
                if role is False and state is None:
                    continue  # a link's end settles nothing: its locks last (2.6.6); we settle with a state only
            elif code == 0x13 and answers and frame[11] == 0xC0 and frame[13] == 4:
                # One flow of the session carries all that is to be said of its links.
                said = [extra for at_channel, extra in answers if at_channel == channel]
                answers = [answer for answer in answers if answer[0] != channel]
                frames.extend(
                    _flow_frame.pack(size + len(extra), 2, 0, channel)
                    + b"\x00\x53\x13\xc0"
                    + bytes((frame[12] + len(extra), 9))
                    + frame[14:]
                    + extra
                    for extra in said
                )
                if said:
                    continue
            frames.append(frame)
        self._flow_answers.extend(answers)  # not said yet
        return b"".join(frames)


_DELIVERY: int = lib.PN_DELIVERY
_LINK_FLOW: int = lib.PN_LINK_FLOW
_LIFECYCLE = frozenset(
    (
        lib.PN_LINK_REMOTE_OPEN,
        lib.PN_LINK_REMOTE_CLOSE,
        lib.PN_LINK_REMOTE_DETACH,
        lib.PN_SESSION_REMOTE_OPEN,
        lib.PN_SESSION_REMOTE_CLOSE,
        lib.PN_CONNECTION_REMOTE_OPEN,
        lib.PN_CONNECTION_REMOTE_CLOSE,
    )
)
_TRACKING_ID = Symbol("com.microsoft:tracking-id")


def _text(pointer: Pointer) -> str:
    return "" if pointer == ffi.NULL else ffi.string(pointer).decode("utf-8", "replace")


def _text_or_none(pointer: Pointer) -> str | None:
    return None if pointer == ffi.NULL else _text(pointer)


def _tag_of(delivery: Delivery) -> bytes:
    tag = lib.pn_delivery_tag(delivery)
    return bytes(ffi.buffer(tag.start, tag.size))


def _condition(condition: Pointer) -> tuple[str, str]:
    if not lib.pn_condition_is_set(condition):
        return "", ""
    return _text(lib.pn_condition_get_name(condition)), _text(lib.pn_condition_get_description(condition))


def _set_condition(condition: Pointer, name: str, description: str, info: dict[Any, Any] | None = None) -> None:
    """The info map makes the error's list have all three elements on the wire."""
    lib.pn_condition_set_name(condition, name.encode())
    lib.pn_condition_set_description(condition, description.encode())
    _set_value(lib.pn_condition_info(condition), info or {})


# The deliveries of one transaction have mostly the same few states. Longer ones are not kept.
_SHORT_STATE_BYTES = 128


@lru_cache(maxsize=1024)
def _transactional_state(fields: bytes) -> tuple[bytes, Described | None]:
    decoded = codec.decode_exactly(fields)
    transaction, outcome = (*decoded, None, None)[:2] if isinstance(decoded, list) else (None, None)
    return (
        transaction if isinstance(transaction, bytes) else b"",
        outcome if isinstance(outcome, Described) else None,
    )


@lru_cache(maxsize=1024)
def _transactional_outcome(transaction: bytes, outcome: int) -> bytes:
    return codec.encode([transaction, Described(ULong(outcome), [])])


def _set_value(data: Pointer, value: Any) -> None:
    lib.pn_data_clear(data)
    encoded = codec.encode(value)
    lib.pn_data_decode(data, encoded, len(encoded))


def _value(data: Pointer) -> Any:
    """The value in proton's tree, decoded by our own codec; None if there is none.

    Raises ProtocolError (via the codec's limits) if the peer nested too deep.
    """
    if data == ffi.NULL:
        return None
    size = lib.pn_data_encoded_size(data)
    if size <= 0:
        return None
    buffer = ffi.new("char[]", size)
    if lib.pn_data_encode(data, buffer, size) < 0:
        raise ProtocolError("a value that cannot be read")
    return codec.decode_exactly(bytes(ffi.buffer(buffer, size)))
