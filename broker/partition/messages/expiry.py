"""Time to live: expires messages when their time has come, unless they are locked, deferred or dead-lettered.

To expire a message is to delete it or to dead-letter it. With dead-lettering on expiration this may wait for a receiver
that pulls from the queue (DL6, `moves.expires_now`). Until then the messages stay, `expiry_paused` is set, and the next
grant of credit makes the timer due. `deferred_expiry` does the same for deferred messages.

A locked message and its DUE entry stay until its lock ends. So `swept`, where the next look begins, may be above such
entries. Hand-out never delivers an expired message, even if the timer has not come to it.
"""

from broker.partition.messages import stored
from broker.partition.messages.leaving import unlocked
from broker.partition.messages.moves import expire, expires_now
from broker.partition.state.core import Core
from broker.partition.state.queue import Queue
from broker.partition.state.timers import Due
from broker.partition.state.window import overlay_of
from protocol.bounds import LATEST_MS
from storage.records import (
    NEVER,
    Overlay,
    Place,
    due_key,
    queue_key,
    unpack_due_key,
    unpack_message_key,
)
from storage.store import Table


def end_of_life(from_ms: int, ttl_ms: int | None) -> int:
    """The time when a message's time to live ends; NEVER if it has none, or ends after the latest possible time."""
    if ttl_ms is None or ttl_ms > LATEST_MS - from_ms:
        return NEVER
    return from_ms + ttl_ms


def sweep(core: Core, queue: Queue, now_ms: int) -> None:
    """The timer: expire a step of the messages whose time has come."""
    if not expires_now(core, queue):
        queue.expiry_paused = True
        return
    start = max(queue.swept, due_key(queue.id, Due.EXPIRY, 0, 0))
    end = due_key(queue.id, Due.EXPIRY, now_ms + 1, 0)
    step = core.step()
    items = core.store.scan(Table.DUE, start, end, step)
    core.turn.work += len(items)
    gone: list[tuple[int, Overlay | None]] = []
    for key, value in items:
        _, _, due_ms, number = unpack_due_key(key)
        if number not in queue.locks.expiring:
            (message_id,) = unpack_message_key(value)
            _expire(core, queue, key, due_ms, number, message_id, gone)
    queue.forget(gone)
    if items:
        last_key, _ = items[-1]
        queue.swept = last_key + b"\0"
    if len(items) == step:
        core.timers.arm(now_ms, (queue.id, Due.EXPIRY))
    else:
        arm_next(core, queue)


def _expire(
    core: Core,
    queue: Queue,
    key: bytes,
    due_ms: int,
    number: int,
    message_id: int,
    gone: list[tuple[int, Overlay | None]],
) -> None:
    """Adds messages that the queue must forget to `gone`."""
    entry = core.store.get(Table.QUEUE, queue_key(queue.id, Place.AVAILABLE, number))
    if entry is None:  # its message was quarantined
        core.store.delete(Table.DUE, key)
        return
    ref = stored.read_entry(core, queue, Place.AVAILABLE, number, entry, message_id)
    size = None if ref is None else stored.look_up_size(core, queue, Place.AVAILABLE, ref)
    if ref is None or size is None:
        core.store.delete(Table.DUE, key)
    else:
        gone.append((number, overlay_of(ref)))
        expire(core, queue, unlocked(ref, size, due_ms, Place.AVAILABLE))


def arm_next(core: Core, queue: Queue) -> None:
    """Arm the timer for the first message that expires and was not looked at."""
    start = max(queue.swept, due_key(queue.id, Due.EXPIRY, 0, 0))
    items = core.store.scan(Table.DUE, start, due_key(queue.id, Due.EXPIRY + 1, 0, 0), 1)
    if items:
        [(key, _)] = items
        _, _, due_ms, _ = unpack_due_key(key)
        core.timers.arm(due_ms, (queue.id, Due.EXPIRY))


def resume(core: Core, queue: Queue) -> None:
    """A receiver pulls again, or the terms changed: look at all messages that may have expired meanwhile."""
    if queue.expiry_paused:
        queue.expiry_paused = False
        queue.swept = b""
        arm_next(core, queue)
        if queue.deferrals is not None:
            core.timers.arm(queue.deferrals.next_ms(), (queue.id, Due.EXPIRY))
