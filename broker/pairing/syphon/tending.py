"""Sees to one backlog queue for as long as a syphon runs: takes its lease when that is free, and drains it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from broker.logging import get_logger
from broker.pairing.syphon import draining
from broker.pairing.syphon.counters import Counters
from broker.pairing.syphon.draining import Drain, Options, Primary
from broker.pairing.syphon.leases import LeaseLost
from broker.pairing.syphon.rate import Rate
from protocol.client.errors import AuthenticationFailed, ConnectionLost, LinkDetached, RequestFailed

log = get_logger("syphon")

LEASE_SECONDS: Final = 10.0  # between two attempts to take a lease that another syphon has
FIRST_RETRY_SECONDS: Final = 1.0
LONGEST_RETRY_SECONDS: Final = 30.0


class Lease(draining.Lease, Protocol):
    async def give_back(self) -> None: ...


class Backlog(draining.Backlog, Protocol):
    async def close(self) -> None: ...


class Tender:
    """`take_lease` returns None if another syphon has the lease. `taken` is that of `broker.pairing.syphon.moving`.

    It lives on one connection to the secondary: what it raises ends that.
    """

    def __init__(
        self,
        path: str,
        take_lease: Callable[[], Awaitable[Lease | None]],
        open_backlog: Callable[[], Awaitable[Backlog]],
        primary: Primary,
        taken: dict[int, int],
        counters: Counters,
        rate: Rate,
        options: Options,
    ) -> None:
        self._path = path
        self._take_lease = take_lease
        self._open_backlog = open_backlog
        self._primary = primary
        self._taken = taken
        self._counters = counters
        self._rate = rate
        self._options = options
        self._drain: Drain | None = None
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Let `run` end soon, with everything given back."""
        self._stopping.set()
        if self._drain is not None:
            self._drain.stop()

    async def run(self) -> None:
        """Tend the queue until `stop`, or until it is empty with `once`. Raises ConnectionLost or TimeoutError."""
        retry_s, told = FIRST_RETRY_SECONDS, ""
        while not self._stopping.is_set():
            try:
                lease = await self._take_lease()
                if lease is None:
                    await self._pause(LEASE_SECONDS)
                    continue
                if await self._hold(lease):
                    return
                retry_s, told = FIRST_RETRY_SECONDS, ""
            except (AuthenticationFailed, LinkDetached, RequestFailed) as error:
                if str(error) != told:
                    log.warning("backlog queue cannot be drained", queue=self._path, reason=str(error))
                told = str(error)
                await self._pause(retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_SECONDS)

    async def _hold(self, lease: Lease) -> bool:
        """Drain the queue while we have the lease. True if the queue is empty, and that is what we wait for."""
        queue = self._counters.queues[self._path]
        queue.is_leased = True
        backlog: Backlog | None = None
        log.info("lease taken", queue=self._path)
        try:
            backlog = await self._open_backlog()
            self._drain = Drain(backlog, self._primary, lease, self._taken, self._counters, self._rate, self._options)
            if self._stopping.is_set():
                return False
            await self._drain.run()
            return self._options.once
        except LeaseLost:
            self._counters.leases_lost += 1
            log.warning("lease lost", queue=self._path)
            return False
        finally:
            self._drain = None
            queue.is_leased = False
            queue.deferred = 0
            if backlog is not None:
                await _quietly(backlog.close())
            await _quietly(lease.give_back())

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass


async def _quietly(closing: Awaitable[None]) -> None:
    try:
        await closing
    except (ConnectionLost, LinkDetached, TimeoutError) as error:
        log.debug("not given back", reason=str(error))
