"""Timers: the next times when something is due on each queue.

A thing is (queue id, kind). It has at most one timer, the earliest that was armed. A timer that fires too early is
harmless, so a timer that is not needed any more stays. The code that a timer calls checks what is really due and arms
the next timer.
"""

from enum import IntEnum
from heapq import heapify, heappop, heappush


class Due(IntEnum):
    """The kinds of timers of a queue. The first two are `storage.records.Timer`, which are on disk."""

    SCHEDULED = 0
    EXPIRY = 1
    LOCKS = 2
    DELETION = 3
    FORWARDING = 4
    DUPLICATES = 5
    SESSION_WAITS = 6
    TRANSACTIONS = 7  # for the partition; its queue id is 0
    IDLE = 8
    PUBLISHING = 9  # messages that wait at a topic


Thing = tuple[int, int]


class Timers:
    def __init__(self) -> None:
        self.heap: list[tuple[int, Thing]] = []  # always the same list; empty if no timer is armed
        self._armed: dict[Thing, int] = {}

    def arm(self, time_ms: int, thing: Thing) -> None:
        """Make `thing` due at `time_ms`, unless it is due earlier."""
        armed_ms = self._armed.get(thing)
        if armed_ms is not None and armed_ms <= time_ms:
            return
        self._armed[thing] = time_ms
        heappush(self.heap, (time_ms, thing))
        # Arming a thing earlier again leaves a stale item behind. Stale items must not outnumber the others.
        if len(self.heap) > 2 * len(self._armed) + 64:
            self.heap[:] = [(time_ms, thing) for thing, time_ms in self._armed.items()]
            heapify(self.heap)

    def is_armed(self, thing: Thing) -> bool:
        return thing in self._armed

    def take_due(self, now_ms: int, count: int) -> list[tuple[int, Thing]]:
        """Up to `count` things due at or before `now_ms`, each once and with its time, the earliest first.

        They are no longer armed.
        """
        due: list[tuple[int, Thing]] = []
        while self.heap and self.heap[0][0] <= now_ms and len(due) < count:
            time_ms, thing = heappop(self.heap)
            if self._armed.get(thing) == time_ms:
                del self._armed[thing]
                due.append((time_ms, thing))
        return due

    def next_ms(self) -> int | None:
        while self.heap:
            time_ms, thing = self.heap[0]
            if self._armed.get(thing) == time_ms:
                return time_ms
            heappop(self.heap)
        return None
