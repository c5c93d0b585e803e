"""Connections of clients end when the machine at the other end is gone: it may have lost its power or its network."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.administration.address import Address
from broker.capture.journal import HttpJournal
from broker.pairing.sidecar.connection import Primary
from protocol.client.connection import Connection
from protocol.client.connection_string import Anonymous
from protocol.client.sockets import SILENCE_MS, end_when_silent

JOURNAL = b'{"namespace": "shop", "partitions": [], "consumers": []}'


def is_guarded(connection: socket.socket) -> bool:
    return (
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENCE_MS
        and connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0
        and connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) * 1000 < SILENCE_MS
        and connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    )


@contextmanager
def journal() -> Iterator[int]:
    """Answers one request for what the journal has; the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                connection.sendall(head % len(JOURNAL) + JOURNAL)
                connection.recv(1)

        serving = threading.Thread(target=serve)
        serving.start()
        yield listener.getsockname()[1]
        serving.join()


def test_a_capture() -> None:
    with journal() as port:
        source = HttpJournal(Address("http", "127.0.0.1", port), Anonymous(), ssl.create_default_context(), "me")
        assert source.extents().partitions == []
        assert is_guarded(source._connection.sock)
        source.close()


def test_spark(tmp_path: Path) -> None:
    pytest.importorskip("numpy", reason="it is not installed with Spark")
    from pyspark_peeklock.journal_client import Endpoint, JournalClient
    from pyspark_peeklock.options import Access

    secret = tmp_path / "secret"
    secret.write_text("Endpoint=sb://localhost;UseDevelopmentEmulator=true;SharedAccessKeyName=a;SharedAccessKey=b")
    with journal() as port:
        client = JournalClient(Endpoint(Access(str(secret), None), f"http://127.0.0.1:{port}", 10.0))
        assert client.states() == ("shop", {})
        assert client._connection is not None
        assert is_guarded(client._connection.sock)
        client.close()


class Transport(asyncio.Transport):
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def write(self, data: Any) -> None: ...


async def test_clients_by_amqp_and_with_them_the_syphon() -> None:
    with socket.socket() as made:
        Connection(Anonymous(), "localhost", "me", 1.0, 1000).connection_made(Transport({"socket": made}))
        assert is_guarded(made)


def test_a_sidecar_towards_the_primary() -> None:
    with socket.socket() as made:
        client: Any = None
        Primary(client, 1000).connection_made(Transport({"socket": made}))
        assert is_guarded(made)


def test_other_sockets_than_those_of_tcp_stay_as_they_are() -> None:
    with socket.socket(socket.AF_UNIX) as made:
        end_when_silent(made)
    end_when_silent(None)
