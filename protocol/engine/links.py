"""Sessions and links: what is said on them, but for what deliveries say (`protocol.engine.deliveries`)."""

from typing import Any, Protocol

from protocol.engine.deliveries import TRANSACTIONAL, Delivery
from protocol.engine.outgoing import OutputWalk
from protocol.engine.proton import (
    SCRATCH_BYTES,
    Pointer,
    ffi,
    lib,
    map_of,
    scratch,
    scratch_view,
    set_condition,
    set_value,
    text_of,
    text_or_none,
)
from protocol.engine.unfinished import Unfinished

_SETTLED_BY_SENDER: int = lib.PN_SND_SETTLED
_SECOND: int = lib.PN_RCV_SECOND

# One thread, one loop: one delivery tag serves all connections.
_tag_bytes = ffi.new("char[32]")
_tag_view = ffi.buffer(_tag_bytes)
_tag = ffi.new("pn_delivery_tag_t *")
_tag.start = _tag_bytes


class LinkEngine(Protocol):
    """What sessions and links use of their engine.

    `sent` are deliveries that wait for the peer's outcome, with the tag of each; `used_up` links whose credit
    deliveries used up during a drain, of which the peer is still to be told.
    """

    output: OutputWalk
    sent: dict[Delivery, tuple["Link", bytes]]
    used_up: list["Link"]

    def first_of_last(self, link: "Link", count: int) -> bytes | None: ...


class Session:
    """One AMQP session. `context` is the owner's."""

    __slots__ = ("channel", "context", "engine", "links", "pointer")

    def __init__(self, engine: LinkEngine, pointer: Pointer) -> None:
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
            set_condition(lib.pn_session_condition(self.pointer), condition, description)
        lib.pn_session_close(self.pointer)
        self.engine.output.is_due = True


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
        "is_kept",
        "is_sender",
        "max_message_bytes",
        "name",
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
        self.own_handle: tuple[int, int] | None = None  # channel and handle of ours, once its attach is written
        self.max_message_bytes = 0
        self.partial: bytes | bytearray = b""
        self.oversized_bytes = 0
        self.part_bytes = 0  # the largest part of the delivery that has begun; 0 if none has
        self.is_kept = True  # else there was no room for it
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
        return bool(lib.pn_link_remote_rcv_settle_mode(self.pointer) == _SECOND)

    @property
    def source_address(self) -> str | None:
        return text_or_none(lib.pn_terminus_get_address(lib.pn_link_remote_source(self.pointer)))

    @property
    def target_address(self) -> str | None:
        return text_or_none(lib.pn_terminus_get_address(lib.pn_link_remote_target(self.pointer)))

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
        return bool(lib.pn_link_remote_snd_settle_mode(self.pointer) == _SETTLED_BY_SENDER)

    @property
    def remote_max_message_bytes(self) -> int:
        return int(lib.pn_link_remote_max_message_size(self.pointer))

    def remote_properties(self) -> dict[Any, Any]:
        return map_of(lib.pn_link_remote_properties(self.pointer))

    def source_filter(self) -> dict[Any, Any]:
        return map_of(lib.pn_terminus_filter(lib.pn_link_remote_source(self.pointer)))

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
        """Answer with an attach without a terminus, then a detach that says why (2.6.3)."""
        assert not self.answered
        self.detach(condition, description)

    def detach(self, condition: str | None = None, description: str = "") -> None:
        """Close the link from our side; an attach not answered yet is refused."""
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

    def read_part(self, pending: int, unfinished: Unfinished) -> None:
        """Read on in a delivery of several transfers; beyond the link's limit only its size is kept.

        Nothing is kept of what finds no room in `unfinished`, or comes on a link that has been closed.
        """
        if pending > self.part_bytes:
            grown, self.part_bytes = pending - self.part_bytes, pending
            unfinished.buffer(grown)
        parts = self.partial if isinstance(self.partial, bytearray) else bytearray(self.partial)
        while pending > 0:
            count = lib.pn_link_recv(self.pointer, scratch, min(pending, SCRATCH_BYTES))
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
                parts += scratch_view[0:count]
                if self.max_message_bytes and len(parts) > self.max_message_bytes:
                    self.oversized_bytes = len(parts)
                    unfinished.give_back(len(parts))
                    parts = bytearray()
        self.partial = parts

    def forget_part(self, unfinished: Unfinished) -> None:
        """The delivery that had begun is at its end, or will have none."""
        unfinished.give_back(len(self.partial))
        unfinished.buffer(-self.part_bytes)
        self.partial, self.part_bytes, self.is_kept = b"", 0, True

    # -- sending

    @property
    def drain(self) -> bool:
        return bool(lib.pn_link_get_drain(self.pointer))

    @property
    def queued(self) -> int:
        """The last so many deliveries are not wholly among the output: the session's window is closed."""
        return int(lib.pn_link_queued(self.pointer))

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
            set_value(lib.pn_disposition_data(lib.pn_delivery_local(delivery)), [transaction])
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
