"""Peers without any right send what costs the most. An honest client hardly notices."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.brokers import Broker
from tests.end_to_end.raw_peer import DISPOSITION, RawPeer, message
from tests.hostile_input import HOSTILE, OPENED, Hostile
from tests.patience import PATIENCE_S

MIB = 1 << 20
MOST_S = 0.5  # for one message; while 1 MiB was read with quadratic work it took 6 s and more


@contextmanager
def shouting(port: int, hostile: Hostile, count: int, size: int) -> Iterator[None]:
    """So many peers send as many bytes each, and read nothing."""
    peers = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]

    def shout(peer: socket.socket) -> None:
        with suppress(OSError):
            peer.sendall(hostile.of(size))

    try:
        for peer in peers:
            peer.sendall(OPENED)
            peer.recv(4096)
        threads = [threading.Thread(target=shout, args=(peer,), daemon=True) for peer in peers]
        for thread in threads:
            thread.start()
        yield
    finally:
        for peer in peers:
            peer.close()
    for thread in threads:
        thread.join(PATIENCE_S)


@pytest.mark.parametrize(
    "name",
    [
        "empty frames with an extended header",
        "flows with a long descriptor",
        "flows with arrays of nothing",
        "links",
        "sessions",
    ],
)
def test_a_client_is_served_while_strangers_shout(broker: Broker, name: str) -> None:
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_sender("witness")

        def answered_s() -> float:
            began = time.monotonic()
            peer.transfer(message(b"x"), settled=False)
            peer.expect(DISPOSITION)
            return time.monotonic() - began

        answered_s()
        with shouting(broker.amqp_port, HOSTILE[name], 5, MIB):
            waits = sorted(answered_s() for _ in range(30))
        assert waits[-1] < MOST_S
        peer.close()
    drain(broker)


def drain(broker: Broker) -> None:
    """Take what was sent, for the next test."""
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_receiver("witness", credit=100, settled=True)
        for _ in range(31):
            peer.expect(0x14)
        peer.close()
