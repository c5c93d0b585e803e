"""A lease lasts from before it was asked for, in simulated time: the secondary counts from when it hears of that."""

import asyncio
from typing import Any, cast

import pytest

from broker.pairing.syphon.counters import Counters
from broker.pairing.syphon.leases import LOST_AT, RETRY_SECONDS, Lease
from tests.pairing.syphon.simulation import now_s, simulate

LEASE_S = 10.0
NEVER_S = 1e9


class Link:
    """A receiver that has the session."""

    closed = False

    def watch(self, changed: Any) -> None: ...

    async def close(self) -> None: ...


class Slow:
    """A secondary that answers renewals after these times, and knows when it got them."""

    def __init__(self, *answers_after_s: float) -> None:
        self._answers_after_s = [*answers_after_s]
        self.lasts_until_s = LEASE_S

    async def renew_session_lock(self, session: str) -> None:
        after_s = self._answers_after_s.pop(0) if self._answers_after_s else NEVER_S
        if after_s < NEVER_S:
            self.lasts_until_s = now_s() + LEASE_S
        await asyncio.sleep(after_s)

    async def set_session_state(self, session: str, state: bytes) -> None: ...


@pytest.mark.parametrize("answers_after_s", [(), (0.0,), (3.9,), (0.0, 3.9), (3.9, 3.0, 3.9)])
def test_whoever_has_it_knows_that_it_is_lost_before_another_can_have_it(answers_after_s: tuple[float, ...]) -> None:
    async def story() -> None:
        secondary = Slow(*answers_after_s)
        told: list[float] = []
        lease = Lease(cast(Any, Link()), cast(Any, secondary), "lease", LEASE_S, now_s(), Counters())
        lease.watch(lambda: told.append(now_s()))
        while not lease.is_lost:
            assert now_s() < secondary.lasts_until_s
            await asyncio.sleep(0.1)
        assert now_s() >= secondary.lasts_until_s - (1 - LOST_AT) * LEASE_S - 0.1  # nor is it given up sooner
        await asyncio.sleep(2 * RETRY_SECONDS + 0.1)
        assert told
        await lease.give_back()

    simulate(story())
