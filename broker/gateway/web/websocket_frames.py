"""The frames of a WebSocket, the server's side (RFC 6455, 5): taken apart as they come, and put together.

Payloads are passed on as they come, so nothing is kept but the head of a frame or a control frame that is not complete.
Borders of messages are lost, which mean nothing to AMQP. Pure.
"""

import struct
from typing import Final

from websockets.exceptions import ProtocolError
from websockets.frames import Close, CloseCode, Opcode

try:
    from websockets.speedups import apply_mask
except ImportError:  # not every system has it
    from websockets.utils import apply_mask

MAX_FRAME_BYTES: Final = 16 << 20  # clients put all that they have to write into one
FRAMES_AT_ONCE: Final = 512  # about a millisecond of work
_CONTROL_BYTES: Final = 125
_HEAD_BYTES: Final = 14  # with a length of 8 bytes and a mask
_FINAL, _MASKED, _LENGTH, _RESERVED = 0x80, 0x80, 0x7F, 0x70
_U16, _U64 = struct.Struct(">H"), struct.Struct(">Q")


class Broken(Exception):
    """The client breaks the protocol, or a limit: the WebSocket ends with this code."""

    def __init__(self, code: CloseCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Incoming:
    """What a client sends. `largest` is the most that a frame may have.

    `ping` is the payload of the last ping that is not answered, `closed` is the client's close; take them out.
    """

    def __init__(self, largest: int = MAX_FRAME_BYTES) -> None:
        self.largest = largest
        self.ping: bytes | None = None
        self.closed: Close | None = None
        self._head = b""  # of a frame, not complete
        self._left = 0  # bytes to come of the payload
        self._opcode: int = Opcode.BINARY  # of the payload
        self._mask = bytes(4)
        self._control = bytearray()  # the payload of a control frame, not complete
        self._goes_on = False  # a message has begun, and more fragments of it come

    def take(self, data: bytes, at: int = 0) -> tuple[bytes, int]:
        """Take frames from `data[at:]`; returns what they have for AMQP, and the offset up to which they were taken.

        That is the end, unless there are many frames, or the client has closed: then nothing more comes. Raises Broken.
        """
        content: list[bytes] = []
        for _ in range(FRAMES_AT_ONCE):
            if self.closed is not None:
                return b"".join(content), len(data)
            if not self._left:
                start = self._begin(data, at)
                if start is None:
                    return b"".join(content), len(data)
                at = start
            piece = data[at : at + self._left]
            at += len(piece)
            self._take_payload(piece, content)
            if self._left:
                break
        return b"".join(content), at

    def _begin(self, data: bytes, at: int) -> int | None:
        """Read the head of the next frame; returns where its payload begins, or None if the head is not whole."""
        kept = len(self._head)
        head = self._head + data[at : at + _HEAD_BYTES - kept]
        length = head[1] & _LENGTH if len(head) > 1 else 0
        size_bytes = 2 if length == 126 else 8 if length == 127 else 0
        if len(head) < 2 or len(head) < 6 + size_bytes:
            if len(head) > 1:
                self._check(head[0], head[1])
            self._head = head
            return None
        self._check(head[0], head[1])
        if size_bytes:
            [length] = (_U16 if size_bytes == 2 else _U64).unpack_from(head, 2)
        if length > self.largest:
            raise Broken(CloseCode.MESSAGE_TOO_BIG, f"a frame of {length} bytes; {self.largest} are taken now")
        self._mask = head[2 + size_bytes : 6 + size_bytes]
        self._opcode = head[0] & 0x0F
        self._left = length
        self._head = b""
        if self._opcode <= Opcode.BINARY:
            self._goes_on = not head[0] & _FINAL
        return at + 6 + size_bytes - kept

    def _check(self, first: int, second: int) -> None:
        """Check the head of a frame. Raises Broken if it is not allowed."""
        opcode = first & 0x0F
        if first & _RESERVED or opcode not in (*range(3), *range(8, 11)):
            raise Broken(CloseCode.PROTOCOL_ERROR, "a frame with reserved bits or an unknown opcode")
        if not second & _MASKED:
            raise Broken(CloseCode.PROTOCOL_ERROR, "a frame without a mask")
        if opcode == Opcode.TEXT:
            raise Broken(CloseCode.UNSUPPORTED_DATA, "AMQP is in binary messages")
        if opcode > Opcode.BINARY:
            if not first & _FINAL or second & _LENGTH > _CONTROL_BYTES:
                raise Broken(CloseCode.PROTOCOL_ERROR, "a control frame that is long, or not whole")
        elif self._goes_on is not (opcode == Opcode.CONT):
            raise Broken(CloseCode.PROTOCOL_ERROR, "a fragment of no message, or a message within another")

    def _take_payload(self, piece: bytes, content: list[bytes]) -> None:
        self._left -= len(piece)
        if piece and self._mask != b"\0\0\0\0":
            mask, shift = self._mask, len(piece) % 4
            self._mask = mask[shift:] + mask[:shift]
            piece = apply_mask(piece, mask)
        if self._opcode <= Opcode.BINARY:
            content.append(piece)
            return
        self._control += piece
        if self._left:
            return
        payload = bytes(self._control)
        self._control.clear()
        if self._opcode == Opcode.PING:
            self.ping = payload
        elif self._opcode == Opcode.CLOSE:
            try:
                self.closed = Close.parse(payload)
            except (ProtocolError, UnicodeDecodeError) as error:
                raise Broken(CloseCode.PROTOCOL_ERROR, str(error)) from None


def frame(opcode: Opcode, payload: bytes) -> list[bytes]:
    """A whole frame, in pieces."""
    return [frame_head(opcode, len(payload)), payload]


def frame_head(opcode: Opcode, size: int) -> bytes:
    first = _FINAL | opcode
    if size < 126:
        return bytes((first, size))
    if size < 1 << 16:
        return bytes((first, 126)) + _U16.pack(size)
    return bytes((first, 127)) + _U64.pack(size)
