"""TCP connections between the processes of a namespace."""

import socket
import struct

from protocol.client.sockets import SILENCE_MS as SILENCE_MS
from protocol.client.sockets import end_when_silent as end_when_silent


def discard_unsent(connection: socket.socket) -> None:
    """When this connection is closed, what it has not sent yet is never sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
