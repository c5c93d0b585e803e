"""A namespace that gets another worker while clients use it, and a gateway that starts without some of its workers."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.catalog.catalog import home_partition
from protocol.codec import Symbol
from tests.brokers import REPOSITORY
from tests.capture.checks import captured_rows
from tests.cluster.machines import Cluster, Machine
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, TRANSFER, Closed, RawPeer, body_of, message
from tests.end_to_end.raw_requests import Node
from tests.end_to_end.test_catalog_at_run_time import NODE, create, receive, send, update
from tests.end_to_end.test_moving_entities import move
from tests.patience import eventually

CONFIG = """
[[queues]]
name = "wide"
enable_partitioning = true

[[queues]]
name = "moves"
forward_to = "wide"
"""
PLAIN = next(name for name in map("q{}".format, range(99)) if home_partition(name, 4) != home_partition(name, 6))


def restart(machine: Machine) -> None:
    machine.stop()
    machine.start()


class Sender:
    """Sends numbers to a queue, one after the other, over any gateway that takes it, until each was accepted."""

    def __init__(self, cluster: Cluster, queue: str) -> None:
        self._ports = [gateway.amqp_port for gateway in cluster.gateways]
        self._queue = queue
        self._stop = threading.Event()
        self.accepted = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.accepted

    def _run(self) -> None:
        at = 0
        while not self._stop.is_set():
            try:
                with RawPeer.connect(self._ports[at % len(self._ports)]) as peer:
                    handle = peer.attach_sender(self._queue)
                    while not self._stop.wait(0.005):
                        key = str(self.accepted % 7)
                        body = b"%06d" % self.accepted
                        peer.transfer(message(body, annotations={Symbol("x-opt-partition-key"): key}), handle)
                        if peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED:
                            self.accepted += 1
            except (Closed, OSError, TimeoutError):
                at += 1


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, f'[journal]\nmode = "events"\n{CONFIG}', gateways=2, has_journals=True) as cluster:
        yield cluster
    for machine in cluster.machines:
        assert "Traceback" not in machine.log_file.read_text(), machine.log()


def test_a_worker_is_added_while_clients_send(cluster: Cluster, tmp_path: Path) -> None:
    with RawPeer.connect(cluster.gateways[0].amqp_port) as peer:
        assert create(Node(peer, NODE), "queue", name=PLAIN).status == 200
        send(peer, PLAIN, b"before")
    sender, moving = Sender(cluster, "wide"), Sender(cluster, "moves")
    old = [*reversed(cluster.workers), *cluster.gateways]  # the home last of the workers
    cluster.grow(2).start()
    for machine in old:
        count = sender.accepted
        restart(machine)
        eventually(lambda count=count: sender.accepted > count + 10, "sending goes on")
    sent = sender.stop() + moving.stop()
    with RawPeer.connect(cluster.gateways[1].amqp_port) as peer:
        node = Node(peer, NODE)
        assert receive(peer, PLAIN, 1) == [b"before"]
        partitions = update(node, PLAIN, max_delivery_count=7).body["properties"]["partitions"]
        assert partitions == [home_partition(PLAIN, 4)]
        assert update(node, "wide", max_delivery_count=7).body["properties"]["partitions"] == [0, 1, 2, 3]
        created = create(node, "queue", name="wider", enable_partitioning=True)
        assert created.body["properties"]["partitions"] == [0, 1, 2, 3, 4, 5]
        send(peer, PLAIN, b"before the move")
        assert move(node, PLAIN, 4).body["properties"]["partitions"] == [4]
        send(peer, PLAIN, b"since")
        with RawPeer.connect(cluster.gateways[0].amqp_port) as other:
            assert receive(other, PLAIN, 2) == [b"before the move", b"since"]
        send(peer, "wider", *(b"%d" % number for number in range(12)))
        assert update(node, "moves", forward_to="wider").status == 200
        send(peer, "moves", *(b"x%d" % number for number in range(12)))
        assert len(receive(peer, "wider", 24)) == 24
        # Each was accepted once, but for those whose answer was lost with a process.
        found = take_all(peer, "wide")
        assert sent <= len(found) <= sent + 2 * len(old)
    rows = captured(cluster.gateways[1], tmp_path / "captured")
    assert {row["partition"] for row in rows} == set(range(6))
    enqueued = [row for row in rows if row["op"] == "enqueued"]
    # Each is in the journal of one machine, also those that another one has forwarded.
    assert sum(row["entity"] == "wide" for row in enqueued) == len(found)
    assert sum(row["op"] == "completed" and row["entity"] == "wide" for row in rows) == len(found)
    assert sum(row["entity"] == "wider" and row["originEntity"] == "moves" for row in enqueued) == 12
    [left] = [row for row in rows if row["op"] == "moved"]
    [arrived] = [row for row in enqueued if row["reason"] == "moved"]
    assert (left["partition"], arrived["partition"]) == (home_partition(PLAIN, 4), 4)
    assert {each["entity"] for each in (left, arrived)} == {PLAIN}


def captured(gateway: Machine, folder: Path) -> list[dict[str, object]]:
    """What the journals of all machines have."""
    command = [sys.executable, "-m", "broker.cli", "capture", str(folder), "--once"]
    command += ["--http-endpoint", f"http://localhost:{gateway.http_port}"]
    command += ["--connection-string", gateway.connection_string]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    return [row for rows in captured_rows(folder).values() for row in rows]


def take_all(peer: RawPeer, queue: str) -> list[bytes]:
    handle = peer.attach_receiver(queue, credit=100)
    found = []
    while True:
        try:
            delivery = peer.expect(TRANSFER, 2)
        except TimeoutError:
            return found
        found.append(body_of(delivery.payload))
        peer.settle(delivery.fields[1])
        peer.expect(DISPOSITION)
        peer.flow(handle, credit=100, delivery_count=len(found))


def test_links_that_are_older_than_a_worker_are_served_by_it(tmp_path: Path) -> None:
    """Each worker has partitions in a row, so nobody can guess which one has those that have not been heard of."""
    cluster = Cluster(tmp_path, CONFIG)
    for worker, owned in zip(cluster.workers, ([0, 1], [2, 3]), strict=True):
        worker.owned = owned
    with cluster:
        [gateway] = cluster.gateways
        later = cluster.workers[1]
        names = {home_partition(name, 4): name for name in map("q{}".format, range(40))}
        with RawPeer.connect(gateway.amqp_port) as peer:
            for name in names.values():
                assert create(Node(peer, NODE), "queue", name=name).status == 200
        gateway.stop()
        later.stop()
        said_before = gateway.begin()
        eventually(lambda: b" is ready." in gateway.log_file.read_bytes()[said_before:], "it takes clients")
        with RawPeer.connect(gateway.amqp_port) as peer, RawPeer.connect(gateway.amqp_port) as receiver:
            handles = {partition: peer.attach_sender(name) for partition, name in names.items()}
            keyed = peer.attach_sender("wide")
            receiver.attach_receiver("wide", credit=100)
            for partition, handle in handles.items():
                peer.transfer(message(b"m"), handle)
                taken = peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
                assert taken == (partition in (0, 1))
            later.start()
            eventually(lambda: gateway.get("/readyz")[0] == 200, "ready")
            for handle in handles.values():
                peer.transfer(message(b"m"), handle)
                assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
            for number in range(20):  # to all fragments
                body = b"%02d" % number
                peer.transfer(message(body, annotations={Symbol("x-opt-partition-key"): str(number)}), keyed)
                assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
            found = {body_of(receiver.expect(TRANSFER).payload) for _ in range(20)}
            assert found == {b"%02d" % number for number in range(20)}
        for machine in cluster.machines:
            assert "Traceback" not in machine.log_file.read_text(), machine.log()
