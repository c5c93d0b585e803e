"""Bodies that the subscriptions of a topic share: each is stored once and freed with the last of its copies.

REFS has the number of queue entries that refer to a message, if there are several. For the size of its topic a body
counts once, and each copy counts COPY_BYTES.
"""

from collections.abc import Sequence

from broker.partition.state.core import Core
from storage.quarantine import quarantine
from storage.queue_ids import queue_id_of
from storage.records import COPY_BYTES, CorruptRecord, decode_references, encode_references, entry_or_none, message_key
from storage.store import Store, Table

PAGE = 1000


def grow(core: Core, topic_id: int, size_bytes: int, copies: int) -> None:
    """Count bodies of so many bytes that come to a subscription past its topic, with so many copies."""
    topic = core.queue(queue_id_of(topic_id))
    topic.size_bytes += size_bytes + COPY_BYTES * copies
    core.turn.touch(topic)


def release(core: Core, topic_id: int, message_ids: Sequence[int], sizes: Sequence[int | None]) -> None:
    """Queue entries of the topic's subscriptions, one for each of `message_ids`, are about to be deleted.

    `sizes` are the sizes of the records; None is looked up if it is needed.
    """
    store = core.store
    recorded = _recorded(store, message_ids)
    freed, freed_bytes = [], 0
    for message_id, size in zip(message_ids, sizes, strict=True):
        count = recorded.get(message_id)
        if count is not None:
            recorded[message_id] = count = count - 1
            if count > 0:
                continue
        freed.append(message_key(message_id))
        freed_bytes += (core.bodies.size(message_id) or 0) if size is None else size
    if recorded:
        several = [(message_key(key), encode_references(count)) for key, count in recorded.items() if count > 1]
        store.put_many(Table.REFS, several)
        if len(several) < len(recorded):
            store.delete_many(Table.REFS, [message_key(key) for key, count in recorded.items() if count <= 1])
    if freed:
        store.delete_many(Table.MESSAGES, freed)
    topic = core.find(queue_id_of(topic_id))
    if topic is not None:  # else the topic is being deleted as well
        topic.size_bytes -= freed_bytes + COPY_BYTES * len(message_ids)
        core.turn.touch(topic)


def refer(store: Store, message_id: int) -> None:
    """Another queue entry of the topic's subscriptions refers to the message."""
    count = _recorded(store, [message_id]).get(message_id, 1)
    store.put(Table.REFS, message_key(message_id), encode_references(count + 1))


def _recorded(store: Store, message_ids: Sequence[int]) -> dict[int, int]:
    """The recorded numbers of entries by message id; messages without a row in REFS are left out."""
    wanted = set(message_ids)
    lowest, highest = min(message_ids), max(message_ids)
    # Messages published one after the other have adjacent keys, and one scan is faster than many gets.
    if highest - lowest < 2 * len(message_ids):
        items = store.scan(Table.REFS, message_key(lowest), message_key(highest) + b"\0", highest - lowest + 1)
        found = [(int.from_bytes(key, "big"), value) for key, value in items]
        values = [(message_id, value) for message_id, value in found if message_id in wanted]
    else:
        got = ((message_id, store.get(Table.REFS, message_key(message_id))) for message_id in wanted)
        values = [(message_id, value) for message_id, value in got if value is not None]
    recorded = {}
    for message_id, value in values:
        try:
            recorded[message_id] = decode_references(value)
        except CorruptRecord:
            quarantine(store, Table.REFS, message_key(message_id))
            recorded[message_id] = _counted(store, message_id)
    return recorded


def _counted(store: Store, message_id: int) -> int:
    """Count the entries of a message by reading every queue entry of the partition: some seconds for a million."""
    count, start = 0, b"\0"
    while items := store.scan(Table.QUEUE, start, b"\xff" * 14, PAGE):
        for _, value in items:
            entry = entry_or_none(value)
            count += entry is not None and entry.message_id == message_id
        last_key, _ = items[-1]
        start = last_key + b"\0"
    return count
