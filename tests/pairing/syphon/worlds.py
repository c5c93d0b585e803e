"""Syphons between two namespaces in memory (`simulation`): started, ended, cut off, and what they have moved."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

from broker.pairing.syphon.budget import Limits
from broker.pairing.syphon.counters import Counters, QueueCounters
from broker.pairing.syphon.draining import Options
from broker.pairing.syphon.rate import Rate
from broker.pairing.syphon.tending import Tender
from protocol.client.errors import ClientError
from protocol.client.messages import Message
from tests.pairing.syphon.simulation import (
    QUEUE,
    Entity,
    MemoryBacklog,
    MemoryLease,
    MemoryPrimary,
    MemoryQueue,
    Wire,
    now_s,
)

LEASE_S = 60.0


NO_LIMITS = Limits()


class World:
    def __init__(self, seed: int = 0, **entities: Entity) -> None:
        self.chance = Random(seed)
        self.queue = MemoryQueue(self.chance)
        self.primary = MemoryPrimary(self.chance, **(entities or {"orders": Entity()}))
        self.sent: list[tuple[str, str | None, bytes]] = []

    def put(self, path: str, body: bytes | None = None, **values: Any) -> int:
        """A message for this entity of the primary, in the backlog."""
        body = b"%d" % len(self.sent) if body is None else body
        self.sent.append((path, values.get("group_id"), body))
        return self.queue.put(Message.of(body, **values).encode(), path)

    def bodies(self, path: str) -> list[bytes]:
        return [body for _, _, body in self.primary.entities[path].messages]

    @property
    def reasons(self) -> list[str]:
        return [reason for _, reason in self.queue.dead]


class Syphon:
    """One process. It takes the lease when it can, and connects again when it lost the secondary."""

    def __init__(self, world: World, limits: Limits = NO_LIMITS, rate: float | None = None, once: bool = False) -> None:
        self.world = world
        self.counters = Counters(queues={QUEUE: QueueCounters()})
        self.rate = Rate(rate, now_s())
        self.options = Options(limits, world.queue.lock_s, once)
        self.taken: dict[int, int] = {}
        self.wire = Wire(world.chance)
        self.backlogs: list[MemoryBacklog] = []
        self.tender: Tender | None = None
        self.is_stopping = False
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self.is_stopping:
            self.tender = Tender(
                QUEUE,
                self._lease,
                self._backlog,
                self.world.primary,
                self.taken,
                self.counters,
                self.rate,
                self.options,
            )
            try:
                await self.tender.run()
                return
            except (ClientError, TimeoutError):
                await asyncio.sleep(1)
                self.wire.cut()
                self.wire = Wire(self.world.chance)

    async def _lease(self) -> MemoryLease | None:
        queue = self.world.queue
        await self.wire.trip()
        if queue.holder is not None and queue.holder.is_held:
            return None
        return MemoryLease(queue, self.wire, LEASE_S)

    async def _backlog(self) -> MemoryBacklog:
        await self.wire.trip()
        self.backlogs.append(MemoryBacklog(self.world.queue, self.wire))
        return self.backlogs[-1]

    async def stop(self) -> None:
        """As at SIGTERM."""
        self.is_stopping = True
        if self.tender is not None:
            self.tender.stop()
        await self.task

    async def kill(self) -> None:
        """As by SIGKILL. What it has sent arrives."""
        self.wire.cut()
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task

    @property
    def most_held(self) -> int:
        return max((each.most_held for each in self.backlogs), default=0)


async def until(is_so: Callable[[], Any], seconds: float = 3600.0) -> None:
    """Let the time pass until it is so."""
    ends_s = now_s() + seconds
    while not is_so():
        assert now_s() < ends_s, "it did not happen"
        await asyncio.sleep(0.05)
