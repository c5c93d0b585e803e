"""The way into a queue: here a message gets its number, counts, and is shown to those who wait for it.

Callers store the record and the entry; the queue knows nothing of a message before it has come through here.
"""

from collections.abc import Iterable, Sequence

from broker.partition.state.core import Core
from broker.partition.state.queue import Queue
from broker.partition.state.timers import Due
from broker.partition.state.window import Ref
from storage.records import NEVER, Overlay, Place, due_key, encode_entry, message_key, queue_key
from storage.store import Table

# Here, because to look up a member of an enum takes as long as a call.
_AVAILABLE, _SCHEDULED = Place.AVAILABLE, Place.SCHEDULED
_EXPIRY = Due.EXPIRY
_QUEUE, _DUE = Table.QUEUE, Table.DUE


def reserve(queue: Queue, count: int) -> int:
    """Take so many numbers of the queue; returns the first."""
    first = queue.next_number
    queue.next_number = first + count
    return first


def enter(
    core: Core,
    queue: Queue,
    refs: list[Ref],
    numbers: range,
    size_bytes: int,
    expires_ms: int = NEVER,
    count: int | None = None,
) -> None:
    """Messages are available from now on, whose numbers are among these; nobody else gets any of these numbers.

    `refs` are theirs; of a queue that has neither an active window nor sessions they may be left out, with `count`
    then. `size_bytes` are the bytes of their records. `expires_ms`: when the first of them expires that has a timer.
    """
    if numbers.stop > queue.next_number:
        queue.next_number = numbers.stop
    queue.counts[_AVAILABLE] += len(refs) if count is None else count
    queue.size_bytes += size_bytes
    if queue.sessions is not None:
        queue.sessions.enter(refs)
    elif queue.transfers is not None:
        queue.transfers.extend(refs, numbers.start, numbers.stop, core.settings.window)
    else:
        queue.window.extend(refs, numbers.start, numbers.stop, core.settings.window)
    core.turn.touch(queue)
    core.turn.wake(queue)
    if expires_ms != NEVER:
        core.arm_expiry(queue, expires_ms)


def enter_scheduled(
    core: Core, queue: Queue, refs: Sequence[Ref], size_bytes: int, scheduled_ms: int, now_ms: int
) -> None:
    """Messages wait in the queue for their times, of which `scheduled_ms` is the first, by the wall clock."""
    last, _, _, _ = refs[-1]
    if last >= queue.next_number:
        queue.next_number = last + 1
    queue.counts[_SCHEDULED] += len(refs)
    queue.size_bytes += size_bytes
    if queue.sessions is not None:
        for ref in refs:
            queue.sessions.put(_SCHEDULED, ref)
    core.turn.touch(queue)
    if scheduled_ms != NEVER:
        core.arm_scheduled(queue.id, scheduled_ms, now_ms)


def append(
    core: Core,
    queue: Queue,
    entries: Iterable[tuple[int, int, Overlay | None]],
    size_bytes: int,
    expiring: Sequence[tuple[int, int]] = (),
) -> None:
    """Store entries (message id, delivery count, overlay) of messages that are in MESSAGES already, as available.

    `expiring`: index in `entries`, and time, of those that get a timer.
    """
    first = queue.next_number
    refs: list[Ref] = [(number, *entry) for number, entry in enumerate(entries, first)]
    stored = [
        (queue_key(queue.id, _AVAILABLE, number), encode_entry(message_id, delivery_count, overlay))
        for number, message_id, delivery_count, overlay in refs
    ]
    core.store.insert_many(_QUEUE, stored)
    core.worked(*[len(entry) for _, entry in stored])
    earliest_ms = NEVER
    if expiring:
        core.store.insert_many(
            _DUE,
            [
                (due_key(queue.id, _EXPIRY, expires_ms, first + index), message_key(refs[index][1]))
                for index, expires_ms in expiring
            ],
        )
        earliest_ms = min(expires_ms for _, expires_ms in expiring)
    enter(core, queue, refs, range(first, first + len(refs)), size_bytes, earliest_ms)


def enter_again(core: Core, queue: Queue, ref: Ref, size: int, due_ms: int) -> None:
    """Store a message that is in no place as available, under a number that it had before; `due_ms` as in `Held`.

    The caller puts it back then.
    """
    number, message_id, _, _ = ref
    put(core, queue, _AVAILABLE, ref, size)
    if queue.sessions is not None:
        queue.sessions.enter_again(ref)
    if due_ms != NEVER:  # behind the entry, as in a move of the whole queue
        core.store.put(_DUE, due_key(queue.id, _EXPIRY, due_ms, number), message_key(message_id))
        core.arm_expiry(queue, due_ms)


def put(core: Core, queue: Queue, place: Place, ref: Ref, size: int) -> None:
    """Store the entry of a message that is in no place, under a number that it had before, in this one."""
    number, message_id, delivery_count, overlay = ref
    entry = encode_entry(message_id, delivery_count, overlay)
    core.store.put(_QUEUE, queue_key(queue.id, place, number), entry)
    core.worked(len(entry))
    queue.counts[place] += 1
    queue.size_bytes += size
    core.turn.touch(queue)
