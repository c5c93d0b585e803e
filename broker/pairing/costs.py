"""What a pairing costs in operations, as Service Bus bills them (PN11)."""

from dataclasses import dataclass
from typing import Final

POLL_SECONDS: Final = 15 * 60  # one receive of the syphon waits so long for a message (PN9)
# Of a message: send to the backlog, receive from it, send to the primary, receive there.
OPERATIONS_PER_MESSAGE: Final = 4


@dataclass(frozen=True, slots=True)
class Costs:
    """Operations. `polls` are receives of the syphon that found nothing."""

    pings: int
    polls: int
    messages: int

    @property
    def total(self) -> int:
        return self.pings + self.polls + self.messages


def polls(backlog_queues: int, seconds: float) -> int:
    """Receives of one syphon in a time without a failover: 40 an hour, 960 a day, 28,800 in 30 days for 10 queues."""
    return backlog_queues * int(seconds // POLL_SECONDS)


def outage(
    *,
    messages: int,
    outage_seconds: float,
    entities: int,
    clients: int,
    ping_interval_seconds: float,
    failover_interval_seconds: float,
) -> Costs:
    """What an outage adds in which `messages` went to the backlog.

    Each client pings each of the entities that it sends to once in a ping interval, from the failover on, and once more
    when the outage is over: that ping succeeds.
    """
    failed_over_seconds = outage_seconds - failover_interval_seconds
    pings = (
        entities * clients * (int(failed_over_seconds // ping_interval_seconds) + 1) if failed_over_seconds >= 0 else 0
    )
    return Costs(pings, 0, OPERATIONS_PER_MESSAGE * messages)
