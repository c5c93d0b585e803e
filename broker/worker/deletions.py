"""How a deletion gets from the partition that decides it to the catalog of the namespace, and from there to all others.

An entity that nobody used is deleted by the partition that it lives on, and that is final. The worker of partition 0,
the namespace's home, is told (REMOVE), takes it out of the catalog there, and tells all that are connected (DELETED):
gateways, and the other workers, whose partitions follow. Whoever connects anew gets the whole catalog, and finds in it
what it missed; partitions beside the home, on its worker, read it there at the start. So whichever commits of a
deletion a crash has lost, each partition has the home's catalog again: what is compared is what they hold, since a
version number says nothing of what was missed before it. A worker tells the home again what the catalog still has of
its partitions' deletions.

A user's deletion enters at the home: there it is in the catalog first, and the entity's own partition follows.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from broker.catalog.catalog import catalog_version, remove
from broker.logging import get_logger
from broker.partition.partition import Partition
from storage.records import entity_key
from storage.store import Store, Table

log = get_logger("worker")

HOME = 0  # the partition that has the namespace's catalog first


class Deletions:
    """Of one worker: `partitions` are its own, `touch` is told those that have something to commit."""

    def __init__(
        self,
        partitions: Mapping[int, Partition],
        stores: Mapping[int, Store],
        touch: Callable[[Partition], None],
    ) -> None:
        self._partitions = partitions
        self._stores = stores
        self._touch = touch

    def take_new(self) -> list[int]:
        """Entities that this worker's partitions have deleted since it was asked, to be told to the home."""
        found: list[int] = []
        for number, partition in self._partitions.items():
            for entity_id, name in partition.take_auto_deleted().items():
                log.info("entity deleted: nobody used it", entity=name, partition=number)
                found.append(entity_id)
        return found

    def outstanding(self) -> list[int]:
        """Entities that its partitions have deleted and the catalog may still have."""
        return [entity_id for partition in self._partitions.values() for entity_id in partition.auto_deleted]

    def remove(self, entity_ids: Sequence[int], now_ms: int) -> tuple[int, list[int]] | None:
        """At the home: take them out of the catalog, a topic with its subscriptions.

        Returns the new version and what it had of them, or None if it had nothing.
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
        """The home's catalog, now of this version, has these entities no more.

        False if some of the partitions have missed an earlier version: they wait for the whole catalog, see `catch_up`.
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
        """The home's catalog is of this version and has these entities. Returns those of them deleted here."""
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
