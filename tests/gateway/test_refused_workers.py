"""Why a worker of a cluster is not used."""

import asyncio
from typing import Any

import pytest

from broker import wire
from broker.wire import Op
from tests.gateway.test_silent_machines import Worker
from tests.patience import until


async def test_the_reason_stays_if_the_greeting_comes_before_the_connection_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """uvloop gives a protocol what has come before the coroutine that connects goes on."""
    worker = Worker()
    loop = asyncio.get_running_loop()
    connect = loop.create_connection

    async def late(*arguments: Any, **options: Any) -> Any:
        made = await connect(*arguments, **options)
        await worker.accept()
        await worker.say([Op.HELLO, wire.OLDEST_VERSION - 1, [0]])
        await until(lambda: worker.connection._lost.is_set())
        return made

    monkeypatch.setattr(loop, "create_connection", late)
    async with worker.serve():
        await until(lambda: worker.connection.problem)
        assert "version" in worker.connection.problem
        await asyncio.sleep(0.1)  # else what comes after it would not be seen
        assert "version" in worker.connection.problem
