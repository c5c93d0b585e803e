"""A client that takes its credit back is answered while the worker of its entity is away, and is served afterwards."""

from pathlib import Path

from broker import wire
from broker.wire import Op
from protocol.codec import UInt
from tests.end_to_end.raw_peer import FLOW
from tests.gateway.in_process import Client, Worker, started_gateway

CREDIT = 5


class Scene:
    def __init__(self, directory: Path) -> None:
        gateway, self.worker = started_gateway(directory)
        [self._connection] = gateway.router.workers
        self.client = Client(gateway)
        self.client.connect()
        self.handle = self.client.attach(sender=False, address="orders")

    def flow(self, *, delivery_count: int = 0, drain: bool = False) -> None:
        window = (UInt(0), UInt(1000), UInt(0), UInt(1000))
        self.client.say(FLOW, *window, UInt(self.handle), UInt(delivery_count), UInt(CREDIT), None, drain)

    def is_drained(self) -> bool:
        """The gateway has told so since the last call."""
        return any(
            frame.code == FLOW and frame.fields[4] == self.handle and frame.fields[5:7] == [CREDIT, 0]
            for frame in self.client.frames()
        )

    async def channel(self) -> int:
        """That of the receiver, which the worker has been asked to open."""
        return next(each[2] for each in await self.worker.commands() if each[0] == Op.OPEN_RECEIVER)

    def back(self) -> None:
        assert isinstance(self.worker.connection, type(self._connection))
        self.worker = Worker(self.worker.connection)


async def test_a_drain_that_is_under_way_when_the_worker_is_lost(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    await scene.channel()
    scene.flow(drain=True)
    assert [each[0] for each in await scene.worker.commands()] == [Op.DRAIN]
    assert not scene.is_drained()
    scene.worker.lose()
    assert scene.is_drained()


async def test_a_drain_that_begins_while_the_worker_is_away(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    await scene.channel()
    scene.worker.lose()
    scene.client.frames()
    scene.flow(drain=True)
    assert scene.is_drained()


async def test_a_receiver_that_was_drained_while_its_worker_was_away_is_served_afterwards(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.worker.lose()
    scene.flow(drain=True)
    assert scene.is_drained()
    scene.back()
    channel = await scene.channel()
    scene.worker.say([Op.DRAINED, channel, 0])  # of the client's last flow, which is still in force
    scene.flow(delivery_count=CREDIT)
    assert wire.grant(0, channel, CREDIT) in [tuple(each) for each in await scene.worker.commands()]
