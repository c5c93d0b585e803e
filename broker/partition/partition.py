"""One partition: a deterministic state machine over one store, told the time.

Every call stages its writes; `commit` makes them durable. Nothing may be answered before the commit. If anything but a
BrokerError is raised, memory and disk may disagree: the caller must drop the partition and make it again from the
store, unless `has_changed` says that the command had changed nothing yet. Times are milliseconds since 1970 and should
not go backwards.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

from broker import requests
from broker.errors import BrokerError, NotAllowed
from broker.namespace.entities import Description
from broker.partition import due, entities, sending, transactions
from broker.partition.entity_index import EntityIndex
from broker.partition.forwarding import destination
from broker.partition.forwarding import source as forwarding
from broker.partition.messages import (
    browsing,
    expiry,
    hand_out,
    selecting,
    settlement,
)
from broker.partition.messages.admission import Incoming
from broker.partition.messages.deliveries import NOTHING, Pumped
from broker.partition.messages.restoring import restore
from broker.partition.moving import moves
from broker.partition.requests import Underway, request
from broker.partition.sessions import locks as session_locks
from broker.partition.settings import PartitionSettings
from broker.partition.state import idleness
from broker.partition.state.core import Core
from broker.partition.state.receivers import Receiver
from broker.partition.state.stored_rules import FlawedRule
from broker.partition.state.terms import Terms
from broker.partition.topics import rule_requests
from broker.runs import count_of
from broker.wire import Mark, Operation, Outcome, RunBytes
from storage.queue_ids import queue_id_of
from storage.store import Store, Table

_OUTCOMES = {int(outcome): outcome for outcome in Outcome}  # faster than the call of an enum


class Partition:
    """Queue ids are those of `storage.queue_ids`.

    `receiver` is any key the caller chooses, unique while the receiver is open. Calls with a receiver that is not open
    (the partition may have closed it) do nothing.
    """

    def __init__(
        self,
        partition_id: int,
        store: Store,
        *,
        now_ms: int,
        incarnation: bytes,
        settings: PartitionSettings,
        home: Callable[[str], int] | None = None,
        known_terms: dict[bytes, Terms] | None = None,
    ) -> None:
        """`incarnation`: 6 random bytes, so that no lock token is ever used twice. `home` returns the partition that a
        queue or topic of this name lives on; without it, all live here. Partitions that are opened with the same
        `known_terms` read each definition once.
        """
        self.id = partition_id
        self._store = store
        self._core = Core(store, partition_id, incarnation, settings, home or (lambda name: partition_id))
        # These are asked for in each turn, so they are no methods: the time of the next timer, or None; a list that is
        # empty if there is none; and whether `take_auto_deleted` and `take_unused` have something.
        self.next_timer_ms: Callable[[], int | None] = self._core.timers.next_ms
        self.timers: Sequence[Any] = self._core.timers.heap
        self.newly_auto_deleted = self._core.idle_times.newly_auto_deleted
        self.newly_unused = self._core.idle_times.newly_unused
        self.index = EntityIndex(self._core)
        entities.load(self._core, now_ms, known_terms)

    @property
    def has_changed(self) -> bool:
        """True if the last command (send, open_receiver, settle, request, transact, request_in, discharge, take_over)
        has changed anything in memory or in the staged writes. If not, the partition is as it was before the command.
        """
        return self._core.has_changed

    @property
    def ahead_ms(self) -> int:
        """Milliseconds by which the given times are ahead of the wall clock, after that was set back."""
        return self._core.ahead_ms

    @ahead_ms.setter
    def ahead_ms(self, ahead_ms: int) -> None:
        self._core.ahead_ms = ahead_ms

    def _begin(self, queue_id: int, now_ms: int) -> None:
        """A command for this queue begins. It is a use of the entity, even if the command fails.

        Raises ServerBusy while it is being decided whether the entity is deleted because nobody has used it.
        """
        core = self._core
        if not core.idle_times.kept:
            core.begin_command()
            return
        idleness.use(core, queue_id, now_ms)
        core.begin_command()
        idleness.require(core, queue_id)

    def send(self, queue_id: int, messages: Sequence[Incoming], now_ms: int) -> None:
        """Accept all of them or none. Raises EntityNotFound, NotAllowed, EntityDisabled, QuotaExceeded."""
        self._begin(queue_id, now_ms)
        sending.send(self._core, queue_id, messages, now_ms)

    def send_run(self, queue_id: int, run: RunBytes, now_ms: int) -> None:
        """Accept the messages of a run (`broker.runs`), as `send` does."""
        self._begin(queue_id, now_ms)
        sending.send_run(self._core, queue_id, run, now_ms)

    def note_stored(self, sender: bytes, first: int, count: int, below: int, now_ms: int) -> None:
        """The last deliveries that were sent here have these numbers of `wire.Mark`."""
        self._core.marks.note(sender, first, count, below, now_ms)

    def open_receiver(
        self,
        receiver: Hashable,
        queue_id: int,
        receive_and_delete: bool,
        now_ms: int,
        session: Sequence[Any] | None = None,
        selector: str | None = None,
    ) -> None:
        """`session`: see `broker.wire`. `Pumped.accepted` tells the lock. `selector`: the receiver gets only messages
        that this selects; the others stay.

        Raises EntityNotFound, EntityDisabled, NotAllowed, SessionCannotBeLocked, InvalidArgument; InvalidFilter,
        NotImplementedByBroker for a selector.
        """
        core = self._core
        self._begin(queue_id, now_ms)
        queue = core.access(queue_id, now_ms)
        entities.require_receive(queue)
        assert receiver not in core.receivers, f"receiver {receiver!r} is open already"
        compiled = None if selector is None else selecting.selector_of(selector)
        opened = Receiver(receiver, queue_id, receive_and_delete, compiled)
        if queue.sessions is None:
            if session is not None:
                raise NotAllowed(f"'{queue.terms.name}' does not require sessions; it has no receivers of sessions.")
            core.changing()
            core.enter(queue, opened)
            queue.window.active = True
            return
        if session is None:
            raise NotAllowed(f"'{queue.terms.name}' requires sessions; a receiver has to accept one.")
        session_id, timeout_ms, *lock = session
        opened.session_token, takes_over = lock or (None, False)
        session_locks.accept(core, queue, opened, session_id, timeout_ms, now_ms, takes_over)
        if queue.expiry_paused and queue.sessions.waiting:
            expiry.resume(core, queue)

    def grant(self, receiver: Hashable, limit: int) -> None:
        """The receiver may get up to `limit` deliveries since it was opened. Replaces what was granted before."""
        self._grant(receiver, limit, drain=False)

    def drain(self, receiver: Hashable, limit: int) -> None:
        """Grant as `grant` does, but the next `pump` hands out what is available and ends the rest of the grant."""
        self._grant(receiver, limit, drain=True)

    def _grant(self, receiver: Hashable, limit: int, drain: bool) -> None:
        found = self._core.receivers.get(receiver)
        if found is None:
            return
        queue = self._core.queue(found.queue_id)
        if queue.sessions is not None and found.session is None:
            return  # it waits for a session and gets no messages before
        if found.session is not None and found.session.successor is not None:
            return  # it is told to leave
        line = queue.line_of(found)
        if drain:
            line.drain(found, limit)
        else:
            line.grant(found, limit)
        if queue.expiry_paused and queue.is_pulled:
            expiry.resume(self._core, queue)
        session = found.session
        if session is not None and queue.sessions is not None:
            if not drain and not session.may_have_more:
                return  # a message wakes it
            queue.sessions.awake[session.id] = session
        turn = self._core.turn
        turn.wake(queue)
        turn.awake[queue.id] = queue  # `pump` notes the use of the entity, because it knows the time

    def watch(self, receiver: Hashable) -> None:
        """From now on `Pumped.available` tells when there are messages for which this receiver has no credit.

        It tells once, until the receiver gets another grant, even of nothing. Receivers of sessions do not watch.
        """
        found = self._core.receivers.get(receiver)
        if found is None:
            return
        queue = self._core.queue(found.queue_id)
        if queue.sessions is None:
            queue.line_of(found).watch(found)
            if queue.expiry_paused:
                expiry.resume(self._core, queue)
            self._core.turn.wake(queue)

    def passes(self, receiver: Hashable) -> None:
        """The receiver was told of messages, and has no credit for them: tell another one."""
        found = self._core.receivers.get(receiver)
        if found is not None:
            queue = self._core.queue(found.queue_id)
            queue.line_of(found).passes(found)
            self._core.turn.wake(queue)

    def await_more(self, browser: Hashable, queue_id: int, number: int, now_ms: int) -> None:
        """`Pumped.available` tells the browser once when the queue has had a message with this number or a later one.

        `close_receiver` ends that. The browser is told an error by `Pumped.closed` as a receiver is. Raises as
        `open_receiver` does.
        """
        self._begin(queue_id, now_ms)
        queue = self._core.access(queue_id, now_ms)
        entities.require_receive(queue)
        self._core.changing()
        browsing.wait(self._core, queue, browser, number)

    def close_receiver(self, receiver: Hashable, broken: bool, now_ms: int, unsent_from: bytes | None = None) -> None:
        """`broken`: the receiver's connection was lost, so its locks end. Otherwise they stay until settled or over.

        `unsent_from`: the deliveries from this token on never reached the client; their messages are available again.
        """
        found = self._core.receivers.get(receiver)
        if found is None:
            browsing.wait_no_more(self._core, receiver, now_ms)
            return
        if self._core.idle_times.kept:
            idleness.use(self._core, found.queue_id, now_ms)
        queue = self._core.close_receiver(found)
        if queue is None:
            return
        queue.accessed_ms = now_ms
        self._core.turn.wake(queue)  # it may have been told of messages, of which another one is to be told now
        if queue.sessions is not None:
            session_locks.close(self._core, queue, found, broken, unsent_from, now_ms)
            return
        if broken and not self._core.settings.keep_locks_of_broken_connections:
            settlement.lose_locks(self._core, queue, found, unsent_from, now_ms)
        elif unsent_from is not None:
            settlement.take_back(self._core, queue, found, unsent_from, now_ms)
        if not queue.receivers and queue.outbox is None:
            queue.window.active = False
            queue.window.reset(queue.locks.numbers())

    def settle(
        self, queue_id: int, ranges: Sequence[bytes], outcome: int, properties: dict[str, Any] | None, now_ms: int
    ) -> list[BrokerError | None]:
        """One result per token; None if its outcome was applied. `properties` are merged into the message's.

        `ranges` are tokens, or some at once: see `broker.runs.tokens_of`. A token is valid whichever receiver got the
        message. Errors: LockLost, NotAllowed, MessageTooLarge, EntityNotFound.
        """
        self._begin(queue_id, now_ms)
        try:
            queue = self._core.access(queue_id, now_ms)
        except BrokerError as error:
            return [error] * count_of(ranges)
        return settlement.settle(self._core, queue, ranges, _OUTCOMES[outcome], properties, now_ms)

    def as_told(
        self, queue_id: int, receiver: Hashable, results: list[BrokerError | None], now_ms: int
    ) -> list[BrokerError | None]:
        """The results as a receiver is told them: SessionLockLost if it has lost the lock of its session."""
        queue = self._core.find(queue_id)
        if queue is None or queue.sessions is None:
            return results
        return session_locks.named(self._core, receiver, results, now_ms)

    def restore(self, queue_id: int, entries: Sequence[Any], now_ms: int, mark: Mark | None = None) -> None:
        """Put back messages that were received and deleted, but never sent: all of them, or none.

        `entries`: items as in a delivery. If their entity was deleted, they stay deleted. With a mark of one delivery,
        which stands for all of them, they are put back once, however often the command comes. Raises EntityMoving,
        ServerBusy: they can be put back later, perhaps on another partition.
        """
        if mark is not None and self._core.marks.has(mark.sender, mark.first):
            return
        self._begin(queue_id, now_ms)
        restore(self._core, queue_id, entries, now_ms)
        if mark is not None:
            self._core.marks.note(mark.sender, mark.first, mark.deliveries, mark.below, now_ms)

    @property
    def has_work_left(self) -> bool:
        """True if this turn may do more, see `Core.work_left`."""
        return not self._core.turn.work or self._core.work_left() > 0

    def go_on(self, underway: Underway) -> bool:
        """Continue the request as far as this turn's work allows. True if it is done. Raises BrokerError."""
        self._core.begin_command()
        return self.has_work_left and underway.go_on()

    def request(self, queue_id: int, asked: requests.OfQueue | requests.OfPartition, now_ms: int) -> Any:
        """Return the result, or an `Underway` that has it in a later turn. Raises BrokerError."""
        self._begin(queue_id, now_ms)
        return request(self._core, queue_id, asked, now_ms)

    def transact(
        self,
        transaction: Hashable,
        begins: bool,
        operations: Sequence[Operation],
        now_ms: int,
        owner: Hashable = None,
    ) -> list[list[list[str] | None] | None]:
        """Sends and settlements of a transaction; `begins` if they are its first. See `transactions.transact`.

        `owner` owns the transaction; the messages of one owner's transactions have a limit.
        """
        for operation in operations:
            self._begin(operation.queue, now_ms)
        return transactions.transact(self._core, transaction, begins, operations, now_ms, owner)

    def request_in(
        self,
        transaction: Hashable,
        begins: bool,
        queue_id: int,
        asked: requests.InTransaction,
        now_ms: int,
        owner: Hashable = None,
    ) -> Any:
        """Do a request as a part of a transaction: see `transactions.request_in`. Raises BrokerError."""
        self._begin(queue_id, now_ms)
        return transactions.request_in(self._core, transaction, begins, queue_id, asked, now_ms, owner)

    def discharge(self, transaction: Hashable, commit: bool, now_ms: int) -> None:
        """Commit or roll back. Raises TransactionRollback, TransactionTimeout if nothing of it was done."""
        self._core.begin_command()
        transactions.discharge(self._core, transaction, commit, now_ms)

    def advance(self, now_ms: int) -> None:
        """Do what is due, in bounded steps: if `next_timer_ms` is in the past afterwards, there is more."""
        due.advance(self._core, now_ms)

    def pump(self, now_ms: int) -> Pumped:
        """Forward messages, give sessions to receivers that wait for one, and hand messages to receivers with credit.

        To be called after everything else of a turn.
        """
        core = self._core
        turn = core.turn
        if not (turn.awake or turn.outgoing or turn.offering or turn.accepted or turn.closed or turn.browsed):
            return NOTHING  # the usual case of a send
        if core.entities.quiet:
            moves.hold_back(core)
        forwards = forwarding.pump(core, now_ms) if turn.outgoing else ()
        if turn.offering:
            session_locks.offer(core, now_ms)
        if core.idle_times.kept:
            for queue_id in list(turn.awake):
                idleness.use(core, queue_id, now_ms)
                if idleness.refuses(core, queue_id):
                    del turn.awake[queue_id]  # `idleness.keep` wakes it again
        for queue in turn.awake.values():
            queue.accessed_ms = now_ms
        deliveries, drained, available = hand_out.pump(core, now_ms) if turn.awake else ([], [], [])
        if core.ahead_ms:
            deliveries = [(key, until_ms and core.wall_ms(until_ms), items) for key, until_ms, items in deliveries]
        if turn.browsed:
            available += browsing.told_of_more(core)
        closed = turn.take_closed() if turn.closed else ()
        accepted = session_locks.take_accepted(core) if turn.accepted else ()
        more = bool(turn.awake or turn.outgoing or turn.offering)
        return Pumped(deliveries, drained, closed, more, forwards, accepted, available)

    def take_over(
        self, store_id: bytes, source: int, entity_id: int, entries: Sequence[Any], now_ms: int
    ) -> tuple[int, list[Any], str]:
        """Take over messages that the queue `source` of another partition forwards to this one; see `destination`.

        The answer may be given after `commit`.
        """
        self._core.begin_command()
        return destination.take_over(self._core, store_id, source, entity_id, entries, now_ms)

    def taken_over(self, source: int, by: int, up_to: int, refused: Sequence[Any], busy: str, now_ms: int) -> None:
        """The partition `by` answers what the queue `source` forwarded to it: the result of its `take_over`."""
        forwarding.taken_over(self._core, source, by, up_to, refused, busy, now_ms)

    def unreachable(self, partitions: Collection[int], now_ms: int) -> None:
        """These partitions will never answer commands that they have not answered yet."""
        forwarding.unanswered(self._core, partitions, now_ms)

    def commit(self) -> bool:
        """Make all staged writes durable. True if there were any.

        Raises StoreFull, StoreError: then this partition must not be used any more.
        """
        self.end_turn()
        dirty = self._store.dirty
        self._store.commit()
        return dirty

    def end_turn(self) -> None:
        """Stage what is written once for each turn. To be called before the store is committed by its log."""
        self._core.end_turn()

    def look_at_room(self) -> None:
        """Measure the store. To be called each second, because others write to the disk, too."""
        self._core.room.look()

    @property
    def shortage(self) -> str | None:
        """Why messages are refused for want of room, as of the last look; None if they are not."""
        return self._core.room.shortage

    def take_flawed_rules(self) -> list[FlawedRule]:
        """Stored rules that fail on every message, of topics that were used since the start; each is returned once."""
        found, self._core.flaws = self._core.flaws, []
        return found

    def put_entity(
        self,
        entity_id: int,
        description: Description,
        now_ms: int,
        rules: Sequence[dict[str, Any]] | None = None,
        partitions: tuple[int, ...] = (),
    ) -> None:
        """Create an entity or change its properties; the caller stages its definition (see `entities`).

        `rules` are the rule documents of a new subscription; None is the default rule. `partitions`: see `Terms`.

        Raises ServerBusy while the messages of a deleted entity with this id are being deleted, EntityNotFound if the
        topic of a subscription does not exist, InvalidArgument for a rule.
        """
        entities.put_entity(self._core, entity_id, description, now_ms, rules, partitions)

    def set_rules(self, entity_id: int, documents: Sequence[dict[str, Any]]) -> None:
        """Let a subscription have just these rules, which another partition has checked."""
        rule_requests.set_rules(self._core, entity_id, documents)

    def set_rule(self, entity_id: int, document: dict[str, Any]) -> None:
        """Add a rule to a subscription, in place of one of this name; as `set_rules`."""
        rule_requests.set_rule(self._core, entity_id, document)

    def drop_rule(self, entity_id: int, name: str) -> None:
        """Remove a rule of a subscription if there is one of this name."""
        rule_requests.drop_rule(self._core, entity_id, name)

    def rules(self, entity_id: int) -> list[dict[str, Any]]:
        """The rule documents of a subscription, as far as they can be read."""
        return rule_requests.rules_of(self._core, entity_id)

    def knows(self, entity_id: int) -> bool:
        """True if the entity is here, and it was not deleted because nobody used it."""
        return entity_id in self._core.entities.terms

    def begin_change(self, now_ms: int) -> None:
        """A change of the catalog begins; see `has_changed`."""
        self._begin(0, now_ms)

    def delete_entity(self, entity_id: int, now_ms: int) -> None:
        """Delete an entity with all it holds, a topic with its subscriptions; the caller removes their definitions.

        Raises EntityNotFound.
        """
        entities.delete_entity(self._core, entity_id, now_ms)

    def delete_entities(self, entity_ids: Sequence[int], now_ms: int) -> None:
        """Delete those of these entities that are here; the caller has removed all of their definitions."""
        entities.delete_all(self._core, entity_ids, now_ms)

    def with_subscriptions(self, entity_ids: Iterable[int]) -> list[int]:
        """These entities, each once, and the subscriptions of those of them that are topics."""
        of = self._core.entities.subscription_ids
        return list(dict.fromkeys(found for each in entity_ids for found in (*sorted(of.get(each, ())), each)))

    def with_topic(self, entity_id: int) -> list[int]:
        """The entity, and its topic if it is a subscription."""
        terms = self._core.entities.terms.get(entity_id)
        return (
            [entity_id] if terms is None or not terms.topic else [entity_id, self._core.entities.topic_ids[terms.topic]]
        )

    @property
    def auto_deleted(self) -> Collection[int]:
        """Entities that were deleted because nobody used them, and whose definitions are still to be removed."""
        return self._core.idle_times.auto_deleted.keys()

    def take_auto_deleted(self) -> dict[int, str]:
        """Return those of them that were not taken yet, with their names. Call it after the commit."""
        found = dict(self.newly_auto_deleted)
        self.newly_auto_deleted.clear()
        return found

    def count_auto_deleted(self, entity_ids: Sequence[int]) -> list[str]:
        """Count these entities as deleted because nobody used them, by decision of the home. Returns their names."""
        core = self._core
        core.idle_times.auto_deletions += len(entity_ids)
        return [core.entities.terms[each].name for each in entity_ids]

    def use(self, entity_id: int, now_ms: int) -> None:
        """The entity is used by a change that reaches it by way of the home."""
        idleness.use(self._core, queue_id_of(entity_id), now_ms)

    def partitions_of(self, entity_id: int) -> tuple[int, ...]:
        """The partitions that a partitioned entity lives on; empty if it is plain, or not known."""
        terms = self._core.entities.terms.get(entity_id)
        if terms is None:
            return ()
        partitions = self._core.entities.partitions_of(terms.topic or terms.name.lower())
        return partitions if len(partitions) > 1 else ()

    def take_unused(self) -> list[int]:
        """Partitioned entities whose fragments here nobody has used for their intervals; the home is to be told."""
        found = sorted(self.newly_unused)
        self.newly_unused.clear()
        return found

    def is_unused(self, entity_id: int, now_ms: int) -> bool:
        """True if nobody has used this fragment of the entity for its interval."""
        return idleness.is_unused(self._core, entity_id, now_ms)

    def agree(self, entity_id: int, now_ms: int) -> bool:
        """Tell what `is_unused` tells; if it is unused, refuse all uses with ServerBusy from the next commit on, also
        after a restart.
        """
        return idleness.agree(self._core, entity_id, now_ms)

    def keep(self, entity_id: int, now_ms: int) -> None:
        """The entity to whose deletion this partition has perhaps agreed stays."""
        idleness.keep(self._core, entity_id, now_ms)

    def keep_all(self, now_ms: int) -> None:
        """All entities here are in the home's catalog, and the home knows of no agreement of this partition."""
        idleness.keep_all(self._core, now_ms)
        moves.keep_all(self._core, now_ms)

    def end_move(self, entity_id: int, now_ms: int) -> None:
        """The move of this entity is given up, if one has begun."""
        if entity_id in self._core.entities.terms:
            moves.keep(self._core, entity_id, now_ms)

    def check(self) -> None:
        """Assert the invariants of the state in memory, for tests. Takes time in proportion to the state."""
        core = self._core
        for queue_id, queue in core.queues.items():
            assert queue.id == queue_id
            queue.check()
            assert all(core.receivers.get(key) is receiver for key, receiver in queue.receivers.items())
            assert all(core.browsers.get(key) == queue_id for key in queue.browsers)
        assert all(receiver.queue_id in core.queues for receiver in core.receivers.values())
        assert all(key in core.queues[queue_id].browsers for key, queue_id in core.browsers.items())
        core.turn.check(core.queues)

    def tallies(self) -> dict[int, dict[str, Any]]:
        """For each queue in use: the counters of `tally.Tally` by name, since the start."""
        return {queue.id: queue.tally.snapshot() for queue in self._core.queues.values()}

    def gauges(self) -> dict[str, int]:
        """The keys of `broker.exposition.PARTITION`."""
        core = self._core
        totals = core.past.copy()
        for queue in core.queues.values():
            totals.add(queue.tally)
        return {
            "parked": 0,
            "refuses_sends": int(self.shortage is not None),
            "used_bytes": self._store.used_bytes(),
            "capacity_bytes": self._store.capacity_bytes(),
            "locks": sum(queue.locks.count() for queue in core.queues.values()),
            "receivers": len(core.receivers),
            "quarantined": self._store.record_count(Table.QUARANTINE),
            "expired": totals.expired,
            "dead_lettered": totals.dead_lettered,
            "locks_expired": totals.locks_expired,
            "rules_failed": totals.rules_failed,
            "forwarded": totals.forwarded,
            "duplicates": totals.duplicates,
            "transactions": len(core.transactions.open),
            "committed": core.transactions.committed,
            "rolled_back": core.transactions.rolled_back,
            "auto_deleted": core.idle_times.auto_deletions,
        }
