"""What this partition has in memory of one entity: made when the entity comes to live here, dropped when it leaves."""

from collections.abc import Sequence

from broker.errors import BrokerError
from broker.partition.forwarding.source import begin_again, forget
from broker.partition.messages import duplicates
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


def enter(core: Core, entity_ids: Sequence[int], now_ms: int) -> None:
    """These entities live here from now on, with what the store has of them: as at a start. Raises StoreError."""
    for entity_id in entity_ids:
        core.topics.pop(entity_id, None)
        for queue_id in _queues_of(entity_id):
            begin_forwarding(core, queue_id)
            key = entity_key(queue_id)
            arm_timers(core, key, entity_key(queue_id + 1))
        begin_publishing(core, entity_id, now_ms)
        if core.terms[entity_id].duplicate_window_ms:
            duplicates.begin(core, entity_id, now_ms)
        idleness.change(core, entity_id, now_ms)


def leave(core: Core, entity_id: int, error: BrokerError) -> None:
    """Drop what is in memory of the entity. Its receivers are closed with `error`, and its locks end."""
    idleness.forget(core, entity_id)
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
    queue = core.queues.get(queue_id)
    if queue is None:
        return
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


def begin_forwarding(core: Core, queue_id: int) -> None:
    """Open the queue if it forwards and has messages to forward, or had a batch under way when it was closed."""
    value = core.store.get(Table.META, forwarded_key(queue_id))
    if value is not None:
        try:
            begin_again(core, queue_id, decode_document(value))
        except CorruptRecord as error:
            raise StoreError(f"queue {queue_id}, forwarded to: {error}") from error
    terms = core.terms.get(entity_of(queue_id))
    if (
        terms is not None
        and queue_id not in core.queues
        and terms.forwards_to(part_of(queue_id))
        and core.lives_here(entity_of(queue_id))
        and core.store.get(Table.COUNTS, entity_key(queue_id)) is not None
    ):
        core.turn.wake(core.queue(queue_id))


def begin_publishing(core: Core, entity_id: int, now_ms: int) -> None:
    """A topic continues to publish messages that it has accepted."""
    if entity_id in core.subscription_ids and core.lives_here(entity_id):
        queue_id = queue_id_of(entity_id)
        start, end = queue_key(queue_id, Place.AVAILABLE, 0), queue_key(queue_id, Place.AVAILABLE + 1, 0)
        if core.store.scan(Table.QUEUE, start, end, 1):
            core.timers.arm(now_ms, (queue_id, Due.PUBLISHING))
