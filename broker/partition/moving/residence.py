"""What this partition has in memory of one entity: made when the entity comes to live here, dropped when it leaves."""

from broker.errors import BrokerError
from broker.partition.forwarding.source import begin, begin_again, forget
from broker.partition.messages import deferred_expiry, duplicates
from broker.partition.messages.browsing import end_waits
from broker.partition.messages.schedule import mend_times
from broker.partition.state import idleness
from broker.partition.state.core import PARTS, Core
from broker.partition.state.timers import Due
from storage.quarantine import quarantine
from storage.queue_ids import entity_of, part_of, queue_id_of
from storage.records import (
    CorruptRecord,
    Place,
    decode_document,
    due_keys_end,
    entity_key,
    forwarded_key,
    queue_key,
    unpack_due_key,
)
from storage.store import StoreError, Table


def enter(core: Core, entity_id: int, now_ms: int) -> None:
    """The entity lives here from now on, with what the store has of it: as at a start. Raises StoreError."""
    store = core.store
    core.entities.accessed_ms[entity_id] = now_ms
    core.topics.pop(entity_id, None)
    for queue_id in _queues_of(entity_id):
        if (recorded := store.get(Table.META, forwarded_key(queue_id))) is not None:
            forward_again(core, queue_id, recorded)
        if store.get(Table.COUNTS, entity_key(queue_id)) is not None:
            begin_forwarding(core, queue_id)
        arm_timers(core, entity_key(queue_id), entity_key(queue_id + 1))
    begin_duties(core, entity_id, now_ms)
    idleness.change(core, entity_id, now_ms)


def leave(core: Core, entity_id: int, error: BrokerError) -> None:
    """Drop what is in memory of the entity. Its receivers are closed with `error`, and its locks end."""
    idleness.forget(core, entity_id)
    core.entities.accessed_ms.pop(entity_id, None)
    core.topics.pop(entity_id, None)
    duplicates.forget(core, entity_id)
    for queue_id in _queues_of(entity_id):
        close_receivers(core, queue_id, error)
        if (queue := core.queues.pop(queue_id, None)) is not None:
            core.past.add(queue.tally)
            if queue_id in core.turn.touched:
                core.store.put(Table.COUNTS, entity_key(queue_id), queue.encoded_counts())
        forget(core, queue_id)
        core.turn.forget(queue_id)


def close_receivers(core: Core, queue_id: int, error: BrokerError) -> None:
    """The receivers and browsers of the queue are told `error`. The locks that they have stay."""
    queue = core.queues.get(queue_id)
    if queue is None:
        return
    end_waits(core, queue, error)
    for receiver in list(queue.receivers.values()):
        core.close_receiver(receiver, error)
    queue.window.active = queue.outbox is not None
    queue.window.reset(queue.locks.numbers())


def _queues_of(entity_id: int) -> list[int]:
    return [queue_id_of(entity_id, part) for part in PARTS]


def arm_timers(core: Core, start: bytes, end: bytes) -> None:
    """Arm the first of each timer of each queue with keys from `start` on and below `end`.

    Each step begins after the last key, whatever the keys are.
    """
    store = core.store
    while items := store.scan(Table.DUE, start, end, 1):
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


def forward_again(core: Core, queue_id: int, recorded: bytes) -> None:
    """Open the queue: other partitions may have taken over messages of it. `recorded` is what META has.

    Raises StoreError.
    """
    try:
        begin_again(core, queue_id, decode_document(recorded))
    except CorruptRecord as error:
        raise StoreError(f"queue {queue_id}, forwarded to: {error}") from error


def begin_forwarding(core: Core, queue_id: int) -> None:
    """Open the queue, which has had messages, if it forwards."""
    terms = core.entities.terms.get(entity_of(queue_id))
    if terms is not None and terms.forwards_to(part_of(queue_id)) and core.entities.lives_here(entity_of(queue_id)):
        begin(core, core.queue(queue_id))


def begin_duties(core: Core, entity_id: int, now_ms: int) -> None:
    """Go on with duplicate detection, look when deferred messages expire, and publish what a topic has accepted."""
    deferred_expiry.begin(core, entity_id, now_ms)
    if core.entities.terms[entity_id].duplicate_window_ms:
        duplicates.begin(core, entity_id, now_ms)
    if entity_id in core.entities.subscription_ids and core.entities.lives_here(entity_id):
        queue_id = queue_id_of(entity_id)
        start, end = queue_key(queue_id, Place.AVAILABLE, 0), queue_key(queue_id, Place.AVAILABLE + 1, 0)
        if core.store.scan(Table.QUEUE, start, end, 1):
            core.timers.arm(now_ms, (queue_id, Due.PUBLISHING))
