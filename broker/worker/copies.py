"""The copies of the catalog that the partitions of one worker have, and how they follow the namespace's home.

A change begins at the home, partition 0 (`broker.worker.home`). Its worker commits it for its own partitions and sends
it to the other workers (CHANGED, DELETED), which do the same. Only deletions of plain entities that nobody used
begin elsewhere: such an entity is deleted by the partition that it lives on, and that is final; its worker tells the
home's (REMOVE). Of a partitioned entity, the home asks all partitions first (`broker.worker.unused`).

After connecting again, a worker receives the whole catalog and compares it with what its partitions hold. So whichever
commits a crash has lost, each partition has the home's catalog again, and no earlier agreement to a deletion holds any
more. Definitions are compared, because a version number does not tell whether an earlier version was missed. Then it
tells the home again of deletions by its partitions that the catalog still has. Other partitions on the home's own
worker are compared with the catalog at the start.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from threading import Thread
from typing import Any

from broker import wire
from broker.catalog.catalog import HOME, Definition, catalog_version, put, remove, set_version
from broker.catalog.changes import Decided, DropRule, Put, SetRule
from broker.logging import get_logger
from broker.namespace.entities import SubscriptionDescription
from broker.partition.partition import Partition
from broker.rules import load_language
from broker.wire import Remove, Unused
from broker.worker.parked import ParkedPartition
from storage.records import NAMESPACE_ID_KEY, STORE_ID_KEY, decode_document, encode_document, entity_key
from storage.store import Store, Table

log = get_logger("worker")

Document = dict[str, Any]
_ALL = (b"", b"\xff" * 8, 1 << 30)


class Copies:
    """The copies of one worker. `touch` is called with those of its `partitions` that have something to commit."""

    def __init__(
        self,
        partitions: Mapping[int, Partition],
        stores: Mapping[int, Store],
        touch: Callable[[Partition], None],
    ) -> None:
        self._partitions = partitions
        self._stores = stores
        self._touch = touch

    # -- the namespace

    def namespace_id(self) -> bytes:
        """That of the catalog; empty if none of the partitions has heard of it."""
        found = (self._stores[each].get(Table.META, NAMESPACE_ID_KEY) for each in self.in_service())
        return next((bytes(decode_document(each)) for each in found if each is not None), b"")

    def adopt(self, namespace_id: bytes) -> int | None:
        """Belong to the namespace of this home from now on. Returns a partition that belongs to another one."""
        for number in self.in_service() if namespace_id else ():
            store = self._stores[number]
            known = store.get(Table.META, NAMESPACE_ID_KEY)
            if known is None:
                store.put(Table.META, NAMESPACE_ID_KEY, encode_document(namespace_id))
                self._touch(self._partitions[number])
            elif decode_document(known) != namespace_id:
                return number
        return None

    def store_ids(self) -> list[tuple[int, bytes]]:
        """Return the ids of the stores, by partition in service."""
        found = ((each, self._stores[each].get(Table.META, STORE_ID_KEY)) for each in self.in_service())
        return [(each, bytes(decode_document(value))) for each, value in found if value is not None]

    # -- entities that nobody used

    def take_news(self, partitions: Iterable[Partition]) -> list[Remove | Unused]:
        """What the home must be told of these partitions: entities that they have deleted, or that are unused there."""
        news: list[Remove | Unused] = []
        for partition in partitions:
            if partition.newly_auto_deleted:
                deleted = partition.take_auto_deleted()
                for name in deleted.values():
                    log.info("entity deleted: nobody used it", entity=name, partition=partition.id)
                news.append(wire.remove(list(deleted)))
            if partition.newly_unused:
                news.append(wire.unused(partition.id, partition.take_unused()))
        return news

    def fragments(self, entity_id: int) -> list[int]:
        """The partitions in service that have a fragment of this entity."""
        return [each for each in self.in_service() if each in self._partitions[each].partitions_of(entity_id)]

    def agree(self, entity_id: int, now_ms: int) -> bool:
        """The home asks whether the entity may be deleted. If so, it is not used from this commit on."""
        agrees = [self._touched(number).agree(entity_id, now_ms) for number in self.fragments(entity_id)]
        return bool(agrees) and all(agrees)

    def keep(self, entity_id: int, now_ms: int) -> None:
        """It is not deleted, and stays where it is."""
        for number in self.fragments(entity_id):
            self._touched(number).keep(entity_id, now_ms)
        for number in self.in_service():
            self._touched(number).end_move(entity_id, now_ms)

    def touch_home(self) -> None:
        """Something of the home is staged that is no change of the catalog."""
        self._touched(HOME)

    def _touched(self, number: int) -> Partition:
        partition = self._partitions[number]
        self._touch(partition)
        return partition

    def outstanding(self) -> list[int]:
        """Entities that this worker's partitions have deleted and the catalog may still have."""
        return [entity_id for partition in self._partitions.values() for entity_id in partition.auto_deleted]

    # -- changes of the catalog

    def in_service(self) -> list[int]:
        """The partitions that are not parked."""
        return [each for each, partition in self._partitions.items() if not isinstance(partition, ParkedPartition)]

    def remove(self, version: int, entity_ids: Sequence[int], now_ms: int) -> bool:
        """The home has removed these entities from the catalog, which now has this version.

        False if some of the partitions have missed an earlier version. They wait for the whole catalog, see `catch_up`.
        """

        def apply(partition: Partition, store: Store) -> None:
            remove(store, entity_ids)
            partition.delete_entities(entity_ids, now_ms)

        return self._follow(version, apply)

    def change(self, version: int, decided: Sequence[Decided], now_ms: int) -> bool:
        """The home has made these changes; returns as `remove` does."""

        def apply(partition: Partition, store: Store) -> None:
            for change in decided:
                self._apply(partition, store, change, now_ms)

        return self._follow(version, apply)

    def _follow(self, version: int, apply: Callable[[Partition, Store], None]) -> bool:
        complete = True
        for number in self.in_service():
            partition, store = self._partitions[number], self._stores[number]
            known = catalog_version(store)
            if known == version - 1:
                apply(partition, store)
                set_version(store, version)
                self._touch(partition)
            elif known < version:
                complete = False
        return complete

    def _apply(self, partition: Partition, store: Store, change: Decided, now_ms: int) -> None:
        match change:
            case Put(document, rules):
                definition = Definition.from_document(document)
                put(store, document)
                if self._is_deleted(partition, definition):
                    return  # the home will remove it
                of = definition.description
                if of.kind == "topic":
                    _load_language_soon()
                partition.put_entity(definition.entity_id, of, now_ms, rules, definition.partitions)
            case SetRule(entity_id, document) if partition.knows(entity_id):
                partition.use(entity_id, now_ms)
                partition.set_rule(entity_id, document)
            case DropRule(entity_id, name) if partition.knows(entity_id):
                partition.use(entity_id, now_ms)
                partition.drop_rule(entity_id, name)

    def _is_deleted(self, partition: Partition, definition: Definition) -> bool:
        """Nobody used the entity, or the topic of this subscription, and the partition has deleted it."""
        if definition.entity_id in partition.auto_deleted:
            return True
        of = definition.description
        return isinstance(of, SubscriptionDescription) and partition.index.find(of.topic) is None

    # -- the whole catalog

    def lacking(self, version: int, stored: Mapping[bytes, bytes]) -> list[int]:
        """The subscriptions whose rules `catch_up` needs, of a catalog with this version.

        They are those that a partition does not have yet or whose rules a declaration has changed, and those of
        partitioned topics, if it has missed a version.
        """
        behind = [self._stores[each] for each in self.in_service() if catalog_version(self._stores[each]) != version]
        if not behind:
            return []
        found = []
        for key, value in stored.items():
            document = decode_document(value)
            if _is_subscription(document) and (
                len(document.get("partitions", ())) > 1 or any(_lacks(store, key, document) for store in behind)
            ):
                found.append(document["entity_id"])
        return found

    def catch_up(
        self, version: int, stored: Mapping[bytes, bytes], rules: Mapping[int, list[Document]], now_ms: int
    ) -> list[int]:
        """The home's catalog has this version, and stores this in ENTITIES. `rules` are those of `lacking`.

        Returns those entities of the catalog that were deleted here.
        """
        for number in self.in_service():
            partition, store = self._partitions[number], self._stores[number]
            found = dict(store.scan(Table.ENTITIES, *_ALL))
            gone = [int.from_bytes(key, "big") for key in found if key not in stored]
            differing = [decode_document(value) for key, value in stored.items() if found.get(key) != value]
            behind = catalog_version(store) != version
            if not (gone or differing or behind):
                self._touched(number).keep_all(now_ms)
                continue
            remove(store, gone)
            partition.delete_entities(gone, now_ms)
            for document in sorted(differing, key=_is_subscription):  # topics first
                is_new = entity_key(document["entity_id"]) not in found
                first = rules.get(document["entity_id"]) if is_new else None
                self._apply(partition, store, Put(document, first), now_ms)
            if behind:
                for entity_id, documents in rules.items():
                    if partition.knows(entity_id):
                        partition.set_rules(entity_id, documents)
            set_version(store, version)
            partition.keep_all(now_ms)
            self._touch(partition)
        return [entity_id for entity_id in self.outstanding() if entity_key(entity_id) in stored]

    def align(self, now_ms: int) -> list[int]:
        """At the start of the home's worker: as `catch_up`, for the partitions beside it."""
        version, stored = catalog_version(self._stores[HOME]), self.stored()
        rules = {each: self._partitions[HOME].rules(each) for each in self.lacking(version, stored)}
        return self.catch_up(version, stored, rules, now_ms)

    def stored(self) -> dict[bytes, bytes]:
        """The home's catalog: what ENTITIES holds."""
        return dict(self._stores[HOME].scan(Table.ENTITIES, *_ALL))


@cache
def _load_language_soon() -> None:
    """Rules will follow a topic. Loading their language takes 0.1 s, and turns go on meanwhile."""
    Thread(target=load_language, name="language of rules", daemon=True).start()


def _lacks(store: Store, key: bytes, document: Document) -> bool:
    known = store.get(Table.ENTITIES, key)
    return known is None or decode_document(known).get("rules_ms") != document.get("rules_ms")


def _is_subscription(document: Document) -> bool:
    return bool(document["kind"] == SubscriptionDescription.kind)


def warn_of_other_store(partition: int) -> None:
    """The home has known another one. It says so in its log, and the partition's worker in its own."""
    log.warning(
        "the partition has another store than before: one from a backup, or a new, empty one. What it had accepted "
        "since the backup, or at all, is not there",
        partition=partition,
    )
