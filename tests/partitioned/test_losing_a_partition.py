"""A worker with some of the fragments dies or hangs while clients use a partitioned queue."""

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from broker.gateway.links.partitioned_senders import BACK_SECONDS
from broker.namespace.fragments import fragment_of
from tests.brokers import Broker
from tests.end_to_end.health import is_ready, worker_of
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, TRANSFER, Frame, RawPeer, body_of, error_of, message
from tests.partitioned.test_partitioned_entities import keyed
from tests.patience import eventually

PARTITIONS, WORKERS = 4, 2
CONFIG = f"""
partitions = {PARTITIONS}
worker_stall_timeout_ms = 6000

[[queues]]
name = "orders"
enable_partitioning = true
"""
IN_FLIGHT = 20
LONGEST_S = 2.0  # a send waits this long at most beside a worker that hangs, on a busy machine


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path, CONFIG, workers=WORKERS) as broker:
        yield broker


class Load(threading.Thread):
    """Sends messages without a key, some in flight at a time, until it is stopped."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.accepted: list[int] = []  # delivery ids, which are the bodies
        self.errors: list[str] = []
        self.slowest_s = 0.0
        self.failed: BaseException | None = None
        self._port = port
        self._ends = threading.Event()

    def run(self) -> None:
        try:
            with RawPeer.connect(self._port) as peer:
                self._send(peer)
        except BaseException as error:
            self.failed = error

    def _send(self, peer: RawPeer) -> None:
        handle = peer.attach_sender("orders")
        began: dict[int, float] = {}
        while not self._ends.is_set() or began:
            while len(began) < IN_FLIGHT and not self._ends.is_set():
                number = peer.transfer(message(b"%d" % peer.next_delivery_id), handle)
                began[number] = time.monotonic()
            for number, condition in outcomes(peer.expect(DISPOSITION)):
                self.slowest_s = max(self.slowest_s, time.monotonic() - began.pop(number))
                if condition:
                    self.errors.append(condition)
                else:
                    self.accepted.append(number)

    def stop(self) -> None:
        self._ends.set()
        self.join()


def key_of(partition: int) -> str:
    keys = (f"key-{index}" for index in range(1000))
    return next(key for key in keys if fragment_of(key.encode(), range(PARTITIONS)) == partition)


def received(broker: Broker) -> Counter[bytes]:
    """Everything that is there."""
    found: Counter[bytes] = Counter()
    with RawPeer.connect(broker.amqp_port) as peer, suppress(TimeoutError):
        peer.attach_receiver("orders", credit=1_000_000)
        while True:
            delivery = peer.expect(TRANSFER, timeout_s=1.0)
            found[body_of(delivery.payload)] += 1
            peer.settle(delivery.fields[1], settled=True)
    return found


def outcomes(answer: Frame) -> list[tuple[int, str]]:
    """Delivery ids of a disposition, and the conditions of their errors; accepted ones have none."""
    first, last = answer.fields[1], answer.fields[2]
    condition = "" if answer.fields[4].descriptor == ACCEPTED else error_of(answer)[0]
    return [(number, condition) for number in range(first, (first if last is None else last) + 1)]


def test_sends_without_a_key_notice_nothing_when_a_worker_dies(broker: Broker) -> None:
    load = Load(broker.amqp_port)
    load.start()
    try:
        for _ in range(3):
            time.sleep(0.7)  # it sends meanwhile
            worker_of(broker, 1).kill()
            eventually(lambda: is_ready(broker), "the worker is back")
    finally:
        load.stop()
    assert load.failed is None, (load.failed, broker.log())
    assert load.errors == []
    assert load.slowest_s < BACK_SECONDS, "what was under way waits for the worker"
    found = received(broker)
    assert found.keys() >= {b"%d" % number for number in load.accepted}, "accepted and lost"
    assert found.total() == len(found), "stored twice"


def test_while_a_worker_is_away_keys_of_its_fragments_wait_and_others_do_not(broker: Broker) -> None:
    gone = worker_of(broker, 1)
    gone.send_signal(signal.SIGSTOP)
    with RawPeer.connect(broker.amqp_port) as peer:
        sender = peer.attach_sender("orders")
        peer.transfer(keyed(key_of(0), b"there"), sender)
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
        gone.kill()
        eventually(lambda: "worker connection lost" in broker.log(), "the gateway knows")
        peer.transfer(keyed(key_of(1), b"away"), sender)
        answer = peer.expect(DISPOSITION)
        # On a busy machine the restart may take longer than anything waits.
        assert answer.fields[4].descriptor == ACCEPTED or error_of(answer)[0] == "com.microsoft:server-busy"
    eventually(lambda: is_ready(broker), "the worker is back")


def test_beside_a_worker_that_hangs_others_serve_receivers_and_senders(broker: Broker) -> None:
    with RawPeer.connect(broker.amqp_port) as peer, RawPeer.connect(broker.amqp_port) as other:
        sender = peer.attach_sender("orders")
        handle = other.attach_receiver("orders", credit=1)  # less than there are fragments
        stopped = worker_of(broker, 1)
        stopped.send_signal(signal.SIGSTOP)
        try:
            for number in range(4):
                peer.transfer(keyed(key_of(2 * (number % 2)), b"%d" % number), sender)
                assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
                began = time.monotonic()
                delivery = other.expect(TRANSFER)
                assert time.monotonic() - began < LONGEST_S
                assert body_of(delivery.payload) == b"%d" % number
                other.settle(delivery.fields[1], settled=True)
                other.flow(handle, 1, delivery_count=number + 1, next_incoming_id=number + 1)
        finally:
            stopped.send_signal(signal.SIGCONT)
    eventually(lambda: is_ready(broker), "the worker goes on")


def test_what_the_dead_worker_had_is_there_when_it_is_back(broker: Broker) -> None:
    with RawPeer.connect(broker.amqp_port) as peer:
        sender = peer.attach_sender("orders")
        for number in range(40):
            peer.transfer(message(b"%d" % number), sender)
            assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
        receiver = peer.attach_receiver("orders", credit=10)
        held = [peer.expect(TRANSFER) for _ in range(10)]
        worker_of(broker, 1).kill()
        eventually(lambda: is_ready(broker), "the worker is back")
        for delivery in held:
            peer.settle(delivery.fields[1])
        answers: list[tuple[int, str]] = []
        while len(answers) < len(held):
            answers += outcomes(peer.expect(DISPOSITION))
        lost = sum(bool(condition) for _, condition in answers)
        assert 0 < lost < len(held)
        peer.detach(receiver)
    assert received(broker).total() == 40 - len(held) + lost
