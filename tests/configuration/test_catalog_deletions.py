"""What a start makes of entities that a partition has deleted because nobody used them."""

from itertools import count

import pytest

from broker import requests
from broker.catalog.catalog import (
    Definition,
    Reconciled,
    catalog_version,
    definitions,
    home_partition,
    reconcile,
    remove,
    set_version,
)
from broker.namespace.entities import Description, QueueDescription, SubscriptionDescription, TopicDescription
from broker.partition.partition import Partition
from broker.partition.settings import PartitionSettings
from storage.memory import MemoryStore
from storage.records import (
    DELETED_ENTITY_PREFIX,
    auto_deleted_key,
    decode_document,
    deleted_entity_key,
    encode_document,
    entity_key,
    idle_key,
)
from storage.store import Store, Table

T0, T1, T2 = 1_000, 2_000, 3_000
PARTITIONS = 3
INTERVAL_MS = 300_000
LAYOUT = bytes(16)
STARTS = count(1)


class Crash(Exception): ...


class Crashing(MemoryStore):
    """Does not survive its commit when told so, and what was to be committed is lost."""

    crash = False

    def commit(self) -> None:
        if self.crash:
            self.crash = False
            self.abort()
            raise Crash
        super().commit()


@pytest.fixture
def stores() -> list[Crashing]:
    return [Crashing() for _ in range(PARTITIONS)]


def queue(name: str = "orders", **properties) -> QueueDescription:
    return QueueDescription(name=name, auto_delete_on_idle_ms=INTERVAL_MS, **properties)


NEWS: list[Description] = [
    TopicDescription(name="news"),
    SubscriptionDescription(topic="news", name="s", auto_delete_on_idle_ms=300_000),
]


def home_of(stores: list[Crashing], name: str = "orders") -> Crashing:
    return stores[home_partition(name, PARTITIONS)]


def others_of(stores: list[Crashing], name: str = "orders") -> list[Crashing]:
    return [store for store in stores if store is not home_of(stores, name)]


def start(stores: list[Crashing], name: str, now_ms: int) -> Partition:
    """The partition that entities of this name live on."""
    number = home_partition(name, PARTITIONS)
    return Partition(
        number,
        stores[number],
        now_ms=now_ms,
        incarnation=next(STARTS).to_bytes(6, "big"),
        settings=PartitionSettings(),
        home=lambda each: home_partition(each, PARTITIONS),
    )


def advance(partition: Partition, to_ms: int) -> None:
    while (due_ms := partition.next_timer_ms()) is not None and due_ms <= to_ms:
        partition.advance(due_ms)
        partition.commit()


def use_and_leave(stores: list[Crashing], name: str, entity_id: int) -> int:
    """Messages come, and nobody uses it then; the broker ends before the catalog knows. Returns the time of that."""
    partition = start(stores, name, T0)
    partition.send(entity_id << 3, [[LAYOUT, b"old", None, None]] * 3, T0)
    partition.commit()
    end_ms = T0 + 2 * INTERVAL_MS
    advance(partition, end_ms)
    assert partition.auto_deleted
    return end_ms


def names(store: Store) -> dict[int, str]:
    return {item.entity_id: item.description.path for item in definitions(store)}


def message_count(store: Store) -> int:
    return len(store.scan(Table.MESSAGES, b"\0", b"\xff" * 9, 100))


def test_a_deleted_entity_that_is_declared_is_created_again_empty(stores):
    declared = [queue(), queue("bills")]
    reconcile(stores, declared, T0)
    end_ms = use_and_leave(stores, "orders", 1)
    result = reconcile(stores, declared, end_ms)
    assert result == Reconciled(2, ("orders",), (), (), ("orders",))
    assert [names(store) for store in stores] == [{2: "bills", 3: "orders"}] * PARTITIONS
    partition = start(stores, "orders", end_ms)
    assert [*partition.auto_deleted] == []
    assert partition.request(3 << 3, requests.Peek(0, 100, 1 << 20), end_ms) == []
    advance(partition, end_ms)
    assert message_count(home_of(stores)) == 0
    assert reconcile(stores, declared, end_ms) == Reconciled(2, (), (), ())


def test_a_deleted_entity_that_is_not_declared_stays_deleted(stores):
    reconcile(stores, [queue(), queue("bills")], T0)
    end_ms = use_and_leave(stores, "orders", 1)
    assert reconcile(stores, [], end_ms) == Reconciled(2, (), (), (), ("orders",))
    assert [names(store) for store in stores] == [{2: "bills"}] * PARTITIONS


def test_contents_of_a_deleted_entity_are_freed_even_if_the_broker_ended_at_once(stores):
    reconcile(stores, [queue()], T0)
    home = home_of(stores)
    partition = start(stores, "orders", T0)
    partition.send(1 << 3, [[LAYOUT, b"old", None, None]] * 3, T0)
    partition.commit()
    due_ms = T0
    while not partition.auto_deleted:
        next_ms = partition.next_timer_ms()
        assert next_ms is not None
        due_ms = next_ms
        partition.advance(due_ms)
        partition.commit()
    assert message_count(home) == 3
    reconcile(stores, [], due_ms)
    for store in stores:  # where nothing is, it is soon found
        assert store.get(Table.META, deleted_entity_key(1)) is not None
    advance(start(stores, "orders", due_ms), due_ms)
    assert message_count(home) == 0
    assert home.scan(Table.META, DELETED_ENTITY_PREFIX, DELETED_ENTITY_PREFIX + b"\xff" * 5, 10) == []


@pytest.mark.parametrize("partition", range(PARTITIONS))
def test_a_crash_between_partitions_is_mended_at_the_next_start(stores, partition):
    reconcile(stores, [queue()], T0)
    end_ms = use_and_leave(stores, "orders", 1)
    stores[partition].crash = True
    with pytest.raises(Crash):
        reconcile(stores, [queue()], end_ms)
    reconcile(stores, [queue()], end_ms)
    assert [names(store) for store in stores] == [{2: "orders"}] * PARTITIONS
    assert [catalog_version(store) for store in stores] == [2] * PARTITIONS
    assert home_of(stores).get(Table.META, auto_deleted_key(1)) is None


def test_a_subscription_leaves_its_topic_and_what_the_topic_still_needs(stores):
    kept = SubscriptionDescription(topic="news", name="kept")
    reconcile(stores, [*NEWS, kept], T0)
    partition = start(stores, "news", T0)
    partition.send(1 << 3, [[LAYOUT, b"old", None, None]] * 3, T0)
    partition.commit()
    home = home_of(stores, "news")
    home.put(Table.META, auto_deleted_key(2), encode_document(T1))  # and nothing of it is freed yet
    home.commit()
    assert reconcile(stores, [NEWS[0], kept], T1).deleted == ("news/Subscriptions/s",)
    assert decode_document(home.get(Table.META, deleted_entity_key(2)) or b"") == {"deleted_ms": T1, "topic_id": 1}
    partition = start(stores, "news", T1)
    advance(partition, T1)
    assert partition.request(0, requests.Counts([3 << 3]), T1) == {3 << 3: [3, 0, 0, 3 * 43, 0]}
    assert message_count(home) == 3
    assert home.scan(Table.REFS, b"\0", b"\xff" * 9, 10) == []
    assert home.scan(Table.RULES, entity_key(2), entity_key(3), 10) == []


def test_a_topic_goes_with_its_subscriptions_and_their_rules(stores):
    topic = TopicDescription(name="news", auto_delete_on_idle_ms=INTERVAL_MS)
    declared: list[Description] = [
        topic,
        SubscriptionDescription(topic="news", name="s"),
        QueueDescription(name="bills"),
    ]
    reconcile(stores, declared, T0)
    end_ms = use_and_leave(stores, "news", 1)
    assert reconcile(stores, [], end_ms).deleted == ("news", "news/Subscriptions/s")
    for store in stores:
        assert names(store) == {3: "bills"}
        assert store.scan(Table.RULES, b"\0", b"\xff" * 64, 10) == []
    assert reconcile(stores, declared, end_ms).created == ("news", "news/Subscriptions/s")
    assert names(stores[0]) == {3: "bills", 4: "news", 5: "news/Subscriptions/s"}


def test_only_the_partition_that_it_lives_on_may_say_so(stores):
    reconcile(stores, [queue()], T0)
    for store in others_of(stores):
        store.put(Table.META, auto_deleted_key(1), encode_document(T1))
        store.commit()
    assert reconcile(stores, [queue()], T1) == Reconciled(1, (), (), ())


def test_a_change_of_what_is_declared_is_a_use(stores):
    reconcile(stores, [queue(), queue("bills"), *NEWS], T0)
    for entity_id in (1, 2, 4):
        for store in stores:
            store.put(Table.META, idle_key(entity_id), encode_document(200_000))
            store.commit()
    reconcile(stores, [queue(max_delivery_count=3), queue("bills"), *NEWS], T1)
    assert home_of(stores).get(Table.META, idle_key(1)) is None
    assert home_of(stores, "bills").get(Table.META, idle_key(2)) is not None
    assert home_of(stores, "news").get(Table.META, idle_key(4)) is not None


def test_a_partition_that_is_behind_frees_entities_that_the_catalog_has_no_more(stores):
    """Its worker was down when the home took the entity out."""
    reconcile(stores, [queue(), queue("bills")], T0)
    home = home_of(stores)
    behind = start(stores, "orders", T0)
    behind.send(1 << 3, [[LAYOUT, b"old", None, None]], T0)
    behind.commit()
    for store in others_of(stores):
        remove(store, [1])
        set_version(store, 2)
        store.commit()
    assert reconcile(stores, [], T1) == Reconciled(2, (), (), (stores.index(home),))
    assert names(home) == {2: "bills"}
    advance(start(stores, "orders", T1), T1)
    assert message_count(home) == 0


def test_removed_entities_are_no_longer_defined():
    store = MemoryStore()
    reconcile([store], [queue(), queue("bills")], T0)
    remove(store, [1, 77])
    set_version(store, 9)
    assert definitions(store) == [Definition(2, queue("bills"), T0, T0, (0,))]
    assert catalog_version(store) == 9
