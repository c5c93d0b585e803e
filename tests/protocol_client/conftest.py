import asyncio
import inspect

import pytest

from tests.brokers import Broker
from tests.protocol_client.scripted_peer import ScriptedPeer

TEST_SECONDS = 30


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


@pytest.fixture
def peer() -> ScriptedPeer:
    return ScriptedPeer()


QUEUES = """
[[queues]]
name = "q"

[[queues]]
name = "keyed"
lock_duration_ms = 5000
authorization_rules = [
    {key_name = "sender", primary_key = "send-key", rights = ["Send"]},
    {key_name = "listener", primary_key = "listen-key", rights = ["Listen"]},
    {key_name = "manager", primary_key = "manage-key", rights = ["Manage"]},
]

[[queues]]
name = "small/one"
max_message_size_kb = 1

[[queues]]
name = "outcomes"

[[queues]]
name = "locks"

[[queues]]
name = "purged"

[[queues]]
name = "counted"
"""


@pytest.fixture(scope="session")
def broker(tmp_path_factory):
    """One broker for all; each test leaves its queue empty, or has its own."""
    with Broker(tmp_path_factory.mktemp("client"), QUEUES) as broker:
        yield broker
