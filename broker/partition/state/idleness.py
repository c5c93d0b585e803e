"""Entities that are deleted when nobody has used them for a while: AutoDeleteOnIdle (management.md 8).

An entity is used by every request of a client to it or to its dead-letter queue (to send, receive, settle, browse,
schedule, change rules or properties) and by a message that another entity forwards to it. A receiver uses it as long as
the receiver has credit. Scheduled messages use it, as do those that were abandoned with a delay, and messages in its
transfer queue. A use of a subscription is a use of its topic, but a message that the topic publishes is no use of the
subscription. A message that goes on to another entity uses the one that it leaves, which is in use while one waits to.

Time counts only while the partition runs, because nobody can use an entity that is not served. So the partition does
not keep a moment, but the duration for which the entity was idle at the last look. It looks STEPS times in an interval,
and at its end. If the duration is at least a step, the look writes it to META; a use deletes it in its own commit. So
nothing is written about an entity in use. A restart forgets two steps at most, and never finds an entity idle for
longer than it was.

A plain entity is deleted then (`entities.delete_unused`). Of a partitioned entity, each partition knows the uses of its
own fragment only. So it tells the namespace's home that its fragment is unused, and the home asks all of them
(`broker.worker.unused`). A fragment that agrees refuses all uses as busy until it hears that the entity stays (`keep`)
or is deleted. The agreement is durable, because a restart may come before the decision is heard.
"""

from collections.abc import Iterable, Iterator

from broker.errors import ServerBusy
from broker.partition.state.core import PARTS, Core
from broker.partition.state.idle_times import Idle
from broker.partition.state.queue import Queue
from broker.partition.state.terms import Kind
from broker.partition.state.timers import Due
from protocol import error_texts
from storage.quarantine import quarantine
from storage.queue_ids import Part, entity_of, queue_id_of
from storage.records import CorruptRecord, Place, decode_document, encode_document, idle_key, queue_key
from storage.store import Table

STEPS = 10
GRID_MS = 1000  # so that one turn looks at many entities, and one commit writes about them
AGREED = "agreed"  # in META in place of the duration: the fragment refuses uses until it hears the decision


def load(core: Core, now_ms: int) -> None:
    """At the start: watch all entities with an interval, with what META has about them."""
    for entity_id in core.entities.terms:
        if (idle := _new(core, entity_id, now_ms)) is not None:
            _read(core, idle)
            _watch(core, idle)
    _connect(core, core.entities.terms)


def _new(core: Core, entity_id: int, now_ms: int) -> Idle | None:
    """None if the entity has no interval, or does not live here: only its partitions know who uses it."""
    terms = core.entities.terms[entity_id]
    if not terms.idle_limit_ms:
        return None
    partitions = core.entities.partitions_of(terms.topic or terms.name.lower())
    if core.partition_id not in partitions:
        return None
    return Idle(entity_id, terms.idle_limit_ms, now_ms, len(partitions) > 1)


def _read(core: Core, idle: Idle) -> None:
    key = idle_key(idle.entity_id)
    value = core.store.get(Table.META, key)
    if value is None:
        return
    try:
        found = decode_document(value)
        idle.has_agreed = found == AGREED
        idle.idle_ms = idle.limit_ms if idle.has_agreed else int(found)
        idle.recorded = True
    except (CorruptRecord, ValueError, TypeError):
        quarantine(core.store, Table.META, key)


def change(core: Core, entity_id: int, now_ms: int) -> None:
    """The entity is new or its terms have changed, which is a use. It stays, if that was to be decided."""
    keep(core, entity_id, now_ms)
    before, idle = core.idle_times.of.get(entity_id), _new(core, entity_id, now_ms)
    forget(core, entity_id)
    if idle is not None:
        _watch(core, idle)
    if idle is not None or before is not None:
        _connect(core, core.entities.subscription_ids.get(entity_id, ()))
    _connect(core, [entity_id])
    use(core, queue_id_of(entity_id), now_ms)


def forget(core: Core, entity_id: int) -> None:
    """The entity is deleted, or its terms have changed: do not watch it any more."""
    core.idle_times.kept.pop(entity_id, None)
    core.idle_times.newly_unused.discard(entity_id)
    idle = core.idle_times.of.pop(entity_id, None)
    if idle is not None and idle.recorded:
        core.store.delete(Table.META, idle_key(entity_id))


def _watch(core: Core, idle: Idle) -> None:
    core.idle_times.of[idle.entity_id] = idle
    core.timers.arm(_next_look_ms(idle), (queue_id_of(idle.entity_id), Due.IDLE))


def _connect(core: Core, entity_ids: Iterable[int]) -> None:
    """Note which idle times a use of each of these resets: its own, and that of a subscription's topic."""
    for entity_id in entity_ids:
        terms = core.entities.terms[entity_id]
        topic_id = core.entities.topic_ids[terms.topic] if terms.kind == Kind.SUBSCRIPTION else 0
        kept = tuple(core.idle_times.of[each] for each in (entity_id, topic_id) if each in core.idle_times.of)
        if kept:
            core.idle_times.kept[entity_id] = kept
        else:
            core.idle_times.kept.pop(entity_id, None)


def use(core: Core, queue_id: int, now_ms: int) -> None:
    """Somebody uses the entity of the queue. As long as `core.idle_times.kept` is empty, callers may skip this."""
    for idle in core.idle_times.kept.get(entity_of(queue_id), ()):
        idle.idle_ms = 0
        idle.looked_ms = now_ms
        if idle.recorded and not idle.has_agreed:
            _unrecord(core, idle)


def _unrecord(core: Core, idle: Idle) -> None:
    core.store.delete(Table.META, idle_key(idle.entity_id))
    idle.recorded = False


def has_ended(core: Core, entity_id: int, now_ms: int) -> bool:
    """The timer: look at the entity. True if it is plain and its interval has passed without a use."""
    idle = core.idle_times.of.get(entity_id)
    if idle is None:
        return False  # the entity is deleted, or has no interval any more
    if idle.has_agreed:
        idle.looked_ms = now_ms
    elif _is_in_use(core, entity_id):
        use(core, queue_id_of(entity_id), now_ms)
    else:
        # The sleep of a machine, or a change of its clock, does not count as idleness.
        idle.idle_ms += min(max(0, now_ms - idle.looked_ms), 2 * _step_ms(idle))
        idle.looked_ms = now_ms
        if idle.idle_ms >= idle.limit_ms:
            if not idle.is_fragment:
                return True
            core.idle_times.newly_unused.add(entity_id)
        elif idle.idle_ms >= _step_ms(idle):
            core.store.put(Table.META, idle_key(entity_id), encode_document(idle.idle_ms))
            idle.recorded = True
    core.timers.arm(_next_look_ms(idle), (queue_id_of(entity_id), Due.IDLE))
    return False


def refuses(core: Core, queue_id: int) -> bool:
    """True if the entity of the queue, or its topic, refuses uses, because it is being deleted, or lives elsewhere."""
    entity_id = entity_of(queue_id)
    if entity_id in core.entities.terms and not core.entities.lives_here(entity_id):
        return True
    kept = core.idle_times.kept.get(entity_id)
    return kept is not None and any(idle.has_agreed for idle in kept)


def require(core: Core, queue_id: int) -> None:
    """Refuse a use while the entity of the queue refuses uses. Raises ServerBusy."""
    if refuses(core, queue_id):
        raise ServerBusy(error_texts.SERVER_BUSY)


def is_unused(core: Core, entity_id: int, now_ms: int) -> bool:
    """True if nobody has used this fragment for the interval."""
    idle = core.idle_times.of.get(entity_id)
    if idle is None or idle.idle_ms < idle.limit_ms:
        return False
    if _is_in_use(core, entity_id):
        use(core, queue_id_of(entity_id), now_ms)
        return False
    return True


def agree(core: Core, entity_id: int, now_ms: int) -> bool:
    """If nobody has used this fragment, agree to the deletion of the entity with the next commit, and refuse uses."""
    if not is_unused(core, entity_id, now_ms):
        return False
    idle = core.idle_times.of[entity_id]
    core.store.put(Table.META, idle_key(entity_id), encode_document(AGREED))
    idle.has_agreed = idle.recorded = True
    return True


def keep(core: Core, entity_id: int, now_ms: int) -> None:
    """The entity stays: take uses again. The time in which they were refused does not count as idleness."""
    idle = core.idle_times.of.get(entity_id)
    if idle is None or not idle.has_agreed:
        return
    idle.has_agreed = False
    idle.looked_ms = now_ms
    _unrecord(core, idle)
    for queue in _open_queues(core, entity_id):
        core.turn.wake(queue)


def keep_all(core: Core, now_ms: int) -> None:
    """The home's catalog has come, which has all entities that are here, and no agreement holds any more. Tell the home
    anew which ones are unused.
    """
    for entity_id, idle in core.idle_times.of.items():
        keep(core, entity_id, now_ms)
        if idle.is_fragment and idle.idle_ms >= idle.limit_ms:
            core.timers.arm(now_ms, (queue_id_of(entity_id), Due.IDLE))


def _is_in_use(core: Core, entity_id: int) -> bool:
    """True if a message that is scheduled, in the transfer queue or to be forwarded, or a receiver with credit uses the
    entity.
    """
    if entity_id in core.entities.frozen:
        return True
    transfers = core.queues.get(queue_id_of(entity_id, Part.TRANSFER))  # a transfer queue with messages is always open
    if _has_scheduled(core, entity_id) or (transfers is not None and any(transfers.counts)):
        return True
    return any(
        queue.is_in_use or (queue.forward_to and queue.counts[Place.AVAILABLE])
        for queue in _open_queues(core, entity_id)
    )


def _open_queues(core: Core, entity_id: int) -> Iterator[Queue]:
    return (core.queues[queue_id] for queue_id in _queue_ids(core, entity_id) if queue_id in core.queues)


def _queue_ids(core: Core, entity_id: int) -> Iterator[int]:
    """Yield the idle times of the entity, and of the subscriptions of a topic."""
    for each in (entity_id, *core.entities.subscription_ids.get(entity_id, ())):
        for part in PARTS:
            yield queue_id_of(each, part)


def _has_scheduled(core: Core, entity_id: int) -> bool:
    for queue_id in _queue_ids(core, entity_id):
        if (queue := core.queues.get(queue_id)) is not None:
            if queue.counts[Place.SCHEDULED]:
                return True
        elif core.timers.is_armed((queue_id, Due.SCHEDULED)):
            start, end = queue_key(queue_id, Place.SCHEDULED, 0), queue_key(queue_id, Place.SCHEDULED + 1, 0)
            if core.store.scan(Table.QUEUE, start, end, 1):
                return True
    return False


def _step_ms(idle: Idle) -> int:
    return idle.limit_ms // STEPS


def _next_look_ms(idle: Idle) -> int:
    left_ms = idle.limit_ms - idle.idle_ms
    due_ms = idle.looked_ms + (min(_step_ms(idle), left_ms) if left_ms > 0 else _step_ms(idle))
    return -(-due_ms // GRID_MS) * GRID_MS
