"""Temporary entities: those that exist as long as links of clients hold them.

Temporary queues and topics, and the subscriptions of subscribers that are not durable. The home knows their holders,
each by the gateway and a number of the gateway's choice. An entity without holders is an orphan, and is deleted soon:
when the last link that held it is gone, when the gateway of these links is gone, and after a start of the home, which
knows no holders.
"""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

# Ids of entities are never given twice, and there are 2**29. Temporary entities leave half of them to the others: at
# ten in each second, these are made for ten months.
LAST_ID = 1 << 28


class Temporaries(Generic[C]):
    """A caller (C) is a gateway."""

    def __init__(self, found: Iterable[int]) -> None:
        """`found` are the ids of those that there were before this process: nobody holds them any more."""
        self._held: dict[tuple[C, int], int] = {}  # by the holder
        self._holders: dict[int, int] = dict.fromkeys(found, 0)  # their number, by entity id
        self._orphans = set(self._holders)

    def hold(self, caller: C, number: int, entity_id: int) -> None:
        """The entity is held; if it was an orphan, it is none any more. A holder holds one entity."""
        self.release(caller, number)
        self._held[caller, number] = entity_id
        self._holders[entity_id] = self._holders.get(entity_id, 0) + 1
        self._orphans.discard(entity_id)

    def release(self, caller: C, number: int) -> None:
        """A holder that holds nothing is none: the entity may have been deleted meanwhile."""
        entity_id = self._held.pop((caller, number), None)
        if entity_id is None or entity_id not in self._holders:
            return
        self._holders[entity_id] -= 1
        if not self._holders[entity_id]:
            self._orphans.add(entity_id)

    def left(self, caller: C) -> None:
        """The caller is gone, with all that it holds."""
        for holder in [each for each in self._held if each[0] == caller]:
            self.release(*holder)

    def forget(self, entity_ids: Iterable[int]) -> None:
        """These were deleted."""
        for entity_id in entity_ids:
            self._holders.pop(entity_id, None)
            self._orphans.discard(entity_id)

    @property
    def orphans(self) -> list[int]:
        """The ids of the entities that nobody holds, which are to be deleted."""
        return sorted(self._orphans)
