"""Several partitions in one process, and what is on its way between them: a test delivers, loses, crashes it."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, cast

from typing_extensions import TypeVar

from broker import requests
from broker.namespace.entities import Description, QueueDescription, SubscriptionDescription, TopicDescription
from broker.partition.partition import Partition
from broker.partition.settings import PartitionSettings
from broker.wire import Extra, Forward
from storage.memory import MemoryStore
from storage.queue_ids import Part
from storage.records import STORE_ID_KEY, Place, encode_document, entity_key
from storage.store import Table
from tests.partition.driver import LOCK_MS, START_MS, Delivery, define, deliveries, message
from tests.partition.hinted_store import HintedStore
from tests.partition.turns import CountingStore

# The class of the stores, as in `driver.Driver`.
StoreClass = TypeVar("StoreClass", bound=MemoryStore, covariant=True, default=MemoryStore)


@dataclass
class Connection:
    """From one partition to another; what was sent on it before it was lost may still be read."""

    number: int
    commands: deque[Forward] = field(default_factory=deque)
    answers: deque[tuple[int, int, Any]] = field(default_factory=deque)  # queue that forwards, by whom, answer
    lost: bool = False


@dataclass
class Entity:
    entity_id: int
    description: Description
    partition: int  # the first, if it is partitioned
    partitions: tuple[int, ...] = ()  # those of a partitioned one

    @property
    def queue(self) -> int:
        return self.entity_id << 3


class Partitions(Generic[StoreClass]):
    """Partitions 0 to `count` - 1. Entities are known on all, and live on the partition given with them."""

    def __init__(
        self, count: int, settings: PartitionSettings | None = None, stores: Mapping[int, StoreClass] | None = None
    ) -> None:
        """`stores` are those that are not to be plain, by partition."""
        self.settings = settings or PartitionSettings()
        self.now_ms = START_MS
        self.entities: dict[str, Entity] = {}
        given: Mapping[int, StoreClass] = stores or {}
        self.stores = [given.get(number) or cast(StoreClass, HintedStore()) for number in range(count)]
        for number, store in enumerate(self.stores):
            store.put(Table.META, STORE_ID_KEY, encode_document(bytes([number]) * 8))
            store.commit()
        self._starts = 0
        self._connections = 0
        self._next_receiver = 0
        self.connections: dict[tuple[int, int], list[Connection]] = {}
        self._newest_read: dict[tuple[int, int], int] = {}
        self.partitions = [self._open(number) for number in range(count)]

    def _open(self, number: int) -> Partition:
        self._starts += 1
        return Partition(
            number,
            self.stores[number],
            now_ms=self.now_ms,
            incarnation=self._starts.to_bytes(6, "big"),
            settings=self.settings,
            home=lambda name: self.entities[name.lower()].partition if name.lower() in self.entities else 0,
        )

    # -- entities

    def queue(self, name: str, partition: int, **properties: Any) -> int:
        """Create or change it; returns its queue id."""
        return self._put(QueueDescription(name=name, **{"lock_duration_ms": LOCK_MS, **properties}), partition)

    def fragments(self, name: str, partitions: tuple[int, ...], **properties: Any) -> int:
        """As `queue`, on these partitions."""
        description = QueueDescription(name=name, **{"lock_duration_ms": LOCK_MS, **properties})
        return self._put(description, partitions[0], None, partitions)

    def topic(self, name: str, partition: int, **properties: Any) -> int:
        return self._put(TopicDescription(name=name, **properties), partition)

    def subscription(self, topic: str, name: str, rules: Any = None, **properties: Any) -> int:
        description = SubscriptionDescription(topic=topic, name=name, **properties)
        return self._put(description, self.entities[topic.lower()].partition, rules)

    def _put(
        self, description: Description, partition: int, rules: Any = None, partitions: tuple[int, ...] = ()
    ) -> int:
        key = description.path.lower()
        known = self.entities.get(key)
        entity_id = known.entity_id if known else len(self.entities) + 1
        self.entities[key] = entity = Entity(entity_id, description, partition, partitions)
        partitions = partitions or (partition,)
        for number in range(len(self.stores)):
            self.partitions[number].put_entity(entity_id, description, self.now_ms, rules, partitions)
            define(self.stores[number], entity_id, description, partitions)
            self.turn(number)
        return entity.queue

    def begin_move(self, name: str, to: int) -> None:
        entity = self.entities[name.lower()]
        self._ask(to, "arrive", entity.entity_id)
        self._ask(entity.partition, "depart", entity.entity_id)

    def rows(self, name: str, to: int, limit: int = 1000) -> bool:
        """True if there were none."""
        entity = self.entities[name.lower()]
        found, _, _ = self._ask(entity.partition, "rows", entity.entity_id, 1 << 20, limit)
        self._ask(to, "store-rows", found)
        return not found

    def freeze(self, name: str) -> None:
        entity = self.entities[name.lower()]
        self._ask(entity.partition, "hold", entity.entity_id)
        self._ask(entity.partition, "freeze", entity.entity_id)

    def finish_move(self, name: str, to: int, first: int | None = None) -> None:
        """The partition `first` hears the home's decision before the others do."""
        while not self.rows(name, to):
            pass
        entity = self.entities[name.lower()]
        moved = [entity, *(each for path, each in self.entities.items() if path.startswith(f"{name.lower()}/"))]
        numbers = sorted(range(len(self.stores)), key=lambda number: number != first)
        for number in numbers:
            for each in moved:
                define(self.stores[number], each.entity_id, each.description, (to,))
                self.partitions[number].put_entity(each.entity_id, each.description, self.now_ms, None, (to,))
            self.turn(number)
        for each in moved:
            each.partition = to

    def _ask(self, number: int, name: str, *args: Any) -> Any:
        try:
            return self.partitions[number].request(0, requests.RECORDS.made(name, b"move", *args), self.now_ms)
        finally:
            self.turn(number)

    def delete(self, name: str) -> None:
        entity = self.entities[name.lower()]
        for number, store in enumerate(self.stores):
            self.partitions[number].delete_entity(entity.entity_id, self.now_ms)
            store.delete(Table.ENTITIES, entity_key(entity.entity_id))
            self.turn(number)

    # -- turns

    def turn(self, number: int) -> dict[Any, list[Delivery]]:
        """What a worker does at the end of its turn, as often as the partition asks for it. Deliveries by receiver."""
        found: dict[Any, list[Delivery]] = {}
        partition = self.partitions[number]
        more = True
        while more:
            due_ms = partition.next_timer_ms()
            if due_ms is not None and due_ms <= self.now_ms:
                partition.advance(self.now_ms)
            store = self.stores[number]
            if isinstance(store, CountingStore):
                store.begin()
            pumped = partition.pump(self.now_ms)
            if isinstance(store, CountingStore):
                store.check(self.settings, sum(len(deliveries(items)) for _, _, items in pumped.deliveries))
            partition.commit()
            for command in pumped.forwards:
                self._connection(number, command.partition).commands.append(command)
            for receiver, _, items in pumped.deliveries:
                found.setdefault(receiver, []).extend(deliveries(items))
            more = pumped.more
        return found

    def _connection(self, source: int, destination: int) -> Connection:
        known = self.connections.setdefault((source, destination), [])
        if not known or known[-1].lost:
            self._connections += 1
            known.append(Connection(self._connections))
        return known[-1]

    def deliver(self, source: int, destination: int, connection: Connection) -> None:
        """The destination takes the first command of the connection, unless a newer one has been read."""
        command = connection.commands.popleft()
        way = (source, destination)
        if connection.number < self._newest_read.get(way, 0):
            return
        self._newest_read[way] = connection.number
        _, _, store_id, _, queue_id, entity_id, entries = command
        result = self.partitions[destination].take_over(store_id, queue_id, entity_id, entries, self.now_ms)
        self.turn(destination)
        if not connection.lost:
            connection.answers.append((queue_id, destination, result))

    def answer(self, source: int, connection: Connection) -> None:
        """The source takes the first answer."""
        queue_id, by, (up_to, refused, busy) = connection.answers.popleft()
        self.partitions[source].taken_over(queue_id, by, up_to, refused, busy, self.now_ms)
        self.turn(source)

    def lose(self, source: int, destination: int) -> None:
        """The connection breaks; the source notices, and will make another."""
        known = self.connections.get((source, destination))
        if known and not known[-1].lost:
            known[-1].lost = True
            known[-1].answers.clear()
            self.partitions[source].unreachable([destination], self.now_ms)
            self.turn(source)

    def crash(self, number: int) -> None:
        """The process that has the partition is killed, and started again from what was committed."""
        self.stores[number].abort()
        self.partitions[number] = self._open(number)
        for (source, destination), known in list(self.connections.items()):
            if source == number:
                for connection in known:
                    connection.lost = True
                    connection.answers.clear()
            elif destination == number:
                for connection in known:
                    connection.commands.clear()  # unread, they went with the process
                self.lose(source, destination)
        self.turn(number)

    def wait(self, ms: int) -> None:
        self.now_ms += ms
        for number in range(len(self.stores)):
            self.turn(number)

    def run(self) -> None:
        """Deliver everything until nothing more happens, back-off included."""
        for _ in range(200):
            busy = False
            for (source, destination), known in list(self.connections.items()):
                for connection in list(known):
                    while connection.commands:
                        busy = True
                        self.deliver(source, destination, connection)
                    while connection.answers:
                        busy = True
                        self.answer(source, connection)
            for number, partition in enumerate(self.partitions):
                due_ms = partition.next_timer_ms()
                if due_ms is not None and due_ms <= self.now_ms + 5000:
                    busy = True
                    self.now_ms = max(self.now_ms, due_ms)
                    self.turn(number)
            if not busy:
                return
        raise AssertionError("it goes on for ever")

    # -- messages

    def _partition_of(self, queue_id: int) -> int:
        return next(each.partition for each in self.entities.values() if each.entity_id == queue_id >> 3)

    def send(self, queue_id: int, *messages: list[Any] | str, at: int | None = None) -> None:
        """`at`: the partition, if the entity is on several."""
        number = self._partition_of(queue_id) if at is None else at
        made = [message(each) if isinstance(each, str) else each for each in messages]
        self.partitions[number].send(queue_id, made, self.now_ms)
        self.turn(number)

    def peek(self, queue_id: int, at: int | None = None) -> list[Delivery]:
        number = self._partition_of(queue_id) if at is None else at
        items = self.partitions[number].request(queue_id, requests.Peek(0, 1000, 1 << 30), self.now_ms)
        self.partitions[number].commit()
        return deliveries(items)

    def bodies(self, queue_id: int) -> list[str]:
        return [delivery.body.decode() for delivery in self.peek(queue_id)]

    def receive(self, queue_id: int, count: int = 1, receive_and_delete: bool = True) -> list[Delivery]:
        """By a receiver of its own."""
        number = self._partition_of(queue_id)
        self._next_receiver += 1
        receiver = self._next_receiver
        partition = self.partitions[number]
        partition.open_receiver(receiver, queue_id, receive_and_delete, self.now_ms)
        partition.drain(receiver, count)
        received = self.turn(number).get(receiver, [])
        partition.close_receiver(receiver, False, self.now_ms)
        partition.commit()
        return received

    def receive_session(self, queue_id: int, count: int = 1) -> list[Delivery]:
        """Of the next session there is, by a receiver of its own which deletes."""
        number = self._partition_of(queue_id)
        self._next_receiver += 1
        receiver = self._next_receiver
        partition = self.partitions[number]
        partition.open_receiver(receiver, queue_id, True, self.now_ms, [None, 1000])
        self.turn(number)
        partition.drain(receiver, count)
        received = self.turn(number).get(receiver, [])
        partition.close_receiver(receiver, False, self.now_ms)
        partition.commit()
        return received

    def counts(self, queue_id: int) -> list[int]:
        number = self._partition_of(queue_id)
        counts: list[int] = self.partitions[number].request(0, requests.Counts([queue_id]), self.now_ms)[queue_id]
        return counts


def transfer_dead_letter(queue_id: int) -> int:
    return queue_id | Part.TRANSFER_DEAD_LETTER


def transfer(queue_id: int) -> int:
    return queue_id | Part.TRANSFER


def via(destination: str, sent: list[Any] | str) -> list[Any]:
    """An incoming message of a transfer queue."""
    layout, body, ttl_ms, extra = message(sent) if isinstance(sent, str) else sent
    return [layout, body, ttl_ms, {**(extra or {}), Extra.DESTINATION: destination}]


def dead_letter(queue_id: int) -> int:
    return queue_id | Part.DEAD_LETTER


def is_available(delivery: Delivery) -> bool:
    return delivery.place == Place.AVAILABLE
