"""Changes of entities that wait at the home until workers that are being restarted follow again.

A change needs all partitions. The supervisor has a worker back in about a second, and SDKs wait for long after an
answer that the broker is busy. So for a stated time after the home has lost a worker, or has started itself, changes
wait, in the order in which they came. How many and how large they may be is bounded. Pure: all times are arguments.
"""

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgpack

C = TypeVar("C", bound=Hashable)


class HoldBounds(NamedTuple):
    """How long after its loss a partition is waited for, and what may wait then."""

    wait_ms: int = 0  # 0: nothing waits
    changes: int = 0
    size_bytes: int = 0


class Held(NamedTuple, Generic[C]):
    """What a caller asked for in a request of this number."""

    caller: C
    number: int
    arguments: Sequence[Any]
    size_bytes: int


class HeldChanges(Generic[C]):
    def __init__(self, bounds: HoldBounds, partitions: Iterable[int], now_ms: int) -> None:
        """`partitions` are those of the other workers, of which none follows yet."""
        self._bounds = bounds
        self._lost_ms = dict.fromkeys(partitions, now_ms)
        self._held: deque[Held[C]] = deque()
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def lost(self, partitions: Iterable[int], now_ms: int) -> None:
        """These follow no more."""
        self._lost_ms |= dict.fromkeys(partitions, now_ms)

    def awaits(self, away: Collection[int], now_ms: int) -> bool:
        """Changes wait for these partitions, which do not follow: each was lost a short time ago, or never followed
        since the home has started, a short time ago.
        """
        wait_ms = self._bounds.wait_ms
        return all(each in self._lost_ms and now_ms < self._lost_ms[each] + wait_ms for each in away)

    def hold(self, caller: C, number: int, arguments: Sequence[Any]) -> bool:
        """False if there is no room."""
        size_bytes = len(msgpack.packb(arguments))
        if len(self) >= self._bounds.changes or self._size_bytes + size_bytes > self._bounds.size_bytes:
            return False
        self._held.append(Held(caller, number, arguments, size_bytes))
        self._size_bytes += size_bytes
        return True

    def drop(self, caller: C) -> None:
        """The caller is gone, and nobody waits for an answer."""
        self._held = deque(each for each in self._held if each.caller != caller)
        self._size_bytes = sum(each.size_bytes for each in self._held)

    def take(self) -> Iterator[Held[C]]:
        """They wait no more."""
        held, self._held, self._size_bytes = self._held, deque(), 0
        return iter(held)
