"""The counts of an entity, from those of its queues, and its last access; from the answers of its partitions."""

from collections.abc import Iterable, Mapping, Sequence

from broker.gateway.namespace import Entity
from protocol.addresses import Part

_NONE = (0,) * 5


def counted_queues(entity: Entity) -> list[int]:
    """The ids of the queues whose counts are needed."""
    return [*(entity.queue(part) for part in Part), entity.transfer_queue]


def summed(counts: Iterable[Mapping[int, Sequence[int]]]) -> dict[int, list[int]]:
    """The counts of queues on several partitions together."""
    found: dict[int, list[int]] = {}
    for each in counts:
        for queue, numbers in each.items():
            found[queue] = [a + b for a, b in zip(found[queue], numbers, strict=True)] if queue in found else [*numbers]
    return found


def entity_counts(entity: Entity, counts: Mapping[int, Sequence[int]]) -> dict[str, int]:
    """The counts of the entity as the metrics show them (management.md 1.9), from the `counts` of partitions.

    Deferred and locked messages are active. In transfer are messages that wait to be moved to another entity: the
    available messages of an entity that forwards, and messages sent through the entity.
    """
    of = {part: counts.get(entity.queue(part), _NONE) for part in Part}
    transfers = counts.get(entity.transfer_queue, _NONE)
    available, deferred, scheduled, _, locked = of[Part.MAIN]
    forwarded = available if entity.forward_to(Part.MAIN) else 0
    return {
        "active": available + deferred - forwarded,
        "locked": locked,
        "deferred": deferred,
        "scheduled": scheduled,
        "dead-lettered": sum(of[Part.DEAD_LETTER][:3]),
        "transfer": forwarded + sum(transfers[:3]),
        "transfer-dead-lettered": sum(of[Part.TRANSFER_DEAD_LETTER][:3]),
        "size-bytes": sum(size_bytes for _, _, _, size_bytes, _ in (*of.values(), transfers)),
    }


def accessed_ms(entity: Entity, answers: Iterable[tuple[int, Mapping[int, int]] | None]) -> int | None:
    """The last access of the entity, from the answers of its partitions to `accessed`; None if there was none.

    That of a subscription begins with its creation, as in the cloud.

    Each is None if the partition does not answer; without any, it is the last change. A partition that was opened after
    the entity was created has perhaps forgotten an access, until then at the latest.
    """
    found = []
    for answer in answers:
        opened_ms, last_ms = answer or (0, {})
        if entity.entity_id in last_ms:
            found.append(last_ms[entity.entity_id] or (opened_ms if entity.created_ms < opened_ms else 0))
    if not found:
        return entity.updated_ms
    return max(found) or (entity.created_ms if entity.kind == "subscription" else None)
