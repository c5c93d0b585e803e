"""The walk of frames: what it finds in bytes that are whole, cut, or of an unusual form."""

import pytest

from protocol.engine.frames import HEAD, frame_of, walk
from protocol.symbols import AMQP_HEADER, HEARTBEAT

FLOW = 0x13
FRAME = frame_of(3, FLOW, [True])
EXTENDED = HEAD.pack(16, 3, 0, 3) + bytes(4) + b"\x00\x53\x13\x45"
SYMBOLIC = HEAD.pack(12, 2, 0, 3) + b"\x00\xa3\x00\x45"
SASL = HEAD.pack(12, 2, 1, 0) + b"\x00\x53\x40\x45"


@pytest.mark.parametrize("is_view", [False, True])
def test_each_frame_is_found_with_its_channel_and_code(is_view: bool) -> None:
    pieces = [AMQP_HEADER, FRAME, HEARTBEAT, EXTENDED, SYMBOLIC, SASL, HEARTBEAT]
    data = b"".join(pieces)
    found = list(walk(memoryview(data) if is_view else data))
    assert [data[start:end] for start, end, _, _ in found] == pieces
    assert [(channel, code) for _, _, channel, code in found] == [
        *[(0, 0), (3, FLOW), (0, 0)],
        *[(3, None), (3, None), (0, None), (0, 0)],
    ]


@pytest.mark.parametrize("cut", range(len(FRAME)))
def test_a_frame_that_is_not_whole_is_the_last_if_its_header_is_here(cut: int) -> None:
    found = list(walk(FRAME + FRAME[:cut]))
    assert found[0] == (0, len(FRAME), 3, FLOW)
    assert found[1:] == ([] if cut < 8 else [(len(FRAME), 2 * len(FRAME), 3, None if cut < 11 else FLOW)])


@pytest.mark.parametrize("size", range(8))
def test_nothing_is_found_behind_a_frame_of_impossible_size(size: int) -> None:
    assert [end for _, end, _, _ in walk(HEAD.pack(size, 2, 0, 0) + FRAME)] == [size]
