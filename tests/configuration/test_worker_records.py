"""Of a gateway, or another worker, that is lost, nothing lives on in a worker, without Python's search for cycles."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from broker.namespace.entities import Description, QueueDescription
from broker.wire import Op, Operation, Outcome, SendOperation, SettleOperation, pack_operations
from broker.worker.peer import Peer
from storage.queue_ids import queue_id_of
from tests.configuration.workers_in_process import Workers, frame
from tests.leftovers import Leftovers

T0 = 1_000_000
ENTITIES: list[Description] = [
    QueueDescription(name="plain", max_delivery_count=1000, enable_partitioning=True),
    QueueDescription(name="sessions", requires_session=True, enable_partitioning=True),
]
PLAIN, SESSIONS = (queue_id_of(entity_id) for entity_id in (1, 2))
MESSAGE = [bytes(16), b"body", None, None]
LARGE = [bytes(16), bytes(4 << 20), None, None]
TRANSACTION = b"t" * 16


def request(number: int, name: str, queue: int, *arguments: Any) -> list[Any]:
    return [Op.REQUEST, 0, number, name, queue, [*arguments]]


def transact(number: int, begins: bool, operation: Operation) -> list[Any]:
    return request(number, "transact", 0, TRANSACTION, begins, pack_operations([operation]))


Said = list[list[Any]]
SENT: Said = [[Op.SEND, 0, 1, PLAIN, [MESSAGE] * 3]]
OPENED: Said = [[Op.OPEN_RECEIVER, 0, 2, PLAIN, False, None]]
SAID: dict[str, Said] = {
    "nothing": [],
    "sends": [[Op.TAKES_RUNS, True], [Op.MARK, 0, 1, b"s" * 16, 1, 3, 1], *SENT],
    "a receiver that waits": [*OPENED, [Op.GRANT, 0, 2, 10]],
    "a receiver that watches": [*OPENED, [Op.WATCH, 0, 2], *SENT],
    "locked messages": [*SENT, *OPENED, [Op.GRANT, 0, 2, 10]],
    "a large delivery": [[Op.SEND, 0, 1, PLAIN, [LARGE]], *OPENED, [Op.GRANT, 0, 2, 10]],
    "a selective receiver": [
        *SENT,
        [Op.OPEN_SELECTIVE, 0, 2, PLAIN, False, None, "JMSPriority > 5"],
        [Op.GRANT, 0, 2, 9],
    ],
    "a drain": [*OPENED, [Op.DRAIN, 0, 2, 10]],
    "a browser that waits": [[Op.AWAIT, 0, 2, PLAIN, 1 << 40]],
    "a session": [[Op.OPEN_RECEIVER, 0, 2, SESSIONS, False, ["s", 0]], [Op.GRANT, 0, 2, 10]],
    "waits for a session": [[Op.OPEN_RECEIVER, 0, 2, SESSIONS, False, [None, 60_000]]],
    "waits for a session that is locked": [
        [Op.OPEN_RECEIVER, 0, 2, SESSIONS, False, ["s", 0]],
        [Op.OPEN_RECEIVER, 0, 3, SESSIONS, False, ["s", 60_000]],
    ],
    "a transaction": [transact(1, True, SendOperation(PLAIN, False, [[MESSAGE]]))],
    "a refused transaction": [
        transact(1, True, SendOperation(1 << 40, False, [[MESSAGE]])),
        transact(2, False, SettleOperation(PLAIN, False, [bytes(16)], Outcome.ACCEPTED)),
        request(3, "discharge", 0, b"u" * 16, True),
    ],
    "refused messages": [[Op.SEND, 0, 1, 1 << 40, [MESSAGE] * 3], [Op.SEND_BATCH, 0, 1, 1 << 40, [MESSAGE] * 3]],
    "refused settlements": [[Op.SETTLE, 0, PLAIN, Outcome.ACCEPTED, [1, 2], [bytes(16), bytes(15) + b"a"], None]],
    "a session whose lock is lost": [
        *OPENED,
        [Op.OPEN_RECEIVER, 0, 3, SESSIONS, False, ["s", 0]],
        request(1, "set-session-state", SESSIONS, 3, "s", b"state"),
        request(2, "set-session-state", SESSIONS, 3, "t", b"state"),
        [Op.CLOSE_RECEIVER, 0, 3, True, None],
    ],
    "requests": [*SENT, *(request(n, "peek", PLAIN, 0, 10, 1000) for n in range(1, 600))],
    "a purge": [*SENT, request(1, "delete-batch", PLAIN, 100, 1 << 50)],
    "a failed request": [request(1, "settle", PLAIN, [bytes(16)], Outcome.ACCEPTED, None)],
    "a wrong receiver": [[Op.OPEN_RECEIVER, 0, 2, 1 << 40, False, None]],
    "a follower": [[Op.STORES, [[1, b"i" * 16]]], [Op.JOIN, [], []]],
    "a change": [[Op.JOIN, [], []], request(1, "change-catalog", 0, "delete", "queue", "nothing")],
    "forwards": [[Op.FORWARD, 0, b"i" * 16, 1, PLAIN, 1, []]],
}


@contextmanager
def workers() -> Iterator[Workers]:
    found = Workers(ENTITIES, 2, 2, T0)
    try:
        found.connect()
        yield found
    finally:
        found.close()


def write(gateway: socket.socket, data: bytes, found: Workers) -> None:
    gateway.setblocking(False)
    while data:
        with suppress(BlockingIOError):
            data = data[gateway.send(data) :]
            continue
        found.settle(1)


def end(found: Workers) -> None:
    """Longer than a lock lives, and a session is waited for."""
    for _ in range(8):
        found.settle()
        found.now_ms += 10_000


@pytest.mark.parametrize(
    "rest", [b"", frame([Op.SEND, 0, 1, PLAIN, [LARGE]])[: 1 << 20]], ids=["whole", "half a frame"]
)
@pytest.mark.parametrize("turns", [0, 1, 5])
@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_nothing_of_a_gateway_lives_on(said: Said, turns: int, rest: bytes) -> None:
    with workers() as found:
        worker = found._running[0][0]

        def end_one(leftovers: Leftovers | None) -> None:
            known = set(worker._peers)
            gateway = found.client(0)
            found.settle(2)
            [descriptor] = set(worker._peers) - known
            write(gateway, (frame(*said) if said else b"") + rest, found)
            found.settle(turns)
            if leftovers is not None:
                caller = worker._peers[descriptor]
                leftovers.ended(caller, caller.socket)
                del caller
            gateway.close()
            end(found)

        for _ in range(2):
            end_one(None)
        with Leftovers("broker.worker") as leftovers:
            for _ in range(2):
                end_one(leftovers)


def test_nothing_of_a_worker_lives_on() -> None:
    with workers() as found:

        def end_one(leftovers: Leftovers | None) -> None:
            worker = found._running[0][0]
            peers: list[Peer] = [*worker._peers.values(), *worker._neighbours._links.values()]
            assert peers
            if leftovers is not None:
                leftovers.ended(*peers, *(each.socket for each in peers))
            del peers, worker
            found.kill(1)
            end(found)
            found.start(1)
            found.connect()
            found.settle()

        for _ in range(2):
            end_one(None)
        with Leftovers("broker.worker") as leftovers:
            for _ in range(2):
                end_one(leftovers)
