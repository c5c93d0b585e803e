"""Brokers that tests start see none of the caller's settings. Tests may be coroutines. `tests.tiers` says which run."""

import asyncio
import gc
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from xdist.scheduler import LoadScopeScheduling

from tests import again, caller, tiers
from tests.examples import examples
from tests.patience import PATIENCE_S

__all__ = ["caller"]  # importing it is what counts

TEST_SECONDS = 1.5 * PATIENCE_S  # so that a wait that is in vain says what it waited for
ROOT = Path(__file__).parents[1]
PROCESSES_PER_CPU = 3  # most tests of brokers wait
TABLE = tiers.read()
gc.disable()  # until all tests are there: what collection makes stays

settings.register_profile(
    "peeklock",
    max_examples=examples(100),
    deadline=None,
    derandomize=False,  # Hypothesis does otherwise where it thinks that this is CI
    database=DirectoryBasedExampleDatabase(ROOT / ".hypothesis" / "examples"),  # what was found is tried again
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("peeklock")


def pytest_addoption(parser):
    parser.addoption("--tier", choices=(*tiers.TIERS, tiers.ALL), default=tiers.ALL, help="run the tests of this tier")


def pytest_ignore_collect(collection_path, config):
    """Files without a test of the tier are not even read."""
    tier = config.getoption("tier")
    if tier == tiers.ALL or not collection_path.is_relative_to(ROOT) or collection_path == ROOT:
        return None
    return None if TABLE.may_have(collection_path.relative_to(ROOT).as_posix(), tier) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    tier = config.getoption("tier")
    if tier != tiers.ALL:
        others = [item for item in items if TABLE.tier_of(item.nodeid) != tier]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if TABLE.tier_of(item.nodeid) == tier]
    items.sort(key=lambda item: TABLE.place_of(item.nodeid))


def pytest_collection_finish(session):
    gc.freeze()  # else each full collection looks at all tests
    gc.enable()


def pytest_xdist_auto_num_workers(config):
    return PROCESSES_PER_CPU * len(os.sched_getaffinity(0))


def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False  # they are in order
    return ByGroup(config, log)


class ByGroup(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return TABLE.group_of(nodeid)


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    again.keep(config, terminalreporter, exitstatus)
    if config.getoption("tier") == tiers.CHANGE:
        terminalreporter.write_line("Longer tests were left out; make test-all runs all.")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Commands that ran in this process have configured its log, to a stream that is closed."""
    if structlog.is_configured():
        structlog.reset_defaults()


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
