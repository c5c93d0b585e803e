"""Output in pieces: which deliveries never left is the same as of the output as a whole."""

import socket
import struct
from typing import Any
from unittest.mock import Mock

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.gateway import unsent
from broker.gateway.unsent import UnsentOutput
from protocol.codec import UInt
from tests.end_to_end.raw_peer import TRANSFER, performative
from tests.examples import examples


class Kernel:
    """A connection's transport and socket, of which so many bytes have left."""

    def __init__(self) -> None:
        self.sent = 0

    def get_extra_info(self, name: str) -> Any:
        return self

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return bytes(unsent._SENT_AT) + struct.pack("=QQ", self.sent, 0)


sizes = st.lists(st.integers(0, 2000), min_size=1, max_size=12)  # payloads of a delivery each
outputs = st.lists(st.tuples(sizes, st.integers(1, 4)), min_size=1, max_size=6)


@given(outputs, st.lists(st.integers(0, 8000), max_size=8))
@settings(max_examples=examples(300))
def test_deliveries_that_never_left_are_those_of_the_whole_output(outputs, steps):
    link = Mock(closed=False, queued=0)
    kernel = Kernel()
    whole, in_pieces = (UnsentOutput(kernel) for _ in range(2))  # type: ignore[arg-type]
    for each in (whole, in_pieces):
        each.expect_deliveries()
        each.skip(8)
    number, written = 0, 8
    for payloads, count in outputs:
        frames = []
        for size in payloads:
            tag = number.to_bytes(4, "big")
            frames.append(performative(0, TRANSFER, [UInt(1), UInt(number), tag, UInt(0), True], bytes(size)))
            number += 1
        for each in (whole, in_pieces):
            each.retain(link, [number])
        at_once = -(-len(frames) // count)
        pieces = [b"".join(frames[at : at + at_once]) for at in range(0, len(frames), at_once)]
        whole.add(b"".join(pieces))
        in_pieces.add_pieces([memoryview(piece) for piece in pieces])
        written += sum(map(len, pieces))
        if steps:
            kernel.sent = min(kernel.sent + steps.pop() or 1, written)
        assert in_pieces.deliveries() == whole.deliveries()
        assert in_pieces.retained(link) == whole.retained(link)
        assert in_pieces.kept_bytes <= whole.kept_bytes, "a piece that has left takes no memory"
