"""Of a client's connection to a sidecar that has ended nothing lives on, without Python's search for cycles."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from broker.pairing.options import PairingOptions
from broker.pairing.pairing import Namespace
from broker.pairing.sidecar.connection import Client
from broker.pairing.sidecar.limits import Limits
from broker.pairing.sidecar.service import Setup, Sidecar
from protocol.codec import Described, Symbol, ULong, encode
from protocol.engine.sasl import SASL_HEADER, plain_response
from tests.brokers import KEY, KEY_NAME
from tests.end_to_end.raw_peer import CLOSE, frame_bytes, message
from tests.hostile_input import OPENED, attach, say, transfer
from tests.leftovers import Leftovers
from tests.patience import PATIENCE_S, until
from tests.ports import free_ports
from tests.processes import connection_string
from tests.protocol_client.scripted_peer import ScriptedPeer

INIT = frame_bytes(0, encode(Described(ULong(0x41), [Symbol("ANONYMOUS"), b""])), kind=1)
KEYED = frame_bytes(0, encode(Described(ULong(0x41), [Symbol("PLAIN"), plain_response(KEY_NAME, KEY)])), kind=1)
BEGUN = b"\x00\x53\x75\xb0\x00\x10\x00\x00" + b"x" * 30_000  # of a message of a MiB


class Scene:
    """A client of a sidecar. The primary answers, or is away."""

    def __init__(self, sidecar: Sidecar, peer: ScriptedPeer, port: int) -> None:
        self.sidecar, self.peer, self._port = sidecar, peer, port

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def heard(self, data: bytes) -> None:
        await self.reader.readuntil(data)

    async def open(self) -> None:
        await self.connect()
        await self.say(SASL_HEADER + (KEYED if self.sidecar.is_away else INIT) + OPENED)
        await self.heard(b"\x00\x53\x11")  # begun


State = Callable[[Scene], Coroutine[Any, Any, None]]


async def nothing(scene: Scene) -> None:
    await scene.connect()


async def half_of_sasl(scene: Scene) -> None:
    await scene.connect()
    await scene.say(SASL_HEADER + INIT[:10])


async def an_open_connection(scene: Scene) -> None:
    await scene.open()


async def links(scene: Scene) -> None:
    await scene.open()
    await scene.say(attach(0) + attach(1, sender=False, address="$cbs") + attach(2, address="$cbs"))
    await scene.heard(b"\x00\x53\x12")


async def half_of_a_message(scene: Scene) -> None:
    await links(scene)
    await scene.say(transfer(0, 0, BEGUN, more=True) + transfer(0, None, BEGUN, more=True)[:20_000])


async def a_message_without_an_answer(scene: Scene) -> None:
    await links(scene)
    scene.peer.on_message = lambda link, delivery: None
    await scene.say(transfer(0, 0, message(b"m")))
    await asyncio.sleep(0.02)  # it is read and passed on, where there is a primary


async def a_fault(scene: Scene) -> None:
    await links(scene)
    await scene.say(b"\x00\x00\x00\x01nonsense")
    await asyncio.sleep(0.02)  # it is read, and answered


# -- how it ends


async def lost(scene: Scene) -> None:
    scene.writer.transport.abort()


async def closed_in_order(scene: Scene) -> None:
    await scene.say(say(CLOSE))
    await asyncio.sleep(0.02)  # it is read, and answered
    scene.writer.close()


async def without_its_primary(scene: Scene) -> None:
    side = scene.peer.side
    if side is not None and side.transport is not None:
        side.transport.abort()
    await asyncio.sleep(0.02)  # the sidecar notices
    scene.writer.close()


async def shut_down(scene: Scene) -> None:
    for client in [*scene.sidecar._clients]:
        client.shut_down()
    await asyncio.sleep(0.02)  # it says so
    scene.writer.close()


STATES: list[State] = [
    nothing,
    half_of_sasl,
    an_open_connection,
    links,
    half_of_a_message,
    a_message_without_an_answer,
    a_fault,
]


@pytest.mark.parametrize("is_away", [False, True], ids=["through", "here"])
@pytest.mark.parametrize("end", [lost, closed_in_order, without_its_primary, shut_down], ids=lambda each: each.__name__)
@pytest.mark.parametrize("state", STATES, ids=[state.__name__ for state in STATES])
def test_nothing_of_a_connection_lives_on(state: State, end: State, is_away: bool) -> None:
    async def run() -> None:
        async with ScriptedPeer() as peer:
            nobody, nor_here = free_ports(2)
            primary = Namespace(connection_string(nor_here if is_away else peer.port, KEY_NAME, KEY))
            secondary = Namespace(connection_string(nobody, KEY_NAME, KEY))
            options = PairingOptions(attempt_timeout_ms=100)
            sidecar = Sidecar(Setup("127.0.0.1", 0, primary, secondary, options, "p", limits=Limits(held_seconds=0.2)))
            server = await asyncio.get_running_loop().create_server(lambda: Client(sidecar), "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]

            async def end_one(leftovers: Leftovers | None) -> None:
                peer.__init__()
                sidecar.is_away = is_away
                scene = Scene(sidecar, peer, port)
                await state(scene)
                await until(lambda: sidecar._clients)
                if leftovers is not None:
                    leftovers.ended(*sidecar._clients)
                    engines = [each._here for each in sidecar._clients if each._here is not None]
                    leftovers.ended(*engines, *(each.engine for each in engines))
                    engines.clear()
                await end(scene)
                await until(lambda: not sidecar._clients and (peer.side is None or peer.side.transport is None))
                await until(lambda: not sidecar._held_bytes)  # it is sent on, as far as that goes
                peer.__init__()

            try:
                await end_one(None)
                # While the primary is away, the sidecar's own attempts to reach it make objects of `protocol`.
                with Leftovers("broker", *(() if is_away else ("protocol",))) as leftovers:
                    await end_one(leftovers)
                    await asyncio.sleep(0.02)  # callbacks of what has ended
                    if peer.side is not None:  # it was accepted after its client was lost
                        await until(lambda: peer.side.transport is None)
                        peer.__init__()
            finally:
                server.close()
                if sidecar._looking is not None:
                    sidecar._looking.cancel()
                await sidecar.pairing.close()

    uvloop.run(asyncio.wait_for(run(), PATIENCE_S))
