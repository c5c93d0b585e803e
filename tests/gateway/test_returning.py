"""What was received and deleted, and cannot be sent, goes back to its partition until that has it."""

import asyncio
from pathlib import Path
from typing import Any

import msgpack
import pytest

from broker import wire
from broker.catalog.catalog import Definition
from broker.gateway import returning
from broker.namespace.entities import QueueDescription
from broker.wire import ENTRY, Op
from protocol.codec import UByte, UInt
from storage.records import NEVER, encode_message
from tests.end_to_end.raw_peer import ATTACH, CLOSE, FLOW, message, source, target
from tests.gateway.in_process import QUEUE_ID, Client, Worker, gateway_with_workers

RECORD = encode_message(1, NEVER, bytes(16), message(b"m"))


class Scene:
    """A plain queue on partition 0 of two, and a client that receives and deletes, and whose window is closed."""

    def __init__(self) -> None:
        self.gateway, self.workers = gateway_with_workers(Path("/nowhere"), 2)
        self.lives_at(0)
        self.client = Client(self.gateway)
        self.client.connect()
        self.client.say(ATTACH, "link", UInt(0), True, UByte(1), UByte(0), source("orders"), target("here"))
        self.client.say(FLOW, UInt(0), UInt(0), UInt(0), UInt(1000), UInt(0), UInt(0), UInt(1000))
        [link] = self.client.connection.engine.links.values()
        self.channel = link.context._only.number

    def lives_at(self, partition: int) -> None:
        document = Definition(QUEUE_ID >> 3, QueueDescription(name="orders"), 0, 0, (partition,)).document()
        self.workers[0].say([Op.CHANGED, 2 + partition, [["put", document, None]]])

    def deliver(self, count: int = 1) -> list[Any]:
        entries: list[Any] = []
        for number in range(1, count + 1):
            entries += (bytes(8) + number.to_bytes(8, "big"), number, 0, RECORD, None)
        self.workers[0].say([Op.DELIVER, self.channel, 0, entries])
        return entries

    async def restores(self, number: int) -> list[list[Any]]:
        """Those that this worker has got since the last call."""
        return [each for each in await self.workers[number].commands() if each[0] == Op.RESTORE]

    async def restored(self, number: int) -> list[Any]:
        """The next one: its entries, its number, and what it is known by if it comes again."""
        found: list[list[Any]] = []
        for _ in range(1000):
            found = await self.restores(number)
            if found:
                break
            await asyncio.sleep(0.005)
        [[_, partition, queue, entries, request, *marked]] = found
        mark = wire.Mark(*marked)
        assert (partition, queue) == (mark.partition, QUEUE_ID) == (number, QUEUE_ID)
        assert mark.below <= mark.first
        return [entries, request, (mark.sender, mark.first)]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returning, "AGAIN_S", 0.01)


async def test_an_answer_ends_it() -> None:
    scene = Scene()
    entries = scene.deliver(3)
    found, request, _ = await scene.restored(0)
    assert found == entries
    assert scene.gateway.returning.count == 3
    scene.workers[0].say([Op.REPLY, request, None])
    assert scene.gateway.returning.count == 0
    assert scene.gateway.returning.none.is_set()
    await asyncio.sleep(0.05)  # it may not be asked again
    assert await scene.restores(0) == []


@pytest.mark.parametrize("error", ["EntityMoving", "ServerBusy", "PartitionParked", "InternalError"])
@pytest.mark.parametrize("is_there", [True, False], ids=["client", "no client"])
async def test_a_partition_that_cannot_take_it_is_asked_again(error: str, is_there: bool) -> None:
    scene = Scene()
    entries = scene.deliver()
    _, request, _ = await scene.restored(0)
    if not is_there:
        scene.client.say(CLOSE)
        scene.client.transport.abort()
    for _ in range(3):
        scene.workers[0].say([Op.FAILED, request, error, "it says why"])
        found, request, _ = await scene.restored(0)
        assert found == entries
    scene.workers[0].say([Op.REPLY, request, None])
    assert scene.gateway.returning.count == 0


@pytest.mark.parametrize("heard", ["before", "after"])
async def test_it_goes_where_the_entity_lives_by_then(heard: str) -> None:
    """The gateway hears of a move before or after the partition that it has left refuses."""
    scene = Scene()
    entries = scene.deliver()
    _, request, _ = await scene.restored(0)
    if heard == "before":
        scene.lives_at(1)
    scene.workers[0].say([Op.FAILED, request, "EntityMoving", "it says why"])
    if heard == "after":
        scene.lives_at(1)
    found, request, _ = await scene.restored(1)
    assert found == entries
    scene.workers[1].say([Op.REPLY, request, None])
    assert scene.gateway.returning.count == 0


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("has_it", [False, True])
async def test_a_worker_that_dies_is_asked_again_when_it_is_back(moves: bool, has_it: bool) -> None:
    """It alone knows whether it has the message, which may have been moved since with the others."""
    scene = Scene()
    entries = scene.deliver()
    _, _, mark = await scene.restored(0)
    scene.workers[0].lose()
    await asyncio.sleep(0.05)  # it is tried in vain meanwhile
    scene.workers[0] = Worker(scene.workers[0].connection)
    if moves:
        scene.lives_at(1)
    found, request, again = await scene.restored(0)
    assert (found, again) == (entries, mark)
    if has_it or not moves:
        scene.workers[0].say([Op.REPLY, request, None])
    else:
        scene.workers[0].say([Op.FAILED, request, "EntityMoving", "it says why"])
        found, request, _ = await scene.restored(1)
        assert found == entries
        scene.workers[1].say([Op.REPLY, request, None])
    assert scene.gateway.returning.count == 0
    await asyncio.sleep(0.05)  # nor may the other be asked
    assert await scene.restores(1) == []


async def test_while_its_worker_is_away_it_waits() -> None:
    scene = Scene()
    channel = scene.client.connection.engine.links
    scene.workers[0].lose()
    entries = [bytes(16), 1, 0, RECORD, None]
    [link] = channel.values()
    scene.gateway.returning.put_back(link.context.entity, QUEUE_ID, 0, entries)
    await asyncio.sleep(0.05)  # it is tried in vain meanwhile
    scene.workers[0] = Worker(scene.workers[0].connection)
    found, request, _ = await scene.restored(0)
    assert found == entries
    scene.workers[0].say([Op.REPLY, request, None])
    assert scene.gateway.returning.count == 0


async def test_many_messages_go_in_several_requests() -> None:
    """So that each is done wholly or not at all in one turn."""
    scene = Scene()
    entries = scene.deliver(600)
    parts = await scene.restores(0)
    assert [item for part in parts for item in part[3]] == entries
    assert [len(part[3]) // ENTRY for part in parts] == [256, 256, 88]
    assert wire.unpack(msgpack.packb(parts)) == [tuple(part) for part in parts]
    assert all(wire.cut(part) == (part, None) for part in map(tuple, parts))  # type: ignore[arg-type]


async def test_a_worker_of_an_older_version_is_told_as_before() -> None:
    scene = Scene()
    scene.workers[0].lose()
    scene.workers[0].transport.ended = False
    scene.workers[0].transport.connect()
    scene.workers[0].say([Op.HELLO, wire.VERSION_WITH_ANSWERS_TO_RESTORE - 1, [0]])
    entries = scene.deliver()
    [restore] = await scene.restores(0)
    assert restore == [Op.RESTORE, 0, QUEUE_ID, entries]
    assert scene.gateway.returning.count == 0
