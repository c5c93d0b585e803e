"""A gateway reads from a client while there is no reason not to."""

import itertools
from typing import Any

import pytest

from broker.gateway.reading import Reading

REASONS = ("stalled", "overrun", "workers", "behind", "rests")


class Transport:
    """Fails if it is told twice, as one of asyncio may."""

    def __init__(self) -> None:
        self.is_paused = False

    def pause_reading(self) -> None:
        assert not self.is_paused
        self.is_paused = True

    def resume_reading(self) -> None:
        assert self.is_paused
        self.is_paused = False


class Link:
    is_overrun = False


class Scene:
    def __init__(self) -> None:
        self.reading, self.transport = Reading(), Transport()
        self.is_stalled = False
        self.link = Link()
        self.worker = object()
        self.behind: set[Any] = set()

    def set(self, reasons: set[str]) -> None:
        """There are just these reasons."""
        reading = self.reading
        self.is_stalled = "stalled" in reasons
        self.link.is_overrun = "overrun" in reasons
        if self.link.is_overrun:
            reading.overrun.add(self.link)
        self.behind = {self.worker} if "workers" in reasons else set()
        reading.workers |= self.behind
        reading.is_behind = "behind" in reasons
        reading.rests = "rests" in reasons

    def regulate(self) -> bool:
        self.reading.regulate(self.transport, self.is_stalled, self.behind)  # type: ignore[arg-type]
        return self.transport.is_paused


@pytest.mark.parametrize("before", [(), *((reason,) for reason in REASONS), REASONS], ids="+".join)
def test_it_reads_just_while_there_is_no_reason_not_to(before: tuple[str, ...]) -> None:
    for count in range(len(REASONS) + 1):
        for after in itertools.combinations(REASONS, count):
            scene = Scene()
            scene.set({*before})
            assert scene.regulate() is bool(before)
            scene.set(set(after))
            assert scene.regulate() is bool(after)
            assert scene.regulate() is bool(after), "it was not told again"


def test_links_and_workers_that_are_no_reason_any_more_are_forgotten() -> None:
    scene = Scene()
    scene.set({"overrun", "workers"})
    scene.reading.workers.add(other := object())  # type: ignore[arg-type]
    overrun = scene.reading.overrun
    scene.regulate()
    assert scene.reading.workers == {scene.worker}
    assert other not in scene.reading.workers
    scene.set(set())
    scene.regulate()
    assert not scene.reading.workers
    assert not overrun
    assert scene.reading.overrun is overrun, "links add to it"
