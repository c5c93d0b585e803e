"""Puts back messages that were received and deleted, but never sent: they do not count as delivered (ST4)."""

from collections.abc import Sequence
from typing import Any

from broker.errors import EntityNotFound
from broker.partition.messages import stored
from broker.partition.messages.entering import enter_again, reserve
from broker.partition.messages.leaving import unlocked
from broker.partition.messages.moves import put_back
from broker.partition.messages.shared_bodies import grow
from broker.partition.state.core import Core
from broker.wire import ENTRY
from storage.records import Field, Place


def restore(core: Core, queue_id: int, entries: Sequence[Any], now_ms: int) -> None:
    """Each message is available again under its number, and its record gets a new message id.

    In a queue that forwards, the message gets a new number: with the old one the destination might take it for one that
    was forwarded already.

    Quotas and the entity's status do not matter here. If the entity was deleted meanwhile, the messages stay deleted.
    Raises EntityMoving, ServerBusy.
    """
    try:
        queue = core.queue(queue_id)
    except EntityNotFound:
        return
    for start in range(0, len(entries), ENTRY):
        _, number, delivery_count, record, overlay = entries[start : start + ENTRY]
        if queue.outbox is not None:
            overlay = {Field.ENQUEUE_SEQUENCE_NUMBER: number, **(overlay or {})}
            number = reserve(queue, 1)
        message_id = core.bodies.next_id
        core.bodies.append([record], keep=False)
        core.worked(len(record))
        if queue.topic_id is not None:
            grow(core, queue.topic_id, len(record), 1)
        queue.tally.restored += 1
        due_ms = stored.expires_ms(queue, overlay, record)
        ref = (number, message_id, delivery_count, overlay)
        core.journal.entered(queue.id, [number], "restored", None)
        enter_again(core, queue, ref, len(record), due_ms)
        put_back(core, queue, unlocked(ref, len(record), due_ms, Place.AVAILABLE), now_ms)
