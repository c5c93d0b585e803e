"""How a deletion gets from the partition that decides it to the catalog of the namespace, and from there to all others.

An entity that nobody used is deleted by the partition that it lives on, and that is final. Its worker tells the worker
of partition 0, the namespace's home (REMOVE). The home removes the entity from the catalog and tells all gateways and
workers that are connected (DELETED); the workers' partitions remove the entity too.

After connecting again, a gateway or worker receives the whole catalog, and removes what is not in it. Other partitions
on the home's own worker are compared with the catalog at the start. So whichever commits of a deletion a crash has
lost, each partition has the home's catalog again. The comparison looks at the entities that a partition holds, because
a version number does not tell whether an earlier version was missed. A worker tells the home again of deletions by its
partitions that the catalog still has.

A user's deletion begins at the home: it changes the catalog first, and the entity's own partition follows.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from broker.catalog.catalog import HOME, catalog_version, remove
from broker.logging import get_logger
from broker.partition.partition import Partition
from storage.records import entity_key
from storage.store import Store, Table

log = get_logger("worker")


class Deletions:
    """The deletions of one worker. `touch` is called with those of its `partitions` that have something to commit."""

    def __init__(
        self,
        partitions: Mapping[int, Partition],
        stores: Mapping[int, Store],
        touch: Callable[[Partition], None],
    ) -> None:
        self._partitions = partitions
        self._stores = stores
        self._touch = touch

    def take_new(self, partitions: Iterable[Partition]) -> list[int]:
        """Entities that these partitions have deleted since the last call. The home must be told of them."""
        found: list[int] = []
        for partition in partitions:
            if partition.newly_auto_deleted:
                for entity_id, name in partition.take_auto_deleted().items():
                    log.info("entity deleted: nobody used it", entity=name, partition=partition.id)
                    found.append(entity_id)
        return found

    def outstanding(self) -> list[int]:
        """Entities that this worker's partitions have deleted and the catalog may still have."""
        return [entity_id for partition in self._partitions.values() for entity_id in partition.auto_deleted]

    def remove(self, entity_ids: Sequence[int], now_ms: int) -> tuple[int, list[int]] | None:
        """At the home: remove these entities from the catalog, a topic with its subscriptions.

        Returns the new version and those that the catalog had; None if it had none of them.
        """
        store = self._stores[HOME]
        wanted = self._partitions[HOME].with_subscriptions(entity_ids)
        gone = [each for each in wanted if store.get(Table.ENTITIES, entity_key(each)) is not None]
        if not gone:
            return None
        version = catalog_version(store) + 1
        if not self.follow(version, gone, now_ms):
            self.align(now_ms)
        return version, gone

    def follow(self, version: int, entity_ids: Sequence[int], now_ms: int) -> bool:
        """The home has removed these entities from the catalog, which now has this version.

        False if some of the partitions have missed an earlier version. They wait for the whole catalog, see `catch_up`.
        """
        complete = True
        for number, partition in self._partitions.items():
            known = catalog_version(self._stores[number])
            if known == version - 1:
                self._remove_from(number, partition, entity_ids, version, now_ms)
            elif known < version:
                complete = False
        return complete

    def catch_up(self, version: int, there: Container[int], now_ms: int) -> list[int]:
        """The home's catalog has this version and these entities. Returns those of them that were deleted here."""
        for number, partition in self._partitions.items():
            store = self._stores[number]
            gone = [entity_id for entity_id in _known(store) if entity_id not in there]
            if gone or catalog_version(store) != version:
                self._remove_from(number, partition, gone, version, now_ms)
        return [entity_id for entity_id in self.outstanding() if entity_id in there]

    def align(self, now_ms: int) -> list[int]:
        """At the start of the home's worker: as `catch_up`, for the partitions beside it."""
        home = self._stores[HOME]
        return self.catch_up(catalog_version(home), _known(home), now_ms)

    def _remove_from(
        self, number: int, partition: Partition, entity_ids: Sequence[int], version: int, now_ms: int
    ) -> None:
        remove(self._stores[number], entity_ids, version)
        partition.delete_entities(entity_ids, now_ms)
        self._touch(partition)


def _known(store: Store) -> set[int]:
    keys: Iterable[bytes] = (key for key, _ in store.scan(Table.ENTITIES, b"", b"\xff" * 8, 1 << 30))
    return {int.from_bytes(key, "big") for key in keys}
