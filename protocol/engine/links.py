"""Sessions and links; deliveries are in `protocol.engine.deliveries`."""

from typing import Any, Protocol

from protocol.engine.deliveries import TRANSACTIONAL, Delivery
from protocol.engine.native import address_of
from protocol.engine.outgoing import OutputWalk
from protocol.engine.proton import (
    SCRATCH_BYTES,
    Pointer,
    ffi,
    lib,
    map_of,
    scratch,
    set_condition,
    set_value,
    text_of,
    text_or_none,
)
from protocol.engine.unfinished import Unfinished

_SETTLED_BY_SENDER: int = lib.PN_SND_SETTLED
_SECOND: int = lib.PN_RCV_SECOND

# One thread, one loop: one delivery tag serves all connections.
_MAX_TAG_BYTES = 32
_tag_bytes = ffi.new("char[]", _MAX_TAG_BYTES)
_tag_view = ffi.buffer(_tag_bytes)
_tags = [ffi.new("pn_delivery_tag_t *", (size, _tag_bytes))[0] for size in range(_MAX_TAG_BYTES + 1)]  # by size

# Up to this size it is cheaper to join the parts of a message than to call the engine for each.
_JOINED_BYTES = 32 << 10

_new_delivery, _send, _advance = lib.pn_delivery, lib.pn_link_send, lib.pn_link_advance
_credit, _get_drain = lib.pn_link_credit, lib.pn_link_get_drain


class LinkEngine(Protocol):
    """The engine as its sessions and links use it.

    `sent` are deliveries that wait for the peer's outcome, with their tags. `used_up` are links whose credit was used
    up by deliveries during a drain, and whose peer is not told yet.
    """

    output: OutputWalk
    sent: dict[Delivery, tuple["Link", bytes]]
    used_up: list["Link"]
    pump: Any  # the extension's, or None

    def take_usual(self, link: "Link", incoming: Any) -> None: ...

    def forget_native(self, link: "Link") -> None: ...

    def last_tags(self, link: "Link", count: int) -> list[bytes]: ...


class Session:
    """One AMQP session. `context` belongs to the engine's owner."""

    __slots__ = ("channel", "context", "engine", "links", "pointer", "sent_bytes")

    def __init__(self, engine: LinkEngine, pointer: Pointer) -> None:
        self.engine = engine
        self.pointer = pointer
        self.channel: int | None = None  # the peer's, once it has begun
        self.links: list[Link] = []
        self.context: Any = None
        self.sent_bytes = 0  # bytes of deliveries that may wait for the peer to open its window: never too few

    def holds_more_than(self, maximum_bytes: int) -> bool:
        """True if more bytes of deliveries wait for the peer to open its window."""
        if self.sent_bytes <= maximum_bytes:
            return False
        self.sent_bytes = lib.pn_session_outgoing_bytes(self.pointer)
        self.sent_bytes += sum([link.outgoing.queued_bytes for link in self.links if link.outgoing is not None])
        return self.sent_bytes > maximum_bytes

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
        "_unsettled",
        "address",
        "answered",
        "channel_handle",
        "closed",
        "context",
        "drain_limit",
        "draining",
        "engine",
        "incoming",
        "is_kept",
        "is_sender",
        "known_credit",
        "max_message_bytes",
        "name",
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
        self.part_bytes = 0  # the largest part of the delivery that has begun; 0 if none has
        self.is_kept = True  # False if there was no room for the delivery
        self.answered = False  # True if the peer's attach was answered; links of our own need no answer
        self.closed = False
        self.draining = False  # we have asked for our credit back
        self.drain_limit: int | None = None  # the delivery-count at which a drain has used up the credit that it found
        self.context: Any = None
        self.incoming: Any = None
        self.outgoing: Any = None
        self._unsettled = 0

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
    def is_dynamic(self) -> bool:
        """True if the peer asks to create a node (3.5.3)."""
        terminus = lib.pn_link_remote_source if self.is_sender else lib.pn_link_remote_target
        return bool(lib.pn_terminus_is_dynamic(terminus(self.pointer)))

    @property
    def settled_by_sender(self) -> bool:
        """True if the peer asked for snd-settle-mode settled; on a sending link this is receive-and-delete."""
        return bool(lib.pn_link_remote_snd_settle_mode(self.pointer) == _SETTLED_BY_SENDER)

    @property
    def remote_max_message_bytes(self) -> int:
        return int(lib.pn_link_remote_max_message_size(self.pointer))

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
    ) -> None:
        """Answer the attach with the received termini and settle modes; then grant `credit` if we receive.

        `filters` replace those of the received source.
        """
        pointer = self.pointer
        self.answered = True
        lib.pn_terminus_copy(lib.pn_link_source(pointer), lib.pn_link_remote_source(pointer))
        lib.pn_terminus_copy(lib.pn_link_target(pointer), lib.pn_link_remote_target(pointer))
        lib.pn_link_set_snd_settle_mode(pointer, lib.pn_link_remote_snd_settle_mode(pointer))
        lib.pn_link_set_rcv_settle_mode(pointer, lib.pn_link_remote_rcv_settle_mode(pointer))
        if filters is not None:
            set_value(lib.pn_terminus_filter(lib.pn_link_source(pointer)), filters)
        if properties:
            set_value(lib.pn_link_properties(pointer), properties)
        self.max_message_bytes = max_message_bytes
        if max_message_bytes:
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
        self.closed = True
        if condition:
            set_condition(lib.pn_link_condition(self.pointer), condition, description)
        lib.pn_link_close(self.pointer)
        self.engine.output.is_due = True

    def answer_without_terminus(self) -> None:
        """Answer the attach without a terminus, so that there is no link (2.6.3). A detach must follow."""
        self.answered = True
        for terminus in (lib.pn_link_source(self.pointer), lib.pn_link_target(self.pointer)):
            lib.pn_terminus_set_type(terminus, lib.PN_UNSPECIFIED)
        lib.pn_link_open(self.pointer)

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

        If it finds no room in `unfinished`, or the link is closed, nothing of it is kept.
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
                unfinished.give_back(len(parts))
                parts = bytearray()
            else:
                parts += scratch.view[0:count]
                if self.max_message_bytes and len(parts) > self.max_message_bytes:
                    self.oversized_bytes = len(parts)
                    unfinished.give_back(len(parts))
                    parts = bytearray()
        self.partial = parts

    def go_on_from(self, parts: bytes, unfinished: Unfinished) -> None:
        """These parts of a delivery, which `unfinished` holds, were read elsewhere. Raises StateTooLarge."""
        self.partial, self.part_bytes = bytearray(parts), 1  # so that it has begun; proton has nothing of it
        unfinished.buffer(self.part_bytes)

    def forget_part(self, unfinished: Unfinished) -> None:
        """The delivery that had begun is complete, or never will be."""
        unfinished.give_back(len(self.partial))
        unfinished.buffer(-self.part_bytes)
        self.partial, self.part_bytes, self.is_kept = b"", 0, True

    # -- sending

    @property
    def unsettled(self) -> int:
        """The number of deliveries that were sent and have no outcome."""
        return self._unsettled if self.outgoing is None else int(self.outgoing.unsettled)

    def forget_sent(self, delivery: Delivery) -> None:
        """A delivery that was sent has its outcome."""
        if self.engine.sent.pop(delivery, None) is not None:
            self._unsettled -= 1
        elif self.outgoing is not None:
            self.outgoing.told(address_of(delivery))

    @property
    def drain(self) -> bool:
        return bool(_get_drain(self.pointer))

    @property
    def queued(self) -> int:
        """The number of last deliveries not completely in the output, because the session's window is closed."""
        return int(lib.pn_link_queued(self.pointer))

    def drained(self) -> None:
        """Use up the remaining credit and tell the peer, even if deliveries have used it up (2.6.7)."""
        if self.credit > 0:
            self.drain_limit = None
            lib.pn_link_drained(self.pointer)
            self.known_credit = None
        elif self.drain_limit is not None:
            self.engine.used_up.append(self)

    def send_batch(self, tag: bytes, batch: bytes, settled: bool, transaction: bytes | None = None) -> Delivery:
        """As `send`, of several messages (`protocol.message.batches`). Only a client's engine sends batches."""
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
        if self.known_credit is not None:
            self.known_credit -= 1
        session = self.session
        session.sent_bytes += len(prefix) + length
        return delivery

    def send_run(
        self, run: bytes, count: int, token: bytes, numbers: int | bytes, delivery_count: int, locked_until_ms: int
    ) -> int | None:
        """Send the first `count` messages of a run, with consecutive tokens as their tags.

        `numbers` is the first of consecutive sequence numbers, or 8 bytes for each. The messages need credit. Returns
        when the first was enqueued, in milliseconds since 1970; None if they are not usual, and nothing is sent.
        """
        outgoing, pump = self.outgoing, self.engine.pump
        if outgoing is None or self.own_handle is None:
            return None
        pump.add(outgoing, *self.own_handle)
        sent = outgoing.deliver(run, 0, count, token, numbers, delivery_count, locked_until_ms, pump)
        if sent is None:
            return None
        if self.known_credit is not None:
            self.known_credit -= count
        size_bytes, enqueued_ms = sent
        self.session.sent_bytes += size_bytes
        return int(enqueued_ms)
