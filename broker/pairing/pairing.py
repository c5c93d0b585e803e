"""Two namespaces paired: what is sent reaches the primary, or a backlog queue in the secondary while that is away.

    async with await Pairing.open(primary, secondary) as pairing:
        sender = pairing.sender("orders")
        await sender.send(Message.of(b"hello", message_id="1").encode())

Messages in the backlog reach the primary by a syphon. It runs elsewhere, or here with the option `runs_syphon`.
"""

import asyncio
import random
from typing import Self

from broker.logging import get_logger
from broker.pairing.availability import Availability
from broker.pairing.backlog import Rotation, backlog_queues
from broker.pairing.counters import Counters
from broker.pairing.endpoint import Endpoint
from broker.pairing.health import State
from broker.pairing.namespaces import PRIMARY_SECONDS, Namespace, name_of
from broker.pairing.options import PairingOptions
from broker.pairing.pings import ping
from broker.pairing.provisioning import check_they_differ, create_missing
from broker.pairing.sending import PairedSender, Parts
from broker.pairing.syphon.beside import Beside
from broker.pairing.syphon.options import SyphonOptions
from broker.pairing.syphon.service import Service

__all__ = ["Namespace", "Pairing"]

log = get_logger("pairing")

CLOSE_SECONDS = 5.0  # the other side of a pairing must be closed within this time (PN10)


class Pairing:
    """A pairing of two namespaces, with its senders; made by `open`. `name` is the primary's in paths of queues.

    `syphon` is that of this process, None if it runs none.
    """

    def __init__(self, primary: Namespace, secondary: Namespace, name: str, options: PairingOptions) -> None:
        self.options = options
        self.primary = primary.endpoint("primary")
        self.secondary = secondary.endpoint("secondary")
        self.queues = backlog_queues(name, options.backlog_queue_count)
        self.counters = Counters()
        self.availability = Availability(options, self._ping, self.counters)
        self.rotation = Rotation(self.queues, options.ping_interval_ms, random.choice)
        ends = (self.primary, self.secondary)
        self._parts = Parts(*ends, self.availability, self.rotation, options, self.counters)
        self._watching = [asyncio.create_task(self._watch(*each)) for each in (ends, ends[::-1])]
        self.syphon: Beside | None = None
        if options.runs_syphon:
            of_syphon = SyphonOptions(options.backlog_queue_count)
            self.syphon = Beside(lambda: Service(primary, secondary, name, of_syphon))
        self._draining: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        primary: Namespace,
        secondary: Namespace,
        options: PairingOptions | None = None,
        *,
        primary_name: str | None = None,
    ) -> Self:
        """Pair them, and create the backlog queues that are missing, which needs Manage on the secondary.

        The primary may be away. `primary_name` is for the paths of the queues; by default the first part of its host.
        The syphon begins, if this process runs one. Raises InvalidPairing.
        """
        options = options or PairingOptions()
        name = name_of(primary, secondary, primary_name)
        async with primary.management(PRIMARY_SECONDS) as one, secondary.management() as other:
            await create_missing(other, name, options.backlog_queue_count)
            await check_they_differ(one, other)
        pairing = cls(primary, secondary, name, options)
        pairing.begin_syphon()
        return pairing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def sender(self, path: str) -> PairedSender:
        """A sender to a queue or topic of the primary, which chooses a backlog queue of its own."""
        return PairedSender(self.availability.path(path), self._parts)

    def health(self, path: str) -> State:
        """How the sends to an entity fare."""
        return self.availability.path(path).health.state

    def mark_path_healthy(self, path: str) -> None:
        """End the failover of an entity by hand: the next send goes to the primary."""
        self.availability.mark_healthy(path)

    def begin_syphon(self) -> None:
        """Bring the backlog to the primary from now on, if this process runs a syphon (PN2)."""
        if self.syphon is not None:
            self._draining = asyncio.create_task(self.syphon.run())

    async def close(self) -> None:
        """Clear the pairing: no pings, no failovers, no syphon, and both connections closed."""
        for task in self._watching:
            task.cancel()
        self.availability.close()
        await asyncio.gather(self.primary.close(), self.secondary.close(), self._end_syphon())

    async def _end_syphon(self) -> None:
        """Let it give back what it has, which takes seconds at most."""
        if self.syphon is None or self._draining is None:
            return
        self.syphon.stop()
        try:
            await asyncio.wait([self._draining])
        finally:
            self._draining.cancel()

    async def _ping(self, path: str) -> None:
        """Send a ping on a new connection, which all use if it succeeds (PN8)."""
        async with asyncio.timeout(self.options.attempt_timeout_ms / 1000):
            connection = await self.primary.connect()
            try:
                await ping(connection, path)
            except BaseException:
                connection.abort()
                raise
        self.primary.adopt(connection)

    async def _watch(self, ended: Endpoint, other: Endpoint) -> None:
        """When one side is closed or faults, the other must be closed soon; else it faults, too (PN10).

        The pairing is over then, and so is its syphon.
        """
        await ended.closed.wait()
        if self.syphon is not None:
            self.syphon.stop()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await other.closed.wait()
        except TimeoutError:
            text = f"the {ended.name} of the pairing has ended, and the {other.name} was not closed within 5 seconds"
            log.error("pairing faulted", reason=text)
            other.fault(text)
