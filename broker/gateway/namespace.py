"""What a gateway knows of the namespace: entities by path, and where each lives."""

from collections.abc import Iterable, Iterator, Mapping

from broker.config import MAX_MESSAGE_BYTES
from broker.entities import QueueDescription, Status
from broker.errors import EntityDisabled, EntityNotFound
from protocol import tracking
from protocol.addresses import Address, Part
from storage.records import Part as QueuePart

_QUEUE_PART = {
    Part.MAIN: QueuePart.MAIN,
    Part.DEAD_LETTER: QueuePart.DEAD_LETTER,
    Part.TRANSFER_DEAD_LETTER: QueuePart.TRANSFER_DEAD_LETTER,
}


class Entity:
    """One entity of the catalog. `partition` is its home."""

    __slots__ = ("description", "entity_id", "name", "partition")

    def __init__(self, entity_id: int, description: QueueDescription, partition: int) -> None:
        self.entity_id = entity_id
        self.description = description
        self.name = description.name
        self.partition = partition

    def queue(self, part: Part) -> int:
        """The queue id of the entity itself or of one of its dead-letter queues."""
        return self.entity_id << 3 | _QUEUE_PART[part]

    def max_message_bytes(self, broker_limit: int) -> int:
        """The largest message the entity takes: its own limit, or else the broker's."""
        own = self.description.max_message_size_kb
        return broker_limit if own is None else min(own * 1024, MAX_MESSAGE_BYTES)

    def require_send(self) -> None:
        if self.description.status in (Status.DISABLED, Status.SEND_DISABLED):
            raise EntityDisabled(tracking.entity_disabled(self.name, self.description.status))

    def require_receive(self) -> None:
        if self.description.status in (Status.DISABLED, Status.RECEIVE_DISABLED):
            raise EntityDisabled(tracking.entity_disabled(self.name, self.description.status))


class Namespace:
    """The entities by path; replaced as a whole when the catalog changes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._entities: dict[str, Entity] = {}

    def replace(self, entities: Iterable[Entity]) -> None:
        self._entities = {entity.name.lower(): entity for entity in entities}

    def find(self, address: Address) -> Entity:
        """Raises EntityNotFound with the text that SDKs recognise."""
        entity = None if address.subscription else self._entities.get(address.key)
        if entity is None:
            raise EntityNotFound(tracking.entity_not_found(self.name, address.path))
        return entity

    def names(self) -> Mapping[int, str]:
        return {entity.entity_id: entity.name for entity in self._entities.values()}

    def __iter__(self) -> Iterator[Entity]:
        return iter(self._entities.values())
