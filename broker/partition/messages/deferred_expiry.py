"""Deferred messages that expire: they are dead-lettered by the rule for others, and where it is off they stay (DL6).

They have no timers in the store, because until they are asked for nobody else need look at them. So the queue looks
through all of them in bounded steps, once it is used or its entity is here, and notes when they expire
(`state.deferrals`). A locked message waits for the end of its lock.
"""

from broker.partition.messages import stored
from broker.partition.messages.leaving import unlocked
from broker.partition.messages.moves import expire, expires_now, overlay_expires_ms
from broker.partition.state.core import Core
from broker.partition.state.deferrals import Deferrals
from broker.partition.state.queue import Queue
from broker.partition.state.timers import Due
from storage.queue_ids import Part, queue_id_of
from storage.records import (
    NEVER,
    CorruptRecord,
    Place,
    decode_counts,
    entity_key,
    entry_or_none,
    message_expires_ms,
    queue_key,
    unpack_queue_key,
)
from storage.store import Table


def begin(core: Core, entity_id: int, now_ms: int) -> None:
    """The entity is here, or its terms have changed. If deferred messages may expire, the timer looks at them."""
    queue_id = queue_id_of(entity_id)
    if not core.entities.terms[entity_id].dead_letter_expired or not core.entities.lives_here(entity_id):
        return
    queue = core.queues.get(queue_id)
    if queue is not None and queue.deferrals is not None:
        queue.deferrals.look_again()
    if _has_deferred(core, queue_id):
        core.timers.arm(now_ms, (queue_id, Due.EXPIRY))


def _has_deferred(core: Core, queue_id: int) -> bool:
    if (queue := core.queues.get(queue_id)) is not None:
        return queue.counts[Place.DEFERRED] > 0
    value = core.store.get(Table.COUNTS, entity_key(queue_id))
    try:
        return value is not None and decode_counts(value).deferred > 0
    except CorruptRecord:
        return True  # the timer opens the queue, which counts its messages


def sweep(core: Core, queue: Queue, now_ms: int) -> None:
    """The timer, which is the one of `expiry`: look at a step of the messages, and expire a step of those due."""
    if not queue.terms.dead_letter_expired or queue.part != Part.MAIN or not queue.counts[Place.DEFERRED]:
        queue.deferrals = None
        return
    deferrals = queue.deferrals
    if deferrals is None:
        deferrals = queue.deferrals = Deferrals()
    if not expires_now(core, queue):
        queue.expiry_paused = True
        return
    deferrals.keep_locked(queue.locks.deferred)
    _look(core, queue, deferrals)
    for time_ms, number in deferrals.take_due(now_ms, core.step()):
        if number in queue.locks.deferred:
            deferrals.locked[number] = time_ms
        else:
            _expire(core, queue, number)
    next_ms = deferrals.next_ms()
    if next_ms != NEVER:
        core.timers.arm(max(next_ms, now_ms), (queue.id, Due.EXPIRY))


def _look(core: Core, queue: Queue, deferrals: Deferrals) -> None:
    """Note when a step of the messages expire."""
    if deferrals.cursor is None:
        return
    start, end = queue_key(queue.id, Place.DEFERRED, deferrals.cursor), queue_key(queue.id, Place.DEFERRED + 1, 0)
    step = core.step()
    items = core.store.scan(Table.QUEUE, start, end, step)
    core.turn.work += len(items)
    read_bytes = 0
    number = deferrals.cursor
    for key, value in items:
        if read_bytes >= core.settings.step_bytes:
            core.end_of_work()
            deferrals.cursor = number + 1
            return
        _, _, number = unpack_queue_key(key)
        entry = entry_or_none(value)
        if entry is None:
            continue  # it is quarantined when somebody asks for it
        expires_ms = overlay_expires_ms(entry.overlay)
        if expires_ms is None:
            record = core.bodies.read_one(entry.message_id)
            if record is None:
                continue
            read_bytes += len(record)
            expires_ms = message_expires_ms(record)
        if expires_ms != NEVER:
            deferrals.note(expires_ms, number)
    deferrals.cursor = number + 1 if len(items) == step else None


def _expire(core: Core, queue: Queue, number: int) -> None:
    """Dead-letter the message, if it is still deferred."""
    entry = core.store.get(Table.QUEUE, queue_key(queue.id, Place.DEFERRED, number))
    core.turn.work += 1
    if entry is None:
        return
    ref = stored.read_entry(core, queue, Place.DEFERRED, number, entry)
    if ref is not None and (size := stored.look_up_size(core, queue, Place.DEFERRED, ref)) is not None:
        expire(core, queue, unlocked(ref, size, NEVER, Place.DEFERRED))
