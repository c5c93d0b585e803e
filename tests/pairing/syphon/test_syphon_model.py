"""Syphons under drawn misfortunes, in simulated time: nothing is lost, nothing is twice, and keys keep their order.

A story is a list of events with times. When it is over, all that was broken works again, and one more syphon drains
what is left.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from broker.pairing.syphon.budget import Limits
from tests.models import model_settings
from tests.pairing.syphon.simulation import Entity, now_s, simulate
from tests.pairing.syphon.worlds import Syphon, World

FAULTS = ("com.microsoft:entity-disabled", "amqp:resource-limit-exceeded", "com.microsoft:server-busy")


@dataclass(frozen=True)
class Settings:
    seed: int
    detects_duplicates: bool
    keeps_locks: bool
    tells_counts: bool
    lock_s: float
    limits: Limits


settings = st.builds(
    Settings,
    seed=st.integers(0, 2**32),
    detects_duplicates=st.booleans(),
    keeps_locks=st.booleans(),
    tells_counts=st.booleans(),
    lock_s=st.sampled_from([8.0, 60.0]),
    limits=st.builds(Limits, messages=st.sampled_from([4, 15, 100]), credit=st.sampled_from([3, 50])),
)

names = st.sampled_from(["a", "b"])
keys = st.sampled_from(["k", "k", "l", None])
spans = st.sampled_from([0.03, 0.3, 3.0, 20.0, 100.0])
puts = st.tuples(st.just("put"), names, keys, st.integers(1, 12))
events = st.one_of(
    puts,
    puts,
    st.tuples(st.just("put"), st.sampled_from(["gone", "a/$management", "sessions"]), st.none(), st.just(1)),
    st.tuples(st.just("fault"), names, st.sampled_from(FAULTS), spans),
    st.tuples(st.just("fault"), names, st.sampled_from(FAULTS), spans),
    st.tuples(st.just("slow"), st.sampled_from([0.3, 2.0, 7.0]), spans),
    st.tuples(st.just("primary goes"), st.booleans(), spans),
    st.tuples(st.just("lose locks")),
    st.tuples(st.just("start")),
    st.tuples(st.sampled_from(["stop", "kill"]), st.integers(0, 1)),
    st.tuples(st.just("cut"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("stall"), st.integers(0, 1), spans),
)
waits = st.sampled_from([0.0, 0.03, 0.1, 1.0, 5.0, 30.0])
stories = st.lists(st.tuples(waits, events), min_size=12, max_size=40)


class Story:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        detects = settings.detects_duplicates
        entities = {name: Entity(detects_duplicates=detects) for name in "ab"}
        self.world = World(settings.seed, sessions=Entity(requires_session=True), **entities)
        queue = self.world.queue
        queue.keeps_locks, queue.tells_counts, queue.lock_s = (
            settings.keeps_locks,
            settings.tells_counts,
            settings.lock_s,
        )
        self.syphons: list[Syphon] = []
        self.sent = 0

    def put(self, name: str, key: str | None, count: int) -> None:
        for _ in range(count):
            self.world.put(name, b"%d" % self.sent, group_id=key, message_id=f"m{self.sent}" if self.sent % 2 else None)
            self.sent += 1

    async def happen(self, event: tuple) -> None:
        world, loop = self.world, asyncio.get_running_loop()
        match event:
            case ("put", name, key, count):
                self.put(name, key, count)
            case ("fault", name, fault, seconds):
                entity = world.primary.entities[name]
                entity.fault = fault
                loop.call_later(seconds, setattr, entity, "fault", None)
            case ("slow", slowness_s, seconds):
                world.primary.slowness_s = slowness_s
                loop.call_later(seconds, setattr, world.primary, "slowness_s", 0.0)
            case ("primary goes", stores_late, seconds):
                world.primary.stores_late = stores_late
                world.primary.go()
                loop.call_later(seconds, world.primary.come)
            case ("lose locks",):
                world.queue.lose_locks()
            case ("start",):
                self.start()
            case (what, which, *rest):
                if which < len(self.syphons):
                    await self.strike(what, self.syphons[which], *rest)

    def start(self) -> None:
        if len(self.syphons) < 2:
            self.syphons.append(Syphon(self.world, self.settings.limits))

    async def strike(self, what: str, syphon: Syphon, *rest: Any) -> None:
        match what:
            case "stop":
                if not syphon.wire.is_stalled:
                    self.syphons.remove(syphon)
                    await syphon.stop()
                    self.start()
            case "kill":
                self.syphons.remove(syphon)
                await syphon.kill()
                self.start()
            case "cut":
                syphon.wire.cut(*rest)
            case "stall":
                syphon.wire.stall()
                [seconds] = rest
                asyncio.get_running_loop().call_later(seconds, syphon.wire.resume)

    async def end(self) -> None:
        """All works again."""
        await asyncio.sleep(100)  # locks and leases of those that were killed have ended
        last = Syphon(self.world, self.settings.limits, once=True)
        others = [syphon.task for syphon in self.syphons]
        ends_s = now_s() + 3600
        while self.world.queue.entries:
            assert now_s() < ends_s, "not drained"
            await asyncio.sleep(1)
        for syphon in self.syphons:
            await syphon.stop()
        await last.task
        await asyncio.gather(*others)
        assert now_s() < ends_s + 600

    def check(self) -> None:
        world, detects = self.world, self.settings.detects_duplicates
        dead = Counter(reason for _, reason in world.queue.dead)
        wanted = Counter(name for name, _, _ in world.sent)
        assert dead == Counter(
            {
                reason: wanted[name]
                for name, reason in (
                    ("gone", "SyphonDestinationNotFound"),
                    ("a/$management", "SyphonDestinationNotAllowed"),
                    ("sessions", "SyphonMessageRefused"),
                )
                if wanted[name]
            }
        )
        for name in "ab":
            bodies = world.bodies(name)
            expected = [body for path, _, body in world.sent if path == name]
            assert set(bodies) == set(expected)
            if detects:
                assert len(bodies) == len(expected)
            for key in ("k", "l"):
                came = [int(body) for _, group, body in world.primary.entities[name].messages if group == key]
                first = list(dict.fromkeys(came))
                assert first == sorted(first), (name, key)
        assert world.queue.state is None
        assert world.queue.is_given_back
        most = max((each.most_held for each in self.syphons), default=0)
        limits = self.settings.limits
        assert most <= limits.messages + limits.messages // 4 + 1


@model_settings(100, 40)
@given(settings, stories)
def test_whatever_happens_each_message_arrives_in_order(settings, story):
    async def run():
        told = Story(settings)
        for number in range(30):
            told.put("ab"[number % 2], "kkl"[number % 3], 1)
        told.start()
        for wait_s, event in story:
            await asyncio.sleep(wait_s)
            await told.happen(event)
        await told.end()
        told.check()

    simulate(run())
