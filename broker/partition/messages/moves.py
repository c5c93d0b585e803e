"""Moves of a message: out of its queue for good, back to its place, to another place, and to the dead-letter queue.

The body stays where it is; only the queue's entry moves. A message is in one place at a time, because each function
here takes it from one place and stages the other in the same commit.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from broker.partition.messages.shared_bodies import release
from broker.partition.state.core import Core
from broker.partition.state.deferrals import Deferrals
from broker.partition.state.locks import NOBODY, Held, ref_of, size_of
from broker.partition.state.queue import Queue
from broker.partition.state.tally import MAX_DELIVERY_COUNT_EXCEEDED, TTL_EXPIRED
from broker.partition.state.timers import Due
from broker.partition.state.window import Ref, message_id_of, number_of
from protocol.extension import extension
from storage.journal.events import Op
from storage.quarantine import quarantine, size_set_aside
from storage.queue_ids import Part, with_part
from storage.records import NEVER, Field, Overlay, Place, due_key, encode_entry, message_key, queue_key
from storage.store import Table

Properties = dict[str, Any]  # name -> str, or bytes of one encoded AMQP value

REASON = "DeadLetterReason"
DESCRIPTION = "DeadLetterErrorDescription"

# Here, because to look up a member of an enum takes as long as a call.
_SCHEDULED = Place.SCHEDULED
_ACTIVATION, _EXPIRY = Due.SCHEDULED, Due.EXPIRY
_QUEUE, _MESSAGES, _DUE = Table.QUEUE, Table.MESSAGES, Table.DUE
_EXPIRES_MS, _RETURNS_MS = Field.EXPIRES_MS, Field.RETURNS_MS
_AVAILABLE, _DEFERRED = Place.AVAILABLE, Place.DEFERRED
_PROPERTIES = Field.PROPERTIES


def unlocked(ref: Ref, size: int, due_ms: int, place: Place) -> Held:
    return ref, size, due_ms, place, 0, NOBODY


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
    found = extension and extension.keys_of(list(messages), queue.id, NEVER, _EXPIRY)
    delete: Callable[[Table, Any], None]
    if found:
        delete = core.store.delete_keys
        queue_keys, message_keys, due_keys, size_bytes = found
        queue.counts[_AVAILABLE] -= len(messages)
    else:
        delete = core.store.delete_many
        queue_keys, message_keys, due_keys, size_bytes = _keys_of(queue, messages)
    queue.size_bytes -= size_bytes
    core.turn.work += len(messages)
    delete(_QUEUE, queue_keys)
    if queue.sessions is not None:
        queue.sessions.leave(messages)
    if queue.topic_id is None and not keep_bodies:
        delete(_MESSAGES, message_keys)
    if due_keys:
        core.store.delete_many(_DUE, due_keys)
    core.turn.touch(queue)


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


def put_back(core: Core, queue: Queue, held: Held, now_ms: int) -> None:
    """Make a message whose lock has ended available again at its place, or expire it if its time came meanwhile."""
    ref, _, due_ms, place, _, _ = held
    if place == _DEFERRED:
        _unlocked_deferred(core, queue, number_of(ref))
        return
    if due_ms <= now_ms:
        if expires_now(core, queue):
            expire(core, queue, held)
            return
        queue.expiry_paused = True
    if queue.sessions is not None:
        queue.sessions.put_back(ref, queue.locks)
    if queue.sessions is None or queue.window.active:  # one that forwards takes messages out of its window
        window = queue.window
        window.put_back(ref)
        if len(window.returned) > core.settings.window:
            window.reset(queue.locks.numbers())
        for selection in queue.selections.values():
            selection.put_back(number_of(ref), core.settings.window)
    core.turn.wake(queue)


def put_back_failed(
    core: Core, queue: Queue, held: Held, properties: Properties | None, op: Op, now_ms: int, delay_ms: int = 0
) -> None:
    """Count a delivery that failed by `op`. The message goes back, or to the dead-letter queue after the last one.

    With a delay it is back so much later, unless it expires now.
    """
    counted = _counted(core, queue, held, properties, op)
    if counted is None:
        return
    (number, message_id, delivery_count, overlay), _, due_ms, place, _, _ = counted
    if delay_ms and due_ms > now_ms:
        put_off(core, queue, counted, core.wall_ms(min(now_ms + delay_ms, due_ms)), now_ms)
        return
    entry = encode_entry(message_id, delivery_count, overlay)
    core.store.put(_QUEUE, queue_key(queue.id, place, number), entry)
    core.worked(len(entry))
    put_back(core, queue, counted, now_ms)


def _counted(core: Core, queue: Queue, held: Held, properties: Properties | None, op: Op) -> Held | None:
    """The message with one delivery more, ended by `op`, and the properties; the caller stores it.

    None if it was the last delivery that the queue allows: then the message is in the dead-letter queue.
    Dead-letter queues have no such limit and count nothing: the delivery count stays as it was when the message came.
    """
    (number, message_id, delivery_count, overlay), size, due_ms, place, _, _ = held
    overlay = with_properties(overlay, properties)
    if not queue.is_dead_letter:
        delivery_count += 1
    held = ((number, message_id, delivery_count, overlay), size, due_ms, place, 0, NOBODY)
    core.journal.done(op, queue.id, [held])
    limit = queue.terms.max_delivery_count
    if delivery_count < limit or queue.is_dead_letter:
        return held
    text = f"Message could not be consumed after {limit} delivery attempts."
    said = {REASON: MAX_DELIVERY_COUNT_EXCEEDED, DESCRIPTION: text}
    dead_letter(core, queue, held, said, MAX_DELIVERY_COUNT_EXCEEDED)
    return None


def put_off(core: Core, queue: Queue, held: Held, returns_ms: int, now_ms: int) -> None:
    """The available message is scheduled under its number, for this time of the wall clock: see `schedule`.

    Its time to live goes on, and has no timer meanwhile: the time is no later than its end.
    """
    (number, message_id, delivery_count, overlay), _, due_ms, _, _, _ = held
    overlay = {**(overlay or {}), _RETURNS_MS: returns_ms}
    if due_ms != NEVER:
        overlay[_EXPIRES_MS] = due_ms
    _change_place(core, queue, held, _SCHEDULED, encode_entry(message_id, delivery_count, overlay))
    core.store.put(_DUE, due_key(queue.id, _ACTIVATION, returns_ms, number), message_key(message_id))
    core.arm_scheduled(queue.id, returns_ms, now_ms)


def defer(core: Core, queue: Queue, held: Held, properties: Properties | None) -> None:
    """Count a delivery, and defer the message under its number, or dead-letter it after the last delivery.

    A deferred message has no timer in the store: see `deferred_expiry`.
    """
    counted = _counted(core, queue, held, properties, Op.DEFERRED)
    if counted is None:
        return
    (number, message_id, delivery_count, overlay), _, due_ms, place, _, _ = counted
    entry = encode_entry(message_id, delivery_count, overlay)
    if place != _DEFERRED:
        _change_place(core, queue, counted, _DEFERRED, entry)
        if due_ms != NEVER and queue.terms.dead_letter_expired:
            if queue.deferrals is None:
                queue.deferrals = Deferrals()
            queue.deferrals.note(due_ms, number)
            core.timers.arm(queue.deferrals.next_ms(), (queue.id, _EXPIRY))
        return
    core.worked(len(entry))
    core.store.put(_QUEUE, queue_key(queue.id, _DEFERRED, number), entry)
    _unlocked_deferred(core, queue, number)


def _unlocked_deferred(core: Core, queue: Queue, number: int) -> None:
    """The lock of a deferred message has ended, and it stays deferred. If its time came meanwhile, it expires."""
    if queue.deferrals is not None and queue.deferrals.unlock(number):
        core.timers.arm(queue.deferrals.next_ms(), (queue.id, _EXPIRY))


def _change_place(core: Core, queue: Queue, held: Held, to: Place, entry: bytes) -> None:
    """The message is in another place from now on, with this entry and without the timer that it had."""
    ref, _, due_ms, place, _, _ = held
    number, _, _, _ = ref
    if queue.sessions is not None:
        queue.sessions.leave([held])
        queue.sessions.put(to, ref)
    core.store.delete(_QUEUE, queue_key(queue.id, place, number))
    core.store.put(_QUEUE, queue_key(queue.id, to, number), entry)
    core.worked(len(entry))
    queue.counts[place] -= 1
    queue.counts[to] += 1
    if due_ms != NEVER:
        core.store.delete(_DUE, due_key(queue.id, _EXPIRY, due_ms, number))
    core.turn.touch(queue)


def enter_again(core: Core, queue: Queue, ref: Ref, due_ms: int) -> None:
    """Store a message that is in no place as available, under a number that it had before; `due_ms` as in `Held`.

    The caller puts it back then.
    """
    number, message_id, delivery_count, overlay = ref
    entry = encode_entry(message_id, delivery_count, overlay)
    core.store.put(_QUEUE, queue_key(queue.id, _AVAILABLE, number), entry)
    core.worked(len(entry))
    if queue.sessions is not None:
        queue.sessions.enter_again(ref)
    queue.counts[_AVAILABLE] += 1
    if due_ms != NEVER:
        core.store.put(_DUE, due_key(queue.id, _EXPIRY, due_ms, number), message_key(message_id))
        core.arm_expiry(queue, due_ms)
    core.turn.touch(queue)


def dead_letter(
    core: Core, queue: Queue, held: Held, properties: Properties | None, reason: str, part: Part = Part.DEAD_LETTER
) -> None:
    """Move the message to the entity's dead-letter queue, or to another `part`. It is counted under `reason`."""
    (number, _, _, overlay), *_ = held
    overlay = dict(with_properties(overlay, properties) or {})
    if queue.sessions is not None:
        del overlay[Field.SESSION]  # ordinary receivers read a dead-letter queue
    overlay.pop(Field.DESTINATION, None)
    overlay.pop(Field.LANE, None)
    overlay.setdefault(Field.ENQUEUE_SEQUENCE_NUMBER, number)
    overlay[Field.DEAD_LETTER_SOURCE] = queue.terms.name
    target = core.queue(with_part(queue.id, part))
    said = (properties or {}).get(REASON)
    move(core, queue, held, target, overlay, Op.DEAD_LETTERED, said if isinstance(said, str) else reason)
    target.tally.moved_in += 1
    queue.tally.dead_lettered[reason] = queue.tally.dead_lettered.get(reason, 0) + 1


def move(
    core: Core, queue: Queue, held: Held, target: Queue, overlay: Overlay, op: Op, reason: str | None = None
) -> None:
    """Move the message to another part of the same entity, where it has this overlay and no timer.

    The journal says that it left by `op`, and the `reason`.
    """
    ref, size, due_ms, place, _, _ = held
    number, message_id, delivery_count, _ = ref
    core.journal.moved(op, queue.id, [ref], target.id, target.next_number, reason)
    store = core.store
    store.delete(_QUEUE, queue_key(queue.id, place, number))
    core.turn.work += 1
    if due_ms != NEVER:
        store.delete(_DUE, due_key(queue.id, _EXPIRY, due_ms, number))
    queue.counts[place] -= 1
    queue.size_bytes -= size
    if queue.sessions is not None:
        queue.sessions.leave([held])
    enqueue(core, target, [(message_id, delivery_count, overlay)])
    target.size_bytes += size
    core.turn.touch(queue)


def enqueue(core: Core, queue: Queue, entries: Iterable[tuple[int, int, Overlay | None]]) -> None:
    """Append available entries (message id, delivery count, overlay) for messages that are in MESSAGES already."""
    first = queue.next_number
    refs: list[Ref] = [(number, *entry) for number, entry in enumerate(entries, first)]
    stored = [
        (queue_key(queue.id, _AVAILABLE, number), encode_entry(message_id, delivery_count, overlay))
        for number, message_id, delivery_count, overlay in refs
    ]
    core.store.insert_many(_QUEUE, stored)
    core.worked(*[len(entry) for _, entry in stored])
    queue.next_number = first + len(refs)
    queue.counts[_AVAILABLE] += len(refs)
    if queue.sessions is not None:
        queue.sessions.enter(refs)
    elif queue.transfers is not None:
        queue.transfers.extend(refs, first, queue.next_number, core.settings.window)
    else:
        queue.window.extend(refs, first, queue.next_number, core.settings.window)
    core.turn.touch(queue)
    core.turn.wake(queue)


def expires_now(core: Core, queue: Queue) -> bool:
    """True if expired messages may go now.

    To the dead-letter queue they go while a receiver pulls (DL6), or by the timer: where nobody is meant to receive,
    because the messages or the dead-lettered ones are forwarded, and everywhere with the setting.
    """
    if queue.is_held_back:
        return False
    terms = queue.terms
    if not terms.dead_letter_expired or core.settings.expiry_timer:
        return True
    return queue.is_pulled or bool(queue.forward_to) or bool(terms.forward_dead_lettered_to)


def expire(core: Core, queue: Queue, held: Held) -> None:
    """Delete or dead-letter an expired message of a main queue, which is neither locked nor in the window."""
    if queue.terms.dead_letter_expired:
        text = "The message expired and was dead lettered."
        dead_letter(core, queue, held, {REASON: TTL_EXPIRED, DESCRIPTION: text}, TTL_EXPIRED)
    else:
        discard(core, queue, [held], Op.EXPIRED)
        queue.tally.expired += 1


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


def set_aside_unlocked(core: Core, queue: Queue, place: Place, number: int, message_id: int | None) -> None:
    """Quarantine an unreadable message that was found, unless it is locked or on its way to another partition.

    In that case it was read before it was damaged, and its receiver or destination settles it.
    """
    if not queue.locks.has(place, number):
        set_aside(core, queue, place, number, message_id)


def with_properties(overlay: Overlay | None, properties: Properties | None) -> Overlay | None:
    """A new overlay with the properties. Never mutate an overlay: locks and deliveries under way share it."""
    if not properties:
        return overlay
    return {**(overlay or {}), _PROPERTIES: {**((overlay or {}).get(_PROPERTIES) or {}), **properties}}


def overlay_expires_ms(overlay: Overlay | None) -> int | None:
    """The expiry in the overlay; None if the record's holds."""
    return None if overlay is None else overlay.get(_EXPIRES_MS)
