"""What the operations endpoint's HTTP server does with peers that are slow, many, or wrong."""

import asyncio
import json

import pytest

from broker.http.server import Answer, HttpServer, Limits

LIMITS = Limits(connections=3, head_bytes=1024, head_seconds=0.2, keep_alive_seconds=0.2, close_seconds=0.2)


async def respond(request):
    return Answer(200, f"{request.method} {request.path}".encode(), "text/plain", {})


def error_answer(status, reason):
    return Answer(status, json.dumps(reason).encode(), "application/json", {})


def served(scene, limits=LIMITS, respond=respond):
    """What `scene(server, connect)` returns; `connect` gives the two streams of a new connection."""

    async def main():
        server = HttpServer(respond, error_answer, limits)
        port = await server.listen("127.0.0.1", 0)
        writers = []

        async def connect(sent=b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            writer.write(sent)
            return reader, writer

        try:
            async with asyncio.timeout(10):
                return await scene(server, connect)
        finally:
            for writer in writers:
                writer.close()
            await server.close()

    return asyncio.run(main())


def answered(sent, **options):
    """All that one connection gets until the server ends it."""

    async def scene(server, connect):
        reader, _ = await connect(sent)
        return await reader.read()

    return served(scene, **options)


def status_of(answer):
    return int(answer.split(b" ", 2)[1])


def test_requests_on_one_connection_are_answered_in_order():
    answer = answered(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\nGET /b?c=d HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert answer.index(b"GET /a") < answer.index(b"GET /b")
    assert b"c=d" not in answer
    assert answer.count(b"HTTP/1.1 200 OK") == 2


def test_http_1_0_gets_one_answer():
    assert b"Connection: close" in answered(b"GET /a HTTP/1.0\r\n\r\n")


@pytest.mark.parametrize(
    "sent",
    [
        b"POST / HTTP/1.1\r\nContent-Length: 23\r\n\r\nGET /hidden HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nGET /hidden HTTP/1.1\r\n\r\n",
    ],
)
def test_a_body_is_never_taken_for_a_request(sent):
    answer = answered(sent)
    assert b"Connection: close" in answer
    assert b"hidden" not in answer


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET / HTTP/2\r\n\r\n", b"GET /\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"],
)
def test_what_is_no_request_is_400_and_the_end(sent):
    assert status_of(answered(sent)) == 400


def test_a_head_that_is_too_large_is_431_and_the_end():
    assert status_of(answered(b"GET / HTTP/1.1\r\n" + b"A: " + b"b" * 8000)) == 431


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_a_request_that_does_not_come_in_time_ends_its_connection(sent):
    assert answered(sent) == b""


def test_a_connection_without_a_next_request_is_closed():
    assert answered(b"GET / HTTP/1.1\r\n\r\n").endswith(b"GET /")


def test_when_all_connections_are_taken_the_longest_silent_one_makes_room():
    async def scene(server, connect):
        silent = [(await connect())[0] for _ in range(LIMITS.connections)]
        reader, _ = await connect(b"GET /a HTTP/1.1\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        return answer, await silent[0].read(), server.refused

    slow = LIMITS._replace(head_seconds=5.0)
    answer, rest, refused = served(scene, limits=slow)
    assert status_of(answer) == 200
    assert (rest, refused) == (b"", 1)


def test_when_all_connections_are_being_answered_one_more_is_refused():
    asked, released = asyncio.Queue(), asyncio.Event()

    async def respond_late(request):
        asked.put_nowait(request)
        await released.wait()
        return await respond(request)

    async def scene(server, connect):
        request = b"GET /a HTTP/1.1\r\nConnection: close\r\n\r\n"
        busy = [(await connect(request))[0] for _ in range(LIMITS.connections)]
        for _ in busy:
            await asked.get()
        refused, _ = await connect()
        nothing = await refused.read()
        released.set()
        return nothing, [await reader.read() for reader in busy]

    nothing, answers = served(scene, respond=respond_late)
    assert nothing == b""
    assert list(map(status_of, answers)) == [200] * LIMITS.connections
