"""Deleting what the store has of an entity that was deleted, or moved to another partition: step by step.

The rules of an entity that was moved stay, because every partition has them, and so do the marks of its queues, because
it may go on forwarding to entities here.
"""

from collections.abc import Sequence

from broker.partition.messages.shared_bodies import release
from broker.partition.sessions.states import free_states
from broker.partition.state.core import Core
from broker.partition.state.entities import Deleted
from broker.partition.state.timers import Due
from storage.journal.events import Op
from storage.quarantine import quarantine
from storage.queue_ids import queue_id_of
from storage.records import (
    ARRIVED_AS_PREFIX,
    ARRIVED_FROM_PREFIX,
    STORE_ID_BYTES,
    CorruptRecord,
    decode_entry,
    deleted_entity_key,
    due_key,
    encode_document,
    entity_key,
    forwarded_key,
    message_key,
    overtaken_key,
    queue_key,
    rule_key,
    unpack_queue_key,
)
from storage.seen_ids import free_ids
from storage.store import Store, Table

STATES = 8  # at once: each may be large
STEP = 128  # rows that one turn deletes: all that is sent to the partition waits for the turn


def discard(core: Core, entity_id: int, topic_id: int | None, now_ms: int) -> None:
    """Delete what the store has of an entity that does not live here any more, step by step."""
    document = encode_document({"deleted_ms": now_ms, "topic_id": topic_id})
    core.store.put(Table.META, deleted_entity_key(entity_id), document)
    free_later(core, entity_id, topic_id, now_ms)


def free_later(core: Core, entity_id: int, topic_id: int | None, now_ms: int) -> None:
    """META says that the entity is to be deleted here. `topic_id` is that of a subscription."""
    core.entities.deleted[entity_id] = Deleted(topic_id)
    core.timers.arm(now_ms, (queue_id_of(entity_id), Due.DELETION))


def free(core: Core, entity_id: int, now_ms: int) -> None:
    """The timer: delete a step of the messages of a deleted entity; at the end forget the entity."""
    store, step, first, end = core.store, _step(core), queue_id_of(entity_id), queue_id_of(entity_id + 1)
    topic_id = core.entities.deleted[entity_id].topic_id
    core.turn.work += step
    if items := _next_rows(core, entity_id, Table.QUEUE, queue_key(first, 0, 0), queue_key(end, 0, 0), step):
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
        _name(core, entity_id)
        op, reason = (Op.MOVED, None) if entity_id in core.entities.terms else (Op.PURGED, "deleted")
        for key, _ in items:
            queue_id, _, number = unpack_queue_key(key)
            core.journal.gone(op, queue_id, [number], reason)
    elif items := _next_rows(core, entity_id, Table.SESSION_ENTRIES, entity_key(first), entity_key(end), step):
        store.delete_many(Table.SESSION_ENTRIES, [key for key, _ in items])
    elif items := _next_rows(core, entity_id, Table.SESSIONS, entity_key(first), entity_key(end), step):
        _journal_states(core, entity_id)
        free_states(core, topic_id, items)
    elif items := store.scan(Table.SESSION_STATES, entity_key(first), entity_key(end), STATES):
        _journal_states(core, entity_id)
        store.delete_many(Table.SESSION_STATES, [key for key, _ in items])  # a move was given up between the two rows
    elif items := _next_rows(core, entity_id, Table.DUE, due_key(first, 0, 0, 0), due_key(end, 0, 0, 0), step):
        store.delete_many(Table.DUE, [key for key, _ in items])
    elif entity_id not in core.entities.terms and (
        items := store.scan(Table.RULES, rule_key(entity_id, ""), rule_key(entity_id + 1, ""), step)
    ):
        store.delete_many(Table.RULES, [key for key, _ in items])
    elif keys := arrived_rows(store, entity_id, step):
        store.delete_many(Table.META, keys)
    elif not free_ids(store, entity_id, step):
        if entity_id not in core.entities.terms:
            store.delete_many(Table.MARKS, _marks(store, range(first, end)))
        for key_of in (forwarded_key, overtaken_key):
            store.delete_many(Table.META, map(key_of, range(first, end)))
        store.delete_many(Table.COUNTS, map(entity_key, range(first, end)))
        store.delete(Table.META, deleted_entity_key(entity_id))
        del core.entities.deleted[entity_id]
        return
    core.timers.arm(now_ms, (first, Due.DELETION))


def _next_rows(
    core: Core, entity_id: int, table: Table, begin: bytes, end: bytes, step: int
) -> Sequence[tuple[bytes, bytes]]:
    """Rows to delete now, behind those that were deleted.

    A scan from the first key would pass all of these until a checkpoint has made the table without them. It is made
    once, when nothing is left behind them.
    """
    up_to = core.entities.deleted[entity_id].freed_up_to
    start = up_to.get(table, begin)
    items = core.store.scan(table, start, end, step) if start < end else []
    if not items and begin < start < end:
        items = core.store.scan(table, begin, end, step)
    up_to[table] = items[-1][0] + b"\0" if items else end
    return items


def _step(core: Core) -> int:
    return min(core.step(), STEP)


def _name(core: Core, entity_id: int) -> None:
    if (terms := core.entities.terms.get(entity_id)) is not None:
        core.journal.named(entity_id, terms.name)


def _journal_states(core: Core, entity_id: int) -> None:
    _name(core, entity_id)
    core.journal.states(queue_id_of(entity_id), "moved" if entity_id in core.entities.terms else "deleted")


def _marks(store: Store, queue_ids: range) -> list[bytes]:
    """Keys of the marks of these queues, from any store: the queues are deleted."""
    items = store.scan(Table.MARKS, b"\0", b"\xff" * 32, 1 << 32)
    return [key for key, _ in items if int.from_bytes(key[STORE_ID_BYTES:], "big") in queue_ids]


def arrived_rows(store: Store, entity_id: int, step: int) -> list[bytes]:
    """Keys of META that were needed only while the messages of the entity came from another partition."""
    for prefix in (ARRIVED_FROM_PREFIX, ARRIVED_AS_PREFIX):
        start = prefix + entity_key(entity_id)
        if items := store.scan(Table.META, start, start + b"\xff" * 9, step):
            return [key for key, _ in items]
    return []


def tidy_later(core: Core, entity_id: int, now_ms: int) -> None:
    """The entity has come from another partition: delete what only its move has needed."""
    core.timers.arm(now_ms, (queue_id_of(entity_id), Due.DELETION))


def tidy(core: Core, entity_id: int, now_ms: int) -> None:
    """The timer: a step of that."""
    if keys := arrived_rows(core.store, entity_id, _step(core)):
        core.turn.work += len(keys)
        core.store.delete_many(Table.META, keys)
        tidy_later(core, entity_id, now_ms)
