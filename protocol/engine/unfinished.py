"""Limits the bytes of deliveries that have begun and not ended, for a connection and for all that share a pool.

A connection may hold up to its own maximum, but never more than what is free in the pool. So a connection that takes
much leaves room for the others, however many there are. A delivery that finds no room is received to its end, thrown
away, and refused. No connection waits for others, so none waits for ever.
"""

from typing import Final

from protocol.engine.proton.state_bytes import StateTooLarge

UNBOUNDED: Final = 1 << 62
# Proton keeps the buffer of each delivery's largest part until the delivery is settled.
MAX_BUFFER_BYTES: Final = 64 << 20


class Pool:
    """The bytes that all connections which share the pool may hold together."""

    def __init__(self, maximum_bytes: int) -> None:
        self.maximum_bytes = maximum_bytes
        self.held_bytes = 0


class Unfinished:
    """The unfinished deliveries of one connection."""

    def __init__(self, pool: Pool, maximum_bytes: int) -> None:
        self.maximum_bytes = maximum_bytes
        self._pool = pool
        self._held_bytes = 0
        self._buffer_bytes = 0

    def take(self, size: int) -> bool:
        """Hold `size` more bytes, if there is room for them."""
        free = self._pool.maximum_bytes - self._pool.held_bytes
        if self._held_bytes + size > min(self.maximum_bytes, free):
            return False
        self._held_bytes += size
        self._pool.held_bytes += size
        return True

    @property
    def held_bytes(self) -> int:
        """What the deliveries take, and proton's buffers of their parts."""
        return self._held_bytes + self._buffer_bytes

    def give_back(self, size: int) -> None:
        self._held_bytes -= size
        self._pool.held_bytes -= size

    def buffer(self, more_bytes: int) -> None:
        """A buffer has grown by `more_bytes`; if they are negative it was freed. Raises StateTooLarge."""
        self._buffer_bytes += more_bytes
        if more_bytes > 0 and self._buffer_bytes > min(MAX_BUFFER_BYTES, 2 * self.maximum_bytes):
            raise StateTooLarge("The connection has begun more messages than it may have unfinished.")

    def give_back_all(self) -> None:
        self.give_back(self._held_bytes)
        self._buffer_bytes = 0
