"""How a gateway's commands leave for a worker: those of one loop turn in one frame, unless they are large."""

import asyncio

from broker import wire
from broker.gateway.router import EARLY_BYTES, Router
from broker.gateway.worker_socket import SocketConnection
from broker.metrics import GatewayMetrics
from tests.gateway.in_process import Worker


def frames_of(sizes: list[int]) -> list[list[int]]:
    """The sizes of the messages in each frame, of sends posted in one turn of the loop."""

    async def posted() -> list[list[int]]:
        router = Router(["worker"], 1, GatewayMetrics(), lambda message: None, SocketConnection)
        [connection] = router.workers
        assert isinstance(connection, SocketConnection)
        worker = Worker(connection)
        await worker.commands()  # what the gateway says of itself
        for size in sizes:
            connection.post(wire.send(0, 1, 8, [[b"", bytes(size), None, None]]))
        await asyncio.sleep(0)
        data = bytes(worker.transport.written)
        found, at = [], 0
        while at < len(data):
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            found.append([len(command[4][0][1]) for command in wire.unpack(data[at + 4 : end])])
            at = end
        return found

    return asyncio.run(posted())


def test_small_commands_of_one_turn_are_one_frame():
    assert frames_of([10] * 100) == [[10] * 100]


def test_large_commands_are_frames_of_their_own():
    large = EARLY_BYTES + 1
    assert frames_of([10, large, large, 10, 20]) == [[10, large], [large], [10, 20]]
