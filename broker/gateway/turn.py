"""One turn of a connection: one read of its socket, or one frame of a worker.

At its end, the work that links and transactions have gathered goes to the partitions, and the output that answers have
made is written.
"""

from collections import OrderedDict
from typing import Protocol


class Gathering(Protocol):
    """An object that gathers work in a turn."""

    def post(self) -> None:
        """Send the work to the partition."""


class Turn(Protocol):
    """A turn of a connection. The keys of `active` are posted at its end, in this order."""

    active: OrderedDict[Gathering, None]

    def flush(self) -> None:
        """End the turn."""

    def fail(self, error: Exception) -> None:
        """End this connection and nothing else, because of an unforeseen `error`, which is being handled."""
