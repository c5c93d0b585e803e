"""A broker on a real disk that becomes read-only, fails, hangs or is full: what clients and operators see."""

import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest

from tests.brokers import Broker, running
from tests.end_to_end.health import elsewhere, is_ready, logged, metrics, serves
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, TRANSFER, Closed, RawPeer, body_of, error_of, message
from tests.own_disk import OwnDisk, broker_on, own_disk_or_skip
from tests.patience import PATIENCE_S, eventually

STALL_MS = 3000
QUEUES = ("orders", elsewhere("orders"))  # on two partitions
CONFIG = f"""
partitions = 2
worker_stall_timeout_ms = {STALL_MS}
[store]
min_free_disk_bytes = 8388608
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


def running_on(disk: OwnDisk, directory: Path, workers: int) -> AbstractContextManager[Broker]:
    return running(broker_on(disk, directory, CONFIG, workers))


@pytest.fixture
def broker(disk, tmp_path):
    with running_on(disk, tmp_path / "broker", 1) as broker:
        yield broker


@pytest.fixture
def one_process(disk, tmp_path):
    with running_on(disk, tmp_path / "broker", 0) as broker:
        yield broker


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
    before = broker.worker()
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
    before = broker.worker()
    disk.hang()
    try:
        nothing_is_accepted(broker, STALL_MS / 1000 + 2)
        assert logged(broker, "process stalled")
        assert broker.get("/readyz")[0] == 503
        assert before.is_running(), "nothing ends a process that waits for its disk"
    finally:
        disk.go_on()
    before.wait(PATIENCE_S)
    eventually(lambda: broker.get("/readyz")[0] == 200, "it serves")
    found = received(broker, 50)
    assert {queue: [body for body in found[queue] if body != b"never accepted"] for queue in QUEUES} == bodies
    serves(broker.amqp_port)


def refused_until_closed(peer: RawPeer, handle: int) -> None:
    """Sends are not answered, or refused if the checkpointer was the first to meet the fault."""
    until = time.monotonic() + PATIENCE_S
    with suppress(Closed, ConnectionError):
        while time.monotonic() < until:
            peer.transfer(message(b"never accepted"), handle)
            assert peer.expect(DISPOSITION, PATIENCE_S).fields[4].descriptor != ACCEPTED
        raise AssertionError("the connection stays open")


def test_one_process_on_a_disk_that_fails_ends_until_it_is_mounted_again(disk, one_process):
    broker = one_process
    bodies = send(broker, 20)
    disk.run("sync", "--file-system", str(disk.path))
    before = broker.worker()
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_sender(QUEUES[0])
        disk.fail()
        refused_until_closed(peer, handle)
    before.wait(PATIENCE_S)
    assert logged(broker, "store failed.*Input/output error|Input/output error.*store failed"), broker.log()
    eventually(lambda: logged(broker, "cannot be written: .*process cannot serve"), "named at the next start")
    assert not is_ready(broker)
    broker.stop()
    disk.mount_again()
    broker.start()
    found = received(broker, 50)
    assert {queue: [body for body in found[queue] if body != b"never accepted"] for queue in QUEUES} == bodies


def test_one_process_on_a_disk_that_hangs_answers_nothing_and_is_replaced_when_it_goes_on(disk, one_process):
    broker = one_process
    bodies = send(broker, 20)
    before = broker.worker()
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_sender(QUEUES[0])
        disk.hang()
        try:
            peer.transfer(message(b"never accepted"), handle)
            eventually(lambda: logged(broker, "process stalled"), "noticed")
            assert before.is_running(), "nothing ends a process that waits for its disk"
            with pytest.raises(OSError, match="timed out"):
                broker.get("/livez", timeout_s=0.5)
        finally:
            disk.go_on()
        with pytest.raises(Closed):
            peer.expect(DISPOSITION, PATIENCE_S)
    before.wait(PATIENCE_S)
    eventually(lambda: is_ready(broker), "it serves")
    found = received(broker, 50)
    assert {queue: [body for body in found[queue] if body != b"never accepted"] for queue in QUEUES} == bodies


FULL = "amqp:resource-limit-exceeded"
ROUNDS, A_ROUND = 4, 150


def store_many(broker: Broker, count: int) -> list[bytes]:
    """Send to the first queue, several at a time; all are accepted."""
    bodies = [b"%d of many " % number + bytes(500) for number in range(count)]
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_sender(QUEUES[0])
        for at in range(0, count, 50):
            some = bodies[at : at + 50]
            for body in some:
                peer.transfer(message(body), handle)
            answered = 0
            while answered < len(some):
                answer = peer.expect(DISPOSITION)
                assert answer.fields[4].descriptor == ACCEPTED
                answered += (answer.fields[2] or answer.fields[1]) - answer.fields[1] + 1
    return bodies


def refusal(broker: Broker) -> str | None:
    """The condition with which a send is refused; None if it was accepted."""
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.transfer(message(b"one more"), peer.attach_sender(QUEUES[1]))
        answer = peer.expect(DISPOSITION)
        return None if answer.fields[4].descriptor == ACCEPTED else error_of(answer)[0]


def settle(broker: Broker, count: int) -> list[bytes]:
    """Receive from the first queue and complete, each in a turn of its own."""
    found = []
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_receiver(QUEUES[0], credit=count)
        for _ in range(count):
            delivery = peer.expect(TRANSFER)
            peer.settle(delivery.fields[1])
            assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
            found.append(body_of(delivery.payload))
    return found


def checkpointed(broker: Broker) -> bool:
    return metrics(broker)["peeklock_log_young_bytes", "0"] == 0


def test_on_a_disk_that_others_have_filled_settling_goes_on_and_the_tables_take_it(disk, broker):
    bodies = store_many(broker, (ROUNDS + 1) * A_ROUND)
    eventually(lambda: checkpointed(broker), "the tables have all")
    disk.fill()
    eventually(lambda: refusal(broker) == FULL, "nothing more is taken")
    eventually(lambda: checkpointed(broker), "the tables have all")
    for number in range(ROUNDS):
        at = number * A_ROUND
        assert settle(broker, A_ROUND) == bodies[at : at + A_ROUND]
        eventually(lambda: checkpointed(broker), "the tables have all")
        if number == 1:
            broker.worker().kill()
            eventually(lambda: logged(broker, "worker connected again"), "another goes on")
            eventually(lambda: broker.get("/readyz")[0] == 200, "it serves")
        assert refusal(broker) == FULL
        assert disk.free_bytes() < 4096
    disk.empty()
    settled = ROUNDS * A_ROUND + 1
    assert settle(broker, 1) == bodies[settled - 1 : settled]
    eventually(lambda: refusal(broker) is None, "messages are taken again")
    broker.kill()
    broker.start()
    found = received(broker, len(bodies))
    assert found[QUEUES[0]] == bodies[settled:]
    assert found[QUEUES[1]]
    assert set(found[QUEUES[1]]) == {b"one more"}
