"""Drains one backlog queue of a pairing, as a task of Spark: what the syphon does, until the queue is empty.

Under the queue's lease, messages are sent to their entities in the primary, in order within a session, and completed
when the primary has accepted them. Their ids are those that they had; one without an id gets its place in the backlog.
So whatever a killed task has sent and not completed, duplicate detection drops when it comes again.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from broker.logging import configure_logging, get_logger
from broker.pairing.syphon.backlog_link import BacklogLink
from broker.pairing.syphon.budget import Limits
from broker.pairing.syphon.checks import Found
from broker.pairing.syphon.counters import Counters, QueueCounters
from broker.pairing.syphon.draining import Drain, Options
from broker.pairing.syphon.leases import Lease, LeaseLost
from broker.pairing.syphon.primary import Primary
from broker.pairing.syphon.rate import Rate
from broker.settings.log import Log
from protocol import conditions
from protocol.client.connection import Connection, connect_to
from protocol.client.errors import ClientError
from pyspark_peeklock.options import Access
from storage.wording import counted

log = get_logger("drain")

CONNECT_S: Final = 10.0
RETRY_S: Final = 1.0
LEASE_S: Final = 2.0  # between two attempts to take a lease that somebody else has
TELL_S: Final = 10.0
_FINAL: Final = frozenset({conditions.NOT_FOUND, conditions.UNAUTHORIZED_ACCESS})


@dataclass(frozen=True, slots=True)
class Plan:
    """`rate` are messages per second of one queue. `patience_s`: how long nothing may move before a task gives up."""

    primary: Access
    secondary: Access
    found: Found
    rate: float | None
    lease_wait_s: float
    patience_s: float


class End(StrEnum):
    DRAINED = "drained"
    LEASED = "another syphon has its lease"
    LEASE_LOST = "its lease was lost"
    STUCK = "nothing moved any more"
    REFUSED = "the secondary refuses it"


@dataclass(frozen=True, slots=True)
class Drained:
    """What a task has done. `moved` messages have left the backlog; `dead_lettered` by reason."""

    queue: str
    end: End
    moved: int
    dead_lettered: dict[str, int]
    left: int | None
    seconds: float
    text: str


def drain(queue: str, plan: Plan) -> Drained:
    """Drain the queue. What goes wrong is said in the result; only options that make no sense are raised."""
    configure_logging(Log(), sys.stderr)
    return asyncio.run(_Draining(queue, plan).run())


class _Draining:
    def __init__(self, queue: str, plan: Plan) -> None:
        self._queue = queue
        self._plan = plan
        self._counters = Counters(queues={queue: QueueCounters()})
        self._taken: dict[int, int] = {}
        self._primary = Primary(plan.primary.connection_string(), plan.primary.trust(), self._counters)
        self._moved_at_s = time.monotonic()
        self._work: Drain | None = None
        self._text = ""

    async def run(self) -> Drained:
        began_s = time.monotonic()
        keeping = asyncio.create_task(self._primary.run())
        watching = asyncio.create_task(self._watch())
        try:
            end = await self._run()
        finally:
            for task in (keeping, watching):
                task.cancel()
            await asyncio.wait([keeping, watching])
        dead, left = dict(self._counters.dead_lettered), 0 if end is End.DRAINED else self._state.backlog
        seconds = time.monotonic() - began_s
        return Drained(self._queue, end, self._counters.completed, dead, left, seconds, self._text)

    @property
    def _state(self) -> QueueCounters:
        return self._counters.queues[self._queue]

    @property
    def _is_stuck(self) -> bool:
        return time.monotonic() - self._moved_at_s >= self._plan.patience_s

    async def _run(self) -> End:
        """Over one connection to the secondary after the other."""
        secondary = self._plan.secondary
        while True:
            try:
                target = secondary.connection_string()
                trust = secondary.trust() if target.tls else None
                async with await connect_to(target, tls=trust, timeout_s=CONNECT_S) as connection:
                    try:
                        return await self._drain(connection)
                    except LeaseLost:
                        if not connection.closed:
                            return End.LEASE_LOST
                        raise await connection.wait_closed() from None  # the lease ended with it
            except (ClientError, TimeoutError) as error:
                self._text = str(error)
                if getattr(error, "condition", "") in _FINAL:
                    return End.REFUSED
                log.warning("the secondary is away", queue=self._queue, reason=str(error))
                if self._is_stuck:
                    return End.STUCK
                await asyncio.sleep(RETRY_S)

    async def _drain(self, connection: Connection) -> End:
        lease = await self._lease(connection)
        if lease is None:
            return End.LEASED
        log.info("lease taken", queue=self._queue)
        backlog: BacklogLink | None = None
        try:
            backlog = await BacklogLink.open(connection, self._queue)
            rate = Rate(self._plan.rate, asyncio.get_running_loop().time())
            options = Options(Limits(), self._plan.found.lock_s[self._queue], once=True)
            self._work = Drain(backlog, self._primary, lease, self._taken, self._counters, rate, options)
            await self._work.run()
            if not self._is_stuck:
                return End.DRAINED
            count = self._state.deferred
            waiting = counted(count, "message waits", "messages wait")
            deferred = f"{waiting} for destinations that take none now"
            self._text = deferred if self._primary.is_up else "the primary is away"
            return End.STUCK
        finally:
            self._work = None
            if backlog is not None:
                await _quietly(backlog.close())
            await _quietly(lease.give_back())

    async def _lease(self, connection: Connection) -> Lease | None:
        found = self._plan.found
        ends_s = time.monotonic() + self._plan.lease_wait_s
        while True:
            session = self._queue.rpartition("/")[2]
            lease = await Lease.take(connection, found.lease_queue, session, found.lease_s, self._counters)
            if lease is not None or time.monotonic() >= ends_s:
                return lease
            await asyncio.sleep(LEASE_S)

    async def _watch(self) -> None:
        """Note when messages move, log it now and then, and stop the draining when they do not any more."""
        told, told_at_s, before = 0, time.monotonic(), 0
        while True:
            await asyncio.sleep(RETRY_S)
            moved, now_s = self._counters.completed, time.monotonic()
            done = moved + self._counters.dead_lettered.total()
            if done > before:
                before, self._moved_at_s = done, now_s
            if self._is_stuck and self._work is not None:
                self._work.stop()
            if moved > told and now_s - told_at_s >= TELL_S:
                per_second = round((moved - told) / (now_s - told_at_s))
                log.info("messages moved", queue=self._queue, count=moved, per_second=per_second)
                told, told_at_s = moved, now_s


async def _quietly(closing: Awaitable[None]) -> None:
    with suppress(ClientError, TimeoutError):
        await closing
