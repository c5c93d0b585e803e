"""Duplicate detection: a queue or topic keeps the ids of messages it has accepted for the length of its window.

A message whose id is known is accepted and dropped, whatever else it says; it does not lengthen the window. The id,
together with the message's partition key where it has one, is kept as a digest, in the same commit as the message: so
detection is exact across restarts. `storage.seen_ids` says how. A message without an id is never a duplicate.

A change of the window holds for messages accepted from then on.
"""

from collections.abc import Sequence
from typing import Any

from xxhash import xxh3_128_digest

from broker.partition.state.core import Core
from broker.partition.state.queue import Queue
from broker.partition.state.timers import Due
from broker.wire import Extra
from protocol.codec import decode_exactly
from storage.queue_ids import queue_id_of
from storage.records import NEVER
from storage.seen_ids import PURGE_EVERY_MS, SeenIds, has_ids

# As plain numbers, since each message is asked for them.
_MESSAGE_ID, _PARTITION_KEY = int(Extra.MESSAGE_ID), int(Extra.PARTITION_KEY)
_SESSION_ID, _PING = int(Extra.SESSION_ID), int(Extra.PING)
_SHORT_STRING = 0xA1

# Between steps without a send: each has a commit of its own then, which the next send would wait for.
PAUSE_MS = 10


def digest_of(extra: dict[int, Any]) -> bytes | None:
    """Of an incoming message's id and partition key; None if it has no id. Ids that read alike are alike."""
    encoded: bytes | None = extra.get(_MESSAGE_ID)
    if encoded is None or extra.get(_PING):
        return None
    if encoded[0] == _SHORT_STRING:
        message_id = encoded[2:]
    else:
        value = decode_exactly(encoded)
        message_id = value if isinstance(value, bytes) else str(value).encode()
    key: str | None = extra.get(_PARTITION_KEY)
    if key is None:
        return xxh3_128_digest(message_id)
    return xxh3_128_digest(len(message_id).to_bytes(4, "big") + message_id + key.encode(), seed=1)


def sift(
    core: Core, queue: Queue, extras: Sequence[dict[int, Any] | None], now_ms: int, reserved: int | None = None
) -> dict[int, int]:
    """Which of incoming messages, by what is said of each, are duplicates: index, and the number of what it repeats.

    The others are to be accepted, so their ids are kept. They have the queue's next numbers, in order; with `reserved`
    each of the messages has one from there on. 0 is that of a message which has none in this queue: it came without the
    session that is required.
    """
    digests = [digest_of(extra) if extra else None for extra in extras]
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
    if new:
        end_ms = now_ms + queue.terms.duplicate_window_ms
        core.changing()
        seen_ids.add(new, numbers, end_ms)
        core.timers.arm(now_ms if seen_ids.is_busy else end_ms + PURGE_EVERY_MS, (queue.id, Due.DUPLICATES))
    return repeats


def _has_number(queue: Queue, extra: dict[int, Any]) -> bool:
    return not extra.get(_PING) and (queue.sessions is None or _SESSION_ID in extra)


def _seen_ids(core: Core, entity_id: int, now_ms: int) -> SeenIds:
    seen_ids = core.seen_ids.get(entity_id)
    if seen_ids is None:
        seen_ids = core.seen_ids[entity_id] = SeenIds(core.store, core.seen_memory, entity_id, now_ms)
    return seen_ids


def work(core: Core, queue: Queue, now_ms: int) -> None:
    """The timer: a step of what is to be done with the ids kept; those whose window has ended go."""
    due_ms = _seen_ids(core, queue.entity_id, now_ms).step(now_ms, core.room_bytes())
    if due_ms != NEVER:
        core.timers.arm(max(due_ms, now_ms + PAUSE_MS), (queue.id, Due.DUPLICATES))


def begin(core: Core, entity_id: int, now_ms: int) -> None:
    """At the start."""
    if has_ids(core.store, entity_id):
        core.timers.arm(now_ms, (queue_id_of(entity_id), Due.DUPLICATES))


def forget(core: Core, entity_id: int) -> None:
    """An entity is no longer there; what is stored of it is freed later."""
    seen_ids = core.seen_ids.pop(entity_id, None)
    if seen_ids is not None:
        seen_ids.close()
