"""Walks the frames in bytes, and writes frames (AMQP 1.0 2.3).

Frames that come from a peer and go to proton have a walk of their own, which checks each before it is whole
(`protocol.engine.proton.incoming`).
"""

from collections.abc import Iterator
from struct import Struct
from typing import Any, Final

from protocol import codec
from protocol.codec import ULong

PROTOCOL: Final = b"AMQP"  # a protocol header begins with it, and has 8 bytes
HEADER_BYTES: Final = 8
_PROTOCOL_SIZE: Final = int.from_bytes(PROTOCOL, "big")  # what a protocol header says where a frame has its size

# Size, data offset in words, type, channel; then the constructor and code of a performative in their usual form.
HEAD: Final = Struct(">IBBH")
USUAL: Final = Struct(">IBBHHB")
USUAL_DESCRIPTOR: Final = 0x0053
USUAL_OFFSET: Final = 2


def walk(data: bytes | memoryview) -> Iterator[tuple[int, int, int, int | None]]:
    """Find the frames: where each begins and ends, its channel, and the code of its performative.

    The code is 0 for an empty frame, and for a protocol header, which is found like a frame. It is None if the
    performative is not here, or the form is unusual: no AMQP frame, an extended header, or a descriptor that is no
    small ulong. The last frame may end behind the data. Bytes that are too few for a frame's header are not found. The
    walk ends behind a frame that claims to be smaller than its header.
    """
    at, length = 0, len(data)
    head, usual = HEAD.unpack_from, USUAL.unpack_from
    code: int | None
    while length - at >= HEADER_BYTES:
        if length - at >= USUAL.size:
            size, words, kind, channel, descriptor, code = usual(data, at)
            if kind or words != USUAL_OFFSET or descriptor != USUAL_DESCRIPTOR or size < USUAL.size:
                code = None
        else:
            (size, words, kind, channel), code = head(data, at), None
        if size == HEADER_BYTES:
            code = 0
        elif size == _PROTOCOL_SIZE:
            size, channel, code = HEADER_BYTES, 0, 0
        yield at, at + size, channel, code
        if size < HEADER_BYTES:
            return
        at += size


def frame_of(channel: int, code: int, fields: list[Any]) -> bytes:
    """A whole frame with the performative of this code."""
    body = codec.encode(codec.Described(ULong(code), fields))
    return HEAD.pack(HEADER_BYTES + len(body), USUAL_OFFSET, 0, channel) + body
