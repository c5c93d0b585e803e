"""Entities that are deleted when nobody has used them for a while: AutoDeleteOnIdle (management.md 8).

An entity is used by every request of a client to it or to its dead-letter queue (to send, receive, settle, browse,
schedule, change rules or properties) and by a message that another entity forwards to it. A receiver uses it as long as
the receiver has credit. Scheduled messages use it, and so do messages in its transfer queue. A use of a subscription is
a use of its topic, but a message that the topic publishes is no use of the subscription. An entity that forwards is
never idle.

Time counts only while the partition runs, because nobody can use an entity that is not served. So the partition does
not keep a moment, but the duration for which the entity was idle at the last look. It looks STEPS times in an interval,
and at its end. If the duration is at least a step, the look writes it to META; a use deletes it in its own commit. So
nothing is written about an entity in use. A restart forgets two steps at most, and never finds an entity idle for
longer than it was.
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
GRID_MS = 1000  # so that one turn looks at many entities, and one commit writes about them


def load(core: Core, now_ms: int) -> None:
    """At the start: watch all entities with an interval, with the durations in META."""
    for entity_id in core.terms:
        if limit_ms := _limit_ms(core, entity_id):
            idle = Idle(entity_id, limit_ms, now_ms)
            idle.idle_ms = _recorded_ms(core, entity_id)
            idle.recorded = idle.idle_ms > 0
            _watch(core, idle)
    _connect(core, core.terms)


def _limit_ms(core: Core, entity_id: int) -> int:
    """The interval; 0 if the entity has none, or does not live here alone: only its partition knows who uses it."""
    terms = core.terms[entity_id]
    if not terms.idle_limit_ms:
        return 0
    is_here = core.partitions_of(terms.topic or terms.name.lower()) == (core.partition_id,)
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
    """The entity is new or its terms have changed, which is a use."""
    before, limit_ms = core.idle.get(entity_id), _limit_ms(core, entity_id)
    forget(core, entity_id)
    if limit_ms:
        _watch(core, Idle(entity_id, limit_ms, now_ms))
    if limit_ms or before is not None:
        _connect(core, core.subscription_ids.get(entity_id, ()))
    _connect(core, [entity_id])
    use(core, queue_id_of(entity_id), now_ms)


def forget(core: Core, entity_id: int) -> None:
    """The entity is deleted, or its terms have changed: do not watch it any more."""
    core.kept.pop(entity_id, None)
    idle = core.idle.pop(entity_id, None)
    if idle is not None and idle.recorded:
        core.store.delete(Table.META, idle_key(entity_id))


def _watch(core: Core, idle: Idle) -> None:
    core.idle[idle.entity_id] = idle
    core.timers.arm(_next_look_ms(idle), (queue_id_of(idle.entity_id), Due.IDLE))


def _connect(core: Core, entity_ids: Iterable[int]) -> None:
    """Note which idle times a use of each of these resets: its own, and that of a subscription's topic."""
    for entity_id in entity_ids:
        terms = core.terms[entity_id]
        topic_id = core.topic_ids[terms.topic] if terms.kind == Kind.SUBSCRIPTION else 0
        kept = tuple(core.idle[each] for each in (entity_id, topic_id) if each in core.idle)
        if kept:
            core.kept[entity_id] = kept
        else:
            core.kept.pop(entity_id, None)


def use(core: Core, queue_id: int, now_ms: int) -> None:
    """Somebody uses the entity of the queue. As long as `core.kept` is empty, callers may skip this."""
    for idle in core.kept.get(entity_of(queue_id), ()):
        idle.idle_ms = 0
        idle.looked_ms = now_ms
        if idle.recorded:
            core.store.delete(Table.META, idle_key(idle.entity_id))
            idle.recorded = False


def has_ended(core: Core, entity_id: int, now_ms: int) -> bool:
    """The timer: look at the entity. True if its interval has passed without a use."""
    idle = core.idle.get(entity_id)
    if idle is None:
        return False  # the entity is deleted, or has no interval any more
    if _is_in_use(core, entity_id):
        use(core, queue_id_of(entity_id), now_ms)
    else:
        # The sleep of a machine, or a change of its clock, does not count as idleness.
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
    """True if a scheduled message, a message in the transfer queue or a receiver with credit uses the entity."""
    transfers = core.queues.get(queue_id_of(entity_id, Part.TRANSFER))  # a transfer queue with messages is always open
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
