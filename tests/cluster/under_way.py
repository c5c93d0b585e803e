"""What clients have under way while a machine of a namespace is silent, and in which time they are answered."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing
from http.client import HTTPConnection
from typing import Any

from broker.catalog.catalog import home_partition
from protocol.nodes.sas_tokens import generate
from tests.brokers import KEY, KEY_NAME
from tests.cluster.machines import Machine
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, FLOW, TRANSFER, RawPeer, error_of, message
from tests.end_to_end.raw_requests import Node
from tests.end_to_end.test_catalog_at_run_time import receive, send
from tests.patience import PATIENCE_S, eventually

PARTITIONS = 4
SILENCE_S = 3.0
ANSWERED_S = SILENCE_S + 2  # and what a busy machine adds
LATE_S = 1.5
STALL_S = 30.0  # of the workers: they may wait so long for their disks
LOCK_S = 60
SILENT = "does not give a sign of life"
TIMEOUT = "com.microsoft:timeout"


def name_on(partition: int, stem: str) -> str:
    names = (f"{stem}-{index}" for index in range(1000))
    return next(name for name in names if home_partition(name, PARTITIONS) == partition)


HOME_QUEUE, QUEUE, TARGET, SOURCE = (
    name_on(partition, stem) for partition, stem in ((0, "home"), (1, "away"), (3, "target"), (2, "source"))
)
CONFIG = f"""
worker_stall_timeout_ms = {STALL_S * 1000:.0f}

[[queues]]
name = "{HOME_QUEUE}"
lock_duration_ms = {LOCK_S * 1000}

[[queues]]
name = "{QUEUE}"
lock_duration_ms = {LOCK_S * 1000}

[[queues]]
name = "{TARGET}"

[[queues]]
name = "{SOURCE}"
forward_to = "{TARGET}"

[[queues]]
name = "wide"
enable_partitioning = true
"""
HEARTBEATS = f"heartbeat_timeout_ms = {SILENCE_S * 1000:.0f}\n"
ENTRY = (
    '<entry xmlns="http://www.w3.org/2005/Atom"><content type="application/xml">'
    '<QueueDescription xmlns="http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"/></content></entry>'
)


def http(gateway: Machine, method: str, path: str, body: str = "") -> int:
    headers = {"Authorization": generate("http://localhost/", KEY_NAME, KEY, int(time.time()) + 60)}
    with closing(HTTPConnection("localhost", gateway.http_port, timeout=PATIENCE_S)) as connection:
        connection.request(method, path, body, headers)
        return connection.getresponse().status


def sends(peer: RawPeer, queue: str, body: bytes) -> Callable[[], str]:
    handle = peer.attach_sender(queue)

    def run() -> str:
        peer.transfer(message(body), handle)
        return outcome_of(peer)

    return run


def outcome_of(peer: RawPeer) -> str:
    answer = peer.expect(DISPOSITION)
    return "" if answer.fields[4].descriptor == ACCEPTED else error_of(answer)[0]


class UnderWay:
    """What clients have begun when a machine is frozen."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(16)
        self._asked: dict[str, Future[tuple[Any, float]]] = {}

    def begin(self, **operations: Callable[[], Any]) -> None:
        began = time.monotonic()

        def measured(run: Callable[[], Any]) -> tuple[Any, float]:
            return run(), time.monotonic() - began

        self._asked = {name: self._pool.submit(measured, run) for name, run in operations.items()}

    def answers(self) -> dict[str, Any]:
        """All came in time, and none before the silence was noticed."""
        wait(self._asked.values(), PATIENCE_S)
        self._pool.shutdown(wait=False)
        assert not (hung := [name for name, each in self._asked.items() if not each.done()]), hung
        found = {name: each.result() for name, each in self._asked.items()}
        late = {name: (answer, seconds) for name, (answer, seconds) in found.items() if seconds > ANSWERED_S + LATE_S}
        early = {name: (answer, seconds) for name, (answer, seconds) in found.items() if seconds < 0.5}
        assert not late, late
        assert not early, early
        return {name: answer for name, (answer, _) in found.items()}


def answers_while(
    silent: AbstractContextManager[object], gateway: Machine, queue: str, new_queue: str
) -> dict[str, Any]:
    """Answers of this gateway to what begins in `silent`, which makes the worker of the queue silent.

    Afterwards there is nothing in the queue that was not confirmed, and everything that was.
    """
    under_way = UnderWay()
    with (
        RawPeer.connect(gateway.amqp_port) as sender,
        RawPeer.connect(gateway.amqp_port) as receiver,
        RawPeer.connect(gateway.amqp_port) as settler,
        RawPeer.connect(gateway.amqp_port) as asker,
    ):
        send(settler, queue, b"locked")
        settler.attach_receiver(queue, credit=1)
        locked = settler.expect(TRANSFER)
        drains = receiver.attach_receiver(queue, credit=5)
        node = Node(asker, f"{queue}/$management")
        send_one = sends(sender, queue, b"never")

        def drain() -> str:
            receiver.flow(drains, 5, drain=True)
            flow = receiver.expect(FLOW)
            return f"{flow.fields[6]} of credit"

        def complete() -> str:
            settler.settle(locked.fields[1])
            return outcome_of(settler)

        def peek() -> str:
            return node.ask("com.microsoft:peek-message", {"from-sequence-number": 0, "message-count": 1}).condition

        with silent:
            under_way.begin(
                send=send_one,
                drain=drain,
                complete=complete,
                peek=peek,
                http_send=lambda: http(gateway, "POST", f"/{queue}/messages", "never"),
                put=lambda: http(gateway, "PUT", f"/{new_queue}", ENTRY),
            )
            answers = under_way.answers()
        eventually(lambda: gateway.get("/readyz")[0] == 200, "it goes on")
    with RawPeer.connect(gateway.amqp_port) as peer:
        send(peer, queue, b"the last")
        assert receive(peer, queue, 2) == [b"locked", b"the last"]
    return answers


def unknown(put: int) -> dict[str, Any]:
    """What `answers_while` returns. `put`: the status of the change of the catalog."""
    told = {"send": TIMEOUT, "drain": "0 of credit", "complete": TIMEOUT, "peek": TIMEOUT}
    return told | {"http_send": 408, "put": put}
