"""Walks a connection's incoming frames: for what proton's engine does not tell, and for what it must not see.

Three things matter to a broker and are not in proton's interface: the message format of a transfer (a batch or not),
the channel and handle behind an attach, and flows that want an answer (`echo` or drain). And proton passes over what
it does not understand without a word, and dies of some of it: so the walk enforces the form of frames, and reads
every performative (`performatives`) but those that make up the traffic: transfers, and dispositions in their usual
short form. Of these proton keeps nothing but numbers.
"""

import struct
from collections import deque
from typing import Any, NamedTuple

from protocol import codec
from protocol.codec import UInt, ULong
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
from protocol.errors import DecodeError, InvalidField, LimitExceeded, ProtocolError

BATCH_FORMAT = 0x80013700
_BATCH_FORMAT_BYTES = BATCH_FORMAT.to_bytes(4, "big")
AMQP_HEADER = b"AMQP\x00\x01\x00\x00"
_HEARTBEAT_BYTES = 8
# What frames usually begin with: data offset 2, type AMQP; then a descriptor that is a small ulong.
_USUAL_FORM, _SMALL_ULONG = 0x0200, 0x0053
# The end of an accepted disposition with everything in it is at 33; an array of more than 255 elements, the least that
# does harm, would make it longer than this.
_SHORT_DISPOSITION_BYTES = 40
# Its role, and the constructor of `first`.
_SHORT_DISPOSITION = frozenset(bytes((role, first)) for role in (0x41, 0x42) for first in (0x43, 0x52, 0x70))
# A transfer's fields up to the message format end within this many bytes of its frame: 8 of the frame's header, 3 of
# the descriptor, 9 of the list's, and at most 5 + 5 + 34 + 5 of handle, delivery-id, delivery-tag and the format.
_HEAD_BYTES = 69
_MAX_CREDIT = 0x7FFF_FFFF  # proton counts in signed numbers: all the credit there is would be less than none
_LEAST_BYTES = 12  # of a frame with a performative, whose list may be empty
_HEARTBEAT = bytes.fromhex("0000000802000000")
# Each link can have one; more come of deliveries that are never completed.
_MAX_BATCHES = 10_000
_frame_size = struct.Struct(">I").unpack_from
_head = struct.Struct(">IHHHB").unpack_from  # size, offset and type, channel, descriptor's constructor, code


class FramingError(ProtocolError):
    """The bytes do not form frames, or a frame is larger than was agreed (2.3.1)."""


class IllegalState(ProtocolError):
    """A performative that is well formed and not due: open twice, begin on a channel in use."""


class HandleInUse(ProtocolError):
    """An attach with a handle that is attached (2.7.3)."""


class Flow(NamedTuple):
    """A flow that wants an answer. `handle` is the peer's, None for the session's own flow (2.7.4)."""

    channel: int
    handle: int | None
    limit: int  # delivery-count + link-credit, serial arithmetic
    drain: bool


class FrameWalk:
    """State of one connection's input.

    `begun` has the channel of each begin in order of arrival, `attached` (channel, handle) of each attach, `batches`
    the (channel, handle, delivery tag) of each batch that began, `flows` what wants an answer; who uses them takes them
    out.

    `ends` are the offsets in what `feed` returned behind frames that end a link or session: their names and numbers may
    be taken anew right after, so the engine's events must be handled before it gets what follows. `error` is what was
    wrong behind the bytes that `feed` returned: FramingError, DecodeError, LimitExceeded, InvalidField, IllegalState or
    HandleInUse. After it, and after the peer's close, nothing more is taken.
    """

    def __init__(self, max_frame_size: int) -> None:
        self._max_frame_size = max_frame_size
        self._partial = b""  # the beginning of a frame that cannot be looked at yet
        self._rest = 0  # bytes still to come of a transfer that was looked at
        self._header_seen = False
        self.begun: deque[int] = deque()
        self.attached: deque[tuple[int, int]] = deque()
        self.batches: set[tuple[int, int, bytes]] = set()
        self.flows: list[Flow] = []
        self.ends: list[int] = []
        self.error: ProtocolError | None = None
        self._opened = False
        self._closed = False
        self._handles: dict[int, set[int]] = {}  # in use, by channel

    def feed(self, data: bytes) -> bytes:
        """What of the bytes that came so far can be given to the engine; the rest is kept."""
        self.ends.clear()
        if self._closed:
            return b""
        if self._partial:
            data = self._partial + data
            self._partial = b""
        at = self._rest
        end = len(data)
        if at > end:
            self._rest = at - end
            return data
        self._rest = 0
        if not self._header_seen:
            if end < 8 and AMQP_HEADER.startswith(data):
                self._partial = data
                return b""
            if data[:8] != AMQP_HEADER:
                self.error = FramingError(f"expected the AMQP 1.0.0 protocol header, got {data[:8].hex()}")
                self._closed = True
                return b""
            self._header_seen = True
            at = 8
        largest = self._max_frame_size
        try:
            while at + _LEAST_BYTES <= end:
                size, form, channel, descriptor, code = _head(data, at)
                next_at = at + size
                if size > largest or size < _LEAST_BYTES:
                    if size != _HEARTBEAT_BYTES:
                        raise FramingError(f"a frame of {size} bytes: frames have 8 to {largest} bytes")
                    if form != _USUAL_FORM:
                        raise FramingError("an empty frame that is no AMQP frame")
                    at = next_at
                    continue
                if next_at > end and (
                    code != TRANSFER or descriptor != _SMALL_ULONG or form != _USUAL_FORM or end - at < _HEAD_BYTES
                ):
                    break
                if descriptor != _SMALL_ULONG or form != _USUAL_FORM:
                    data = _in_usual_form(data, at, next_at)
                    end = len(data)
                    continue
                if code == TRANSFER:
                    if data.find(_BATCH_FORMAT_BYTES, at + 11, at + _HEAD_BYTES) >= 0:
                        self._transfer(data, at, min(next_at, end), channel)
                    if next_at > end:  # the payload can go on to the engine as it comes
                        self._rest = next_at - end
                        return data
                elif code == DISPOSITION:
                    if size > _SHORT_DISPOSITION_BYTES or data[at + 14 : at + 16] not in _SHORT_DISPOSITION:
                        checked(memoryview(data)[:next_at], at + 11, code)
                elif code == FLOW:
                    clamped = self._flow(memoryview(data)[:next_at], at + 11, channel)
                    if clamped is not None:
                        data = data[:at] + clamped + data[next_at:]
                        end = len(data)
                        next_at = at + len(clamped)
                elif OPEN <= code <= CLOSE:
                    self._rare(code, memoryview(data)[:next_at], at + 11, channel)
                    if code == CLOSE:
                        self._closed = True
                        return data[:next_at]
                else:
                    raise DecodeError(f"an unknown performative, 0x{code:02x},", at + 10)
                at = next_at
            size = _frame_size(data, at)[0] if end - at >= 4 else _HEARTBEAT_BYTES
            if size != _HEARTBEAT_BYTES and not _LEAST_BYTES <= size <= largest:
                raise FramingError(f"a frame of {size} bytes: frames have 8 to {largest} bytes")
        except ProtocolError as error:
            self._closed = True
            self.error = error
            return data[:at]
        if at == end or data[at:] == _HEARTBEAT:
            return data
        self._partial = data[at:]
        return data[:at]

    def fail(self, error: ProtocolError) -> None:
        """Something else is wrong with what was fed."""
        self._closed = True
        self.error = self.error or error

    def _rare(self, code: int, frame: memoryview, at: int, channel: int) -> None:
        """A performative that begins or ends something. Raises ProtocolError."""
        fields = checked(frame, at, code)
        handles = self._handles.get(channel)
        if code == OPEN:
            if self._opened:
                raise IllegalState("The connection is open already.")
            self._opened = True
        elif not self._opened:
            raise IllegalState("The connection is not open.")
        elif code == BEGIN:
            if handles is not None:
                raise IllegalState(f"Channel {channel} has a session already.")
            self._handles[channel] = set()
            self.begun.append(channel)
        elif code == END:
            self._handles.pop(channel, None)
            self.ends.append(len(frame))
        elif handles is None:
            pass  # there is no such session, and the engine says so
        elif code == ATTACH:
            if fields[1] in handles:
                raise HandleInUse(f"Handle {fields[1]} on channel {channel} is attached already.")
            if "\0" in fields[0]:
                raise InvalidField("attach.name", "must not contain a null character")  # where proton would end it
            handles.add(fields[1])
            self.attached.append((channel, int(fields[1])))
        elif code == DETACH:
            handles.discard(fields[0])
            self.ends.append(len(frame))

    def _transfer(self, data: bytes, at: int, end: int, channel: int) -> None:
        """Note a batch's first transfer. Raises DecodeError and LimitExceeded."""
        list_at = at + 11
        constructor = data[list_at]
        if constructor == 0xC0:
            count, first = data[list_at + 2], list_at + 3
        elif constructor == 0xD0:
            count, first = int.from_bytes(data[list_at + 5 : list_at + 9], "big"), list_at + 9
        else:
            raise DecodeError("a transfer whose body is not a list", list_at)
        if count < 4:
            return
        head = memoryview(data)[:end]
        handle, first = codec.decode(head, first, _HEAD_BYTES)
        _, first = codec.decode(head, first, _HEAD_BYTES)
        tag, first = codec.decode(head, first, _HEAD_BYTES)
        message_format, first = codec.decode(head, first, _HEAD_BYTES)
        if message_format != BATCH_FORMAT:
            return
        if not isinstance(handle, int) or not isinstance(tag, bytes):
            raise DecodeError("a transfer whose handle or delivery-tag is of a wrong type", list_at)
        if len(self.batches) >= _MAX_BATCHES:
            raise LimitExceeded("number of batches that are not complete", _MAX_BATCHES)
        self.batches.add((channel, int(handle), tag))

    def _flow(self, frame: memoryview, at: int, channel: int) -> bytes | None:
        """Note a flow that wants an answer; the frame to take instead if it has more credit than proton can hold."""
        fields = checked(frame, at, FLOW)
        _, _, _, _, handle, delivery_count, credit, _, drain, echo, *_ = fields
        clamped = None
        if credit is not None and credit > _MAX_CREDIT:
            fields[6] = credit = UInt(_MAX_CREDIT)
            clamped = frame_of(channel, FLOW, fields)
        if echo or drain:
            limit = ((delivery_count or 0) + (credit or 0)) & 0xFFFFFFFF
            self.flows.append(Flow(channel, handle, limit, bool(drain)))
        return clamped


def frame_of(channel: int, code: int, fields: list[Any]) -> bytes:
    """A whole frame with the performative of this code."""
    body = codec.encode(codec.Described(ULong(code), fields))
    return (8 + len(body)).to_bytes(4, "big") + b"\x02\x00" + channel.to_bytes(2, "big") + body


def _in_usual_form(data: bytes, at: int, end: int) -> bytes:
    """`data` with its frame from `at` to `end` without an extended header, and with a small ulong for a descriptor.

    Raises FramingError, DecodeError and LimitExceeded.
    """
    offset, kind = data[at + 4], data[at + 5]
    if kind != 0:
        raise FramingError(f"a frame of type {kind} among AMQP frames")
    body = at + 4 * offset
    if offset < 2 or body > end:
        raise FramingError(f"a frame of {end - at} bytes whose body begins at {4 * offset}")
    if body == end:
        return data[:at] + _HEARTBEAT + data[end:]
    if data[body] != 0:
        raise DecodeError("a frame without a performative", body)
    descriptor, fields = codec.decode(memoryview(data)[:end], body + 1, _HEAD_BYTES)
    code = CODE_OF.get(descriptor) if isinstance(descriptor, str) else descriptor
    if not isinstance(code, ULong | int) or not OPEN <= code <= CLOSE or isinstance(code, bool):
        raise DecodeError(f"an unknown performative, {str(descriptor)[:40]},", body)
    frame = data[at + 6 : at + 8] + bytes((0, 0x53, code)) + data[fields:end]
    return data[:at] + (len(frame) + 6).to_bytes(4, "big") + b"\x02\x00" + frame + data[end:]
