"""A drain that fails half way ends whole: its tasks end and nothing of it lives, without Python's search for cycles."""

import asyncio
import weakref

import pytest

from broker.pairing.syphon import tending
from broker.pairing.syphon.draining import Drain
from tests.leftovers import Leftovers
from tests.pairing.syphon.simulation import Entity, simulate
from tests.pairing.syphon.worlds import Syphon, World, until


@pytest.mark.parametrize("way", ["lost", "killed", "stopped", "lease lost"])
def test_nothing_of_a_drain_lives_on(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drains: list[weakref.ref[Drain]] = []

    class Seen(Drain):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            drains.append(weakref.ref(self))

    async def drain_and_end(world: World) -> None:
        for number in range(300):
            world.put("orders", group_id=f"s{number % 7}", message_id=str(number))
        syphon = Syphon(world)
        await until(lambda: syphon.counters.moved > 20)
        if way == "lost":
            syphon.wire.cut()
            await until(lambda: len(syphon.backlogs) > 1)
            await syphon.stop()
        elif way == "killed":
            await syphon.kill()
        elif way == "stopped":
            await syphon.stop()
        else:
            syphon.wire.stall()
            await asyncio.sleep(100)  # its lease ends
            syphon.wire.cut()
            await syphon.kill()

    async def run() -> None:
        monkeypatch.setattr(tending, "Drain", Seen)
        await drain_and_end(World(orders=Entity()))
        tasks = len(asyncio.all_tasks())
        drains.clear()
        with Leftovers():  # it counts no classes: what the test has of the syphon refers to itself
            await drain_and_end(World(orders=Entity()))
            await asyncio.sleep(10)  # tasks that were told to end have ended
            assert drains
            assert not [each for each in drains if each() is not None]
            assert len(asyncio.all_tasks()) <= tasks

    simulate(run())
