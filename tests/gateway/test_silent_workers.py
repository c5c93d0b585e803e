"""When a gateway takes a worker for stalled."""

from pathlib import Path
from typing import Any

import pytest

from broker.gateway.router import LOOK_SECONDS, WorkerConnection
from broker.wire import Op
from tests.end_to_end.raw_peer import message
from tests.gateway.in_process import Client, started_gateway

LOOKS = 3  # until it is stalled


class Scene:
    """A client that sends to a queue of the only worker."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def begin(self) -> None:
        """In the test's loop."""
        gateway, self.worker = started_gateway(self._directory)
        gateway.router.busy_seconds = LOOKS * LOOK_SECONDS
        [self.connection] = gateway.router.workers
        self._client = Client(gateway)
        self._client.connect()
        self._handle = self._client.attach(sender=True, address="orders")

    async def send(self) -> list[Any]:
        """The command that the worker got."""
        self._client.transfer(self._handle, message(b"m"))
        return [command for command in await self.worker.commands() if command[0] == Op.SEND][-1]

    def look(self, times: int) -> None:
        for _ in range(times):
            self.connection._look()

    def answer(self, command: list[Any]) -> None:
        self.worker.say([Op.SENT, command[2], 1])


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_a_worker_that_does_not_answer_is_stalled_until_it_does(scene: Scene) -> None:
    scene.begin()
    command = await scene.send()
    scene.look(LOOKS - 1)
    assert is_usable(scene.connection)
    scene.look(1)
    assert not is_usable(scene.connection)
    scene.answer(command)
    assert is_usable(scene.connection)


async def test_a_worker_that_answers_is_not_stalled_though_something_is_under_way_at_each_look(scene: Scene) -> None:
    """As under load: the answer to the last command may come just behind a look."""
    scene.begin()
    for _ in range(2 * LOOKS):
        command = await scene.send()
        scene.look(1)
        assert is_usable(scene.connection)
        scene.answer(command)


async def test_a_worker_that_has_nothing_to_answer_is_not_stalled(scene: Scene) -> None:
    scene.begin()
    scene.answer(await scene.send())
    scene.look(2 * LOOKS)
    assert is_usable(scene.connection)


def is_usable(connection: WorkerConnection) -> bool:
    return connection.is_usable
