"""The counts of an entity, from those of its queues."""

from collections.abc import Mapping, Sequence

from broker.gateway.namespace import Entity
from protocol.addresses import Part


def counted_queues(entity: Entity) -> list[int]:
    """The queue ids to ask the counts of."""
    return [entity.queue(part) for part in Part]


def entity_counts(entity: Entity, counts: Mapping[int, Sequence[int]]) -> dict[str, int]:
    """What `counts` of partitions say of the entity, as the metrics have it: deferred and locked ones are active."""
    of = {part: counts.get(entity.queue(part), (0,) * 5) for part in Part}
    available, deferred, scheduled, _, locked = of[Part.MAIN]
    return {
        "active": available + deferred,
        "locked": locked,
        "deferred": deferred,
        "scheduled": scheduled,
        "dead-lettered": sum(of[Part.DEAD_LETTER][:3]),
        "transfer-dead-lettered": sum(of[Part.TRANSFER_DEAD_LETTER][:3]),
        "size-bytes": sum(each[3] for each in of.values()),
    }
