"""AMQP over WebSockets on a real broker: a bridge of the test turns an AMQP client's bytes into messages."""

import contextlib
import socket
import ssl
import threading
import urllib.error
import urllib.request

import proton
import pytest
from proton.utils import BlockingConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from protocol.engine.sasl import SASL_HEADER
from tests.brokers import KEY, KEY_NAME, Broker
from tests.operations.test_tls import Certificates
from tests.patience import PATIENCE_S, eventually
from tests.ports import free_ports

PATH = "/$servicebus/websocket"
SUBPROTOCOL = Subprotocol("AMQPWSB10")
QUEUES = '[[queues]]\nname = "orders"\n[[queues]]\nname = "many"\n'


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("broker"), QUEUES) as running:
        yield running


def opened(broker, path=PATH, **options):
    options = {"subprotocols": [SUBPROTOCOL], "compression": None, "max_size": None} | options
    return connect(f"ws://localhost:{broker.http_port}{path}", open_timeout=PATIENCE_S, **options)


class Bridge:
    """A port of TCP whose only connection goes over a WebSocket, in messages of `piece_bytes`."""

    def __init__(self, websocket, piece_bytes=1 << 20, read_bytes=1 << 16):
        self._websocket = websocket
        self._piece_bytes, self._read_bytes = piece_bytes, read_bytes
        self.reads = threading.Event()
        self.reads.set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        client, _ = self._listening.accept()
        self._listening.close()
        threading.Thread(target=self._answer, args=(client,), daemon=True).start()
        with contextlib.suppress(OSError, ConnectionClosed):
            while data := client.recv(self._read_bytes):
                for at in range(0, len(data), self._piece_bytes):
                    self._websocket.send(data[at : at + self._piece_bytes])
        self._websocket.close()

    def _answer(self, client):
        with contextlib.suppress(OSError, ConnectionClosed):
            while True:
                self.reads.wait()
                client.sendall(self._websocket.recv())
        client.close()

    def connection(self):
        return BlockingConnection(
            f"amqp://{KEY_NAME}:{KEY}@localhost:{self.port}", timeout=PATIENCE_S, allowed_mechs="PLAIN"
        )


@pytest.mark.parametrize(("piece_bytes", "name"), [(1 << 20, SUBPROTOCOL), (1, SUBPROTOCOL), (7, "amqp")])
def test_messages_go_and_come(broker, piece_bytes, name):
    with opened(broker, subprotocols=[name]) as websocket:
        assert websocket.subprotocol == name
        connection = Bridge(websocket, piece_bytes).connection()
        sender, receiver = connection.create_sender("orders"), connection.create_receiver("orders")
        for number in range(20):
            sender.send(proton.Message(body=f"{number}" * 500))
        for number in range(20):
            assert receiver.receive(PATIENCE_S).body == f"{number}" * 500
            receiver.accept()
        connection.close()


def test_a_frame_that_comes_in_many_reads(broker):
    body = "large" * 50_000
    with opened(broker) as websocket:
        bridge = Bridge(websocket, read_bytes=1 << 20)
        connection = bridge.connection()
        sender, receiver = connection.create_sender("orders"), connection.create_receiver("orders")
        sender.send(proton.Message(body=body))
        assert receiver.receive(PATIENCE_S).body == body
        receiver.accept()
        connection.close()


def test_over_tls(tmp_path):
    made = Certificates(tmp_path)
    [https] = free_ports(1)
    config = f"[http]\ntls_port = {https}\n{made.settings()}{QUEUES}"
    with Broker(tmp_path / "broker", config):
        trusting = ssl.create_default_context(cafile=made.ca)
        url = f"wss://localhost:{https}{PATH}/"
        with connect(url, ssl=trusting, subprotocols=[SUBPROTOCOL], open_timeout=PATIENCE_S) as websocket:
            connection = Bridge(websocket).connection()
            connection.create_sender("orders").send(proton.Message(body="one"))
            assert connection.create_receiver("orders").receive(PATIENCE_S).body == "one"
            connection.close()


def test_a_client_that_does_not_read_gets_all_when_it_reads_again(broker):
    count, body = 2000, "x" * 20_000
    with opened(broker) as websocket:
        bridge = Bridge(websocket)
        connection = bridge.connection()
        sender = connection.create_sender("many")
        for _ in range(count):
            sender.send(proton.Message(body=body))
        receiver = connection.create_receiver("many", credit=0)
        bridge.reads.clear()
        receiver.link.flow(count)
        with pytest.raises(proton.Timeout):
            connection.wait(lambda: False, timeout=2)
        bridge.reads.set()
        for _ in range(count):
            assert receiver.receive(PATIENCE_S).body == body
            receiver.accept()
        connection.close()


@pytest.mark.parametrize("path", [PATH, f"{PATH}/", "/$ServiceBus/WebSocket", "/%24servicebus/websocket"])
def test_the_spellings_of_the_path(broker, path):
    with opened(broker, path) as websocket:
        websocket.send(SASL_HEADER)
        assert websocket.recv(20).startswith(SASL_HEADER)
        assert websocket.ping().wait(PATIENCE_S)


def test_text_ends_the_websocket(broker):
    with opened(broker) as websocket:
        websocket.send("text")
        with pytest.raises(ConnectionClosed) as raised:
            websocket.recv(20)
        assert raised.value.rcvd.code == 1003


def test_a_close_is_answered_and_ends_the_connection(broker):
    before = closed(broker)
    with opened(broker) as websocket:
        websocket.send(SASL_HEADER)
        websocket.recv(20)
        websocket.close()
        assert websocket.protocol.close_rcvd.code == 1000
    eventually(lambda: closed(broker) != before, "it has ended")


def closed(broker):
    with urllib.request.urlopen(f"http://127.0.0.1:{broker.ops_port}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    [value] = [line.split()[-1] for line in lines if line.startswith("peeklock_connections_closed_total")]
    return float(value)


def test_what_is_no_amqp_is_refused_as_on_tcp(broker):
    with opened(broker) as websocket:
        websocket.send(b"GET / HTTP/1.1\r\n\r\n")
        assert websocket.recv(20) == SASL_HEADER
        with pytest.raises(ConnectionClosed):
            websocket.recv(20)


@pytest.mark.parametrize("subprotocols", [None, ["mqtt"]])
def test_another_subprotocol_is_refused(broker, subprotocols):
    with pytest.raises(InvalidStatus) as raised:
        opened(broker, subprotocols=subprotocols)
    assert raised.value.response.status_code == 400
    assert b"AMQPWSB10" in raised.value.response.body or b"subprotocol" in raised.value.response.body


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_request_that_is_no_handshake_is_refused(broker, method):
    request = urllib.request.Request(f"http://localhost:{broker.http_port}{PATH}", method=method)
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=PATIENCE_S)
    assert raised.value.code == 400
    assert b"SubCode=40000" in raised.value.read()


def test_a_message_that_is_too_large_ends_the_websocket(broker):
    with opened(broker) as websocket:
        with contextlib.suppress(ConnectionClosed):
            websocket.send(bytes((16 << 20) + 1))
        with pytest.raises(ConnectionClosed) as raised:
            websocket.recv(20)
    assert raised.value.rcvd.code == 1009


def test_bytes_that_come_with_the_handshake_count(broker):
    """A client need not wait for the answer before it sends."""
    request = (
        f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {'A' * 22}==\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: {SUBPROTOCOL}\r\n\r\n"
    )
    frame = b"\x82\x88\0\0\0\0" + SASL_HEADER  # masked with zeros
    with socket.create_connection(("localhost", broker.http_port), PATIENCE_S) as connection:
        connection.sendall(request.encode() + frame)
        answer = b""
        while SASL_HEADER not in answer:
            more = connection.recv(4096)
            assert more, answer
            answer += more
    assert answer.startswith(b"HTTP/1.1 101 ")
