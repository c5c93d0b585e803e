"""Shows messages of a queue without taking them, in any place, by sequence number."""

from heapq import merge
from typing import Any

from broker.errors import InvalidArgument
from broker.partition.messages.moves import set_aside_unlocked
from broker.partition.state.core import Core
from broker.partition.state.queue import Queue
from broker.partition.state.receivers import encoded
from storage.records import CorruptRecord, Place, decode_entry, queue_key, unpack_queue_key
from storage.store import Table


def peek(
    core: Core, queue: Queue, from_number: int, count: int, max_bytes: int, session_id: str | None = None
) -> list[Any]:
    """Entry items (see broker.wire) of up to `count` messages from this number on, with the place in place of a token.

    Locked and expired messages are shown, too; with `session_id`, those of that session. There are fewer if their
    records exceed `max_bytes`, but at least one.
    """
    if count < 1:
        raise InvalidArgument(f"message-count must be positive, not {count}.")
    if not 0 <= from_number < 1 << 63:
        raise InvalidArgument(f"from-sequence-number must be a positive 64-bit number, not {from_number}.")
    count = min(count, core.settings.peek_max)
    found = merge(*(entries(core, queue, place, from_number, count, session_id) for place in Place))
    items: list[Any] = []
    used_bytes = shown = 0
    for number, place, value in found:
        try:
            message_id, delivery_count, overlay = decode_entry(value)
        except CorruptRecord:
            set_aside_unlocked(core, queue, Place(place), number, None)
            continue
        record = core.bodies.read_one(message_id)
        if record is None:
            set_aside_unlocked(core, queue, Place(place), number, message_id)
            continue
        used_bytes += len(record)
        if shown and used_bytes > max_bytes:
            break
        items += (place, number, delivery_count, record, overlay)
        shown += 1
        if shown == count:
            break
    return items


def entries(
    core: Core, queue: Queue, place: Place, from_number: int, count: int, session_id: str | None = None
) -> list[tuple[int, int, bytes]]:
    """(number, place, queue entry) of up to `count` messages in this place, from this number on; of one session, or of
    all.
    """
    if session_id is not None:
        assert queue.sessions is not None
        return [
            (number, int(place), value)
            for number, value in queue.sessions.entries(place, encoded(session_id), from_number, count)
        ]
    start, end = queue_key(queue.id, place, from_number), queue_key(queue.id, place + 1, 0)
    items = core.store.scan(Table.QUEUE, start, end, count)
    found = []
    for key, value in items:
        _, _, number = unpack_queue_key(key)
        found.append((number, int(place), value))
    return found
