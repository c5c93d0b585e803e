"""The side of a move that an entity comes to: it stores the rows of the other side, and nobody uses them yet.

Message ids are of one partition, so each record gets a new one here. An entry of a queue has a record of its own, and
comes with it whenever it is new. The entries of a topic's subscriptions share records. So META says which record here
is which one of the other partition, until the entity lives here or the move is given up.
"""

from collections.abc import Sequence
from typing import Any

from broker.errors import InvalidArgument, QuotaExceeded, ServerBusy
from broker.partition.messages.shared_bodies import refer, release
from broker.partition.moving.departure import OF_ENTITIES
from broker.partition.state.core import Core
from broker.partition.state.timers import Due
from storage.journal.events import Op
from storage.queue_ids import entity_of
from storage.records import (
    ARRIVED_AS_PREFIX,
    ARRIVED_FROM_PREFIX,
    CorruptRecord,
    Entry,
    Place,
    arriving_key,
    decode_document,
    encode_document,
    encode_entry,
    entity_key,
    entry_or_none,
    message_key,
    queue_key,
    unpack_due_key,
    unpack_queue_key,
)
from storage.store import Table

NO_MESSAGE = 0  # no message has this id, so it is found missing, as where the entry comes from
FULL = "The store of the partition that the entity is moved to is nearly full."


def begin(core: Core, token: bytes, entity_ids: Sequence[int]) -> None:
    """Make ready for the rows of this entity and its subscriptions. Raises ServerBusy, InvalidArgument."""
    for entity_id in entity_ids:
        if entity_id not in core.entities.terms or core.entities.lives_here(entity_id):
            raise InvalidArgument("The entity lives on this partition already, or is not known to it yet.")
        if entity_id in core.entities.deleted or entity_id in core.entities.arriving:
            raise ServerBusy("What an earlier move left here is still being deleted. Please try again.")
    core.changing()
    for entity_id in entity_ids:
        rules = core.store.scan(Table.RULES, entity_key(entity_id), entity_key(entity_id + 1), 1 << 32)
        core.store.delete_many(Table.RULES, [key for key, _ in rules])  # theirs come
        core.entities.arriving[entity_id] = token
        core.store.put(Table.META, arriving_key(entity_id), encode_document(token))


def store(core: Core, token: bytes, rows: Sequence[Sequence[Any]]) -> None:
    """Store rows of `Departure.rows`. Raises InvalidArgument, QuotaExceeded."""
    if any(core.entities.arriving.get(_entity_of(table, key)) != token for table, key, _, _ in rows):
        raise InvalidArgument("The move has ended.")
    sizes = [len(record) for _, _, _, record in rows if record is not None]
    if not core.has_room(sizes, copies=len(rows)):
        raise QuotaExceeded(FULL)
    core.changing()
    put, gone = core.store.put, []
    _journal_states(core, rows)
    for number, key, value, record in rows:
        if number == Table.QUEUE and value is None:
            gone.append(key)
        elif number == Table.QUEUE:
            _journal(core, key, value)
            put(Table.QUEUE, key, _entry_here(core, key, value, record))
        elif value is None:
            core.store.delete(Table(number), key)
        else:
            put(Table(number), key, value if number != Table.DUE else message_key(_message_of_timer(core, key)))
    for key in gone:  # after the others, which may refer to the same records
        _delete_entry(core, key)
    core.turn.work += len(rows)


def _journal(core: Core, key: bytes, value: bytes) -> None:
    """This key of QUEUE is about to be written: it comes, or its entry has changed meanwhile."""
    if not core.journal.is_on:
        return
    queue_id, place, number = unpack_queue_key(key)
    core.journal.named(entity_of(queue_id), core.entities.terms[entity_of(queue_id)].name)
    is_here = _is_here(core, queue_id, number)
    if not is_here:
        core.journal.entered(queue_id, [number], "moved", queue_id, [number])
    if is_here or place == Place.DEFERRED:
        entry = entry_or_none(value)
        if entry is not None:  # else it is quarantined when it is read
            core.journal.changed(queue_id, number, entry.delivery_count, Place(place))


def _journal_states(core: Core, rows: Sequence[Sequence[Any]]) -> None:
    """Note for the journal that states of sessions among the rows are about to be written or deleted."""
    if not core.journal.is_on:
        return
    for queue_id in sorted(
        {int.from_bytes(key[:4], "big") for table, key, _, _ in rows if table == Table.SESSION_STATES}
    ):
        core.journal.named(entity_of(queue_id), core.entities.terms[entity_of(queue_id)].name)
        core.journal.states(queue_id, "moved")


def _is_here(core: Core, queue_id: int, number: int) -> bool:
    return any(core.store.get(Table.QUEUE, queue_key(queue_id, place, number)) is not None for place in Place)


def _entity_of(table: int, key: bytes) -> int:
    if table == Table.META:
        return entity_of(int.from_bytes(key[-4:], "big"))
    number = int.from_bytes(key[:4], "big")
    return number if table in OF_ENTITIES else entity_of(number)


def _entry_here(core: Core, key: bytes, value: bytes, record: bytes | None) -> bytes:
    """The entry with the message id that its record has here."""
    entry = entry_or_none(value)
    if entry is None:
        return value  # it is quarantined when it is read
    theirs, delivery_count, overlay = entry
    if (known := _entry(core, key)) is not None:
        message_id = known.message_id
    elif record is None:
        message_id = NO_MESSAGE
    elif (topic_id := _topic_of(core, key)) is None:
        message_id = _append(core, record)
    else:
        message_id = _shared(core, topic_id, theirs, record)
    return encode_entry(message_id, delivery_count, overlay)


def _delete_entry(core: Core, key: bytes) -> None:
    entry, topic_id = _entry(core, key), _topic_of(core, key)
    if core.store.get(Table.QUEUE, key) is None:
        return
    core.store.delete(Table.QUEUE, key)
    queue_id, _, number = unpack_queue_key(key)
    if core.journal.is_on and not _is_here(core, queue_id, number):  # else it has only changed its place
        core.journal.gone(Op.MOVED, queue_id, [number])
    if entry is None:
        return
    if topic_id is None:
        core.store.delete(Table.MESSAGES, message_key(entry.message_id))
        return
    release(core, topic_id, [entry.message_id], [0])
    if core.store.get(Table.MESSAGES, message_key(entry.message_id)) is None:
        as_key = _as_key(topic_id, entry.message_id)
        if (theirs := core.store.get(Table.META, as_key)) is not None:
            core.store.delete_many(Table.META, (as_key, _from_key(topic_id, decode_document(theirs))))


def _entry(core: Core, key: bytes) -> Entry | None:
    """The entry that is stored here under this key; None if there is none, or it cannot be read."""
    return entry_or_none(core.store.get(Table.QUEUE, key))


def _append(core: Core, record: bytes) -> int:
    message_id = core.bodies.next_id
    core.bodies.append([record], keep=False)
    return message_id


def _message_of_timer(core: Core, key: bytes) -> int:
    """Entries come before their timers. A key of no timer is quarantined when the entity comes to live here."""
    try:
        queue_id, timer, _, number = unpack_due_key(key)
    except CorruptRecord:
        return NO_MESSAGE
    place = Place.SCHEDULED if timer == Due.SCHEDULED else Place.AVAILABLE
    entry = _entry(core, queue_key(queue_id, place, number))
    return NO_MESSAGE if entry is None else entry.message_id


# -- records of topics


def _topic_of(core: Core, key: bytes) -> int | None:
    """The topic that the entity of this key of QUEUE is a subscription of."""
    topic = core.entities.terms[entity_of(int.from_bytes(key[:4], "big"))].topic
    return core.entities.topic_ids[topic] if topic else None


def _shared(core: Core, topic_id: int, theirs: int, record: bytes) -> int:
    """The record with this id of the other partition gets another entry here."""
    from_key = _from_key(topic_id, theirs)
    if (known := core.store.get(Table.META, from_key)) is not None:
        message_id: int = decode_document(known)
        refer(core.store, message_id)
        if core.journal.is_on:  # it makes rows of what one frame has
            core.store.put(Table.MESSAGES, message_key(message_id), record)
        return message_id
    message_id = _append(core, record)
    core.store.put(Table.META, from_key, encode_document(message_id))
    core.store.put(Table.META, _as_key(topic_id, message_id), encode_document(theirs))
    return message_id


def _from_key(topic_id: int, message_id: int) -> bytes:
    return ARRIVED_FROM_PREFIX + entity_key(topic_id) + message_key(message_id)


def _as_key(topic_id: int, message_id: int) -> bytes:
    return ARRIVED_AS_PREFIX + entity_key(topic_id) + message_key(message_id)
