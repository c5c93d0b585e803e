"""What a worker's log says about messages besides the changes of the tables: why they enter and leave queues.

The changes of a turn show which messages enter and leave which queues, so that nothing can be forgotten. Beside them a
turn has *hints* for the journal, of each partition a list of lists that begin with their kind:

    [NAMED, entity id, path]
    [DONE, op, queue id, numbers, delivery counts or None, reason or None, time ms or None]
    [DONE_RUN, op, queue id, first number, messages, delivery count of each, reason or None, time ms or None]
    [MOVED, op, queue id, numbers, delivery counts or None, queue id, first number, reason or None]
    [ENTERED, queue id, numbers, reason, queue id of origin or None, numbers there or None]
    [BARE, op, queue id, message ids, copies or None, queue id of origin or None, numbers there or None]
    [TAKEN_OVER, queue id, number]
    [STAGED, queue id, message id]
    [STATES, queue id, reason]

- NAMED comes before the first other hint and the first change of that entity since the worker was started.
- DONE: why these messages leave their queue, or what else happened to them. A time is given if it is not the turn's:
  a turn that only hands out messages changes nothing, and its hints wait for the next frame.
- DONE_RUN: as DONE, of at most RUN_MAX messages with consecutive numbers and the same delivery count.
- MOVED: these leave by `op`, and enter the second queue under consecutive numbers.
- ENTERED: these come from elsewhere.
- BARE: messages that were accepted and not stored in this queue. An id is bytes (one encoded AMQP value) or None.
- TAKEN_OVER: the partition has the messages that this queue of another partition forwarded to it, up to this number.
- STAGED: a record of an open transaction is stored, for an entry that this queue may get in a later turn.
- STATES: why states of sessions of this queue are set and cleared in this turn, if it is not a client that does.
"""

from enum import IntEnum


class Hint(IntEnum):
    NAMED = 0
    DONE = 1
    MOVED = 2
    ENTERED = 3
    BARE = 4
    TAKEN_OVER = 5
    STAGED = 6
    STATES = 7
    DONE_RUN = 8


RUN_MAX = 1 << 16


class Op(IntEnum):
    """What happened to a message. In the log, so numbers are never changed; in the journal by `name_of`."""

    # It enters a queue.
    ENQUEUED = 1
    SCHEDULED = 2
    # It leaves its queue for good.
    COMPLETED = 10
    DEAD_LETTERED = 11
    EXPIRED = 12
    PURGED = 13
    CANCELLED = 14
    ACTIVATED = 15
    FORWARDED = 16
    PUBLISHED = 17
    QUARANTINED = 18
    MOVED = 19
    # It stays.
    DELIVERED = 30
    ABANDONED = 31
    RELEASED = 32
    DEFERRED = 33
    LOCK_EXPIRED = 34
    LOCK_LOST = 35
    RETURNED = 36
    CHANGED = 37  # at the other side of a move: it is there now as the reason says, which is the name of a place
    # It was never in the queue.
    DUPLICATE = 50
    PING = 51
    # No message: offsets are missing before this one.
    TRUNCATED = 60
    # No message: what the row's queue forwarded to this partition is here, up to the number of the row's origin.
    TAKEN_OVER = 61
    # No message: a body, which a message may get that enters later. Both rows have the same number of origin, below 0.
    STAGED = 62
    # No message: the state of a session of this queue. It goes with its entity, too, when that is deleted or moved.
    STATE_SET = 63
    STATE_CLEARED = 64


ENTERING = frozenset({Op.ENQUEUED, Op.SCHEDULED})
LEAVING = frozenset(op for op in Op if 10 <= op < 30)

_NAMES = {
    Op.DEAD_LETTERED: "deadlettered",
    Op.LOCK_EXPIRED: "lockExpired",
    Op.LOCK_LOST: "lockLost",
    Op.TAKEN_OVER: "takenOver",
    Op.STATE_SET: "stateSet",
    Op.STATE_CLEARED: "stateCleared",
}
ELSEWHERE = "elsewhere"  # the reason of a row `forwarded`: to another partition, which says what it has taken over
DAMAGED = "damaged"  # the reason of a row `truncated` that stands for rows that cannot be read


def name_of(op: Op) -> str:
    """Return what the column `op` of the journal says for `op`."""
    return _NAMES.get(op, op.name.lower())
