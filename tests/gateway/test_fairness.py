"""A client whose bytes cost much work is served in steps, and others between them."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from broker.gateway.gateway import Gateway
from protocol.codec import UInt
from tests.end_to_end.raw_peer import BEGIN, CLOSE, message
from tests.gateway.in_process import Client, Worker, started_gateway
from tests.hostile_input import HOSTILE, OPENED, WINDOW, WITH_RIGHTS, attach, say

KIB = 1 << 10

Story = Callable[[Gateway, Worker], Coroutine[Any, Any, None]]


def story(test: Story) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        async def told() -> None:
            await test(*started_gateway(tmp_path))

        asyncio.run(told())

    return run


def connected(gateway: Gateway) -> Client:
    client = Client(gateway)
    client.connect()
    client.frames()
    return client


def stranger(gateway: Gateway) -> Client:
    """A client without SASL and rights, which has opened the connection and a session."""
    client = Client(gateway)
    client.transport.connect()
    client.transport.feed(OPENED)
    del client.transport.written[:8]
    client.frames()
    return client


@story
async def test_others_are_served_between_the_steps(gateway: Gateway, worker: Worker) -> None:
    hostile, honest = stranger(gateway), connected(gateway)
    handle = honest.attach(sender=True, address="orders")
    honest.frames()
    await worker.commands()
    hostile.transport.feed(HOSTILE["links"].of(256 * KIB))
    assert hostile.transport.is_reading_paused
    rounds = 0
    while hostile.transport.is_reading_paused:
        honest.transfer(handle, message(b"x"))
        assert len(await worker.commands()) == 1
        rounds += 1
    assert rounds > 10
    assert not hostile.has_ended


@story
async def test_several_take_turns(gateway: Gateway, worker: Worker) -> None:
    """The one that came first is not done with all before the last one begins."""
    many = [stranger(gateway) for _ in range(10)]
    for each in many:
        each.transport.feed(HOSTILE["links"].of(64 * KIB))
    began: set[int] = set()
    while all(each.transport.is_reading_paused for each in many):
        for number, each in enumerate(many):
            if each.frames():
                began.add(number)
        await asyncio.sleep(0)
    assert began == set(range(10))


@pytest.mark.parametrize("kind", [*HOSTILE, *WITH_RIGHTS])
def test_all_is_done_in_the_end_and_reading_goes_on(kind: str, tmp_path: Path) -> None:
    async def told() -> None:
        gateway, _ = started_gateway(tmp_path)
        hostile = {**HOSTILE, **WITH_RIGHTS}[kind]
        client = connected(gateway) if kind in WITH_RIGHTS else stranger(gateway)
        client.transport.feed(hostile.before)
        client.transport.feed(hostile.of(32 * KIB))
        for _ in range(100_000):
            if not client.transport.is_reading_paused:
                break
            await asyncio.sleep(0)
        assert not client.transport.is_reading_paused
        frames = client.frames()
        assert any(frame.code == CLOSE for frame in frames) == hostile.is_refused
        if not hostile.is_refused:
            client.say(BEGIN, None, UInt(0), UInt(9), UInt(9))
            client.transport.feed(b"")
            await asyncio.sleep(0.01)  # the loop takes some rounds for it

    asyncio.run(told())


@story
async def test_a_large_read_is_followed_by_others(gateway: Gateway, worker: Worker) -> None:
    """Else the event loop reads the same socket again and again while there is more in it."""
    client = connected(gateway)
    handle = client.attach(sender=True, address="orders")
    client.frames()
    read = bytearray()
    client.transport.feed, feed = read.__iadd__, client.transport.feed  # type: ignore[assignment]
    for _ in range(200):
        client.transfer(handle, message(b"x" * 1000))
    feed(bytes(read))
    assert client.transport.is_reading_paused
    for _ in range(100):
        await asyncio.sleep(0)
    assert not client.transport.is_reading_paused


@story
async def test_a_client_that_ends_while_there_is_more_to_do_is_forgotten(gateway: Gateway, worker: Worker) -> None:
    for _ in range(3):
        client = stranger(gateway)
        client.transport.feed(HOSTILE["links"].of(256 * KIB))
        client.transport.abort()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not gateway.connections
    assert not gateway._queue
    assert not gateway.metrics.connection_failures


@story
async def test_a_request_costs_the_same_with_many_links_for_responses(gateway: Gateway, worker: Worker) -> None:
    def requests(count: int) -> float:
        client = connected(gateway)
        handle = client.attach(sender=True, address="orders/$management")
        for channel in range(1, 1 + count):
            client.transport.feed(say(BEGIN, None, UInt(0), WINDOW, WINDOW, UInt(255), channel=channel))
            for each in range(200):
                frame = attach(each, sender=False, address="orders/$management")
                client.transport.feed(frame[:6] + channel.to_bytes(2, "big") + frame[8:])
        client.frames()
        unknown = message(properties=["1", None, None, None, "nobody"], application={"operation": "x"})
        began = time.process_time()
        for _ in range(200):
            client.transfer(handle, unknown)
        return time.process_time() - began

    few, many = min(requests(0) for _ in range(2)), min(requests(10) for _ in range(2))
    assert many < 2 * few + 0.02
