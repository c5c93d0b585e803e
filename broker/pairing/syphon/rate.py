"""A limit of messages per second, for all queues of a syphon together: a bucket that is told the time."""

from math import inf

BURST_S = 0.1  # what may be sent at once, of a second's share


class Rate:
    """`per_second` is None without a limit. Times are of one monotonic clock, in seconds."""

    def __init__(self, per_second: float | None, now_s: float) -> None:
        self._per_second = inf if per_second is None else per_second
        self._burst = max(1.0, self._per_second * BURST_S)
        self._tokens = self._burst
        self._at_s = now_s

    @property
    def per_second(self) -> float:
        return self._per_second

    def available(self, now_s: float) -> int:
        """Messages that may be sent now."""
        if self._per_second == inf:
            return 1 << 30
        self._tokens = min(self._burst, self._tokens + max(0.0, now_s - self._at_s) * self._per_second)
        self._at_s = now_s
        return int(self._tokens)

    def use(self, count: int) -> None:
        self._tokens -= count

    @property
    def wait_s(self) -> float:
        """The time until the next message may be sent."""
        return max(0.0, (1 - self._tokens) / self._per_second)
