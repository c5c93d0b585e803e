"""Deletion of partitioned entities that nobody used: the side of the namespace's home.

Each partition knows the uses of its own fragment only. It says when nobody has used that for the interval (UNUSED).
When all partitions of an entity have said so, there is a *round*: the home asks the workers of the fragments (ASK). A
fragment that is still unused agrees, and from its commit on it refuses uses as busy, also after a restart. When all
have agreed, and the fragments of the home's own worker are unused too, the home removes the entity from the catalog.
That commit is the deletion, and the others follow it like any other. If a fragment was used meanwhile, the entity
stays, and all that were asked are told (KEEP).

An agreement holds as long as the connection that it came by. When a worker is lost, the rounds that it was asked in end
without a deletion. When it comes back, it goes on refusing uses until it has the catalog of this moment: either the
entity is not in it, or the agreement is void. So nothing is accepted between a deletion and the moment at which a
partition hears of it. Nothing is deleted while a fragment is away.
"""

from collections.abc import Hashable, Iterable, Mapping
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from broker import wire
from broker.catalog.catalog import HOME
from broker.partition.partition import Partition
from broker.wire import Ask, Keep
from broker.worker.copies import Copies

# A worker that has not answered for this time hangs. The others do not refuse uses for longer because of it.
ANSWER_MS = 1000

C = TypeVar("C", bound=Hashable)


class _Round(NamedTuple, Generic[C]):
    number: int  # so that an answer to an earlier round is not taken for one to this
    since_ms: int
    asked: tuple[C, ...]
    awaited: set[C]  # those that have not answered


class UnusedEntities(Generic[C]):
    """`messages` are what followers (C) are to be told, in this order."""

    def __init__(
        self, copies: Copies, partitions: Mapping[int, Partition], followers: Mapping[C, tuple[int, ...]]
    ) -> None:
        """`partitions` are those of the home's worker; `followers` are the other workers, with their partitions."""
        self._copies = copies
        self._partitions = partitions
        self._followers = followers
        self._said: dict[int, set[int]] = {}  # entity id -> partitions that have said that it is unused there
        self._rounds: dict[int, _Round[C]] = {}  # by entity id
        self._numbers = count(1)
        self.messages: list[tuple[C, Ask | Keep]] = []

    # -- what is heard. The results are entities to delete in this commit.

    def said(self, partition: int, entity_ids: Iterable[int], now_ms: int) -> list[int]:
        """Nobody has used the fragments of these entities on this partition for their intervals."""
        gone: list[int] = []
        for entity_id in entity_ids:
            partitions = self._partitions[HOME].partitions_of(entity_id)
            if partition not in partitions:
                continue  # it was deleted
            said = self._said.setdefault(entity_id, set())
            said.add(partition)
            if said.issuperset(partitions) and entity_id not in self._rounds and self._ask(entity_id, now_ms):
                gone.append(entity_id)
        return gone

    def answered(self, caller: C, entity_id: int, number: int, agrees: bool, now_ms: int) -> list[int]:
        found = self._rounds.get(entity_id)
        if found is None or found.number != number or caller not in found.awaited:
            return []
        if not agrees:
            self._said[entity_id].difference_update(self._followers[caller])
            self._end(entity_id)
            return []
        found.awaited.discard(caller)
        if found.awaited:
            return []
        if self._is_unused_here(entity_id, now_ms):
            return [entity_id]
        self._end(entity_id)
        return []

    # -- what ends rounds

    def used(self, entity_id: int) -> None:
        """The entity was changed, which uses all its fragments. A use of a subscription is a use of its topic."""
        for each in self._partitions[HOME].with_topic(entity_id):
            self._end(each)
            self._said.pop(each, None)

    def forget(self, entity_ids: Iterable[int]) -> None:
        """These entities are deleted. The followers hear of that, so their agreements end with it."""
        for entity_id in entity_ids:
            self._rounds.pop(entity_id, None)
            self._said.pop(entity_id, None)

    def left(self, caller: C, partitions: tuple[int, ...]) -> None:
        """This follower is gone. Its partitions say again what is unused there when they are back."""
        for entity_id, found in list(self._rounds.items()):
            if caller in found.asked:
                self._end(entity_id)
        for said in self._said.values():
            said.difference_update(partitions)

    def end_overdue(self, now_ms: int) -> None:
        """To be called now and then."""
        for entity_id, found in list(self._rounds.items()):
            if found.since_ms + ANSWER_MS < now_ms:
                for caller in found.awaited:
                    self._said[entity_id].difference_update(self._followers[caller])
                self._end(entity_id)

    # -- parts

    def _ask(self, entity_id: int, now_ms: int) -> bool:
        """Begin a round. True if nobody needs to be asked, and the entity is unused."""
        partitions = set(self._partitions[HOME].partitions_of(entity_id))
        asked = tuple(each for each, theirs in self._followers.items() if not partitions.isdisjoint(theirs))
        away = partitions.difference(self._copies.in_service(), *(self._followers[each] for each in asked))
        if away or not self._is_unused_here(entity_id, now_ms):
            return False
        if asked:
            number = next(self._numbers)
            self._rounds[entity_id] = _Round(number, now_ms, asked, set(asked))
            self.messages += ((each, wire.ask(entity_id, number)) for each in asked)
        return not asked

    def _is_unused_here(self, entity_id: int, now_ms: int) -> bool:
        """True if the fragments of the home's worker are unused. They need no agreement: the home decides now."""
        for number in self._copies.fragments(entity_id):
            if not self._partitions[number].is_unused(entity_id, now_ms):
                self._said[entity_id].discard(number)
                return False
        return True

    def _end(self, entity_id: int) -> None:
        """The entity stays."""
        found = self._rounds.pop(entity_id, None)
        if found is not None:
            self.messages += ((each, wire.keep(entity_id)) for each in found.asked if each in self._followers)
