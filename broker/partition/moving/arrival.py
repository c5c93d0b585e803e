"""The side of a move that an entity comes to: it stores the rows of the other side, and nobody uses them yet.

Message ids are of one partition, so each record gets a new one here. An entry of a queue has a record of its own, and
comes with it whenever it is new. The entries of a topic's subscriptions share records. So META says which record here
is which one of the other partition, until the entity lives here or the move is given up.
"""

from collections.abc import Sequence
from typing import Any

from broker.errors import InvalidArgument, QuotaExceeded, ServerBusy
from broker.partition.moving.departure import OF_ENTITIES
from broker.partition.state.core import Core
from broker.partition.state.terms import Kind
from broker.partition.state.timers import Due
from storage.queue_ids import entity_of
from storage.records import (
    ARRIVED_AS_PREFIX,
    ARRIVED_FROM_PREFIX,
    CorruptRecord,
    Entry,
    Place,
    arriving_key,
    decode_document,
    decode_entry,
    decode_references,
    encode_document,
    encode_entry,
    encode_references,
    entity_key,
    message_key,
    queue_key,
    unpack_due_key,
)
from storage.store import Table

FULL = "The store of the partition that the entity is moved to is nearly full."


def begin(core: Core, token: bytes, entity_ids: Sequence[int]) -> None:
    """Make ready for the rows of this entity and its subscriptions. Raises ServerBusy, InvalidArgument."""
    for entity_id in entity_ids:
        if entity_id not in core.terms or core.lives_here(entity_id):
            raise InvalidArgument("The entity lives on this partition already, or is not known to it yet.")
        if entity_id in core.deleted or entity_id in core.arriving:
            raise ServerBusy("What an earlier move left here is still being deleted. Please try again.")
    core.changing()
    for entity_id in entity_ids:
        rules = core.store.scan(Table.RULES, entity_key(entity_id), entity_key(entity_id + 1), 1 << 32)
        core.store.delete_many(Table.RULES, [key for key, _ in rules])  # theirs come
        core.arriving[entity_id] = token
        core.store.put(Table.META, arriving_key(entity_id), encode_document(token))


def store(core: Core, token: bytes, rows: Sequence[Sequence[Any]]) -> None:
    """Store rows of `Departure.rows`. Raises InvalidArgument, QuotaExceeded."""
    if any(core.arriving.get(_entity_of(table, key)) != token for table, key, _, _ in rows):
        raise InvalidArgument("The move has ended.")
    sizes = [len(record) for _, _, _, record in rows if record is not None]
    if not core.has_room(sizes, copies=len(rows)):
        raise QuotaExceeded(FULL)
    core.changing()
    _Rows(core).store(rows)
    core.turn.work += len(rows)


def _entity_of(table: int, key: bytes) -> int:
    if table == Table.META:
        return entity_of(int.from_bytes(key[-4:], "big"))
    number = int.from_bytes(key[:4], "big")
    return number if table in OF_ENTITIES else entity_of(number)


class _Rows:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._store = core.store

    def store(self, rows: Sequence[Sequence[Any]]) -> None:
        gone = []
        for table, key, value, record in rows:
            if table == Table.QUEUE:
                if value is None:
                    gone.append(key)
                else:
                    self._put_entry(key, value, record)
        for key in gone:  # after the others, which may refer to the same records
            self._delete_entry(key)
        for number, key, value, _ in rows:
            table = Table(number)
            if table is Table.QUEUE:
                continue
            if value is None:
                self._store.delete(table, key)
            elif table is Table.DUE:
                self._store.put(table, key, message_key(self._message_of_timer(key)))
            else:
                self._store.put(table, key, value)

    def _put_entry(self, key: bytes, value: bytes, record: bytes | None) -> None:
        try:
            theirs, delivery_count, overlay = decode_entry(value)
        except CorruptRecord:
            self._store.put(Table.QUEUE, key, value)
            return
        known = self._entry(key)
        if known is not None:
            message_id = known.message_id
        elif record is None:
            message_id = 0  # no message has this id, so it is found missing, as where it was
        elif (entity_id := entity_of(int.from_bytes(key[:4], "big"))) and self._shares(entity_id):
            message_id = self._shared(entity_id, theirs, record)
        else:
            message_id = self._append(record)
        self._store.put(Table.QUEUE, key, encode_entry(message_id, delivery_count, overlay))

    def _delete_entry(self, key: bytes) -> None:
        entry = self._entry(key)
        if entry is not None:
            entity_id = entity_of(int.from_bytes(key[:4], "big"))
            if not self._shares(entity_id) or self._release(entity_id, entry.message_id):
                self._store.delete(Table.MESSAGES, message_key(entry.message_id))
        self._store.delete(Table.QUEUE, key)

    def _entry(self, key: bytes) -> Entry | None:
        value = self._store.get(Table.QUEUE, key)
        try:
            return None if value is None else decode_entry(value)
        except CorruptRecord:
            return None

    def _append(self, record: bytes) -> int:
        message_id = self._core.bodies.next_id
        self._core.bodies.append([record], keep=False)
        return message_id

    def _message_of_timer(self, key: bytes) -> int:
        queue_id, timer, _, number = unpack_due_key(key)
        place = Place.SCHEDULED if timer == Due.SCHEDULED else Place.AVAILABLE
        entry = self._entry(queue_key(queue_id, place, number))
        return 0 if entry is None else entry.message_id

    # -- records of topics

    def _shares(self, entity_id: int) -> bool:
        return self._core.terms[entity_id].kind == Kind.SUBSCRIPTION

    def _shared(self, entity_id: int, theirs: int, record: bytes) -> int:
        topic_id = self._core.topic_ids[self._core.terms[entity_id].topic]
        known = self._store.get(Table.META, _from_key(topic_id, theirs))
        if known is not None:
            message_id: int = decode_document(known)
            self._store.put(Table.REFS, message_key(message_id), encode_references(self._references(message_id) + 1))
            return message_id
        message_id = self._append(record)
        self._store.put(Table.META, _from_key(topic_id, theirs), encode_document(message_id))
        self._store.put(Table.META, _as_key(topic_id, message_id), encode_document(theirs))
        return message_id

    def _references(self, message_id: int) -> int:
        value = self._store.get(Table.REFS, message_key(message_id))
        return 1 if value is None else decode_references(value)

    def _release(self, entity_id: int, message_id: int) -> bool:
        """An entry is deleted. True if it was the last one of its record."""
        count = self._references(message_id) - 1
        if count > 1:
            self._store.put(Table.REFS, message_key(message_id), encode_references(count))
        else:
            self._store.delete(Table.REFS, message_key(message_id))
        if count:
            return False
        topic_id = self._core.topic_ids[self._core.terms[entity_id].topic]
        theirs = self._store.get(Table.META, _as_key(topic_id, message_id))
        if theirs is not None:
            self._store.delete(Table.META, _from_key(topic_id, decode_document(theirs)))
            self._store.delete(Table.META, _as_key(topic_id, message_id))
        return True


def _from_key(topic_id: int, message_id: int) -> bytes:
    return ARRIVED_FROM_PREFIX + entity_key(topic_id) + message_key(message_id)


def _as_key(topic_id: int, message_id: int) -> bytes:
    return ARRIVED_AS_PREFIX + entity_key(topic_id) + message_key(message_id)
