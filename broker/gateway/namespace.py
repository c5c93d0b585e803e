"""A gateway's view of the namespace: entities by path, and the partition of each."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from broker.catalog.catalog import Definition
from broker.errors import EntityDisabled, EntityNotFound, NotAllowed
from broker.namespace.entities import Description, Status, SubscriptionDescription, TopicDescription
from broker.namespace.fragments import Keys, fragment_of, partition_of_number, partition_of_token
from broker.settings.listeners import MAX_MESSAGE_BYTES
from protocol import error_texts
from protocol.addresses import Address, Part
from storage.queue_ids import Part as QueuePart
from storage.queue_ids import queue_id_of

_QUEUE_PART = {
    Part.MAIN: QueuePart.MAIN,
    Part.DEAD_LETTER: QueuePart.DEAD_LETTER,
    Part.TRANSFER_DEAD_LETTER: QueuePart.TRANSFER_DEAD_LETTER,
}


class Entity:
    """One entity of the catalog; `name` is its whole path. `partitions` are those that it lives on.

    There is one object for each entity id as long as the entity exists. Its description changes, and the partition of a
    plain one (`Namespace`). One that `is_temporary` is held by links (`broker.gateway.holding`).
    """

    __slots__ = ("created_ms", "description", "entity_id", "is_temporary", "kind", "name", "partitions", "updated_ms")

    def __init__(
        self,
        entity_id: int,
        description: Description,
        partitions: tuple[int, ...],
        created_ms: int = 0,
        updated_ms: int = 0,
        is_temporary: bool = False,
    ) -> None:
        self.entity_id = entity_id
        self.description = description
        self.kind = description.kind
        self.name = description.path
        self.partitions = partitions
        self.created_ms = created_ms
        self.updated_ms = updated_ms
        self.is_temporary = is_temporary

    @property
    def partition(self) -> int:
        """The partition of a plain entity; the first of those of a partitioned one."""
        return self.partitions[0]

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self:
        """Make an entity of a document of the catalog."""
        definition = Definition.from_document(document)
        return cls(
            definition.entity_id,
            definition.description,
            definition.partitions,
            definition.created_ms,
            definition.updated_ms,
            definition.temporary,
        )

    def take(self, other: Self) -> None:
        """The same entity has been changed."""
        self.description = other.description
        self.partitions = other.partitions
        self.updated_ms = other.updated_ms

    @property
    def top_level(self) -> str:
        """The name in lower case of the queue or topic; of a subscription that of its topic."""
        description = self.description
        return (description.topic if isinstance(description, SubscriptionDescription) else self.name).lower()

    @property
    def is_partitioned(self) -> bool:
        return len(self.partitions) > 1

    def partition_of_session(self, session_id: str) -> int:
        return fragment_of(session_id.encode(), self.partitions)

    def partition_of_number(self, sequence_number: int) -> int:
        """The partition of a message; any if the entity cannot have a message with this number."""
        return self.current(partition_of_number(sequence_number))

    def partition_of_token(self, lock_token: bytes) -> int:
        """The partition of a lock; any if the entity cannot have a lock with this token."""
        return self.current(partition_of_token(lock_token))

    def current(self, partition: int) -> int:
        """This partition, or if the entity does not live there, one that it lives on."""
        return partition if partition in self.partitions else self.partitions[0]

    def queue(self, part: Part) -> int:
        """The queue id of the entity itself or of one of its dead-letter queues."""
        return queue_id_of(self.entity_id, _QUEUE_PART[part])

    @property
    def transfer_queue(self) -> int:
        """The queue id of the transfer queue, where messages sent through the entity wait to be moved on."""
        return queue_id_of(self.entity_id, QueuePart.TRANSFER)

    @property
    def requires_session(self) -> bool:
        return not isinstance(self.description, TopicDescription) and self.description.requires_session

    @property
    def detects_duplicates(self) -> bool:
        return not isinstance(self.description, SubscriptionDescription) and (
            self.description.requires_duplicate_detection
        )

    def max_message_bytes(self, broker_limit: int) -> int:
        """The largest message the entity takes: its own limit, or else the broker's."""
        own = None if isinstance(self.description, SubscriptionDescription) else self.description.max_message_size_kb
        return broker_limit if own is None else min(own * 1024, MAX_MESSAGE_BYTES)

    def require_send(self) -> None:
        """Check that the entity takes messages from clients. Raises NotAllowed, EntityDisabled."""
        if self.kind == "subscription":
            raise NotAllowed(error_texts.sender_on_subscription(self.name))
        if self.description.status in (Status.DISABLED, Status.SEND_DISABLED):
            raise EntityDisabled(error_texts.entity_disabled(self.name, self.description.status))

    def require_transfer(self) -> None:
        """Check that messages may be sent through the entity. Receivers do that, so SendDisabled does not prevent it.

        Raises EntityDisabled.
        """
        if self.description.status == Status.DISABLED:
            raise EntityDisabled(error_texts.entity_disabled(self.name, self.description.status))

    def forward_to(self, part: Part) -> str | None:
        """The name of the entity that messages of this part move on to; None if they stay to be received."""
        if isinstance(self.description, TopicDescription):
            return None
        if part is Part.MAIN:
            return self.description.forward_to
        return self.description.forward_dead_lettered_messages_to if part is Part.DEAD_LETTER else None

    def require_receive(self, part: Part = Part.MAIN) -> None:
        """Check that clients may receive from this part of the entity. Raises NotAllowed, EntityDisabled."""
        if to := self.forward_to(part):
            raise NotAllowed(error_texts.receiver_on_forwarding(self.name, to))
        if self.description.status in (Status.DISABLED, Status.RECEIVE_DISABLED):
            raise EntityDisabled(error_texts.entity_disabled(self.name, self.description.status))

    def tracker(self, namespace: str) -> str:
        """The tracker at the end of error texts, which names the entity."""
        return error_texts.entity_tracker(namespace, self.name, self.kind.capitalize())


class Namespace:
    """The entities of the catalog, by path."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._entities: dict[str, Entity] = {}
        self._sorted: dict[str, list[Entity]] = {}  # made when somebody lists them; empty after a change

    def replace(self, entities: Iterable[Entity]) -> list[Entity]:
        """Take the whole catalog. Returns the entities that it does not have any more."""
        left = {entity.entity_id: entity for entity in self._entities.values()}
        self._entities = {}
        for entity in entities:
            known = left.pop(entity.entity_id, entity)
            known.take(entity)
            self._entities[known.name.lower()] = known
        self._sorted.clear()
        return list(left.values())

    def put(self, entity: Entity) -> Entity | None:
        """Take one entity, which may be known. Returns it if it was moved to another partition."""
        known = self._entities.get(entity.name.lower(), entity)
        is_moved = known.entity_id == entity.entity_id and known.partitions != entity.partitions
        if known.entity_id == entity.entity_id:
            known.take(entity)
            entity = known
        if self._entities.get(entity.name.lower()) is not entity:
            self._entities[entity.name.lower()] = entity
            self._sorted.clear()
        return entity if is_moved else None

    def remove(self, entity_ids: Container[int]) -> list[Entity]:
        """Returns those of them that were there."""
        removed = [entity for entity in self._entities.values() if entity.entity_id in entity_ids]
        for entity in removed:
            del self._entities[entity.name.lower()]
        if removed:
            self._sorted.clear()
        return removed

    def at(self, path: str) -> Entity | None:
        return self._entities.get(path.lower())

    def queues(self) -> Sequence[Entity]:
        """Return the queues in the order of their names."""
        return self._in_order().get("queue", ())

    def topics(self) -> Sequence[Entity]:
        """Return the topics in the order of their names."""
        return self._in_order().get("topic", ())

    def subscriptions_of(self, topic: str) -> Sequence[Entity]:
        """Return the subscriptions of the topic in the order of their names."""
        return self._in_order().get(f"subscriptions of {topic.lower()}", ())

    def _in_order(self) -> Mapping[str, list[Entity]]:
        if not self._sorted:
            for _, entity in sorted(self._entities.items()):
                group = entity.kind
                if isinstance(entity.description, SubscriptionDescription):
                    group = f"subscriptions of {entity.description.topic.lower()}"
                self._sorted.setdefault(group, []).append(entity)
        return self._sorted

    def find(self, address: Address) -> Entity:
        """Raises EntityNotFound with the text that SDKs recognise. A topic has no dead-letter queue."""
        entity = self._entities.get(address.key)
        if entity is None or (entity.kind == "topic" and address.part is Part.DEAD_LETTER):
            kind = "Subscription" if address.subscription else "Queue"
            raise EntityNotFound(error_texts.entity_not_found(self.name, address.path, kind))
        return entity

    def keys_of(self, entity: Entity) -> Keys:
        """Return which keys choose the fragments of the entity's messages; for a subscription, those of its topic."""
        if not entity.is_partitioned:
            return Keys.NONE
        sent_to: Entity | None = entity
        if isinstance(entity.description, SubscriptionDescription):
            sent_to = self.at(entity.description.topic)
        return Keys.WITH_MESSAGE_ID if sent_to is not None and sent_to.detects_duplicates else Keys.SET

    def names(self) -> Mapping[int, str]:
        return {entity.entity_id: entity.name for entity in self._entities.values()}

    def __iter__(self) -> Iterator[Entity]:
        return iter(self._entities.values())
