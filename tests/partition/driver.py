"""A partition with one queue, driven as a worker drives it; its clock stands until a test moves it."""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, cast

from typing_extensions import TypeVar

from broker import requests
from broker.errors import BrokerError
from broker.namespace.entities import Description, QueueDescription
from broker.partition.partition import Partition
from broker.partition.requests import Underway
from broker.partition.settings import PartitionSettings
from broker.runs import ranges_of, run_of
from broker.wire import ENTRY, Extra, Outcome
from storage.records import (
    LAYOUT_BYTES,
    MESSAGE_HEADER_BYTES,
    Counts,
    Field,
    Place,
    decode_counts,
    encode_document,
    entity_key,
)
from storage.seen_runs import SeenLimits
from storage.store import Store, Table
from tests.partition.hinted_store import HintedStore

ENTITY = 1
MAIN = ENTITY << 3
DEAD = MAIN | 1
LAYOUT = bytes(range(LAYOUT_BYTES))
START_MS = 1_700_000_000_000
LOCK_MS = 30_000
FEW_IDS = SeenLimits(run_ids=2, fan_out=2, chunk_ids=1, step_ids=2)  # so that few ids become runs, and these others


# The class of a driver's store. What is only called a Driver has a store of any class, and takes any driver's place.
StoreClass = TypeVar("StoreClass", bound=Store, covariant=True, default=Store)


class Delivery(NamedTuple):
    token: bytes  # or the place, of a peeked message
    number: int
    delivery_count: int
    record: bytes
    overlay: dict[int, Any]

    @property
    def place(self) -> Place:
        """Of a peeked message."""
        return Place(cast(int, self.token))

    @property
    def body(self) -> bytes:
        return self.record[MESSAGE_HEADER_BYTES:]

    @property
    def properties(self) -> dict[str, Any]:
        return self.overlay.get(Field.PROPERTIES, {})


def message(body: bytes | str = b"m", ttl_ms: int | None = None, **extra: Any) -> list[Any]:
    """An incoming message; `extra` by the names of `wire.Extra` in lower case."""
    body = body.encode() if isinstance(body, str) else body
    return [LAYOUT, body, ttl_ms, {Extra[name.upper()]: value for name, value in extra.items()} or None]


def deliveries(items: Sequence[Any]) -> list[Delivery]:
    found = []
    for at in range(0, len(items), ENTRY):
        token, number, count, record, overlay = items[at : at + ENTRY]
        found.append(Delivery(token, number, count, record, overlay or {}))
    return found


def describe(**properties: Any) -> QueueDescription:
    return QueueDescription(name="orders", **{"lock_duration_ms": LOCK_MS, **properties})


def define(store: Store, entity_id: int, description: Description, partitions: tuple[int, ...] = ()) -> None:
    """As the catalog does."""
    document: dict[str, Any] = {"kind": description.kind, "entity_id": entity_id}
    document |= {"created_ms": START_MS, "updated_ms": START_MS, "partitions": partitions}
    store.put(Table.ENTITIES, entity_key(entity_id), encode_document(document | description.model_dump(mode="json")))


def request(partition: Partition, now_ms: int, queue: int, name: str, *args: Any) -> Any:
    """Also to its end, if it takes several turns."""
    result = partition.request(queue, requests.RECORDS.made(name, *args), now_ms)
    partition.commit()
    if isinstance(result, Underway):
        while not partition.go_on(result):
            partition.commit()
        partition.commit()
        return result.result
    return result


def run(messages: list[Any]) -> bytes:
    """Incoming messages without anything extra, as they come from a gateway."""
    unused = bytes(MESSAGE_HEADER_BYTES - LAYOUT_BYTES - 8)
    return run_of([unused + (ttl_ms or 0).to_bytes(8, "big") + layout + body for layout, body, ttl_ms, _ in messages])


class Driver(Generic[StoreClass]):
    def __init__(
        self, store: StoreClass | None = None, settings: PartitionSettings | None = None, **properties: Any
    ) -> None:
        self.store = store or cast(StoreClass, HintedStore())  # nobody named another class
        self.settings = settings or PartitionSettings()
        self.now_ms = START_MS
        self._starts = 0
        self._limits: dict[Any, int] = {}
        self.description = describe(**properties)
        define(self.store, ENTITY, self.description)
        self.store.commit()
        self.start()

    def start(self) -> None:
        """The state machine anew, from what the store holds."""
        self._starts += 1
        self._limits.clear()
        self.partition = Partition(
            5,
            self.store,
            now_ms=self.now_ms,
            incarnation=self._starts.to_bytes(6, "big"),
            settings=self.settings,
        )

    def restart(self, settings: PartitionSettings | None = None) -> None:
        """With other settings, if they are given."""
        self.settings = settings or self.settings
        self.start()

    def add_queue(self, entity_id: int, **properties: Any) -> int:
        """Another queue; returns its queue id."""
        description = describe(**properties).model_copy(update={"name": f"queue-{entity_id}"})
        define(self.store, entity_id, description)
        self.partition.put_entity(entity_id, description, self.now_ms)
        self.partition.commit()
        return entity_id << 3

    def change(self, **properties: Any) -> None:
        self.description = QueueDescription.model_validate(self.description.model_dump() | properties)
        define(self.store, ENTITY, self.description)
        self.partition.put_entity(ENTITY, self.description, self.now_ms)
        self.partition.commit()

    def send(self, *messages: list[Any] | str, queue: int = MAIN) -> None:
        made = [message(m) if isinstance(m, str) else m for m in messages]
        if all(ttl_ms is None and extra is None for _, _, ttl_ms, extra in made):
            self.partition.send_run(queue, run(made), self.now_ms)
        else:
            self.partition.send(queue, made, self.now_ms)
        self.partition.commit()

    def open(self, receiver: Any = "r", queue: int = MAIN, receive_and_delete: bool = False) -> None:
        self.partition.open_receiver(receiver, queue, receive_and_delete, self.now_ms)
        self._limits[receiver] = 0

    def grant(self, count: int, receiver: Any = "r") -> None:
        """`count` more than so far."""
        self._limits[receiver] += count
        self.partition.grant(receiver, self._limits[receiver])

    def pump(self) -> dict[Any, list[Delivery]]:
        """By receiver, all of this and the turns it asks for."""
        found: dict[Any, list[Delivery]] = {}
        more = True
        while more:
            pumped = self.partition.pump(self.now_ms)
            self.partition.commit()
            for receiver, _, items in pumped.deliveries:
                found.setdefault(receiver, []).extend(deliveries(items))
            more = pumped.more
        return found

    def receive(self, count: int = 1, receiver: Any = "r", queue: int = MAIN) -> list[Delivery]:
        """What this receiver gets with credit for `count`; it is opened if need be, and has no credit afterwards."""
        if receiver not in self._limits:
            self.open(receiver, queue)
        self.grant(count, receiver)
        got = self.pump().get(receiver, [])
        self._limits[receiver] -= count - len(got)
        self.partition.grant(receiver, self._limits[receiver])
        return got

    def receive_one(self, receiver: Any = "r", queue: int = MAIN) -> Delivery:
        [delivery] = self.receive(1, receiver, queue)
        return delivery

    def settle(
        self, outcome: Outcome, *received: Delivery, properties: dict[str, Any] | None = None, queue: int = MAIN
    ) -> list[BrokerError | None]:
        ranges = ranges_of([delivery.token for delivery in received])
        results = self.partition.settle(queue, ranges, outcome, properties, self.now_ms)
        self.partition.commit()
        return results

    def request(self, name: str, *args: Any, queue: int = MAIN) -> Any:
        return request(self.partition, self.now_ms, queue, name, *args)

    def peek(self, queue: int = MAIN, start: int = 0, count: int = 100) -> list[Delivery]:
        return deliveries(self.request("peek", start, count, 1 << 20, queue=queue))

    def close(self, receiver: Any = "r", broken: bool = False, unsent_from: bytes | None = None) -> None:
        self.partition.close_receiver(receiver, broken, self.now_ms, unsent_from)
        self.partition.commit()
        self._limits.pop(receiver, None)

    def wait(self, ms: int) -> None:
        """Time passes; what is due on the way happens when it is due."""
        end_ms = self.now_ms + ms
        while (due_ms := self.partition.next_timer_ms()) is not None and due_ms <= end_ms:
            self.now_ms = max(self.now_ms, due_ms)
            self.partition.advance(self.now_ms)
            self.partition.commit()
        self.now_ms = end_ms

    def counts(self, queue: int = MAIN) -> list[int]:
        """[available, deferred, scheduled, bytes, locked]"""
        counts: list[int] = self.request("counts", queue)[queue]
        return counts

    def held(self, queue: int = MAIN) -> list[int]:
        """[available, deferred, scheduled, locked]"""
        available, deferred, scheduled, _, locked = self.counts(queue)
        return [available, deferred, scheduled, locked]

    def stored_counts(self, queue: int = MAIN) -> Counts:
        value = self.store.get(Table.COUNTS, entity_key(queue))
        return Counts() if value is None else decode_counts(value)

    def bodies(self, queue: int = MAIN) -> list[str]:
        return [delivery.body.decode() for delivery in self.peek(queue)]
