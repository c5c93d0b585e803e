"""A partition with one topic and subscriptions, driven as `driver.Driver` drives a queue."""

from collections import Counter
from typing import Any

from broker.namespace.entities import SubscriptionDescription, TopicDescription
from broker.partition.settings import PartitionSettings
from broker.wire import Extra
from protocol.codec import Described, Symbol, Timestamp, encode
from protocol.message.intake import take_apart
from storage.records import (
    COPY_BYTES,
    STAGED_PREFIX,
    Counts,
    decode_counts,
    decode_entry,
    decode_references,
    entity_key,
    message_key,
    unpack_queue_key,
)
from storage.store import Store, Table
from tests.partition.driver import Driver, StoreClass, define

TOPIC_ENTITY = 10
TOPIC = TOPIC_ENTITY << 3
A, B, C, D = (entity_id << 3 for entity_id in (11, 12, 13, 14))  # queue ids of subscriptions a, b, c, d
NAMES = {A: "a", B: "b", C: "c", D: "d"}


def event(
    body: bytes | str = b"m",
    ttl_ms: int | None = None,
    scheduled_ms: int = 0,
    system: dict[int, Any] | None = None,
    **properties: Any,
) -> list[Any]:
    """An incoming message with application properties; `system` are fields of the properties section by index."""
    parts = []
    if system is not None:
        parts.append(Described(0x73, [system.get(at) for at in range(13)]))
    if properties:
        parts.append(Described(0x74, properties))
    if scheduled_ms:
        annotations = {Symbol("x-opt-scheduled-enqueue-time"): Timestamp(scheduled_ms)}
        parts.insert(0, Described(0x72, annotations))
    parts.append(Described(0x75, body.encode() if isinstance(body, str) else body))
    layout, stored, _, extra = take_apart(b"".join(map(encode, parts)))
    assert not scheduled_ms or (extra or {})[Extra.SCHEDULED_MS] == scheduled_ms
    return [layout, stored, ttl_ms, extra]


def rule(
    name: str,
    sql: str | None = None,
    action: str | None = None,
    correlation: dict[str, Any] | None = None,
    kind: str = "true",
    **parameters: Any,
) -> dict[str, Any]:
    """A rule document: with a SQL filter, a correlation filter (fields, or `properties`), or one of `kind`."""
    encoded = {f"@{key}": encode(value) for key, value in parameters.items()}
    wanted: dict[str, Any] = {"kind": kind}
    if sql is not None:
        wanted = {"kind": "sql", "expression": sql, "parameters": encoded}
    elif correlation is not None:
        properties = {key: encode(value) for key, value in correlation.get("properties", {}).items()}
        wanted = {"kind": "correlation", **correlation, "properties": properties}
    return {
        "name": name,
        "created_ms": 0,
        "filter": wanted,
        "action": None if action is None else {"expression": action, "parameters": encoded},
    }


class TopicDriver(Driver[StoreClass]):
    """A queue, and the topic `news` with the subscriptions asked for. Its clock and its receivers are the driver's."""

    def __init__(
        self,
        *subscriptions: int,
        store: StoreClass | None = None,
        settings: PartitionSettings | None = None,
        **topic: Any,
    ) -> None:
        super().__init__(store, settings)
        self.put_topic(**topic)
        for queue_id in subscriptions:
            self.subscribe(queue_id)

    def put_topic(self, **properties: Any) -> None:
        description = TopicDescription(name="News", **properties)
        self.partition.put_entity(TOPIC_ENTITY, description, self.now_ms)
        define(self.store, TOPIC_ENTITY, description)
        self.partition.commit()

    def subscribe(self, queue_id: int, *rules: dict[str, Any], no_rules: bool = False, **properties: Any) -> None:
        """Create a subscription or change it. Without rules it has the default rule."""
        description = SubscriptionDescription(
            topic="news", name=NAMES[queue_id], **{"lock_duration_ms": 30_000, **properties}
        )
        given = [*rules] if rules or no_rules else None
        self.partition.put_entity(queue_id >> 3, description, self.now_ms, given)
        define(self.store, queue_id >> 3, description)
        self.partition.commit()

    def unsubscribe(self, queue_id: int) -> None:
        self.partition.delete_entity(queue_id >> 3, self.now_ms)
        self.store.delete(Table.ENTITIES, entity_key(queue_id >> 3))
        self.partition.commit()

    def publish(self, *messages: list[Any] | str) -> None:
        self.send(*[event(m) if isinstance(m, str) else m for m in messages], queue=TOPIC)

    def texts(self, queue_id: int) -> list[str]:
        """What the data sections of a subscription's messages say."""
        return [text(delivery.body) for delivery in self.peek(queue_id)]

    def references(self) -> dict[int, int]:
        """Message id -> recorded references."""
        items = self.store.scan(Table.REFS, b"\0", b"\xff" * 9, 10_000)
        return {int.from_bytes(key, "big"): decode_references(value) for key, value in items}

    def message_count(self) -> int:
        return len(self.store.scan(Table.MESSAGES, b"\0", b"\xff" * 9, 10_000))


def text(body: bytes) -> str:
    """Of a message whose data section is last and short."""
    at = body.rindex(b"\x00\x53\x75\xa0")
    return body[at + 5 :].decode()


def assert_shared_rightly(store: Store, topics: dict[int, set[int]]) -> None:
    """No body without an entry, each body's references are the entries there are, and each topic's size is true.

    `topics`: entity id of a topic -> those of its subscriptions.
    """
    staged = {
        key.removeprefix(STAGED_PREFIX)  # by a transaction that is still open, or not freed yet
        for key, _ in store.scan(Table.META, STAGED_PREFIX, STAGED_PREFIX + b"\xff" * 9, 10_000)
    }
    found = store.scan(Table.MESSAGES, b"\0", b"\xff" * 9, 10_000)
    sizes = {key: len(value) for key, value in found if key not in staged}
    referred: Counter[bytes] = Counter()
    topic_of = {subscription: topic for topic, of in topics.items() for subscription in of}
    bytes_of: Counter[int] = Counter()
    for key, value in store.scan(Table.QUEUE, b"\0", b"\xff" * 14, 10_000):
        queue_id, _, _ = unpack_queue_key(key)
        body = message_key(decode_entry(value).message_id)
        topic = topic_of.get(queue_id >> 3, queue_id >> 3)
        if topic in topics:
            bytes_of[topic] += 0 if referred[body] else sizes[body]
            bytes_of[topic] += COPY_BYTES if topic != queue_id >> 3 else 0
        referred[body] += 1
    assert referred.keys() == sizes.keys()
    recorded = store.scan(Table.REFS, b"\0", b"\xff" * 9, 10_000)
    assert {key: decode_references(value) for key, value in recorded} == {
        key: count for key, count in referred.items() if count > 1
    }
    for topic in topics:
        counts = store.get(Table.COUNTS, entity_key(topic << 3))
        assert (Counts() if counts is None else decode_counts(counts)).size_bytes == bytes_of[topic]
