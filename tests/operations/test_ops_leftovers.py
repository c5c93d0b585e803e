"""Of a connection to an operations endpoint that has ended nothing lives on, without Python's search for cycles."""

import asyncio

import pytest

from broker.http.ops import start_ops
from tests.leftovers import Leftovers
from tests.operations.test_ops_endpoint import Source

GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /metrics HTTP/1.1\r\nHost: localhost\r\n"
SAID = {
    "nothing": b"",
    "a request": GET,
    "requests in a row": GET * 200,
    "half of a head": GET[:-10],
    "no HTTP": b"\x16\x03\x01\x00\x05nonsense\r\n\r\n",
    "a body that stops": POST + b"Content-Length: 200000\r\n\r\n" + bytes(100_000),
    "nonsense in chunks": POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
    "a large header": GET[:-2] + b"X-A: " + b"a" * 200_000,
    "many headers": GET[:-2] + b"X-A: a\r\n" * 20_000,
    "another path": b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "does not read"])
@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_nothing_of_a_connection_lives_on(said, reads):
    async def run():
        server = await start_ops(Source(), "127.0.0.1", 0)

        async def end_one():
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(said)
            await asyncio.sleep(0.02)  # the server reads what there is
            if reads and said not in (b"", SAID["half of a head"]):
                await reader.read(100)
            writer.transport.abort()
            for _ in range(1000):
                if not server.connections:
                    break
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.02)  # the loop takes some rounds for it

        try:
            for _ in range(3):  # what is made once is made
                await end_one()
            with Leftovers("broker", "aiohttp"):
                for _ in range(2):
                    await end_one()
        finally:
            await server.close()

    asyncio.run(run())
