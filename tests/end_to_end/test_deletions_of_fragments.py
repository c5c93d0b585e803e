"""Partitioned entities that are deleted because nobody used any fragment; as `test_deletions` for plain ones."""

from collections.abc import Callable, Iterator

import pytest

from protocol.symbols import TRANSFER_DESTINATION_ADDRESS
from storage.records import encode_document, idle_key
from storage.store import Table
from tests.brokers import Broker
from tests.end_to_end.health import logged, metrics
from tests.end_to_end.raw_peer import DETACH, DISPOSITION, TRANSFER, RawPeer, error_of, message
from tests.end_to_end.test_deletions import (
    INTERVAL_MS,
    NOT_FOUND,
    PARTITIONS,
    assert_goes,
    assert_missing,
    assert_verified,
    catalogs,
    counted,
    send,
    stored,
)
from tests.patience import eventually

CONFIG = f"""
partitions = {PARTITIONS}

[[queues]]
name = "witness"

[[queues]]
name = "replies"
enable_partitioning = true
auto_delete_on_idle_ms = {INTERVAL_MS}

[[topics]]
name = "news"
enable_partitioning = true

  [[topics.subscriptions]]
  name = "stays"

  [[topics.subscriptions]]
  name = "goes"
  auto_delete_on_idle_ms = {INTERVAL_MS}
"""
QUEUE, GOES = 2, 5  # entity ids, in the order of their creation

Start = Callable[[int], Broker]


@pytest.fixture
def start(tmp_path) -> Iterator[Start]:
    brokers: list[Broker] = []

    def start(workers: int) -> Broker:
        brokers.append(broker := Broker(tmp_path, CONFIG, workers=workers))
        broker.start()
        return broker

    yield start
    for broker in brokers:
        broker.kill()
        assert "Traceback" not in broker.log_file.read_text(), broker.log()


def nearly_over(broker: Broker, entity_id: int, left_ms: int) -> None:
    for partition in range(PARTITIONS):
        with stored(broker, partition) as store:
            store.put(Table.META, idle_key(entity_id), encode_document(INTERVAL_MS - left_ms))
            store.commit()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_queue_that_nobody_uses_on_any_partition_is_deleted_and_its_links_end(start, workers):
    broker = start(workers)
    send(broker, *["replies"] * 8, "witness")
    broker.stop()
    nearly_over(broker, QUEUE, left_ms=5000)
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
        assert_missing(peer, "replies")
        peer.transfer(message(b"m"), other)
        peer.expect(DISPOSITION)
    assert logged(broker, '"replies", .*"entity deleted')
    assert counted(broker, "peeklock_auto_deleted_entities_total") == 1
    assert not [labels for labels in metrics(broker) if "replies" in labels]
    broker.stop()
    assert catalogs(broker) == [(2, [1, 3, 4, 5])] * PARTITIONS
    assert_verified(broker)
    for partition in range(PARTITIONS):
        with stored(broker, partition) as store:
            assert store.get(Table.META, idle_key(QUEUE)) is None
    broker.start()  # it is declared, so it is made again: another one, and empty
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_receiver("replies", credit=10)
        peer.nothing_more(TRANSFER)
    broker.stop()
    assert catalogs(broker) == [(3, [1, 3, 4, 5, 6])] * PARTITIONS


def test_a_subscription_goes_alone_and_what_it_shared_stays_for_the_others(start):
    broker = start(2)
    send(broker, *["news"] * 4)
    broker.stop()
    nearly_over(broker, GOES, left_ms=1500)
    broker.start()
    eventually(lambda: counted(broker, "peeklock_auto_deleted_entities_total") == 1, "it is deleted")
    send(broker, "news")
    with RawPeer.connect(broker.amqp_port) as peer:
        assert_missing_receiver(peer, "news/Subscriptions/goes")
        peer.attach_receiver("news/Subscriptions/stays", credit=10)
        for _ in range(5):
            peer.expect(TRANSFER)
        peer.nothing_more(TRANSFER)
    broker.stop()
    assert catalogs(broker) == [(2, [1, 2, 3, 4])] * PARTITIONS
    assert_verified(broker)


def assert_missing_receiver(peer: RawPeer, address: str) -> None:
    peer.attach(sender=False, address=address)
    assert peer.refusal()[0] == NOT_FOUND


@pytest.mark.parametrize("dies", ["home", "other"])
def test_a_worker_that_dies_while_it_is_decided_delays_the_deletion_only(start, dies):
    broker = start(2)
    send(broker, *["replies"] * 8)
    broker.stop()
    nearly_over(broker, QUEUE, left_ms=5000)
    broker.start()
    home, other = broker.worker_processes()
    home.suspend()
    if dies == "other":
        other.kill()
        eventually(lambda: len(broker.worker_processes()) == 2, "started again")
        home.resume()
    else:
        home.kill()
    assert_goes(broker, 20)
