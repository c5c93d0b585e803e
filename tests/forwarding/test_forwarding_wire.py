"""What a worker answers to another worker, on the socket between them."""

import socket
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgpack
import pytest

from broker import wire
from broker.catalog.catalog import home_partition
from broker.wire import Op, forward
from broker.worker.peer import Peer
from protocol.client.messages import Message
from protocol.message.intake import take_apart
from storage.records import NEVER, encode_message
from tests.brokers import Broker
from tests.patience import PATIENCE_S

CONFIG = """
partitions = 1

[[queues]]
name = "source"

[[queues]]
name = "destination"
"""
SOURCE, DESTINATION = 1 << 3, 2  # a queue id, an entity id
STORE_IDS = (number.to_bytes(8, "big") for number in count(1))


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("wire"), CONFIG) as broker:
        yield broker


class OtherWorker:
    def __init__(self, data_dir: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(PATIENCE_S)
        self._socket.connect(str(data_dir / "run" / "worker-0.sock"))
        self._unread: list[list[Any]] = []
        assert self.next()[0] == Op.HELLO
        assert self.next()[0] == Op.CATALOG

    def post(self, *messages: Sequence[Any]) -> None:
        payload = msgpack.packb(messages)
        self._socket.sendall(len(payload).to_bytes(4, "big") + payload)

    def forward(self, store_id: bytes, *numbers: int) -> None:
        entries: list[Any] = []
        for number in numbers:
            entries += (number, record(number), {})
        self.post(forward(0, store_id, 7, SOURCE, DESTINATION, entries))

    def next(self) -> list[Any]:
        while not self._unread:
            length = int.from_bytes(self._exactly(4), "big")
            self._unread = msgpack.unpackb(self._exactly(length), strict_map_key=False)
        return self._unread.pop(0)

    def _exactly(self, length: int) -> bytes:
        return self._socket.recv(length, socket.MSG_WAITALL)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def connect(broker):
    made = []

    def make() -> OtherWorker:
        made.append(OtherWorker(broker.data_dir))
        return made[-1]

    yield make
    for each in made:
        each.close()


def record(number: int) -> bytes:
    layout, body, _, _ = take_apart(Message.of(b"%d" % number).encode())
    return encode_message(1000, NEVER, layout, body)


def test_messages_taken_over_are_answered_with_the_last_number(connect):
    assert home_partition("destination", 1) == 0
    worker, store_id = connect(), next(STORE_IDS)
    worker.forward(store_id, 3, 5, 9)
    assert worker.next() == [Op.FORWARDED, 7, SOURCE, 0, 9, [], ""]
    worker.forward(store_id)
    assert worker.next() == [Op.FORWARDED, 7, SOURCE, 0, 9, [], ""]


def test_commands_of_an_older_connection_are_ignored(connect):
    older, newer, store_id = connect(), connect(), next(STORE_IDS)
    older.forward(store_id, 1)
    assert older.next()[4] == 1
    newer.forward(store_id)
    assert newer.next()[4] == 1
    older.forward(store_id, 2)
    older.post([Op.REQUEST, 0, 42, "probe", 0, []])
    assert older.next() == [Op.REPLY, 42, None]  # and no answer before it
    newer.forward(store_id)
    assert newer.next()[4] == 1
    newer.forward(store_id, 2)
    assert newer.next()[4] == 2


def test_connections_of_different_stores_do_not_disturb_each_other(connect):
    one, other = connect(), connect()
    first, second = next(STORE_IDS), next(STORE_IDS)
    other.forward(second, 1)
    assert other.next()[4] == 1
    one.forward(first, 1)
    assert one.next()[4] == 1


def test_a_frame_that_comes_in_pieces_is_taken_whole(connect):
    worker, store_id = connect(), next(STORE_IDS)
    payload = msgpack.packb([forward(0, store_id, 7, SOURCE, DESTINATION, [1, record(1), {}])])
    frame = len(payload).to_bytes(4, "big") + payload
    for at in range(0, len(frame), 7):
        worker._socket.sendall(frame[at : at + 7])
    assert worker.next()[4] == 1


def test_a_peer_reads_frames_of_any_size_and_keeps_what_is_not_whole():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = Peer(ours)
        payload = msgpack.packb([wire.restore(0, 8, [bytes(3_000_000)]), wire.restore(0, 8, [b"x"])])
        frame = len(payload).to_bytes(4, "big") + payload
        theirs.setblocking(False)
        sent = 0
        found: list[wire.Message] = []
        while not found:
            if sent < len(frame):
                sent += theirs.send(frame[sent:])
            messages = peer.read()
            assert messages is not None
            found += messages
        assert [len(each.entries[0]) for each in found if isinstance(each, wire.Restore)] == [3_000_000, 1]
        theirs.close()
        assert peer.read() is None
