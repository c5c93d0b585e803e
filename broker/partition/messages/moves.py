"""Moves of a message: out of its queue for good, back to its place, to another place, and to the dead-letter queue.

The body stays where it is; only the queue's entry moves. A message is in one place at a time, because each function
here takes it from one place and stages the other in the same commit.
"""

from typing import Any

from broker.partition.messages.entering import append, put
from broker.partition.messages.leaving import discard, leave
from broker.partition.state.core import Core
from broker.partition.state.deferrals import Deferrals
from broker.partition.state.locks import NOBODY, Held, ref_of, size_of
from broker.partition.state.queue import Queue
from broker.partition.state.tally import MAX_DELIVERY_COUNT_EXCEEDED, TTL_EXPIRED
from broker.partition.state.timers import Due
from broker.partition.state.window import Ref, number_of
from storage.journal.events import Op
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
    _change_place(core, queue, held, _SCHEDULED, (number, message_id, delivery_count, overlay))
    core.store.put(_DUE, due_key(queue.id, _ACTIVATION, returns_ms, number), message_key(message_id))
    core.arm_scheduled(queue.id, returns_ms, now_ms)


def defer(core: Core, queue: Queue, held: Held, properties: Properties | None) -> None:
    """Count a delivery, and defer the message under its number, or dead-letter it after the last delivery.

    A deferred message has no timer in the store: see `deferred_expiry`.
    """
    counted = _counted(core, queue, held, properties, Op.DEFERRED)
    if counted is None:
        return
    ref, _, due_ms, place, _, _ = counted
    number, message_id, delivery_count, overlay = ref
    if place != _DEFERRED:
        _change_place(core, queue, counted, _DEFERRED, ref)
        if due_ms != NEVER and queue.terms.dead_letter_expired:
            if queue.deferrals is None:
                queue.deferrals = Deferrals()
            queue.deferrals.note(due_ms, number)
            core.timers.arm(queue.deferrals.next_ms(), (queue.id, _EXPIRY))
        return
    entry = encode_entry(message_id, delivery_count, overlay)
    core.worked(len(entry))
    core.store.put(_QUEUE, queue_key(queue.id, _DEFERRED, number), entry)
    _unlocked_deferred(core, queue, number)


def _unlocked_deferred(core: Core, queue: Queue, number: int) -> None:
    """The lock of a deferred message has ended, and it stays deferred. If its time came meanwhile, it expires."""
    if queue.deferrals is not None and queue.deferrals.unlock(number):
        core.timers.arm(queue.deferrals.next_ms(), (queue.id, _EXPIRY))


def _change_place(core: Core, queue: Queue, held: Held, to: Place, ref: Ref) -> None:
    """Move the message to another place, as this ref and without the timer that it had."""
    leave(core, queue, [held])
    if queue.sessions is not None:
        queue.sessions.put(to, ref)
    put(core, queue, to, ref, size_of(held))


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
    ref = ref_of(held)
    _, message_id, delivery_count, _ = ref
    core.journal.moved(op, queue.id, [ref], target.id, target.next_number, reason)
    leave(core, queue, [held])
    core.turn.work += 1
    append(core, target, [(message_id, delivery_count, overlay)], size_of(held))


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


def with_properties(overlay: Overlay | None, properties: Properties | None) -> Overlay | None:
    """A new overlay with the properties. Never mutate an overlay: locks and deliveries under way share it."""
    if not properties:
        return overlay
    return {**(overlay or {}), _PROPERTIES: {**((overlay or {}).get(_PROPERTIES) or {}), **properties}}


def overlay_expires_ms(overlay: Overlay | None) -> int | None:
    """The expiry in the overlay; None if the record's holds."""
    return None if overlay is None else overlay.get(_EXPIRES_MS)
