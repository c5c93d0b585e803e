"""All connections of a gateway together have one budget of memory (amqp.max_connections_bytes)."""

import base64
import contextlib
import os
import socket
import threading
import time

import proton
import pytest
from proton.utils import BlockingConnection

from protocol.codec import Symbol, UInt
from protocol.engine.sasl import SASL_HEADER
from protocol.nodes.sas_tokens import generate
from tests.brokers import KEY, KEY_NAME, Broker
from tests.end_to_end.health import assert_unharmed, metrics, process_ids
from tests.end_to_end.raw_peer import CLOSE, TRANSFER, RawPeer, error_of, performative, source
from tests.patience import PATIENCE_S, eventually

MIB = 1 << 20
BUDGET = 256 * MIB
CONFIG = f"""
partitions = 1
[amqp]
max_connections_bytes = {BUDGET}
[[queues]]
name = "witness"
[[queues]]
name = "orders"
[[queues]]
name = "full"
"""
PART = bytes(60_000)
FULL = 120  # messages of 250 kB, which a client asks for and does not read


class Measured(Broker):
    started_bytes = 0  # of its gateway, before there are clients


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Measured(tmp_path_factory.mktemp("budget"), CONFIG, workers=1) as broker:
        connection = BlockingConnection(address(broker), timeout=PATIENCE_S, allowed_mechs="PLAIN")
        sender = connection.create_sender("full")
        for _ in range(FULL):
            sender.send(proton.Message(body=bytes(250_000)))
        connection.close()
        broker.started_bytes = broker.gateway().memory_info().rss
        yield broker


def address(broker):
    return f"amqp://{KEY_NAME}:{KEY}@localhost:{broker.amqp_port}"


class Honest:
    """Sends and receives all the time, on a connection that nothing may end."""

    def __init__(self, broker):
        self._broker = broker
        self._ends = threading.Event()
        self.passed = 0
        self.problem = None
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        try:
            connection = BlockingConnection(address(self._broker), timeout=PATIENCE_S, allowed_mechs="PLAIN")
            sender, receiver = connection.create_sender("orders"), connection.create_receiver("orders")
            while not self._ends.is_set():
                sender.send(proton.Message(body=f"{self.passed}" * 1000))
                assert receiver.receive(PATIENCE_S).body == f"{self.passed}" * 1000
                receiver.accept()
                self.passed += 1
            connection.close()
        except Exception as error:
            self.problem = error

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ends.set()
        self._thread.join()


def grown(broker):
    return broker.gateway().memory_info().rss - broker.started_bytes


def unfinished(broker, held):
    """Begins messages and does not end them."""
    peer = RawPeer.connect(broker.amqp_port)
    held.append(peer.socket)
    handles = [peer.attach_sender("orders", name=f"sender-{each}", handle=each) for each in range(40)]
    first = b"".join(performative(0, TRANSFER, [UInt(h), UInt(h), b"t", UInt(0), False, True], PART) for h in handles)
    more = b"".join(performative(0, TRANSFER, [UInt(h), None, None, None, False, True], PART) for h in handles)
    peer.send(first + more * 9)
    return peer


def unread(broker, held):
    """Browses on several links, and does not read."""
    peer = RawPeer.connect(broker.amqp_port, receive_buffer_bytes=4096)
    held.append(peer.socket)
    for handle in range(3):
        browsed = source("full", mode=Symbol("copy"))
        peer.attach_receiver("full", name=f"browser-{handle}", handle=handle, source_=browsed)
    for handle in range(3):
        peer.flow(handle, FULL)
    return peer


def links(broker, held):
    """Attaches links with large names."""
    peer = RawPeer.connect(broker.amqp_port)
    held.append(peer.socket)
    for handle in range(150):
        peer.attach(sender=True, address="orders", handle=handle, name=f"{handle}" * 4000)
    return peer


def stranger(broker, held):
    """Opens a WebSocket and says the header of SASL."""
    peer = socket.create_connection(("127.0.0.1", broker.http_port), timeout=PATIENCE_S)
    held.append(peer)
    key = base64.b64encode(os.urandom(16)).decode()
    lines = ["GET /$servicebus/websocket HTTP/1.1", "Host: x", "Upgrade: websocket", "Connection: Upgrade"]
    lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Protocol: AMQPWSB10"]
    peer.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
    peer.sendall(bytes((0x82, 0xFE)) + (60_000).to_bytes(2, "big") + bytes(4) + SASL_HEADER)


def body(broker, held):
    """Posts a message and does not end it."""
    peer = socket.create_connection(("127.0.0.1", broker.http_port), timeout=PATIENCE_S)
    held.append(peer)
    token = generate("http://localhost/orders", KEY_NAME, KEY, int(time.time()) + 3600)
    head = (
        f"POST /orders/messages HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\nContent-Length: {MIB}\r\n\r\n"
    )
    peer.sendall(head.encode() + bytes(MIB - 1))


KINDS = {"unfinished": (unfinished, 30), "unread": (unread, 40), "links": (links, 90), "body": (body, 150)}


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_peers_get_no_more_than_the_budget_and_an_honest_client_goes_on(broker, kind):
    """What the allocator cannot use again at once comes on top of what connections hold."""
    before = process_ids(broker)
    held: list[socket.socket] = []
    take, count = KINDS[kind]
    most = 0
    with Honest(broker) as honest:
        for number in range(count):
            with contextlib.suppress(OSError, AssertionError):  # the broker ends some of them
                take(broker, held)
            if number % 10 == 0:
                with contextlib.suppress(OSError):
                    stranger(broker, held)
            most = max(most, grown(broker))
        passed = honest.passed
        eventually(lambda: honest.passed > passed + 10 or honest.problem, "messages of the honest")
        most = max(most, grown(broker))
        assert metrics(broker)["peeklock_connections_held_bytes",] < BUDGET
        for peer in held:
            peer.close()
    assert honest.problem is None
    assert most < BUDGET * 1.75
    assert_unharmed(broker, before)
    eventually(lambda: grown(broker) < BUDGET // 4, "memory is free again")


def test_the_largest_is_ended_and_told_why(broker):
    held: list[socket.socket] = []
    try:
        largest = unfinished(broker, held)
        for _ in range(90):
            links(broker, held)
        condition, text = error_of(largest.expect(CLOSE))
    finally:
        for peer in held:
            peer.close()
    assert condition == "amqp:resource-limit-exceeded"
    assert "amqp.max_connections_bytes" in text
    assert metrics(broker)["peeklock_connections_ended_for_memory_total",] > 0
    assert "connection ended for want of memory" in broker.log_file.read_text()
