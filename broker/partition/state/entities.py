"""The entities that a partition knows: their terms, which of them live here, and which come, go or are deleted."""

from collections.abc import Callable
from typing import Any

from broker.errors import EntityNotFound
from broker.namespace.fragments import fragment_of
from broker.partition.state.terms import Kind, Terms
from storage.store import Table


class Deleted:
    """An entity whose messages are still being deleted."""

    __slots__ = ("freed_up_to", "topic_id")

    def __init__(self, topic_id: int | None) -> None:
        self.topic_id = topic_id  # of a subscription: its topic
        self.freed_up_to: dict[Table, bytes] = {}  # below these keys, tables have nothing of the entity any more


class Entities:
    """Entity ids are those of the namespace's catalog. Names are in lower case."""

    def __init__(self, partition_id: int, home: Callable[[str], int]) -> None:
        """`home`: name of a queue or topic -> the partition to ask for it, if its definition does not say."""
        self._partition_id = partition_id
        self._home = home
        self.terms: dict[int, Terms] = {}  # by entity id
        self.next_id = 1 << 32  # greater than the ids of all entities that this partition has heard of
        self.topic_ids: dict[str, int] = {}  # by the topic's name
        self.destination_ids: dict[str, int] = {}  # the same for queues and topics: all that is sent to
        self.subscription_ids: dict[int, set[int]] = {}  # topic -> its subscriptions
        self.deleted: dict[int, Deleted] = {}
        self.frozen: set[int] = set()  # entities that refuse uses, because they are being moved to another partition
        self.quiet: set[int] = set()  # entities that hand out and forward nothing, because they soon will be frozen
        self.arriving: dict[int, bytes] = {}  # entities that are being moved here -> token of the move
        self.departing: dict[int, Any] = {}  # entities that are being moved away -> `moving.departure.Departure`
        # Entities that came from another partition, and topics that got a subscription, since the start -> when.
        self.accessed_ms: dict[int, int] = {}

    def partitions_of(self, name: str) -> tuple[int, ...]:
        """Return those that the queue or topic of this name lives on; one if there is no such entity."""
        terms = self.terms.get(self.destination_ids.get(name, 0))
        return (terms and terms.partitions) or (self._home(name),)

    def is_of_here(self, entity_id: int) -> bool:
        """Tell whether the definition of this entity, which exists, says that it lives on this partition."""
        partitions = self.terms[entity_id].partitions
        return not partitions or self._partition_id in partitions

    def lives_here(self, entity_id: int) -> bool:
        """Tell whether the entity, which exists, is of here and may be used."""
        return self.is_of_here(entity_id) and entity_id not in self.frozen

    def partition_for(self, name: str, key: bytes | None, number: int) -> int:
        """Choose the partition that a message to this queue or topic goes to; `number` is its sequence number here.

        Without a key it stays on this partition if it can. Otherwise the number decides, so that the result is the same
        whenever it is asked for.
        """
        partitions = self.partitions_of(name)
        if key is not None or len(partitions) == 1:
            return fragment_of(key or b"", partitions)
        return self._partition_id if self._partition_id in partitions else partitions[number % len(partitions)]

    def define(self, entity_id: int, terms: Terms) -> None:
        """Set the terms of an entity, which may be new. Raises EntityNotFound if its topic does not exist."""
        if terms.kind == Kind.TOPIC:
            self.topic_ids[terms.name.lower()] = entity_id
            self.subscription_ids.setdefault(entity_id, set())
        elif terms.kind == Kind.SUBSCRIPTION:
            topic_id = self.topic_ids.get(terms.topic)
            if topic_id is None:
                raise EntityNotFound(f"The topic of '{terms.name}' could not be found.")
            self.subscription_ids[topic_id].add(entity_id)
        if terms.kind != Kind.SUBSCRIPTION:
            self.destination_ids[terms.name.lower()] = entity_id
        self.terms[entity_id] = terms
        if entity_id >= self.next_id:
            self.next_id = entity_id + 1

    def forget(self, entity_id: int) -> int | None:
        """Remove the terms of an entity. Returns the topic of a subscription."""
        terms = self.terms.pop(entity_id)
        if terms.kind != Kind.SUBSCRIPTION:
            del self.destination_ids[terms.name.lower()]
        if terms.kind == Kind.TOPIC:
            del self.topic_ids[terms.name.lower()]
            del self.subscription_ids[entity_id]
        elif terms.kind == Kind.SUBSCRIPTION:
            topic_id = self.topic_ids[terms.topic]
            self.subscription_ids[topic_id].discard(entity_id)
            return topic_id
        return None
