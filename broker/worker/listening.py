"""Where a worker is reached: a unix socket on its machine, or a TCP port, with TLS beyond the machine."""

import socket
import ssl
from typing import Protocol

from broker.cluster.sockets import SILENCE_MS, end_when_silent
from broker.settings.addresses import parse_address
from broker.unix_socket import listen_at

BACKLOG = 64


class WorkerListener(Protocol):
    def accept(self) -> socket.socket:
        """A connection, non-blocking. Raises OSError."""

    def fileno(self) -> int: ...


class UnixListener:
    def __init__(self, path: str) -> None:
        self._socket = listen_at(path, BACKLOG)

    def accept(self) -> socket.socket:
        connection, _ = self._socket.accept()
        return connection

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


class TcpListener:
    """Listens at an address of TCP. The constructor raises OSError if it cannot be used."""

    def __init__(self, address: str, tls: ssl.SSLContext | None, silence_ms: int = SILENCE_MS) -> None:
        self._silence_ms = silence_ms
        host, port = parse_address(address)
        self._tls = tls
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._socket.setblocking(False)

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    def accept(self) -> socket.socket:
        connection, _ = self._socket.accept()
        connection.setblocking(False)
        end_when_silent(connection, self._silence_ms)
        if self._tls is None:
            return connection
        return self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
