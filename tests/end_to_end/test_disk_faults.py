"""A broker on a real disk that becomes read-only, fails, hangs or is full: what clients and operators see."""

import time
from contextlib import suppress

import pytest

from tests.brokers import Broker
from tests.end_to_end.health import elsewhere, eventually, logged, process_of, serves
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, TRANSFER, RawPeer, body_of, message
from tests.own_disk import broker_on, own_disk_or_skip

STALL_MS = 3000
PATIENCE_S = 20.0
QUEUES = ("orders", elsewhere("orders"))  # on two partitions
CONFIG = f"""
partitions = 2
workers = 1
worker_stall_timeout_ms = {STALL_MS}
[store]
min_free_disk_bytes = 1048576
log_bytes = 8388608
[[queues]]
name = "witness"
[[queues]]
name = "{QUEUES[0]}"
[[queues]]
name = "{QUEUES[1]}"
"""


@pytest.fixture
def disk(tmp_path):
    with own_disk_or_skip(tmp_path) as disk:
        yield disk


@pytest.fixture
def broker(disk, tmp_path):
    broker = broker_on(disk, tmp_path / "broker", CONFIG)
    try:
        broker.start()
        yield broker
        broker.stop()
        assert "Traceback" not in broker.log_file.read_text(), broker.log()
    finally:
        broker.kill()


def send(broker: Broker, count: int) -> dict[str, list[bytes]]:
    """The bodies that were accepted, by queue."""
    bodies: dict[str, list[bytes]] = {}
    with RawPeer.connect(broker.amqp_port) as peer:
        handles = {queue: peer.attach_sender(queue) for queue in QUEUES}
        for number in range(count):
            for queue, handle in handles.items():
                bodies.setdefault(queue, []).append(b"%d in %s at %f" % (number, queue.encode(), time.monotonic()))
                peer.transfer(message(bodies[queue][-1]), handle)
                assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    return bodies


def received(broker: Broker, most: int) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for queue in QUEUES:
        with RawPeer.connect(broker.amqp_port) as peer, suppress(TimeoutError):
            peer.attach_receiver(queue, credit=most)
            while True:
                found.setdefault(queue, []).append(body_of(peer.expect(TRANSFER, 1).payload))
    return found


def nothing_is_accepted(broker: Broker, within_s: float) -> None:
    """Sends are refused, or not answered, and nobody receives."""
    with RawPeer.connect(broker.amqp_port) as peer:
        handles = []
        for queue in QUEUES:
            with suppress(AssertionError, TimeoutError):  # it is refused, too
                handles.append(peer.attach_sender(queue))
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            for handle in handles:
                peer.transfer(message(b"never accepted"), handle)
            with suppress(TimeoutError):
                while True:
                    assert peer.expect(DISPOSITION, 0.2).fields[4].descriptor != ACCEPTED


@pytest.mark.parametrize("how", ["make_read_only", "fail"])
def test_a_disk_that_fails_ends_the_worker_until_it_is_mounted_again_and_nothing_accepted_is_lost(disk, broker, how):
    bodies = send(broker, 20)
    disk.run("sync", "--file-system", str(disk.path))  # no page is dirty, so each write needs the disk again
    before = process_of(broker, "broker.worker")
    getattr(disk, how)()
    nothing_is_accepted(broker, 3)
    before.wait(PATIENCE_S)
    text = {"make_read_only": "Read-only file system", "fail": "Input/output error"}[how]
    assert logged(broker, f"store failed.*{text}|{text}.*store failed"), broker.log()
    eventually(lambda: logged(broker, f"cannot be written: .*{text}.*process cannot serve"), "named at the next start")
    assert broker.get("/readyz")[0] == 503
    broker.stop()
    disk.mount_again()
    broker.start()
    found = received(broker, 50)
    assert {queue: [body for body in found[queue] if body != b"never accepted"] for queue in QUEUES} == bodies
    serves(broker.amqp_port)


def test_a_disk_that_hangs_holds_up_answers_until_it_goes_on_and_nothing_accepted_is_lost(disk, broker):
    bodies = send(broker, 20)
    before = process_of(broker, "broker.worker")
    disk.hang()
    try:
        nothing_is_accepted(broker, STALL_MS / 1000 + 2)
        assert logged(broker, "process stalled")
        assert broker.get("/readyz")[0] == 503
        assert before.is_running(), "nothing ends a process that waits for its disk"
    finally:
        disk.go_on()
    before.wait(PATIENCE_S)
    eventually(lambda: broker.get("/readyz")[0] == 200, "it serves", PATIENCE_S)
    found = received(broker, 50)
    assert {queue: [body for body in found[queue] if body != b"never accepted"] for queue in QUEUES} == bodies
    serves(broker.amqp_port)
