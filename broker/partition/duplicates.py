"""Duplicate detection: a queue or topic keeps the ids of messages it has accepted for the length of its window.

A message whose id is known is accepted and dropped, whatever else it says; it does not lengthen the window. The id,
together with the message's partition key where it has one, is kept as a digest, in the same commit as the message: so
detection is exact across restarts, and takes no memory. A message without an id is never a duplicate.

Ids whose window has ended are deleted by a timer, step by step; until then they are there, and mean nothing. A change
of the window holds for messages accepted from then on.
"""

from typing import Any

from xxhash import xxh3_128_digest

from broker.partition.core import Core
from broker.partition.queue import Queue
from broker.partition.timers import Due
from broker.wire import Extra
from protocol.codec import decode_exactly
from storage.quarantine import quarantine
from storage.records import (
    CorruptRecord,
    decode_digests,
    decode_seen,
    duplicate_end_key,
    duplicate_key,
    encode_digests,
    encode_seen,
    entity_key,
    unpack_duplicate_end_key,
)
from storage.store import Table

# So long after its end an id may stay: else a queue with little to do would write to disk for each by itself.
PURGE_EVERY_MS = 1000

_SHORT_STRING = 0xA1


def digest_of(extra: dict[int, Any]) -> bytes | None:
    """Of an incoming message's id and partition key; None if it has no id. Ids that read alike are alike."""
    encoded: bytes | None = extra.get(Extra.MESSAGE_ID)
    if encoded is None:
        return None
    if encoded[0] == _SHORT_STRING:
        message_id = encoded[2:]
    else:
        value = decode_exactly(encoded)
        message_id = value if isinstance(value, bytes) else str(value).encode()
    key: str | None = extra.get(Extra.PARTITION_KEY)
    if key is None:
        return xxh3_128_digest(message_id)
    return xxh3_128_digest(len(message_id).to_bytes(2, "big") + message_id + key.encode(), seed=1)


class Sieve:
    """What of one send is new. `stage` when all of it was looked at."""

    def __init__(self, core: Core, queue: Queue, now_ms: int) -> None:
        self._core = core
        self._queue = queue
        self._now_ms = now_ms
        self._new: dict[bytes, int] = {}  # digest -> sequence number

    def known(self, extra: dict[int, Any], number: int) -> int | None:
        """The sequence number of the message that this one repeats; None if it is new, and then has `number`.

        0 is that of a message which has none in this queue: it came without the session that is required.
        """
        digest = digest_of(extra)
        if digest is None:
            return None
        known = self._new.get(digest)
        if known is None:
            known = self._stored(duplicate_key(self._queue.id >> 3, digest))
        if known is None:
            self._new[digest] = number
        else:
            self._queue.tally.duplicates += 1
        return known

    def _stored(self, key: bytes) -> int | None:
        store = self._core.store
        value = store.get(Table.DUPLICATES, key)
        if value is None:
            return None
        try:
            end_ms, number = decode_seen(value)
        except CorruptRecord:
            # To drop what may be new would be to lose it.
            quarantine(store, Table.DUPLICATES, key)
            return None
        return number if end_ms > self._now_ms else None

    def stage(self) -> None:
        """Keep the ids that were new."""
        if not self._new:
            return
        core, queue = self._core, self._queue
        entity_id, end_ms = queue.id >> 3, self._now_ms + queue.terms.duplicate_window_ms
        seen = sorted((duplicate_key(entity_id, digest), number) for digest, number in self._new.items())
        core.store.put_many(Table.DUPLICATES, [(key, encode_seen(end_ms, number)) for key, number in seen])
        first = next(iter(self._new.values()))
        key = duplicate_end_key(entity_id, end_ms, first)
        core.store.put(Table.DUPLICATE_ENDS, key, encode_digests([*self._listed(key), *self._new]))
        core.timers.arm(end_ms + PURGE_EVERY_MS, (queue.id, Due.DUPLICATES))

    def _listed(self, key: bytes) -> list[bytes]:
        """What ends at the same time and began with the same number: 0, or one that was not used then."""
        value = self._core.store.get(Table.DUPLICATE_ENDS, key)
        try:
            return decode_digests(value) if value is not None else []
        except CorruptRecord:
            quarantine(self._core.store, Table.DUPLICATE_ENDS, key)
            return []


def purge(core: Core, queue: Queue, now_ms: int) -> None:
    """The timer: ids whose window has ended go, a step of them."""
    store, entity_id = core.store, queue.id >> 3
    start, end = duplicate_end_key(entity_id, 0, 0), duplicate_end_key(entity_id, now_ms + 1, 0)
    looked_at = 0
    while looked_at < core.settings.step and (items := store.scan(Table.DUPLICATE_ENDS, start, end, 1)):
        key, value = items[0]
        try:
            digests = decode_digests(value)
        except CorruptRecord:
            quarantine(store, Table.DUPLICATE_ENDS, key)  # the ids stay until they come again, or the entity goes
            continue
        store.delete(Table.DUPLICATE_ENDS, key)
        ended = [_ended(core, entity_id, digest, now_ms) for digest in digests]
        store.delete_many(Table.DUPLICATES, [key for key in ended if key is not None])
        looked_at += len(digests)
    if looked_at >= core.settings.step:
        core.timers.arm(now_ms, (queue.id, Due.DUPLICATES))
    else:
        arm_purge(core, entity_id)


def _ended(core: Core, entity_id: int, digest: bytes, now_ms: int) -> bytes | None:
    """The key in DUPLICATES if the window of this id has ended; None if the id came again since and has a new one."""
    key = duplicate_key(entity_id, digest)
    value = core.store.get(Table.DUPLICATES, key)
    if value is None:
        return None
    try:
        end_ms, _ = decode_seen(value)
    except CorruptRecord:
        quarantine(core.store, Table.DUPLICATES, key)
        return None
    return key if end_ms <= now_ms else None


def arm_purge(core: Core, entity_id: int) -> None:
    items = core.store.scan(Table.DUPLICATE_ENDS, entity_key(entity_id), entity_key(entity_id + 1), 1)
    if items:
        end_ms = unpack_duplicate_end_key(items[0][0])[1]
        core.timers.arm(end_ms + PURGE_EVERY_MS, (entity_id << 3, Due.DUPLICATES))
