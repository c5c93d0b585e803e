"""How long a process polls for what comes next before it sleeps.

A process that sleeps wakes up late: a processor that halts, above all that of a virtual machine, needs tens of
microseconds to come back, and then its caches are cold. A lone message passes several processes, and their waking took
more than a third of the time until its answer. So a process that was woken soon the last times polls for a while before
it sleeps, as kernels do before they halt a processor (Linux's haltpoll). One that would have to poll for long sleeps at
once.

Pure: times are in seconds.
"""

FIRST_SECONDS = 25e-6


class IdlePolling:
    """`window` is the time for which to poll now; 0 if not at all."""

    __slots__ = ("_most", "window")

    def __init__(self, most_seconds: float) -> None:
        self._most = most_seconds
        self.window = 0.0

    def waited(self, seconds: float) -> None:
        """Something has come after this time, in which the process polled or slept."""
        if seconds <= self._most:
            self.window = min(self._most, max(FIRST_SECONDS, 2 * self.window))
        else:
            self.window = self.window / 2 if self.window >= 2 * FIRST_SECONDS else 0.0
