"""TCP connections that end when the machine at the other end is gone, which may end nothing itself."""

import socket

# After this time without an acknowledgement by the other machine a connection is lost.
SILENCE_MS = 10_000
PROBE_SECONDS = 3  # between two probes of an idle connection


def end_when_silent(connection: socket.socket | None, silence_ms: int = SILENCE_MS) -> None:
    """Send small frames at once, and end the connection when the other machine does not answer any more.

    Does nothing with other sockets than those of TCP.
    """
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_ms)
