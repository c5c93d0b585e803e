"""Frames between the processes of a broker are the same however the socket cuts them."""

import socket
import struct

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from broker import wire
from broker.worker.peer import Peer


@given(
    st.lists(st.lists(st.sampled_from([0, 10, 300, 20_000]), max_size=4), min_size=1, max_size=6),
    st.lists(st.integers(1, 40_000) | st.integers(1, 8), max_size=40),
)
def test_frames_are_taken_however_they_are_cut(frames, sizes):
    sent = [[wire.send_run(0, 1, 2, 1, bytes(size)) for size in frame] for frame in frames]
    data = b"".join(struct.pack(">I", len(packed)) + packed for packed in map(msgpack.packb, sent))
    here, there = socket.socketpair()
    with here, there:
        peer = Peer(there)
        assert peer.read() == []
        found = []
        while data:
            size = sizes.pop() if sizes else len(data)
            here.sendall(data[: min(size, 100_000)])
            data = data[min(size, 100_000) :]
            found += peer.read() or []
        assert found == [message for frame in sent for message in frame]
        here.close()
        assert peer.read() is None
