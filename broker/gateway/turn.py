"""One turn of a connection: one read of its socket, or one frame of a worker.

What the client's links and transactions gather in it goes to the partitions at its end, and what answers have made is
written then.
"""

from typing import Protocol


class Gathering(Protocol):
    """Work that gathers in a turn."""

    def post(self) -> None:
        """Send it to the partition."""


class Turn(Protocol):
    """Of a connection. `active` are posted at the end of the turn."""

    active: set[Gathering]

    def flush(self) -> None:
        """End it."""

    def fail(self, error: Exception) -> None:
        """`error`, being handled, is of this connection and nobody foresaw it: it ends, and nothing else does."""
