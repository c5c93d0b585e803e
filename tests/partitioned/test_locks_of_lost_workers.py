"""Locks end with the process of their worker: nothing brings them back to life, and nothing of that process goes on."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.brokers import Broker
from tests.end_to_end.health import is_ready, logged, worker_of
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, TRANSFER, Frame, RawPeer, body_of, error_of
from tests.end_to_end.raw_requests import Node, Response
from tests.partitioned.operations import FAULTY, PARTITIONS, WORKERS, answered, keyed, tokens_of
from tests.patience import eventually

STALL_MS = 3000
CONFIG = f"""
partitions = {PARTITIONS}
worker_stall_timeout_ms = {STALL_MS}

[[queues]]
name = "orders"
enable_partitioning = true
"""
LOCK_LOST, UNKNOWN = "com.microsoft:message-lock-lost", "com.microsoft:timeout"
LOST = range(FAULTY, PARTITIONS, WORKERS)  # partitions of the worker that is lost


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path, CONFIG, workers=WORKERS) as broker:
        yield broker
    assert "Traceback" not in broker.log_file.read_text(), broker.log()


def killed(broker: Broker) -> None:
    worker_of(broker, FAULTY).kill()
    eventually(lambda: logged(broker, "worker connected again"), "it is replaced")


def hung(broker: Broker) -> None:
    """With its checkpointer. Both are told to go on when the new worker is there, should anything of them be left."""
    worker = worker_of(broker, FAULTY)
    processes = [worker, *worker.children()]
    assert len(processes) == 2
    for each in processes:
        each.suspend()
    eventually(lambda: logged(broker, "worker connected again"), "it is replaced")
    for each in processes:
        assert not each.is_running() or each.status() == psutil.STATUS_ZOMBIE, "both write to the same log"
        with suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGCONT)


def settle(node: Node, *deliveries: Frame) -> Response:
    body = {"disposition-status": "completed", "lock-tokens": tokens_of(*deliveries)}
    return node.ask("com.microsoft:update-disposition", body)


def renew(node: Node, *deliveries: Frame) -> Response:
    return node.ask("com.microsoft:renew-lock", {"lock-tokens": tokens_of(*deliveries)})


def store(peer: RawPeer, *bodies: bytes) -> None:
    """One for each of the partitions, in their order."""
    sender = peer.attach_sender("orders")
    for partition, body in enumerate(bodies):
        peer.transfer(keyed(partition, body), sender)
    assert answered(peer, len(bodies)) == ""


def received(peer: RawPeer, count: int) -> dict[int, Frame]:
    """Deliveries by the partition in their tokens, in the order of time of those of one partition."""
    peer.attach_receiver("orders", credit=count)
    deliveries = [peer.expect(TRANSFER) for _ in range(count)]
    return {int.from_bytes(bytes(each.fields[2])[:2], "big"): each for each in deliveries}


@pytest.mark.parametrize("lose", [killed, hung])
def test_tokens_of_a_lost_worker_are_refused_by_its_replacement(broker: Broker, lose: Callable[[Broker], None]) -> None:
    with RawPeer.connect(broker.amqp_port) as peer, RawPeer.connect(broker.amqp_port) as other:
        store(peer, *[b"%d" % partition for partition in range(PARTITIONS)])
        held = received(peer, PARTITIONS)
        assert held.keys() == set(range(PARTITIONS))
        lose(broker)
        eventually(lambda: is_ready(broker), "all are served")
        again = received(other, len(LOST))
        assert again.keys() == set(LOST), "those of the others are still locked"
        node = Node(other, "orders/$management")
        for partition, delivery in held.items():
            expected = LOCK_LOST if partition in LOST else "None"
            assert renew(node, delivery).condition == expected
        for partition in LOST:
            assert settle(node, held[partition]).condition == LOCK_LOST
            peer.settle(held[partition].fields[1])
            assert error_of(peer.expect(DISPOSITION))[0] == LOCK_LOST
            # All that did nothing to the lock of the new delivery.
            assert bytes(again[partition].fields[2]) != bytes(held[partition].fields[2])
            assert renew(node, again[partition]).status == 200
            assert settle(node, again[partition]).status == 200
        for partition in held.keys() - set(LOST):
            peer.settle(held[partition].fields[1])
            assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_a_hung_worker_that_goes_on_just_before_its_end_has_done_what_it_answered_and_no_more(
    broker: Broker, delay_s: float
) -> None:
    with RawPeer.connect(broker.amqp_port) as peer:
        store(peer, *[b"%d" % partition for partition in range(PARTITIONS)])
        held = received(peer, PARTITIONS)
        worker = worker_of(broker, FAULTY)
        worker.suspend()
        for partition in LOST:
            peer.settle(held[partition].fields[1])
        peer.wait_until_read()  # the commands are in the worker's socket
        worker.resume()
        time.sleep(delay_s)
        worker.kill()
        answers = {}
        while len(answers) < len(LOST):
            answer = peer.expect(DISPOSITION)
            first, last = answer.fields[1], answer.fields[2]
            is_done = answer.fields[4].descriptor == ACCEPTED
            assert is_done or error_of(answer)[0] == UNKNOWN
            answers.update(dict.fromkeys(range(first, (first if last is None else last) + 1), is_done))
        eventually(lambda: logged(broker, "worker connected again"), "it is replaced")
        eventually(lambda: is_ready(broker), "all are served")
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_receiver("orders", credit=10)
        found = set()
        with suppress(TimeoutError):
            while True:
                found.add(body_of(peer.expect(TRANSFER, 1.0).payload))
    for partition, delivery in held.items():
        if partition not in LOST:
            assert b"%d" % partition in found
        elif answers[delivery.fields[1]]:
            assert b"%d" % partition not in found, "its completion was confirmed"
