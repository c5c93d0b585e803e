"""Unix sockets between the processes of a broker."""

import os
import socket
from typing import Final

# Between gateways and workers. With less, a turn of a worker has less than it could commit at once.
SEND_BUFFER_BYTES: Final = 4 << 20
JOURNAL_SOCKET: Final = "run/journal.sock"  # in the data directory: where the journal listens for gateways


def listen_at(path: str, backlog: int) -> socket.socket:
    """A socket that only this user can connect to, in place of that of a dead process. Raises OSError.

    A relative path is short enough, wherever the data directory is.
    """
    if os.path.exists(path):  # noqa: PTH110 - loaded by each process that starts
        os.unlink(path)  # noqa: PTH108
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        previous = os.umask(0o177)
        try:
            listening.bind(path)
        finally:
            os.umask(previous)
        listening.setblocking(False)
        listening.listen(backlog)
    except OSError:
        listening.close()
        raise
    return listening
