"""The clock of a worker's partitions: it follows the wall clock, but never goes back, and never stands still for long.

Locks, times to live, transactions and waits are spans. They must end even if somebody sets the wall clock back.

| the wall clock          | this clock                                                                              |
|-------------------------|-----------------------------------------------------------------------------------------|
| goes on                 | shows the same time                                                                     |
| is set forward          | follows at once, also after the machine slept: spans that have ended by then are over   |
| is set back             | goes on with the monotonic clock, a little slower, until the wall clock has caught up    |

While this clock is ahead of the wall clock, spans are a little longer than they should be, never shorter. The wall
clock catches up an hour in `SLOWNESS` hours. `ahead_ms` converts times of this clock to the wall clock, which counts
for scheduled messages and for the ends of locks that clients are told.
"""

# One in so many milliseconds is left out to let the wall clock catch up: a lock of 30 s then lasts 33.3 s.
SLOWNESS = 10
# Both clocks are read in whole milliseconds, one after the other, perhaps with a pause between. A difference of up to
# this counts as none: this clock then waits for the wall clock instead of running ahead of it.
TOLERANCE_MS = 20


class Clock:
    """`now_ms` is the time as of the last reading, milliseconds since 1970."""

    __slots__ = ("_behind_ms", "_monotonic_ms", "ahead_ms", "now_ms")

    def __init__(self, wall_ms: int, monotonic_ms: int) -> None:
        self.now_ms = wall_ms
        self.ahead_ms = 0  # milliseconds ahead of the wall clock at the last reading
        self._monotonic_ms = monotonic_ms
        self._behind_ms = 0  # time that passed while this clock was ahead and does not make a whole step yet

    def read(self, wall_ms: int, monotonic_ms: int) -> int:
        """Take the time of both clocks and return `now_ms`. The monotonic clock has any origin and never goes back."""
        passed_ms = monotonic_ms - self._monotonic_ms
        self._monotonic_ms = monotonic_ms
        ahead_ms = self.now_ms + passed_ms - wall_ms
        if ahead_ms <= (0 if self.ahead_ms else TOLERANCE_MS):
            self._behind_ms = 0
            self.ahead_ms = 0
            if wall_ms > self.now_ms:
                self.now_ms = wall_ms
            return self.now_ms
        left_out_ms, self._behind_ms = divmod(self._behind_ms + passed_ms, SLOWNESS)
        left_out_ms = min(left_out_ms, ahead_ms)
        self.now_ms += passed_ms - left_out_ms
        self.ahead_ms = ahead_ms - left_out_ms
        return self.now_ms
