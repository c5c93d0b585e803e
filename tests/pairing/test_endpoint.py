"""The connection that all senders of a pairing share."""

import asyncio
import gc
import socket

from broker.pairing import endpoint
from broker.pairing.endpoint import Endpoint
from protocol.client.connection_string import ConnectionString
from tests.patience import until


async def test_an_attempt_that_nobody_waits_for_any_more_fails_quietly(monkeypatch):
    monkeypatch.setattr(endpoint, "CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        target = ConnectionString.parse(f"Endpoint=sb://localhost:{port};UseDevelopmentEmulator=true")
        shared = Endpoint("primary", target)
        waiting = asyncio.create_task(shared.sender("orders"))
        await until(lambda: shared._connecting)
        waiting.cancel()
        await asyncio.wait([waiting])
        await until(lambda: shared._connecting is not None and shared._connecting.done())
        shared._connecting = None
        del waiting
        gc.collect()  # what is left to the loop's log fails the test
        await asyncio.sleep(0)
