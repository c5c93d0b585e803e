"""What a gateway tells the home of the temporary entities that its links hold."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from broker import wire
from broker.catalog.catalog import Definition
from broker.namespace.entities import QueueDescription
from broker.wire import Op
from protocol.codec import UByte, UInt
from tests.end_to_end.raw_peer import ATTACH, DETACH, error_of, source, target
from tests.gateway.in_process import Client, Worker, started_gateway

ENTITY_ID = 77


class Scene:
    """A client that makes temporary queues, and the home that is asked for them."""

    def __init__(self) -> None:
        self.gateway, self.home = started_gateway(Path("/nowhere"))
        self.client = Client(self.gateway)
        self.client.connect()
        self.client.frames()

    def attach(self, handle: int) -> None:
        ends = source("here"), target(None, dynamic=True)
        self.client.say(ATTACH, f"link-{handle}", UInt(handle), False, UByte(2), UByte(0), *ends, None, None, UInt(0))

    async def asked(self) -> tuple[int, list[Any]]:
        """The number of the next request, and the change that it asks for."""
        [[op, _, number, name, _, change]] = await requests(self.home)
        assert (op, name) == (Op.REQUEST, "change-catalog")
        return number, change

    async def made(self, handle: int) -> int:
        """Make a queue. Returns the number of its holder."""
        self.attach(handle)
        number, [what, kind, fields, rules, holder] = await self.asked()
        assert (what, kind, rules) == ("provide", "queue", None)
        document = Definition(ENTITY_ID, QueueDescription(**fields), 0, 0, (0,), temporary=True).document()
        self.home.say(wire.changed(2, [["put", document, None]]), wire.reply(number, document))
        attached = next(frame for frame in self.client.frames() if frame.code == ATTACH)
        assert attached.fields[6].value[0] == fields["name"]
        return int(holder)


async def requests(home: Worker) -> list[list[Any]]:
    for _ in range(1000):
        found = [each for each in await home.commands() if each[0] == Op.REQUEST]
        if found:
            return found
        await asyncio.sleep(0.005)
    raise AssertionError("nothing was asked")


async def test_a_link_that_ends_releases_what_it_held() -> None:
    scene = Scene()
    holder = await scene.made(0)
    scene.client.say(DETACH, UInt(0), True)
    assert (await scene.asked())[1] == ["release", holder]


async def test_a_release_that_is_not_taken_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.gateway.holding.AGAIN_SECONDS", 0.0)
    scene = Scene()
    holder = await scene.made(0)
    scene.client.say(DETACH, UInt(0), True)
    for _ in range(3):
        number, change = await scene.asked()
        assert change == ["release", holder]
        scene.home.say(wire.failed(number, "ServerBusy", "not now"))
    number, change = await scene.asked()
    scene.home.say(wire.reply(number, None))
    await asyncio.sleep(0.02)
    assert not [each for each in await scene.home.commands() if each[0] == Op.REQUEST]


async def test_a_link_whose_queue_is_not_made_is_refused_and_holds_nothing() -> None:
    scene = Scene()
    scene.attach(0)
    number, change = await scene.asked()
    scene.home.say(wire.failed(number, "ServerBusy", "not now"))
    detached = next(frame for frame in scene.client.frames() if frame.code == DETACH)
    assert error_of(detached)[0] == "com.microsoft:server-busy"
    assert (await scene.asked())[1] == ["release", change[-1]]


async def test_a_link_that_ends_before_its_queue_is_there_releases_it_behind() -> None:
    scene = Scene()
    scene.attach(0)
    number, change = await scene.asked()
    scene.client.say(DETACH, UInt(0), True)
    assert (await scene.asked())[1] == ["release", change[-1]]
    scene.home.say(wire.reply(number, {}))
    assert scene.client.transport.ended is False


async def test_a_link_whose_queue_is_perhaps_made_when_the_home_dies_asks_the_next_home() -> None:
    scene = Scene()
    scene.attach(0)
    _, change = await scene.asked()
    scene.home.lose()
    assert scene.client.frames() == []
    scene.home = Worker(scene.home.connection)
    number, again = await scene.asked()
    assert again == change
    document = Definition(ENTITY_ID, QueueDescription(**change[2]), 0, 0, (0,), temporary=True).document()
    scene.home.say(wire.changed(2, [["put", document, None]]), wire.reply(number, document))
    assert ATTACH in [frame.code for frame in scene.client.frames()]


async def test_a_link_that_has_ended_when_the_home_dies_asks_for_nothing_again() -> None:
    """Else the entity would be held for nobody."""
    scene = Scene()
    scene.attach(0)
    await scene.asked()
    scene.client.say(DETACH, UInt(0), True)
    scene.home.lose()
    scene.home = Worker(scene.home.connection)
    await asyncio.sleep(0.02)
    assert not [each for each in await scene.home.commands() if each[0] == Op.REQUEST]
