"""Of an ended connection between a gateway and a worker nothing lives on, without Python's search for cycles."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from broker import requests, wire
from broker.cluster.silence import Patience
from broker.gateway.router import Router
from broker.gateway.worker_socket import SocketConnection
from broker.gateway.worker_tcp import TcpConnection
from broker.metrics import GatewayMetrics
from broker.wire import Op
from broker.worker.listening import TcpListener, UnixListener
from broker.worker.peer import Peer
from tests.configuration.workers_in_process import frame
from tests.leftovers import Leftovers
from tests.patience import until


class Owner:
    """Who waits for answers."""

    def __init__(self) -> None:
        self.replies: list[Any] = []

    def flush(self) -> None: ...

    def fail(self, error: Exception) -> None:
        raise error

    def on_reply(self, answer: Any, error: Exception | None) -> None:
        self.replies.append(error)


class Scene:
    """Both ends of one connection, which have greeted."""

    def __init__(self, connection: SocketConnection, peer: Peer, owner: Owner) -> None:
        self.connection, self.peer, self.owner = connection, peer, owner

    def ask(self, size: int = 10) -> None:
        self.connection.request(0, 0, requests.Stored(bytes(size)), self.owner.on_reply, self.owner)


State = Callable[[Scene], None]


def nothing(scene: Scene) -> None: ...


def unanswered_requests(scene: Scene) -> None:
    scene.ask()
    scene.ask()
    scene.connection.send()
    scene.peer.read()


def commands_that_are_not_sent(scene: Scene) -> None:
    scene.ask()
    scene.connection.settle(0, 8, wire.Outcome.ACCEPTED, 1, [b"t" * 16])


def commands_that_are_not_read(scene: Scene) -> None:
    scene.ask(20 << 20)
    scene.connection.send()
    scene.peer.read()  # the begin of the frame


def half_of_a_frame(scene: Scene) -> None:
    scene.ask()
    scene.connection.send()
    scene.peer.socket.send(frame([Op.SENT, 1, 1])[:7])


def half_of_a_large_frame(scene: Scene) -> None:
    scene.peer.socket.send((5 << 20).to_bytes(4, "big") + bytes(1000))


def answers_that_are_not_written(scene: Scene) -> None:
    scene.ask()
    scene.peer.answers.append(wire.opened(1, "s" * (20 << 20)))
    scene.peer.hold_answers()
    scene.peer.release()
    scene.peer.write()
    scene.peer.answers.append(wire.opened(1))
    scene.peer.hold_answers()


STATES: list[State] = [
    nothing,
    unanswered_requests,
    commands_that_are_not_sent,
    commands_that_are_not_read,
    half_of_a_frame,
    half_of_a_large_frame,
    answers_that_are_not_written,
]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("network", ["unix", "tcp"])
@pytest.mark.parametrize("state", STATES, ids=[state.__name__ for state in STATES])
def test_nothing_of_a_connection_lives_on(state: State, network: str, run: Callable[..., Any], tmp_path: Path) -> None:
    async def main() -> None:
        listener: UnixListener | TcpListener
        if network == "unix":
            name = str(tmp_path / "worker")
            listener = UnixListener(name)
        else:
            listener = TcpListener("127.0.0.1:0", None)
            name = f"127.0.0.1:{listener.port}"

        def make(address: str, router: Router) -> SocketConnection:
            if network == "unix":
                return SocketConnection(address, router)
            return TcpConnection(address, router, None, Patience(silence_ms=3000, stall_ms=9000))

        router = Router([name], 1, GatewayMetrics(), lambda _: None, make, busy_seconds=1000)
        [connection] = router.workers
        assert isinstance(connection, SocketConnection)

        async def end_one(leftovers: Leftovers | None, worker_ends: bool) -> None:
            await connection._connect()
            peer = Peer(listener.accept())
            peer.socket.send(frame([Op.HELLO, wire.VERSION, [0]]))
            await until(connection.connected.is_set)
            scene = Scene(connection, peer, Owner())
            state(scene)
            await asyncio.sleep(0.01)  # the gateway reads what there is
            if leftovers is not None:
                leftovers.ended(peer, scene.owner, peer.socket)
            if worker_ends:
                peer.close()
            else:
                connection._end()
            await until(lambda: not connection.connected.is_set())
            if not worker_ends:
                peer.close()
            await asyncio.sleep(0.005)  # the loop takes some rounds for it

        for worker_ends in (True, False):
            await end_one(None, worker_ends)
        with Leftovers("broker", "protocol") as leftovers:
            for worker_ends in (True, False):
                await end_one(leftovers, worker_ends)
        assert not connection._requests
        assert connection.run is None
        listener.close()

    run(main())
