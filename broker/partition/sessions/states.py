"""States of sessions: opaque bytes that outlive the sessions' messages, and count towards the size of the entity.

The time and size of a state are in SESSIONS, and the state itself in SESSION_STATES under the same key. So states,
which may be large, are read only when clients ask for them.
"""

from collections.abc import Sequence

from broker.errors import InternalError, QuotaExceeded
from broker.partition.messages.admission import entity_size, too_large
from broker.partition.state.core import Core
from broker.partition.state.queue import Queue
from broker.partition.state.receivers import encoded
from storage.quarantine import quarantine
from storage.queue_ids import queue_id_of
from storage.records import (
    CorruptRecord,
    SessionRow,
    decode_session,
    decode_state,
    encode_session,
    encode_state,
    session_key,
)
from storage.store import Store, Table


def get_state(core: Core, queue: Queue, session_id: str) -> bytes | None:
    """The state. If it cannot be read, it goes to quarantine: raises InternalError; the next call finds no state."""
    key = session_key(queue.id, encoded(session_id))
    value = core.store.get(Table.SESSION_STATES, key)
    if value is None:
        return None
    try:
        return decode_state(value)
    except CorruptRecord:
        quarantine(core.store, Table.SESSION_STATES, key)
        core.store.delete(Table.SESSIONS, key)
        _grow(core, queue, 8 - len(value))
        queue.tally.quarantined += 1
        raise InternalError(f"The state of the session '{session_id}' cannot be read and was set aside.") from None


def set_state(core: Core, queue: Queue, session_id: str, state: bytes | None, now_ms: int) -> None:
    """Set the state. None clears it, and so does an empty state: Go has no other way, and then reads no state.

    Raises QuotaExceeded if the state grows beyond what the entity or the store may hold.
    """
    check_growth(core, counted_for(core, queue), growth_by(core, queue, session_id, state))
    write_state(core, queue, session_id, state, now_ms)


def growth_by(core: Core, queue: Queue, session_id: str, state: bytes | None) -> int:
    """The bytes that the entity grows by if this becomes the state of the session."""
    return len(state or b"") - _size(core.store, session_key(queue.id, encoded(session_id)))


def counted_for(core: Core, queue: Queue) -> Queue:
    """The main part of the queue or topic that the states of this queue's sessions count for."""
    return queue if queue.topic_id is None else core.queue(queue_id_of(queue.topic_id))


def check_growth(core: Core, counted: Queue, growth: int) -> None:
    """Refuse if this entity or the store may not grow by so many bytes of states. Raises QuotaExceeded."""
    if growth <= 0:
        return
    size_bytes = entity_size(core, counted)
    if size_bytes + growth > counted.terms.size_bytes_max:
        raise too_large(counted, size_bytes)
    if core.store_is_full():
        raise QuotaExceeded("The store of this partition is nearly full; messages must be received first.")


def write_state(core: Core, queue: Queue, session_id: str, state: bytes | None, now_ms: int) -> None:
    """Set a state for which there is room, as `set_state` does."""
    store, key = core.store, session_key(queue.id, encoded(session_id))
    growth = growth_by(core, queue, session_id, state)
    if not state:
        store.delete(Table.SESSIONS, key)
        store.delete(Table.SESSION_STATES, key)
    else:
        store.put(Table.SESSIONS, key, encode_session(SessionRow(now_ms, len(state))))
        store.put(Table.SESSION_STATES, key, encode_state(state))
    _grow(core, queue, growth)


def _size(store: Store, key: bytes) -> int:
    value = store.get(Table.SESSIONS, key)
    if value is None:
        return 0
    try:
        return decode_session(value).state_bytes
    except CorruptRecord:  # it will be replaced
        return max(0, len(store.get(Table.SESSION_STATES, key) or b"") - 8)


def _grow(core: Core, queue: Queue, growth: int) -> None:
    queue.size_bytes += growth
    core.turn.touch(queue)
    if queue.topic_id is not None:
        topic = core.queue(queue_id_of(queue.topic_id))
        topic.size_bytes += growth
        core.turn.touch(topic)


def free_states(core: Core, topic_id: int | None, rows: Sequence[tuple[bytes, bytes]]) -> None:
    """Delete states of a deleted entity, by their rows in SESSIONS. `topic_id` is set for a subscription."""
    store, keys = core.store, [key for key, _ in rows]
    topic = core.find(queue_id_of(topic_id)) if topic_id is not None else None
    if topic is not None:
        topic.size_bytes -= sum(_size(store, key) for key in keys)
        core.turn.touch(topic)
    store.delete_many(Table.SESSIONS, keys)
    store.delete_many(Table.SESSION_STATES, keys)
