"""While the broker runs, every partition has the home's catalog again, whichever commits a crash has lost."""

from itertools import count

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.catalog.catalog import catalog_version, definitions, reconcile
from broker.namespace.entities import Description, QueueDescription, SubscriptionDescription, TopicDescription
from broker.partition.partition import Partition
from broker.partition.settings import PartitionSettings
from broker.worker.deletions import Deletions
from storage.memory import MemoryStore
from storage.records import DELETED_ENTITY_PREFIX, entity_key
from storage.store import Table
from tests.models import model_settings

T0 = 1_000
PARTITIONS = 4
WORKERS = 2  # partition p is on worker p % WORKERS, the home on worker 0
QUEUES = 6
STARTS = count(1)
ENTITIES: list[Description] = [
    *[QueueDescription(name=f"q{n}") for n in range(QUEUES)],
    TopicDescription(name="news"),
    SubscriptionDescription(topic="news", name="s"),
]
LAYOUT = bytes(16)


class Broker:
    """Workers as they are started, told of deletions, and killed between the commits of two of their partitions."""

    def __init__(self) -> None:
        self.stores = [MemoryStore() for _ in range(PARTITIONS)]
        reconcile(self.stores, ENTITIES, T0)
        self.partitions: dict[int, Partition] = {}
        self.deletions: dict[int, Deletions] = {}
        for worker in range(WORKERS):
            self.start(worker)

    def numbers(self, worker: int) -> range:
        return range(worker, PARTITIONS, WORKERS)

    def start(self, worker: int) -> None:
        for number in self.numbers(worker):
            self.stores[number].abort()
            self.partitions[number] = Partition(
                number,
                self.stores[number],
                now_ms=T0,
                incarnation=next(STARTS).to_bytes(6, "big"),
                settings=PartitionSettings(),
            )
        of_worker = {number: self.partitions[number] for number in self.numbers(worker)}
        deletions = Deletions(of_worker, dict(enumerate(self.stores)), lambda partition: None)
        self.deletions[worker] = deletions
        if worker == 0:
            deletions.align(T0)
            self.commit(0, None)
        for other in self.deletions:  # who is connected to the home gets the catalog
            if other != 0 and (worker in (0, other)):
                self.connect(other)

    def connect(self, worker: int) -> None:
        there = {item.entity_id for item in definitions(self.stores[0])}
        self.deletions[worker].catch_up(catalog_version(self.stores[0]), there, T0)
        self.commit(worker, None)

    def commit(self, worker: int, crash_after: int | None) -> bool:
        """False if the worker was killed after so many commits."""
        for at, number in enumerate(self.numbers(worker)):
            if at == crash_after:
                return False
            self.partitions[number].commit()
        return crash_after is None

    def delete(self, entity_id: int, crash_after: tuple[int | None, int | None] = (None, None)) -> None:
        """As a request at the home; each worker is killed after so many of its commits, and started again."""
        removed = self.deletions[0].remove([entity_id], T0)
        if removed is None:
            return
        if not self.commit(0, crash_after[0]):
            self.start(0)  # nobody was told
            return
        self.deletions[1].follow(*removed, T0)
        if not self.commit(1, crash_after[1]):
            self.start(1)

    def known(self) -> list[set[int]]:
        return [{item.entity_id for item in definitions(store)} for store in self.stores]

    def check(self) -> None:
        assert all(known == self.known()[0] for known in self.known())
        assert len({catalog_version(store) for store in self.stores}) == 1


@pytest.mark.parametrize("next_deletion", [False, True])
def test_a_partition_beside_the_home_catches_up_after_a_crash_between_their_commits(next_deletion):
    broker = Broker()
    for partition in broker.partitions.values():
        partition.send(1 << 3, [[LAYOUT, b"old", None, None]] * 3, T0)
        partition.commit()
    broker.delete(1, (1, None))
    if next_deletion:
        broker.delete(2)
    broker.check()
    for number, store in enumerate(broker.stores):
        partition = broker.partitions[number]
        while (due_ms := partition.next_timer_ms()) is not None:
            partition.advance(due_ms)
            partition.commit()
        assert store.scan(Table.MESSAGES, b"\0", b"\xff" * 9, 10) == []
        assert store.scan(Table.META, DELETED_ENTITY_PREFIX, DELETED_ENTITY_PREFIX + b"\xff" * 5, 10) == []


def test_contents_are_compared_and_not_only_version_numbers():
    broker = Broker()
    key = entity_key(1)
    definition = broker.stores[0].get(Table.ENTITIES, key)
    assert definition is not None
    broker.delete(1)
    for store in broker.stores[1:]:  # as an older release has left it
        store.put(Table.ENTITIES, key, definition)
        store.commit()
    for worker in range(WORKERS):
        broker.start(worker)
    broker.check()


def test_a_deletion_after_one_that_was_not_heard_of_does_not_hide_it():
    broker = Broker()
    for entity_id in (1, 2):
        removed = broker.deletions[0].remove([entity_id], T0)
        assert removed is not None
        version, gone = removed
        broker.commit(0, None)
    broker.deletions[1].follow(version, gone, T0)
    broker.commit(1, None)
    broker.connect(1)
    broker.check()


class Crashes(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.broker = Broker()
        self.left = set(range(1, len(ENTITIES) + 1))

    @precondition(lambda self: self.left)
    @rule(data=st.data(), home=st.sampled_from([None, 0, 1]), other=st.sampled_from([None, 0, 1]))
    def delete(self, data, home, other):
        entity_id = data.draw(st.sampled_from(sorted(self.left)))
        self.broker.delete(entity_id, (home, other))
        if home != 0:
            self.left -= {entity_id, *({QUEUES + 2} if entity_id == QUEUES + 1 else ())}

    @rule(worker=st.integers(0, WORKERS - 1))
    def restart(self, worker):
        self.broker.start(worker)

    @invariant()
    def all_partitions_have_the_same_catalog(self):
        if hasattr(self, "broker"):
            self.broker.check()
            assert self.broker.known()[0] == self.left


TestCrashes = Crashes.TestCase
TestCrashes.settings = model_settings(30, 12)
