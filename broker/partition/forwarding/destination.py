"""Messages that other entities forward to an entity of this partition: taken over once each, or refused.

Another partition sends messages again whenever it does not know whether they were taken over, in the order of its
queue's sequence numbers. The mark is the highest number that was taken over; it is written in the same commit as the
messages. A message that is refused for good stays above the mark, so that no message after it is taken over until its
own queue has moved it elsewhere.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from broker.errors import BrokerError, EntityDisabled, EntityNotFound, NotAllowed, SessionIdMissing
from broker.namespace.fragments import key_of
from broker.partition.messages.admission import entity_size, too_large
from broker.partition.messages.duplicates import sift
from broker.partition.messages.entering import append
from broker.partition.messages.expiry import end_of_life
from broker.partition.sessions.membership import session_id_in, session_id_of
from broker.partition.state.core import Core
from broker.partition.state.idleness import refuses, use
from broker.partition.state.queue import Queue
from broker.partition.state.terms import Kind
from broker.partition.topics.publishing import FORWARDED, publish_forwarded
from broker.wire import Extra
from protocol import error_texts
from protocol.errors import ProtocolError
from protocol.message.intake import extra_of
from protocol.message.rendering import with_changes
from storage.quarantine import quarantine
from storage.queue_ids import Part, entity_of, part_of, queue_id_of
from storage.records import (
    NEVER,
    CorruptRecord,
    Field,
    Overlay,
    decode_mark,
    encode_mark,
    mark_key,
    message_expires_ms,
    message_parts,
)
from storage.store import Table

MESSAGE_ID = 0  # field of AMQP's properties section (3.2.4)
ENTRY = 3  # items per message in FORWARD: sequence number, message record, overlay

Arrival = tuple[int, bytes, Overlay]  # sequence number where it comes from, message record, overlay
Entering = tuple[int, int, int, int, Overlay]  # that number, message id, bytes and expiry of the record, overlay


class Verdict(NamedTuple):
    """The first `accepted` messages can be taken over; those after them are refused for good, each with its error.

    The verdict may end before the last message: at the first one that could be taken over after a refused one.
    """

    accepted: int
    refused: list[BrokerError]


class Refused(NamedTuple):
    """Messages that are refused for good, for the same reason; an item of the answer `Op.FORWARDED` (broker.wire)."""

    name: str  # class name of the error
    text: str
    numbers: list[int]  # sequence numbers


def refusal(core: Core, entity_id: int, name: str = "") -> BrokerError | None:
    """The reason why nothing can be forwarded to the entity, apart from its size; `name` is its name, if known.

    A single message may be refused for another reason: see `judge`.
    """
    terms = core.entities.terms.get(entity_id)
    if terms is None:
        entity = f"The entity '{name}'" if name else "The entity"
        return EntityNotFound(f"{entity} that messages are forwarded to could not be found.")
    if terms.kind == Kind.SUBSCRIPTION:
        return NotAllowed(f"Messages cannot be forwarded to the subscription '{terms.name}'.")
    if not terms.can_send:
        return EntityDisabled(error_texts.send_disabled(terms.name))
    return None


def judge(core: Core, entity_ids: Sequence[int], messages: Sequence[tuple[bytes, Overlay]]) -> Verdict:
    """The verdict on messages for these entities: records and overlays.

    The overlay of a message for a queue with sessions gets its session. One without a session is refused.
    """
    errors = {entity_id: refusal(core, entity_id) for entity_id in dict.fromkeys(entity_ids)}
    queues = {entity_id: core.queue(queue_id_of(entity_id)) for entity_id, error in errors.items() if error is None}
    used = {entity_id: entity_size(core, queue) for entity_id, queue in queues.items()}
    accepted = 0
    refused: list[BrokerError] = []
    for entity_id, (record, overlay) in zip(entity_ids, messages, strict=True):
        error, size = errors[entity_id], len(record)
        if error is None and queues[entity_id].sessions is not None:
            error = _without_session(record, overlay)
        if error is None and used[entity_id] + size > queues[entity_id].terms.size_bytes_max:
            error = too_large(queues[entity_id], used[entity_id])
        if error is not None:
            refused.append(error)
        elif refused:
            break
        else:
            used[entity_id] += size
            accepted += 1
    return Verdict(accepted, refused)


def _without_session(record: bytes, overlay: Overlay) -> SessionIdMissing | None:
    """Tells the overlay its message's session; returns the reason to refuse a message that has none (DL4)."""
    session_id = session_id_of(overlay, session_id_in(record))
    if session_id is None:
        return SessionIdMissing(error_texts.SESSION_ID_NOT_SET)
    overlay[Field.SESSION] = session_id
    return None


def take_over(
    core: Core, store_id: bytes, source: int, entity_id: int, entries: Sequence[Any], now_ms: int
) -> tuple[int, list[Refused], str]:
    """Take over what the queue `source` of the store `store_id` forwards; `entries` are flat, ENTRY items each.

    All messages are for the entity; with `entity_id` 0 each overlay names its own destination.

    Returns the sequence number up to which messages are taken over, now or before; the next ones that are refused for
    good; and the reason why no more can be taken over now, if there is one. Without entries it only returns the mark.
    """
    key = mark_key(store_id, source)
    mark = _mark(core, key)
    numbers = entries[0::ENTRY]
    if not numbers:
        return mark, [], ""
    if entity_of(source) not in core.entities.terms:
        # The entity is not known here yet, or it is being deleted: then its mark must not be made again.
        return mark, [], "The entity that forwards is not known to the destination's partition yet."
    new = next((at for at, number in enumerate(numbers) if number > mark), len(numbers))
    records: list[bytes] = list(entries[1::ENTRY][new:])
    if not core.has_room([len(record) for record in records]):
        return mark, [], "The store of the destination's partition is nearly full."
    overlays: list[Overlay] = list(entries[2::ENTRY][new:])
    entity_ids = [entity_id or overlay.pop(Field.DESTINATION) for overlay in overlays]
    if any(refuses(core, queue_id_of(destination)) for destination in set(entity_ids)):
        return mark, [], "The destination is being moved, or perhaps deleted because nobody has used it."
    verdict = judge(core, entity_ids, list(zip(records, overlays, strict=True)))
    if verdict.accepted:
        arrived: dict[int, list[Arrival]] = {}
        for at in range(verdict.accepted):
            arrived.setdefault(entity_ids[at], []).append((numbers[new + at], records[at], overlays[at]))
        core.journal.named(entity_of(source), core.entities.terms[entity_of(source)].name)
        for destination, messages in arrived.items():
            use(core, queue_id_of(destination), now_ms)
            arrive(core, core.access(queue_id_of(destination), now_ms), messages, source, now_ms)
        mark = numbers[new + verdict.accepted - 1]
        core.store.put(Table.MARKS, key, encode_mark(mark))
        core.journal.taken_over(source, mark)
    refused: list[Refused] = []
    for number, error in zip(numbers[new + verdict.accepted :], verdict.refused, strict=False):
        name, text = type(error).__name__, str(error)
        if not refused or (refused[-1].name, refused[-1].text) != (name, text):
            refused.append(Refused(name, text, []))
        refused[-1].numbers.append(number)
    return mark, refused, ""


def _mark(core: Core, key: bytes) -> int:
    value = core.store.get(Table.MARKS, key)
    if value is None:
        return 0
    try:
        return decode_mark(value)
    except CorruptRecord:
        # Without the mark a message on its way may come twice, which is better than to lose it.
        quarantine(core.store, Table.MARKS, key)
        return 0


def arrive(core: Core, queue: Queue, messages: Sequence[Arrival], source: int, now_ms: int) -> None:
    """Store messages that `judge` has accepted for the queue or topic. Changes their overlays.

    They come from the queue `source`.
    """
    # What an entity forwards to itself is no duplicate: it would be dropped for being there.
    is_own = entity_of(source) == queue.entity_id and part_of(source) in (Part.MAIN, Part.DEAD_LETTER)
    if queue.terms.duplicate_window_ms and not is_own:
        messages = _without_duplicates(core, queue, messages, source, now_ms)
    if queue.terms.kind == Kind.TOPIC:
        publish_forwarded(core, queue, messages, source, now_ms)
        return
    first = core.bodies.next_id
    core.bodies.append([record for _, record, _ in messages], keep=queue.is_awaited)
    enter(
        core,
        queue,
        [
            (number, message_id, len(record), message_expires_ms(record), overlay)
            for message_id, (number, record, overlay) in enumerate(messages, first)
        ],
        source,
        now_ms,
    )


def _without_duplicates(
    core: Core, queue: Queue, messages: Sequence[Arrival], source: int, now_ms: int
) -> list[Arrival]:
    """Remove duplicates. An id that a rule's action has set counts as the message's own (management.md 3.1)."""
    extras = [_extra(record, overlay) or {} for _, record, overlay in messages]
    if queue.sessions is not None:
        for extra, (_, _, overlay) in zip(extras, messages, strict=True):
            session_id = session_id_of(overlay, extra.pop(Extra.SESSION_ID, None))
            if session_id is not None:
                extra[Extra.SESSION_ID] = session_id
    repeats = sift(core, queue, extras, now_ms, origin=(source, [number for number, _, _ in messages]))
    queue.tally.incoming += len(repeats)
    return [message for index, message in enumerate(messages) if index not in repeats]


def _extra(record: bytes, overlay: Overlay) -> dict[int, Any] | None:
    """The extra map of the message, with an id that was set since; None if the message cannot be read."""
    layout, body = message_parts(record)
    system = overlay.get(Field.SYSTEM) or {}
    try:
        if MESSAGE_ID in system:
            layout, body = with_changes(layout, body, {}, {MESSAGE_ID: system[MESSAGE_ID]})
        return extra_of(layout, body)
    except ProtocolError:
        return None  # actions have made a message that nobody could send: it counts as new


def key_in(record: bytes, overlay: Overlay, detects_duplicates: bool) -> bytes | None:
    """The key of a forwarded message at a partitioned entity: see `broker.namespace.fragments.key_of`."""
    extra = dict(_extra(record, overlay) or {})
    session_id = session_id_of(overlay, extra.pop(Extra.SESSION_ID, None))
    if session_id is not None:
        extra[Extra.SESSION_ID] = session_id
    if not detects_duplicates:
        extra.pop(Extra.MESSAGE_ID, None)
    return key_of(extra)


def enter(core: Core, queue: Queue, messages: Sequence[Entering], source: int, now_ms: int) -> None:
    """Append stored records, which come from the queue `source`, to a queue. Changes their overlays.

    The time to live continues, but the queue's own may end it earlier.
    """
    limit_ms = end_of_life(now_ms, queue.terms.time_to_live_ms)
    expiring: list[tuple[int, int]] = []
    entries: list[tuple[int, int, Overlay | None]] = []
    there: list[int] = []
    size_bytes = 0
    for number_there, message_id, size, expires_ms, overlay in messages:
        expires_ms = overlay.get(Field.EXPIRES_MS, expires_ms)
        if expires_ms > limit_ms:
            overlay[Field.EXPIRES_MS] = expires_ms = limit_ms
        if expires_ms != NEVER:
            expiring.append((len(entries), expires_ms))
        overlay[Field.ENQUEUED_MS] = now_ms
        entries.append((message_id, 0, overlay))
        there.append(number_there)
        size_bytes += size
    first = queue.next_number
    core.journal.entered(queue.id, range(first, first + len(entries)), FORWARDED, source, there)
    append(core, queue, entries, size_bytes, expiring)
    queue.tally.incoming += len(entries)
