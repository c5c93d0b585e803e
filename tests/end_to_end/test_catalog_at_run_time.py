"""Entities that are created, changed and deleted while clients use the broker, and while its processes die."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from broker.catalog.catalog import catalog_version, definitions, home_partition
from broker.worker.home import HANGS_MS
from protocol.codec import Array
from protocol.lock_tokens import uuid_of
from storage.store import Table
from tests.brokers import KEY, Broker
from tests.end_to_end.health import assert_unharmed, is_ready, process_ids, serves, worker_of
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    DETACH,
    DISPOSITION,
    TRANSFER,
    Closed,
    RawPeer,
    body_of,
    error_of,
    message,
    outcome,
)
from tests.end_to_end.raw_requests import Node, Response
from tests.logs import open_tables
from tests.patience import eventually

PARTITIONS, WORKERS = 4, 2
NODE = "$management"
CONFIG = f"""
partitions = {PARTITIONS}
worker_stall_timeout_ms = 6000
partitioning = {{ max_entities = 1000 }}

[[queues]]
name = "witness"

[security]
root_key = "{KEY}"

  [[security.authorization_rules]]
  key_name = "listener"
  primary_key = "only to listen"
  rights = ["Listen"]
"""
NOT_FOUND, BUSY = "amqp:not-found", "com.microsoft:server-busy"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("changing"), CONFIG, workers=WORKERS) as broker:
        yield broker


@pytest.fixture
def broker(shared: Broker) -> Iterator[Broker]:
    """Another client is served as before, whatever the test changes."""
    before = process_ids(shared)
    yield shared
    assert_unharmed(shared, before)


@pytest.fixture
def peer(broker: Broker) -> Iterator[RawPeer]:
    with RawPeer.connect(broker.amqp_port) as peer:
        yield peer


@pytest.fixture
def node(peer: RawPeer) -> Node:
    return Node(peer, NODE)


def create(node: Node, kind: str, rules: list[Any] | None = None, **properties: Any) -> Response:
    body = {"kind": kind, "properties": properties} | ({} if rules is None else {"rules": rules})
    return node.ask("peeklock:create-entity", body)


def update(node: Node, path: str, **properties: Any) -> Response:
    return node.ask("peeklock:update-entity", {"path": path, "properties": properties})


def delete(node: Node, path: str) -> Response:
    return node.ask("peeklock:delete-entity", {"path": path})


def send(peer: RawPeer, address: str, *bodies: bytes) -> None:
    handle = peer.attach_sender(address)
    for body in bodies:
        peer.transfer(message(body), handle)
        answer = peer.expect(DISPOSITION)
        assert answer.fields[4].descriptor == ACCEPTED, answer


def receive(peer: RawPeer, address: str, count: int) -> list[bytes]:
    """So many messages, which are completed, and there are no more."""
    handle = peer.attach_receiver(address, credit=count + 1)
    bodies = []
    for _ in range(count):
        delivery = peer.expect(TRANSFER)
        bodies.append(body_of(delivery.payload))
        peer.settle(delivery.fields[1])
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    peer.nothing_more(TRANSFER)
    peer.detach(handle)
    peer.expect(DETACH)
    return sorted(bodies)


def test_a_created_queue_is_used_at_once_on_whichever_partition_it_lives(broker, peer, node):
    for number in range(2 * PARTITIONS):
        created = create(node, "queue", name=f"Queue-{number}", max_delivery_count=3)
        assert created.status == 200, created
        properties = created.body["properties"]
        assert (properties["name"], properties["max_delivery_count"]) == (f"queue-{number}", 3)
        assert properties["partitions"] == [home_partition(f"queue-{number}", PARTITIONS)]
        with RawPeer.connect(broker.amqp_port) as other:
            send(other, f"queue-{number}", b"first")
        assert receive(peer, f"Queue-{number}", 1) == [b"first"]


def test_a_created_partitioned_queue_is_used_at_once(peer, node):
    created = create(node, "queue", name="wide", enable_partitioning=True)
    assert created.body["properties"]["partitions"] == [*range(PARTITIONS)]
    send(peer, "wide", *(b"%d" % number for number in range(8)))
    assert receive(peer, "wide", 8) == [b"%d" % number for number in range(8)]


@pytest.mark.parametrize("wide", [False, True])
def test_created_subscriptions_select_messages_and_forward_them(peer, node, wide):
    topic, target = f"topic-{wide}", f"target-{wide}"
    assert create(node, "topic", name=topic, enable_partitioning=wide).status == 200
    assert create(node, "queue", name=target, enable_partitioning=wide).status == 200
    rules = [{"name": "small", "filter": {"kind": "sql", "expression": "sys.Label IS NULL"}}]
    assert create(node, "subscription", topic=topic, name="all").status == 200
    assert create(node, "subscription", topic=topic, name="moved", forward_to=target).status == 200
    assert create(node, "subscription", rules, topic=topic, name="some").status == 200
    none = [{"name": "none", "filter": {"kind": "false"}}]
    assert create(node, "subscription", none, topic=topic, name="none").status == 200
    bodies = [b"%d" % number for number in range(6)]
    send(peer, topic, *bodies)
    for address, wanted in (("all", bodies), ("some", bodies), ("none", [])):
        assert receive(peer, f"{topic}/Subscriptions/{address}", len(wanted)) == wanted
    assert receive(peer, target, 6) == bodies


def test_rules_of_a_partitioned_topic_change_while_it_is_used(peer, node):
    create(node, "topic", name="ruled", enable_partitioning=True)
    create(node, "subscription", topic="ruled", name="s")
    rules = Node(peer, "ruled/Subscriptions/s/$management")
    rule = {"rule-name": "none", "rule-description": {"sql-filter": {"expression": "1 = 0"}, "sql-rule-action": None}}
    assert rules.ask("com.microsoft:add-rule", rule).status == 200
    again = rules.ask("com.microsoft:add-rule", rule)
    assert (again.status, again.condition) == (409, "com.microsoft:entity-already-exists")
    assert rules.ask("com.microsoft:remove-rule", {"rule-name": "$Default"}).status == 200
    assert rules.ask("com.microsoft:remove-rule", {"rule-name": "$Default"}).status == 404
    send(peer, "ruled", *[b"m"] * 8)
    assert receive(peer, "ruled/Subscriptions/s", 0) == []


def test_a_changed_queue_behaves_as_it_says(peer, node):
    create(node, "queue", name="changing")
    handle = peer.attach_receiver("changing", credit=1)
    sender = peer.attach_sender("changing")
    assert update(node, "CHANGING", status="Disabled").status == 200
    assert error_of(peer.expect(DETACH))[0] == "com.microsoft:entity-disabled"
    del handle
    peer.transfer(message(b"refused"), sender)
    assert peer.expect(DISPOSITION).fields[4].descriptor != ACCEPTED
    changed = update(node, "changing", status="Active", max_size_mb=2048)
    assert changed.body["properties"]["max_size_mb"] == 2048
    send(peer, "changing", b"m")
    assert receive(peer, "changing", 1) == [b"m"]


def test_keys_of_an_entity_hold_from_the_change_on(broker, node):
    keys = [{"key_name": "sender", "primary_key": "may send", "rights": ["Send"]}]
    create(node, "queue", name="guarded")
    with pytest.raises(Closed):
        RawPeer.connect(broker.amqp_port, key_name="sender", key="may send")
    assert update(node, "guarded", authorization_rules=keys).status == 200
    with RawPeer.connect(broker.amqp_port, key_name="sender", key="may send") as peer:
        send(peer, "guarded", b"m")
    assert delete(node, "guarded").status == 200


def test_a_deleted_queue_is_gone_for_all_and_a_new_one_of_its_name_is_empty(broker, peer, node):
    create(node, "queue", name="going", enable_partitioning=True)
    send(peer, "going", b"1", b"2", b"3")
    with RawPeer.connect(broker.amqp_port) as other:
        other.attach_receiver("going")
        assert delete(node, "Going").status == 200
        condition, text = error_of(other.expect(DETACH))
        assert condition == NOT_FOUND
        assert "could not be found" in text
    assert delete(node, "going").status == 404
    assert create(node, "queue", name="going").status == 200
    assert receive(peer, "going", 0) == []


@pytest.mark.parametrize(
    ("status", "text", "operation", "body"),
    [
        (409, "already exists", "create", {"kind": "queue", "properties": {"name": "WITNESS"}}),
        (404, "could not be found", "update", {"path": "none", "properties": {}}),
        (404, "could not be found", "delete", {"path": "none"}),
        (400, "'kind' is missing", "create", {"properties": {"name": "x"}}),
        (400, "'properties' is missing", "create", {"kind": "queue"}),
        (400, "'path' is empty", "delete", {"path": ""}),
        (400, "lock_duration_ms", "create", {"kind": "queue", "properties": {"name": "x", "lock_duration_ms": 1}}),
        (400, "enable_partitioning", "update", {"path": "witness", "properties": {"enable_partitioning": True}}),
        (400, "strings, numbers", "create", {"kind": "queue", "properties": {"name": b"x"}}),
        (400, "strings, numbers", "create", {"kind": "queue", "properties": {"name": {1: 2}}}),
        (400, "'rules' is empty", "create", {"kind": "subscription", "properties": {"name": "x"}, "rules": []}),
        (400, "rule is not valid", "create", {"kind": "queue", "properties": {"name": "x"}, "rules": [{"colour": 1}]}),
    ],
)
def test_what_cannot_be_is_refused(node, status, text, operation, body):
    answer = node.ask(f"peeklock:{operation}-entity", body)
    assert (answer.status, text in answer.description) == (status, True), answer


def test_without_the_right_to_manage_nobody_reaches_the_node(broker):
    with RawPeer.connect(broker.amqp_port, key_name="listener", key="only to listen") as peer:
        for sender in (True, False):
            peer.attach(sender=sender, address=NODE)
            assert peer.refusal()[0] == "amqp:unauthorized-access"


def test_clients_of_another_gateway_use_what_was_created(tmp_path: Path) -> None:
    with Broker(tmp_path, f"gateways = 2\n{CONFIG}", workers=WORKERS) as broker, ExitStack() as stack:
        # On both gateways, as the system distributes them.
        peers = [stack.enter_context(RawPeer.connect(broker.amqp_port)) for _ in range(8)]
        for number, peer in enumerate(peers):
            assert create(Node(peer, NODE), "queue", name=f"q{number}").status == 200
            for other in peers:
                send(other, f"q{number}", b"m")
            assert receive(peer, f"q{number}", len(peers)) == [b"m"] * len(peers)


def test_in_one_process(tmp_path: Path) -> None:
    with Broker(tmp_path, CONFIG, workers=0) as broker:
        with RawPeer.connect(broker.amqp_port) as peer:
            assert create(Node(peer, NODE), "queue", name="new", enable_partitioning=True).status == 200
            send(peer, "new", b"1", b"2")
        broker.kill()
        broker.start()
        with RawPeer.connect(broker.amqp_port) as peer:
            assert receive(peer, "new", 2) == [b"1", b"2"]
            assert delete(Node(peer, NODE), "new").status == 200


# -- processes that die


def tables(broker: Broker) -> list[Any]:
    """What each partition of a stopped broker has of the catalog."""
    found = []
    for partition in range(PARTITIONS):
        with open_tables(broker.data_dir, partition) as store:
            rules = dict(store.scan(Table.RULES, b"\0", b"\xff" * 300, 1 << 20))
            found.append((catalog_version(store), definitions(store), rules))
    return found


def test_a_worker_that_hangs_holds_up_a_change_until_it_is_replaced(tmp_path: Path) -> None:
    with (
        Broker(tmp_path, CONFIG, workers=WORKERS) as broker,
        RawPeer.connect(broker.amqp_port) as peer,
        RawPeer.connect(broker.amqp_port) as asks,
    ):
        waits = Node(peer, NODE)
        worker_of(broker, 1).suspend()
        waits.say("peeklock:create-entity", {"kind": "queue", "properties": {"name": "new"}})
        peer.wait_until_read()
        time.sleep(HANGS_MS / 1000 + 0.5)  # by now it is known that the worker does not follow
        refused = create(Node(asks, NODE), "queue", name="refused")
        assert (refused.status, refused.condition) == (503, BUSY)
        assert "Partition 1 does not answer" in refused.description
        send(asks, "witness", b"m")
        assert waits.response().status == 200
        eventually(lambda: is_ready(broker), "ready")
        with RawPeer.connect(broker.amqp_port) as other:
            send(other, "new", b"m")
            assert create(Node(other, NODE), "queue", name="next").status == 200
        broker.stop()
        assert all(each == tables(broker)[0] for each in tables(broker))


class Changes(threading.Thread):
    """Creates queues, topics with a subscription, and deletes every third queue, until it is told to end."""

    def __init__(self, port: int, number: int) -> None:
        super().__init__()
        self.there: set[str] = set()
        self.gone: set[str] = set()
        self.conditions: set[str] = set()
        self.failed: BaseException | None = None
        self._port = port
        self._number = number
        self._ends = threading.Event()

    def run(self) -> None:
        try:
            with RawPeer.connect(self._port) as peer:
                node = Node(peer, NODE, credit=1_000_000)
                at = 0
                while not self._ends.is_set():
                    self._one(node, f"{self._number}-{at}", wide=at % 20 == 0)
                    at += 1
        except BaseException as error:
            self.failed = error

    def _one(self, node: Node, name: str, wide: bool) -> None:
        kind = ("queue", "topic")[len(name) % 2]
        if self._done(create(node, kind, name=name, enable_partitioning=wide)):
            self.there.add(name)
            if kind == "topic":
                if self._done(create(node, "subscription", topic=name, name="s")):
                    self.there.add(f"{name}/Subscriptions/s")
            elif name.endswith("3"):
                self.there.discard(name)  # a deletion that was not answered may have been done
                if self._done(delete(node, name)):
                    self.gone.add(name)

    def _done(self, answer: Response) -> bool:
        if answer.status == 200:
            return True
        self.conditions.add(answer.condition)
        time.sleep(0.02)
        return False

    def stop(self) -> None:
        self._ends.set()
        self.join()


def test_whatever_dies_all_partitions_have_what_was_answered(tmp_path: Path) -> None:
    with Broker(tmp_path, CONFIG, workers=WORKERS) as broker:
        changes = [Changes(broker.amqp_port, number) for number in range(2)]
        for each in changes:
            each.start()
        try:
            for turn in range(6):
                time.sleep(0.5 + 0.07 * turn)  # at any point of a change
                worker_of(broker, turn % WORKERS).kill()
                eventually(lambda: len(broker.worker_processes()) == WORKERS, "started again")
                eventually(lambda: is_ready(broker), "ready")
        finally:
            for each in changes:
                each.stop()
        assert not any(each.failed for each in changes), [each.failed for each in changes]
        assert set().union(*(each.conditions for each in changes)) <= {BUSY, "com.microsoft:timeout"}
        there = set().union(*(each.there for each in changes))
        assert len(there) > 20
        with RawPeer.connect(broker.amqp_port) as peer:
            for path in sorted(there)[:: len(there) // 20]:
                if "Subscriptions" in path:
                    peer.attach_receiver(path)
                else:
                    send(peer, path, b"m")
        serves(broker.amqp_port)
        broker.stop()
        first, *others = tables(broker)
        assert all(each == first for each in others)
        paths = {item.description.path for item in first[1]}
        assert there <= paths
        assert not paths & set().union(*(each.gone for each in changes))


@pytest.mark.parametrize("kind", ["plain", "partitioned"])
def test_settlements_are_answered_or_have_no_effect_when_receiving_is_disabled(broker: Broker, kind: str) -> None:
    """Messages are held meanwhile. Their locks go on, so that clients settle them by their tokens."""
    name, count = f"held-{kind}", 400
    with RawPeer.connect(broker.amqp_port) as changing, RawPeer.connect(broker.amqp_port) as peer:
        node = Node(changing, NODE)
        assert create(node, "queue", name=name, enable_partitioning=kind == "partitioned").status == 200
        send(changing, name, *(b"%d" % number for number in range(count)))
        own = Node(peer, f"{name}/$management", credit=count)
        peer.attach_receiver(name, credit=count)
        held = [peer.expect(TRANSFER) for _ in range(count)]
        disabling = threading.Timer(0.01, lambda: update(node, name, status="ReceiveDisabled"))
        disabling.start()
        for delivery in held[: count // 2]:  # the broker detaches the link among these
            peer.settle(delivery.fields[1])
            time.sleep(0.0001)  # so that the change comes between two
        disabling.join()
        for delivery in held[count // 2 :]:
            peer.settle(delivery.fields[1])
        assert error_of(peer.expect(DETACH))[0] == "com.microsoft:entity-disabled"
        answered: set[int] = set()
        peer.wait_until_read()
        while disposition := peer.take_kept(DISPOSITION):
            assert disposition.fields[4] == outcome(ACCEPTED)
            first, last = disposition.fields[1:3]
            answered |= set(range(first, (first if last is None else last) + 1))
        assert answered <= {delivery.fields[1] for delivery in held[: count // 2]}
        for delivery in held:
            if delivery.fields[1] not in answered:
                tokens = {"lock-tokens": Array(UUID, (uuid_of(delivery.fields[2]),))}
                done = own.ask("com.microsoft:update-disposition", {"disposition-status": "completed", **tokens})
                assert done.status == 200, "it was settled, and the client was not told"
        assert update(node, name, status="Active").status == 200
        assert receive(changing, name, 0) == []
