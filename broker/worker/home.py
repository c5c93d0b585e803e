"""Changes of entities while the broker runs: the side of the namespace's home, partition 0.

A gateway asks for one change each (`broker.catalog.changes.Asked`). The home checks it against the entities that it
knows, commits it for all partitions of its own worker, and sends it to the other workers. When all of them have
followed, the gateways are told, and when these have followed, the client is answered: what was created can be used over
any gateway, and what was changed holds everywhere. A gateway that does not answer is not waited for long.

While a partition is not in service, changes wait for it if its worker is probably being restarted
(`broker.worker.held_changes`); else they are refused as busy. If one is lost after the home has committed, the
change is answered all the same: a partition that comes back gets the home's catalog, and until then it refuses what is
for entities that it has not heard of as busy.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from broker import wire
from broker.catalog import changes
from broker.catalog.catalog import HOME, Definition, catalog_version, definition, definitions, next_entity_id
from broker.catalog.changing import Changing, Limits, described
from broker.errors import EntityAlreadyExists, EntityNotFound, InvalidArgument, QuotaExceeded, ServerBusy
from broker.logging import get_logger
from broker.namespace.entities import SubscriptionDescription
from broker.namespace.rule_descriptions import DEFAULT_RULE
from broker.partition.partition import Partition
from broker.wire import Answer, Ask, Changed, Deleted, Keep, Rules
from broker.worker.copies import Copies, warn_of_other_store
from broker.worker.held_changes import Held, HeldChanges, HoldBounds
from broker.worker.moves import Move, Moves
from broker.worker.temporary import LAST_ID, Temporaries
from broker.worker.unused import UnusedEntities
from storage.records import KNOWN_STORES_KEY, decode_document, encode_document, entity_key
from storage.store import Store, Table

# A worker that has not followed for this time hangs. The changes that it has not followed wait until it is replaced;
# more are refused.
HANGS_MS = 3000
GATEWAYS_MS = 1000  # a gateway is waited for no longer

log = get_logger("worker")

C = TypeVar("C", bound=Hashable)


class Done(NamedTuple, Generic[C]):
    """The caller, if there is one, is to be answered."""

    news: Changed | Deleted | None
    caller: C | None = None
    number: int = 0  # of the request
    result: Any = None


class _UnderWay(NamedTuple, Generic[C]):
    done: Done[C]
    version: int
    since_ms: int
    awaited: set[C]


class Home(Generic[C]):
    """A caller (C) is a gateway, or another worker, which becomes a follower by `join`."""

    def __init__(
        self,
        copies: Copies,
        partitions: Mapping[int, Partition],
        stores: Mapping[int, Store],
        partition_count: int,
        limits: Limits,
        hold_bounds: HoldBounds = HoldBounds(),  # noqa: B008 - it is immutable
        now_ms: int = 0,
    ) -> None:
        """`partitions` and `stores` are those of the home's worker, of so many in all. `hold_bounds` is of changes that
        wait for other workers; by default, none does.
        """
        self._copies = copies
        self._partition = partitions[HOME]
        self._store = stores[HOME]
        self._partition_count = partition_count
        self._changing = Changing(self._partition.index, partition_count, limits)
        self.followers: dict[C, tuple[int, ...]] = {}  # and their partitions
        self._unused = UnusedEntities(copies, partitions, self.followers)
        self._moves: Moves[C] = Moves()
        self._held: HeldChanges[C] = HeldChanges(hold_bounds, {*range(partition_count)} - {*partitions}, now_ms)
        self._temporaries: Temporaries[C] | None = None  # read from the store at the first look
        self._gateways: set[C] = set()  # those that follow
        self._under_way: deque[_UnderWay[C]] = deque()  # changes that workers have not all followed
        self._told: deque[_UnderWay[C]] = deque()  # changes that gateways have not all followed
        self._messages: list[tuple[C, Ask | Keep]] = []
        self.news: list[Changed | Deleted] = []  # for the gateways, in the order of versions
        self.done: list[Done[C]] = []  # changes to be answered

    # -- followers

    def join(self, caller: C, partitions: Iterable[int], entity_ids: Iterable[int], now_ms: int) -> Rules:
        """From now on the caller gets all changes; see `wire.Join`. One without partitions is a gateway."""
        if owned := tuple(partitions):
            for other in [each for each, theirs in self.followers.items() if not set(owned).isdisjoint(theirs)]:
                self.leave(other, now_ms)  # its process or connection is gone, and that was not heard of yet
            self.followers[caller] = owned
        else:
            self._gateways.add(caller)
        known = [each for each in entity_ids if self._partition.knows(each)]
        return wire.rules(catalog_version(self._store), [[each, self._partition.rules(each)] for each in known])

    def recognize(self, ids: Iterable[Sequence[Any]]) -> list[int]:
        """Remember which stores partitions have: [partition, store id]. Returns those that had another one before.

        What these had accepted is not there: their store was restored from a backup, or is new on an empty volume.
        """
        value = self._store.get(Table.META, KNOWN_STORES_KEY)
        known: dict[int, bytes] = {} if value is None else dict(decode_document(value))
        now = known | {int(partition): bytes(store_id) for partition, store_id in ids}
        if now == known:
            return []
        self._store.put(Table.META, KNOWN_STORES_KEY, encode_document(sorted(now.items())))
        self._copies.touch_home()
        replaced = [partition for partition, store_id in known.items() if now[partition] != store_id]
        for partition in replaced:
            warn_of_other_store(partition)
        return replaced

    def followed(self, caller: C, version: int, now_ms: int) -> None:
        for change in self._told if caller in self._gateways else self._under_way:
            if change.version <= version:
                change.awaited.discard(caller)
        self._finish(now_ms)

    def leave(self, caller: C, now_ms: int) -> None:
        """The caller is gone."""
        partitions = self.followers.pop(caller, ())
        if partitions:
            self._unused.left(caller, partitions)
            self._held.lost(partitions, now_ms)
        if self._temporaries is not None:
            self._temporaries.left(caller)
        for move in self._moves.left(caller, partitions):
            self._give_up(move, now_ms)
        self._gateways.discard(caller)
        self._held.drop(caller)
        for change in (*self._under_way, *self._told):
            change.awaited.discard(caller)
        self._finish(now_ms)

    def look(self, now_ms: int) -> None:
        """To be called each second: do not wait for gateways and followers that do not answer."""
        self._unused.end_overdue(now_ms)
        for change in self._told:
            if change.since_ms + GATEWAYS_MS <= now_ms:
                change.awaited.clear()
        self._finish(now_ms)

    def _finish(self, now_ms: int) -> None:
        while self._under_way and not self._under_way[0].awaited:
            done, version, *_ = self._under_way.popleft()
            if done.news is not None:
                self.news.append(done.news)
            awaited = set() if done.news is None else set(self._gateways)
            self._told.append(_UnderWay(done, version, now_ms, awaited))
        while self._told and not self._told[0].awaited:
            self.done.append(self._told.popleft().done)

    def take_news(self) -> list[Changed | Deleted]:
        """Return what callers that are no followers are to be told, before they get what `take_done` has."""
        news, self.news = self.news, []
        return news

    @property
    def has_news(self) -> bool:
        """`take_news`, `take_done` or `take_messages` has something."""
        return bool(self.news or self.done or self._unused.messages or self._messages)

    def take_messages(self) -> list[tuple[C, Ask | Keep]]:
        """What followers are to be told, besides changes."""
        messages = [*self._unused.messages, *self._messages]
        self._unused.messages, self._messages = [], []
        return messages

    def take_done(self) -> list[Done[C]]:
        done, self.done = self.done, []
        return done

    # -- changes

    def change(self, caller: C, number: int, arguments: Sequence[Any], now_ms: int) -> Changed | Deleted | None:
        """Make the change here, or let it wait. Returns what the followers are to get. Raises ServerBusy, and what
        `Changing` does.
        """
        self._partition.begin_change(now_ms)
        change = changes.asked(arguments)
        match change:
            case changes.CancelMove(token):
                self._give_up(self._moves.end(token), now_ms)
                self.done.append(Done(None, caller, number))
                return None
            case changes.Release(holder):
                self._of_clients().release(caller, holder)
                self.done.append(Done(None, caller, number))
                return None
        away = self._away()
        may_wait = not isinstance(change, changes.EndMove)  # the entity of a move that ends is frozen
        if away and may_wait and self._held.awaits(away, now_ms) and self._held.hold(caller, number, arguments):
            return None
        self._require_all(away, now_ms)
        version = catalog_version(self._store) + 1
        news: Changed | Deleted
        result: Any = None
        match change:
            case changes.BeginMove(path, partition):
                of = definition(self._store, self._changing.entity(path))
                token, move = self._moves.begin(caller, of, partition, self._partition_count)
                self.done.append(Done(None, caller, number, [move.entity_id, move.partitions[0], token]))
                return None
            case changes.EndMove(token):
                moved = self._moved(self._moves.end(token))
                news, result = self._changed(version, moved, now_ms), moved[0].definition
            case changes.Provide(kind, fields, rules, holder):
                if not isinstance(holder, int):
                    raise InvalidArgument(changes.NO_CHANGE)
                known = self._known(kind, fields)
                if known is not None:
                    self._hold(caller, holder, known)
                    done = Done(None, caller, number, known.document())
                    self._under_way.append(_UnderWay(done, version - 1, now_ms, set()))  # behind its creation, perhaps
                    self._finish(now_ms)
                    return None
                made = self._created(kind, fields, rules, now_ms, temporary=holder > 0)
                news, result = self._changed(version, [made], now_ms), made.definition
                self._hold(caller, holder, Definition.from_document(result))
            case changes.Delete(path):
                gone = self._partition.with_subscriptions([self._changing.entity(path)])
                self._require_still(gone, path)
                news = self._removed(version, gone, now_ms)
            case _:
                decided = self._decided(change, now_ms)
                news = self._changed(version, [decided], now_ms)
                result = decided.definition if isinstance(decided, changes.Put) else None
                self._unused.used(decided.entity_id)
        self._begin(Done(news, caller, number, result), now_ms)
        return news

    def take_held(self, now_ms: int) -> Iterator[Held[C]]:
        """Changes that have waited, and that are to be made now, or refused: to be called when a caller has joined, and
        each second.
        """
        if not self._held or ((away := self._away()) and self._held.awaits(away, now_ms)):
            return iter(())
        return self._held.take()

    def _changed(self, version: int, decided: Sequence[changes.Decided], now_ms: int) -> Changed:
        """Make these changes here."""
        self._aligned(self._copies.change(version, decided, now_ms), now_ms)
        return wire.changed(version, changes.packed(decided))

    def _moved(self, move: Move[C]) -> list[changes.Put]:
        """The changes that make it so, the topic's before those of its subscriptions."""
        ids = self._partition.with_subscriptions([move.entity_id])
        found = [definition(self._store, each) for each in sorted(ids, key=lambda each: each != move.entity_id)]
        return [changes.Put(each._replace(partitions=move.partitions[1:]).document(), None) for each in found]

    def _give_up(self, move: Move[C], now_ms: int) -> None:
        """Both partitions are told that the entity stays."""
        self._copies.keep(move.entity_id, now_ms)
        self._messages += (
            (caller, wire.keep(move.entity_id))
            for caller, partitions in self.followers.items()
            if not set(partitions).isdisjoint(move.partitions)
        )

    def _require_still(self, entity_ids: Iterable[int], path: str) -> None:
        """Refuse a change of these entities while one of them, or its topic, is being moved.

        Raises ServerBusy, which names the path.
        """
        together = {each for entity_id in entity_ids for each in self._partition.with_topic(entity_id)}
        self._moves.require_none(together, path)

    def said_unused(self, partition: int, entity_ids: Sequence[int], now_ms: int) -> Deleted | None:
        """Nobody has used the fragments of these entities on this partition. Returns as `remove`."""
        return self._delete_unused(self._unused.said(partition, entity_ids, now_ms), now_ms)

    def answered(self, caller: C, answer: Answer, now_ms: int) -> Deleted | None:
        """A follower answers what it was asked by `take_messages`. Returns as `remove`."""
        _, entity_id, number, agrees = answer
        return self._delete_unused(self._unused.answered(caller, entity_id, number, agrees, now_ms), now_ms)

    def _delete_unused(self, entity_ids: Sequence[int], now_ms: int) -> Deleted | None:
        if not entity_ids:
            return None
        for name in self._partition.count_auto_deleted(self._partition.with_subscriptions(entity_ids)):
            log.info("entity deleted: nobody used it", entity=name)
        return self.remove(entity_ids, now_ms)

    def remove(self, entity_ids: Sequence[int], now_ms: int) -> Deleted | None:
        """Remove entities that nobody used, which their partitions have deleted, a topic with its subscriptions.

        Returns what the followers are to get; None if the catalog had none of them.
        """
        wanted = self._partition.with_subscriptions(entity_ids)
        gone = [each for each in wanted if self._store.get(Table.ENTITIES, entity_key(each)) is not None]
        if not gone:
            return None
        news = self._removed(catalog_version(self._store) + 1, gone, now_ms)
        self._begin(Done(news), now_ms)
        return news

    def remove_orphans(self, now_ms: int) -> Deleted | None:
        """Remove the temporary entities that nobody holds; to be called each second. Returns as `remove`."""
        orphans = self._of_clients().orphans
        return self.remove(orphans, now_ms) if orphans else None

    def _of_clients(self) -> Temporaries[C]:
        if self._temporaries is None:
            self._temporaries = Temporaries(each.entity_id for each in definitions(self._store) if each.temporary)
        return self._temporaries

    def _known(self, kind: Any, fields: Any) -> Definition | None:
        """The entity with the path that these properties say. Raises InvalidArgument, EntityAlreadyExists."""
        wanted = described(kind, fields)
        entity_id = self._partition.index.find(wanted.path)
        if entity_id is None:
            return None
        known = definition(self._store, entity_id)
        if known.description.kind != kind:
            raise EntityAlreadyExists(f"The messaging entity '{wanted.path}' already exists.")
        return known

    def _hold(self, caller: C, holder: int, of: Definition) -> None:
        if holder and of.temporary:
            self._of_clients().hold(caller, holder, of.entity_id)

    def _removed(self, version: int, gone: list[int], now_ms: int) -> Deleted:
        self._unused.forget(gone)
        self._moves.forget(gone)
        self._of_clients().forget(gone)
        self._aligned(self._copies.remove(version, gone, now_ms), now_ms)
        return wire.deleted(version, gone)

    def _begin(self, done: Done[C], now_ms: int) -> None:
        """The followers are told."""
        assert done.news is not None
        self._under_way.append(_UnderWay(done, done.news.version, now_ms, set(self.followers)))
        self._finish(now_ms)

    def _aligned(self, is_complete: bool, now_ms: int) -> None:
        if not is_complete:
            for move in self._moves.end_all():  # what is aligned does not stay frozen
                self._give_up(move, now_ms)
            self._copies.align(now_ms)

    def _away(self) -> list[int]:
        """The partitions that are not in service."""
        there = {*self._copies.in_service(), *(each for partitions in self.followers.values() for each in partitions)}
        return [each for each in range(self._partition_count) if each not in there]

    def _require_all(self, away: Sequence[int], now_ms: int) -> None:
        """Refuse changes while a partition is not in service, or does not follow.

        Raises ServerBusy, which names it.
        """
        if away:
            raise ServerBusy(f"Partition {away[0]} is not in service, so entities cannot be changed. Please try again.")
        if self._under_way and (first := self._under_way[0]).since_ms + HANGS_MS < now_ms:
            slow = min(each for caller in first.awaited for each in self.followers[caller])
            raise ServerBusy(f"Partition {slow} does not answer, so entities cannot be changed. Please try again.")

    def _decided(
        self,
        change: changes.Create | changes.Update | changes.AddRule | changes.ReplaceRule | changes.RemoveRule,
        now_ms: int,
    ) -> changes.Decided:
        match change:
            case changes.Create(kind, fields, rules):
                return self._created(kind, fields, rules, now_ms)
            case changes.Update(path, fields):
                known = definition(self._store, self._changing.entity(path))
                self._require_still([known.entity_id], path)
                return changes.Put(self._changing.updated(known, fields, now_ms).document(), None)
            case changes.AddRule(path, rule):
                of = definition(self._store, self._changing.entity(path))
                self._changing.check_rule(of, rule)
                return changes.SetRule(of.entity_id, {**rule, "created_ms": now_ms})
            case changes.ReplaceRule(path, rule):
                of = definition(self._store, self._changing.entity(path))
                return changes.SetRule(of.entity_id, self._changing.replaced_rule(of, rule))
            case changes.RemoveRule(path, name):
                of = definition(self._store, self._changing.entity(path))
                self._changing.check_has_rule(of, name)
                return changes.DropRule(of.entity_id, name)

    def _created(
        self, kind: Any, fields: Any, rules: Sequence[changes.Document] | None, now_ms: int, *, temporary: bool = False
    ) -> changes.Put:
        wanted = described(kind, fields)
        topic = self._topic(wanted.topic) if isinstance(wanted, SubscriptionDescription) else None
        if topic is not None:
            self._require_still([topic.entity_id], topic.description.path)
        new = self._changing.created(wanted, topic, next_entity_id(self._store), now_ms)
        if rules is not None:
            rules = [{**rule, "created_ms": now_ms} for rule in rules]
            self._changing.check_first_rules(new, rules)
        elif topic is not None:
            rules = [DEFAULT_RULE.document(now_ms)]
        if temporary and new.entity_id > LAST_ID:
            raise QuotaExceeded(f"The namespace has made {LAST_ID} entities, and makes no further temporary ones.")
        return changes.Put(new._replace(temporary=temporary).document(), rules)

    def _topic(self, name: str) -> Definition:
        found = definition(self._store, self._changing.entity(name))
        if found.description.kind != "topic":
            raise EntityNotFound(f"The messaging entity '{found.description.path}' is no topic.")
        return found
