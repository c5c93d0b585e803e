"""Creating, changing and deleting entities while the partition runs.

ENTITIES belongs to `broker.catalog.catalog`: the caller that changes an entity stages its definition in the same store,
before the same commit. This module does what the change means for messages, locks and receivers.
"""

from collections.abc import Sequence
from typing import Any

from broker.errors import BrokerError, EntityDisabled, EntityNotFound, ServerBusy
from broker.namespace.entities import Description
from broker.partition.forwarding.source import begin, begin_again, forget, forwards
from broker.partition.messages import duplicates
from broker.partition.messages.expiry import resume
from broker.partition.messages.schedule import mend_times
from broker.partition.messages.settlement import drop_locks
from broker.partition.messages.shared_bodies import release
from broker.partition.sessions import locks as session_locks
from broker.partition.sessions.states import free_states
from broker.partition.state import idleness
from broker.partition.state.core import PARTS, Core
from broker.partition.state.stored_rules import compiled, default_rule, write_rules
from broker.partition.state.terms import Kind, Terms
from broker.partition.state.timers import Due
from protocol import error_texts
from storage.quarantine import quarantine
from storage.queue_ids import entity_of, part_of, queue_id_of
from storage.records import (
    AUTO_DELETED_PREFIX,
    DELETED_ENTITY_PREFIX,
    FORWARDED_PREFIX,
    NEXT_ENTITY_ID_KEY,
    STORE_ID_BYTES,
    CorruptRecord,
    Place,
    auto_deleted_key,
    decode_document,
    decode_entry,
    deleted_entity_key,
    due_key,
    due_keys_end,
    encode_document,
    entity_key,
    forwarded_key,
    message_key,
    queue_key,
    rule_key,
    unpack_due_key,
)
from storage.seen_ids import free_ids
from storage.store import Store, StoreError, Table

_ALL = (b"\0", b"\xff" * 32)


def load(core: Core, now_ms: int, known: dict[bytes, Terms] | None = None) -> None:
    """Read the entities and their first timers; messages are not read. Raises StoreError.

    `known` has terms by their stored definitions. Terms that are decoded here are added to it, because all partitions
    store the same definitions.
    """
    known = {} if known is None else known
    definitions: list[tuple[int, Terms]] = []
    gone = {key for key, _ in _of_meta(core, AUTO_DELETED_PREFIX)}
    for key, value in core.store.scan(Table.ENTITIES, *_ALL, 1 << 32):
        entity_id = int.from_bytes(key, "big")
        try:
            terms = known.get(value)
            if terms is None:
                terms = known[value] = Terms.of_definition(decode_document(value))
            if key in gone:
                core.auto_deleted[entity_id] = terms.name
            else:
                definitions.append((entity_id, terms))
        except (CorruptRecord, ValueError, KeyError) as error:
            raise StoreError(f"entity {entity_id}: {error}") from error
    for entity_id, terms in sorted(definitions, key=lambda each: each[1].kind):  # topics before their subscriptions
        try:
            core.define(entity_id, terms)
        except EntityNotFound as error:
            raise StoreError(f"entity {entity_id}: {error}") from error
    if (next_id := core.store.get(Table.META, NEXT_ENTITY_ID_KEY)) is not None:
        try:
            core.next_entity_id = int(decode_document(next_id))
        except (CorruptRecord, ValueError, TypeError) as error:
            raise StoreError(f"the next entity id: {error}") from error
    for key, value in _of_meta(core, DELETED_ENTITY_PREFIX):
        entity_id = int.from_bytes(key, "big")
        try:
            topic_id = decode_document(value)["topic_id"]
        except CorruptRecord as error:
            raise StoreError(f"deleted entity {entity_id}: {error}") from error
        _free_later(core, entity_id, topic_id, now_ms)
    _begin_forwarding(core)
    _begin_publishing(core, now_ms)
    for entity_id, terms in core.terms.items():
        if terms.duplicate_window_ms:
            duplicates.begin(core, entity_id, now_ms)
    idleness.load(core, now_ms)
    if core.bodies.has_dropped:
        core.timers.arm(now_ms, (0, Due.TRANSACTIONS))
    _arm_timers(core)


def _arm_timers(core: Core) -> None:
    """Arm the first of each timer of each queue. Each step begins after the last key, whatever the keys are."""
    store, start = core.store, _ALL[0]
    while items := store.scan(Table.DUE, start, _ALL[1], 1):
        [(key, _)] = items
        try:
            queue_id, timer, _, _ = unpack_due_key(key)
        except CorruptRecord:
            quarantine(store, Table.DUE, key)
            start = key + b"\0"
            continue
        start = due_keys_end(key)
        if timer == Due.SCHEDULED:
            mend_times(core, queue_id)
        # The first key now, which `mend_times` may have changed.
        [(key, _)] = store.scan(Table.DUE, key[:5], start, 1)
        _, _, due_ms, _ = unpack_due_key(key)
        core.timers.arm(due_ms, (queue_id, timer))


def _of_meta(core: Core, prefix: bytes) -> list[tuple[bytes, bytes]]:
    """The records of META whose keys begin with `prefix`, by the rest of their keys."""
    items = core.store.scan(Table.META, prefix, prefix + _ALL[1], 1 << 32)
    return [(key.removeprefix(prefix), value) for key, value in items]


def _begin_forwarding(core: Core) -> None:
    """Open the queues that forward and have messages to forward, or had a batch under way when the process ended."""
    for key, value in _of_meta(core, FORWARDED_PREFIX):
        queue_id = int.from_bytes(key, "big")
        try:
            begin_again(core, queue_id, decode_document(value))
        except CorruptRecord as error:
            raise StoreError(f"queue {queue_id}, forwarded to: {error}") from error
    for key, _ in core.store.scan(Table.COUNTS, *_ALL, 1 << 32):
        queue_id = int.from_bytes(key, "big")
        terms = core.terms.get(entity_of(queue_id))
        if terms is not None and queue_id not in core.queues and terms.forwards_to(part_of(queue_id)):
            core.turn.wake(core.queue(queue_id))


def _begin_publishing(core: Core, now_ms: int) -> None:
    """Topics continue to publish messages that they have accepted."""
    for topic_id in core.topic_ids.values():
        queue_id = queue_id_of(topic_id)
        start, end = queue_key(queue_id, Place.AVAILABLE, 0), queue_key(queue_id, Place.AVAILABLE + 1, 0)
        if core.store.scan(Table.QUEUE, start, end, 1):
            core.timers.arm(now_ms, (queue_id, Due.PUBLISHING))


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
    if entity_id in core.deleted:
        raise ServerBusy("The messages of a deleted entity with the same id are still being deleted. Please try again.")
    if entity_id in core.auto_deleted:
        raise _deleted(core.auto_deleted[entity_id])
    terms = Terms.of(description)._replace(partitions=partitions)
    before = core.terms.get(entity_id)
    compiled_rules = [compiled(rule) for rule in ([default_rule(now_ms)] if rules is None else rules)]
    core.define(entity_id, terms)
    idleness.change(core, entity_id, now_ms)
    if before is None:
        if terms.kind == Kind.SUBSCRIPTION:
            write_rules(core.store, entity_id, compiled_rules)
            topic = core.topics.get(core.topic_ids[terms.topic])
            if topic is not None:
                topic.add_subscription(entity_id, compiled_rules)
        return
    for part in PARTS:
        queue = core.queues.get(queue_id_of(entity_id, part))
        if queue is None:
            if terms.forwards_to(part):
                begin(core, core.queue(queue_id_of(entity_id, part)))
            continue
        queue.terms = terms
        begins = bool(queue.forward_to) and not before.forwards_to(part)
        if terms.lock_duration_ms != before.lock_duration_ms or begins:
            (drop_locks if queue.sessions is None else session_locks.drop_locks)(core, queue, now_ms)
        if not terms.can_receive:
            _close_receivers(core, queue.id, disabled(terms))
            if queue.sessions is not None:
                session_locks.release_all(core, queue, now_ms)
        if begins:
            _close_receivers(core, queue.id, forwards(queue))
            begin(core, queue)
        resume(core, queue)
        core.turn.wake(queue)


def disabled(terms: Terms) -> EntityDisabled:
    return EntityDisabled(error_texts.receive_disabled(terms.name))


def _deleted(name: str) -> EntityNotFound:
    return EntityNotFound(f"The messaging entity '{name}' could not be found: it was deleted.")


def delete_entity(core: Core, entity_id: int, now_ms: int) -> dict[int, str]:
    """Delete the entity at once, a topic with its subscriptions. Its messages are deleted step by step.

    Raises EntityNotFound.

    Returns what was deleted: entity id -> name, subscriptions before their topic.
    """
    if entity_id not in core.terms:
        raise EntityNotFound("The messaging entity could not be found.")
    ids = [*sorted(core.subscription_ids.get(entity_id, ())), entity_id]
    names = {each: core.terms[each].name for each in ids}
    for each in ids:
        _delete(core, each, now_ms)
    return names


def delete_unused(core: Core, entity_id: int, now_ms: int) -> None:
    """Nobody has used the entity for its interval. The deletion is final with this commit, whatever the catalog still
    says: a message sent before keeps the entity, and a message sent after is refused.
    """
    deleted = delete_entity(core, entity_id, now_ms)
    core.auto_deletions += len(deleted)
    core.auto_deleted |= deleted
    core.newly_auto_deleted |= deleted
    document = encode_document(now_ms)
    core.store.put_many(Table.META, [(auto_deleted_key(each), document) for each in sorted(deleted)])


def delete_all(core: Core, entity_ids: Sequence[int], now_ms: int) -> None:
    """The catalog does not have these entities any more: delete those that are here."""
    for entity_id in entity_ids:
        if entity_id in core.terms:
            delete_entity(core, entity_id, now_ms)
        elif core.auto_deleted.pop(entity_id, None) is not None:
            core.store.delete(Table.META, auto_deleted_key(entity_id))


def _delete(core: Core, entity_id: int, now_ms: int) -> None:
    name = core.terms[entity_id].name
    idleness.forget(core, entity_id)
    topic_id = core.forget(entity_id)
    core.topics.pop(entity_id, None)
    duplicates.forget(core, entity_id)
    if topic_id in core.topics:
        core.topics[topic_id].remove_subscription(entity_id)
    for part in PARTS:
        queue_id = queue_id_of(entity_id, part)
        _close_receivers(core, queue_id, _deleted(name))
        queue = core.queues.pop(queue_id, None)
        if queue is not None:
            core.past.add(queue.tally)
        forget(core, queue_id)
        core.turn.forget(queue_id)
    document = encode_document({"deleted_ms": now_ms, "topic_id": topic_id})
    core.store.put(Table.META, deleted_entity_key(entity_id), document)
    _free_later(core, entity_id, topic_id, now_ms)


def _free_later(core: Core, entity_id: int, topic_id: int | None, now_ms: int) -> None:
    core.deleted[entity_id] = topic_id
    core.timers.arm(now_ms, (queue_id_of(entity_id), Due.DELETION))


def _close_receivers(core: Core, queue_id: int, error: BrokerError) -> None:
    queue = core.queues.get(queue_id)
    if queue is None:
        return
    for receiver in list(queue.receivers.values()):
        core.close_receiver(receiver, error)
    queue.window.active = queue.outbox is not None
    queue.window.reset(queue.locks.numbers())


def free(core: Core, entity_id: int, now_ms: int) -> None:
    """The timer: delete a step of the messages of a deleted entity; at the end forget the entity."""
    store, step, first, end = core.store, core.step(), queue_id_of(entity_id), queue_id_of(entity_id + 1)
    topic_id = core.deleted[entity_id]
    core.turn.work += step
    if items := store.scan(Table.QUEUE, queue_key(first, 0, 0), queue_key(end, 0, 0), step):
        ids = []
        for key, value in items:
            try:
                ids.append(decode_entry(value).message_id)
            except CorruptRecord:
                quarantine(store, Table.QUEUE, key)  # its body stays: we no longer know which body it referred to
        if topic_id is None:
            store.delete_many(Table.MESSAGES, map(message_key, ids))
        elif ids:
            release(core, topic_id, ids, [None] * len(ids))
        store.delete_many(Table.QUEUE, [key for key, _ in items])
    elif items := store.scan(Table.SESSION_ENTRIES, entity_key(first), entity_key(end), step):
        store.delete_many(Table.SESSION_ENTRIES, [key for key, _ in items])
    elif items := store.scan(Table.SESSIONS, entity_key(first), entity_key(end), step):
        free_states(core, topic_id, items)
    elif items := store.scan(Table.DUE, due_key(first, 0, 0, 0), due_key(end, 0, 0, 0), step):
        store.delete_many(Table.DUE, [key for key, _ in items])
    elif items := store.scan(Table.RULES, rule_key(entity_id, ""), rule_key(entity_id + 1, ""), step):
        store.delete_many(Table.RULES, [key for key, _ in items])
    elif not free_ids(store, entity_id, step):
        store.delete_many(Table.MARKS, _marks(store, range(first, end)))
        store.delete_many(Table.META, map(forwarded_key, range(first, end)))
        store.delete_many(Table.COUNTS, map(entity_key, range(first, end)))
        store.delete(Table.META, deleted_entity_key(entity_id))
        del core.deleted[entity_id]
        return
    core.timers.arm(now_ms, (first, Due.DELETION))


def _marks(store: Store, queue_ids: range) -> list[bytes]:
    """Keys of the marks of these queues, from any store: the queues are deleted."""
    items = store.scan(Table.MARKS, *_ALL, 1 << 32)
    return [key for key, _ in items if int.from_bytes(key[STORE_ID_BYTES:], "big") in queue_ids]
