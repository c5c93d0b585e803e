"""Brokers and workers that start while not one byte of their disk is free: what works then, and what is there later."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from broker.catalog.catalog import home_partition
from broker.child import NO_ROOM as NO_ROOM_CODE
from tests.brokers import Broker, running
from tests.end_to_end.health import is_ready, metrics, serves
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, TRANSFER, RawPeer, body_of, error_of, message
from tests.end_to_end.raw_requests import Node
from tests.own_disk import MIB, OwnDisk, broker_on, own_disk_or_skip
from tests.patience import PATIENCE_S, eventually

PARTITIONS = 4
DISK_BYTES = 96 * MIB
LARGE = 20_000
NO_ROOM = "amqp:resource-limit-exceeded"


def queue_of(partition: int) -> str:
    names = map("queue-{}".format, range(999))
    return next(name for name in names if home_partition(name, PARTITIONS) == partition)


QUEUES = tuple(map(queue_of, range(PARTITIONS)))
DOOMED = "doomed"
CONFIG = "\n".join(
    [
        f"partitions = {PARTITIONS}",
        "[store]",
        "min_free_disk_bytes = 0",
        "send_watermark = 0.999",
        "log_bytes = 16777216",
        *(f'[[queues]]\nname = "{name}"' for name in (*QUEUES, DOOMED)),
    ]
)


@dataclass
class Book:
    """What clients of one queue were told."""

    queue: str
    accepted: list[bytes] = field(default_factory=list)
    completed: int = 0

    @property
    def left(self) -> list[bytes]:
        return self.accepted[self.completed :]


class Clients:
    """Of all queues. Their books are exact: nothing is under way when a process is killed."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.books = [Book(queue) for queue in QUEUES]

    def send(self, count: int, size: int) -> set[str]:
        """Of each queue `count` messages or as many as are taken. Returns the queues that refused one."""
        refused = set()
        with RawPeer.connect(self.broker.amqp_port) as peer:
            for book in self.books:
                sender = peer.attach_sender(book.queue)
                for _ in range(count):
                    body = b"%d in %s " % (len(book.accepted), book.queue.encode())
                    peer.transfer(message(body + bytes(size)), sender)
                    answer = peer.expect(DISPOSITION, PATIENCE_S)
                    if answer.fields[4].descriptor != ACCEPTED:
                        assert error_of(answer)[0] == NO_ROOM
                        refused.add(book.queue)
                        break
                    book.accepted.append(body)
        return refused

    def complete(self, count: int) -> None:
        """The oldest of each queue."""
        for book in self.books:
            for body in received(self.broker, book.queue, min(count, len(book.left))):
                assert body == book.left[0], "in their order, and none twice"
                book.completed += 1

    def complete_all(self) -> None:
        self.complete(1 << 30)
        for book in self.books:
            with RawPeer.connect(self.broker.amqp_port) as peer:
                peer.attach_receiver(book.queue, credit=1)
                peer.nothing_more(TRANSFER)


def received(broker: Broker, queue: str, count: int) -> list[bytes]:
    found = []
    with RawPeer.connect(broker.amqp_port) as peer:
        receiver = peer.attach_receiver(queue, credit=count)
        for _ in range(count):
            delivery = peer.expect(TRANSFER, PATIENCE_S)
            peer.settle(delivery.fields[1])
            found.append(body_of(delivery.payload).rstrip(b"\0"))
            assert peer.expect(DISPOSITION, PATIENCE_S).fields[4].descriptor == ACCEPTED
        peer.detach(receiver)
    return found


def refusing(broker: Broker) -> dict[str, str]:
    status, body = broker.get("/readyz")
    assert status == 200, body
    return dict(json.loads(body).get("refuse_sends", {}))


def verify(disk: OwnDisk, broker: Broker) -> None:
    command = [*disk.prefix, sys.executable, "-m", "broker.cli", "verify", "--data-dir", str(broker.data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass(frozen=True)
class Form:
    in_memory: bool
    workers: int
    config: str = ""


FORMS = {
    "ext4, one worker": Form(in_memory=False, workers=1),
    "ext4, two workers and two gateways": Form(in_memory=False, workers=2, config="gateways = 2\n"),
    "ext4, one process with a journal": Form(in_memory=False, workers=0, config='journal = { mode = "bodies" }\n'),
    "tmpfs, one worker with a journal": Form(in_memory=True, workers=1, config='journal = { mode = "bodies" }\n'),
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


@pytest.fixture
def disk(form: Form, tmp_path: Path) -> Iterator[OwnDisk]:
    with own_disk_or_skip(tmp_path, DISK_BYTES, in_memory=form.in_memory) as disk:
        yield disk


@pytest.fixture
def broker(form: Form, disk: OwnDisk, tmp_path: Path) -> Iterator[Broker]:
    with running(broker_on(disk, tmp_path / "broker", form.config + CONFIG, form.workers)) as broker:
        yield broker


def kill_workers(broker: Broker) -> None:
    killed = broker.worker_processes()
    for worker in killed:
        worker.kill()
    for worker in killed:
        worker.wait(PATIENCE_S)
    eventually(lambda: is_ready(broker), "the supervisor starts them again")


def kill_all(broker: Broker) -> None:
    broker.kill()
    broker.start()


def stop(broker: Broker) -> None:
    broker.stop()
    broker.start()


def fill(disk: OwnDisk, broker: Broker, clients: Clients) -> None:
    """So that not one free byte is left, and much was accepted that no tables have."""
    for checkpointer in broker.running_as("storage.log.checkpointer"):
        checkpointer.suspend()
    assert clients.send(60, LARGE) == set()
    disk.fill()
    assert disk.free_bytes() == 0


def ends_without_room(broker: Broker) -> None:
    broker.begin()
    assert broker._process is not None
    assert broker._process.wait(PATIENCE_S) == NO_ROOM_CODE
    assert "No space left on device" in broker.log()
    assert "Traceback" not in broker.log()
    broker.kill()


def test_without_a_free_byte_it_starts_and_gives_what_it_has_and_goes_on_when_there_is_room(
    disk: OwnDisk, broker: Broker
) -> None:
    clients = Clients(broker)
    clients.send(50, LARGE)
    clients.complete(5)
    fill(disk, broker, clients)
    with disk.kept_full():  # what a checkpoint frees would be room
        kill_workers(broker)
        eventually(lambda: set(refusing(broker)) == set(map(str, range(PARTITIONS))), "it says which")
        assert clients.send(1, 0) == set(QUEUES)
    for start_again in (kill_all, stop, kill_workers):
        clients.complete(2)
        disk.fill()
        assert disk.free_bytes() == 0
        start_again(broker)
        eventually(lambda: refusing(broker) != {}, "some have no room yet")
        clients.send(1, 0)
    with RawPeer.connect(broker.amqp_port) as peer:
        assert Node(peer, "$management").ask("peeklock:delete-entity", {"path": DOOMED}).status == 200
    kill_all(broker)
    disk.empty()
    eventually(lambda: refusing(broker) == {}, "sends are taken again")
    assert clients.send(10, LARGE) == set()
    eventually(lambda: metrics(broker)["peeklock_log_young_bytes", "0"] == 0, "the tables have all")
    broker.kill()
    verify(disk, broker)
    broker.start()
    clients.complete_all()


def test_a_journal_that_finds_no_room_at_its_first_start_waits_for_some(tmp_path: Path) -> None:
    with own_disk_or_skip(tmp_path, DISK_BYTES) as disk:
        with running(broker_on(disk, tmp_path / "before", CONFIG, 1)):
            pass
        disk.fill()
        broker = broker_on(disk, tmp_path / "broker", f'journal = {{ mode = "bodies" }}\n{CONFIG}', 1)
        try:
            said = broker.begin()
            eventually(lambda: "No space left on device: 'journal'" in broker.log(), "it says why")
            disk.empty()
            broker.wait_until_ready(said)
            serves(broker.amqp_port, DOOMED)
            broker.stop()
        finally:
            broker.kill()


def test_a_first_start_without_room_ends_with_a_code_of_its_own_and_the_next_one_finds_room(tmp_path: Path) -> None:
    with own_disk_or_skip(tmp_path, DISK_BYTES) as disk:
        disk.fill()
        broker = broker_on(disk, tmp_path / "broker", CONFIG, 1)
        ends_without_room(broker)
        disk.empty()
        with running(broker):
            serves(broker.amqp_port, DOOMED)
