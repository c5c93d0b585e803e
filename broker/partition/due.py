"""What is done when a timer of a partition is over, by the kind of the timer.

A timer may be over too early, so each of these looks what is really due (`state.timers`), and arms the next timer.
"""

from collections.abc import Callable
from typing import Final

from broker.partition import entities, transactions
from broker.partition.messages import deferred_expiry, duplicates, expiry, schedule, settlement
from broker.partition.moving import moves
from broker.partition.sessions import locks as session_locks
from broker.partition.state import accesses, idleness
from broker.partition.state.core import Core
from broker.partition.state.queue import Queue
from broker.partition.state.timers import Due
from broker.partition.topics import publishing
from storage.queue_ids import entity_of
from storage.records import Place

# Thousands of idle or deleted entities may be due at once. A step for one of them takes up to 50 microseconds, even if
# it finds nothing to do.
DUE_PER_TURN = 256


def advance(core: Core, now_ms: int) -> None:
    """Do what is due, in bounded steps. What this turn does not get to stays armed."""
    if core.turn.work:
        core.begin_part()
    for due_ms, (queue_id, due) in core.timers.take_due(now_ms, DUE_PER_TURN):
        if core.turn.work and core.work_left() <= 0:
            core.timers.arm(due_ms, (queue_id, due))  # the next turn does it, in the same order
            continue
        of_entity = OF_ENTITY.get(due)
        if of_entity is not None:
            of_entity(core, entity_of(queue_id), now_ms)
            continue
        queue = core.find(queue_id)
        if queue is None:
            continue  # the queue was deleted
        accesses.note_receivers(queue, now_ms)
        if core.idle_times.kept and (queue.is_in_use or queue.counts[Place.SCHEDULED] or due == Due.PUBLISHING):
            idleness.use(core, queue.id, now_ms)  # even if what uses the entity ends with this timer
        OF_QUEUE[due](core, queue, now_ms)


def _time_out_transactions(core: Core, entity_id: int, now_ms: int) -> None:
    """End the transactions of the partition that have taken too long; they are of no entity."""
    transactions.time_out(core, now_ms)


def _delete_unused(core: Core, entity_id: int, now_ms: int) -> None:
    if idleness.has_ended(core, entity_id, now_ms):
        entities.delete_unused(core, entity_id, now_ms)


def _end_locks(core: Core, queue: Queue, now_ms: int) -> None:
    if queue.sessions is None:
        settlement.end_locks(core, queue, now_ms)
    else:
        session_locks.end_locks(core, queue, now_ms)


def _expire(core: Core, queue: Queue, now_ms: int) -> None:
    expiry.sweep(core, queue, now_ms)
    deferred_expiry.sweep(core, queue, now_ms)


def _forward(core: Core, queue: Queue, now_ms: int) -> None:
    """Let the turn forward again, unless the queue was moved away, and does not forward since it came back."""
    if queue.outbox is not None or queue.transfers is not None:
        core.turn.outgoing[queue.id] = queue


# Each kind is in one of these. Those of the first concern no open queue, and are no use of an entity.
OF_ENTITY: Final[dict[int, Callable[[Core, int, int], None]]] = {
    Due.DELETION: moves.delete_step,
    Due.TRANSACTIONS: _time_out_transactions,
    Due.IDLE: _delete_unused,
}
OF_QUEUE: Final[dict[int, Callable[[Core, Queue, int], None]]] = {
    Due.SCHEDULED: schedule.activate,
    Due.EXPIRY: _expire,
    Due.LOCKS: _end_locks,
    Due.FORWARDING: _forward,
    Due.DUPLICATES: duplicates.work,
    Due.SESSION_WAITS: session_locks.end_waits,
    Due.PUBLISHING: publishing.publish_waiting,
}
