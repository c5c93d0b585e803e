"""What all kinds of hostile peers need: where the broker listens, choices that a seed repeats, sockets to be kept."""

import random
import socket
import ssl
import struct
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

MOST_KEPT = 150
PATIENCE_S = 5.0
NO_LINGER = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Ports:
    amqp: int
    amqps: int
    http: int
    https: int
    ca: Path


def reset(connection: socket.socket) -> None:
    """Close it with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    connection.close()


class Kept:
    """Connections whose peers have gone quiet. Each is ended when there are too many, the oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: deque[socket.socket] = deque()

    def keep(self, connection: socket.socket, most: int = MOST_KEPT) -> None:
        with self._lock:
            self._sockets.append(connection)
            ended = [self._sockets.popleft() for _ in range(len(self._sockets) - most)]
        for each in ended:
            each.close()

    def close(self) -> None:
        with self._lock:
            for each in self._sockets:
                each.close()
            self._sockets.clear()


@dataclass(frozen=True)
class Place:
    """One thread's view of the run."""

    ports: Ports
    chance: random.Random
    kept: Kept

    def connect(self, port: int | None = None) -> socket.socket:
        """By default to the plain port of AMQP."""
        connection = socket.create_connection(("127.0.0.1", port or self.ports.amqp), PATIENCE_S)
        connection.settimeout(PATIENCE_S)
        return connection

    def connect_tls(self, port: int) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=self.ports.ca)
        return context.wrap_socket(self.connect(port), server_hostname="localhost")

    def leave(self, connection: socket.socket) -> None:
        """End it in one of the ways in which peers end, or go quiet."""
        way = self.chance.choice((socket.socket.close, reset, self.kept.keep))
        way(connection)

    def cut(self, data: bytes) -> bytes:
        """The data up to some place within it."""
        return data[: self.chance.randrange(1, len(data))]

    def say_in_pieces(self, connection: socket.socket, data: bytes, most_pieces: int = 20) -> None:
        size = max(1, len(data) // most_pieces)
        for at in range(0, len(data), size):
            connection.sendall(data[at : at + size])
