"""Whether a gateway reads from a client: only as fast as the broker can do what the client asks for.

Credit alone does not bound what is in flight: some clients send without credit (amqp.md 4.1), and the credit of many
links is more than a partition can take at once. When a worker does not keep up, the clients that have just sent it
something wait.
"""

import asyncio
from collections.abc import Set as AbstractSet

from broker.gateway.host import Overrunning
from broker.gateway.router import WorkerConnection


class Reading:
    """The reasons not to read from one client. It is read from while there are none.

    `overrun`: links that may have more than their credit. `workers`: those that must catch up before. `is_behind`:
    there is more to do with what was read. `rests`: much was read, so others are served before. Another reason, that
    the client does not read, is known to its connection.
    """

    __slots__ = ("is_behind", "is_paused", "overrun", "rests", "workers")

    def __init__(self) -> None:
        self.overrun: set[Overrunning] = set()
        self.workers: set[WorkerConnection] = set()
        self.is_behind = False
        self.rests = False
        self.is_paused = False  # the transport was told not to read

    def regulate(
        self, transport: asyncio.ReadTransport, is_stalled: bool, workers_behind: AbstractSet[WorkerConnection]
    ) -> None:
        """Pause or resume the transport, by the reasons that there are now. `is_stalled`: the client does not read."""
        if self.overrun:
            self.overrun.difference_update([link for link in self.overrun if not link.is_overrun])
        if self.workers:
            self.workers &= workers_behind
        pauses = bool(is_stalled or self.overrun or self.workers or self.is_behind or self.rests)
        if pauses is self.is_paused:
            return
        self.is_paused = pauses
        if pauses:
            transport.pause_reading()
        else:
            transport.resume_reading()
