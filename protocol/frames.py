"""Walks a connection's incoming frames for what proton's engine does not tell.

Three things matter to a broker and are not in proton's interface: the message format of a transfer (a batch or not),
the channel and handle behind an attach, and flows that want an answer (`echo` or drain). The walk looks at the
performative's code of each frame and reads fields only of attach, flow, and transfers that may be a batch's. It also
enforces the frame size.
"""

import struct
from collections import deque
from typing import Any, NamedTuple

from protocol import codec
from protocol.errors import DecodeError, ProtocolError

BATCH_FORMAT = 0x80013700
_BATCH_FORMAT_BYTES = BATCH_FORMAT.to_bytes(4, "big")
_AMQP_HEADER = b"AMQP\x00\x01\x00\x00"
_ATTACH, _FLOW, _TRANSFER = 0x12, 0x13, 0x14
_FIRST, _LAST = 0x10, 0x18
# A transfer's fields up to the message format end within this many bytes of its frame: 8 of the frame's header, 3 of
# the descriptor, 9 of the list's, and at most 5 + 5 + 34 + 5 of handle, delivery-id, delivery-tag and the format.
_HEAD_BYTES = 69
_frame_size = struct.Struct(">I").unpack_from


class FramingError(ProtocolError):
    """The bytes do not form frames, or a frame is larger than was agreed (2.3.1)."""


class Flow(NamedTuple):
    """A flow that wants an answer. `handle` is the peer's, None for the session's own flow (2.7.4)."""

    channel: int
    handle: int | None
    limit: int  # delivery-count + link-credit, serial arithmetic
    drain: bool


class FrameWalk:
    """State of one connection's input.

    `attached` has (channel, handle) of each attach in order of arrival, `batches` the (channel, handle, delivery tag)
    of each batch that began, `flows` what wants an answer; who uses them takes them out.
    """

    def __init__(self, max_frame_size: int) -> None:
        self._max_frame_size = max_frame_size
        self._partial = b""  # the beginning of a frame that cannot be looked at yet
        self._rest = 0  # bytes still to come of a transfer that was looked at
        self._header_seen = False
        self.attached: deque[tuple[int, int]] = deque()
        self.batches: set[tuple[int, int, bytes]] = set()
        self.flows: list[Flow] = []

    def feed(self, data: bytes) -> bytes:
        """What of the bytes that came so far can be given to the engine; the rest is kept.

        Raises FramingError; DecodeError for a performative whose fields cannot be read.
        """
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
            if end < 8:
                self._partial = data
                return b""
            if data[:8] != _AMQP_HEADER:
                raise FramingError(f"expected the AMQP 1.0.0 protocol header, got {data[:8].hex()}")
            self._header_seen = True
            at = 8
        largest = self._max_frame_size
        while at + 8 <= end:
            (size,) = _frame_size(data, at)
            if size < 8 or size > largest:
                raise FramingError(f"a frame of {size} bytes: frames have 8 to {largest} bytes")
            next_at = at + size
            if size > 10:
                if next_at > end and (end - at < _HEAD_BYTES or data[at + 10] != _TRANSFER):
                    break
                # The usual frame has data offset 2 and a smallulong descriptor, so the code is the 11th byte.
                code = data[at + 10]
                if code == _TRANSFER:
                    if data.find(_BATCH_FORMAT_BYTES, at + 11, at + _HEAD_BYTES) >= 0:
                        self._transfer(data, at, size)
                    if next_at > end:  # the payload can go on to the engine as it comes
                        self._rest = next_at - end
                        return data
                elif code == _FLOW:
                    self._flow(data, at, size)
                elif code == _ATTACH:
                    self._attach(data, at, size)
                elif data[at + 9] == 0x53 and not _FIRST <= code <= _LAST:
                    # Proton would pass over it without a word.
                    raise DecodeError(f"an unknown performative, 0x{code:02x},", at + 10)
            elif next_at > end:
                break
            at = next_at
        if at == end:
            return data
        self._partial = data[at:]
        return data[:at]

    def _transfer(self, data: bytes, at: int, size: int) -> None:
        fields = _fields(data, at, size, 4)
        if len(fields) == 4 and fields[3] == BATCH_FORMAT:
            self.batches.add((_channel(data, at), fields[0], fields[2]))

    def _flow(self, data: bytes, at: int, size: int) -> None:
        fields = _fields(data, at, size, 10)
        fields += [None] * (10 - len(fields))
        handle, delivery_count, credit, drain, echo = fields[4], fields[5], fields[6], fields[8], fields[9]
        if echo or drain:
            limit = ((delivery_count or 0) + (credit or 0)) & 0xFFFFFFFF
            self.flows.append(Flow(_channel(data, at), handle, limit, bool(drain)))

    def _attach(self, data: bytes, at: int, size: int) -> None:
        fields = _fields(data, at, size, 3)
        if len(fields) < 3 or not isinstance(fields[0], str) or not isinstance(fields[1], int):
            raise DecodeError("an attach without name, handle or role", at)
        self.attached.append((_channel(data, at), fields[1]))


def _channel(data: bytes, at: int) -> int:
    return data[at + 6] << 8 | data[at + 7]


def _fields(data: bytes, at: int, size: int, count: int) -> list[Any]:
    """The first `count` fields of the frame's performative, fewer if it has fewer."""
    list_at = at + 11
    code = data[list_at]
    if code == 0xC0:
        total, first = data[list_at + 2], list_at + 3
    elif code == 0xD0:
        total, first = int.from_bytes(data[list_at + 5 : list_at + 9], "big"), list_at + 9
    else:
        return []
    frame = memoryview(data)[: at + size]
    fields = []
    for _ in range(min(total, count)):
        value, first = codec.decode(frame, first)
        fields.append(value)
    return fields
