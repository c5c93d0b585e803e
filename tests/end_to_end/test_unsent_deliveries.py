"""Deliveries that never left the broker when their connection or link ended: they are back, and count as nothing."""

import socket
from itertools import count

import pytest

from tests.brokers import Broker
from tests.end_to_end.health import metrics
from tests.end_to_end.raw_peer import DISPOSITION, TRANSFER, RawPeer, body_of, message
from tests.patience import eventually

MESSAGES = 120
WINDOW = 3  # transfers that the client's session takes
# What a client that does not read may have got: what its socket holds, twice that, and segments under way.
RECEIVE_BUFFER_BYTES = 4096
MAY_HAVE_GOT = 12
CONFIG = """
[amqp]
write_stall_timeout_ms = 400
max_output_buffer_bytes = 65536
""" + "".join(f'[[queues]]\nname = "once-{number}"\nmax_delivery_count = 1\n' for number in range(16))


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("unsent"), CONFIG) as broker:
        yield broker


NUMBERS = count()


@pytest.fixture
def queue() -> str:
    """One that no other test uses."""
    return f"once-{next(NUMBERS)}"


def counts(broker: Broker, queue: str) -> tuple[int, int]:
    """Messages in the queue and in its dead-letter queue."""
    found = metrics(broker)
    return int(found["peeklock_active_messages", queue]), int(found["peeklock_deadlettered_messages", queue])


def fill(broker: Broker, queue: str, messages: int, size_bytes: int = 1) -> None:
    with RawPeer.connect(broker.amqp_port) as peer:
        sender = peer.attach_sender(queue)
        for number in range(messages):
            peer.transfer(message(b"%04d" % number + bytes(size_bytes)), sender)
            peer.expect(DISPOSITION)


def reset(peer: RawPeer) -> None:
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    peer.socket.close()


def receiving(broker: Broker, queue: str, *, settled: bool = False) -> tuple[RawPeer, int]:
    """A peer whose session takes a few transfers, which it has got, and the handle of its link."""
    peer = RawPeer.connect(broker.amqp_port)
    handle = peer.attach_receiver(queue, settled=settled)
    peer.flow(handle, 10, incoming_window=WINDOW)
    for _ in range(WINDOW):
        peer.expect(TRANSFER)
    return peer, handle


def stalls(broker: Broker, queue: str) -> None:
    """The broker has written what the client's socket takes, and has stopped."""
    written = 0.0

    def has_stopped() -> bool:
        nonlocal written
        before, written = written, metrics(broker)["peeklock_outgoing_messages_total", queue]
        return written == before > MAY_HAVE_GOT

    eventually(has_stopped, "no more is handed out")


def is_over(broker: Broker) -> None:
    eventually(lambda: metrics(broker)["peeklock_active_connections",] == 0, "the connection has ended")


@pytest.mark.parametrize("how", ["reset", "stalled"])
def test_messages_for_a_client_that_does_not_read_are_back_when_its_connection_breaks(broker, queue, how):
    fill(broker, queue, MESSAGES, 60_000)
    with RawPeer.connect(broker.amqp_port, receive_buffer_bytes=RECEIVE_BUFFER_BYTES) as peer:
        peer.attach_receiver(queue, credit=MESSAGES)
        if how == "reset":
            stalls(broker, queue)
            reset(peer)
        is_over(broker)
    eventually(lambda: sum(counts(broker, queue)) == MESSAGES, "none is locked")
    assert counts(broker, queue)[1] <= MAY_HAVE_GOT


@pytest.mark.parametrize("how", ["reset", "close"])
def test_messages_that_wait_for_the_sessions_window_are_back_when_the_connection_ends(broker, queue, how):
    fill(broker, queue, 10)
    peer, _ = receiving(broker, queue)
    if how == "reset":
        reset(peer)
    else:
        peer.close()
        peer.socket.close()
    is_over(broker)
    failed = WINDOW if how == "reset" else 0  # after a close they stay locked
    assert counts(broker, queue) == (10 - failed, failed)
    with RawPeer.connect(broker.amqp_port) as other:
        other.attach_receiver(queue, credit=10)
        assert [int(body_of(other.expect(TRANSFER).payload)[:4]) for _ in range(10 - WINDOW)] == list(range(WINDOW, 10))
        other.nothing_more(TRANSFER)


def test_messages_that_wait_for_the_sessions_window_are_back_when_the_link_ends(broker, queue):
    fill(broker, queue, 10)
    peer, handle = receiving(broker, queue)
    peer.detach(handle)
    with peer, RawPeer.connect(broker.amqp_port) as other:
        other.attach_receiver(queue, credit=10)
        assert len([other.expect(TRANSFER) for _ in range(10 - WINDOW)]) == 10 - WINDOW
        other.nothing_more(TRANSFER)


@pytest.mark.parametrize("how", ["reset", "close", "detach"])
def test_received_and_deleted_messages_that_wait_for_the_sessions_window_are_put_back(broker, queue, how):
    fill(broker, queue, 10)
    peer, handle = receiving(broker, queue, settled=True)
    if how == "reset":
        reset(peer)
    elif how == "close":
        peer.close()
    else:
        peer.detach(handle)
    eventually(lambda: counts(broker, queue) == (10 - WINDOW, 0), "put back")
    peer.socket.close()


def test_received_and_deleted_messages_that_never_left_are_put_back(broker, queue):
    fill(broker, queue, MESSAGES, 60_000)
    with RawPeer.connect(broker.amqp_port, receive_buffer_bytes=RECEIVE_BUFFER_BYTES) as peer:
        peer.attach_receiver(queue, credit=MESSAGES, settled=True)
        stalls(broker, queue)
        reset(peer)
    is_over(broker)
    eventually(lambda: counts(broker, queue)[0] >= MESSAGES - MAY_HAVE_GOT, "put back")
