"""A queue's counts made again from its entries, after their record was found corrupt."""

from collections.abc import Iterable

from broker.partition.state.sessions import states_bytes
from storage.queue_ids import queue_id_of
from storage.records import (
    COPY_BYTES,
    Counts,
    Place,
    entry_or_none,
    message_key,
    queue_key,
    unpack_queue_key,
)
from storage.store import Store, Table

PAGE = 1000

# The highest number in the queue is only a lower bound of the numbers that were assigned, because messages above it may
# have come and gone. A gap does no harm, but a number that is assigned twice may.
NUMBER_GAP = 1 << 32


def recount(store: Store, queue_id: int) -> Counts:
    """Count by reading every message of the queue: some seconds for a million."""
    highest, size_bytes = 0, 0
    held = dict.fromkeys(Place, 0)
    for place in Place:
        start, end = queue_key(queue_id, place, 0), queue_key(queue_id, place + 1, 0)
        while items := store.scan(Table.QUEUE, start, end, PAGE):
            for key, value in items:
                held[place] += 1
                _, _, number = unpack_queue_key(key)
                highest = max(highest, number)
                if (entry := entry_or_none(value)) is not None:
                    size_bytes += len(store.get(Table.MESSAGES, message_key(entry.message_id)) or b"")
            last_key, _ = items[-1]
            start = last_key + b"\0"
    size_bytes += states_bytes(store, queue_id)
    return Counts(
        next_sequence_number=highest + NUMBER_GAP,
        available=held[Place.AVAILABLE],
        deferred=held[Place.DEFERRED],
        scheduled=held[Place.SCHEDULED],
        size_bytes=size_bytes,
    )


def recount_copies(store: Store, entity_ids: Iterable[int]) -> int:
    """Bytes of the copies in these subscriptions of one topic: each body once, and COPY_BYTES for each copy."""
    size_bytes = 0
    seen: set[int] = set()
    for entity_id in entity_ids:
        start, end = queue_key(queue_id_of(entity_id), 0, 0), queue_key(queue_id_of(entity_id + 1), 0, 0)
        while items := store.scan(Table.QUEUE, start, end, PAGE):
            for _, value in items:
                if (entry := entry_or_none(value)) is None:
                    continue
                size_bytes += COPY_BYTES
                if entry.message_id not in seen:
                    seen.add(entry.message_id)
                    size_bytes += len(store.get(Table.MESSAGES, message_key(entry.message_id)) or b"")
            last_key, _ = items[-1]
            start = last_key + b"\0"
        size_bytes += states_bytes(store, queue_id_of(entity_id))
    return size_bytes
