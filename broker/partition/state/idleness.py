"""Entities that are deleted when nobody has used them for a while: AutoDeleteOnIdle (management.md 8).

A use is whatever a client asks of the entity or of its dead-letter queue: to send, receive, settle, browse, schedule, a
change of its rules or properties; and a message that another entity forwards to it. A receiver uses it as long as it
has credit, and so do messages that are scheduled, or wait to be moved on to where they were sent through it. Of a
topic, uses of its subscriptions are uses, too; but what it publishes is no use of a subscription. An entity that
forwards is never idle.

Time counts only while the partition runs: nobody can use what is not served. So what is kept is no moment but for how
long an entity was idle when it was last looked at: STEPS times in its interval, and at its end. META has what a look
found, if it was a step at least. A use deletes that in its own commit. So nothing is written about an entity in use; a
restart forgets two steps at most, and never finds an entity idle for longer than it was.
"""

from collections.abc import Iterable

from broker.partition.state.core import PARTS, Core, Idle
from broker.partition.state.terms import Kind
from broker.partition.state.timers import Due
from storage.quarantine import quarantine
from storage.queue_ids import Part, entity_of, queue_id_of
from storage.records import CorruptRecord, Place, decode_document, encode_document, idle_key, queue_key
from storage.store import Table

STEPS = 10
GRID_MS = 1000  # many entities are looked at in the same turn, and written about in the same commit


def load(core: Core, now_ms: int) -> None:
    """At the start: all that have an interval, as META knows them."""
    for entity_id in core.terms:
        if limit_ms := _limit_ms(core, entity_id):
            idle = Idle(entity_id, limit_ms, now_ms)
            idle.idle_ms = _recorded_ms(core, entity_id)
            idle.recorded = idle.idle_ms > 0
            _watch(core, idle)
    _connect(core, core.terms)


def _limit_ms(core: Core, entity_id: int) -> int:
    """0 if it has none, or lives on another partition: only there it is known who uses it."""
    terms = core.terms[entity_id]
    if not terms.idle_limit_ms:
        return 0
    is_here = core.home(terms.topic or terms.name.lower()) == core.partition_id
    return terms.idle_limit_ms if is_here else 0


def _recorded_ms(core: Core, entity_id: int) -> int:
    key = idle_key(entity_id)
    value = core.store.get(Table.META, key)
    try:
        return 0 if value is None else int(decode_document(value))
    except (CorruptRecord, ValueError, TypeError):
        quarantine(core.store, Table.META, key)
        return 0


def change(core: Core, entity_id: int, now_ms: int) -> None:
    """The entity is new or has other terms, which is a use."""
    before, limit_ms = core.idle.get(entity_id), _limit_ms(core, entity_id)
    forget(core, entity_id)
    if limit_ms:
        _watch(core, Idle(entity_id, limit_ms, now_ms))
    if limit_ms or before is not None:
        _connect(core, core.subscription_ids.get(entity_id, ()))
    _connect(core, [entity_id])
    use(core, queue_id_of(entity_id), now_ms)


def forget(core: Core, entity_id: int) -> None:
    """The entity is deleted, or has other terms."""
    core.kept.pop(entity_id, None)
    idle = core.idle.pop(entity_id, None)
    if idle is not None and idle.recorded:
        core.store.delete(Table.META, idle_key(entity_id))


def _watch(core: Core, idle: Idle) -> None:
    core.idle[idle.entity_id] = idle
    core.timers.arm(_next_look_ms(idle), (queue_id_of(idle.entity_id), Due.IDLE))


def _connect(core: Core, entity_ids: Iterable[int]) -> None:
    """Note what a use of each of these keeps: itself, and the topic of a subscription."""
    for entity_id in entity_ids:
        terms = core.terms[entity_id]
        topic_id = core.topic_ids[terms.topic] if terms.kind == Kind.SUBSCRIPTION else 0
        kept = tuple(core.idle[each] for each in (entity_id, topic_id) if each in core.idle)
        if kept:
            core.kept[entity_id] = kept
        else:
            core.kept.pop(entity_id, None)


def use(core: Core, queue_id: int, now_ms: int) -> None:
    """Somebody uses the entity that the queue is of. As long as `core.kept` is empty nobody needs to tell."""
    for idle in core.kept.get(entity_of(queue_id), ()):
        idle.idle_ms = 0
        idle.looked_ms = now_ms
        if idle.recorded:
            core.store.delete(Table.META, idle_key(idle.entity_id))
            idle.recorded = False


def has_ended(core: Core, entity_id: int, now_ms: int) -> bool:
    """The timer: look at the entity. True if its time is over."""
    idle = core.idle.get(entity_id)
    if idle is None:
        return False  # deleted, or it has no interval any more
    if _is_in_use(core, entity_id):
        use(core, queue_id_of(entity_id), now_ms)
    else:
        # A machine that slept, or a clock that was set, is no idleness.
        idle.idle_ms += min(max(0, now_ms - idle.looked_ms), 2 * _step_ms(idle))
        idle.looked_ms = now_ms
        if idle.idle_ms >= idle.limit_ms:
            return True
        if idle.idle_ms >= _step_ms(idle):
            core.store.put(Table.META, idle_key(entity_id), encode_document(idle.idle_ms))
            idle.recorded = True
    core.timers.arm(_next_look_ms(idle), (queue_id_of(entity_id), Due.IDLE))
    return False


def _is_in_use(core: Core, entity_id: int) -> bool:
    """By a message that is scheduled, or to be transferred; or by a receiver that has credit."""
    transfers = core.queues.get(queue_id_of(entity_id, Part.TRANSFER))  # one with messages is open
    if _has_scheduled(core, queue_id_of(entity_id)) or (transfers is not None and any(transfers.counts)):
        return True
    entity_ids = (entity_id, *core.subscription_ids.get(entity_id, ()))
    queues = (core.queues.get(queue_id_of(each, part)) for each in entity_ids for part in PARTS)
    return any(queue is not None and queue.is_pulled for queue in queues)


def _has_scheduled(core: Core, queue_id: int) -> bool:
    queue = core.queues.get(queue_id)
    if queue is not None:
        return queue.counts[Place.SCHEDULED] > 0
    start, end = queue_key(queue_id, Place.SCHEDULED, 0), queue_key(queue_id, Place.SCHEDULED + 1, 0)
    return bool(core.store.scan(Table.QUEUE, start, end, 1))


def _step_ms(idle: Idle) -> int:
    return idle.limit_ms // STEPS


def _next_look_ms(idle: Idle) -> int:
    due_ms = idle.looked_ms + min(_step_ms(idle), idle.limit_ms - idle.idle_ms)
    return -(-due_ms // GRID_MS) * GRID_MS
