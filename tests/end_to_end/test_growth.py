"""A broker that gets more partitions and workers: what there was stays where it is, and new entities use all."""

from pathlib import Path

import pytest

from broker.catalog.catalog import home_partition
from storage.records import decode_document, encode_document
from storage.store import Table
from tests.brokers import Broker
from tests.end_to_end.raw_peer import RawPeer
from tests.end_to_end.raw_requests import Node
from tests.end_to_end.test_catalog_at_run_time import NODE, create, receive, send, update
from tests.logs import open_tables
from tests.patience import PATIENCE_S

BEFORE, AFTER = 2, 5
DECLARED = """
[[queues]]
name = "declared"

[[queues]]
name = "wide"
enable_partitioning = true
"""
# On other partitions if their homes were computed anew.
MOVING = [
    name
    for name in map("plain-{}".format, range(40))
    if home_partition(name, BEFORE) != home_partition(name, AFTER)
][:4]  # fmt: skip
BODIES = [b"%d" % number for number in range(10)]


def broker_with(directory: Path, partitions: int, config: str = DECLARED) -> Broker:
    return Broker(directory, f"partitions = {partitions}\n{config}", workers=min(partitions, 3))


def fill(broker: Broker) -> None:
    with RawPeer.connect(broker.amqp_port) as peer:
        node = Node(peer, NODE)
        for name in MOVING:
            assert create(node, "queue", name=name).status == 200
        assert create(node, "topic", name="news").status == 200
        assert create(node, "subscription", topic="news", name="s").status == 200
        for address in (*MOVING, "declared", "wide", "news"):
            send(peer, address, *BODIES)


def assert_everything_is_there(peer: RawPeer) -> None:
    for address in (*MOVING, "declared", "wide", "news/Subscriptions/s"):
        assert receive(peer, address, len(BODIES)) == BODIES


def forget_partitions(directory: Path) -> None:
    """Definitions as earlier versions stored them: the partition follows from the name."""
    for partition in range(BEFORE):
        with open_tables(directory, partition) as store:
            for key, value in list(store.scan(Table.ENTITIES, b"", b"\xff" * 8, 100)):
                document = decode_document(value)
                if len(document["partitions"]) == 1:
                    del document["partitions"]
                    store.put(Table.ENTITIES, key, encode_document(document))
            store.commit()


@pytest.mark.parametrize("earlier_version", [False, True])
def test_entities_stay_on_their_partitions_and_new_ones_use_all(tmp_path: Path, earlier_version: bool) -> None:
    with broker_with(tmp_path, BEFORE) as broker:
        fill(broker)
    if earlier_version:
        forget_partitions(broker.data_dir)
    more = DECLARED + '[[queues]]\nname = "new"\nenable_partitioning = true\n'
    with broker_with(tmp_path, AFTER, more) as broker, RawPeer.connect(broker.amqp_port) as peer:
        assert_everything_is_there(peer)
        node = Node(peer, NODE)
        for name in MOVING:
            partitions = update(node, name, max_delivery_count=7).body["properties"]["partitions"]
            assert partitions == [home_partition(name, BEFORE)]
            send(peer, name, b"again")
            assert receive(peer, name, 1) == [b"again"]
        of_wide = update(node, "wide", max_delivery_count=7).body["properties"]["partitions"]
        assert of_wide == [*range(BEFORE)]
        assert update(node, "new", max_delivery_count=7).body["properties"]["partitions"] == [*range(AFTER)]
        found = set()
        for number in range(20):
            created = create(node, "queue", name=f"later-{number}", forward_to="new")
            found |= {*created.body["properties"]["partitions"]}
            send(peer, f"later-{number}", b"%d" % number)
        assert found == {*range(AFTER)}
        assert receive(peer, "new", 20) == sorted(b"%d" % number for number in range(20))


def test_a_broker_killed_while_it_grows_has_grown_after_the_next_start(tmp_path: Path) -> None:
    with broker_with(tmp_path, BEFORE) as broker:
        fill(broker)
        broker.kill()
    growing = broker_with(tmp_path, AFTER)
    for _ in range(3):  # each at another moment of its start
        growing.begin()
        growing.kill()
    with growing, RawPeer.connect(growing.amqp_port) as peer:
        assert_everything_is_there(peer)


def test_a_number_that_is_too_small_ends_the_start_and_changes_nothing(tmp_path: Path) -> None:
    with broker_with(tmp_path, AFTER) as broker:
        fill(broker)
    smaller = broker_with(tmp_path, BEFORE)
    smaller.begin()
    assert smaller._process is not None
    assert smaller._process.wait(PATIENCE_S) == 78
    assert "the number may only grow. Set partitions to 5 or more" in smaller.log()
    with broker_with(tmp_path, AFTER) as broker, RawPeer.connect(broker.amqp_port) as peer:
        assert_everything_is_there(peer)
