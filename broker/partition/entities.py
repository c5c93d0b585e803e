"""Creating, changing and deleting entities while the partition runs.

ENTITIES belongs to `broker.catalog`: whoever changes an entity stages its definition in the same store, before the same
commit. Here is what the change does to messages, locks and receivers.
"""

from broker.entities import QueueDescription
from broker.errors import EntityDisabled, EntityNotFound, ServerBusy
from broker.partition.core import PARTS, Core
from broker.partition.expiry import resume
from broker.partition.settlement import drop_locks
from broker.partition.terms import Terms
from broker.partition.timers import Due
from storage.quarantine import quarantine
from storage.records import (
    NEVER,
    CorruptRecord,
    decode_document,
    decode_entry,
    due_key,
    encode_document,
    entity_key,
    message_key,
    queue_key,
    unpack_due_key,
)
from storage.store import StoreError, Table

_ALL = (b"\0", b"\xff" * 32)
_DELETED = b"deleted-entity-"  # in META, then the entity's key: its messages are still being freed


def load(core: Core, now_ms: int) -> None:
    """Read the entities, and what is due first of each; messages are not looked at. Raises StoreError."""
    for key, value in core.store.scan(Table.ENTITIES, *_ALL, 1 << 32):
        entity_id = int.from_bytes(key, "big")
        try:
            core.terms[entity_id] = Terms.of_definition(decode_document(value))
        except (CorruptRecord, ValueError) as error:
            raise StoreError(f"entity {entity_id}: {error}") from error
    for key, _ in core.store.scan(Table.META, _DELETED, _DELETED + _ALL[1], 1 << 32):
        _free_later(core, int.from_bytes(key[len(_DELETED) :], "big"), now_ms)
    start = _ALL[0]
    while items := core.store.scan(Table.DUE, start, _ALL[1], 1):
        queue_id, timer, due_ms, _ = unpack_due_key(items[0][0])
        core.timers.arm(due_ms, (queue_id, timer))
        start = due_key(queue_id, timer, NEVER, (1 << 64) - 1) + b"\0"


def put_queue(core: Core, entity_id: int, description: QueueDescription, now_ms: int) -> None:
    """Create it, or change its properties. Raises ServerBusy while a deleted entity of this id is being freed.

    A change of the lock duration drops the locks held; receivers that are no longer allowed are closed.
    """
    if entity_id in core.deleted:
        raise ServerBusy("A deleted entity of the same id is still being freed.")
    terms = Terms.of(description)
    before = core.terms.get(entity_id)
    core.terms[entity_id] = terms
    for part in PARTS:
        queue = core.queues.get(entity_id << 3 | part)
        if queue is None or before is None:
            continue
        queue.terms = terms
        if terms.lock_duration_ms != before.lock_duration_ms:
            drop_locks(core, queue, now_ms)
        if not terms.can_receive:
            _close_receivers(core, queue.id, disabled(terms))
        resume(core, queue)


def disabled(terms: Terms) -> EntityDisabled:
    return EntityDisabled(f"Messaging entity '{terms.name}' is currently disabled for receiving.")


def delete_queue(core: Core, entity_id: int, now_ms: int) -> None:
    """It is gone at once; its messages are freed step by step. Raises EntityNotFound."""
    terms = core.terms.pop(entity_id, None)
    if terms is None:
        raise EntityNotFound("The messaging entity could not be found.")
    for part in PARTS:
        queue_id = entity_id << 3 | part
        _close_receivers(core, queue_id, EntityNotFound(f"The messaging entity '{terms.name}' was deleted."))
        queue = core.queues.pop(queue_id, None)
        if queue is not None:
            core.past.add(queue.tally)
        core.touched.pop(queue_id, None)
        core.awake.pop(queue_id, None)
    core.store.put(Table.META, _DELETED + entity_key(entity_id), encode_document(now_ms))
    _free_later(core, entity_id, now_ms)


def _free_later(core: Core, entity_id: int, now_ms: int) -> None:
    core.deleted.add(entity_id)
    core.timers.arm(now_ms, (entity_id << 3, Due.DELETION))


def _close_receivers(core: Core, queue_id: int, error: EntityDisabled | EntityNotFound) -> None:
    queue = core.queues.get(queue_id)
    if queue is None:
        return
    for receiver in list(queue.receivers.values()):
        core.close_receiver(receiver, error)
    queue.window.active = False
    queue.window.reset(queue.locks.numbers())


def free(core: Core, entity_id: int, now_ms: int) -> None:
    """The timer: free a step of what a deleted entity held, then forget it."""
    store, step, first, end = core.store, core.settings.step, entity_id << 3, entity_id + 1 << 3
    if items := store.scan(Table.QUEUE, queue_key(first, 0, 0), queue_key(end, 0, 0), step):
        ids = []
        for key, value in items:
            try:
                ids.append(decode_entry(value).message_id)
            except CorruptRecord:
                quarantine(store, Table.QUEUE, key)  # its body stays: whose it was is not known
        store.delete_many(Table.QUEUE, [key for key, _ in items])
        store.delete_many(Table.MESSAGES, map(message_key, ids))
    elif items := store.scan(Table.DUE, due_key(first, 0, 0, 0), due_key(end, 0, 0, 0), step):
        store.delete_many(Table.DUE, [key for key, _ in items])
    else:
        store.delete_many(Table.COUNTS, map(entity_key, range(first, end)))
        store.delete(Table.META, _DELETED + entity_key(entity_id))
        core.deleted.discard(entity_id)
        return
    core.timers.arm(now_ms, (first, Due.DELETION))
