"""Duplicate detection: a queue or topic keeps the ids of messages it has accepted for the length of its window.

A message whose id is known is accepted and dropped, even if it differs otherwise; it does not lengthen the window. The
id, together with the message's partition key where it has one, is kept as a digest, in the same commit as the message:
so detection is exact across restarts. `storage.seen_ids` says how. A message without an id is never a duplicate.

A change of the window holds for messages accepted from then on.
"""

from collections.abc import Sequence
from typing import Any

from xxhash import xxh3_128_digest

from broker.partition.state.core import Core
from broker.partition.state.queue import Queue
from broker.partition.state.timers import Due
from broker.wire import Extra
from protocol.message.fields import id_text
from storage.journal.events import Op
from storage.queue_ids import queue_id_of
from storage.records import NEVER
from storage.seen_ids import PURGE_EVERY_MS, SeenIds, has_ids

# As plain numbers, because they are looked up for each message.
_MESSAGE_ID, _PARTITION_KEY = int(Extra.MESSAGE_ID), int(Extra.PARTITION_KEY)
_SESSION_ID, _PING = int(Extra.SESSION_ID), int(Extra.PING)

# The time between steps without a send: each such step has a commit of its own, for which the next send would wait.
PAUSE_MS = 10


def digest_of(extra: dict[int, Any], is_partitioned: bool) -> bytes | None:
    """Digest of a message's id and partition key; None if it has no id. Ids with the same text have the same digest.

    On a partitioned entity the session id is a partition key: another fragment cannot know what a session had.
    """
    encoded: bytes | None = extra.get(_MESSAGE_ID)
    if encoded is None or extra.get(_PING):
        return None
    message_id = id_text(encoded)
    key: str | None = extra.get(_PARTITION_KEY)
    if key is None and is_partitioned:
        key = extra.get(_SESSION_ID)
    return digest(message_id, key)


def digest(message_id: bytes, key: str | None) -> bytes:
    """Digest the text of a message id, and the partition key that counts beside it."""
    if key is None:
        return xxh3_128_digest(message_id)
    return xxh3_128_digest(len(message_id).to_bytes(4, "big") + message_id + key.encode(), seed=1)


def sift(
    core: Core,
    queue: Queue,
    extras: Sequence[dict[int, Any] | None],
    now_ms: int,
    reserved: int | None = None,
    origin: tuple[int, Sequence[int]] | None = None,
) -> dict[int, int]:
    """Find duplicates among incoming messages by their extra maps: index -> sequence number of the original.

    The ids of the others are kept, because they will be accepted. They get the queue's next numbers in order; with
    `reserved`, each message has the number at its place from there on. The number 0 stands for an original without a
    number in this queue: it came without the session that the queue requires. `origin`, for the journal: the queue that
    forwards these messages, and their numbers there.
    """
    is_partitioned = len(queue.terms.partitions) > 1
    digests = [digest_of(extra, is_partitioned) if extra else None for extra in extras]
    with_id = [digest for digest in digests if digest is not None]
    if not with_id:
        return {}
    seen_ids = _seen_ids(core, queue.entity_id, now_ms)
    known = seen_ids.find(with_id, now_ms)
    number = queue.next_number if reserved is None else reserved
    repeats: dict[int, int] = {}
    if not known and len(set(with_id)) == len(digests) and queue.sessions is None:
        new = with_id
        numbers: Sequence[int] = range(number, number + len(new))
    else:
        new, numbers = [], []
        for index, (digest, extra) in enumerate(zip(digests, extras, strict=True)):
            if digest is not None and digest in known:
                repeats[index] = known[digest]
                number += reserved is not None
                continue
            has_number = reserved is not None or _has_number(queue, extra or {})
            if digest is not None:
                known[digest] = number if has_number else 0
                new.append(digest)
                numbers.append(known[digest])
            number += has_number
        queue.tally.duplicates += len(repeats)
        ids = [(extras[index] or {}).get(_MESSAGE_ID) for index in repeats]
        source, there = (None, None) if origin is None else (origin[0], [origin[1][index] for index in repeats])
        core.journal.bare(Op.DUPLICATE, queue.id, ids, None, source, there)
    if new:
        _keep(core, queue, seen_ids, new, numbers, now_ms)
    return repeats


def keep_new(core: Core, queue: Queue, digests: list[bytes], now_ms: int) -> bool:
    """Keep ids as `sift` does, for messages of a queue without sessions that get its next numbers, all with ids of
    their own.

    False if one of them is a duplicate, and nothing was kept.
    """
    seen_ids = _seen_ids(core, queue.entity_id, now_ms)
    if len(set(digests)) < len(digests) or seen_ids.find(digests, now_ms):
        return False
    number = queue.next_number
    _keep(core, queue, seen_ids, digests, range(number, number + len(digests)), now_ms)
    return True


def _keep(
    core: Core, queue: Queue, seen_ids: SeenIds, digests: list[bytes], numbers: Sequence[int], now_ms: int
) -> None:
    end_ms = now_ms + queue.terms.duplicate_window_ms
    core.changing()
    seen_ids.add(digests, numbers, end_ms)
    core.timers.arm(now_ms if seen_ids.is_busy else end_ms + PURGE_EVERY_MS, (queue.id, Due.DUPLICATES))


def _has_number(queue: Queue, extra: dict[int, Any]) -> bool:
    return not extra.get(_PING) and (queue.sessions is None or _SESSION_ID in extra)


def _seen_ids(core: Core, entity_id: int, now_ms: int) -> SeenIds:
    seen_ids = core.seen_ids.get(entity_id)
    if seen_ids is None:
        seen_ids = core.seen_ids[entity_id] = SeenIds(core.store, core.seen_memory, entity_id, now_ms)
    return seen_ids


def work(core: Core, queue: Queue, now_ms: int) -> None:
    """The timer: do a step of the jobs of `SeenIds`, which also drop ids whose windows have ended."""
    due_ms = _seen_ids(core, queue.entity_id, now_ms).step(now_ms, core.room.free_bytes())
    if due_ms != NEVER:
        core.timers.arm(max(due_ms, now_ms + PAUSE_MS), (queue.id, Due.DUPLICATES))


def begin(core: Core, entity_id: int, now_ms: int) -> None:
    """At the start."""
    if has_ids(core.store, entity_id):
        core.timers.arm(now_ms, (queue_id_of(entity_id), Due.DUPLICATES))


def forget(core: Core, entity_id: int) -> None:
    """The entity was deleted; its stored ids are deleted later."""
    seen_ids = core.seen_ids.pop(entity_id, None)
    if seen_ids is not None:
        seen_ids.close()
