"""Keeps long work for management from holding up messages: it is done in parts, and rests between them."""

import asyncio
import time
from collections.abc import Callable

# Work before other connections are served.
PART_SECONDS = 0.001
# While messages go through, the part of the gateway's time that long work may take.
SHARE = 0.015
# Bytes of messages in a second from which on they count as traffic.
BUSY_BYTES = 100_000


class Pace:
    """All long work of one gateway shares its part of the time."""

    def __init__(self, traffic_bytes: Callable[[], int]) -> None:
        """`traffic_bytes`: the bytes of AMQP read and written so far."""
        self._traffic_bytes = traffic_bytes
        self._turn = asyncio.Lock()
        self._seen_bytes, self._seen_at = traffic_bytes(), time.monotonic()
        self._is_busy = False

    async def rest(self, worked_seconds: float) -> None:
        """Let others go first: after a part of the work, which took so long, before the next."""
        async with self._turn:
            self._look()
            await asyncio.sleep(worked_seconds * (1 / SHARE - 1) if self._is_busy else 0)

    def _look(self) -> None:
        now, seen = time.monotonic(), self._traffic_bytes()
        passed = now - self._seen_at
        if passed >= 0.02:  # else there is too little to see
            self._is_busy = (seen - self._seen_bytes) / passed >= BUSY_BYTES
            self._seen_bytes, self._seen_at = seen, now


class Parts:
    """Long work that is being done: call `pause` between any two steps of it."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._began = time.perf_counter()

    async def pause(self, *, is_end: bool = False) -> None:
        worked = time.perf_counter() - self._began
        if worked >= PART_SECONDS or is_end:
            await self._pace.rest(worked)
            self._began = time.perf_counter()
