"""One AMQP connection without I/O, either side of it: bytes in, calls on a handler, bytes out.

It adds what proton does not do: answers to flows (`flow_answers`), message formats and checks of incoming frames
(`incoming`), performatives at full width for peers that need them (`outgoing`).
"""

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from itertools import islice
from typing import Any, Final, Protocol

from protocol.codec import Symbol, array
from protocol.engine.deliveries import ACCEPTED, Delivery, tag_of
from protocol.engine.links import Link, Session
from protocol.engine.padding import reads_by_position
from protocol.engine.proton.flow_answers import FlowAnswers
from protocol.engine.proton.incoming import FrameWalk, IllegalState
from protocol.engine.proton.library import (
    SCRATCH_BYTES,
    Pointer,
    condition_of,
    ffi,
    lib,
    map_of,
    scratch,
    set_condition,
    set_value,
    symbols_of,
    text_of,
)
from protocol.engine.proton.native import address_of, delivery_at, link_at, native
from protocol.engine.proton.outgoing import OutputWalk, refusal
from protocol.engine.proton.state_bytes import StateTooLarge
from protocol.engine.proton.transport import Transport
from protocol.engine.unfinished import UNBOUNDED, Pool, Unfinished

# Bound once: these are called for each read, event or message, and finding a function in `lib` takes a quarter of the
# time of calling it.
_push = lib.pn_transport_push
_first_event, _pop_event, _kind_of = lib.pn_collector_peek, lib.pn_collector_pop, lib.pn_event_type
_delivery_of, _link_of = lib.pn_event_delivery, lib.pn_delivery_link
_receive, _advance = lib.pn_link_recv, lib.pn_link_advance
_is_settled, _remote_state = lib.pn_delivery_settled, lib.pn_delivery_remote_state

# The bytes of a frame with a transfer that are not of its message, at most.
_TRANSFER_HEAD_BYTES = 72
# Proton gets so many bytes at once, until so many events have come of them.
_PIECE_BYTES, _EVENTS_AT_ONCE = 8 << 10, 64
# Of a delivery that proton keeps, with its tag and the smallest buffer; measured for those that were sent and have no
# outcome: 840 bytes, and 1,120 without the extension.
_DELIVERY_BYTES = 1200

_DELIVERY: int = lib.PN_DELIVERY
_LINK_FLOW: int = lib.PN_LINK_FLOW
_LINK_OPEN: int = lib.PN_LINK_REMOTE_OPEN
_LINK_CLOSE: int = lib.PN_LINK_REMOTE_CLOSE
_LINK_DETACH: int = lib.PN_LINK_REMOTE_DETACH
_SESSION_OPEN: int = lib.PN_SESSION_REMOTE_OPEN
_SESSION_CLOSE: int = lib.PN_SESSION_REMOTE_CLOSE
_CONNECTION_OPEN: int = lib.PN_CONNECTION_REMOTE_OPEN
_CONNECTION_CLOSE: int = lib.PN_CONNECTION_REMOTE_CLOSE
_FAULT: int = lib.PN_TRANSPORT_ERROR


class State(IntEnum):
    """What the engine has of a link or session when the peer begins or ends it. A connection is always OPEN."""

    UNKNOWN = 0  # nothing
    OPEN = 1  # begun by a side, and ended by none
    CLOSED = 2  # a link that was closed from our side; the peer's detach is due
    LEAVING = 3  # a link that the peer has detached, and whose detach is answered later


class Handler(Protocol):
    """The events of a connection. Payloads and strings are copies; deliveries are valid until settled."""

    def on_open(self, container_id: str, hostname: str) -> None: ...

    def on_session(self, session: Session) -> None: ...

    def on_session_end(self, session: Session) -> None: ...

    def on_attach(self, link: Link) -> None:
        """The peer attaches: answer by `accept` or `refuse`, at once or later. Or a link of our own is attached."""

    def on_detach(self, link: Link, closed: bool, condition: str, description: str) -> None:
        """The peer has detached the link, which cannot be used any more.

        It is answered behind this call, unless the link `detaches_later`.
        """

    def on_flow(self, link: Link) -> None:
        """Credit or drain of a sending link has changed, or a receiving link is drained."""

    def on_message(
        self, link: Link, delivery: Delivery, payload: bytes, batch: bool, settled: bool, state: int
    ) -> None:
        """A whole message. `state` is the code of the delivery's state, such as TRANSACTIONAL; 0 if it has none."""

    def on_oversized(self, link: Link, delivery: Delivery, size_bytes: int, settled: bool) -> None:
        """A message beyond the link's limit was received to its end and thrown away; it waits for its outcome."""

    def on_crowded(self, link: Link, delivery: Delivery, settled: bool) -> None:
        """A message was thrown away because too much was unfinished; it waits for its outcome."""

    def on_aborted(self, link: Link) -> None:
        """The peer aborted a delivery before it was complete (2.6.14). It has used credit."""

    def on_outcome(self, link: Link, delivery: Delivery, token: bytes, state: int, settled: bool) -> None:
        """The peer's outcome for our delivery; `state` is 0 if it settled without one. `settled`: the peer settled it.

        On a receiving link this is the answer to an offered outcome.
        """

    def on_close(self, condition: str, description: str) -> None:
        """The peer has closed the connection, which is answered already."""


class Engine:
    """One connection. Feed it with `push`, write what `pull` returns, call `tick` in time.

    Implements `protocol.engine.links.LinkEngine`. `offered` are received deliveries that wait for the peer's answer.
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
        handle_max: int | None = None,
        idle_time_out_ms: int = 240_000,
        unfinished: Unfinished | None = None,
    ) -> None:
        self._handler = handler
        self.unfinished = unfinished or Unfinished(Pool(UNBOUNDED), UNBOUNDED)
        self.links: dict[Pointer, Link] = {}
        self._walk = FrameWalk(max_frame_size, sends_batches=not server, links=self.links)
        self.sent: dict[Delivery, tuple[Link, bytes]] = {}
        self.sent_deliveries = 0
        self.buffers: dict[Delivery, int] = {}
        self.buffer_bytes = 0
        self.offered: dict[Delivery, Link] = {}
        self.outputs = 0
        self._reads = False  # inside `push_some`
        self._ahead: list[bytes] = []  # output that proton has written since the last `pull`, if there is no pump
        self.sessions: dict[Pointer, Session] = {}
        # By the peer's channel and handle, once it has attached and begun.
        self._by_handle: dict[tuple[int, int], Link] = {}
        self._by_channel: dict[int, Session] = {}
        self._detaching: dict[Pointer, Link] = {}  # those whose peer's detach is not answered
        self.used_up: list[Link] = []
        self.sending: list[Session] = []
        self.transfer_bytes = 1  # until the peer's open is here
        self.wide_windows = self._walk.wide
        self._batches: set[tuple[int, int]] = set()  # channel and handle of links whose next delivery is a batch
        self.output = OutputWalk(self._walk.translated, handle_max)
        self._flow_answers = FlowAnswers(self.output)
        self._waiting: tuple[bytes, int] | None = None  # what the walk gave, and the offset up to which proton has it
        self._header_taken = False
        # True if nothing will be written any more, as of the last `pull`; so the socket can be closed.
        self.finished = False
        self._container_id = container_id
        self._freed = False
        self._proton = Transport(
            server=server,
            container_id=container_id,
            hostname=hostname,
            max_frame_size=max_frame_size,
            channel_max=channel_max,
            idle_time_out_ms=idle_time_out_ms,
        )
        self._transport, self._connection = self._proton.pointer, self._proton.connection
        self._collector = self._proton.collector
        # It moves the bytes if it is there; links are added to it by their owners.
        self.pump = native and native.Pump(address_of(self._transport), address_of(self._collector), self)

    def limit_state(self, maximum_bytes: int) -> None:
        """Limit the estimated memory of the peer's open, sessions and links; beyond the limit `push` raises."""
        self._walk.kept.maximum = maximum_bytes

    def remote_properties(self) -> dict[Any, Any]:
        """Return the properties of the peer's open."""
        return map_of(lib.pn_connection_remote_properties(self._connection))

    def desired_capabilities(self) -> tuple[str, ...]:
        """Return the capabilities that the peer's open asks for (2.7.1)."""
        return symbols_of(lib.pn_connection_remote_desired_capabilities(self._connection))

    @property
    def held_bytes(self) -> int:
        """An estimate of what the connection keeps: state, input, unfinished and unsettled deliveries, and output.

        It takes longer if there are many links.
        """
        held = self._walk.held_bytes + self.unfinished.held_bytes + self.buffer_bytes
        if self._waiting is not None:
            held += len(self._waiting[0])
        for pointer in self.sessions:
            held += lib.pn_session_outgoing_bytes(pointer)
        for link in self.links.values():
            held += _DELIVERY_BYTES * link.kept_deliveries
        return held

    @property
    def has_flow(self) -> bool:
        """True if a flow came with the last `push`, so that windows may be open again."""
        return self._walk.has_flow

    # -- bytes

    def push(self, data: bytes) -> None:
        """Take bytes from the peer and call the handler for their events.

        Raises ProtocolError for invalid bytes, after the events of all bytes before them. Then close the connection
        with this error (by `close`, or by `refusal` before the peer's open). Bytes that are pushed later are thrown
        away.
        """
        goes_on = self.push_some(data)
        while goes_on:
            goes_on = self.push_some()

    def push_some(self, data: bytes = b"") -> bool:
        """Do what `push` does, but stop after some milliseconds of work. True if there is more to do with these bytes.

        Then call it again until there is not; and pull between, since what ends makes room for more.
        """
        self._reads = True
        try:
            return self._push_some(data)
        finally:
            self._reads = False

    def _push_some(self, data: bytes) -> bool:
        walk = self._walk
        if self._waiting is None:
            if not walk.is_interrupted:
                walk.has_flow = False  # else proton may have to get the flow yet
            walk.sent_deliveries = self.sent_deliveries
            whole, offset = walk.feed(data), 0
        else:
            walk.add(data)
            (whole, offset), self._waiting = self._waiting, None
        stops = walk.stops
        while stops or offset < len(whole):
            stop, batch = stops[0] if stops else (len(whole), None)
            if offset < stop:
                offset = self._give(whole, offset, stop)
                if offset < 0:
                    walk.close()  # proton has queued a close that names the fault, and reads no more
                    stops.clear()
                    return False
                if offset < stop:
                    self._waiting = whole, offset
                    return True
            if stops:
                del stops[0]
            if batch is not None:
                self._batches.add(batch)
        if walk.flows:
            flows, walk.flows = walk.flows, []
            self._flow_answers.answer(flows, self._by_handle, self._by_channel)
        if walk.error:
            raise walk.take_error()  # which refers to this frame from now on, so nothing here refers to it
        return walk.is_interrupted

    def _give(self, data: bytes, offset: int, stop: int) -> int:
        """Give proton the bytes from `offset` to `stop`, or to an offset before, after which there were many events.

        Returns that offset; -1 if proton found a fault.
        """
        if self.pump is not None:
            return int(self.pump.push(data, offset, stop))
        transport = self._transport
        if not offset and stop <= _PIECE_BYTES:
            offset = _push(transport, data, stop)  # the usual case: it takes all
            events = self._dispatch()
            if offset == stop:
                return offset
            if offset <= 0:
                return -1
        else:
            events = 0
        view = ffi.from_buffer(data)
        while offset < stop and events < _EVENTS_AT_ONCE:
            taken = _push(transport, view + offset, min(stop - offset, _PIECE_BYTES))
            events += self._dispatch()
            if taken <= 0:
                return -1
            offset += taken
        return offset

    def pull(self) -> bytes:
        """The output to write now, in whole frames; empty if there is none."""
        output = self.pull_pieces()
        return b"".join(output) if isinstance(output, list) else output

    def pull_pieces(self) -> bytes | list[memoryview]:
        """Return the output to write now, as bytes; or, if there is much, in pieces of whole frames."""
        self.outputs += 1
        output = self._take_output()
        if self.sending:
            for session in self.sending:
                session.given = 0
            self.sending.clear()
        if self.used_up:
            # Proton writes flows before transfers, but these flows count the transfers, so they come after them.
            self.used_up = self._flow_answers.answer_used_up(self.used_up)
            output = b"".join((*_pieces(output), *_pieces(self._take_output())))
        return output

    def write_ahead(self) -> None:
        """Let proton write what it can now; the next `pull` has it."""
        if self._reads:
            lib.pn_transport_pending(self._transport)  # as far as its buffer goes; its events are still to be handled
        elif self.pump is not None:
            self.pump.write_ahead()
        elif written := self._take_written():
            self._ahead.append(written)

    def _take_output(self) -> bytes | list[memoryview]:
        output: bytes | list[memoryview]
        if self.pump is not None:
            output = self.pump.pull()
            self.finished = self.pump.finished
        else:
            output = self._take_written()
            if self._ahead:
                output = b"".join((*self._ahead, output))
                self._ahead.clear()
        if not output:
            return b""
        if self._flow_answers.saying:
            self._flow_answers.saying.clear()
        self._header_taken = True
        if self.output.is_due or self._walk.translated:
            output = self.output.walk(b"".join(_pieces(output)))
        return output

    def _take_written(self) -> bytes:
        output = self._proton.take_written(self.output.is_due)
        self.finished = self._proton.finished
        return output

    def last_tags(self, link: Link, count: int) -> list[bytes]:
        """The tags of the last `count` unsettled deliveries on the link, or of all if there are fewer; in order."""
        if link.outgoing is not None:
            return list(link.outgoing.last_tags(count))
        tags = islice((tag for each, tag in reversed(self.sent.values()) if each is link), count)
        return [*tags][::-1]

    def tick(self, now_ms: int) -> int:
        """Send heartbeats, check the peer's silence. Call it again at the returned time at the latest; 0 is never."""
        deadline = int(lib.pn_transport_tick(self._transport, now_ms))
        self._dispatch()
        return deadline

    def input_ended(self) -> None:
        lib.pn_transport_close_tail(self._transport)
        self._dispatch()

    # -- the connection

    def open(self, capabilities: Sequence[Symbol] = ()) -> None:
        """`capabilities` are those that are offered."""
        if capabilities:
            set_value(lib.pn_connection_offered_capabilities(self._connection), array(Symbol, capabilities))
        lib.pn_connection_open(self._connection)
        self.output.is_due = True

    def close(self, condition: str | None = None, description: str = "") -> None:
        """Close the connection from our side; if it is not open yet, open it first (2.4.6)."""
        lib.pn_connection_open(self._connection)
        if condition:
            set_condition(lib.pn_connection_condition(self._connection), condition, description)
        lib.pn_connection_close(self._connection)
        self.output.is_due = True

    def refusal(self, condition: str, description: str) -> bytes:
        """The whole output for a peer that has not sent its open, because proton sends no close before that."""
        return refusal(self._container_id, condition, description, self._header_taken)

    def fault(self) -> tuple[str, str]:
        """Condition and text of a fault that proton found in the peer's frames; empty if there is none."""
        return self._proton.fault()

    def free(self) -> None:
        """Free the C objects. This must be the last call."""
        if self._freed:
            return
        self._freed = True
        self.unfinished.give_back_all()
        if self.pump is not None:
            self.pump.close()
        # Nothing of the connection refers to itself any more, so its memory is free at once: Python looks for what does
        # so only when there are many new objects, whatever they hold.
        for link in self.links.values():
            link.forget_owner()
        for session in self.sessions.values():
            session.links.clear()
            session.context = None
        del self._handler
        self.sent.clear()
        self.buffers.clear()
        self.offered.clear()
        self.links.clear()
        self.sessions.clear()
        self._by_handle.clear()
        self._by_channel.clear()
        self._detaching.clear()
        self.output.attaching.clear()
        self.used_up.clear()
        self.sending.clear()
        self._proton.free()

    # -- settling received deliveries

    def offer(self, link: Link, delivery: Delivery, state: int) -> None:
        """Send the outcome of a received delivery, but let the peer settle first; then comes `on_outcome` (2.6.12)."""
        link.begin_outcomes()
        lib.pn_delivery_update(delivery, state)
        self.offered[delivery] = link
        link.offered += 1

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
        properties: Mapping[Symbol, Any] | None = None,
        filters: Mapping[Symbol, Any] | None = None,
    ) -> Link:
        """Attach a link of our own; `on_attach` is called when the peer has answered. `filters` are the source's."""
        make = lib.pn_sender if sender else lib.pn_receiver
        pointer = make(session.pointer, name.encode())
        for terminus, address in ((lib.pn_link_source(pointer), source), (lib.pn_link_target(pointer), target)):
            lib.pn_terminus_set_address(terminus, address.encode())
        if not sender:
            lib.pn_link_set_snd_settle_mode(pointer, lib.PN_SND_SETTLED if receive_and_delete else lib.PN_SND_UNSETTLED)
            lib.pn_link_set_rcv_settle_mode(pointer, lib.PN_RCV_FIRST if receive_and_delete else lib.PN_RCV_SECOND)
        if properties:
            set_value(lib.pn_link_properties(pointer), properties)
        if filters:
            set_value(lib.pn_terminus_filter(lib.pn_link_source(pointer)), filters)
        link = self._own_link(session, pointer)
        if credit:
            link.grant(credit)
        return link

    def attach_coordinator(self, session: Session, name: str) -> Link:
        """Attach a link of our own to the peer's coordinator of transactions (4.5.1)."""
        pointer = lib.pn_sender(session.pointer, name.encode())
        lib.pn_terminus_set_address(lib.pn_link_source(pointer), name.encode())
        lib.pn_terminus_set_type(lib.pn_link_target(pointer), lib.PN_COORDINATOR)
        return self._own_link(session, pointer)

    def _own_link(self, session: Session, pointer: Pointer) -> Link:
        lib.pn_link_open(pointer)
        link = self.links[pointer] = Link(self, session, pointer)
        link.answered = True
        session.links.append(link)
        self.output.attaching.append(link)
        self.output.is_due = True
        return link

    # -- events

    def _dispatch(self) -> int:
        """Handle proton's events; returns their number, which the pump does not tell."""
        if self.pump is not None:
            self.pump.dispatch()
            return 0
        collector = self._collector
        count = 0
        try:
            while event := _first_event(collector):
                self._handle(event)
                _pop_event(collector)
                count += 1
        except BaseException:
            _pop_event(collector)  # else it would be handled again
            raise
        return count

    def on_event(self) -> None:
        """Handle proton's first event; the pump pops it."""
        self._handle(_first_event(self._collector))

    def _handle(self, event: Pointer) -> None:
        kind = _kind_of(event)
        if kind == _DELIVERY:
            delivery = _delivery_of(event)
            if delivery in self.sent:
                self._updated(delivery, *self.sent[delivery])
                return
            link = self.links.get(_link_of(delivery))
            if link is not None and link.outgoing is not None and link.outgoing.is_sent(address_of(delivery)):
                self._updated(delivery, link, tag_of(delivery))
            else:
                self._received(delivery, link)
        elif kind == _LINK_FLOW:
            link = self.links.get(lib.pn_event_link(event))
            if link is not None and not link.closed:
                link.known_credit = None
                if link.is_sender:
                    self._handler.on_flow(link)
                elif link.draining and link.credit <= 0:
                    link.draining = False
                    self._handler.on_flow(link)
        elif kind in _KINDS:
            self._lifecycle(kind, event)

    def _updated(self, delivery: Delivery, link: Link, token: bytes) -> None:
        """The peer has told the state of a delivery that we have sent on this link."""
        settled = _is_settled(delivery)
        state = _remote_state(delivery)
        if settled or state >= ACCEPTED:  # `received` (3.4.1) is no outcome
            link.forget_sent(delivery)
            self._handler.on_outcome(link, delivery, token, state, settled)

    def on_unusual(self, address: int, payload: bytes, settled: bool) -> None:
        """Tell the handler of a whole message that the pump does not take, behind those that have gathered."""
        delivery = delivery_at(address)
        link = self.links[_link_of(delivery)]
        link.known_credit = None
        self._whole(link, delivery, payload, settled, _remote_state(delivery))

    def take_part(self, address: int, size: int) -> bool:
        """True if the pump may keep a part of so many bytes that has come on this link."""
        return not self.links[link_at(address)].closed and self.unfinished.take(size)

    def forget_parts(self, size: int) -> None:
        """The pump keeps these parts no more: their delivery is complete."""
        self.unfinished.give_back(size)

    def on_parts(self, address: int) -> None:
        """What comes next of the link's unfinished delivery is not for the pump."""
        self._take_over(self.links[link_at(address)])

    def _take_over(self, link: Link) -> None:
        """Take what the pump has of the link's unfinished delivery, if there is one."""
        parts = link.incoming.take_parts()
        if parts is not None:
            try:
                link.go_on_from(parts, self.unfinished)
            except StateTooLarge as error:
                self._walk.fail(error)

    def _whole(self, link: Link, delivery: Delivery, payload: bytes, settled: bool, state: int) -> None:
        """Tell the handler of a message that came in one transfer and is no batch."""
        if link.max_message_bytes and len(payload) > link.max_message_bytes:
            self._refused(link, delivery, len(payload), payload, settled)
        else:
            self._handler.on_message(link, delivery, payload, False, settled, state)

    def _refused(self, link: Link, delivery: Delivery, oversized_bytes: int, payload: bytes, settled: bool) -> None:
        """Tell the handler of a delivery that was too large, or else found no room."""
        link.head = bytes(payload[: link.head_bytes])
        if oversized_bytes:
            self._handler.on_oversized(link, delivery, oversized_bytes, settled)
        else:
            self._handler.on_crowded(link, delivery, settled)
        link.head = b""

    def _received(self, delivery: Delivery, link: Link | None) -> None:
        if self._walk.is_plain and link is not None and not link.is_sender:
            size = _receive(link.pointer, scratch.buffer, SCRATCH_BYTES)
            payload = scratch.view[0:size] if size > 0 else b""
            _advance(link.pointer)
            if link.known_credit is not None:
                link.known_credit -= 1
            self._whole(link, delivery, payload, False, 0)
            return
        if link is None or link.is_sender or not lib.pn_delivery_readable(delivery):
            if delivery in self.offered:
                self._answered(delivery)
            elif link is not None and link.is_sender and not lib.pn_delivery_updated(delivery):
                # Proton may report this when nothing is being pushed.
                self._walk.fail(IllegalState("A transfer came on a link to its sender."))
            return
        pending = lib.pn_delivery_pending(delivery)
        partial = lib.pn_delivery_partial(delivery)
        is_kept = True
        if pending <= SCRATCH_BYTES and not partial and not link.part_bytes:
            # The usual case: the whole message is here.
            _receive(link.pointer, scratch.buffer, pending)
            payload = scratch.view[0:pending]
            if link.max_message_bytes and pending > link.max_message_bytes:
                link.oversized_bytes = pending
        else:
            try:
                link.read_part(pending, self.unfinished)
            except StateTooLarge as error:
                self._walk.fail(error)
                return
            if partial and not lib.pn_delivery_aborted(delivery):
                return
            payload = bytes(link.partial)
            is_kept = link.is_kept
            link.forget_part(self.unfinished)
        batch = False
        if self._batches:
            batch = link.channel_handle in self._batches
            self._batches.discard(link.channel_handle)
        oversized_bytes, link.oversized_bytes = link.oversized_bytes, 0
        aborted = lib.pn_delivery_aborted(delivery)
        _advance(link.pointer)
        link.known_credit = None
        if aborted:
            lib.pn_delivery_settle(delivery)
            self._handler.on_aborted(link)
            return
        settled = _is_settled(delivery)
        if oversized_bytes or not is_kept:
            self._refused(link, delivery, oversized_bytes, payload, settled)
        else:
            self._handler.on_message(link, delivery, payload, batch, settled, _remote_state(delivery))

    def _answered(self, delivery: Delivery) -> None:
        settled = _is_settled(delivery)
        state = _remote_state(delivery)
        if settled or state >= ACCEPTED:
            link = self.offered.pop(delivery)
            link.offered -= 1
            self._handler.on_outcome(link, delivery, tag_of(delivery), state, settled)

    # -- beginnings and ends: `TRANSITIONS` says when each of these is called

    def _lifecycle(self, kind: int, event: Pointer) -> None:
        if kind in _OF_LINKS:
            pointer = lib.pn_event_link(event)
        elif kind in _OF_SESSIONS:
            pointer = lib.pn_event_session(event)
        else:
            pointer = self._connection
        self.change(kind, pointer)

    def change(self, kind: int, pointer: Pointer) -> None:
        """Do what `TRANSITIONS` says of an event of this kind, about a link, a session or the connection."""
        transition = TRANSITIONS[kind, self.state_of(kind, pointer)]
        if transition is not None:
            transition(self, pointer)

    def state_of(self, kind: int, pointer: Pointer) -> State:
        """The state of what an event of this kind is about: a link, a session or the connection."""
        if kind in _OF_LINKS:
            link = self.links.get(pointer)
            if link is None:
                return State.LEAVING if pointer in self._detaching else State.UNKNOWN
            return State.CLOSED if link.closed else State.OPEN
        if kind in _OF_SESSIONS:
            return State.OPEN if pointer in self.sessions else State.UNKNOWN
        return State.OPEN

    def _opened(self, pointer: Pointer) -> None:
        largest = lib.pn_transport_get_remote_max_frame(self._transport)
        self.transfer_bytes = max(1, largest - _TRANSFER_HEAD_BYTES) if largest else 1 << 62
        if reads_by_position(self.remote_properties()):
            self.output.pad_everything()
        self._handler.on_open(
            text_of(lib.pn_connection_remote_container(pointer)),
            text_of(lib.pn_connection_remote_hostname(pointer)),
        )

    def _closed(self, pointer: Pointer) -> None:
        condition, description = condition_of(lib.pn_connection_remote_condition(pointer))
        lib.pn_connection_close(pointer)
        self.output.is_due = True
        self._handler.on_close(condition, description)

    def _found_fault(self, _: Pointer) -> None:
        """Proton has found a fault and is about to close."""
        self.output.is_due = True

    def _begun_by_peer(self, pointer: Pointer) -> None:
        channel, _ = self._walk.begun.popleft()
        session = self.sessions[pointer] = self._by_channel[channel] = Session(self, pointer)
        session.channel = channel
        lib.pn_session_open(pointer)
        self.output.answering.append(channel)
        self.output.is_due = True
        self._handler.on_session(session)

    def _begin_answered(self, pointer: Pointer) -> None:
        channel, answered = self._walk.begun.popleft()
        session = self._by_channel[channel] = self.sessions[pointer]
        session.channel = channel
        if answered is not None:
            self.output.channels[answered] = channel

    def _attached_by_peer(self, pointer: Pointer) -> None:
        session = self.sessions[lib.pn_link_session(pointer)]
        link = self.links[pointer] = Link(self, session, pointer)
        session.links.append(link)
        self._attached(pointer)

    def _attached_again(self, pointer: Pointer) -> None:
        """The peer did not wait for the answer to its detach."""
        del self._detaching[pointer]
        self._attached_by_peer(pointer)

    def _attached(self, pointer: Pointer) -> None:
        """Note the peer's handle of a link that is known, perhaps because it is our own, and tell the handler."""
        link = self.links[pointer]
        if self._walk.attached:
            link.channel_handle = self._walk.attached.popleft()
            self._by_handle[link.channel_handle] = link
        link.address = link.source_address if link.is_sender else link.target_address
        self._handler.on_attach(link)

    def _closed_by_peer(self, pointer: Pointer) -> None:
        link = self._forget_link(pointer, closed=True)
        if link.detaches_later:
            self._detaching[pointer] = link
            return
        self._answer(link)
        lib.pn_link_close(pointer)
        lib.pn_link_free(pointer)

    def _detached_by_peer(self, pointer: Pointer) -> None:
        self._answer(self._forget_link(pointer, closed=False))
        lib.pn_link_detach(pointer)
        lib.pn_link_free(pointer)

    def _close_answered(self, pointer: Pointer) -> None:
        self._forget_link(pointer, closed=True)
        self.output.is_due = True
        lib.pn_link_free(pointer)

    def _detach_answered(self, pointer: Pointer) -> None:
        self._forget_link(pointer, closed=False)
        self.output.is_due = True
        lib.pn_link_free(pointer)

    def _answer(self, link: Link) -> None:
        """Answer the attach, if that is still to be done, before the answer to the peer's detach."""
        self.output.is_due = True
        if not link.answered:
            link.answer_without_terminus()

    def _forget_link(self, pointer: Pointer, closed: bool) -> Link:
        """Forget a link that the peer has detached, and tell the handler."""
        link = self.links.pop(pointer)
        condition, description = condition_of(lib.pn_link_remote_condition(pointer))
        link.session.links.remove(link)
        self._end_link(link, closed, condition, description)
        return link

    def _end_link(self, link: Link, closed: bool, condition: str, description: str) -> None:
        link.closed = True
        self._forget_handle(link)
        self._handler.on_detach(link, closed, condition, description)
        self._forget_deliveries(link)
        link.forget_owner()

    def finish_detach(self, link: Link, condition: str | None, description: str) -> None:
        if self._detaching.pop(link.pointer, None) is None:
            return
        if condition:
            set_condition(lib.pn_link_condition(link.pointer), condition, description)
        lib.pn_link_close(link.pointer)
        lib.pn_link_free(link.pointer)
        self.output.is_due = True

    def _ended(self, pointer: Pointer) -> None:
        session = self.sessions.pop(pointer)
        for link in [each for each in self._detaching.values() if each.session is session]:
            del self._detaching[link.pointer]
        condition, description = condition_of(lib.pn_session_remote_condition(pointer))
        if session.channel is not None:
            self._by_channel.pop(session.channel, None)
        for link in list(session.links):
            self.links.pop(link.pointer, None)
            self._end_link(link, True, condition, description)
        session.links.clear()
        self._handler.on_session_end(session)
        lib.pn_session_close(pointer)
        lib.pn_session_free(pointer)
        self.output.is_due = True

    def _forget_handle(self, link: Link) -> None:
        if self._by_handle.get(link.channel_handle) is link:  # the peer may not have attached it
            del self._by_handle[link.channel_handle]

    def take_usual(self, link: Link, incoming: Any) -> None:
        """From now on, usual messages that come on this link go to the extension's `incoming`."""
        self.forget_native(link)
        link.incoming = incoming
        self.pump.add(incoming, *link.channel_handle)

    def forget_native(self, link: Link) -> None:
        """From now on, Python takes all deliveries of the link."""
        if link.outgoing is not None:
            self.pump.remove(link.outgoing)
        if link.incoming is not None:
            self._take_over(link)
            self.pump.remove(link.incoming)
            link.incoming = None

    def _forget_deliveries(self, link: Link) -> None:
        """Forget the deliveries of a link: proton frees and settles them with it."""
        if link.outgoing is not None and link.outgoing.end():
            self.output.is_abandoned = True
        self.forget_native(link)
        link.forget_part(self.unfinished)
        if link.is_sender:
            if link.has_sent:
                for delivery in [delivery for delivery, (owner, _) in self.sent.items() if owner is link]:
                    link.forget_sent(delivery)
                    self.output.is_abandoned = True
            if self.output.batches:
                self.output.batches = {each for each in self.output.batches if each[:2] != link.own_handle}
        elif link.offered:
            self.offered = {delivery: owner for delivery, owner in self.offered.items() if owner is not link}

    def check(self) -> None:
        """Assert the invariants of an engine between calls. Takes time in proportion to its state."""
        for pointer, session in self.sessions.items():
            assert session.pointer == pointer
            assert all(self.links.get(link.pointer) is link for link in session.links), "a session has another link"
            assert bool(session.given) == (session in self.sending), "transfers are given, and the session is not noted"
        links = self.links.values()
        assert len(self.links) == sum(len(session.links) for session in self.sessions.values())
        for channel, session in self._by_channel.items():
            assert session.channel == channel
            assert self.sessions.get(session.pointer) is session, "a channel has a session that has ended"
        for handle, link in self._by_handle.items():
            assert link.channel_handle == handle
            assert self.links.get(link.pointer) is link, "a handle has a link that has ended"
        assert self.links.keys().isdisjoint(self._detaching), "a link is there and has been detached"
        for link in self._detaching.values():
            assert link.closed
            assert self.sessions.get(link.session.pointer) is link.session, "a session has ended before its link"
        for link in links:
            sent = sum(owner is link for owner, _ in self.sent.values())
            offered = sum(owner is link for owner in self.offered.values())
            assert link.has_sent == (sent > 0)
            assert link.outgoing is not None or link.unsettled == sent, "a sent delivery is counted wrong"
            assert link.offered == offered, "an offered delivery is counted wrong"
            assert link.closed or link.known_credit in (None, lib.pn_link_credit(link.pointer)), (
                "credit is counted wrong"
            )
        assert all(owner.is_sender and owner in links for owner, _ in self.sent.values()), (
            "sent on a link that has ended"
        )
        assert all(not owner.is_sender and owner in links for owner in self.offered.values())
        assert self.buffer_bytes == sum(self.buffers.values())
        in_parts = sum(len(link.partial) for link in links)
        assert self.unfinished.held_bytes >= in_parts, "parts are kept that are not counted"


Transition = Callable[[Engine, Pointer], None]

# By the kind of an event and the state of what it is about: what is done. None is nothing: it ended before.
TRANSITIONS: Final[Mapping[tuple[int, State], Transition | None]] = {
    (_CONNECTION_OPEN, State.OPEN): Engine._opened,
    (_CONNECTION_CLOSE, State.OPEN): Engine._closed,
    (_FAULT, State.OPEN): Engine._found_fault,
    (_SESSION_OPEN, State.UNKNOWN): Engine._begun_by_peer,
    (_SESSION_OPEN, State.OPEN): Engine._begin_answered,
    (_SESSION_CLOSE, State.UNKNOWN): None,
    (_SESSION_CLOSE, State.OPEN): Engine._ended,
    (_LINK_OPEN, State.UNKNOWN): Engine._attached_by_peer,
    (_LINK_OPEN, State.OPEN): Engine._attached,
    (_LINK_OPEN, State.CLOSED): Engine._attached,
    (_LINK_OPEN, State.LEAVING): Engine._attached_again,
    (_LINK_CLOSE, State.UNKNOWN): None,
    (_LINK_CLOSE, State.OPEN): Engine._closed_by_peer,
    (_LINK_CLOSE, State.CLOSED): Engine._close_answered,
    (_LINK_CLOSE, State.LEAVING): None,
    (_LINK_DETACH, State.UNKNOWN): None,
    (_LINK_DETACH, State.OPEN): Engine._detached_by_peer,
    (_LINK_DETACH, State.CLOSED): Engine._detach_answered,
    (_LINK_DETACH, State.LEAVING): None,
}
_KINDS = frozenset(kind for kind, _ in TRANSITIONS)
_OF_LINKS = frozenset((_LINK_OPEN, _LINK_CLOSE, _LINK_DETACH))
_OF_SESSIONS = frozenset((_SESSION_OPEN, _SESSION_CLOSE))


def _pieces(output: bytes | list[memoryview]) -> Sequence[bytes | memoryview]:
    return output if isinstance(output, list) else (output,)
