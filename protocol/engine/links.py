"""Sessions and links; deliveries are in `protocol.engine.deliveries`."""

from collections.abc import Sequence
from typing import Any, Protocol, SupportsBytes

from protocol.engine.deliveries import TRANSACTIONAL, Delivery, settle
from protocol.engine.proton.incoming import WIDE_WINDOW
from protocol.engine.proton.library import (
    SCRATCH_BYTES,
    Pointer,
    ffi,
    lib,
    map_of,
    scratch,
    set_condition,
    set_value,
    symbols_of,
    text_of,
    text_or_none,
)
from protocol.engine.proton.native import address_of, incoming_window_of
from protocol.engine.proton.outgoing import OutputWalk
from protocol.engine.unfinished import Unfinished

_SETTLED_BY_SENDER: int = lib.PN_SND_SETTLED
_NO_MODE: int = lib.PN_DIST_MODE_UNSPECIFIED
_COPY: int = lib.PN_DIST_MODE_COPY
_SECOND: int = lib.PN_RCV_SECOND

# One thread, one loop: one delivery tag serves all connections.
_MAX_TAG_BYTES = 32
_tag_bytes = ffi.new("char[]", _MAX_TAG_BYTES)
_tag_view = ffi.buffer(_tag_bytes)
_tags = [ffi.new("pn_delivery_tag_t *", (size, _tag_bytes))[0] for size in range(_MAX_TAG_BYTES + 1)]  # by size

# Up to this size it is cheaper to join the parts of a message than to call the engine for each.
_JOINED_BYTES = 32 << 10
# The buffer of a smaller message is not worth counting by itself.
_SMALL_BYTES = 512

_new_delivery, _send, _advance = lib.pn_delivery, lib.pn_link_send, lib.pn_link_advance
_credit, _get_drain = lib.pn_link_credit, lib.pn_link_get_drain


class LinkEngine(Protocol):
    """The engine as its sessions and links use it.

    `sent` are deliveries that wait for the peer's outcome, with their tags. `sent_deliveries` counts all that were
    sent. `buffers` are those of deliveries on which larger messages were sent, with the size of the largest, and
    `buffer_bytes` is their sum: proton keeps them for further deliveries. `used_up` are links whose drain has ended
    with deliveries that are perhaps not written yet, and whose peer is not told. `sending` are sessions that have
    `given` transfers. A message of up to `transfer_bytes` is one transfer. `wide_windows` has the peer's channels whose
    incoming-window is wide. `outputs` counts what was pulled.
    """

    output: OutputWalk
    sent: dict[Delivery, tuple["Link", bytes]]
    sent_deliveries: int
    buffers: dict[Delivery, int]
    buffer_bytes: int
    used_up: list["Link"]
    sending: list["Session"]
    transfer_bytes: int
    wide_windows: set[int]
    pump: Any  # the extension's, or None
    outputs: int

    def take_usual(self, link: "Link", incoming: Any) -> None: ...

    def forget_native(self, link: "Link") -> None: ...

    def finish_detach(self, link: "Link", condition: str | None, description: str) -> None: ...

    def last_tags(self, link: "Link", count: int) -> list[bytes]: ...

    def write_ahead(self) -> None: ...


class Session:
    """One AMQP session. `context` belongs to the engine's owner.

    `given` is the number of transfers that were given to the engine since its last output: never too few.
    """

    __slots__ = ("_address", "answered", "channel", "context", "engine", "given", "links", "pointer")

    def __init__(self, engine: LinkEngine, pointer: Pointer) -> None:
        self.engine = engine
        self.pointer = pointer
        self._address = address_of(pointer)
        self.channel: int | None = None  # the peer's, once it has begun
        self.links: list[Link] = []
        self.context: Any = None
        self.given = 0
        self.answered = (0, 0)  # of the last outcomes: the number of outputs before, and which link's they are

    @property
    def window(self) -> int:
        """The number of transfers that the peer takes now, those that were given to the engine among them (2.5.6).

        The peer may take back a part of its window that is used already. Proton has a large number then.
        """
        window = incoming_window_of(self._address)
        return window if window < WIDE_WINDOW or self.channel in self.engine.wide_windows else 0

    @property
    def room(self) -> int:
        """The number of further transfers that the next output can have. Below 1, deliveries would have to wait."""
        return self.window - self.given

    def give(self, transfers: int) -> None:
        if not self.given:
            self.engine.sending.append(self)
        self.given += transfers

    def end(self, condition: str | None = None, description: str = "") -> None:
        if condition:
            set_condition(lib.pn_session_condition(self.pointer), condition, description)
        lib.pn_session_close(self.pointer)
        self.engine.output.is_due = True


class Link:
    """One end of a link; `is_sender` is our role. `context` belongs to the engine's owner.

    `address` is the peer's name of the node: that of the target if we receive, else of the source; None if null.
    `incoming` and `outgoing` are the extension's, which take usual deliveries; None if Python takes all of them.
    """

    __slots__ = (
        "_remote_max_message_bytes",
        "_unsettled",
        "address",
        "answered",
        "channel_handle",
        "closed",
        "context",
        "detaches_later",
        "drain_limit",
        "draining",
        "engine",
        "head",
        "head_bytes",
        "incoming",
        "is_kept",
        "is_sender",
        "known_credit",
        "max_message_bytes",
        "name",
        "node_address",
        "offered",
        "outgoing",
        "oversized_bytes",
        "own_handle",
        "part_bytes",
        "partial",
        "pointer",
        "session",
    )

    def __init__(self, engine: LinkEngine, session: Session, pointer: Pointer) -> None:
        self.engine = engine
        self.session = session
        self.pointer = pointer
        self.name = text_of(lib.pn_link_name(pointer))
        self.is_sender = bool(lib.pn_link_is_sender(pointer))
        self.address: str | None = None
        self.channel_handle: tuple[int, int] = (0, 0)  # of the peer's end
        self.own_handle: tuple[int, int] | None = None  # channel and handle of our end, once its attach is written
        self.known_credit: int | None = None  # `credit`, unless the engine must be asked
        self.max_message_bytes = 0
        self.partial: bytes | bytearray = b""
        self.oversized_bytes = 0
        self.head_bytes = 0  # of a delivery that is refused unread, the handler gets so many of its first bytes
        self.head = b""  # these, while the handler is told
        self.part_bytes = 0  # the largest part of the delivery that has begun; 0 if none has
        self.is_kept = True  # False if there was no room for the delivery
        self.answered = False  # True if the peer's attach was answered; links of our own need no answer
        self.node_address: str | None = None  # of the node that was made or found for the link, if it named none
        self.closed = False
        self.detaches_later = False  # the peer's detach is answered by `finish_detach`
        self.draining = False  # we have asked for our credit back
        self.drain_limit: int | None = None  # the delivery-count at which a drain has used up the credit that it found
        self.context: Any = None
        self.incoming: Any = None
        self.outgoing: Any = None
        self._remote_max_message_bytes: int | None = None  # once it was asked for, or the link has ended
        self._unsettled = 0
        self.offered = 0  # received deliveries whose outcome waits for the peer to settle

    # -- the peer's attach

    @property
    def is_refused(self) -> bool:
        """True if the peer attached without its own terminus: its detach follows, with the reason (2.6.3)."""
        terminus = lib.pn_link_remote_target if self.is_sender else lib.pn_link_remote_source
        return bool(lib.pn_terminus_get_type(terminus(self.pointer)) == lib.PN_UNSPECIFIED)

    @property
    def settles_second(self) -> bool:
        """On a receiving link: True if the peer settles only after our outcome, which then waits for its answer."""
        return bool(lib.pn_link_remote_rcv_settle_mode(self.pointer) == _SECOND)

    @property
    def source_address(self) -> str | None:
        return text_or_none(lib.pn_terminus_get_address(lib.pn_link_remote_source(self.pointer)))

    @property
    def target_address(self) -> str | None:
        return text_or_none(lib.pn_terminus_get_address(lib.pn_link_remote_target(self.pointer)))

    @property
    def is_coordinator(self) -> bool:
        """True if the target is a transaction coordinator (4.5.1)."""
        return bool(lib.pn_terminus_get_type(lib.pn_link_remote_target(self.pointer)) == lib.PN_COORDINATOR)

    @property
    def has_source(self) -> bool:
        """False if the source is null: the peer asks for the one that the link had before (2.6.3)."""
        return bool(lib.pn_terminus_get_type(lib.pn_link_remote_source(self.pointer)) != lib.PN_UNSPECIFIED)

    @property
    def outlives_connection(self) -> bool:
        """On a sending link: True if the peer wants its source to stay when the link ends (3.5.3)."""
        source = lib.pn_link_remote_source(self.pointer)
        is_durable = lib.pn_terminus_get_durability(source) != lib.PN_NONDURABLE
        return bool(is_durable or lib.pn_terminus_get_expiry_policy(source) == lib.PN_EXPIRE_NEVER)

    def capabilities(self) -> tuple[str, ...]:
        """Return the capabilities that the peer wants of its node: the source if we send, else the target."""
        terminus = lib.pn_link_remote_source if self.is_sender else lib.pn_link_remote_target
        return symbols_of(lib.pn_terminus_capabilities(terminus(self.pointer)))

    @property
    def is_dynamic(self) -> bool:
        """True if the peer asks to create a node (3.5.3)."""
        terminus = lib.pn_link_remote_source if self.is_sender else lib.pn_link_remote_target
        return bool(lib.pn_terminus_is_dynamic(terminus(self.pointer)))

    @property
    def settled_by_sender(self) -> bool:
        """True if the peer asked for snd-settle-mode settled; on a sending link this is receive-and-delete."""
        return bool(lib.pn_link_remote_snd_settle_mode(self.pointer) == _SETTLED_BY_SENDER)

    @property
    def browses(self) -> bool:
        """On a sending link: True if the peer wants copies of messages that stay where they are (3.5.7)."""
        return int(lib.pn_terminus_get_distribution_mode(lib.pn_link_remote_source(self.pointer))) == _COPY

    @property
    def remote_max_message_bytes(self) -> int:
        """The size of a message that the peer takes at most (2.7.3); 0 if any. Also when the link has ended."""
        if self._remote_max_message_bytes is None:
            self._remote_max_message_bytes = int(lib.pn_link_remote_max_message_size(self.pointer))
        return self._remote_max_message_bytes

    def remote_properties(self) -> dict[Any, Any]:
        return map_of(lib.pn_link_remote_properties(self.pointer))

    def source_filter(self) -> dict[Any, Any]:
        return map_of(lib.pn_terminus_filter(lib.pn_link_remote_source(self.pointer)))

    # -- answering the attach

    def accept(
        self,
        max_message_bytes: int = 0,
        credit: int = 0,
        *,
        filters: dict[Any, Any] | None = None,
        properties: dict[Any, Any] | None = None,
        copies: bool = False,
    ) -> None:
        """Answer the attach with the received termini and settle modes; then grant `credit` if we receive.

        `max_message_bytes` is what we take on a receiving link. The answer of a sending link names no size: 2.7.3 has
        one for what its sender takes, but clients in .NET and Go give up a delivery that is longer than either side's.

        On a sending link `filters` are those in place; no others are in the answer (3.5.8). `copies`: we send copies of
        messages, as the peer has asked for; otherwise the answer does not say that we do.
        """
        pointer = self.pointer
        self.answered = True
        lib.pn_terminus_copy(lib.pn_link_source(pointer), lib.pn_link_remote_source(pointer))
        lib.pn_terminus_copy(lib.pn_link_target(pointer), lib.pn_link_remote_target(pointer))
        lib.pn_link_set_snd_settle_mode(pointer, lib.pn_link_remote_snd_settle_mode(pointer))
        lib.pn_link_set_rcv_settle_mode(pointer, lib.pn_link_remote_rcv_settle_mode(pointer))
        if self.node_address is not None:
            node = lib.pn_link_source(pointer) if self.is_sender else lib.pn_link_target(pointer)
            if self.is_sender and not self.has_source:
                lib.pn_terminus_set_type(node, lib.PN_SOURCE)
            lib.pn_terminus_set_address(node, self.node_address.encode())
        if self.is_sender and self.browses and not copies:
            lib.pn_terminus_set_distribution_mode(lib.pn_link_source(pointer), _NO_MODE)
        if self.is_sender:
            in_place = lib.pn_terminus_filter(lib.pn_link_source(pointer))
            lib.pn_data_clear(in_place)
            if filters:
                set_value(in_place, filters)
        if properties:
            set_value(lib.pn_link_properties(pointer), properties)
        self.max_message_bytes = max_message_bytes
        if max_message_bytes:
            assert not self.is_sender
            lib.pn_link_set_max_message_size(pointer, max_message_bytes)
        lib.pn_link_open(pointer)
        if credit:
            lib.pn_link_flow(pointer, credit)
        self.engine.output.attaching.append(self)
        self.engine.output.is_due = True

    def refuse(self, condition: str, description: str) -> None:
        """Answer with an attach without a terminus, then a detach with the reason (2.6.3)."""
        assert not self.answered
        self.detach(condition, description)

    def detach(self, condition: str | None = None, description: str = "") -> None:
        """Close the link from our side; if the attach is not answered yet, refuse it."""
        if self.closed:
            return
        if not self.answered:
            self.answer_without_terminus()
            self.engine.output.attaching.append(self)
        self.take_over()
        self.closed = True
        if condition:
            set_condition(lib.pn_link_condition(self.pointer), condition, description)
        lib.pn_link_close(self.pointer)
        self.engine.output.is_due = True

    def finish_detach(self, condition: str | None = None, description: str = "") -> None:
        """Answer the peer's detach, if the link `detaches_later`; nothing if the session or connection has ended."""
        self.engine.finish_detach(self, condition, description)

    def take_over(self) -> None:
        """From now on the handler is told of all deliveries and outcomes of the link, and the extension takes none."""
        if self.outgoing is not None or self.incoming is not None:
            self.engine.forget_native(self)

    def answer_without_terminus(self) -> None:
        """Answer the attach without a terminus, so that there is no link (2.6.3). A detach must follow."""
        self.answered = True
        for terminus in (lib.pn_link_source(self.pointer), lib.pn_link_target(self.pointer)):
            lib.pn_terminus_set_type(terminus, lib.PN_UNSPECIFIED)
        lib.pn_link_open(self.pointer)

    def begin_outcomes(self) -> None:
        """The outcomes that follow are of deliveries on this link.

        Proton writes equal outcomes of neighbouring deliveries of a session as one range, whatever their links are.
        That is right (2.7.6), but clients may take the outcome of one link's delivery for that of another's.
        """
        session, answered = self.session, (self.engine.outputs, id(self))
        if session.answered != answered:
            if session.answered[0] == answered[0]:
                self.engine.write_ahead()
            session.answered = answered

    # -- receiving

    @property
    def credit(self) -> int:
        """The credit that the sender has: the peer if we receive, else we. Negative if the sender has overrun it."""
        if self.known_credit is None:
            self.known_credit = _credit(self.pointer)
        return self.known_credit

    def grant(self, credit: int) -> None:
        """Add to the credit of the sender."""
        lib.pn_link_flow(self.pointer, credit)
        if self.known_credit is not None:
            self.known_credit += credit

    def ask_drain(self) -> None:
        """Ask the sender to use up its credit. `on_flow` is called when it is 0, unless messages use it up (2.6.7)."""
        self.draining = True
        lib.pn_link_drain(self.pointer, 0)

    def read_part(self, pending: int, unfinished: Unfinished) -> None:
        """Read the next part of a delivery of several transfers; beyond the link's limit only its size is kept.

        If it finds no room in `unfinished`, or the link is closed, nothing of it is kept. In both cases `head_bytes` of
        what it had are.
        """
        if pending > self.part_bytes:
            grown, self.part_bytes = pending - self.part_bytes, pending
            unfinished.buffer(grown)
        parts = self.partial if isinstance(self.partial, bytearray) else bytearray(self.partial)
        while pending > 0:
            count = lib.pn_link_recv(self.pointer, scratch.buffer, min(pending, SCRATCH_BYTES))
            if count <= 0:
                break
            pending -= count
            if self.oversized_bytes:
                self.oversized_bytes += count
            elif not self.is_kept:
                pass
            elif self.closed or not unfinished.take(count):
                self.is_kept = False
                self._drop(parts, unfinished)
            else:
                parts += scratch.view[0:count]
                if self.max_message_bytes and len(parts) > self.max_message_bytes:
                    self.oversized_bytes = len(parts)
                    self._drop(parts, unfinished)
        self.partial = parts

    def _drop(self, parts: bytearray, unfinished: Unfinished) -> None:
        """Keep the head alone."""
        unfinished.give_back(max(0, len(parts) - self.head_bytes))
        del parts[self.head_bytes :]

    def go_on_from(self, parts: bytes, unfinished: Unfinished) -> None:
        """These parts of a delivery, which `unfinished` holds, were read elsewhere. Raises StateTooLarge."""
        self.partial, self.part_bytes = bytearray(parts), 1  # so that it has begun; proton has nothing of it
        unfinished.buffer(self.part_bytes)

    def forget_part(self, unfinished: Unfinished) -> None:
        """The delivery that had begun is complete, or never will be."""
        unfinished.give_back(len(self.partial))
        unfinished.buffer(-self.part_bytes)
        self.partial, self.part_bytes, self.is_kept = b"", 0, True

    def forget_owner(self) -> None:
        """The link has ended: it refers to nothing that refers to it."""
        self.context = self.incoming = self.outgoing = None
        self.partial = b""
        # Who still refers to the link may ask for these, and proton's is freed now.
        self._remote_max_message_bytes = self.remote_max_message_bytes
        self.known_credit = 0

    # -- sending

    @property
    def unsettled(self) -> int:
        """The number of deliveries that were sent and have no outcome."""
        return self._unsettled if self.outgoing is None else int(self.outgoing.unsettled)

    @property
    def has_sent(self) -> bool:
        """True if deliveries of the link are in the engine's `sent`."""
        return self._unsettled > 0

    @property
    def kept_deliveries(self) -> int:
        """The number of deliveries, sent or received, that proton keeps because we have not settled them."""
        return int(lib.pn_link_unsettled(self.pointer))

    def forget_sent(self, delivery: Delivery) -> None:
        """A delivery that was sent has its outcome."""
        if self.engine.sent.pop(delivery, None) is not None:
            self._unsettled -= 1
        elif self.outgoing is not None:
            self.outgoing.told(address_of(delivery))

    def settle_sent(self, tags: Sequence[bytes], state: int) -> None:
        """Settle those of the link's deliveries that have these tags and no outcome, with this one.

        Only those that Python has sent. The oldest are found first.
        """
        wanted, found = set(tags), []
        for delivery, (owner, tag) in self.engine.sent.items():
            if owner is self and tag in wanted:
                found.append(delivery)
                if len(found) == len(wanted):
                    break
        if found:
            self.begin_outcomes()
        for delivery in found:
            self.forget_sent(delivery)
            settle(delivery, state)
            self.engine.output.is_due = True

    @property
    def drain(self) -> bool:
        return bool(_get_drain(self.pointer))

    @property
    def queued(self) -> int:
        """The number of last deliveries not completely in the output, because the session's window is closed."""
        return int(lib.pn_link_queued(self.pointer))

    def last_tags(self, count: int) -> list[bytes]:
        """The tags of the last `count` deliveries without an outcome, or of all if there are fewer; in order."""
        return self.engine.last_tags(self, count)

    def drained(self) -> None:
        """Use up the remaining credit and tell the peer, even if deliveries have used it up (2.6.7).

        If a delivery goes on when the peer opens its window, the peer is told behind it. Proton forgets that otherwise.
        """
        if self.credit > 0 and (self.session.room > 0 or not self.queued):
            self.drain_limit = None
            lib.pn_link_drained(self.pointer)
            self.known_credit = None
        elif (self.credit > 0 or self.drain_limit is not None) and self not in self.engine.used_up:
            self.engine.used_up.append(self)

    def send_batch(self, tag: bytes, batch: bytes, settled: bool, transaction: bytes | None = None) -> Delivery:
        """Send several messages in one delivery (`protocol.message.batches`). Only a client's engine sends batches."""
        assert self.own_handle is not None, "there is no credit before the attach is written"
        self.engine.output.batches.add((*self.own_handle, tag))
        self.engine.output.is_due = True
        return self.send(tag, batch, b"", 0, settled, transaction)

    def send(
        self, tag: bytes, prefix: bytes, body: bytes, offset: int, settled: bool, transaction: bytes | None = None
    ) -> Delivery:
        """Send one delivery of `prefix` and `body[offset:]`, which needs credit. `tag` has 1 to 32 bytes.

        `transaction` is the id of the transaction that the delivery is a part of.
        """
        pointer = self.pointer
        size = len(tag)
        _tag_view[0:size] = tag
        delivery = _new_delivery(pointer, _tags[size])
        if transaction is not None:
            set_value(lib.pn_disposition_data(lib.pn_delivery_local(delivery)), [transaction])
            lib.pn_delivery_update(delivery, TRANSACTIONAL)
        length = len(body) - offset
        whole = len(prefix) + length
        if whole > _SMALL_BYTES and whole > (known := self.engine.buffers.get(delivery, 0)):
            self.engine.buffers[delivery] = whole
            self.engine.buffer_bytes += whole - known
        if length <= _JOINED_BYTES:
            message = prefix + body[offset:]
            _send(pointer, message, len(message))
        else:
            _send(pointer, prefix, len(prefix))
            _send(pointer, ffi.from_buffer(body) + offset, length)
        if settled:
            lib.pn_delivery_settle(delivery)
        elif self.outgoing is not None:
            self.outgoing.sent(address_of(delivery))
        else:
            self.engine.sent[delivery] = (self, tag)
            self._unsettled += 1
        _advance(pointer)
        self.engine.sent_deliveries += 1
        if self.known_credit is not None:
            self.known_credit -= 1
        self.session.give(self.transfers(whole))
        return delivery

    def transfers(self, size_bytes: int) -> int:
        """The number of transfers of a message of this size, perhaps one too many."""
        most = self.engine.transfer_bytes
        return 1 if size_bytes <= most else -(-size_bytes // most)

    def send_run(
        self,
        run: SupportsBytes | memoryview,
        count: int,
        token: bytes,
        numbers: int | bytes,
        delivery_count: int,
        locked_until_ms: int,
    ) -> int | None:
        """Send the first `count` messages of a run, with consecutive tokens as their tags.

        A run that is no bytes and no memoryview is put together.

        `numbers` is the first of consecutive sequence numbers, or 8 bytes for each. The messages need credit. Returns
        when the first was enqueued, in milliseconds since 1970; None if they are not usual, and nothing is sent.
        """
        outgoing, pump = self.outgoing, self.engine.pump
        if outgoing is None or self.own_handle is None:
            return None
        pump.add(outgoing, *self.own_handle)
        sent = pump.deliver(outgoing, run, 0, count, token, numbers, delivery_count, locked_until_ms)
        if sent is None:
            return None
        self.engine.sent_deliveries += count
        if self.known_credit is not None:
            self.known_credit -= count
        self.session.give(count)  # those of several transfers are in the output already
        _, enqueued_ms = sent
        return int(enqueued_ms)
