"""Creating, changing and deleting entities while the partition runs.

ENTITIES belongs to `broker.catalog.catalog`: the caller that changes an entity stages its definition in the same store,
before the same commit. This module does what the change means for messages, locks and receivers.
"""

from collections.abc import Sequence
from typing import Any

from broker.errors import EntityDisabled, EntityNotFound, NotAllowed, ServerBusy
from broker.namespace.entities import Description
from broker.partition.disposal import discard, free_later
from broker.partition.forwarding.source import begin, end, forwards
from broker.partition.messages import deferred_expiry
from broker.partition.messages.expiry import resume
from broker.partition.messages.settlement import drop_locks
from broker.partition.moving import moves, residence
from broker.partition.sessions import locks as session_locks
from broker.partition.state import accesses, idleness
from broker.partition.state.core import PARTS, Core
from broker.partition.state.queue import Queue
from broker.partition.state.stored_rules import compiled, default_rule, write_rules
from broker.partition.state.terms import Kind, Terms
from broker.partition.state.timers import Due
from broker.rules import load_language
from protocol import error_texts
from storage.queue_ids import queue_id_of
from storage.records import (
    AUTO_DELETED_PREFIX,
    DELETED_ENTITY_PREFIX,
    FORWARDED_PREFIX,
    NEXT_ENTITY_ID_KEY,
    CorruptRecord,
    auto_deleted_key,
    decode_document,
    encode_document,
)
from storage.store import StoreError, Table

_ALL = (b"\0", b"\xff" * 32)


def load(core: Core, now_ms: int, known: dict[bytes, Terms] | None = None) -> None:
    """Read the entities and their first timers; messages are not read. Raises StoreError.

    `known` has terms by their stored definitions. Terms that are decoded here are added to it, because all partitions
    store the same definitions.
    """
    core.opened_ms = now_ms
    known = {} if known is None else known
    definitions: list[tuple[int, Terms]] = []
    gone = {key for key, _ in _of_meta(core, AUTO_DELETED_PREFIX)}
    for key, value in core.store.scan(Table.ENTITIES, *_ALL, 1 << 32):
        entity_id = int.from_bytes(key, "big")
        try:
            terms = known.get(value)
            if terms is None:
                terms = known[value] = Terms.of_definition(decode_document(value), core.settings.sku)
            if key in gone:
                core.idle_times.auto_deleted[entity_id] = terms.name
            else:
                definitions.append((entity_id, terms))
        except (CorruptRecord, ValueError, KeyError) as error:
            raise StoreError(f"entity {entity_id}: {error}") from error
    for entity_id, terms in sorted(definitions, key=lambda each: each[1].kind):  # topics before their subscriptions
        try:
            core.entities.define(entity_id, terms)
        except EntityNotFound as error:
            raise StoreError(f"entity {entity_id}: {error}") from error
    if core.entities.topic_ids:
        load_language()  # before anybody waits; for topics that come later see `broker.worker.copies`
    if (next_id := core.store.get(Table.META, NEXT_ENTITY_ID_KEY)) is not None:
        try:
            core.entities.next_id = int(decode_document(next_id))
        except (CorruptRecord, ValueError, TypeError) as error:
            raise StoreError(f"the next entity id: {error}") from error
    for key, value in _of_meta(core, DELETED_ENTITY_PREFIX):
        entity_id = int.from_bytes(key, "big")
        try:
            topic_id = decode_document(value)["topic_id"]
        except CorruptRecord as error:
            raise StoreError(f"deleted entity {entity_id}: {error}") from error
        free_later(core, entity_id, topic_id, now_ms)
    core.marks.load()
    moves.load(core, now_ms)
    for key, value in _of_meta(core, FORWARDED_PREFIX):
        residence.forward_again(core, int.from_bytes(key, "big"), value)
    for key, _ in core.store.scan(Table.COUNTS, *_ALL, 1 << 32):
        residence.begin_forwarding(core, int.from_bytes(key, "big"))
    for entity_id in core.entities.terms:
        residence.begin_duties(core, entity_id, now_ms)
    idleness.load(core, now_ms)
    if core.bodies.has_dropped:
        core.timers.arm(now_ms, (0, Due.TRANSACTIONS))
    residence.arm_timers(core, *_ALL)


def _of_meta(core: Core, prefix: bytes) -> list[tuple[bytes, bytes]]:
    """The records of META whose keys begin with `prefix`, by the rest of their keys."""
    items = core.store.scan(Table.META, prefix, prefix + _ALL[1], 1 << 32)
    return [(key.removeprefix(prefix), value) for key, value in items]


def put_entity(
    core: Core,
    entity_id: int,
    description: Description,
    now_ms: int,
    rules: Sequence[dict[str, Any]] | None = None,
    partitions: tuple[int, ...] = (),
) -> None:
    """Create the entity, or change its properties. Raises ServerBusy while the messages of a deleted entity with this
    id are being deleted, EntityNotFound if it was deleted because nobody used it, or if the topic of a subscription
    does not exist, InvalidArgument if one of its rules is wrong.

    `rules` are the rule documents of a new subscription; None is `$Default`, which takes every message. A change of the
    lock duration ends all locks; receivers that are no longer allowed are closed.
    """
    if entity_id in core.entities.deleted and entity_id not in core.entities.terms:
        raise ServerBusy("The messages of a deleted entity with the same id are still being deleted. Please try again.")
    if entity_id in core.idle_times.auto_deleted:
        raise _deleted(core.idle_times.auto_deleted[entity_id])
    terms = Terms.of(description, partitions, core.settings.sku)
    before = core.entities.terms.get(entity_id)
    compiled_rules = [compiled(rule) for rule in ([default_rule(now_ms)] if rules is None else rules)]
    core.entities.define(entity_id, terms)
    idleness.change(core, entity_id, now_ms)
    if before is None:
        if terms.kind == Kind.SUBSCRIPTION:
            write_rules(core.store, entity_id, compiled_rules)
            core.entities.accessed_ms[core.entities.topic_ids[terms.topic]] = now_ms
            topic = core.topics.get(core.entities.topic_ids[terms.topic])
            if topic is not None:
                topic.add_subscription(entity_id, compiled_rules)
        return
    if terms.partitions != before.partitions:
        moves.relocate(core, entity_id, before, now_ms)
    if not core.entities.lives_here(entity_id):
        return
    for part in PARTS:
        queue = core.queues.get(queue_id_of(entity_id, part))
        if queue is None:
            if terms.forwards_to(part):
                begin(core, core.queue(queue_id_of(entity_id, part)))
            continue
        accesses.note_receivers(queue, now_ms)
        queue.terms = terms
        begins = bool(queue.forward_to) and not before.forwards_to(part)
        if terms.lock_duration_ms != before.lock_duration_ms or begins:
            (drop_locks if queue.sessions is None else session_locks.drop_locks)(core, queue, now_ms)
        if not terms.can_receive:
            residence.close_receivers(core, queue.id, disabled(terms))
            if queue.sessions is not None:
                session_locks.release_all(core, queue, now_ms)
        if before.forwards_to(part) and not queue.forward_to:
            end(queue)
        if begins:
            residence.close_receivers(core, queue.id, forwards(queue))
            begin(core, queue)
        resume(core, queue)
        core.turn.wake(queue)
    deferred_expiry.begin(core, entity_id, now_ms)


def require_receive(queue: Queue) -> None:
    """Refuse if nobody can receive from the queue. Raises EntityNotFound, NotAllowed or EntityDisabled."""
    if queue.transfers is not None:
        raise EntityNotFound("Nobody can receive from a transfer queue.")
    if queue.is_topic:
        raise NotAllowed(f"'{queue.terms.name}' is a topic; its messages are received from its subscriptions.")
    if queue.forward_to:
        raise forwards(queue)
    if not queue.terms.can_receive:
        raise disabled(queue.terms)


def disabled(terms: Terms) -> EntityDisabled:
    return EntityDisabled(error_texts.receive_disabled(terms.name))


def _deleted(name: str) -> EntityNotFound:
    return EntityNotFound(f"The messaging entity '{name}' could not be found: it was deleted.")


def delete_entity(core: Core, entity_id: int, now_ms: int) -> dict[int, str]:
    """Delete the entity at once, a topic with its subscriptions. Its messages are deleted step by step.

    Raises EntityNotFound.

    Returns what was deleted: entity id -> name, subscriptions before their topic.
    """
    if entity_id not in core.entities.terms:
        raise EntityNotFound("The messaging entity could not be found.")
    ids = [*sorted(core.entities.subscription_ids.get(entity_id, ())), entity_id]
    names = {each: core.entities.terms[each].name for each in ids}
    for each in ids:
        _delete(core, each, now_ms)
    return names


def delete_unused(core: Core, entity_id: int, now_ms: int) -> None:
    """Nobody has used the entity for its interval. The deletion is final with this commit, whatever the catalog still
    says: a message sent before keeps the entity, and a message sent after is refused.
    """
    deleted = delete_entity(core, entity_id, now_ms)
    core.idle_times.auto_deletions += len(deleted)
    core.idle_times.auto_deleted |= deleted
    core.idle_times.newly_auto_deleted |= deleted
    document = encode_document(now_ms)
    core.store.put_many(Table.META, [(auto_deleted_key(each), document) for each in sorted(deleted)])


def delete_all(core: Core, entity_ids: Sequence[int], now_ms: int) -> None:
    """The catalog does not have these entities any more: delete those that are here."""
    for entity_id in entity_ids:
        if entity_id in core.entities.terms:
            delete_entity(core, entity_id, now_ms)
        elif core.idle_times.auto_deleted.pop(entity_id, None) is not None:
            core.store.delete(Table.META, auto_deleted_key(entity_id))


def _delete(core: Core, entity_id: int, now_ms: int) -> None:
    residence.leave(core, entity_id, _deleted(core.entities.terms[entity_id].name))
    topic_id = core.entities.forget(entity_id)
    core.journal.forget(entity_id)
    if topic_id in core.topics:
        core.topics[topic_id].remove_subscription(entity_id)
    moves.forget(core, entity_id)
    discard(core, entity_id, topic_id, now_ms)
