"""Cancels scheduled messages: they are deleted before their time has come."""

from collections.abc import Callable, Sequence

from broker.errors import MessageNotFound
from broker.partition.messages import stored
from broker.partition.messages.leaving import discard, unlocked
from broker.partition.messages.schedule import scheduled_ms_of
from broker.partition.state.core import Core
from broker.partition.state.locks import Held
from broker.partition.state.queue import Queue
from broker.partition.state.window import overlay_of
from storage.journal.events import Op
from storage.records import Field, Place


def cancellable(core: Core, queue: Queue, numbers: Sequence[int], check: Callable[[int], None]) -> list[Held]:
    """The scheduled messages with these sequence numbers, each of which is named once.

    `check` is called with the bytes that were read so far. Raises MessageNotFound if any of the numbers is not that of
    a scheduled message, and what `check` raises. Nor may it be one that was abandoned with a delay: who may only send
    must not delete what was received already.
    """
    found: list[Held] = []
    read_bytes = 0
    for number in numbers:
        entry = stored.entry_at(core, queue, Place.SCHEDULED, number)
        if entry is None:
            raise MessageNotFound(f"No scheduled message has the sequence number {number}.")
        message = stored.read_message(core, queue, Place.SCHEDULED, number, entry)
        if message is None:
            raise MessageNotFound(f"The scheduled message {number} cannot be read.")
        ref, record = message
        overlay = overlay_of(ref)
        if overlay is not None and Field.RETURNS_MS in overlay:
            raise MessageNotFound(f"The message {number} was abandoned with a delay, which cannot be cancelled.")
        read_bytes += len(record)
        check(read_bytes)
        found.append(unlocked(ref, len(record), scheduled_ms_of(overlay, record), Place.SCHEDULED))
    return found


def cancel(core: Core, queue: Queue, found: list[Held]) -> None:
    discard(core, queue, found, Op.CANCELLED)
    queue.tally.cancelled += len(found)
