"""Requests that arrive in one piece, as proton-j sends them, at a real broker."""

import socket
from pathlib import Path
from typing import Any

from protocol.codec import Described, decode, encode
from protocol.engine.engine import Engine
from protocol.engine.links import Link, Session
from tests.brokers import Broker
from tests.patience import PATIENCE_S

COUNT = 5


class Client:
    """A handler that keeps the responses, and notes when requests can be sent."""

    def __init__(self) -> None:
        self.correlation_ids: list[Any] = []
        self.can_send = False

    def on_message(self, link: Link, delivery: Any, payload: bytes, batch: bool, settled: bool, state: int) -> None:
        properties, _ = decode(payload)
        assert isinstance(properties, Described)
        self.correlation_ids.append(properties.value[5])

    def on_flow(self, link: Link) -> None:
        self.can_send = True

    def on_open(self, container_id: str, hostname: str) -> None: ...
    def on_session(self, session: Session) -> None: ...
    def on_session_end(self, session: Session) -> None: ...
    def on_attach(self, link: Link) -> None: ...
    def on_detach(self, link: Link, closed: bool, condition: str, description: str) -> None: ...
    def on_oversized(self, link: Link, delivery: Any, size_bytes: int, settled: bool) -> None: ...
    def on_crowded(self, link: Link, delivery: Any, settled: bool) -> None: ...
    def on_aborted(self, link: Link) -> None: ...
    def on_outcome(self, link: Link, delivery: Any, token: bytes, state: int, settled: bool) -> None: ...
    def on_close(self, condition: str, description: str) -> None: ...


def test_their_responses_keep_the_order_of_their_delivery_ids(tmp_path: Path) -> None:
    client = Client()
    engine = Engine(client, server=False, container_id="test")
    engine.open()
    session = engine.begin()
    sender = engine.attach(session, "requests", sender=True, source="$cbs", target="$cbs")
    engine.attach(session, "responses", sender=False, source="$cbs", target="$cbs", credit=COUNT)
    with (
        Broker(tmp_path) as broker,
        socket.create_connection(("127.0.0.1", broker.amqp_port), timeout=PATIENCE_S) as connection,
    ):

        def exchange() -> None:
            connection.sendall(engine.pull())
            engine.push(connection.recv(65536))

        while not client.can_send:
            exchange()
        for number in range(COUNT):
            request = encode(Described(0x73, [number])) + encode(Described(0x74, {"operation": "put-token"}))
            sender.send(bytes([number]), request, b"", 0, True)
        while len(client.correlation_ids) < COUNT:
            exchange()
            assert engine.fault() == ("", "")  # proton's engine refuses a delivery-id out of order, as its peers do
    assert client.correlation_ids == list(range(COUNT))
    engine.free()
