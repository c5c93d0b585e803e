"""The lease of a backlog queue: a session lock in the secondary, so that two syphons never drain one queue.

The lease is ours until the lock ends, counted from before it was taken or renewed, on our own clock. A paused syphon
notices so that it has no lease any more, before it sends anything. The state of the session says what the next holder
must know: whether the one before has left messages locked, and between which sequence numbers some may be deferred.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Final, NamedTuple

from broker.logging import get_logger
from broker.pairing.syphon.counters import Counters
from protocol import conditions
from protocol.client.connection import Connection
from protocol.client.errors import ClientError, LinkDetached
from protocol.client.links import Receiver
from protocol.client.requests import Management

log = get_logger("syphon")

RENEW_AT: Final = 0.5  # of the time that the lock lasts
LOST_AT: Final = 0.9
RETRY_SECONDS: Final = 1.0


class LeaseLost(Exception):
    """Somebody else may drain the queue now."""


class Deferred(NamedTuple):
    """All deferred messages of the queue have sequence numbers from `low` to `high`."""

    low: int
    high: int


class Lease:
    """The lease of one backlog queue, made by `take`."""

    def __init__(
        self,
        receiver: Receiver,
        management: Management,
        session: str,
        seconds: float,
        since_s: float,
        counters: Counters,
    ) -> None:
        self._receiver = receiver
        self._management = management
        self._session = session
        self._seconds = seconds
        self._since_s = since_s
        self._changed: Callable[[], None] = lambda: None
        self._is_given_back = False
        self.deferred: Deferred | None = None
        self.was_given_back = True
        self.may_be_given_back = True
        self._counters = counters
        receiver.watch(lambda: self._changed())
        self._renewing: asyncio.Task[None] | None = asyncio.create_task(self._renew())

    @classmethod
    async def take(
        cls, connection: Connection, queue: str, session: str, seconds: float, counters: Counters
    ) -> "Lease | None":
        """The lease, or None if another syphon has it. `seconds`: how long a lock of `queue` lasts.

        Raises what `Connection.accept_session` raises.
        """
        since_s = asyncio.get_running_loop().time()
        try:
            receiver = await connection.accept_session(queue, session)
        except LinkDetached as error:
            if error.condition == conditions.SESSION_CANNOT_BE_LOCKED:
                return None
            raise
        management = await connection.management(queue)
        lease = cls(receiver, management, session, seconds, since_s, counters)
        try:
            lease.was_given_back, lease.deferred = _read(await management.session_state(session))
            await lease.note(lease.deferred)
        except BaseException:
            await lease.give_back()
            raise
        return lease

    def watch(self, changed: Callable[[], None]) -> None:
        """Have this called when the lease may be lost."""
        self._changed = changed

    @property
    def is_lost(self) -> bool:
        return self._is_given_back or self._receiver.closed or self._age_s >= LOST_AT * self._seconds

    async def note(self, deferred: Deferred | None) -> None:
        """Keep this for the next holder. Raises LeaseLost, RequestFailed, TimeoutError, ..."""
        if self.is_lost:
            raise LeaseLost
        await self._management.set_session_state(self._session, _written(False, deferred))
        self.deferred = deferred

    async def give_back(self) -> None:
        """End the lease; another syphon can have it at once."""
        is_lost, self._is_given_back = self.is_lost, True
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None  # a cancelled task keeps its call, which refers to the lease
        try:
            if self.may_be_given_back and not is_lost:
                await self._management.set_session_state(self._session, _written(True, self.deferred))
            await self._receiver.close()
        except (ClientError, TimeoutError) as error:
            log.debug("lease not given back", session=self._session, error=str(error))

    @property
    def _age_s(self) -> float:
        return asyncio.get_running_loop().time() - self._since_s

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(max(RENEW_AT * self._seconds - self._age_s, RETRY_SECONDS))
            began_s = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(max(LOST_AT * self._seconds - self._age_s, RETRY_SECONDS)):
                    await self._management.renew_session_lock(self._session)
            except (ClientError, TimeoutError) as error:
                log.warning("lease not renewed", session=self._session, error=str(error))
                if self.is_lost:
                    self._changed()
                    return
            else:
                self._since_s = began_s
                self._counters.lease_renewals += 1


def _read(state: bytes | None) -> tuple[bool, Deferred | None]:
    """Whether the lease was given back, and what may be deferred.

    A state that makes no sense is the worst: locks are left, and everything may be deferred.
    """
    if not state:
        return True, None
    try:
        found = json.loads(state)
        is_given_back, deferred = found["given_back"], found["deferred"]
        if type(is_given_back) is bool and deferred is None:
            return is_given_back, None
        low, high = deferred
        if type(is_given_back) is bool and type(low) is int and type(high) is int:
            return is_given_back, Deferred(low, high)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return False, Deferred(0, (1 << 63) - 1)


def _written(is_given_back: bool, deferred: Deferred | None) -> bytes | None:
    if is_given_back and deferred is None:
        return None
    return json.dumps({"given_back": is_given_back, "deferred": deferred and list(deferred)}).encode()
