"""Whether the primary takes the sends of one entity: a state machine that is told outcomes of sends, and the time.

| state       | sends go to | a send or ping succeeds | a send fails | the failover interval is over | marked healthy |
|-------------|-------------|-------------------------|--------------|-------------------------------|----------------|
| healthy     | the primary | healthy                 | suspect      |                               | healthy        |
| suspect     | the primary | healthy                 | suspect      | failed over                   | healthy        |
| failed over | the backlog | healthy                 | failed over  |                               | healthy        |

The failover interval begins with the failure that made the entity suspect (PN4). An entity that has failed over is
pinged once in each ping interval (PN8). Which failures count is in `broker.pairing.failures`.
"""

from enum import StrEnum, auto
from typing import Final


class State(StrEnum):
    HEALTHY = auto()
    SUSPECT = auto()
    FAILED_OVER = auto()


class Event(StrEnum):
    SUCCEEDED = auto()
    FAILED = auto()
    INTERVAL_OVER = auto()
    MARKED_HEALTHY = auto()


_HEALTHY, _SUSPECT, _FAILED_OVER = State.HEALTHY, State.SUSPECT, State.FAILED_OVER

NEXT: Final[dict[State, dict[Event, State]]] = {
    _HEALTHY: {Event.SUCCEEDED: _HEALTHY, Event.FAILED: _SUSPECT, Event.MARKED_HEALTHY: _HEALTHY},
    _SUSPECT: {
        Event.SUCCEEDED: _HEALTHY,
        Event.FAILED: _SUSPECT,
        Event.INTERVAL_OVER: _FAILED_OVER,
        Event.MARKED_HEALTHY: _HEALTHY,
    },
    _FAILED_OVER: {Event.SUCCEEDED: _HEALTHY, Event.FAILED: _FAILED_OVER, Event.MARKED_HEALTHY: _HEALTHY},
}


class PathHealth:
    """The health of one entity. Times are milliseconds of one monotonic clock.

    `since_ms` is when the present state began, `deadline_ms` when `tick` must be called next; None is never.
    """

    __slots__ = ("_failover_interval_ms", "_healthy_ms", "_ping_interval_ms", "deadline_ms", "since_ms", "state")

    def __init__(self, failover_interval_ms: int, ping_interval_ms: int, now_ms: int) -> None:
        self._failover_interval_ms = failover_interval_ms
        self._ping_interval_ms = ping_interval_ms
        self.state = State.HEALTHY
        self.since_ms = now_ms
        self.deadline_ms: int | None = None
        self._healthy_ms = now_ms  # when we heard last that the primary takes sends

    @property
    def has_failed_over(self) -> bool:
        return self.state is State.FAILED_OVER

    def succeeded(self, now_ms: int) -> None:
        """The primary took a message, or a ping: sends go there from now on."""
        self._healthy_ms = now_ms
        self._step(Event.SUCCEEDED, now_ms)

    def mark_healthy(self, now_ms: int) -> None:
        """Somebody says that the primary takes sends again."""
        self._healthy_ms = now_ms
        self._step(Event.MARKED_HEALTHY, now_ms)

    def failed(self, began_ms: int, now_ms: int) -> None:
        """A send or ping that began at `began_ms` has failed.

        It says nothing if the primary took another one since then.
        """
        if began_ms >= self._healthy_ms:
            self._step(Event.FAILED, now_ms)
            if self._failover_interval_ms <= 0:
                self.tick(now_ms)

    def tick(self, now_ms: int) -> bool:
        """Let the time pass; True if a ping is due, which counts as begun."""
        if self.deadline_ms is None or now_ms < self.deadline_ms:
            return False
        if self.state is State.SUSPECT:
            self._step(Event.INTERVAL_OVER, now_ms)
            return False
        self.deadline_ms = now_ms + self._ping_interval_ms
        return True

    def _step(self, event: Event, now_ms: int) -> None:
        state = NEXT[self.state][event]
        if state is self.state:
            return
        self.state, self.since_ms = state, now_ms
        if state is State.SUSPECT:
            self.deadline_ms = now_ms + self._failover_interval_ms
        elif state is State.FAILED_OVER:
            self.deadline_ms = now_ms + self._ping_interval_ms
        else:
            self.deadline_ms = None
