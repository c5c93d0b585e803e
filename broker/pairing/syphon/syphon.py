"""Moves the messages of all backlog queues in a secondary namespace to their destinations in the primary (PN9).

    syphon = Syphon(primary, secondary, await check(primary, secondary, None, options), options)
    await syphon.run()

It connects to the secondary again when that was lost, and several may run: each takes the leases that it can get.
"""

import asyncio
import random
from typing import Final

from broker.logging import get_logger
from broker.pairing.namespaces import Namespace
from broker.pairing.syphon.backlog_link import BacklogLink
from broker.pairing.syphon.budget import Limits
from broker.pairing.syphon.checks import Found
from broker.pairing.syphon.counters import Counters, QueueCounters
from broker.pairing.syphon.draining import Options
from broker.pairing.syphon.leases import Lease
from broker.pairing.syphon.options import SyphonOptions
from broker.pairing.syphon.primary import Primary
from broker.pairing.syphon.rate import Rate
from broker.pairing.syphon.tending import Tender
from protocol.client.connection import Connection, connect_to
from protocol.client.errors import ClientError

log = get_logger("syphon")

CONNECT_SECONDS: Final = 10.0
FIRST_RETRY_SECONDS: Final = 0.5
LONGEST_RETRY_SECONDS: Final = 30.0
STOP_SECONDS: Final = 8.0  # more than the queues take to leave everything in order
HELD_OF_A_RATE_SECONDS: Final = 10.0  # with a rate, no more is locked than what is sent in this time


class Syphon:
    """`away` says why there is no connection to the secondary; None while there is one."""

    def __init__(self, primary: Namespace, secondary: Namespace, found: Found, options: SyphonOptions) -> None:
        self._secondary = secondary
        self._found = found
        self._options = options
        self._taken: dict[str, dict[int, int]] = {queue: {} for queue in found.queues}
        self._empty: set[str] = set()  # with `once`: queues that were drained
        self._stopping = asyncio.Event()
        self._tenders: list[Tender] = []
        self.away: str | None = "it has not been connected to yet"
        self.counters = Counters(queues={queue: QueueCounters() for queue in found.queues})
        self._primary = Primary(primary.target, primary.trust, self.counters)

    @property
    def is_primary_up(self) -> bool:
        return self._primary.is_up

    def stop(self) -> None:
        """Let `run` end within seconds, with everything given back."""
        self._stopping.set()
        for tender in self._tenders:
            tender.stop()

    async def run(self) -> None:
        """Run until `stop`, or until all queues are empty with `once`."""
        keeping = asyncio.create_task(self._primary.run())
        try:
            await self._run()
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])

    async def _run(self) -> None:
        rate = Rate(self._options.rate, asyncio.get_running_loop().time())
        retry_s, told = FIRST_RETRY_SECONDS, ""
        while not self._stopping.is_set() and len(self._empty) < len(self._found.queues):
            began_s = asyncio.get_running_loop().time()
            try:
                connection = await connect_to(
                    self._secondary.target, tls=self._secondary.trust, timeout_s=CONNECT_SECONDS
                )
                log.info("secondary is there", host=self._secondary.target.host)
                self.away = None
                try:
                    await self._tend(connection, rate)
                finally:
                    await connection.close()
            except (ClientError, TimeoutError) as error:
                if asyncio.get_running_loop().time() - began_s > LONGEST_RETRY_SECONDS:
                    retry_s, told = FIRST_RETRY_SECONDS, ""
                if str(error) != told:
                    log.warning("secondary is away", reason=str(error))
                self.away = told = str(error)
                await self._pause(retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_SECONDS)

    async def _tend(self, connection: Connection, rate: Rate) -> None:
        """See to all queues. Raises the reason if the connection to the secondary is lost, or of no use."""
        queues = [queue for queue in self._found.queues if queue not in self._empty]
        random.shuffle(queues)  # syphons that begin together share the queues
        tenders = self._tenders = [self._tender(queue, connection, rate) for queue in queues]
        working = {asyncio.create_task(self._tend_one(*each)) for each in zip(queues, tenders, strict=True)}
        ends = asyncio.create_task(self._ended(connection))
        left = set(working)
        try:
            while left and not ends.done():
                done, _ = await asyncio.wait({*left, ends}, return_when=asyncio.FIRST_COMPLETED)
                left -= done
                for task in done:
                    task.result()
            if left:
                await asyncio.wait(left, timeout=STOP_SECONDS)
        finally:
            for task in (*working, ends):
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)

    async def _ended(self, connection: Connection) -> None:
        """Wait until somebody wants us to stop. Raises the reason if the connection is lost before."""
        lost = asyncio.create_task(connection.wait_closed())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({lost, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not self._stopping.is_set():
                raise lost.result()
        finally:
            lost.cancel()
            stopping.cancel()

    async def _tend_one(self, queue: str, tender: Tender) -> None:
        await tender.run()
        if self._options.once and not self._stopping.is_set():
            self._empty.add(queue)

    def _tender(self, queue: str, connection: Connection, rate: Rate) -> Tender:
        found, counters = self._found, self.counters
        session = queue.rpartition("/")[2]

        async def take_lease() -> Lease | None:
            return await Lease.take(connection, found.lease_queue, session, found.lease_s, counters)

        async def open_backlog() -> BacklogLink:
            return await BacklogLink.open(connection, queue)

        options = Options(self._limits, found.lock_s[queue], self._options.once)
        return Tender(queue, take_lease, open_backlog, self._primary, self._taken[queue], counters, rate, options)

    @property
    def _limits(self) -> Limits:
        rate = self._options.rate
        if rate is None:
            return Limits()
        messages = max(1, int(rate * HELD_OF_A_RATE_SECONDS / len(self._found.queues)))
        return Limits(messages=min(messages, Limits().messages), credit=min(messages, Limits().credit))

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass
