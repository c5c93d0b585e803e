"""Frames of a worker, in whatever pieces they come."""

from typing import Any
from unittest.mock import Mock, patch

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from broker.gateway import worker_socket
from broker.gateway.worker_socket import SocketConnection
from broker.wire import Op

BUFFER_BYTES = 64  # so that small frames are large ones


class Connection(SocketConnection):
    def __init__(self, router: Any) -> None:
        super().__init__("worker", router)
        self.taken: list[Any] = []

    def take(self, messages: Any) -> None:
        self.taken += [list(each) for each in messages]


def framed(messages: list[Any]) -> bytes:
    packed = msgpack.packb(messages)
    return len(packed).to_bytes(4, "big") + packed


MESSAGES = st.lists(st.binary(max_size=20) | st.binary(min_size=50, max_size=200)).map(
    lambda bodies: [[Op.SENT, 1, body] for body in bodies]
)


@given(st.lists(MESSAGES, max_size=6), st.data())
def test_frames_come_in_any_pieces(frames, data):
    whole = b"".join(map(framed, frames))
    with patch.object(worker_socket, "INPUT_BYTES", BUFFER_BYTES):
        connection = Connection(Mock())
        at = 0
        while at < len(whole):
            with connection.get_buffer(-1) as buffer:
                assert len(buffer) > 0
                taken = min(data.draw(st.integers(1, 300)), len(buffer), len(whole) - at)
                buffer[:taken] = whole[at : at + taken]
            connection.buffer_updated(taken)
            at += taken
        assert connection.taken == [message for messages in frames for message in messages]
        with connection.get_buffer(-1) as buffer:
            assert len(buffer) == BUFFER_BYTES
