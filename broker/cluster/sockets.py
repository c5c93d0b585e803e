"""TCP connections between the processes of a namespace."""

import socket

# After this time without an acknowledgement by the other machine a connection is lost: its locks end, and it is made
# again.
SILENCE_MS = 10_000
PROBE_SECONDS = 3  # between two probes of an idle connection


def end_when_silent(connection: socket.socket) -> None:
    """Send small frames at once, and end the connection when the other machine does not answer any more."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
