"""When the deferred messages of a queue expire, as far as that is known: the earliest times, in bounded memory.

Deferred messages have no timers in the store. So somebody looks through them all and notes their times here; only the
earliest CAPACITY are kept. When these are used up, the next look begins at the earliest time that was dropped.
"""

from collections.abc import Container
from heapq import heappop, heappush

from storage.records import NEVER

CAPACITY = 16_384  # times of one queue: some 2 MiB


class Deferrals:
    """Invariant: after a look, each deferred message whose time comes before `beyond_ms` is in `_times` or `locked`."""

    def __init__(self) -> None:
        self.cursor: int | None = 0  # the number from which the look goes on; None if all messages were looked at
        self.locked: dict[int, int] = {}  # locked ones whose time had come when they were looked at: number -> time
        self._times: list[tuple[int, int]] = []  # a heap of (time, number), also of messages that are gone
        self._beyond_ms = NEVER

    def note(self, time_ms: int, number: int) -> None:
        if time_ms >= self._beyond_ms:
            return
        heappush(self._times, (time_ms, number))
        if len(self._times) > CAPACITY:
            self._times.sort()  # which is a heap, too
            dropped = self._times[CAPACITY // 2 :]  # half of them, so that this is rare
            del self._times[CAPACITY // 2 :]
            self._beyond_ms, _ = dropped[0]

    def take_due(self, now_ms: int, count: int) -> list[tuple[int, int]]:
        """Up to `count` times that have come, with the numbers; they are forgotten."""
        taken: list[tuple[int, int]] = []
        while self._times and self._times[0][0] <= now_ms and len(taken) < count:
            taken.append(heappop(self._times))
        if not self._times and self.cursor is None and self._beyond_ms <= now_ms < NEVER:
            self.look_again()
        return taken

    def next_ms(self) -> int:
        """When there is something to do; NEVER if all is known and nothing expires."""
        if self.cursor is not None:
            return 0
        return self._times[0][0] if self._times else self._beyond_ms

    def look_again(self) -> None:
        """All messages are to be looked at from the first on."""
        self.cursor = 0
        self._times.clear()
        self._beyond_ms = NEVER

    def unlock(self, number: int) -> bool:
        """The lock of this deferred message has ended, and it is still deferred. True if its time had come."""
        time_ms = self.locked.pop(number, None)
        if time_ms is None:
            return False
        heappush(self._times, (time_ms, number))
        return True

    def keep_locked(self, numbers: Container[int]) -> None:
        """Only these are locked any more."""
        for number in [each for each in self.locked if each not in numbers]:
            del self.locked[number]
