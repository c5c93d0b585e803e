"""Walks a connection's incoming frames before proton: finds what proton does not tell, and refuses what may harm it.

A broker needs three things that proton's interface does not have: the message format of a transfer (a batch or not),
the channel and handle of an attach, and flows that need an answer (`echo` or drain). Also, proton silently skips what
it does not understand, and some frames crash it. So the walk enforces the form of frames, and reads every performative
(`performatives`), with three exceptions that make up the traffic: dispositions in their usual short form, of which
proton keeps only numbers, transfers that look like one that was read before, and flows that need no answer.

Proton insists on consecutive delivery-ids. A transfer with another id gets the next one, and dispositions are
translated (`delivery_ids`).
"""

import re
import struct
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from protocol import codec
from protocol.codec import UInt, ULong
from protocol.engine import rejections
from protocol.engine.delivery_ids import DeliveryIds
from protocol.engine.frames import frame_of
from protocol.engine.performatives import (
    ATTACH,
    BEGIN,
    CLOSE,
    CODE_OF,
    DETACH,
    DISPOSITION,
    END,
    FLOW,
    OPEN,
    TRANSFER,
    checked,
)
from protocol.engine.proton.native import native
from protocol.engine.proton.state_bytes import MAX_TRANSFER_LIST_BYTES, StateBytes, StateTooLarge, check_disposition
from protocol.errors import DecodeError, InvalidField, ProtocolError
from protocol.symbols import AMQP_HEADER, BATCH_FORMAT, HEARTBEAT

_HEARTBEAT_BYTES = 8
# The usual beginning of frames: data offset 2, type AMQP; then a descriptor that is a small ulong.
_USUAL_FORM, _SMALL_ULONG = 0x0200, 0x0053
# An accepted disposition with all fields ends at 33. An array of more than 255 elements, the smallest harmful one,
# would make it longer than this.
_SHORT_DISPOSITION_BYTES = 40
# The bytes of its role, which is that of a receiver, and of the constructor of `first`.
_SHORT_DISPOSITION = frozenset(bytes((0x41, first)) for first in (0x43, 0x52, 0x70))
_UINT_WIDTH = {0x43: 0, 0x52: 1, 0x70: 4}
# A disposition for so many deliveries or fewer costs what its bytes do. One for more may be said again and again, of
# deliveries that stay unsettled; so these are counted: they may be for some, and for each that there was a few times.
_FEW_DELIVERIES = 16
_TOLD_DELIVERIES, _TOLD_EACH, _TOLD_PER_WORK = 100_000, 4, 8
_DESCRIPTOR_BYTES = 69  # more than any known descriptor takes, with the bytes before it
_USUAL_TRANSFERS = 64  # the number of remembered forms; a link has a few, because sizes of ids and tags differ
_NULL = b"\x40"
_MAX_CREDIT = 0x7FFF_FFFF  # proton uses signed numbers, in which the largest credit would be negative
WIDE_WINDOW = 1 << 31  # of an incoming-window: at least half of the numbers that there are
_LEAST_BYTES = 12  # the smallest frame with a performative, whose list is empty
# A peer that has not opened the connection may have sent an open of this size and a few empty frames.
MAX_OPEN_BYTES, MAX_EMPTY_BEFORE_OPEN = 64 << 10, 16
# The work of one step: an empty frame counts one, each other frame that is read here the second number, and one more
# for so many bytes. So a step takes a millisecond or two, and then somebody else may be served.
_STEP, _READ_FRAME, _READ_BYTES = 2048, 32, 8
# Transfers become a little longer by a message format, which proton does not know. So it gets frames that are smaller
# than the peer's by this, unless that would hardly leave room for anything.
_SPARE_BYTES, _LEAST_WITH_SPARE = 16, 1024
_frame_size = struct.Struct(">I").unpack_from
_head = struct.Struct(">IHHHB").unpack_from  # size, offset and type, channel, descriptor's constructor, code


class FramingError(ProtocolError):
    """The bytes are not frames, or a frame is larger than was agreed (2.3.1)."""


class IllegalState(ProtocolError):
    """A well-formed performative that is not allowed now: a second open, a begin on a channel in use."""


class HandleInUse(ProtocolError):
    """An attach with a handle that is in use (2.7.3)."""


class WorkTooLarge(ProtocolError):
    """The peer asks for much work again and again."""


class Keeping(Protocol):
    """A link. `kept_deliveries` is the number of those that proton keeps because we have not settled them."""

    is_sender: bool

    @property
    def kept_deliveries(self) -> int: ...


class Flow(NamedTuple):
    """A flow that needs an answer. `handle` is the peer's; None for a flow of the session (2.7.4)."""

    channel: int
    handle: int | None
    limit: int  # delivery-count + link-credit, serial arithmetic
    drain: bool


class _UsualTransfer(NamedTuple):
    """The form of a transfer that was read, which was a whole delivery and no batch.

    `fields` splits a frame: its size, the bytes up to the delivery-id, the id, the tag's head, and the bytes behind the
    tag. A transfer has this form if its `head`, `tag_head` and `rest` are equal and it has at least `least_bytes`.
    `form` is the same for the extension.
    """

    fields: Callable[[bytes, int], tuple[Any, ...]]
    head: bytes
    tag_head: bytes
    rest: bytes
    least_bytes: int
    ids: DeliveryIds
    is_plain: bool
    form: tuple[bytes, bytes, bytes, int]


_NO_FRAME = b"\xff"  # no frame has this data offset
_NO_TRANSFER = _UsualTransfer(
    struct.Struct("").unpack_from, b"", b"", b"", 1 << 62, DeliveryIds(), True, (_NO_FRAME, b"\xa0\0", b"", 1)
)
_walk_usual = native.walk if native is not None else None

_UINT = rb"(?:\x43|\x52.|\x70....)"
_NOT_TRUE = rb"[\x40\x42]"
# The fields of a flow whose credit proton can hold, and that asks for nothing: behind the list's count, by this count.
# The group is a wide incoming-window.
_FLOW_FIELDS = (
    rb"(?:\x40|" + _UINT + rb")",
    rb"(?:\x43|\x52.|\x70[\x00-\x7f]...|(\x70....))",
    *[_UINT] * 2,
    *[rb"(?:\x40|" + _UINT + rb")"] * 2,
    rb"(?:\x40|\x43|\x52.|\x70[\x00-\x7f]...)",
    rb"(?:\x40|" + _UINT + rb")",
    *[_NOT_TRUE] * 2,
    rb"\x40",
)
_PLAIN_FLOW = {
    count: re.compile(b"".join(_FLOW_FIELDS[:count]), re.DOTALL).fullmatch for count in range(4, len(_FLOW_FIELDS) + 1)
}


class _Session:
    """The handles that the peer uses on a channel, and its incomplete deliveries. These are by handle: the delivery's
    id (None if it has none), and True if proton has another id. `told` is the number of deliveries from the peer that
    its dispositions were for.
    """

    __slots__ = ("handles", "ids", "told", "unfinished")

    def __init__(self) -> None:
        self.handles: set[int] = set()
        self.ids = DeliveryIds()
        self.told = 0
        self.unfinished: dict[int, tuple[int | None, bool]] = {}


class FrameWalk:
    """The state of one connection's input.

    `begun` has the channel of each begin in order of arrival, with the channel of ours that it answers, or None;
    `attached` has (channel, handle) of each attach; `flows` are the flows that need an answer. The user of these takes
    items out. `has_flow` is set with each flow. `translated` has the ids of sessions, by the peer's channel, whose
    dispositions must be translated. `wide` has the channels whose incoming-window is wide.

    `stops` are offsets in the result of `feed`: the engine must handle the bytes before an offset before it gets those
    behind. Some are behind frames that end a link or session, because its names and numbers may be used again at once.
    At the others a batch begins on the link with the given channel and handle.

    Frames that must be read cost much more than others. So `feed` stops when it has read many: `is_interrupted` is True
    then, and the next `feed` goes on with what is left. All work is linear in the bytes that were fed.

    `is_plain`: each transfer that ends in the result of `feed` is a whole delivery, unsettled, without a state, and no
    batch; and all dispositions there are a receiver's. It may be False although that is so.

    `error` is the error behind the bytes that `feed` returned: FramingError, DecodeError, LimitExceeded, InvalidField,
    IllegalState, HandleInUse, StateTooLarge or WorkTooLarge. After an error, and after the peer's close, no more bytes
    are taken.
    `kept` estimates what the engine keeps of what the peer has opened. `links` are those of the connection, and
    `sent_deliveries` is for the engine to set: how many were sent on all of them.
    """

    def __init__(
        self, max_frame_size: int, *, sends_batches: bool = False, links: Mapping[Any, Keeping] | None = None
    ) -> None:
        self._max_frame_size = max_frame_size
        self._sends_batches = sends_batches
        self._partial = bytearray()  # the beginning of a frame that is not complete enough to be read
        self._needed = 0  # bytes that it has then
        self._data, self._at = b"", 0  # what was fed and not looked at is data[at:], while `is_interrupted`
        self.is_interrupted = False
        self._rest = 0  # bytes still to come of a transfer that was read
        self._rest_is_plain = True
        self.is_plain = True
        self._header_seen = False
        self._empty_frames = 0  # before the open
        self.begun: deque[tuple[int, int | None]] = deque()
        self.attached: deque[tuple[int, int]] = deque()
        self.flows: list[Flow] = []
        self.has_flow = False
        self.wide: set[int] = set()
        self.stops: list[tuple[int, tuple[int, int] | None]] = []
        self.translated: dict[int, DeliveryIds] = {}
        self.error: ProtocolError | None = None
        self._opened = False
        self._closed = False
        self.kept = StateBytes()
        self.sent_deliveries = 0
        self._links = {} if links is None else links
        self._kept_deliveries: int | None = None  # to the peer, when this step began; None if nobody has asked
        self._told = 0  # the number of such deliveries that the peer's dispositions were for
        self._sessions: dict[int, _Session] = {}  # by channel
        self._ended: set[int] = set()  # channels whose session the peer has ended; pyamqp detaches links after that
        self._usual: dict[bytes, _UsualTransfer] = {}  # by bytes 6 to 15: channel, descriptor, and begin of the list
        self._last = _NO_TRANSFER  # the one of `_usual` that matched last
        self._changed: list[bytes] = []  # the changed data up to `_copied`, for the result of `feed`
        self._copied = 0
        self._grown = 0  # what an offset in the data must grow by to be one in the result of `feed`

    @property
    def held_bytes(self) -> int:
        """The bytes that were fed and not passed on, and the estimate of what the peer has opened."""
        return len(self._partial) + len(self._data) + self.kept.total

    def feed(self, data: bytes) -> bytes:
        """Take bytes; returns those that can be given to the engine now. The rest is kept."""
        if self._closed:
            self.stops.clear()
            return b""
        if self.is_interrupted:
            self.add(data)
            self.is_interrupted = False
            data, self._data = self._data, b""
            return self._walk(data, self._at)
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:
                self.stops.clear()
                return b""
            data = bytes(self._partial)
            self._partial.clear()
        return self._walk(data, 0)

    def add(self, data: bytes) -> None:
        """Take bytes for a later `feed`."""
        if not data or self._closed:
            return
        if self.is_interrupted:
            self._data, self._at = self._data[self._at :] + data, 0
        else:
            self._interrupt(bytes(self._partial) + data, 0)
            self._partial.clear()

    def _walk(self, data: bytes, begin: int) -> bytes:
        self.stops.clear()
        self._kept_deliveries = None
        at = begin + self._rest
        end = len(data)
        self.is_plain = self._last.is_plain and (not self._rest or self._rest_is_plain)
        if at > end:
            self._rest = at - end
            return data
        self._rest = 0
        if not self._header_seen:
            if end < 8 and AMQP_HEADER.startswith(data):
                self._keep(data, 8)
                return b""
            if data[:8] != AMQP_HEADER:
                self.error = FramingError(f"expected the AMQP 1.0.0 protocol header, got {data[:8].hex()}")
                self._closed = True
                return b""
            self._header_seen = True
            at = 8
        self._copied, self._grown = begin, -begin
        largest = self._max_frame_size if self._opened else min(self._max_frame_size, MAX_OPEN_BYTES)
        translated = self.translated
        fields, usual_head, usual_tag, usual_rest, least_bytes, ids, _, form_of_last = self._last
        work = _STEP
        needed = 0
        try:
            while at + _LEAST_BYTES <= end and work > 0:
                if _walk_usual is not None:
                    next_id = ids.next_id or 0
                    at, ids.next_id = _walk_usual(
                        data, at, largest, form_of_last, not translated, next_id, _FEW_DELIVERIES
                    )
                    if at + _LEAST_BYTES > end:
                        break
                elif at + least_bytes <= end:
                    size, head, number, tag, rest = fields(data, at)
                    if number == ids.next_id and head == usual_head and rest == usual_rest and tag == usual_tag:
                        next_at = at + size
                        if next_at <= end and least_bytes <= size <= largest:
                            ids.next_id = number + 1
                            at = next_at
                            continue
                size, form, channel, descriptor, code = _head(data, at)
                next_at = at + size
                is_large = size > largest
                if is_large and form == _USUAL_FORM and descriptor == _SMALL_ULONG and code == DISPOSITION:
                    is_large = not self._may_be_cut(size)
                if is_large or size < _LEAST_BYTES:
                    if size != _HEARTBEAT_BYTES:
                        raise FramingError(f"a frame of {size} bytes: frames have 8 to {largest} bytes")
                    if form != _USUAL_FORM:
                        raise FramingError("an empty frame that is no AMQP frame")
                    self._take_empty()
                    work -= 1
                    at = next_at
                    continue
                if next_at > end:
                    if code != TRANSFER or descriptor != _SMALL_ULONG or form != _USUAL_FORM:
                        needed = size
                        break
                    if not self._transfer(data, at, end, next_at, channel):
                        break
                    self._rest = next_at - end  # the rest of the payload can go to the engine as it comes
                    self._rest_is_plain = self.is_plain
                    return self._given(data, begin, end)
                work -= _READ_FRAME + size // _READ_BYTES
                if descriptor != _SMALL_ULONG or form != _USUAL_FORM:
                    if at > begin:
                        self._interrupt(data, at)
                        return self._given(data, begin, at)
                    return self._walk_unusual(data, at, next_at)
                if code == TRANSFER:
                    known = self._usual.get(data[at + 6 : at + 16])
                    if known is None or known is self._last:
                        self._transfer(data, at, next_at, next_at, channel)
                    else:
                        self._last = known
                        self.is_plain = self.is_plain and known.is_plain
                        next_at = at
                    fields, usual_head, usual_tag, usual_rest, least_bytes, ids, _, form_of_last = self._last
                elif code == DISPOSITION:
                    if size > _SHORT_DISPOSITION_BYTES or data[at + 14 : at + 16] not in _SHORT_DISPOSITION:
                        disposition = checked(memoryview(data)[:next_at], at + 11, code)
                        check_disposition(size, disposition)
                        self.is_plain = self.is_plain and disposition[0]
                        role, first, last, *_ = disposition
                        count = 1 if last is None else ((last - first) & 0xFFFFFFFF) + 1
                    else:
                        role, count = True, _deliveries_of(data, at + 15, next_at)
                    if count > _FEW_DELIVERIES:
                        work -= self._tell(count, channel, role) // _TOLD_PER_WORK
                    if size > largest:
                        self._cut(data, at, next_at, channel, disposition, largest)
                    elif translated and channel in translated:
                        self._disposition(data, at, next_at, channel)
                elif code == FLOW:
                    self.has_flow = True
                    plain = plain_flow(data, at, next_at)
                    if plain is not None:
                        self._note_window(channel, plain.lastindex is not None)
                    else:
                        clamped = self._flow(memoryview(data)[:next_at], at + 11, channel)
                        if clamped is not None:
                            self._change(data, at, next_at, clamped)
                elif OPEN <= code <= CLOSE:
                    self._rare(code, memoryview(data)[:next_at], at + 11, channel)
                    least_bytes, ids, form_of_last = self._last.least_bytes, self._last.ids, self._last.form
                    if code == OPEN:
                        largest = self._max_frame_size
                        if self._sends_batches:
                            self._spare(data, at, next_at)
                    elif code == DETACH and channel in self._ended:
                        self._change(data, at, next_at, b"")
                    if code in (DETACH, END):
                        self.stops.append((next_at + self._grown, None))
                    elif code == CLOSE:
                        self._closed = True
                        return self._given(data, begin, next_at)
                else:
                    raise DecodeError(f"an unknown performative, 0x{code:02x},", at + 10)
                at = next_at
            if at == end:
                return self._given(data, begin, end)
            if work <= 0:
                self._interrupt(data, at)
                return self._given(data, begin, at)
            size = _frame_size(data, at)[0] if end - at >= 4 else _HEARTBEAT_BYTES
            is_known = _LEAST_BYTES <= size <= largest or self._may_be_cut(size)
            if size != _HEARTBEAT_BYTES and not is_known:
                raise FramingError(f"a frame of {size} bytes: frames have 8 to {largest} bytes")
        except ProtocolError as error:
            self._closed = True
            self.error = error.with_traceback(None)  # which refers to all that called this
        self._keep(data[at:], needed)
        return self._given(data, begin, at)

    def close(self) -> None:
        """Take no more bytes."""
        self._closed = True
        self.is_interrupted = False
        self._data = b""
        self._partial.clear()

    def _keep(self, partial: bytes, needed: int) -> None:
        """Keep the beginning of a frame until there are so many bytes, or any more if `needed` is 0."""
        self._partial += partial
        self._needed = needed

    def _interrupt(self, data: bytes, at: int) -> None:
        self.is_interrupted = True
        self._data, self._at = data, at

    def _walk_unusual(self, data: bytes, at: int, next_at: int) -> bytes:
        """Return the result of `feed` for one frame alone, which is put into the usual form."""
        frame = _in_usual_form(data, at, next_at)
        if len(frame) == _HEARTBEAT_BYTES:
            self._take_empty()
            given = frame
        else:
            given = self._walk(frame, 0)
        if next_at < len(data) and not self._closed:
            self._interrupt(data, next_at)
        return given

    def _take_empty(self) -> None:
        if not self._opened:
            self._empty_frames += 1
            if self._empty_frames > MAX_EMPTY_BEFORE_OPEN:
                raise IllegalState("The connection is not open.")

    def _spare(self, data: bytes, at: int, next_at: int) -> None:
        """Tell proton of a smaller max-frame-size than the peer has."""
        fields = checked(memoryview(data)[:next_at], at + 11, OPEN)
        if fields[2] is not None and fields[2] >= _LEAST_WITH_SPARE:
            fields[2] = UInt(fields[2] - _SPARE_BYTES)
            self._change(data, at, next_at, frame_of(0, OPEN, fields))

    def _change(self, data: bytes, at: int, next_at: int, instead: bytes) -> None:
        """Let `feed` return `instead` in place of the bytes from `at` to `next_at`."""
        self._changed += (data[self._copied : at], instead)
        self._copied = next_at
        self._grown += len(instead) - (next_at - at)

    def _given(self, data: bytes, begin: int, end: int) -> bytes:
        """Return the result of `feed`: `data` from `begin` to `end`, with the changes."""
        if not self._changed:
            return data if end - begin == len(data) else data[begin:end]
        given = b"".join((*self._changed, data[self._copied : end]))
        self._changed.clear()
        return given

    def fail(self, error: ProtocolError) -> None:
        """Note an error that was found elsewhere in the bytes that were fed."""
        self._closed = True
        self.error = self.error or error.with_traceback(None)

    def take_error(self) -> ProtocolError:
        """The error, which is told once."""
        assert self.error is not None
        try:
            return self.error
        finally:
            self.error = None

    def _rare(self, code: int, frame: memoryview, at: int, channel: int) -> None:
        """Read a performative that begins or ends something. Raises ProtocolError."""
        fields = checked(frame, at, code)
        kept = self.kept
        size = len(frame) - at + 11
        session = self._sessions.get(channel)
        if code == OPEN:
            if self._opened:
                raise IllegalState("The connection is open already.")
            self._opened = True
            kept.open(size, fields)
        elif not self._opened:
            raise IllegalState("The connection is not open.")
        elif code == BEGIN:
            if session is not None:
                raise IllegalState(f"Channel {channel} has a session already.")
            kept.begin(channel, size, fields)
            self._note_window(channel, fields[2] >= WIDE_WINDOW)
            self._sessions[channel] = _Session()
            self._ended.discard(channel)
            self.begun.append((channel, fields[0]))
        elif code == END:
            kept.end(channel)
            if self._sessions.pop(channel, None) is not None:
                self._ended.add(channel)
            self.translated.pop(channel, None)
            self.wide.discard(channel)
            self._forget_usual()
        elif session is None:
            pass  # there is no such session; the engine reports that
        elif code == ATTACH:
            if fields[1] in session.handles:
                raise HandleInUse(f"Handle {fields[1]} on channel {channel} is attached already.")
            if "\0" in fields[0]:
                raise InvalidField("attach.name", "must not contain a null character")  # proton would end it there
            kept.attach(channel, fields[1], size, fields)
            session.handles.add(fields[1])
            self.attached.append((channel, int(fields[1])))
        elif code == DETACH:
            kept.detach(channel, fields[0])
            session.handles.discard(fields[0])
            session.unfinished.pop(fields[0], None)

    def _transfer(self, data: bytes, at: int, end: int, next_at: int, channel: int) -> bool:
        """Read a transfer whose bytes up to `end` are here; False if its performative continues behind `end`.

        Raises DecodeError, LimitExceeded, InvalidField and StateTooLarge.
        """
        transfer = _read_transfer(data, at, end, next_at)
        if transfer is None:
            return False
        list_end, handle, peers_id, settled, goes_on, is_batch, is_usual = transfer
        session = self._sessions.get(channel)
        if session is None or handle not in session.handles:
            return True  # there is no such link; the engine reports that
        if handle in session.unfinished:
            first_id, is_other = session.unfinished[handle]
            if peers_id is not None and peers_id != first_id:
                raise InvalidField(
                    "transfer.delivery-id", f"must be that of the link's unfinished delivery, {first_id}"
                )
            if not goes_on:
                del session.unfinished[handle]
            self.is_plain = False
            if is_other:
                self._say_id(data, at, list_end, next_at, _NULL)
            return True
        if is_batch:
            self.stops.append((at + self._grown, (channel, handle)))
        was_translated = session.ids.translates
        is_other = session.ids.take(peers_id, settled) != peers_id and peers_id is not None
        if session.ids.translates and not was_translated:
            self.translated[channel] = session.ids
        is_plain = is_usual and not (goes_on or settled or is_other)
        self.is_plain = self.is_plain and is_plain
        if goes_on or session.ids.translates:
            self._forget_usual()
        if goes_on:
            session.unfinished[handle] = peers_id, is_other
        if is_other:
            own = UInt(session.ids.last_id)
            if not self._say_id(data, at, list_end, next_at, codec.encode(own)):
                # The frame is full, so an extra transfer without payload carries the id.
                fields = checked(memoryview(data)[:list_end], at + 11, TRANSFER)
                fields[1], fields[5] = own, True
                self._change(data, at, at, frame_of(channel, TRANSFER, fields))
                self._say_id(data, at, list_end, next_at, _NULL)
        elif not (goes_on or session.ids.translates or session.unfinished or is_batch):
            self._remember(data, at, list_end, session.ids, is_plain)
        return True

    def _say_id(self, data: bytes, at: int, list_end: int, next_at: int, encoded: bytes) -> bool:
        """Replace the delivery-id of a transfer; False if the frame or its list would become too large."""
        count_at, width = (at + 13, 1) if data[at + 11] == 0xC0 else (at + 16, 4)
        id_at = codec.skip(data, count_at + width)
        id_end = codec.skip(data, id_at)
        longer = len(encoded) - (id_end - id_at)
        list_size = int.from_bytes(data[at + 12 : count_at], "big") + longer
        size = next_at - at + longer
        if size > self._max_frame_size or list_size >> 8 * width:
            return False
        head = (size.to_bytes(4, "big"), data[at + 4 : at + 12], list_size.to_bytes(width, "big"), data[count_at:id_at])
        self._change(data, at, list_end, b"".join((*head, encoded, data[id_end:list_end])))
        return True

    def _remember(self, data: bytes, at: int, list_end: int, ids: DeliveryIds, is_plain: bool) -> None:
        """Remember the form of this transfer, so that similar ones need not be read."""
        id_at = codec.skip(data, at + (14 if data[at + 11] == 0xC0 else 20))
        width = {0x52: "B", 0x70: "I"}.get(data[id_at]) if id_at < list_end else None
        if width is None:
            return
        tag_at = codec.skip(data, id_at)
        if tag_at >= list_end or data[tag_at] != 0xA0:
            return
        head, tag_head = data[at + 4 : id_at + 1], data[tag_at : tag_at + 2]
        rest = data[tag_at + 2 + tag_head[1] : list_end]
        fields = struct.Struct(f">I{len(head)}s{width}2s{tag_head[1]}x{len(rest)}s").unpack_from
        form = (head, tag_head, rest, struct.calcsize(f">{width}"))
        if len(self._usual) >= _USUAL_TRANSFERS:
            self._forget_usual()
        self._last = _UsualTransfer(fields, head, tag_head, rest, list_end - at, ids, is_plain, form)
        self._usual[data[at + 6 : at + 16]] = self._last

    def _forget_usual(self) -> None:
        self._usual.clear()
        self._last = _NO_TRANSFER

    def _tell(self, count: int, channel: int, by_receiver: bool) -> int:
        """Count the deliveries that a disposition is for; returns how many there may be. Raises WorkTooLarge."""
        if by_receiver:
            if self._kept_deliveries is None:
                self._kept_deliveries = sum([link.kept_deliveries for link in self._links.values() if link.is_sender])
            count = min(count, self._kept_deliveries)
            self._told += count
            told, all_ = self._told, self.sent_deliveries
        else:
            session = self._sessions.get(channel)
            if session is None:
                return 0
            all_ = session.ids.count
            count = min(count, all_)
            session.told += count
            told = session.told
        if told > _TOLD_DELIVERIES + _TOLD_EACH * all_:
            raise WorkTooLarge("The dispositions are for the same deliveries again and again.")
        return count

    def _may_be_cut(self, size: int) -> bool:
        """True if a frame of this size, which is too large, may be a rejection with long texts."""
        return self._opened and self._max_frame_size < size <= rejections.MAX_FRAME_BYTES

    def _cut(self, data: bytes, at: int, next_at: int, channel: int, fields: list[Any], largest: int) -> None:
        """Let proton have a smaller one in place of a disposition that is too large. Raises FramingError.

        It is of a receiver, whose deliveries need no translation.
        """
        frame = frame_of(channel, DISPOSITION, rejections.with_texts_cut(fields))
        role, *_ = fields
        if len(frame) > largest or not role:
            raise FramingError(f"a frame of {next_at - at} bytes: frames have 8 to {largest} bytes")
        self._change(data, at, next_at, frame)

    def _disposition(self, data: bytes, at: int, next_at: int, channel: int) -> None:
        """Translate the peer's disposition of its deliveries. Raises LimitExceeded."""
        fields = checked(memoryview(data)[:next_at], at + 11, DISPOSITION)
        role, first, last, settled = fields[:4]
        if role:
            return
        ids = self.translated[channel]
        frames = []
        for start, end in ids.protons(first, first if last is None else last):
            fields[1:3] = UInt(start), UInt(end)
            frames.append(frame_of(channel, DISPOSITION, fields))
            if settled:
                ids.settled(start, end)
        self._change(data, at, next_at, b"".join(frames))

    def _flow(self, frame: memoryview, at: int, channel: int) -> bytes | None:
        """Note a flow that needs an answer. Returns a frame in its place if it has more credit than proton can hold."""
        fields = checked(frame, at, FLOW)
        _, window, _, _, handle, delivery_count, credit, _, drain, echo, *_ = fields
        self._note_window(channel, window >= WIDE_WINDOW)
        clamped = None
        if credit is not None and credit > _MAX_CREDIT:
            fields[6] = credit = UInt(_MAX_CREDIT)
            clamped = frame_of(channel, FLOW, fields)
        if echo or drain:
            limit = ((delivery_count or 0) + (credit or 0)) & 0xFFFFFFFF
            self.flows.append(Flow(channel, handle, limit, bool(drain)))
        return clamped

    def _note_window(self, channel: int, is_wide: bool) -> None:
        if is_wide:
            self.wide.add(channel)
        elif self.wide:
            self.wide.discard(channel)


class _Transfer(NamedTuple):
    """What matters of a transfer's performative. `is_usual`: it has no state, is no batch, and is not aborted."""

    list_end: int
    handle: int
    delivery_id: int | None
    settled: bool
    goes_on: bool
    is_batch: bool
    is_usual: bool


def _read_transfer(data: bytes, at: int, end: int, next_at: int) -> _Transfer | None:
    """Read the transfer whose frame goes from `at` to `next_at`; None if its performative continues behind `end`.

    Raises DecodeError, LimitExceeded, InvalidField and StateTooLarge.
    """
    if native is not None and (usual := native.transfer(data, at, end)) is not None:
        list_end, handle, peers_id, settled, more = usual
        return _Transfer(list_end, handle, peers_id, settled, more, False, True)
    list_end = _end_of_list(data, at + 11, end)
    if list_end - at > MAX_TRANSFER_LIST_BYTES:
        raise StateTooLarge(f"The fields of a transfer take more than {MAX_TRANSFER_LIST_BYTES} bytes.")
    if list_end > next_at:
        raise DecodeError("a transfer whose list does not end within its frame", at + 11)
    if list_end > end:
        return None
    handle, peers_id, _, message_format, settled, more, _, state, _, aborted, _ = checked(
        memoryview(data)[:list_end], at + 11, TRANSFER
    )
    is_batch = message_format == BATCH_FORMAT
    is_usual = not (is_batch or aborted or state is not None)
    return _Transfer(list_end, handle, peers_id, bool(settled), bool(more and not aborted), is_batch, is_usual)


def _deliveries_of(data: bytes, at: int, end: int) -> int:
    """The number of deliveries that a short disposition is for. The id of the first is at `at`."""
    first_end = at + 1 + _UINT_WIDTH[data[at]]
    width = _UINT_WIDTH.get(data[first_end]) if first_end < end else None
    if width is None:
        return 1
    first = int.from_bytes(data[at + 1 : first_end], "big")
    last = int.from_bytes(data[first_end + 1 : first_end + 1 + width], "big")
    return ((last - first) & 0xFFFFFFFF) + 1


def plain_flow(data: bytes, at: int, next_at: int) -> re.Match[bytes] | None:
    """A match of `_FLOW_FIELDS` only for a well-formed flow that needs no answer, and whose credit proton can hold."""
    if next_at - at < 14 or data[at + 11] != 0xC0 or data[at + 12] != next_at - at - 13:
        return None
    plain_fields = _PLAIN_FLOW.get(data[at + 13])
    return None if plain_fields is None else plain_fields(data, at + 14, next_at)


def _end_of_list(data: bytes, at: int, end: int) -> int:
    """The offset behind the list at `at`, by its size. Raises DecodeError if a transfer cannot have such a list."""
    constructor = data[at] if at < end else 0
    if constructor == 0xC0 and at + 2 <= end:
        return at + 2 + data[at + 1]
    if constructor == 0xD0 and at + 5 <= end:
        return at + 5 + int.from_bytes(data[at + 1 : at + 5], "big")
    if constructor in (0xC0, 0xD0):
        return end + 1
    raise DecodeError("a transfer whose body is not a list", at)


def _in_usual_form(data: bytes, at: int, end: int) -> bytes:
    """The frame from `at` to `end` in the usual form: no extended header, a small ulong as the descriptor.

    Raises FramingError, DecodeError and LimitExceeded.
    """
    offset, kind = data[at + 4], data[at + 5]
    if kind != 0:
        raise FramingError(f"a frame of type {kind} among AMQP frames")
    body = at + 4 * offset
    if offset < 2 or body > end:
        raise FramingError(f"a frame of {end - at} bytes whose body begins at {4 * offset}")
    if body == end:
        return HEARTBEAT
    if data[body] != 0:
        raise DecodeError("a frame without a performative", body)
    descriptor, fields = codec.decode(memoryview(data)[:end], body + 1, _DESCRIPTOR_BYTES)
    code = CODE_OF.get(descriptor) if isinstance(descriptor, str) else descriptor
    if not isinstance(code, ULong | int) or not OPEN <= code <= CLOSE or isinstance(code, bool):
        raise DecodeError(f"an unknown performative, {str(descriptor)[:40]},", body)
    frame = data[at + 6 : at + 8] + bytes((0, 0x53, code)) + data[fields:end]
    return (len(frame) + 6).to_bytes(4, "big") + b"\x02\x00" + frame
