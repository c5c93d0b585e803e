"""What a pairing costs in operations, as Service Bus bills them (PN11)."""

from dataclasses import dataclass
from typing import Final

POLL_SECONDS: Final = 15 * 60  # one receive of the syphon waits so long for a message (PN9)
# Of a message: send to the backlog, receive from it, send to the primary, receive there.
OPERATIONS_PER_MESSAGE: Final = 4


@dataclass(frozen=True, slots=True)
class OutageCosts:
    """Operations that an outage adds."""

    pings: int
    messages: int

    @property
    def total(self) -> int:
        return self.pings + self.messages


def polls(backlog_queues: int, seconds: float) -> int:
    """Receives of one syphon in a time without a failover: 40 an hour, 960 a day, 28,800 in 30 days for 10 queues."""
    return backlog_queues * int(seconds // POLL_SECONDS)


def outage(
    *,
    messages: int,
    outage_ms: int,
    entities: int,
    clients: int,
    ping_interval_ms: int,
    failover_interval_ms: int,
) -> OutageCosts:
    """Return the costs that are added by an outage during which `messages` were sent.

    Each client pings each of the entities that it sends to once in a ping interval, from the failover on, and once more
    when the outage is over: that ping succeeds. An outage shorter than the failover interval adds nothing.
    """
    failed_over_ms = outage_ms - failover_interval_ms
    if failed_over_ms < 0:
        return OutageCosts(0, 0)
    pings = entities * clients * (failed_over_ms // ping_interval_ms + 1)
    return OutageCosts(pings, OPERATIONS_PER_MESSAGE * messages)
