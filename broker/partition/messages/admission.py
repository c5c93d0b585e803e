"""Checks whether queues and topics accept the messages that are sent to them."""

from collections.abc import Mapping, Sequence
from typing import Any

from broker.errors import EntityDisabled, NotAllowed, QuotaExceeded
from broker.partition.state.bodies import staged_id
from broker.partition.state.core import Core
from broker.partition.state.queue import Queue
from broker.partition.state.terms import Kind
from broker.wire import Extra
from protocol import error_texts
from storage.queue_ids import Part, queue_id_of, with_part
from storage.records import MESSAGE_HEADER_BYTES, Place

Incoming = Sequence[Any]  # layout, body, ttl_ms | None, extra | None: see broker.wire


_TRANSFER = Part.TRANSFER
_COUNTED = (Part.DEAD_LETTER, Part.TRANSFER_DEAD_LETTER)
_COUNTED_OF_TOPIC = (Part.TRANSFER_DEAD_LETTER,)
_SUBSCRIPTION = Kind.SUBSCRIPTION
_PING, _SCHEDULED_MS, _SESSION_ID = Extra.PING, Extra.SCHEDULED_MS, Extra.SESSION_ID


def check(
    core: Core, sends: Sequence[tuple[Queue, Sequence[Incoming]]], grown: Mapping[int, int] | None = None
) -> None:
    """Raises NotAllowed, EntityDisabled, QuotaExceeded if not all of it can be stored. `sends` has each queue once.

    `grown` are bytes by which entities grow beside that, by the id of their main queue.
    """
    sizes: list[int] = []
    copies = queues = 0
    totals: dict[int, int] = {}  # by queue id: bytes of the entity, with the sends before
    for queue, messages in sends:
        counted = queue
        if queue.transfers is None:
            _check_entity(queue, messages)
        else:
            counted = core.queue(queue_id_of(queue.entity_id if queue.topic_id is None else queue.topic_id))
        size_bytes = total = (
            totals[counted.id]
            if counted.id in totals
            else entity_size(core, counted) + (grown.get(counted.id, 0) if grown else 0)
        )
        staged = core.bodies.staged
        for _, body, _, extra in messages:
            size = len(body) + MESSAGE_HEADER_BYTES
            total += size
            if not (staged and staged_id(extra)):
                sizes.append(size)
        totals[counted.id] = total
        if total > counted.terms.size_bytes_max:
            raise too_large(counted, size_bytes)
        if queue.is_topic:
            # Only copies that are certain, also of messages that wait at the topic. Copies by rules can wait for room.
            all_taking = len(core.topic(queue.entity_id).for_all)
            copies += all_taking * (queue.counts[Place.AVAILABLE] + sum(map(_is_for_now, messages)))
            queues += all_taking
    _check_room(core, sizes, copies, queues)


def check_sizes(core: Core, queue: Queue, sizes: list[int], subscriptions: int = 0) -> None:
    """Check as `check` does, for records of these sizes and a queue without sessions, or a topic without a backlog.

    `subscriptions` take all of a topic's messages.
    """
    _check_entity(queue, ())
    size_bytes = entity_size(core, queue)
    if size_bytes + sum(sizes) > queue.terms.size_bytes_max:
        raise too_large(queue, size_bytes)
    _check_room(core, sizes, subscriptions * len(sizes), subscriptions)


def _check_room(core: Core, sizes: list[int], copies: int = 0, queues: int = 0) -> None:
    if not core.has_room(sizes, copies, queues):
        raise QuotaExceeded("The store of this partition is nearly full; messages must be received first.")


def _check_entity(queue: Queue, messages: Sequence[Incoming]) -> None:
    terms = queue.terms
    if queue.is_dead_letter:
        raise NotAllowed(f"Messages cannot be sent to the dead-letter queue of '{terms.name}'.")
    if terms.kind == _SUBSCRIPTION:
        raise NotAllowed(f"Messages cannot be sent to the subscription '{terms.name}'; send them to its topic.")
    if not terms.can_send:
        raise EntityDisabled(error_texts.send_disabled(terms.name))
    if queue.sessions is not None and not all(map(_has_session, messages)):
        raise NotAllowed(error_texts.session_id_missing(terms.name))


def entity_size(core: Core, queue: Queue) -> int:
    """Bytes that count for the quota of a queue or topic; `queue` is its main part.

    For a queue these are the records of its messages in any place, also in its dead-letter and transfer queues, and its
    sessions' states. For a topic these are the record of each of its messages once, COPY_BYTES for each copy, its
    subscriptions' session states, and the records in its transfer queues.
    """
    counted = queue.counted_with
    if counted is None:
        parts = _COUNTED if queue.terms.kind == Kind.QUEUE else _COUNTED_OF_TOPIC
        others = [core.queue(with_part(queue.id, part)) for part in parts]
        # A transfer queue with messages is always open, because META lists its lanes.
        transfers = core.queues.get(with_part(queue.id, _TRANSFER))
        counted = queue.counted_with = (*others, transfers) if transfers is not None else tuple(others)
    size_bytes = queue.size_bytes
    for other in counted:
        size_bytes += other.size_bytes
    return size_bytes


def too_large(queue: Queue, size_bytes: int) -> QuotaExceeded:
    terms = queue.terms
    return QuotaExceeded(
        f"The maximum entity size has been reached or exceeded for '{terms.name}'. "
        f"Size of entity in bytes: {size_bytes}, max entity size in bytes: {terms.size_bytes_max}."
    )


def _is_for_now(message: Incoming) -> bool:
    extra = message[3]
    return extra is None or _SCHEDULED_MS not in extra


def _has_session(message: Incoming) -> bool:
    """True also for a ping, which is not stored and needs no session."""
    extra = message[3]
    return extra is not None and (_SESSION_ID in extra or _PING in extra)
