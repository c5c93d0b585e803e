"""What a syphon has done since it began, and what it knows of the backlog."""

from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class QueueCounters:
    """The counters of one backlog queue. `backlog` is how many messages lay there at the last look; None if unknown.

    `deferred` is how many of them wait for their destinations, as far as this syphon knows.
    """

    is_leased: bool = False
    backlog: int | None = None
    deferred: int = 0


@dataclass(slots=True)
class Counters:
    """`moved` and `moved_bytes` are messages that the primary has taken, `completed` those that have left the backlog.

    `deferrals` counts messages that were set aside, `polls` receives that found nothing, `probes` attempts to reach the
    primary, `losses` how often it went away.
    """

    moved: int = 0
    moved_bytes: int = 0
    completed: int = 0
    deferrals: int = 0
    released: int = 0
    polls: int = 0
    lease_renewals: int = 0
    leases_lost: int = 0
    probes: int = 0
    losses: int = 0
    dead_lettered: Counter[str] = field(default_factory=Counter)
    queues: dict[str, QueueCounters] = field(default_factory=dict)

    @property
    def backlog(self) -> int | None:
        """Return the sum of all queues; None if one of them is not known."""
        counts = [each.backlog for each in self.queues.values()]
        return None if None in counts else sum(filter(None, counts))

    def snapshot(self) -> dict[str, Any]:
        """All of it as plain values that msgpack can carry."""
        # asdict would count the items of a Counter.
        return {
            **{each.name: getattr(self, each.name) for each in fields(self)},
            "dead_lettered": dict(self.dead_lettered),
            "queues": {path: asdict(queue) for path, queue in self.queues.items()},
        }
