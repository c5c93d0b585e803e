"""The disk of one partition is full: what the others do, what operators see, and what is there afterwards."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from storage.data_dir import partition_path
from tests.brokers import Broker, running
from tests.end_to_end.health import elsewhere, logged, metrics
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, TRANSFER, RawPeer, body_of, error_of, message
from tests.own_disk import MIB, OwnDisk, own_disk_or_skip
from tests.patience import PATIENCE_S, eventually

COMPLETED, LARGE = 50, 100
QUEUES = ("orders", elsewhere("orders"))
CONFIG = f"""
partitions = 2
[store]
min_free_disk_bytes = 0
send_watermark = 0.999
[[queues]]
name = "{QUEUES[0]}"
[[queues]]
name = "{QUEUES[1]}"
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[OwnDisk]:
    with own_disk_or_skip(tmp_path, 64 * MIB) as disk:
        yield disk


@pytest.fixture(params=[1, 0], ids=["a worker", "one process"])
def broker(request: pytest.FixtureRequest, disk: OwnDisk, tmp_path: Path) -> Iterator[Broker]:
    """Partition 1 has a disk of its own."""
    broker = Broker(tmp_path / "broker", CONFIG, prefix=disk.prefix, workers=request.param)
    broker.start()
    broker.stop()
    path = partition_path(broker.data_dir, 1)
    shutil.copytree(path, disk.seen / "1")
    shutil.rmtree(path)
    path.symlink_to(disk.path / "1")
    with running(broker):
        yield broker


def refusing(broker: Broker) -> dict[str, str]:
    """Why partitions refuse messages."""
    status, body = broker.get("/readyz")
    assert status == 200
    return dict(json.loads(body).get("refuse_sends", {}))


def partition_of(peer: RawPeer, queue: str) -> int:
    """By a lock token, which is the tag of a delivery."""
    sender = peer.attach_sender(queue)
    peer.transfer(message(b"where"), sender)
    assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    receiver = peer.attach_receiver(queue, credit=1)
    delivery = peer.expect(TRANSFER)
    peer.settle(delivery.fields[1])
    peer.expect(DISPOSITION)
    peer.detach(receiver)
    return int.from_bytes(bytes(delivery.fields[2])[:2], "big")


def accepted(peer: RawPeer, count: int) -> None:
    while count > 0:
        answer = peer.expect(DISPOSITION)
        assert answer.fields[4].descriptor == ACCEPTED, error_of(answer)
        first, last = answer.fields[1:3]
        count -= (first if last is None else last) - first + 1


def received(port: int, queue: str) -> list[bytes]:
    found = []
    with RawPeer.connect(port) as peer, suppress(TimeoutError):
        peer.attach_receiver(queue, credit=1000)
        while True:
            delivery = peer.expect(TRANSFER, 1.0)
            peer.settle(delivery.fields[1])
            found.append(body_of(delivery.payload))
    return found


def verifies(disk: OwnDisk, broker: Broker) -> None:
    command = [*disk.prefix, sys.executable, "-m", "broker.cli", "verify", "--data-dir", str(broker.data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_full_disk_holds_up_its_own_partition_and_brings_nothing_back(disk: OwnDisk, broker: Broker) -> None:
    with RawPeer.connect(broker.amqp_port) as peer:
        here = {partition_of(peer, queue): queue for queue in QUEUES}
        small, large = (peer.attach_sender(here[number]) for number in (0, 1))

        def checkpoints() -> float:
            return metrics(broker)["peeklock_log_checkpoints_total", "0"]

        before = checkpoints()
        peer.transfer(message(b"first"), large)
        accepted(peer, 1)
        eventually(lambda: checkpoints() > before, "a checkpoint, so that the next one begins two seconds later")
        for number in range(COMPLETED):
            peer.transfer(message(b"payment %d" % number), small)
        for _ in range(LARGE):
            peer.transfer(message(bytes(50_000)), large)
        accepted(peer, COMPLETED + LARGE)
        disk.fill(64 << 10)
        eventually(lambda: "1" in refusing(broker), "the partition says it")
        eventually(lambda: "its store has no room" in refusing(broker)["1"], "and why")
        assert [*refusing(broker)] == ["1"]
        peer.transfer(message(b"one more"), large)
        assert error_of(peer.expect(DISPOSITION))[0] == "amqp:resource-limit-exceeded"
        peer.transfer(message(b"one more"), small)
        accepted(peer, 1)
        receiver = peer.attach_receiver(here[0], credit=COMPLETED + 1)
        for _ in range(COMPLETED + 1):
            peer.settle(peer.expect(TRANSFER).fields[1])
        accepted(peer, COMPLETED + 1)
        peer.detach(receiver)
        began = time.monotonic()
        disk.empty()
        eventually(lambda: logged(broker, "messages are taken again"), "there is room again")
        assert time.monotonic() - began < 10, "it is seen at once, and said when no send was refused for five seconds"
        assert refusing(broker) == {}
        eventually(lambda: metrics(broker)["peeklock_log_young_bytes", "0"] == 0, "the tables have all")
    broker.kill()
    verifies(disk, broker)
    broker.start()
    assert received(broker.amqp_port, here[0]) == []
    with RawPeer.connect(broker.amqp_port) as peer:
        sender = peer.attach_sender(here[0])
        for number in range(10):
            peer.transfer(message(b"new %d" % number), sender)
        accepted(peer, 10)
    assert received(broker.amqp_port, here[0]) == [b"new %d" % number for number in range(10)]
    assert received(broker.amqp_port, here[1]) == [b"first"] + [bytes(50_000)] * LARGE


def sent(peer: RawPeer, queue: str, bodies: list[bytes]) -> list[bytes]:
    """Those that were accepted."""
    sender = peer.attach_sender(queue)
    taken = []
    for body in bodies:
        peer.transfer(message(body), sender)
        answer = peer.expect(DISPOSITION, PATIENCE_S)
        if answer.fields[4].descriptor == ACCEPTED:
            taken.append(body)
        else:
            assert error_of(answer)[0] == "amqp:resource-limit-exceeded"
    peer.detach(sender)
    return taken


def completed(peer: RawPeer, queue: str, count: int) -> list[bytes]:
    receiver = peer.attach_receiver(queue, credit=count)
    found = []
    for _ in range(count):
        delivery = peer.expect(TRANSFER, PATIENCE_S)
        peer.settle(delivery.fields[1])
        accepted(peer, 1)
        found.append(body_of(delivery.payload))
    peer.detach(receiver)
    return found


def test_a_broker_whose_partition_has_not_a_free_byte_starts_and_serves_all(disk: OwnDisk, broker: Broker) -> None:
    with RawPeer.connect(broker.amqp_port) as peer:
        here = {partition_of(peer, queue): queue for queue in QUEUES}
        for checkpointer in broker.running_as("storage.log.checkpointer"):
            checkpointer.suspend()  # so that the tables have none of this
        left = {
            n: sent(peer, queue, [b"%d in %d " % (at, n) + bytes(20_000) for at in range(LARGE)])
            for n, queue in here.items()
        }
        assert [*map(len, left.values())] == [LARGE, LARGE]
        disk.fill()
    for number in range(3):
        broker.kill()
        disk.fill()
        assert disk.free_bytes() == 0
        broker.start()
        eventually(lambda: [*refusing(broker)] == ["1"], "the partition says it")
        with RawPeer.connect(broker.amqp_port) as peer:
            assert sent(peer, here[1], [b"one more"]) == []
            left[0] += sent(peer, here[0], [b"taken %d" % number])
            for each, queue in here.items():
                assert completed(peer, queue, 10) == left[each][:10]
                del left[each][:10]
    disk.empty()
    eventually(lambda: refusing(broker) == {}, "sends are taken again")
    eventually(lambda: metrics(broker)["peeklock_log_young_bytes", "0"] == 0, "the tables have all")
    broker.stop()
    verifies(disk, broker)
    broker.start()
    with RawPeer.connect(broker.amqp_port) as peer:
        left[1] += sent(peer, here[1], [b"the last"])
    assert {each: received(broker.amqp_port, queue) for each, queue in here.items()} == left
