"""An entity on one of two partitions, which it moves between, and what a user of it sees."""

from typing import Any

from broker import requests, wire
from broker.errors import BrokerError
from broker.namespace.entities import Description, QueueDescription, SubscriptionDescription, TopicDescription
from broker.namespace.rule_descriptions import DEFAULT_RULE
from broker.partition.partition import Partition
from broker.partition.settings import PartitionSettings
from broker.wire import Mark, Outcome
from protocol.codec import Long, encode
from protocol.symbols import DELAY
from storage.memory import MemoryStore
from storage.queue_ids import entity_of, queue_id_of
from storage.records import (
    STORE_ID_KEY,
    CorruptRecord,
    decode_entry,
    decode_references,
    encode_document,
    message_key,
    rule_key,
)
from storage.store import Table
from tests.partition.accounts import problems
from tests.partition.driver import FEW_IDS, START_MS, define, deliveries, message, request
from tests.partition.hinted_store import HintedStore

ENTITY, ALL, SOME = 1, 2, 3
TOKEN = b"move"
FIRST, SECOND = 5, 6
QUEUES: dict[str, dict[str, Any]] = {
    "plain": {"requires_duplicate_detection": True, "duplicate_detection_history_time_window_ms": 60_000},
    "sessions": {"requires_session": True},
    "forwards": {"forward_dead_lettered_messages_to": "target"},
}
OF_QUEUES = (Table.QUEUE, Table.DUE, Table.COUNTS, Table.SESSION_ENTRIES, Table.SESSIONS, Table.SESSION_STATES)
SETTINGS = PartitionSettings(seen_ids=FEW_IDS, step=3, turn_work=40, abandon_delays=True)


def described(kind: str) -> dict[int, Description]:
    if kind != "topic":
        target = QueueDescription(name="target")
        return {ENTITY: QueueDescription(name="moved", lock_duration_ms=30_000, **QUEUES[kind]), 9: target}
    return {
        ENTITY: TopicDescription(name="moved"),
        ALL: SubscriptionDescription(topic="moved", name="all", lock_duration_ms=30_000),
        SOME: SubscriptionDescription(topic="moved", name="some", lock_duration_ms=30_000, requires_session=False),
    }


class World:
    """`refuses` says whether the move is at the point where the entity refuses uses."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.now_ms = START_MS
        self.entities = described(kind)
        self.ids = [each for each in self.entities if each != 9]
        self.stores = {each: HintedStore() for each in (FIRST, SECOND)}
        self.at = FIRST
        self._starts = 0
        self.restored = 0  # how often `put_back` has put back what a receiver got
        self.handed_out: list[list[Any]] = []  # entry items
        self.held: dict[tuple[int, int], bytes] = {}  # (queue id, sequence number) -> lock token
        self.unsent: list[tuple[int, list[Any]]] = []  # queue id, entry items that a gateway has received and deleted
        for partition, store in self.stores.items():
            store.put(Table.META, STORE_ID_KEY, encode_document(b"store-%02d" % partition))
            self._define(partition, FIRST)
            for entity_id, description in self.entities.items():
                if description.kind == "subscription":
                    key = rule_key(entity_id, DEFAULT_RULE.name)
                    store.put(Table.RULES, key, encode_document(DEFAULT_RULE.document(START_MS)))
            store.commit()
        self.partitions = {each: self._opened(each) for each in self.stores}

    def _define(self, partition: int, at: int) -> None:
        for entity_id, description in self.entities.items():
            define(self.stores[partition], entity_id, description, (SECOND if entity_id == 9 else at,))

    def _opened(self, partition: int) -> Partition:
        self._starts += 1
        return Partition(
            partition,
            self.stores[partition],
            now_ms=self.now_ms,
            incarnation=self._starts.to_bytes(6, "big"),
            settings=SETTINGS,
        )

    @property
    def partition(self) -> Partition:
        return self.partitions[self.at]

    def restart(self, partition: int | None = None) -> None:
        """The process of the partition dies; locks are lost."""
        partition = self.at if partition is None else partition
        self.stores[partition].abort()
        self.partitions[partition] = self._opened(partition)
        if partition == self.at:
            self.held.clear()

    # -- the move

    @property
    def to(self) -> int:
        return SECOND if self.at == FIRST else FIRST

    def ask(self, partition: int, name: str, *args: Any) -> Any:
        try:
            return self.partitions[partition].request(0, requests.RECORDS.made(name, TOKEN, *args), self.now_ms)
        finally:
            self.partitions[partition].commit()

    def begin_move(self) -> None:
        self.ask(self.to, "arrive", ENTITY)
        self.ask(self.at, "depart", ENTITY)

    def rows(self, limit: int = 1000) -> tuple[bool, int]:
        found, is_read, noted = self.ask(self.at, "rows", ENTITY, 1 << 20, limit)
        if found:
            self.ask(self.to, "store-rows", found)
        return is_read, noted

    def freeze(self) -> None:
        self.pump()  # what is not quiet yet forwards
        self.ask(self.at, "hold", ENTITY)
        self.pump()
        self.ask(self.at, "freeze", ENTITY)
        self.held.clear()

    def finish(self) -> None:
        while self.rows() != (True, 0):
            pass
        self.decide()

    def decide(self) -> None:
        """The home's decision reaches both."""
        to = self.to
        for partition, at in self.partitions.items():
            self._define(partition, to)
            for entity_id in self.ids:
                at.put_entity(entity_id, self.entities[entity_id], self.now_ms, partitions=(to,))
            at.commit()
        self.at = to

    def keep(self) -> None:
        for partition in self.partitions.values():
            partition.end_move(ENTITY, self.now_ms)
            partition.commit()

    # -- uses; each returns what a client sees

    def use(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self, name)(*args)
        except BrokerError as error:
            self.partition.commit()
            return type(error).__name__

    def source(self, which: int) -> int:
        """A queue to receive from."""
        if self.kind == "topic":
            return queue_id_of((ALL, SOME)[which % 2], which // 2 % 2)
        return queue_id_of(ENTITY, which % 2)

    def send(self, number: int, ttl_ms: int | None, after_ms: int, session: str) -> None:
        extra: dict[str, Any] = {"message_id": b"\xa1\x01%d" % (number % 9)}
        if after_ms:
            extra["scheduled_ms"] = self.now_ms + after_ms
        if self.kind == "sessions":
            extra["session_id"] = session
        self.partition.send(queue_id_of(ENTITY), [message(b"body %d" % number, ttl_ms, **extra)], self.now_ms)
        self.partition.commit()

    def receive(self, which: int, count: int) -> list[Any]:
        queue = self.source(which)
        found = self._receive(queue, which, count, False)
        for each in found:
            self.held[queue, each.number] = each.token
        return [(each.number, each.delivery_count, each.body, each.properties) for each in found]

    def take(self, which: int, count: int) -> list[Any]:
        """Receive and delete, for a client that gets nothing of it: `put_back` comes later."""
        queue = self.source(which)
        self._receive(queue, which, count, True)
        found = [each for items in self.handed_out for each in deliveries(items)]
        self.unsent += [(queue, items) for items in self.handed_out]
        return [(each.number, each.delivery_count, each.body, each.properties) for each in found]

    def _receive(self, queue: int, which: int, count: int, deletes: bool) -> list[Any]:
        session = [None, 0] if self.kind == "sessions" and not which % 2 else None
        self.partition.open_receiver("r", queue, deletes, self.now_ms, session)
        self.pump()
        self.partition.grant("r", count)
        self.handed_out.clear()
        found = self.pump()
        self.partition.close_receiver("r", False, self.now_ms)
        self.partition.commit()
        return found

    def put_back(self, partition: int | None = None, dies: str = "") -> None:
        """As a gateway does it with its partition, or with that where it thinks that the entity lives. If the process
        `dies` before or after its commit, the gateway gets no answer and begins again. Raises EntityMoving, ServerBusy.
        """
        at = self.at if partition is None else partition
        for number, (queue, items) in enumerate(self.unsent, self.restored):
            mark = Mark(wire.Op.MARK, at, 0, b"gateway", number, 1, self.restored)
            self.partitions[at].restore(queue, items, self.now_ms, mark)
        if dies != "before":
            self.partitions[at].commit()
        if dies:
            self.restart(at)
            self.put_back(at)
        self.restored += len(self.unsent)
        self.unsent.clear()

    def settle(self, which: int, outcome: int, delay_ms: int = 0) -> Any:
        """An abandoned message is back after a delay."""
        if not self.held:
            return None
        (queue, number), token = sorted(self.held.items())[which % len(self.held)]
        del self.held[queue, number]
        properties: dict[str, Any] = {"seen": "\xa1\x01x"} if which % 2 else {}
        if outcome == Outcome.ABANDONED:
            properties[DELAY] = encode(Long(delay_ms))
        results = self.partition.settle(queue, [token], outcome, properties, self.now_ms)
        self.partition.commit()
        return [queue, number, *(each and type(each).__name__ for each in results)]

    def receive_deferred(self, which: int, number: int, *active: bool) -> Any:
        _, items, *_ = self.request(self.source(which), "receive-deferred", [number], True, *active)
        return [(each.number, each.delivery_count, each.body, each.properties) for each in deliveries(items)]

    def set_state(self, session: str, state: bytes) -> Any:
        """Returns the state before."""
        if self.kind != "sessions":
            return None
        queue = queue_id_of(ENTITY)
        self.partition.open_receiver("s", queue, False, self.now_ms, [session, 0])
        self.pump()
        try:
            before = self.request(queue, "get-session-state", "s", session)
            self.request(queue, "set-session-state", "s", session, state)
            return before
        finally:
            self.partition.close_receiver("s", False, self.now_ms)
            self.partition.commit()

    def cancel(self, number: int) -> Any:
        return self.request(queue_id_of(ENTITY), "cancel-scheduled", [number])

    def peek(self, which: int) -> Any:
        found = deliveries(self.request(self.source(which), "peek", 0, 100, 1 << 20))
        return [(each.token, each.number, each.delivery_count, each.body, each.properties) for each in found]

    def counts(self) -> Any:
        wanted = [queue_id_of(entity_id, part) for entity_id in self.ids for part in range(4)]
        return {queue: found for queue, found in self.request(0, "counts", *wanted).items() if queue in wanted}

    def wait(self, ms: int) -> None:
        end_ms = self.now_ms + ms
        for partition in self.partitions.values():
            now_ms = self.now_ms
            while (due_ms := partition.next_timer_ms()) is not None and due_ms <= end_ms:
                now_ms = max(now_ms, due_ms)
                partition.advance(now_ms)
                partition.commit()
        self.now_ms = end_ms
        self.pump()

    def request(self, queue: int, name: str, *args: Any) -> Any:
        return request(self.partition, self.now_ms, queue, name, *args)

    def pump(self) -> list[Any]:
        found = []
        more = True
        while more:
            pumped = self.partition.pump(self.now_ms)
            self.partition.commit()
            found += [each for _, _, items in pumped.deliveries for each in deliveries(items)]
            self.handed_out += [items for _, _, items in pumped.deliveries]
            more = pumped.more
            for forward in pumped.forwards:
                _, to, store_id, _, source, entity_id, entries = forward
                answer = self.partitions[to].take_over(store_id, source, entity_id, entries, self.now_ms)
                self.partitions[to].commit()
                self.partition.taken_over(source, to, *answer, self.now_ms)
                self.partition.commit()
                more = True
        return found

    # -- what is stored

    def rest(self) -> None:
        """Let all that is done step by step be done."""
        for _ in range(200):
            self.wait(0)

    def check(self) -> None:
        for partition, store in self.stores.items():
            assert problems(store) == []
            self.partitions[partition].check()

    def stored(self, partition: int) -> dict[str, Any]:
        """Everything that the partition has of the entity, with the records in the place of their numbers."""
        store = self.stores[partition]
        found: dict[str, Any] = {}
        for table in (
            Table.QUEUE,
            Table.DUE,
            Table.COUNTS,
            Table.SESSION_ENTRIES,
            Table.SESSIONS,
            Table.SESSION_STATES,
        ):
            for key, value in store.scan(table, b"\0", b"\xff" * 400, 1 << 30):
                if entity_of(int.from_bytes(key[:4], "big")) in self.ids:
                    found[f"{table.name} {key.hex()}"] = self._readable(store, table, value)
        for table in (Table.RULES, Table.DUPLICATE_LOG, Table.DUPLICATE_RUNS, Table.DUPLICATE_CHUNKS):
            for key, value in store.scan(table, b"\0", b"\xff" * 400, 1 << 30):
                if int.from_bytes(key[:4], "big") in self.ids:
                    found[f"{table.name} {key.hex()}"] = value
        return found

    def _readable(self, store: MemoryStore, table: Table, value: bytes) -> Any:
        if table is Table.DUE:
            return store.get(Table.MESSAGES, value)
        if table is not Table.QUEUE:
            return value
        try:
            message_id, delivery_count, overlay = decode_entry(value)
        except CorruptRecord:
            return value
        references = store.get(Table.REFS, message_key(message_id))
        shared = 1 if references is None else decode_references(references)
        return store.get(Table.MESSAGES, message_key(message_id)), delivery_count, overlay, shared

    def leftovers(self, partition: int) -> list[tuple[str, bytes]]:
        """Rows of the entity on a partition where it does not live; every partition has the rules."""
        store = self.stores[partition]
        found = [(name, b"") for name in self.stored(partition) if not name.startswith("RULES")]
        names = (b"deleted-entity-", b"arriving-", b"arrived-", b"frozen-", b"staged-", b"overtaken-")
        found += [
            ("META", key) for key, _ in store.scan(Table.META, b"\0", b"\xff" * 40, 1 << 30) if key.startswith(names)
        ]
        if self.kind != "forwards":
            for table in (Table.MESSAGES, Table.REFS):
                found += [(table.name, key) for key, _ in store.scan(table, b"\0", b"\xff" * 40, 1 << 30)]
        return found
