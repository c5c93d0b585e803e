"""A syphon in a process with other work: what goes wrong with it is told and tried again, and reaches nobody else."""

import asyncio

import pytest

from broker.pairing.options import InvalidPairing
from broker.pairing.syphon import beside
from broker.pairing.syphon.beside import Beside
from tests.patience import until


class Failing:
    """In place of a service: fails as it is told, and drains when nothing is left to fail with."""

    left: list[Exception] = []
    made = 0

    def __init__(self, *_: object) -> None:
        type(self).made += 1
        self.drains = False
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        if self.left:
            raise self.left.pop(0)
        self.drains = True
        await self._stopping.wait()

    async def keep_telling(self) -> None:
        await asyncio.Event().wait()

    def stop(self) -> None:
        self._stopping.set()

    def unready(self) -> str | None:
        return None if self.drains else "the secondary is away"


@pytest.fixture
def failing(monkeypatch):
    monkeypatch.setattr(Failing, "left", [])
    monkeypatch.setattr(Failing, "made", 0)
    monkeypatch.setattr(beside, "RETRY_SECONDS", 0.01)
    return Failing


async def test_what_prevents_it_is_tried_again(failing):
    failing.left += [InvalidPairing("no right"), InvalidPairing("no right"), ZeroDivisionError()]
    syphon = Beside(failing)
    assert syphon.problem() == "the secondary is away"
    running = asyncio.create_task(syphon.run())
    await until(lambda: failing.made == 4 and not syphon.problem())
    syphon.stop()
    await running


async def test_what_prevents_it_is_said_and_stop_does_not_wait_for_the_next_time(failing, monkeypatch):
    monkeypatch.setattr(beside, "RETRY_SECONDS", 3600)
    failing.left.append(InvalidPairing("no right"))
    syphon = Beside(failing)
    running = asyncio.create_task(syphon.run())
    await until(lambda: syphon.problem() == "no right")
    syphon.stop()
    await running
    assert failing.made == 1


async def test_one_that_is_stopped_before_it_begins_does_nothing(failing):
    syphon = Beside(failing)
    syphon.stop()
    await syphon.run()
    assert syphon.problem() == "the secondary is away"


async def test_its_tasks_end_with_it(failing):
    syphon = Beside(failing)
    before = asyncio.all_tasks()
    running = asyncio.create_task(syphon.run())
    await until(lambda: not syphon.problem())
    syphon.stop()
    await running
    await until(lambda: asyncio.all_tasks() == before)
