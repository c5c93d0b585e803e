"""Long work for management: at once where nothing else is to be done, and a small part of the time beside messages."""

import asyncio
import time

import pytest

from broker.gateway.web.pace import BUSY_BYTES, SHARE, Pace, Parts

WORKED_S = 0.002


class Traffic:
    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._began = time.monotonic()

    def __call__(self) -> int:
        return int((time.monotonic() - self._began) * self._rate)


async def rested(pace: Pace, times: int) -> float:
    began = time.monotonic()
    for _ in range(times):
        await pace.rest(WORKED_S)
    return time.monotonic() - began


async def paced(bytes_per_second: float) -> Pace:
    pace = Pace(Traffic(bytes_per_second))
    await asyncio.sleep(0.05)  # else there is too little to see
    return pace


@pytest.mark.parametrize("rate", [0, BUSY_BYTES / 2])
def test_without_messages_there_is_no_rest(rate: float) -> None:
    async def story() -> None:
        assert await rested(await paced(rate), 20) < 10 * WORKED_S / SHARE

    asyncio.run(story())


def test_beside_messages_all_work_together_takes_its_share() -> None:
    async def story() -> None:
        pace = await paced(BUSY_BYTES * 2)
        began = time.monotonic()
        await asyncio.gather(*(rested(pace, 2) for _ in range(3)))
        assert 6 * WORKED_S / (time.monotonic() - began) <= 1.1 * SHARE

    asyncio.run(story())


def test_the_rest_ends_with_the_messages() -> None:
    async def story() -> None:
        sent = Traffic(BUSY_BYTES * 2)
        flows = True
        at = 0

        def traffic() -> int:
            nonlocal at
            at = sent() if flows else at
            return at

        pace = Pace(traffic)
        await asyncio.sleep(0.05)  # else there is too little to see
        assert await rested(pace, 1) > WORKED_S / SHARE / 2
        flows = False
        await asyncio.sleep(0.05)  # it sees that nothing flows
        await pace.rest(WORKED_S)
        assert await rested(pace, 20) < 10 * WORKED_S / SHARE

    asyncio.run(story())


def test_others_are_served_between_parts() -> None:
    async def story() -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        parts = Parts(await paced(0))
        turns = 0
        for _ in range(50):
            time.sleep(0.0005)  # noqa: ASYNC251 - it is the work
            await parts.pause()
        assert turns >= 15
        task.cancel()

    asyncio.run(story())
