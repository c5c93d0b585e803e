"""What waits for its turn: a connection with more to do than a step, which a gateway serves between others."""

from typing import Protocol


class Queued(Protocol):
    """Has more to do with what a client has sent."""

    def go_on(self, until_s: float) -> bool:
        """Go on, until this time of `time.monotonic`. True if there is more to do."""
