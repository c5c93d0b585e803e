"""Cancels scheduled messages: they are deleted before their time has come."""

from collections.abc import Callable, Sequence

from broker.errors import MessageNotFound
from broker.partition.messages.moves import discard, set_aside, unlocked
from broker.partition.messages.schedule import scheduled_ms_of
from broker.partition.state.core import Core
from broker.partition.state.locks import Held
from broker.partition.state.queue import Queue
from storage.journal.events import Op
from storage.records import CorruptRecord, Field, Place, decode_entry, queue_key
from storage.store import Table


def cancellable(core: Core, queue: Queue, numbers: Sequence[int], check: Callable[[int], None]) -> list[Held]:
    """The scheduled messages with these sequence numbers, each of which is named once.

    `check` is called with the bytes that were read so far. Raises MessageNotFound if any of the numbers is not that of
    a scheduled message, and what `check` raises. Nor may it be one that was abandoned with a delay: who may only send
    must not delete what was received already.
    """
    found: list[Held] = []
    read_bytes = 0
    for number in numbers:
        entry = None
        if 0 <= number < 1 << 64:
            entry = core.store.get(Table.QUEUE, queue_key(queue.id, Place.SCHEDULED, number))
        if entry is None:
            raise MessageNotFound(f"No scheduled message has the sequence number {number}.")
        try:
            message_id, delivery_count, overlay = decode_entry(entry)
        except CorruptRecord:
            set_aside(core, queue, Place.SCHEDULED, number, None)
            raise MessageNotFound(f"The scheduled message {number} cannot be read.") from None
        if overlay is not None and Field.RETURNS_MS in overlay:
            raise MessageNotFound(f"The message {number} was abandoned with a delay, which cannot be cancelled.")
        record = core.bodies.read_one(message_id)
        if record is None:
            set_aside(core, queue, Place.SCHEDULED, number, message_id)
            raise MessageNotFound(f"The scheduled message {number} cannot be read.")
        read_bytes += len(record)
        check(read_bytes)
        ref = (number, message_id, delivery_count, overlay)
        found.append(unlocked(ref, len(record), scheduled_ms_of(overlay, record), Place.SCHEDULED))
    return found


def cancel(core: Core, queue: Queue, found: list[Held]) -> None:
    discard(core, queue, found, Op.CANCELLED)
    queue.tally.cancelled += len(found)
