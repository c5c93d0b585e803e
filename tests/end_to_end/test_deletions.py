"""Entities that are deleted while clients use the broker: because nobody used them, and as the catalog's home says so.

No interval is short enough for a test to wait for, so an idle one is nearly over when the broker starts: its partition
has it on record that nobody used the entity for so long.
"""

import socket
import subprocess
import sys
from typing import Any, Self

import msgpack
import pytest

from broker.catalog.catalog import catalog_version, definitions, home_partition
from broker.wire import Op
from protocol.symbols import TRANSFER_DESTINATION_ADDRESS
from storage.lmdb_store import LmdbStore
from storage.records import encode_document, idle_key
from storage.store import Table
from tests.brokers import Broker
from tests.end_to_end.health import logged, metrics, process_ids, serves
from tests.end_to_end.raw_peer import ATTACH, DETACH, DISPOSITION, TRANSFER, RawPeer, error_of, message
from tests.logs import open_tables
from tests.patience import PATIENCE_S, eventually

PARTITIONS = 4
INTERVAL_MS = 300_000
NOT_FOUND = "amqp:not-found"
CONFIG = f"""
partitions = {PARTITIONS}

[[queues]]
name = "witness"

[[queues]]
name = "replies"
auto_delete_on_idle_ms = {INTERVAL_MS}

[[topics]]
name = "news"

  [[topics.subscriptions]]
  name = "stays"

  [[topics.subscriptions]]
  name = "goes"
  auto_delete_on_idle_ms = {INTERVAL_MS}
"""
QUEUE, STAYS, GOES = 2, 4, 5  # entity ids, in the order of their creation


@pytest.fixture
def broker(tmp_path):
    broker = Broker(tmp_path, CONFIG, workers=2)
    broker.start()
    eventually(lambda: logged(broker, "catalog received"), "the second worker is connected to the home's")
    yield broker
    broker.kill()
    assert "Traceback" not in broker.log_file.read_text(), broker.log()


class Worker:
    """Another worker, or a gateway, as the home's worker sees it."""

    def __init__(self, broker: Broker, number: int = 0) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(str(broker.data_dir / "run" / f"worker-{number}.sock"))
        self._unread: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, *command: Any) -> None:
        frame = msgpack.packb([command])
        self.socket.sendall(len(frame).to_bytes(4, "big") + frame)

    def hear(self, op: Op) -> list[Any]:
        while True:
            while self._unread:
                found = self._unread.pop(0)
                if found[0] == op:
                    return list(found)
            size = int.from_bytes(self.socket.recv(4, socket.MSG_WAITALL), "big")
            self._unread = msgpack.unpackb(self.socket.recv(size, socket.MSG_WAITALL), strict_map_key=False)


def send(broker: Broker, *addresses: str) -> None:
    with RawPeer.connect(broker.amqp_port) as peer:
        for address in addresses:
            peer.transfer(message(b"old"), peer.attach_sender(address))
            peer.expect(DISPOSITION)


def stored(broker: Broker, partition: int) -> LmdbStore:
    return open_tables(broker.data_dir, partition)


def nearly_over(broker: Broker, home_name: str, entity_id: int, left_ms: int = 1) -> None:
    with stored(broker, home_partition(home_name, PARTITIONS)) as store:
        store.put(Table.META, idle_key(entity_id), encode_document(INTERVAL_MS - left_ms))
        store.commit()


def catalogs(broker: Broker) -> list[tuple[int, list[int]]]:
    """Of each partition of a broker that is stopped: version, entity ids."""
    found = []
    for partition in range(PARTITIONS):
        with stored(broker, partition) as store:
            found.append((catalog_version(store), [item.entity_id for item in definitions(store)]))
    return found


def assert_verified(broker: Broker) -> None:
    command = [sys.executable, "-m", "broker.cli", "verify", "--data-dir", str(broker.data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def assert_missing(peer: RawPeer, address: str) -> None:
    peer.attach(sender=True, address=address)
    condition, text = peer.refusal()
    assert condition == NOT_FOUND
    assert "The messaging entity" in text
    assert "could not be found" in text


def counted(broker: Broker, name: str) -> float:
    return sum(value for labels, value in metrics(broker).items() if labels[0] == name)


def test_a_queue_that_nobody_uses_is_deleted_and_its_links_end(broker):
    assert home_partition("replies", PARTITIONS) % 2 == 1  # not at the worker of the home
    send(broker, "replies", "witness")
    broker.stop()
    nearly_over(broker, "replies", QUEUE, left_ms=6000)
    broker.start()
    with RawPeer.connect(broker.amqp_port) as peer:
        handles = [
            peer.attach_sender("replies"),
            peer.attach_sender("witness", properties={TRANSFER_DESTINATION_ADDRESS: "replies"}),
        ]
        other = peer.attach_sender("witness")
        for handle in handles:
            detached = peer.expect(DETACH)
            assert (detached.fields[0], detached.fields[1], error_of(detached)[0]) == (handle, True, NOT_FOUND)
            assert "The messaging entity" in error_of(detached)[1]
        assert_missing(peer, "replies")
        peer.transfer(message(b"m"), other)
        peer.expect(DISPOSITION)
    assert logged(broker, '"replies", .*"entity deleted')
    assert counted(broker, "peeklock_auto_deleted_entities_total") == 1
    assert not [labels for labels in metrics(broker) if "replies" in labels]
    broker.stop()
    version = 2
    assert catalogs(broker) == [(version, [1, 3, 4, 5])] * PARTITIONS
    assert_verified(broker)
    with stored(broker, home_partition("replies", PARTITIONS)) as store:
        assert store.last_key(Table.QUEUE) is None  # its message is freed
    broker.start()  # it is declared, so it is made again: another one, and empty
    assert logged(broker, '"replies", .*"entity created')
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_receiver("replies", credit=1)
        peer.nothing_more(TRANSFER)
    broker.stop()
    assert catalogs(broker) == [(version + 1, [1, 3, 4, 5, 6])] * PARTITIONS


def test_a_subscription_goes_alone_and_what_it_shared_stays_for_the_others(broker):
    assert home_partition("news", PARTITIONS) % 2 == 0  # at the worker of the home
    send(broker, "news")
    broker.stop()
    nearly_over(broker, "news", GOES, left_ms=1500)
    broker.start()
    eventually(lambda: counted(broker, "peeklock_auto_deleted_entities_total") == 1, "it is deleted")
    send(broker, "news")
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach(sender=False, address="news/Subscriptions/goes")
        assert peer.refusal()[0] == NOT_FOUND
        peer.attach_receiver("news/Subscriptions/stays", credit=3)
        assert [peer.expect(TRANSFER).fields[2] for _ in range(2)]
        peer.nothing_more(TRANSFER)
    broker.stop()
    assert catalogs(broker) == [(2, [1, 2, 3, STAYS])] * PARTITIONS
    assert_verified(broker)


def assert_goes(broker: Broker, within_s: float) -> None:
    """The queue `replies`, whose deletion a process may not have heard of yet, is gone in the end, and only that."""
    with RawPeer.connect(broker.amqp_port) as peer:

        def is_missing() -> bool:
            peer.attach(sender=True, address="replies")
            attached = peer.expect(ATTACH)
            if attached.fields[6] is not None:
                return False
            return error_of(peer.expect(DETACH))[0] == NOT_FOUND

        eventually(is_missing, "the catalog has it no more")
    eventually(lambda: broker.get("/readyz")[0] == 200, "ready")
    serves(broker.amqp_port)
    broker.stop()
    assert catalogs(broker) == [(2, [1, 3, 4, 5])] * PARTITIONS
    assert_verified(broker)


@pytest.mark.parametrize("dies", ["home", "own"])
def test_a_worker_that_dies_before_the_catalog_knows_changes_nothing_of_it(broker, dies):
    """The home's worker is stopped while the queue goes, and killed; or the queue's, when the home has not heard."""
    send(broker, "replies")
    broker.stop()
    nearly_over(broker, "replies", QUEUE, left_ms=6000)
    broker.start()
    home, own = broker.worker_processes()
    home.suspend()
    eventually(lambda: logged(broker, '"replies", .*"entity deleted'), "it is deleted")
    if dies == "own":
        own.kill()
        eventually(lambda: len(broker.worker_processes()) == 2, "started again")
        home.resume()
    else:
        home.kill()
    assert_goes(broker, 15)


def test_a_broker_killed_before_the_catalog_knows_makes_what_is_declared_anew(broker):
    send(broker, "replies", "witness")
    broker.stop()
    nearly_over(broker, "replies", QUEUE, left_ms=6000)
    broker.start()
    broker.worker_processes()[0].suspend()
    eventually(lambda: logged(broker, '"replies", .*"entity deleted'), "it is deleted")
    broker.kill()
    assert all(QUEUE in ids for _, ids in catalogs(broker))
    broker.start()
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_receiver("replies", credit=1)
        peer.nothing_more(TRANSFER)
        peer.attach_receiver("witness", credit=1)
        peer.expect(TRANSFER)
    broker.stop()
    assert catalogs(broker) == [(2, [1, 3, 4, 5, 6])] * PARTITIONS
    assert_verified(broker)


@pytest.mark.parametrize(("entity_id", "address"), [(QUEUE, "replies"), (3, "news/Subscriptions/stays")])
def test_all_links_to_entities_that_the_home_deletes_end(broker, entity_id, address):
    """As a user's deletion will be: the home is told, and everybody follows."""
    before = process_ids(broker)
    with Worker(broker) as other, RawPeer.connect(broker.amqp_port) as peer:
        handles = [
            peer.attach_receiver(address, credit=10),
            peer.attach_receiver(f"{address}/$deadletterqueue"),
            peer.attach_sender(f"{address}/$management"),
            peer.attach_receiver(f"{address}/$management"),
            peer.attach_sender(address.split("/")[0]),
        ]
        kept = peer.attach_receiver("witness", credit=1)
        other.say(Op.REMOVE, [entity_id, 77])
        gone = [3, 4, 5] if entity_id == 3 else [entity_id]
        _, version, ids = other.hear(Op.DELETED)
        assert (version, sorted(ids)) == (2, gone)
        detached = [peer.expect(DETACH) for _ in handles]
        assert {frame.fields[0] for frame in detached} == set(handles)
        for frame in detached:
            condition, text = error_of(frame)
            assert condition == NOT_FOUND
            assert "The messaging entity" in text
            assert "could not be found" in text
        assert_missing(peer, address.split("/")[0])
        send(broker, "witness")
        delivery = peer.expect(TRANSFER)
        assert delivery.fields[0] == kept
        peer.settle(delivery.fields[1])
        peer.expect(DISPOSITION)
        other.say(Op.REMOVE, [entity_id])  # it is told twice: nothing happens
    serves(broker.amqp_port)
    with Worker(broker) as late:
        assert late.hear(Op.CATALOG)[1] == 2
    assert process_ids(broker) == before
    broker.stop()
    left = [each for each in range(1, 6) if each not in gone]
    assert catalogs(broker) == [(2, left)] * PARTITIONS
    assert_verified(broker)


def test_links_older_than_the_homes_restart_end_with_their_entity(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        handles = [
            peer.attach_receiver("replies", credit=10),
            peer.attach_sender("replies/$management"),
            peer.attach_sender("replies"),
            peer.attach_sender("witness", properties={TRANSFER_DESTINATION_ADDRESS: "replies"}),
        ]
        home, _ = broker.worker_processes()
        home.kill()
        home.wait(PATIENCE_S)
        eventually(lambda: logged(broker, "worker connected again"), "the gateway has the catalog of the new worker")
        with Worker(broker) as other:
            other.say(Op.REMOVE, [QUEUE])
            other.hear(Op.DELETED)
        for _ in handles:
            assert error_of(peer.expect(DETACH))[0] == NOT_FOUND
        assert_missing(peer, "replies")
    serves(broker.amqp_port)


def test_a_gateway_that_starts_again_knows_what_is_gone(broker):
    with Worker(broker) as other:
        other.say(Op.REMOVE, [QUEUE])
        assert other.hear(Op.DELETED)[1:] == [2, [QUEUE]]
    gateway = broker.gateway()
    gateway.kill()
    gateway.wait(PATIENCE_S)
    eventually(lambda: is_ready(broker), "ready")
    with RawPeer.connect(broker.amqp_port) as peer:
        assert_missing(peer, "replies")
    broker.stop()


def is_ready(broker: Broker) -> bool:
    try:
        return broker.get("/readyz")[0] == 200
    except OSError:
        return False
