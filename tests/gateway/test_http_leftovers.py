"""Of a connection of HTTP or a WebSocket that has ended nothing lives on, without Python's search for cycles."""

import asyncio
import base64
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from broker.gateway.gateway import Gateway
from broker.gateway.web.endpoint import HttpEndpoint
from broker.gateway.web.routes import http_endpoint
from broker.wire import Op
from protocol.codec import Described, Symbol, ULong, encode
from protocol.engine.sasl import SASL_HEADER, plain_response
from protocol.nodes.sas_tokens import generate
from tests.brokers import KEY, KEY_NAME
from tests.end_to_end.raw_peer import CLOSE, frame_bytes
from tests.gateway.in_process import Worker, started_gateway
from tests.hostile_input import OPENED, attach, say, transfer
from tests.leftovers import Leftovers
from tests.patience import until

AUTHORIZED = f"Authorization: {generate('http://localhost/orders', KEY_NAME, KEY, int(time.time()) + 3600)}\r\n"
GET = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST_WITHOUT_A_RIGHT = "POST /orders/messages HTTP/1.1\r\nHost: localhost\r\n"
POST = f"POST /orders/messages HTTP/1.1\r\nHost: localhost\r\n{AUTHORIZED}"


class Http:
    """One connection to a gateway's HTTP endpoint, and the gateway's worker."""

    def __init__(self, worker: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.worker, self._reader, self._writer = worker, reader, writer
        self.unanswered: list[list[Any]] = []
        self.gateway: Gateway | None = None
        self.endpoint: HttpEndpoint | None = None

    async def say(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self) -> bytes:
        """With the content."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        for line in head.lower().splitlines():
            if line.startswith(b"content-length:"):
                head += await self._reader.readexactly(int(line.partition(b":")[2]))
        return head

    async def closed(self) -> None:
        """The gateway waits a second for what the client still says."""
        assert await self._reader.read() == b""

    async def frame(self) -> bytes:
        """The payload of the next message of a WebSocket."""
        _, size = await self._reader.readexactly(2)
        if size == 126:
            size = int.from_bytes(await self._reader.readexactly(2), "big")
        return await self._reader.readexactly(size)

    async def become_websocket(self) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        lines = ["GET /$servicebus/websocket HTTP/1.1", "Host: x", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Protocol: AMQPWSB10"]
        await self.say(("\r\n".join(lines) + "\r\n\r\n").encode())
        assert b" 101 " in await self.head()

    async def open(self) -> None:
        await self.become_websocket()
        init = encode(Described(ULong(0x41), [Symbol("PLAIN"), plain_response(KEY_NAME, KEY)]))
        await self.say(in_message(SASL_HEADER + frame_bytes(0, init, kind=1) + OPENED))
        while b"\x00\x53\x11" not in await self.frame():
            pass

    def end(self) -> None:
        self._writer.transport.abort()


def in_message(payload: bytes, opcode: int = 2, *, final: bool = True, size: int | None = None) -> bytes:
    """A frame of a WebSocket; `size` is what its head says."""
    size = len(payload) if size is None else size
    if size < 126:
        length = bytes((0x80 | size,))
    else:
        length = b"\xfe" + size.to_bytes(2, "big") if size < 65536 else b"\xff" + size.to_bytes(8, "big")
    return bytes((opcode | (0x80 if final else 0),)) + length + bytes(4) + payload


State = Callable[[Http], Coroutine[Any, Any, None]]


async def nothing(http: Http) -> None: ...


async def an_answered_request(http: Http) -> None:
    await http.say(GET)
    await http.head()


async def several_requests(http: Http) -> None:
    await http.say(GET * 50)
    await http.head()


async def half_of_a_head(http: Http) -> None:
    await http.say(GET[:-10])


async def half_of_a_body(http: Http) -> None:
    await http.say(f"{POST}Content-Length: 1000\r\n\r\n".encode() + bytes(500))


async def a_body_for_which_there_is_no_memory(http: Http) -> None:
    await http.say(f"{POST}Content-Length: 200000\r\n\r\n".encode() + bytes(100_000))
    assert http.gateway is not None
    assert http.endpoint is not None
    unfinished = http.gateway.unfinished
    await until(lambda: unfinished.held_bytes == 100_000)
    http.endpoint.look_after()
    budget = http.gateway.budget
    enough, budget.maximum_bytes = budget.maximum_bytes, int(1.05 * budget.held_bytes)
    await http.say(b"x")
    await until(lambda: unfinished.held_bytes == 100_001)
    http.endpoint.look_after()
    answer = await http.head()
    budget.maximum_bytes = enough
    assert b" 503 " in answer
    assert b"amqp.max_connections_bytes" in answer
    await http.closed()


async def half_of_a_chunked_body(http: Http) -> None:
    await http.say(f"{POST}Transfer-Encoding: chunked\r\n\r\n".encode() + b"1\r\nx\r\n" * 5000)


async def a_send_that_waits(http: Http) -> None:
    await http.say(f"{POST}Content-Length: 4\r\n\r\nbody".encode())
    for _ in range(1000):
        http.unanswered += await http.worker.commands()
        if any(each[0] in (Op.SEND, Op.SEND_BATCH) for each in http.unanswered):
            return
        await asyncio.sleep(0.005)
    raise AssertionError("nothing was sent")


async def a_body_without_a_right(http: Http) -> None:
    """The gateway has answered, and takes what still comes."""
    await http.say(f"{POST_WITHOUT_A_RIGHT}Content-Length: 200000\r\n\r\n".encode() + bytes(100_000))
    await http.head()


async def a_body_without_a_right_and_no_time(http: Http) -> None:
    await http.say(f"{POST_WITHOUT_A_RIGHT}Content-Length: 200000\r\n\r\n".encode() + bytes(100_000))


async def requests_in_a_row(http: Http) -> None:
    await http.say(f"{POST_WITHOUT_A_RIGHT}Content-Length: 3\r\n\r\nabc".encode() * 200)


async def nonsense_in_chunks(http: Http) -> None:
    await http.say(f"{POST_WITHOUT_A_RIGHT}Transfer-Encoding: chunked\r\n\r\n".encode() + b"-1\r\n")


async def nonsense_behind_a_chunk(http: Http) -> None:
    await http.say(f"{POST}Transfer-Encoding: chunked\r\n\r\n".encode() + b"1\r\na\r\nzz\r\nabc\r\n")
    await http.head()


async def a_large_head(http: Http) -> None:
    await http.say(POST_WITHOUT_A_RIGHT.encode() + b"X-A: a\r\n" * 20_000)


async def a_large_header(http: Http) -> None:
    await http.say(POST_WITHOUT_A_RIGHT.encode() + b"X-A: " + b"a" * 200_000)
    await http.head()


async def a_malformed_request(http: Http) -> None:
    await http.say(b"nonsense\r\n\r\n")
    await http.head()


async def a_refused_request(http: Http) -> None:
    await http.say(b"DELETE /orders HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await http.head()


async def a_websocket(http: Http) -> None:
    await http.become_websocket()


async def half_of_sasl(http: Http) -> None:
    await http.become_websocket()
    await http.say(in_message(SASL_HEADER[:5]))


async def amqp(http: Http) -> None:
    await http.open()


async def an_unfinished_message(http: Http) -> None:
    await http.open()
    begun = attach(0) + transfer(0, 0, b"\x00\x53\x75\xb0\x00\x01\x00\x00" + bytes(30_000), more=True)
    await http.say(in_message(begun))
    while b"\x00\x53\x13" not in await http.frame():
        pass


async def a_fragment(http: Http) -> None:
    await http.open()
    await http.say(in_message(attach(0)[:20], final=False, size=20))
    await http.say(in_message(bytes(5000), 0, size=100_000)[:3000])


async def a_close_of_amqp(http: Http) -> None:
    await http.open()
    await http.say(in_message(say(CLOSE)))


async def a_close_of_the_websocket(http: Http) -> None:
    await http.open()
    await http.say(in_message(b"\x03\xe8", 8))


async def a_fault(http: Http) -> None:
    await http.open()
    await http.say(in_message(b"nonsense", 1))


async def a_fault_of_amqp(http: Http) -> None:
    await http.open()
    await http.say(in_message(b"nonsense" * 5))


STATES: list[State] = [
    nothing,
    an_answered_request,
    several_requests,
    half_of_a_head,
    half_of_a_body,
    a_body_for_which_there_is_no_memory,
    half_of_a_chunked_body,
    a_body_without_a_right,
    a_body_without_a_right_and_no_time,
    requests_in_a_row,
    nonsense_in_chunks,
    nonsense_behind_a_chunk,
    a_large_head,
    a_large_header,
    a_send_that_waits,
    a_malformed_request,
    a_refused_request,
    a_websocket,
    half_of_sasl,
    amqp,
    an_unfinished_message,
    a_fragment,
    a_close_of_amqp,
    a_close_of_the_websocket,
    a_fault,
    a_fault_of_amqp,
]


@pytest.mark.parametrize("state", STATES, ids=[state.__name__ for state in STATES])
def test_nothing_of_a_connection_lives_on(state: State, tmp_path: Path) -> None:
    async def run() -> None:
        gateway, worker = started_gateway(tmp_path)
        endpoint = http_endpoint(gateway)
        port = await endpoint.listen("127.0.0.1", 0, None, reuse_port=False)

        def has_left() -> bool:
            """The gateway has a connection to itself, too."""
            return not endpoint.count and all(each.client_name.startswith("http-") for each in gateway.connections)

        async def end_one() -> None:
            http = Http(worker, *await asyncio.open_connection("127.0.0.1", port))
            http.gateway, http.endpoint = gateway, endpoint
            await state(http)
            await asyncio.sleep(0.02)  # the gateway reads what there is
            http.end()
            await until(has_left)
            for _ in range(3):
                for command in (*http.unanswered, *await worker.commands()):
                    if command[0] in (Op.SEND, Op.SEND_BATCH):
                        worker.say([Op.SENT, command[2], 1])
                    elif command[0] == Op.CLOSE_RECEIVER:
                        worker.say([Op.CLOSED, command[2], "", ""])
                http.unanswered.clear()
                await asyncio.sleep(0.005)  # an answer may bring the next command

        for _ in range(3):  # what is made once, or after some messages, is made
            await end_one()
        with Leftovers("broker", "protocol", "aiohttp", "websockets"):
            for _ in range(2):
                await end_one()
            await asyncio.sleep(0.05)  # the loop takes some rounds for it
        assert not gateway.metrics.connection_failures
        assert gateway.unfinished.held_bytes == 0
        for connection in [*gateway.connections]:
            connection.shut_down()
        endpoint.stop_listening()
        await endpoint.close()
        await until(lambda: not gateway.connections)

    uvloop.run(run())
