"""The way out of a queue: here a message leaves its place, for good or for another one.

The body stays where it is, unless the caller says that the message is gone.
"""

from collections.abc import Sequence
from typing import Any

from broker.partition.messages.shared_bodies import release
from broker.partition.state.core import Core
from broker.partition.state.locks import NOBODY, Held, ref_of, size_of
from broker.partition.state.queue import Queue
from broker.partition.state.timers import Due
from broker.partition.state.window import Ref, message_id_of
from protocol.extension import extension
from storage.journal.events import Op
from storage.quarantine import quarantine, size_set_aside
from storage.records import NEVER, Place, due_key, message_key, queue_key
from storage.store import Store, Table

# Here, because to look up a member of an enum takes as long as a call.
_AVAILABLE, _SCHEDULED = Place.AVAILABLE, Place.SCHEDULED
_ACTIVATION, _EXPIRY = Due.SCHEDULED, Due.EXPIRY
_QUEUE, _MESSAGES, _DUE = Table.QUEUE, Table.MESSAGES, Table.DUE


def unlocked(ref: Ref, size: int, due_ms: int, place: Place) -> Held:
    """Describe a message that nobody holds, as the locks describe those that are held."""
    return ref, size, due_ms, place, 0, NOBODY


def leave(core: Core, queue: Queue, messages: Sequence[Held]) -> Any:
    """Take messages out of their places: their entries, timers and listings in sessions go, and they count no more.

    Returns the keys of their bodies, for `delete`.
    """
    store = core.store
    found = extension and extension.keys_of(list(messages), queue.id, NEVER, _EXPIRY)
    if found:
        queue_keys, message_keys, due_keys, size_bytes = found
        queue.counts[_AVAILABLE] -= len(messages)
    else:
        queue_keys, message_keys, due_keys, size_bytes = _keys_of(queue, messages)
    queue.size_bytes -= size_bytes
    delete(store, _QUEUE, queue_keys)
    if queue.sessions is not None:
        queue.sessions.leave(messages)
    if due_keys:
        store.delete_many(_DUE, due_keys)
    core.turn.touch(queue)
    return message_keys


def _keys_of(queue: Queue, messages: Sequence[Held]) -> tuple[list[bytes], list[bytes], list[bytes], int]:
    """Keys of entries, bodies and timers, and the bytes of all bodies. The messages are not counted any more."""
    queue_id, counts = queue.id, queue.counts
    queue_keys, message_keys, due_keys, size_bytes = [], [], [], 0
    for (number, message_id, _, _), size, due_ms, place, _, _ in messages:
        queue_keys.append(queue_key(queue_id, place, number))
        message_keys.append(message_key(message_id))
        if due_ms != NEVER:
            timer = _ACTIVATION if place == _SCHEDULED else _EXPIRY
            due_keys.append(due_key(queue_id, timer, due_ms, number))
        counts[place] -= 1
        size_bytes += size
    return queue_keys, message_keys, due_keys, size_bytes


def delete(store: Store, table: Table, keys: Any) -> None:
    """Delete rows by keys that `leave` has found: a list, or what the extension has made of them."""
    if not isinstance(keys, list):
        store.delete_keys(table, keys)
    elif keys:
        store.delete_many(table, keys)


def discard(
    core: Core,
    queue: Queue,
    messages: Sequence[Held],
    op: Op,
    reason: str | None = None,
    keep_bodies: bool = False,
) -> None:
    """Delete the entries and bodies; with `keep_bodies`, which is not possible for subscriptions, only the entries.

    The journal says that they left by `op`, and the `reason`.
    """
    core.changing()
    core.journal.done(op, queue.id, messages, reason)
    if queue.topic_id is not None and messages:
        release(core, queue.topic_id, [*map(message_id_of, map(ref_of, messages))], [*map(size_of, messages)])
    message_keys = leave(core, queue, messages)
    core.turn.work += len(messages)
    if queue.topic_id is None and not keep_bodies:
        delete(core.store, _MESSAGES, message_keys)


def set_aside(core: Core, queue: Queue, place: Place, number: int, message_id: int | None) -> None:
    """Move body and entry of an unreadable message to QUARANTINE, so that the rest is served.

    Without `message_id` the entry itself is the corrupt record. We no longer know which body it referred to, so the
    body stays stored and counted. If the message has a timer, the timer finds no message when it is due.

    The message is removed from every window that has it, and is counted once, even if others come across it, too.
    """
    if core.store.get(_QUEUE, queue_key(queue.id, place, number)) is None:
        return
    if place == _AVAILABLE:
        queue.forget([(number, None)])
    if message_id is not None:
        size = quarantine(core.store, _MESSAGES, message_key(message_id))
        if queue.topic_id is not None:
            if size is None:  # it was quarantined already with the copy of another subscription
                size = size_set_aside(core.store, _MESSAGES, message_key(message_id))
            release(core, queue.topic_id, [message_id], [size or 0])
        queue.size_bytes -= size or 0
        if queue.sessions is not None:
            queue.sessions.drop(place, number)
    quarantine(core.store, _QUEUE, queue_key(queue.id, place, number))
    core.journal.gone(Op.QUARANTINED, queue.id, [number])
    core.turn.work += 1
    queue.counts[place] -= 1
    queue.tally.quarantined += 1
    core.turn.touch(queue)
