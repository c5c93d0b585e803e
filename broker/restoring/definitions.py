"""The definitions that a restored namespace gets: those that a capture kept, or those of the configuration."""

from base64 import b64decode
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Self

import msgpack

from broker.catalog.catalog import (
    CATALOG_VERSION_KEY,
    FIRST_ENTITY_ID,
    Definition,
    definitions,
    reconcile,
)
from broker.namespace.entities import Description, SubscriptionDescription, TopicDescription
from broker.settings.config import Settings
from storage.capture.definitions import kept, read
from storage.capture.errors import DamagedFile
from storage.capture.place import Place
from storage.capture.rebuilding import Entity
from storage.capture.survey import family_of, to_ms
from storage.maintenance import MaintenanceError
from storage.memory import MemoryStore
from storage.records import NEXT_ENTITY_ID_KEY, encode_document, entity_key
from storage.store import Store, Table


class UnknownEntity(MaintenanceError):
    """An entity was asked for that the definitions do not have."""


class ForwardsElsewhere(MaintenanceError):
    """An entity that was asked for forwards to one that was not."""


_ALL = (b"", b"\xff" * 256, 1 << 30)


@dataclass(frozen=True)
class Definitions:
    """`rules` are the rows of the table RULES. `source` says where all this comes from, for users."""

    partitions: int  # of the namespace
    entities: tuple[Definition, ...]
    rules: tuple[tuple[bytes, bytes], ...]
    source: str

    @classmethod
    def captured(cls, place: Place, namespace: str, until: datetime | None) -> Self | None:
        """The last ones that were kept before this time, with the entities that the next ones say were made before it.

        None if none were kept. Raises DamagedFile, AnotherNamespace, OSError.
        """
        files = kept(place)
        if not files:
            return None
        until_ms = files[-1].time_ms if until is None else to_ms(until)
        before = [each for each in files if each.time_ms <= until_ms] or files[:1]
        found = cls._of(place, before[-1].path, read(place, before[-1], namespace))
        after = files[len(before) :]
        return (
            found._with(cls._of(place, after[0].path, read(place, after[0], namespace)), until_ms) if after else found
        )

    @classmethod
    def _of(cls, place: Place, path: str, document: Mapping[str, Any]) -> Self:
        try:
            entities = tuple(map(Definition.from_document, document["entities"]))
            ids = {each.description.path: each.entity_id for each in entities}
            rules = []
            for path_of, encoded in document["rules"].items():
                for each in encoded:
                    rule = msgpack.unpackb(b64decode(each), strict_map_key=False)
                    rules.append((entity_key(ids[path_of]) + rule["name"].encode(), encode_document(rule)))
            return cls(document["partitions"], entities, tuple(sorted(rules)), place.uri(path))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFile(place.uri(path), f"is of another version, or no file of a capture: {error}") from None

    def _with(self, later: Self, until_ms: int) -> Self:
        known = {each.entity_id for each in self.entities}
        new = {each.entity_id for each in later.entities if each.created_ms <= until_ms} - known
        if not new:
            return self
        entities = [each for each in later.entities if each.entity_id in new]
        paths = {each.description.path.lower() for each in entities}  # of these there was another one before
        kept_before = [each for each in self.entities if each.description.path.lower() not in paths]
        rules = {*self.rules, *(rule for rule in later.rules if int.from_bytes(rule[0][:4], "big") in new)}
        return replace(self, entities=(*kept_before, *entities), rules=tuple(sorted(rules)))

    @classmethod
    def declared(cls, settings: Settings, now_ms: int) -> Self:
        """Make the definitions of a configuration, with the names as they are declared.

        Versions that captured no definitions made entities with such names. Raises CannotReconcile.
        """
        stores = [MemoryStore() for _ in range(settings.partitions)]
        reconcile(stores, settings.entities, now_ms, settings.rules, settings.partitioning, keep_case=True)
        rules = tuple(stores[0].scan(Table.RULES, *_ALL))
        return cls(settings.partitions, tuple(definitions(stores[0])), rules, "the configuration")

    def only(self, names: Collection[str]) -> Self:
        """Return the definitions of these queues and topics, the latter with their subscriptions.

        Raises UnknownEntity, ForwardsElsewhere.
        """
        wanted = {name.lower() for name in names}
        known = {family_of(each.description.path): each.description.path for each in self.entities}
        for name in names:
            if name.lower() not in known:
                raise UnknownEntity(f"{self.source}: has no queue or topic {name!r}")
        entities = tuple(each for each in self.entities if family_of(each.description.path) in wanted)
        for each in entities:
            for to in destinations(each.description):
                if to.lower() in known and to.lower() not in wanted:
                    raise ForwardsElsewhere(
                        f"{each.description.path} forwards to {to}: restore that with --entity, too"
                    )
        ids = {each.entity_id for each in entities}
        rules = tuple(rule for rule in self.rules if int.from_bytes(rule[0][:4], "big") in ids)
        return replace(self, entities=entities, rules=rules)

    def with_homes(self, homes: Mapping[str, int]) -> Self:
        """Plain entities live where the rows show them: they may have been moved, or declared with other partitions."""
        entities = (
            each._replace(partitions=(homes[family],))
            if (family := family_of(each.description.path)) in homes and len(each.partitions) == 1
            else each
            for each in self.entities
        )
        return replace(self, entities=tuple(entities))

    def write(self, store: Store) -> None:
        """Into the new store of any partition."""
        ids = {each.entity_id for each in self.entities}
        items = sorted((entity_key(each.entity_id), encode_document(each.document())) for each in self.entities)
        store.put_many(Table.ENTITIES, items)
        store.put_many(Table.RULES, [rule for rule in self.rules if int.from_bytes(rule[0][:4], "big") in ids])
        next_id = max(ids, default=FIRST_ENTITY_ID - 1) + 1
        store.put(Table.META, NEXT_ENTITY_ID_KEY, encode_document(next_id))
        store.put(Table.META, CATALOG_VERSION_KEY, encode_document(1))
        store.commit()


def destinations(of: Description) -> Iterator[str]:
    """The entities that it forwards to."""
    if isinstance(of, TopicDescription):
        return
    yield from filter(None, (of.forward_to, of.forward_dead_lettered_messages_to))


def entities_of(entities: Iterable[Definition]) -> dict[str, Entity]:
    """Return the entities by path in lower case."""
    entities = list(entities)
    topics = {
        each.description.path.lower(): each.entity_id
        for each in entities
        if isinstance(each.description, TopicDescription)
    }
    found = {}
    for each in entities:
        of = each.description
        found[of.path.lower()] = Entity(
            each.entity_id,
            is_topic=isinstance(of, TopicDescription),
            topic_id=topics[of.topic.lower()] if isinstance(of, SubscriptionDescription) else None,
            requires_session=not isinstance(of, TopicDescription) and of.requires_session,
            partitions=each.partitions,
        )
    return found
