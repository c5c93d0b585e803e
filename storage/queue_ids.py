"""Queue ids: the entity that a queue belongs to, and which of the entity's queues it is.

In stored keys an id has 32 bits: 29 bits of entity id, then 3 bits of `Part`. So the queues of one entity are adjacent
in every table. Only this module knows this layout.
"""

from enum import IntEnum
from typing import NewType

QueueId = NewType("QueueId", int)

_PART_BITS = 3
_PART_MASK = (1 << _PART_BITS) - 1


class Part(IntEnum):
    """The queues of one entity."""

    MAIN = 0
    DEAD_LETTER = 1
    TRANSFER_DEAD_LETTER = 2
    TRANSFER = 3


def queue_id_of(entity_id: int, part: int = Part.MAIN) -> QueueId:
    return QueueId(entity_id << _PART_BITS | part)


def entity_of(queue_id: int) -> int:
    """The id of the entity that the queue is of."""
    return queue_id >> _PART_BITS


def part_of(queue_id: int) -> int:
    """A `Part`; or a number that is no `Part`, because ids may come from outside."""
    return queue_id & _PART_MASK


def with_part(queue_id: int, part: Part) -> QueueId:
    """Another queue of the same entity."""
    return QueueId(queue_id & ~_PART_MASK | part)
