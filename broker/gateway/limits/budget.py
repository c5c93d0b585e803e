"""One budget for the memory that all connections of a gateway take: input, messages, state, output.

Each connection has limits of its own, and there may be thousands of connections at these limits. A connection estimates
what it holds whenever some tens of kilobytes have gone through it. When the sum nears the budget, the connections that
hold most are closed with a reason until there is room again. A peer that does not read, or does not go, is cut off
before the budget is used up; the memory of a closed connection is free at once.
"""

import asyncio
from collections.abc import Callable
from typing import Final

# Connections are closed when more than this share of the budget is held, until less than the second is.
HIGH: Final = 7 / 8
LOW: Final = 3 / 4
FREED: Final = 1 / 8  # a share that is worth giving back to the system when it is freed
# The memory of a peer without rights counts so many times, so that thousands of strangers do not push out a client
# that sends something large.
STRANGER: Final = 16
# Measured: the sockets and objects of a connection, those of TLS, and those of AMQP behind SASL.
CONNECTION_BYTES: Final = 10 << 10
TLS_BYTES: Final = 48 << 10
ENGINE_BYTES: Final = 32 << 10
# A connection is measured when so much has gone through it, and some times a second if anything has.
MEASURED_BYTES: Final = 64 << 10
IDLE_BYTES: Final = 128 << 10  # with less, it is not measured while nothing goes through it


class Holder:
    """A connection. It adds what goes through it to `moved_bytes`, and measures itself if that is more than
    MEASURED_BYTES."""

    budget: "Budget"
    moved_bytes = 0  # since it was measured
    _held_bytes = 0  # when it was measured
    _is_quiet = True  # nothing has moved before that, since it was looked after

    @property
    def peer(self) -> str:
        raise NotImplementedError

    @property
    def has_rights(self) -> bool:
        """The client has shown a key or token that gives it a right."""
        raise NotImplementedError

    def held_bytes(self) -> int:
        """An estimate of the memory that the connection takes now, seldom too low."""
        raise NotImplementedError

    def end_for_room(self, text: str) -> None:
        """Close the connection for this reason; it may take seconds until the peer has read it."""
        raise NotImplementedError

    def cut_off(self, text: str) -> None:
        """End the connection in this turn of the event loop, or in the next."""
        raise NotImplementedError

    def measure(self) -> None:
        self.moved_bytes = 0
        self._is_quiet = False
        self._held_bytes = self.budget.measure(self)

    def look_after(self) -> None:
        """Called some times a second: what is held may become less without anything that goes through."""
        is_quiet = not self.moved_bytes
        if not (is_quiet and self._is_quiet) or self._held_bytes > IDLE_BYTES:
            self.measure()
            self._is_quiet = is_quiet


class Budget:
    """The holders and what each holds. `ended` is called for each that is ended, with the bytes that it holds."""

    def __init__(self, maximum_bytes: int, ended: Callable[[Holder, int], None]) -> None:
        self.maximum_bytes = maximum_bytes
        self.held_bytes = 0
        self._most_bytes = 0
        self._ended = ended
        self._held: dict[Holder, int] = {}
        self._ending: set[Holder] = set()  # those that were closed and have not left
        self._cut_off: set[Holder] = set()  # those of them that leave now
        self._is_due = False

    def enter(self, holder: Holder) -> None:
        self._held[holder] = 0
        holder.measure()

    def expect(self, size: int) -> None:
        """A connection that is no holder yet takes so many bytes; fewer again if it is negative."""
        self.held_bytes += size

    def has_freed_much(self) -> bool:
        """True if much less is held than before, since this was True the last time."""
        if self._most_bytes - self.held_bytes < FREED * self.maximum_bytes:
            return False
        self._most_bytes = self.held_bytes
        return True

    def leave(self, holder: Holder) -> None:
        self.held_bytes -= self._held.pop(holder, 0)
        self._ending.discard(holder)
        self._cut_off.discard(holder)

    def measure(self, holder: Holder) -> int:
        """The holder may hold more or less than when it was measured last. Returns what it holds."""
        before = self._held.get(holder)
        if before is None:
            return 0  # it has left
        held = self._held[holder] = holder.held_bytes()
        self.held_bytes += held - before
        if self.held_bytes > self._most_bytes:
            self._most_bytes = self.held_bytes
        if self.held_bytes > HIGH * self.maximum_bytes and not self._is_due:
            self._is_due = True  # later, since the holder is in the midst of something
            asyncio.get_running_loop().call_soon(self._make_room)
        return held

    def _make_room(self) -> None:
        self._is_due = False
        if self.held_bytes > HIGH * self.maximum_bytes:
            self._end(LOW * self.maximum_bytes, self._ending, self._close)
        if self.held_bytes > self.maximum_bytes:
            for holder in self._ending - self._cut_off:
                self._cut(holder)
            self._end(HIGH * self.maximum_bytes, self._cut_off, self._cut)

    def _end(self, aim_bytes: float, ending: set[Holder], end: Callable[[Holder], None]) -> None:
        """End the largest of those that are not `ending` until the others hold no more than `aim_bytes`."""
        others = self._held.keys() - ending
        left = sum(self._held[holder] for holder in others)
        if left <= aim_bytes:
            return
        for holder in sorted(others, key=self._weight, reverse=True):
            if left <= aim_bytes:
                break
            left -= self._held[holder]
            end(holder)

    def _weight(self, holder: Holder) -> int:
        return self._held[holder] * (1 if holder.has_rights else STRANGER)

    def _close(self, holder: Holder) -> None:
        self._ending.add(holder)
        self._ended(holder, self._held[holder])
        holder.end_for_room(self._text(holder))

    def _cut(self, holder: Holder) -> None:
        self._cut_off.add(holder)
        if holder not in self._ending:
            self._ending.add(holder)
            self._ended(holder, self._held[holder])
        holder.cut_off(self._text(holder))

    def _text(self, holder: Holder) -> str:
        return (
            f"The connections of this gateway take {self.held_bytes} bytes, and this one is among the largest with "
            f"{self._held.get(holder, 0)}; all together may have {self.maximum_bytes} (amqp.max_connections_bytes)."
        )
