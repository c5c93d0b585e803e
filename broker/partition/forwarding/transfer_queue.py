"""Transfer queues: they hold messages sent through one entity to others, so that one transaction can do both.

A transaction is done in one commit of one partition. A message that it sends to an entity of another partition is
stored in the transfer queue of an entity of this partition, with the name of its destination. The destination checks
the message when it arrives there. From then on it is forwarded as other messages are (`source`), exactly once, even if
the entity is disabled, because its sender was told that it is done. A message that the destination refuses goes to the
transfer dead-letter queue.
"""

from collections.abc import Sequence

from broker.namespace.fragments import key_of
from broker.partition.messages import stored
from broker.partition.messages.admission import Incoming
from broker.partition.messages.deliveries import READ_MAX, WEIGHT_BYTES
from broker.partition.messages.entering import enter, enter_scheduled
from broker.partition.messages.expiry import end_of_life
from broker.partition.messages.leaving import set_aside
from broker.partition.messages.moves import move
from broker.partition.messages.shared_bodies import grow
from broker.partition.state.bodies import staged_id, with_times
from broker.partition.state.core import Core
from broker.partition.state.lanes import Transfers
from broker.partition.state.locks import Held
from broker.partition.state.outbox import Outbox
from broker.partition.state.queue import Queue
from broker.partition.state.timers import Due
from broker.partition.state.window import Ref, message_id_of
from broker.wire import Extra
from storage.journal.events import Op
from storage.records import (
    MESSAGE_HEADER_BYTES,
    NEVER,
    Field,
    Overlay,
    Place,
    due_key,
    encode_document,
    encode_entry,
    encode_message,
    forwarded_key,
    message_key,
    queue_key,
    unpack_queue_key,
)
from storage.store import Table

FETCH = 1024  # entries read ahead at once


def store(core: Core, queue: Queue, transfers: Transfers, messages: Sequence[Incoming], now_ms: int) -> list[int]:
    """Store messages as `sending.store` does, in a transfer queue: each message names its destination.

    A scheduled message waits here. The time to live counts as usual; the entity's own does not shorten it.
    """
    first, wall_ms = queue.next_number, core.wall_ms(now_ms)
    number = first
    next_id = core.bodies.next_id
    records: list[bytes] = []
    adopted: list[int] = []
    entries: list[tuple[bytes, bytes]] = []
    due: list[tuple[bytes, bytes]] = []
    refs: list[Ref] = []
    scheduled: list[Ref] = []
    numbers: list[int] = []
    size_bytes, earliest_ms = 0, NEVER
    for layout, body, ttl_ms, extra in messages:
        if extra.get(Extra.PING):
            queue.tally.pings += 1
            core.journal.bare(Op.PING, queue.id, [extra.get(Extra.MESSAGE_ID)])
            numbers.append(0)
            continue
        name = extra[Extra.DESTINATION]
        partition = core.entities.partition_for(name, key_of(extra), number)
        add_lane(core, queue, transfers, partition, first)
        overlay: Overlay = {Field.DESTINATION: name, Field.LANE: partition}
        staged = staged_id(extra)
        message_id = staged or next_id
        scheduled_ms = extra.get(Extra.SCHEDULED_MS) or 0
        enqueued_ms = scheduled_ms if scheduled_ms > wall_ms else now_ms
        expires_ms = end_of_life(enqueued_ms, ttl_ms)
        place = Place.AVAILABLE
        if scheduled_ms > wall_ms:
            place = Place.SCHEDULED
            if expires_ms != NEVER:
                overlay[Field.EXPIRES_MS] = expires_ms
            due.append((due_key(queue.id, Due.SCHEDULED, scheduled_ms, number), message_key(message_id)))
            earliest_ms = min(earliest_ms, scheduled_ms)
            scheduled.append((number, message_id, 0, overlay))
        else:
            if staged:
                overlay = with_times(overlay, enqueued_ms, expires_ms)
            refs.append((number, message_id, 0, overlay))
        if staged:
            adopted.append(staged)
        else:
            records.append(encode_message(enqueued_ms, expires_ms, layout, body))
            next_id += 1
        size_bytes += MESSAGE_HEADER_BYTES + len(body)
        entries.append((queue_key(queue.id, place, number), encode_entry(message_id, 0, overlay)))
        numbers.append(number)
        number += 1

    queue.tally.incoming += len(messages)
    if not entries:
        return numbers
    core.changing()
    core.bodies.append(records, keep=True)
    core.bodies.adopt(adopted)
    core.store.insert_many(Table.QUEUE, entries)
    core.turn.work += len(entries)
    if queue.topic_id is not None:
        grow(core, queue.topic_id, size_bytes, len(entries))
    enter(core, queue, refs, range(first, number), size_bytes)
    if scheduled:
        core.store.insert_many(Table.DUE, due)
        enter_scheduled(core, queue, scheduled, 0, earliest_ms, now_ms)
    return numbers


def add_lane(core: Core, queue: Queue, transfers: Transfers, partition: int, first: int) -> None:
    """Before the first message for a partition, which has this number or a higher one."""
    if partition not in transfers.lanes:
        core.changing()
        transfers.add(partition, first)
        core.store.put(Table.META, forwarded_key(queue.id), encode_document(sorted(transfers.lanes)))


def transfer(
    core: Core, queue: Queue, target: Queue, held: Held, overlay: Overlay, destination: str, partition: int
) -> None:
    """Move a message of `queue`, which forwards, to `target`, the transfer queue of its entity.

    `destination` is a name in lower case, and `partition` the one that the message goes to.
    """
    assert target.transfers is not None
    add_lane(core, target, target.transfers, partition, target.next_number)
    own = {**overlay, Field.DESTINATION: destination, Field.LANE: partition}
    move(core, queue, held, target, own, Op.FORWARDED)


def take(
    core: Core, queue: Queue, lane: Outbox, count: int, limit_bytes: int
) -> tuple[list[tuple[Ref, bytes]], int, bool]:
    """The next messages of a lane with their records, out of its window; their bytes; True if there may be more."""
    window = lane.window
    refs = window.next(count)
    while len(refs) < count and window.cursor < queue.next_number and core.work_left() > 0:
        _fetch(core, queue, lane)
        refs += window.next(count - len(refs))
    more = len(refs) == count or window.cursor < queue.next_number
    taken: list[tuple[Ref, bytes]] = []
    used_bytes = at = 0
    average_bytes = queue.size_bytes // (sum(queue.counts) or 1) + WEIGHT_BYTES
    while at < len(refs):
        wanted = min(READ_MAX, (limit_bytes - used_bytes) // average_bytes + 1)
        records = core.bodies.read([*map(message_id_of, refs[at : at + wanted])])
        for ref, record in zip(refs[at:], records, strict=False):
            at += 1
            if record is None:
                number, message_id, _, _ = ref
                set_aside(core, queue, Place.AVAILABLE, number, message_id)
                continue
            taken.append((ref, record))
            used_bytes += len(record) + WEIGHT_BYTES
            if used_bytes >= limit_bytes:
                for unused in refs[at:]:
                    window.put_back(unused)
                return taken, used_bytes, True
    return taken, used_bytes, more


def _fetch(core: Core, queue: Queue, lane: Outbox) -> None:
    """Read the next entries behind the end of the lane's window, and take those that are for its partition."""
    assert queue.transfers is not None
    assert lane.partition is not None
    window = lane.window
    start = queue_key(queue.id, Place.AVAILABLE, window.cursor)
    items = core.store.scan(Table.QUEUE, start, queue_key(queue.id, Place.DEFERRED, 0), FETCH)
    core.turn.work += 1 + len(items)
    refs = stored.read_entries(core, queue, items)
    cursor = queue.next_number
    if len(items) == FETCH:
        last_key, _ = items[-1]
        _, _, last_number = unpack_queue_key(last_key)
        cursor = last_number + 1
    window.fill(queue.transfers.of(lane.partition, refs), cursor)
