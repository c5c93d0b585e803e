"""What a connection that has ended leaves in a gateway's memory before Python looks for cycles."""

import asyncio
import gc
from pathlib import Path

from broker.gateway.life import State
from tests.end_to_end.raw_peer import message
from tests.fuzz.engine_cases import resident_bytes
from tests.gateway.in_process import Client, Worker, started_gateway

MESSAGES = 200  # of 1 KiB in one read, so that they gather in a large buffer
CONNECTIONS = 50
MOST_BYTES = 40_000  # of each connection; the buffer alone takes more


async def end_with_sends_under_way(gateway: object, worker: Worker) -> None:
    client = Client(gateway)  # type: ignore[arg-type]
    client.connect()
    handle = client.attach(sender=True, address="orders")
    client.attach(sender=False, address="orders", credit=10)
    client.frames()
    read, client.transport.ended = bytearray(), False
    client.transport.feed, feed = read.__iadd__, client.transport.feed  # type: ignore[assignment]
    for _ in range(MESSAGES):
        client.transfer(handle, message(b"x" * 1024))
    feed(bytes(read))
    read.clear()  # the client may live as long as the connection
    await worker.commands()
    client.transport.abort()
    for _ in range(3):
        await asyncio.sleep(0)
    assert client.connection.state is State.ENDED


def test_a_connection_that_ends_with_sends_under_way_leaves_little(tmp_path: Path) -> None:
    async def run() -> int:
        gateway, worker = started_gateway(tmp_path)
        for _ in range(CONNECTIONS):
            await end_with_sends_under_way(gateway, worker)
        gc.collect()
        gc.disable()
        before = resident_bytes()
        for _ in range(CONNECTIONS):
            await end_with_sends_under_way(gateway, worker)
        return resident_bytes() - before

    try:
        grown = asyncio.run(run())
    finally:
        gc.enable()
    assert grown < CONNECTIONS * MOST_BYTES
