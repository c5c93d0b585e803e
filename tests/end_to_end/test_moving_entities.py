"""Entities that are moved to other partitions while clients use them, and while processes die."""

import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from broker.catalog.catalog import home_partition
from protocol.codec import Symbol
from tests.brokers import Broker
from tests.end_to_end.health import is_ready, metrics, worker_of
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    DETACH,
    DISPOSITION,
    TRANSFER,
    Closed,
    RawPeer,
    body_of,
    message,
)
from tests.end_to_end.raw_requests import Node, Response
from tests.end_to_end.test_catalog_at_run_time import NODE, create, receive, send, update
from tests.patience import eventually

PARTITIONS, WORKERS = 4, 2
CONFIG = f"""
partitions = {PARTITIONS}
worker_stall_timeout_ms = 6000
gateways = 2
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("moving"), CONFIG, workers=WORKERS) as broker:
        yield broker
    assert "Traceback" not in broker.log_file.read_text(), broker.log()


def move(node: Node, path: str, to: int) -> Response:
    return node.ask("peeklock:move-entity", {"path": path, "partition": to})


def name_on(partition: int, prefix: str) -> str:
    names = (f"{prefix}-{number}" for number in range(100))
    return next(each for each in names if home_partition(each, PARTITIONS) == partition)


def where(node: Node, path: str) -> list[int]:
    partitions: list[int] = update(node, path, max_size_mb=1024).body["properties"]["partitions"]
    return partitions


@pytest.mark.parametrize(("source", "to"), [*itertools.permutations(range(PARTITIONS), 2)])
def test_everything_a_queue_has_goes_with_it(broker: Broker, source: int, to: int) -> None:
    name = name_on(source, f"all-{to}")
    with RawPeer.connect(broker.amqp_port) as peer, RawPeer.connect(broker.amqp_port) as older:
        node = Node(peer, NODE)
        create(node, "queue", name=name, requires_duplicate_detection=True)
        links = older.attach_sender(name), older.attach_receiver(name)
        handle = peer.attach_sender(name)
        for number in range(4):
            peer.transfer(message(b"m%d" % number, properties=[f"id-{number}"]), handle)
            assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
        own = Node(peer, f"{name}/$management")
        moved = move(node, name, to)
        assert moved.status == 200, moved
        assert moved.body["properties"]["partitions"] == [to]
        assert where(node, name) == [to]
        # Links that are older than the move go on, and so does the detection of duplicates.
        older.transfer(message(b"again", properties=["id-2"]), links[0])
        assert older.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
        older.transfer(message(b"m4", properties=["id-4"]), links[0])
        assert older.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
        older.flow(links[1], credit=10)
        found = [older.expect(TRANSFER) for _ in range(5)]
        assert [body_of(each.payload) for each in found] == [b"m%d" % number for number in range(5)]
        older.nothing_more(TRANSFER)
        for each in found:
            older.settle(each.fields[1])
            assert older.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
        counts = own.ask("peeklock:get-counts", {}).body["counts"]
        assert counts["active"] == 0


class Client:
    """Sends numbers and receives them, until it is told to stop. It tries again what is refused as busy."""

    def __init__(self, broker: Broker, to: str, source: str) -> None:
        self._port = broker.amqp_port
        self._to, self._source = to, source
        self._stop = threading.Event()
        self.accepted: list[int] = []
        self.received: list[int] = []
        self.unknown: set[int] = set()  # their outcome was not told
        self.longest_s = 0.0  # between two accepted sends
        self._threads = [threading.Thread(target=self._send), threading.Thread(target=self._receive)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Everything that was accepted is received first."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        number, since = 0, time.monotonic()
        while not self._stop.is_set():
            try:
                with RawPeer.connect(self._port) as peer:
                    handle = peer.attach_sender(self._to)
                    while not self._stop.is_set():
                        self.unknown.add(number)
                        peer.transfer(message(b"%d" % number), handle)
                        outcome = peer.expect(DISPOSITION).fields[4]
                        self.unknown.discard(number)
                        if outcome.descriptor == ACCEPTED:
                            self.accepted.append(number)
                            number += 1
                            self.longest_s = max(self.longest_s, time.monotonic() - since)
                            since = time.monotonic()
                        elif outcome.value[0].value[0] == Symbol("com.microsoft:timeout"):
                            self.unknown.add(number)
                            number += 1
                        else:
                            time.sleep(0.02)
            except (Closed, OSError, TimeoutError):
                number += 1

    def _receive(self) -> None:
        quiet = 0
        while quiet < 3:
            try:
                with RawPeer.connect(self._port) as peer:
                    handle = peer.attach_receiver(self._source, credit=20)
                    count = 0
                    while quiet < 3:
                        delivery = peer.expect(TRANSFER, 1)
                        quiet, count = 0, count + 1
                        peer.settle(delivery.fields[1])
                        if peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED:
                            self.received.append(int(body_of(delivery.payload)))
                        peer.flow(handle, credit=20, delivery_count=count)
            except (Closed, OSError, TimeoutError):
                quiet += self._stop.is_set()

    def check(self) -> None:
        counts = Counter(self.received)
        assert not {*self.accepted} - {*counts}, "lost"
        assert not {each for each, count in counts.items() if count > 1}, "doubled"
        assert not {*counts} - {*self.accepted} - self.unknown, "never sent"
        assert self.received == sorted(self.received), "in order"


@pytest.mark.parametrize("kind", ["queue", "topic"])
def test_clients_go_on_while_it_moves_again_and_again(broker: Broker, kind: str) -> None:
    with RawPeer.connect(broker.amqp_port) as peer:
        node = Node(peer, NODE)
        name = f"busy-{kind}"
        create(node, kind, name=name)
        source = name
        if kind == "topic":
            create(node, "subscription", topic=name, name="s")
            create(node, "subscription", topic=name, name="kept")
            source = f"{name}/Subscriptions/s"
        client = Client(broker, name, source)
        at = where(node, name)[0]
        for step in range(1, 6):
            to = (at + step) % PARTITIONS
            if to != at:
                moved = move(node, name, to)
                assert moved.status == 200, moved
                at = to
            count = len(client.accepted)
            eventually(lambda count=count: len(client.accepted) > count + 20, "sending goes on")
        client.stop()
        client.check()
        assert len(client.accepted) > 100
        assert client.longest_s < 5
        if kind == "topic":
            kept = receive(peer, f"{name}/Subscriptions/kept", len(client.accepted))
            assert kept == sorted(b"%d" % number for number in client.accepted)


def test_what_is_forwarded_to_it_follows(broker: Broker) -> None:
    with RawPeer.connect(broker.amqp_port) as peer:
        node = Node(peer, NODE)
        create(node, "queue", name="target")
        for source in range(PARTITIONS):
            create(node, "queue", name=name_on(source, "to-target"), forward_to="target")
        for to in range(PARTITIONS):
            if where(node, "target") != [to]:
                assert move(node, "target", to).status == 200
            for source in range(PARTITIONS):
                send(peer, name_on(source, "to-target"), b"%d%d" % (to, source))
        wanted = sorted(b"%d%d" % (to, source) for to in range(PARTITIONS) for source in range(PARTITIONS))
        assert receive(peer, "target", len(wanted)) == wanted


def test_what_cannot_be_moved_is_refused_and_says_why(broker: Broker) -> None:
    with RawPeer.connect(broker.amqp_port) as peer:
        node = Node(peer, NODE)
        create(node, "queue", name="wide", enable_partitioning=True)
        create(node, "queue", name=name_on(2, "plain"))
        create(node, "topic", name="t")
        create(node, "subscription", topic="t", name="s")
        for path, to, status, text in (
            ("wide", 1, 400, "is partitioned"),
            ("t/Subscriptions/s", 1, 400, "is moved with its topic"),
            ("no-such-queue", 1, 404, "could not be found"),
            (name_on(2, "plain"), 2, 400, "is on partition 2 already"),
            (name_on(2, "plain"), 4, 400, "'partition' is 4; "),
            (name_on(2, "plain"), 1 << 40, 400, "it must be 0 to 3"),
            (name_on(2, "plain"), -1, 400, "the least is 0"),
        ):
            refused = move(node, path, to)
            assert text in refused.description, refused
            assert refused.status == status
        assert move(node, name_on(2, "plain"), 1).status == 200


def test_a_client_that_is_authenticating_during_a_move_goes_on(broker: Broker) -> None:
    with ExitStack() as connections, RawPeer.connect(broker.amqp_port) as peer:
        node = Node(peer, NODE)
        name = name_on(1, "authenticating")
        create(node, "queue", name=name)
        others = [connections.enter_context(RawPeer(broker.amqp_port)) for _ in range(6)]  # at either gateway
        assert move(node, name, 2).status == 200
        for number, other in enumerate(others):
            other.sasl_plain()
            other.open()
            other.begin()
            other.attach_sender(name)
            other.transfer(message(b"%d" % number))
            assert other.expect(DISPOSITION).fields[4].descriptor == ACCEPTED


@pytest.mark.parametrize("victim", ["source", "destination", "home"])
def test_a_process_that_dies_in_a_move_leaves_it_as_before_or_moved(tmp_path: Path, victim: str) -> None:
    """Its clients lose nothing that was accepted, whichever it is."""
    config = f"partitions = {PARTITIONS}\nworker_stall_timeout_ms = 6000\n"
    with Broker(tmp_path, config, workers=PARTITIONS) as broker, RawPeer.connect(broker.amqp_port) as peer:
        node = Node(peer, NODE)
        name = name_on(1, "victim")
        create(node, "queue", name=name)
        padding = bytes(2000)
        handle = peer.attach_sender(name)
        for number in range(500):
            peer.transfer(message(b"%04d" % number + padding), handle)
        accepted = 0
        while accepted < 500:
            answer = peer.expect(DISPOSITION)
            accepted += (answer.fields[2] or answer.fields[1]) - answer.fields[1] + 1
        at = 1
        for step in range(4):
            to = 2 if at == 1 else 1
            partition = {"source": at, "destination": to, "home": 0}[victim]
            process = worker_of(broker, partition)
            timer = threading.Timer(0.02 * step * step, process.kill)
            timer.start()
            outcome = move(node, name, to)
            timer.join()
            eventually(lambda: is_ready(broker), "ready again")
            eventually(lambda: create(node, "queue", name=f"q{step}").status == 200, "changes are possible")  # noqa: B023
            [at] = where(node, name)
            assert outcome.status != 200 or at == to
        bodies = receive(peer, name, 500)
        assert [each[:4] for each in bodies] == [b"%04d" % number for number in range(500)]
        peer.detach(handle)
        peer.expect(DETACH)
    assert "Traceback" not in broker.log_file.read_text(), broker.log()


UNSENT, UNSENT_BYTES = 40, 60_000
MAY_HAVE_GOT = 12  # of a client that does not read: what its socket holds, and segments under way


@pytest.mark.parametrize("victim", [None, "source"])
def test_what_was_deleted_for_a_client_and_not_sent_is_there_once_after_a_move(
    tmp_path: Path, victim: str | None
) -> None:
    """Its connection breaks at some moment of the move, and perhaps the worker dies at the next."""
    config = f"partitions = {PARTITIONS}\nworker_stall_timeout_ms = 6000\n"
    with Broker(tmp_path, config, workers=WORKERS) as broker, RawPeer.connect(broker.amqp_port) as peer:
        node = Node(peer, NODE)
        name = name_on(1, "unsent")
        create(node, "queue", name=name)
        handle = peer.attach_sender(name)
        sent = there = 0
        for step in range(2):
            while there < UNSENT:
                peer.transfer(message(b"%06d" % sent + bytes(UNSENT_BYTES)), handle)
                assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
                sent, there = sent + 1, there + 1
            [at] = where(node, name)
            gone = RawPeer.connect(broker.amqp_port, receive_buffer_bytes=4096)
            gone.attach_receiver(name, credit=UNSENT, settled=True)
            eventually(lambda: active(broker, name) == 0, "all are deleted")
            timers = [threading.Timer(0.02 * step, reset, [gone])]
            if victim is not None:
                timers.append(threading.Timer(0.02 * step + 0.002, worker_of(broker, at).kill))
            for timer in timers:
                timer.start()
            move(node, name, 2 if at == 1 else 1)
            for timer in timers:
                timer.join()
            eventually(lambda: is_ready(broker), "ready again")
            eventually(lambda: active(broker, name) >= UNSENT - MAY_HAVE_GOT, "what was not sent is back")
            there = active(broker, name)
            assert there <= UNSENT
        found = [int(body[:6]) for body in receive(peer, name, there)]
        assert found == sorted(set(found)), "one is there twice"
    assert "Traceback" not in broker.log_file.read_text(), broker.log()


def active(broker: Broker, name: str) -> int:
    """Messages in the queue; fewer than none while its partition does not say."""
    return int(metrics(broker).get(("peeklock_active_messages", name), -1))


def reset(peer: RawPeer) -> None:
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    peer.socket.close()
