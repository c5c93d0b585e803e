"""The timers of a connection: those with a name replace each other, and all of them end with it."""

import asyncio

from broker.gateway.connection_timers import Timer, Timers
from tests.patience import until

LATER_S, NEVER_S = 0.01, 3600.0


async def test_a_timer_calls_once() -> None:
    timers, called = Timers(), list[str]()
    timers.start(Timer.STALL, LATER_S, lambda: called.append("stall"))
    timers.add(LATER_S, lambda: called.append("first"))
    timers.add(LATER_S, lambda: called.append("second"))
    await until(lambda: len(called) == 3)
    assert sorted(called) == ["first", "second", "stall"]
    assert not timers._handles


async def test_a_timer_replaces_the_one_of_its_name_only() -> None:
    timers, called = Timers(), list[str]()
    timers.start(Timer.DEADLINE, LATER_S, lambda: called.append("before"))
    timers.start(Timer.EXPIRY, LATER_S, lambda: called.append("expiry"))
    timers.start(Timer.DEADLINE, 2 * LATER_S, lambda: called.append("deadline"))
    await until(lambda: len(called) == 2)
    assert called == ["expiry", "deadline"]


async def test_what_is_stopped_does_not_call() -> None:
    timers, called = Timers(), list[str]()
    timers.stop(Timer.STALL)
    for timer in Timer:
        timers.start(timer, 0, lambda timer=timer: called.append(timer.name))
    timers.stop(Timer.STALL)
    await until(lambda: len(called) == len(Timer) - 1)
    assert Timer.STALL.name not in called
    timers.start(Timer.STALL, NEVER_S, called.clear)
    timers.add(0, called.clear)
    timers.stop_all()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert called
    assert not timers._handles


async def test_a_timer_may_start_itself_again() -> None:
    timers, called = Timers(), list[int]()

    def call() -> None:
        called.append(len(called))
        if len(called) < 3:
            timers.start(Timer.EXPIRY, 0, call)

    timers.start(Timer.EXPIRY, 0, call)
    await until(lambda: len(called) == 3)
    assert not timers._handles
