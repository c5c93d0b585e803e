"""Reads messages of a queue from the store, and quarantines those that cannot be read, so that the rest is served.

A message that is locked, or on its way to another partition, was read before it was damaged: it is left out, and its
receiver or destination settles it.
"""

from collections.abc import Sequence

from broker.partition.messages.leaving import set_aside
from broker.partition.state.core import Core
from broker.partition.state.queue import Queue
from broker.partition.state.window import Ref
from protocol.extension import extension
from storage.records import (
    NEVER,
    CorruptRecord,
    Field,
    Overlay,
    Place,
    decode_entry,
    message_expires_ms,
    queue_key,
    unpack_queue_key,
)
from storage.store import Table

_EXPIRES_MS = Field.EXPIRES_MS  # here, because to look up a member of an enum takes as long as a call


def read_entry(
    core: Core, queue: Queue, place: Place, number: int, entry: bytes, message_id: int | None = None
) -> Ref | None:
    """Decode the entry of a message in this place; None if it cannot be read.

    `message_id` is that of the record if the caller knows it from elsewhere: then the record is quarantined, too.
    """
    try:
        return (number, *decode_entry(entry))
    except CorruptRecord:
        _quarantine(core, queue, place, number, message_id)
        return None


def read_entries(core: Core, queue: Queue, items: Sequence[tuple[bytes, bytes]]) -> list[Ref]:
    """Decode items (key, entry) of QUEUE, without those that cannot be read."""
    if extension is not None and (found := extension.refs_of(items)) is not None:
        refs: list[Ref] = found
        return refs
    refs = []
    for key, entry in items:
        _, place, number = unpack_queue_key(key)
        if (ref := read_entry(core, queue, Place(place), number, entry)) is not None:
            refs.append(ref)
    return refs


def read_message(core: Core, queue: Queue, place: Place, number: int, entry: bytes) -> tuple[Ref, bytes] | None:
    """Decode the entry of a message in this place and read its record; None if one of them cannot be read."""
    ref = read_entry(core, queue, place, number, entry)
    if ref is None:
        return None
    _, message_id, _, _ = ref
    record = core.bodies.read_one(message_id)
    if record is None:
        _quarantine(core, queue, place, number, message_id)
        return None
    return ref, record


def look_up_size(core: Core, queue: Queue, place: Place, ref: Ref) -> int | None:
    """Look up how many bytes the record of a message has, without reading it; None if it is missing."""
    number, message_id, _, _ = ref
    size = core.bodies.size(message_id)
    if size is None:
        _quarantine(core, queue, place, number, message_id)
    return size


def entry_at(core: Core, queue: Queue, place: Place, number: int) -> bytes | None:
    """Return the entry of the message with this number, whatever it is; None if it is not in this place."""
    if not 0 <= number < 1 << 64:
        return None
    return core.store.get(Table.QUEUE, queue_key(queue.id, place, number))


def expires_ms(queue: Queue, overlay: Overlay | None, record: bytes) -> int:
    """Tell when the time to live of a message ends; NEVER in a queue where it has no effect."""
    if queue.is_dead_letter:
        return NEVER
    return (overlay and overlay.get(_EXPIRES_MS)) or message_expires_ms(record)


def _quarantine(core: Core, queue: Queue, place: Place, number: int, message_id: int | None) -> None:
    if not queue.locks.has(place, number):
        set_aside(core, queue, place, number, message_id)
