"""Brokers that tests start see none of the caller's settings. Tests may be coroutines."""

import asyncio
import inspect

import pytest
from hypothesis import HealthCheck, settings

from tests import caller

__all__ = ["caller"]  # importing it is what counts

TEST_SECONDS = 180  # many run beside each other, some with the lowest priority

settings.register_profile("peeklock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("peeklock")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test that is a coroutine runs in an event loop of its own; what it left to the loop's log fails it."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    faults = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        async with asyncio.timeout(TEST_SECONDS):
            await pyfuncitem.obj(**arguments)

    asyncio.run(run())
    assert not faults
    return True
