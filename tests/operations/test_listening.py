"""Listeners, on both event loops: how they count, refuse, rest and end."""

import asyncio
import errno
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
import uvloop

from broker.listening import REST_SECONDS, Listener, cannot_listen, listen, try_to_listen
from broker.settings.listeners import Tls
from broker.tls import ServerTls
from tests.brokers import REPOSITORY
from tests.patience import PATIENCE_S, until

CERTIFICATE = REPOSITORY / "tests/protocol_client/localhost.pem"

Run = Callable[[Coroutine[Any, Any, None]], None]


class Greeting(asyncio.Protocol):
    """Says hello and hangs up."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        client = cast(asyncio.Transport, transport)  # uvloop's is one in all but its base class
        client.write(b"hello")
        client.close()


class Reception:
    """Has room for `places` connections in all."""

    def __init__(self, places: int = 100) -> None:
        self.places = places
        self.arriving: set[asyncio.BaseProtocol] = set()
        self.failures: list[OSError] = []

    def arrives(self, peer: str) -> asyncio.BaseProtocol | None:
        assert peer.startswith("127.0.0.1:")
        if self.places == 0:
            return None
        self.places -= 1
        protocol = Greeting()
        self.arriving.add(protocol)
        return protocol

    def arrived(self, protocol: asyncio.BaseProtocol) -> None:
        self.arriving.remove(protocol)

    def accept_failed(self, error: OSError) -> None:
        self.failures.append(error)


class Starved(socket.socket):
    """Has no descriptor for the first `failures` connections that are asked of it."""

    failures = 0
    attempts = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.attempts += 1
        if self.attempts <= self.failures:
            raise OSError(errno.ENFILE, "too many open files in the system")
        return super().accept()


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test's coroutine; what it left to the loop's log fails the test."""
    runner: Run = request.param
    faults: list[dict[str, Any]] = []

    async def watched(story: Coroutine[Any, Any, None]) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        await story

    def run(story: Coroutine[Any, Any, None]) -> None:
        runner(watched(story))
        assert not faults

    return run


async def said(port: int) -> bytes:
    """What a client hears until its connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def test_who_finds_no_room_is_closed_and_the_next_is_served(run: Run) -> None:
    async def story() -> None:
        reception = Reception(places=1)
        listener = Listener(reception, await listen("127.0.0.1", 0, backlog=10))
        assert [await said(listener.port) for _ in range(2)] == [b"hello", b""]
        reception.places = 1
        assert await said(listener.port) == b"hello"
        await until(lambda: not reception.arriving)
        listener.close()

    run(story())


def test_without_a_descriptor_a_listener_rests_and_tries_again(run: Run) -> None:
    async def story() -> None:
        reception = Reception()
        [listening] = await listen("127.0.0.1", 0, backlog=10)
        starved = Starved(fileno=listening.detach())
        starved.failures = 3
        listener = Listener(reception, [starved])
        began = time.monotonic()
        assert [*await asyncio.gather(said(listener.port), said(listener.port))] == [b"hello"] * 2
        assert time.monotonic() - began > 2.5 * REST_SECONDS
        assert [error.errno for error in reception.failures] == [errno.ENFILE] * 3
        assert starved.attempts <= 3 + 2 * 2  # a connection, and a look if there is another
        listener.close()

    run(story())


def test_a_listener_that_is_closed_while_it_rests_stays_closed(run: Run) -> None:
    async def story() -> None:
        reception = Reception()
        [listening] = await listen("127.0.0.1", 0, backlog=10)
        starved = Starved(fileno=listening.detach())
        starved.failures = 100
        listener = Listener(reception, [starved])
        client = asyncio.create_task(said(listener.port))
        await until(lambda: reception.failures)
        listener.close()
        assert await client == b""
        await asyncio.sleep(1.5 * REST_SECONDS)  # it may not try again
        assert len(reception.failures) == starved.attempts == 1

    run(story())


@pytest.mark.parametrize("closed", [False, True], ids=["in time", "with the listener"])
def test_a_handshake_counts_until_it_ends(run: Run, closed: bool) -> None:
    async def story() -> None:
        tls = ServerTls(Tls(certificate=CERTIFICATE, key=CERTIFICATE, handshake_timeout_ms=60_000 if closed else 300))
        reception = Reception()
        listener = Listener(reception, await listen("127.0.0.1", 0, backlog=10), tls)
        unfinished = [asyncio.create_task(said(listener.port)) for _ in range(3)]
        await until(lambda: len(reception.arriving) == 3)
        if closed:
            listener.close()
        async with asyncio.timeout(PATIENCE_S):
            assert [*await asyncio.gather(*unfinished)] == [b""] * 3
        await until(lambda: not reception.arriving)
        if not closed:
            listener.close()

    run(story())


def test_each_reason_why_a_port_cannot_be_used_has_its_advice() -> None:
    denied = PermissionError(errno.EACCES, "Permission denied")
    assert "a lower net.ipv4.ip_unprivileged_port_start" in cannot_listen("http.tls_port", "::", 443, denied)
    other = OSError(errno.ENOBUFS, "No buffer space available")
    assert cannot_listen("ops.port", "::1", 9, other).endswith(
        "(ops.port): No buffer space available. Set ops.port or ops.host to another"
    )


def test_a_port_that_others_share_among_themselves_is_in_use() -> None:
    with socket.socket() as shared:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind(("127.0.0.1", 0))
        shared.listen()
        port = shared.getsockname()[1]
        with pytest.raises(OSError, match="in use") as failed:
            try_to_listen("localhost", port)
    assert "end that, or set amqp.port to another" in cannot_listen("amqp.port", "localhost", port, failed.value)
    try_to_listen("localhost", port)
