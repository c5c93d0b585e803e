"""Requests: renew locks, browse, receive messages by their numbers, cancel scheduled ones, delete, count.

Their records are in `broker.requests`. A request is done wholly, or not at all if it raises a BrokerError.
However, expired messages that it comes across are expired, and unreadable ones are quarantined, in either case. A
request that looks at many messages or sessions does so step by step, and may be under way for several turns.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any

from broker import requests
from broker.errors import (
    EntityDisabled,
    InternalError,
    InvalidArgument,
    LockLost,
    MessageNotFound,
    NotAllowed,
    OutOfRange,
    ServerBusy,
)
from broker.partition import sending
from broker.partition.entities import require_receive
from broker.partition.forwarding.source import forwards
from broker.partition.messages import browsing, cancelling, settlement, stored
from broker.partition.messages.deliveries import RECEIVED_AND_DELETED, new_token
from broker.partition.messages.hand_out import withdraw
from broker.partition.messages.leaving import discard, unlocked
from broker.partition.messages.moves import expire
from broker.partition.messages.schedule import scheduled_ms_of
from broker.partition.messages.selecting import selector_of
from broker.partition.moving import moves
from broker.partition.sessions import locks as session_locks
from broker.partition.sessions import requests as session_requests
from broker.partition.state import accesses
from broker.partition.state.core import PARTS, Core
from broker.partition.state.locks import NOBODY, Held, Holder
from broker.partition.state.queue import Queue
from broker.partition.state.receivers import Session
from broker.partition.state.timers import Due
from broker.partition.state.window import Ref, overlay_of
from broker.partition.topics import rule_requests
from broker.wire import Outcome
from protocol import error_texts
from storage.journal.events import Op
from storage.queue_ids import entity_of, part_of
from storage.records import (
    NEVER,
    CorruptRecord,
    Counts,
    Field,
    Overlay,
    Place,
    decode_counts,
    decode_document,
    encode_document,
    entity_key,
    message_enqueued_ms,
)
from storage.store import Table

PROBE_KEY = b"probe"
# For errors: the fields of clients' requests (amqp.md 8.4).
LOCK_TOKENS, SEQUENCE_NUMBERS = "lock-tokens", "sequence-numbers"
_OF_TOPIC = (requests.Schedule, requests.CancelScheduled, requests.Peek)  # on its scheduled messages


def request(core: Core, queue_id: int, asked: requests.OfQueue | requests.OfPartition, now_ms: int) -> Any:
    """Return the result; or an `Underway`, if the request takes more work than one turn has. Raises BrokerError."""
    of_partition = _OF_PARTITION.get(type(asked))
    if of_partition is not None:
        return of_partition(core, asked, now_ms)
    queue = core.queue(queue_id) if isinstance(asked, requests.RULES) else core.access(queue_id, now_ms)
    if queue.transfers is not None and not isinstance(asked, requests.Peek):
        name = requests.RECORDS.name_of(type(asked))
        raise NotAllowed(f"The operation '{name}' is not possible on a transfer queue.")
    if queue.is_topic and not isinstance(asked, _OF_TOPIC):
        raise NotAllowed(f"'{queue.terms.name}' is a topic; its messages are in its subscriptions.")
    _check_size(core, asked)
    result = _OF_QUEUE[type(asked)](core, queue, asked, now_ms)
    if not isinstance(result, Generator):
        return result
    underway = Underway(core, result)
    return underway if not underway.go_on() else underway.result


def _check_size(core: Core, asked: requests.OfQueue | requests.OfPartition) -> None:
    """A request that is done wholly or not at all takes one turn, so its size has a limit. Raises OutOfRange."""
    match asked:
        case requests.RenewLocks(items) | requests.Settle(items):
            field = LOCK_TOKENS
        case requests.Schedule(items):
            field = "messages"
        case (
            requests.CancelScheduled(items)
            | requests.ReceiveDeferred(items)
            | requests.ReceiveSessionDeferred(numbers=items)
        ):
            field = SEQUENCE_NUMBERS
        case _:
            return
    count, limit = len(items), core.settings.request_items
    if count > limit:
        raise OutOfRange(f"'{field}' has {count} items; a request may have {limit}.")


def check_bytes(core: Core, field: str, count: int, size_bytes: int) -> None:
    """Check the bytes that are read or written for `count` messages. A single message may have any size.

    Raises OutOfRange.
    """
    limit = core.settings.request_bytes
    if size_bytes > limit and count > 1:
        raise OutOfRange(f"The messages of '{field}' take more than {limit} bytes; ask for fewer at once.")


# A request that takes several turns: the generator yields when the turn has no work left, and returns the result.
Steps = Generator[None, None, Any]


class Underway:
    """A request that continues in later turns. If it fails or is dropped, what it has done stays done."""

    def __init__(self, core: Core, steps: Steps) -> None:
        self._core = core
        self._steps = steps
        self.result: Any = None

    def go_on(self) -> bool:
        """Do as much as this turn's work allows. True if the request is done and `result` set. Raises BrokerError."""
        try:
            next(self._steps)
        except StopIteration as end:
            self.result = end.value
            return True
        return False


def _renew_locks(core: Core, queue: Queue, asked: requests.RenewLocks, now_ms: int) -> list[int]:
    tokens = asked.tokens
    if queue.sessions is not None:
        raise NotAllowed(f"'{queue.terms.name}' requires sessions: renew the lock of the session, not of a message.")
    if any(queue.locks.find(token, now_ms) is None for token in tokens):
        raise LockLost(error_texts.LOCK_LOST)
    until_ms = now_ms + queue.terms.lock_duration_ms
    core.changing()
    for token in tokens:
        queue.locks.renew(token, until_ms)
    queue.tally.renewed += len(tokens)
    return [core.wall_ms(until_ms)] * len(tokens)


def _peek(core: Core, queue: Queue, asked: requests.Peek, now_ms: int) -> list[Any]:
    from_number, most, max_bytes, with_lock_ends = asked
    items = browsing.peek(core, queue, from_number, most, max_bytes)
    return [items, browsing.lock_ends(core, queue, items, now_ms)] if with_lock_ends else items


def _browse(core: Core, queue: Queue, asked: requests.Browse, now_ms: int) -> list[Any]:
    require_receive(queue)
    from_number, most, max_bytes, session_id, text, with_lock_ends = asked
    if session_id is not None:
        session_requests.sessions_of(queue)
    selector = None if text is None else selector_of(text)
    shown = browsing.browse(core, queue, from_number, most, max_bytes, session_id, selector)
    return [*shown, browsing.lock_ends(core, queue, shown[0], now_ms)] if with_lock_ends else shown


def _peek_session(core: Core, queue: Queue, asked: requests.PeekSession, now_ms: int) -> list[Any]:
    session_id, from_number, most, max_bytes, with_lock_ends = asked
    session_requests.sessions_of(queue)
    items = browsing.peek(core, queue, from_number, most, max_bytes, session_id)
    return [items, browsing.lock_ends(core, queue, items, now_ms)] if with_lock_ends else items


def _receive_deferred(core: Core, queue: Queue, asked: requests.ReceiveDeferred, now_ms: int) -> list[Any]:
    """Lock or delete messages by their numbers.

    Raises MessageNotFound if any of the numbers is not that of a deferred message (or an active one, if these were
    asked for), or if it is locked.
    """
    numbers, receive_and_delete, active = asked
    if queue.sessions is not None:
        raise NotAllowed(f"'{queue.terms.name}' requires sessions: the request must name the session of the messages.")
    until_ms = now_ms + queue.terms.lock_duration_ms
    return _take_numbered(core, queue, numbers, receive_and_delete, active, None, NOBODY, until_ms, now_ms)


def _receive_session_deferred(
    core: Core, queue: Queue, asked: requests.ReceiveSessionDeferred, now_ms: int
) -> list[Any]:
    """Lock or delete messages of one session. The lock that the receiver has of it is theirs, too.

    Without a receiver they get locks of their own, as the cloud gives them to a connection that does not hold the
    session; but not active messages. A receiver that has lost the session gets none.
    """
    receiver, session_id, numbers, receive_and_delete, active = asked
    if receiver is None and not active:
        lent = session_requests.sessions_of(queue).lent
        until_ms = now_ms + queue.terms.lock_duration_ms
        return _take_numbered(core, queue, numbers, receive_and_delete, False, session_id, lent, until_ms, now_ms)
    session = session_locks.held(queue, receiver, session_id, now_ms)
    session_locks.take_back_lent(core, queue, session, numbers, now_ms)
    return _take_numbered(
        core, queue, numbers, receive_and_delete, active, session_id, session, session.until_ms, now_ms
    )


def _take_numbered(
    core: Core,
    queue: Queue,
    numbers: Sequence[int],
    receive_and_delete: bool,
    active: bool,
    session_id: str | None,
    holder: Holder,
    until_ms: int,
    now_ms: int,
) -> list[Any]:
    found = _find_numbered(core, queue, list(dict.fromkeys(numbers)), active, session_id, now_ms)
    items: list[Any] = []
    core.changing()
    session = holder if isinstance(holder, Session) else None
    early: dict[int, Overlay | None] = {}  # active ones, which are received before their turn
    for (ref, size, due_ms, place, _, _), record in found:
        token = new_token(core)
        number, _, delivery_count, overlay = ref
        items += (token, number, delivery_count, record, overlay)
        if place == Place.AVAILABLE:
            early[number] = overlay
        if not receive_and_delete:
            queue.locks.add(token, (ref, size, due_ms, place, until_ms if session is None else NEVER, holder))
            if session is not None:
                session.tokens[token] = None
            elif queue.sessions is not None:
                queue.sessions.lend(number, token)
    core.journal.delivered(queue.id, [ref for (ref, *_), _ in found], now_ms)
    if receive_and_delete:
        discard(core, queue, [held for held, _ in found], Op.COMPLETED, RECEIVED_AND_DELETED)
        queue.forget([*early.items()])
        queue.tally.received_and_deleted += len(found)
    elif found:
        core.timers.arm(until_ms, (queue.id, Due.LOCKS))
        if early:
            withdraw(core, queue, session, early.keys())
    queue.tally.outgoing += len(found)
    return [0 if receive_and_delete else core.wall_ms(until_ms), items, *([[*early]] if active else [])]


def _find_numbered(
    core: Core, queue: Queue, numbers: Sequence[int], active: bool, session_id: str | None, now_ms: int
) -> list[tuple[Held, bytes]]:
    """Find all of these unlocked messages, with their records; of this session, if it is given.

    Raises MessageNotFound, NotAllowed, EntityDisabled, OutOfRange, ServerBusy.
    """
    if queue.forward_to:
        raise forwards(queue)
    if not queue.terms.can_receive:
        raise EntityDisabled(error_texts.receive_disabled(queue.terms.name))
    found: list[tuple[Held, bytes]] = []
    expired: list[Held] = []
    missing: list[int] = []
    used_bytes = 0
    locked_active: set[int] | None = None  # looked up for the first active one
    for number in numbers:
        place, locked = Place.DEFERRED, queue.locks.deferred
        entry = stored.entry_at(core, queue, place, number)
        if entry is None and active and (entry := stored.entry_at(core, queue, Place.AVAILABLE, number)) is not None:
            if queue.is_held_back:  # another partition may have taken the message over
                raise ServerBusy(error_texts.SERVER_BUSY)
            if locked_active is None:
                locked_active = queue.locks.numbers()
            place, locked = Place.AVAILABLE, locked_active
        if entry is None or number in locked:
            missing.append(number)
            continue
        message = stored.read_message(core, queue, place, number, entry)
        if message is None or not _is_of(session_id, message[0]):
            missing.append(number)
            continue
        ref, record = message
        expires_ms = stored.expires_ms(queue, overlay_of(ref), record)
        held = unlocked(ref, len(record), NEVER if place == Place.DEFERRED else expires_ms, place)
        if expires_ms <= now_ms:
            expired.append(held)
            continue
        used_bytes += len(record)
        check_bytes(core, SEQUENCE_NUMBERS, len(numbers), used_bytes)
        found.append((held, record))
    for held in expired:
        expire(core, queue, held)
    queue.forget([(number, overlay) for (number, _, _, overlay), _, _, at, _, _ in expired if at == Place.AVAILABLE])
    if len(found) < len(numbers):
        gone = missing + [number for (number, *_), *_ in expired]
        wanted = "deferred or active" if active else "deferred"
        raise MessageNotFound(f"There is no unlocked {wanted} message with the sequence number {gone[0]}.")
    return found


def _is_of(session_id: str | None, ref: Ref) -> bool:
    return session_id is None or (overlay_of(ref) or {}).get(Field.SESSION) == session_id


def _settle(core: Core, queue: Queue, asked: requests.Settle, now_ms: int) -> None:
    tokens, outcome, properties = [*asked.tokens], outcome_of(asked), asked.properties
    if len(set(tokens)) < len(tokens):
        raise InvalidArgument("The request names a lock token twice.")
    names_receiver = queue.sessions is not None and asked.receiver != requests.ANYONE
    if names_receiver:
        session_locks.require_holder(queue, asked.receiver, tokens, now_ms)
    for token in tokens:
        error = settlement.refusal(core, queue, token, outcome, properties, now_ms)
        if error is not None:
            queue.tally.settlements_too_late += isinstance(error, LockLost)
            if names_receiver:
                [error] = session_locks.named(core, asked.receiver, [error], now_ms)
            assert error is not None
            raise error
    if outcome != Outcome.ACCEPTED:
        check_bytes(core, LOCK_TOKENS, len(tokens), settlement.written_bytes(queue, tokens, properties))
    settlement.settle(core, queue, tokens, outcome, properties, now_ms)


def outcome_of(asked: requests.Settle) -> Outcome:
    """Return the outcome that the request names. Raises InvalidArgument."""
    try:
        return Outcome(asked.outcome)
    except ValueError:
        raise InvalidArgument(f"The outcome {asked.outcome} does not exist.") from None


def _schedule(core: Core, queue: Queue, asked: requests.Schedule, now_ms: int) -> list[int]:
    return sending.send(core, queue.id, asked.messages, now_ms)


def _cancel_scheduled(core: Core, queue: Queue, asked: requests.CancelScheduled, now_ms: int) -> None:
    """Delete scheduled messages. Raises what `cancelling.cancellable` does."""
    numbers = list(dict.fromkeys(asked.numbers))

    def check(read_bytes: int) -> None:
        check_bytes(core, SEQUENCE_NUMBERS, len(numbers), read_bytes)

    cancelling.cancel(core, queue, cancelling.cancellable(core, queue, numbers, check))


def _delete_batch(core: Core, queue: Queue, asked: requests.DeleteBatch, now_ms: int) -> Steps:
    """Delete available messages, the oldest first; locked messages are skipped."""
    most, before_ms, session_id = asked
    if most < 1:
        raise InvalidArgument(f"message-count must be positive, not {most}.")
    if session_id is not None:
        session_requests.sessions_of(queue)
    return _delete(core, queue.id, (Place.AVAILABLE,), most, before_ms + core.ahead_ms, session_id)


def _purge(core: Core, queue: Queue, asked: requests.Purge, now_ms: int) -> Steps:
    """Delete unlocked messages in these places, up to a limit. The caller asks again until the answer is 0."""
    places = tuple(Place) if asked.places is None else tuple(map(Place, asked.places))
    return _delete(core, queue.id, places, 10 * core.settings.step, None, None)


def _delete(
    core: Core, queue_id: int, places: Sequence[Place], count: int, before_ms: int | None, session_id: str | None
) -> Steps:
    """Delete up to `count` unlocked messages, enqueued before `before_ms`; with `session_id` only those of the session.

    Returns how many there were. Raises EntityNotFound if the entity is deleted meanwhile.
    """
    deleted = 0
    for place in places:
        start: int | None = 0
        while start is not None and deleted < count:
            if core.turn.work and core.work_left() <= 0:
                yield
            found, start = _delete_some(
                core, core.queue(queue_id), place, start, count - deleted, before_ms, session_id
            )
            deleted += found
    return deleted


def _delete_some(
    core: Core,
    queue: Queue,
    place: Place,
    start: int,
    count: int,
    before_ms: int | None,
    session_id: str | None,
) -> tuple[int, int | None]:
    """A step of `_delete`, from the number `start` on. Returns how many were deleted, and the next number or None."""
    locked = queue.locks.numbers() if place == Place.AVAILABLE else queue.locks.deferred
    step = core.step()
    items = browsing.entries(core, queue, place, start, step, session_id)
    end: int | None = None
    if len(items) == step:
        last_number, _, _ = items[-1]
        end = last_number + 1
    messages: list[Held] = []
    read_bytes = 0
    for number, _, value in items:
        if len(messages) == count or read_bytes >= core.settings.step_bytes:
            end = number
            break
        core.turn.work += 1
        if number in locked:
            continue
        message = stored.read_message(core, queue, place, number, value)
        if message is None:
            continue
        ref, record = message
        overlay = overlay_of(ref)
        read_bytes += len(record)
        enqueued_ms = message_enqueued_ms(record)
        if before_ms is not None and ((overlay or {}).get(Field.ENQUEUED_MS) or enqueued_ms) >= before_ms:
            continue
        due_ms = NEVER
        if place == Place.SCHEDULED:
            due_ms = scheduled_ms_of(overlay, record)
        elif place == Place.AVAILABLE:
            due_ms = stored.expires_ms(queue, overlay, record)
        messages.append(unlocked(ref, len(record), due_ms, place))
    if read_bytes >= core.settings.step_bytes:
        core.end_of_work()
    discard(core, queue, messages, Op.PURGED, "purged")
    if place == Place.AVAILABLE:
        queue.forget([(number, overlay) for (number, _, _, overlay), *_ in messages])
    queue.tally.deleted += len(messages)
    return len(messages), end


def _counts(core: Core, asked: requests.Counts, now_ms: int) -> dict[int, list[int]]:
    """Count the messages of these queues; if none is named, of all queues that ever had messages."""
    wanted = asked.queue_ids
    if wanted:
        stored = [(queue_id, core.store.get(Table.COUNTS, entity_key(queue_id))) for queue_id in wanted]
    else:
        items = core.store.scan(Table.COUNTS, b"\0", b"\xff" * 5, 1 << 32)
        stored = [(int.from_bytes(key, "big"), value) for key, value in items]
    queues = core.queues
    # Queues that nobody uses are not opened, because a request for all would leave all of them in memory.
    counts = {
        queue_id: _stored_count(core, queue_id, value)
        for queue_id, value in stored
        if _is_counted(core, queue_id) and queue_id not in queues
    }
    used = [queues[queue_id] for queue_id in wanted if queue_id in queues] if wanted else queues.values()
    return counts | {queue.id: _count(queue) for queue in used}


def _is_counted(core: Core, queue_id: int) -> bool:
    entity_id = entity_of(queue_id)
    return entity_id in core.entities.terms and core.entities.is_of_here(entity_id) and part_of(queue_id) in PARTS


def _stored_count(core: Core, queue_id: int, value: bytes | None) -> list[int]:
    """Count the messages of a queue that is not open; `value` is its record in COUNTS."""
    try:
        _, available, deferred, scheduled, size_bytes = Counts() if value is None else decode_counts(value)
    except CorruptRecord:
        return _count(core.queue(queue_id))  # opening it counts its messages
    return [available, deferred, scheduled, size_bytes, 0]


def _count(queue: Queue) -> list[int]:
    return [*queue.counts, queue.size_bytes, queue.locks.count()]


def _accessed(core: Core, asked: requests.Accessed, now_ms: int) -> list[Any]:
    """Tell the last accesses of those of these entities that live here."""
    entities = core.entities
    known = (each for each in asked.entity_ids if each in entities.terms and entities.is_of_here(each))
    return [core.opened_ms, {entity_id: accesses.last_ms(core, entity_id, now_ms) for entity_id in known}]


def _probe(core: Core, asked: requests.Probe, now_ms: int) -> str | None:
    """Say why messages are refused for want of room, if they are. What is written here becomes durable with this turn's
    commit, before the answer.
    """
    value = encode_document(now_ms)
    core.store.put(Table.META, PROBE_KEY, value)
    if decode_document(core.store.get(Table.META, PROBE_KEY) or b"") != now_ms:
        raise InternalError("The store does not return what was written to it.")
    return core.room.shortage


def _stored(core: Core, asked: requests.Stored, now_ms: int) -> list[int]:
    return core.marks.of(asked.sender)


_OF_QUEUE: dict[type, Callable[[Core, Queue, Any, int], Any]] = {
    requests.RenewLocks: _renew_locks,
    requests.Peek: _peek,
    requests.PeekSession: _peek_session,
    requests.Browse: _browse,
    requests.ReceiveDeferred: _receive_deferred,
    requests.ReceiveSessionDeferred: _receive_session_deferred,
    requests.Settle: _settle,
    requests.Schedule: _schedule,
    requests.CancelScheduled: _cancel_scheduled,
    requests.DeleteBatch: _delete_batch,
    requests.Purge: _purge,
    requests.AddRule: rule_requests.add_rule,
    requests.ReplaceRule: rule_requests.replace_rule,
    requests.RemoveRule: rule_requests.remove_rule,
    requests.GetRule: rule_requests.get_rule,
    requests.EnumerateRules: rule_requests.enumerate_rules,
    requests.RenewSessionLock: session_requests.renew_session_lock,
    requests.GetSessionState: session_requests.get_session_state,
    requests.SetSessionState: session_requests.set_session_state,
    requests.GetMessageSessions: session_requests.get_message_sessions,
    requests.PageMessageSessions: session_requests.page_message_sessions,
    requests.MessageSessionsBehind: session_requests.message_sessions_behind,
}
_OF_PARTITION: dict[type, Callable[[Core, Any, int], Any]] = {
    requests.Counts: _counts,
    requests.Accessed: _accessed,
    requests.FilterCounts: rule_requests.filter_counts,
    requests.Probe: _probe,
    requests.Stored: _stored,
    requests.Arrive: moves.arrive,
    requests.StoreRows: moves.store,
    requests.Depart: moves.depart,
    requests.Rows: moves.rows,
    requests.Hold: moves.hold,
    requests.Freeze: moves.freeze,
}
