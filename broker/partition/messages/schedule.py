"""Scheduled messages: each waits under a number of its own, and gets another number when its time comes.

Those of a topic then wait there to be published, like other messages that the topic has accepted.

A message that was abandoned with a delay waits among them, and its overlay says RETURNS_MS. It is back under its own
number, so before the messages behind it, and its time to live has gone on. Only if the queue has begun to forward
since, it gets another number: a destination would take the old one for a message that it has already. META has the
number that such a queue had reached (`overtake`).
"""

from broker.partition.messages import stored
from broker.partition.messages.entering import append, enter_again
from broker.partition.messages.expiry import end_of_life
from broker.partition.messages.leaving import leave, unlocked
from broker.partition.messages.moves import put_back
from broker.partition.state.core import Core
from broker.partition.state.locks import Held
from broker.partition.state.queue import Queue
from broker.partition.state.timers import Due
from broker.partition.state.window import Ref
from storage.journal.events import Op
from storage.quarantine import quarantine
from storage.records import (
    NEVER,
    CorruptRecord,
    Field,
    Overlay,
    Place,
    decode_document,
    due_key,
    encode_document,
    encode_entry,
    entry_or_none,
    message_enqueued_ms,
    overtaken_key,
    queue_key,
    unpack_due_key,
    unpack_message_key,
)
from storage.store import Table


def activate(core: Core, queue: Queue, now_ms: int) -> None:
    """The timer: make a step of the due messages available, in the order of their times.

    The time to live counts from now, unless the message is back after a delay. It is the difference between the entry's
    expiry and the scheduled time, so the body need not be read.
    """
    store, limit, wall_ms = core.store, core.step(), core.wall_ms(now_ms)
    start, end = due_key(queue.id, Due.SCHEDULED, 0, 0), due_key(queue.id, Due.SCHEDULED, wall_ms + 1, 0)
    items = store.scan(Table.DUE, start, end, limit)
    entries: list[tuple[int, int, Overlay | None]] = []
    expiring: list[tuple[int, int]] = []  # index in entries, time
    left: list[Held] = []
    orphaned: list[bytes] = []  # timers without a message
    returning: list[Ref] = []
    activated: list[Ref] = []  # under their old numbers
    overtaken: int | None = None
    for key, value in items:
        _, _, scheduled_ms, number = unpack_due_key(key)
        entry = store.get(Table.QUEUE, queue_key(queue.id, Place.SCHEDULED, number))
        if entry is None:
            orphaned.append(key)
            continue
        ref = stored.read_entry(core, queue, Place.SCHEDULED, number, entry, *unpack_message_key(value))
        if ref is None:
            orphaned.append(key)
            continue
        _, message_id, delivery_count, overlay = ref
        # Their sizes are not looked up: the same bytes count for the queue afterwards.
        left.append(unlocked(ref, 0, scheduled_ms, Place.SCHEDULED))
        if overlay is not None and Field.RETURNS_MS in overlay:
            del overlay[Field.RETURNS_MS]
            if overtaken is None:
                overtaken = _overtaken(core, queue)
            if number >= overtaken:
                returning.append((number, message_id, delivery_count, overlay or None))
                continue
            overlay = {Field.ENQUEUE_SEQUENCE_NUMBER: number, **overlay}
            expires_ms = overlay.get(Field.EXPIRES_MS, NEVER)
        else:
            overlay = {**(overlay or {}), Field.ENQUEUED_MS: now_ms, Field.ENQUEUE_SEQUENCE_NUMBER: number}
            expires_ms = NEVER
            if Field.EXPIRES_MS in overlay:
                expires_ms = end_of_life(now_ms, overlay[Field.EXPIRES_MS] - scheduled_ms)
                overlay[Field.EXPIRES_MS] = expires_ms
        if expires_ms != NEVER and not (queue.is_dead_letter or queue.is_topic):
            expiring.append((len(entries), expires_ms))
        entries.append((message_id, delivery_count, overlay))
        activated.append((number, message_id, delivery_count, overlay))
    if orphaned:
        store.delete_many(Table.DUE, orphaned)
    if left:
        leave(core, queue, left)
    queue.tally.activated += len(entries) + len(returning)
    if entries:
        core.journal.moved(Op.ACTIVATED, queue.id, activated, queue.id, queue.next_number)
        append(core, queue, entries, 0, expiring)
        if queue.is_topic:
            core.timers.arm(now_ms, (queue.id, Due.PUBLISHING))
    for ref in returning:
        _, _, _, overlay = ref
        expires_ms = NEVER if queue.is_dead_letter or overlay is None else overlay.get(Field.EXPIRES_MS, NEVER)
        enter_again(core, queue, ref, 0, expires_ms)
        core.journal.gone(Op.RETURNED, queue.id, [ref[0]])
        put_back(core, queue, unlocked(ref, 0, NEVER, Place.AVAILABLE), now_ms)  # its timer expires it, if it is time
    if len(items) == limit:
        core.timers.arm(now_ms, (queue.id, Due.SCHEDULED))
    elif rest := store.scan(Table.DUE, end, due_key(queue.id, Due.SCHEDULED + 1, 0, 0), 1):
        [(key, _)] = rest
        _, _, scheduled_ms, _ = unpack_due_key(key)
        core.arm_scheduled(queue.id, scheduled_ms, now_ms)


def overtake(core: Core, queue: Queue) -> None:
    """The queue forwards from now on: those that are delayed now must not come back under lower numbers than others."""
    if queue.counts[Place.SCHEDULED]:
        core.store.put(Table.META, overtaken_key(queue.id), encode_document(queue.next_number))


def _overtaken(core: Core, queue: Queue) -> int:
    """A message with a number below this gets another one when it comes back."""
    value = core.store.get(Table.META, overtaken_key(queue.id))
    if value is None:
        return 0
    try:
        return int(decode_document(value))
    except (CorruptRecord, ValueError, TypeError):
        quarantine(core.store, Table.META, overtaken_key(queue.id))
        return queue.next_number


def scheduled_ms_of(overlay: Overlay | None, record: bytes) -> int:
    """The time of the timer of a scheduled message.

    A copy that a rule's action delays shares its record with others, so its overlay has the time (ENQUEUED_MS).
    """
    for field in (Field.RETURNS_MS, Field.ENQUEUED_MS):
        if overlay is not None and field in overlay:
            return int(overlay[field])
    return message_enqueued_ms(record)


def mend_times(core: Core, queue_id: int) -> None:
    """At the start: repair invalid scheduled times, which were stored before times had bounds.

    Times before 1970 were stored as signed numbers, so their keys are above all others and never due. They are replaced
    by the time in the record, or by 0; both are in the past.
    """
    store = core.store
    start, end = due_key(queue_id, Due.SCHEDULED, NEVER + 1, 0), due_key(queue_id, Due.SCHEDULED + 1, 0, 0)
    for key, value in store.scan(Table.DUE, start, end, 1 << 32):
        _, _, stored, number = unpack_due_key(key)
        (message_id,) = unpack_message_key(value)
        record = core.bodies.read_one(message_id)
        time_ms = message_enqueued_ms(record) if record is not None else 0
        _mend_expiry(core, queue_key(queue_id, Place.SCHEDULED, number), time_ms - (stored - (1 << 64)))
        store.delete(Table.DUE, key)
        store.put(Table.DUE, due_key(queue_id, Due.SCHEDULED, time_ms, number), value)


def _mend_expiry(core: Core, key: bytes, later_ms: int) -> None:
    """The scheduled time of the message at this key moved by `later_ms`; move its expiry by the same time."""
    entry = entry_or_none(core.store.get(Table.QUEUE, key))
    if entry is None:
        return  # if it cannot be read it is quarantined when it is due
    message_id, delivery_count, overlay = entry
    if overlay and Field.EXPIRES_MS in overlay:
        overlay[Field.EXPIRES_MS] = min(overlay[Field.EXPIRES_MS] + later_ms, NEVER)
        core.store.put(Table.QUEUE, key, encode_entry(message_id, delivery_count, overlay))
