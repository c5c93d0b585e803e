"""Frames of WebSockets as clients write them, in reads whose borders mean nothing."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Close, CloseCode, Frame, Opcode

from broker.gateway.web.websocket_frames import FRAMES_AT_ONCE, Broken, Incoming

SIZES = st.sampled_from([0, 1, 3, 4, 5, 125, 126, 127, 300, 65_535, 65_536, 65_537])
MESSAGES = st.lists(st.lists(SIZES, min_size=1, max_size=4), max_size=6)


def written(frame: Frame) -> bytes:
    return frame.serialize(mask=True)


def head(first: int, size: int) -> bytes:
    """A frame that the library would not write: its first byte, and a mask of zeros."""
    return bytes([first, 0x80 | min(size, 126)]) + (size.to_bytes(2, "big") if size > 125 else b"") + bytes(4)


def payload(seed: int, size: int) -> bytes:
    return bytes((seed + at) % 251 for at in range(size))


def taken(incoming: Incoming, reads: list[bytes]) -> bytes:
    """What AMQP gets of these reads."""
    contents = []
    for data in reads:
        at = 0
        while at < len(data):
            content, at = incoming.take(data, at)
            contents.append(content)
    return b"".join(contents)


@given(messages=MESSAGES, pings=st.booleans(), closes=st.booleans(), data=st.data())
def test_borders_of_reads_mean_nothing(messages, pings, closes, data):
    """Each message is a list of the sizes of its fragments; a ping may come between any two."""
    frames, expected = [], []
    for message in messages:
        for at, size in enumerate(message):
            opcode = Opcode.CONT if at else Opcode.BINARY
            expected.append(payload(len(expected), size))
            frames.append(Frame(opcode, expected[-1], fin=at == len(message) - 1))
            if pings:
                frames.append(Frame(Opcode.PING, str(len(frames)).encode()))
    if closes:
        frames.append(Frame(Opcode.CLOSE, Close(CloseCode.GOING_AWAY, "bye").serialize()))
    wire = b"".join(written(frame) for frame in frames)
    borders = data.draw(st.sets(st.integers(0, len(wire)), max_size=20))
    reads = [wire[start:end] for start, end in pairwise(sorted({0, len(wire), *borders}))]
    incoming = Incoming()
    assert taken(incoming, reads) == b"".join(expected)
    last = [frame.data for frame in frames if frame.opcode == Opcode.PING][-1:]
    assert incoming.ping == (last[0] if last else None)
    assert (incoming.closed is not None) is closes


@pytest.mark.parametrize("read_bytes", [1, 2, 7, 13, 14, 15, 1000, 16_384])
def test_a_large_frame_comes_in_many_reads(read_bytes):
    content = payload(0, 70_000)
    wire = written(Frame(Opcode.BINARY, content)) + written(Frame(Opcode.BINARY, b"next"))
    reads = [wire[at : at + read_bytes] for at in range(0, len(wire), read_bytes)]
    assert taken(Incoming(), reads) == content + b"next"


def test_one_call_takes_a_bounded_number_of_frames():
    wire = b"".join(written(Frame(Opcode.BINARY, bytes([at % 251]))) for at in range(FRAMES_AT_ONCE + 1))
    incoming = Incoming()
    content, at = incoming.take(wire)
    assert len(content) == FRAMES_AT_ONCE
    assert incoming.take(wire, at) == (bytes([FRAMES_AT_ONCE % 251]), len(wire))


@pytest.mark.parametrize("read_bytes", [1, 1000])
def test_nothing_counts_after_a_close(read_bytes):
    close = written(Frame(Opcode.CLOSE, Close(CloseCode.NORMAL_CLOSURE, "").serialize()))
    wire = written(Frame(Opcode.BINARY, b"before")) + close + written(Frame(Opcode.BINARY, b"behind"))
    reads = [wire[at : at + read_bytes] for at in range(0, len(wire), read_bytes)]
    assert taken(Incoming(), reads) == b"before"


BROKEN = {
    "text": (written(Frame(Opcode.TEXT, b"text")), CloseCode.UNSUPPORTED_DATA),
    "no mask": (Frame(Opcode.BINARY, b"no mask").serialize(mask=False), CloseCode.PROTOCOL_ERROR),
    "a fragment of no message": (written(Frame(Opcode.CONT, b"")), CloseCode.PROTOCOL_ERROR),
    "a message within another": (head(Opcode.BINARY, 0) + head(0x82, 0), CloseCode.PROTOCOL_ERROR),
    "a ping in fragments": (head(Opcode.PING, 0), CloseCode.PROTOCOL_ERROR),
    "a long ping": (head(0x80 | Opcode.PING, 126), CloseCode.PROTOCOL_ERROR),
    "a reserved bit": (head(0xC2, 0), CloseCode.PROTOCOL_ERROR),
    "a large frame": (written(Frame(Opcode.BINARY, bytes(1001))), CloseCode.MESSAGE_TOO_BIG),
    "the largest size": (bytes([0x82, 0xFF]) + (2**63 - 1).to_bytes(8, "big") + bytes(4), CloseCode.MESSAGE_TOO_BIG),
    "an unknown opcode": (head(0x83, 0), CloseCode.PROTOCOL_ERROR),
    "half a code": (written(Frame(Opcode.CLOSE, b"\x03")), CloseCode.PROTOCOL_ERROR),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("read_bytes", [1, 1000])
def test_what_breaks_the_protocol_ends_the_websocket(what, read_bytes):
    wire, code = BROKEN[what]
    with pytest.raises(Broken) as raised:
        taken(Incoming(largest=1000), [wire[at : at + read_bytes] for at in range(0, len(wire), read_bytes)])
    assert raised.value.code == code
