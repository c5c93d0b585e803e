"""Puts back messages that were received and deleted, but never sent: they do not count as delivered (ST4)."""

from collections.abc import Sequence
from typing import Any

from broker.partition.messages.moves import overlay_expires_ms, put_back, unlocked
from broker.partition.state.core import Core
from broker.partition.state.timers import Due
from broker.wire import ENTRY
from storage.queue_ids import queue_id_of
from storage.records import (
    COPY_BYTES,
    NEVER,
    Field,
    Place,
    due_key,
    encode_entry,
    message_expires_ms,
    message_key,
    queue_key,
)
from storage.store import Table


def restore(core: Core, queue_id: int, entries: Sequence[Any], now_ms: int) -> None:
    """Each message is available again under its number, and its record gets a new message id.

    If the queue has forwarded messages with higher numbers meanwhile, the message gets a new number. With the old
    number the destination would take it for one that was forwarded already.

    Quotas and the entity's status do not matter here. If the entity was deleted meanwhile, the messages stay deleted.
    """
    queue = core.find(queue_id)
    if queue is None:
        return
    for start in range(0, len(entries), ENTRY):
        _, number, delivery_count, record, overlay = entries[start : start + ENTRY]
        if queue.outbox is not None and number <= queue.outbox.highest:
            overlay = {Field.ENQUEUE_SEQUENCE_NUMBER: number, **(overlay or {})}
            number, queue.next_number = queue.next_number, queue.next_number + 1
        message_id = core.bodies.next_id
        core.bodies.append([record], keep=False)
        core.worked(len(record))
        entry = encode_entry(message_id, delivery_count, overlay)
        core.store.put(Table.QUEUE, queue_key(queue.id, Place.AVAILABLE, number), entry)
        if queue.sessions is not None:
            queue.sessions.put(Place.AVAILABLE, (number, message_id, delivery_count, overlay))
        queue.counts[Place.AVAILABLE] += 1
        queue.size_bytes += len(record)
        if queue.topic_id is not None:
            topic = core.queue(queue_id_of(queue.topic_id))
            topic.size_bytes += len(record) + COPY_BYTES
            core.turn.touch(topic)
        queue.tally.restored += 1
        due_ms = NEVER
        if not queue.is_dead_letter:
            due_ms = overlay_expires_ms(overlay) or message_expires_ms(record)
        if due_ms != NEVER:
            core.store.put(Table.DUE, due_key(queue.id, Due.EXPIRY, due_ms, number), message_key(message_id))
            core.arm_expiry(queue, due_ms)
        put_back(
            core,
            queue,
            unlocked((number, message_id, delivery_count, overlay), len(record), due_ms, Place.AVAILABLE),
            now_ms,
        )
    core.turn.touch(queue)
