"""Hands available messages to receivers with credit, in order and fairly; bounded per turn."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from operator import itemgetter
from struct import Struct
from typing import Any, NamedTuple

from broker.errors import BrokerError
from broker.partition.messages.moves import discard, expire, overlay_expires_ms, set_aside, unlocked
from broker.partition.state.core import Core
from broker.partition.state.locks import NOBODY, Held, LockRun
from broker.partition.state.queue import Queue
from broker.partition.state.receivers import ALL, Receiver, Session
from broker.partition.state.sessions import Sessions
from broker.partition.state.timers import Due
from broker.partition.state.window import Ref, message_id_of, number_of
from broker.wire import ENTRY, Forward
from protocol.extension import extension
from storage.journal.events import Op
from storage.records import (
    NEVER,
    CorruptRecord,
    Field,
    Place,
    decode_entry,
    message_expires_ms,
    queue_key,
    unpack_queue_key,
)
from storage.store import Table

_token_number = Struct(">Q").pack

RECEIVED_AND_DELETED = "receiveAndDelete"  # in the journal

FETCH_MAX = 1024  # entries read ahead at once
READ_MAX = 128  # messages read at once
FRESH_TIMES = 4  # so many times what came in a turn may be handed out in it, besides `pump_stored_bytes`
WEIGHT_BYTES = 512  # counted for a delivery besides its record, so that small messages count for their work

# Here, because to look up a member of an enum takes as long as a call.
_AVAILABLE, _EXPIRES_MS, _LOCKS = Place.AVAILABLE, Field.EXPIRES_MS, Due.LOCKS
_DEFERRED, _QUEUE = Place.DEFERRED, Table.QUEUE

Delivery = tuple[Hashable, int, list[Any]]  # receiver, locked until, entry items: see `Pumped`
Deliveries = list[Delivery]
Drained = list[tuple[Hashable, int]]


class Pumped(NamedTuple):
    """`deliveries`: (receiver, locked_until_ms or 0 if not locked, entry items: see broker.wire).

    `drained`: (receiver, deliveries since it was opened). `available`: receivers that watch, and could take messages.
    `closed`: receivers that the partition closed, and the errors. `more`: there is more to do at once, which this turn
    was too short for. `forwards` may leave after the commit. `accepted`: (receiver, session id, locked_until_ms) of
    receivers that have got their session.
    """

    deliveries: Sequence[Delivery] = ()
    drained: Sequence[tuple[Hashable, int]] = ()
    closed: Sequence[tuple[Hashable, BrokerError]] = ()
    more: bool = False
    forwards: Sequence[Forward] = ()
    accepted: Sequence[tuple[Hashable, str, int]] = ()
    available: Sequence[Hashable] = ()


NOTHING = Pumped()
OfSession = tuple[Session, Receiver, list[Ref]]  # what a receiver is to get of its session
Taken = list[tuple[Ref, bytes, int]]  # ref, record, time of its DUE entry or NEVER
_ref_of: Callable[[tuple[Ref, bytes, int]], Ref] = itemgetter(0)


def pump(core: Core, now_ms: int) -> tuple[Deliveries, Drained, list[Hashable]]:
    """Serve the queues that are awake. Those that it does not get to the end of stay awake.

    Returns what `Pumped` has as `deliveries`, `drained` and `available`.
    """
    awake = core.turn.take_awake()
    deliveries: Deliveries = []
    drained: Drained = []
    available: list[Hashable] = []
    # Receivers that keep up get what has just come, before it must be read from the tables.
    ready_bytes = core.settings.pump_stored_bytes + FRESH_TIMES * core.bodies.fresh_bytes
    budget_bytes = min(core.settings.pump_bytes, ready_bytes)
    later = []  # queues that were cut short; they come after those that got nothing
    core.begin_part()
    for queue in awake.values():
        if budget_bytes <= 0 or core.work_left() <= 0:
            core.turn.awake[queue.id] = queue
            continue
        if queue.sessions is not None:
            used_bytes, cut = _hand_out_sessions(core, queue, queue.sessions, now_ms, budget_bytes, deliveries, drained)
        else:
            used_bytes, cut = _hand_out(core, queue, now_ms, budget_bytes, deliveries)
        budget_bytes -= used_bytes
        if cut:
            later.append(queue)
            continue
        line = queue.line
        if line.draining:
            drained += [(receiver.key, receiver.delivered) for receiver in line.take_drained()]
        if line.watching and not line.waiting and (ready := queue.ready()) > 0:
            available += [receiver.key for receiver in line.tell(ready)]
    for queue in later:
        core.turn.awake[queue.id] = queue
    return deliveries, drained, available


def _hand_out(core: Core, queue: Queue, now_ms: int, budget_bytes: int, deliveries: Deliveries) -> tuple[int, bool]:
    """Returns the bytes used, and True if it was cut short by the budget or because the turn has no work left."""
    line, until_ms = queue.line, now_ms + queue.terms.lock_duration_ms
    items: dict[Hashable, list[Any]] = {}
    used_bytes, cut = 0, False
    while line.waiting and not cut and (ready := queue.ready()) > 0:
        group, wanted = line.next_round(ready)
        limit_bytes = core.settings.pump_bytes_per_receiver * len(group)
        if wanted > 1:
            wanted = min(wanted, max(len(group), core.work_left()))
        if limit_bytes > budget_bytes - used_bytes:
            limit_bytes = budget_bytes - used_bytes
        taken, bytes_taken, cut = take(core, queue, wanted, limit_bytes, now_ms)
        used_bytes += bytes_taken
        each, more = divmod(len(taken), len(group))
        begin = 0
        for place, receiver in enumerate(group[: len(taken)]):
            end = begin + each + (place < more)
            dealt = taken[begin:end] if len(group) > 1 else taken  # neighbours: they are one run
            begin = end
            receiver.delivered += len(dealt)
            flat = items.get(receiver.key)
            if flat is None:
                flat = items[receiver.key] = []
                deliveries.append((receiver.key, 0 if receiver.receive_and_delete else until_ms, flat))
            if receiver.receive_and_delete:
                flat += _remove(core, queue, dealt, now_ms)
            else:
                flat += _lock(core, queue, receiver, dealt, until_ms, now_ms)
        line.served(group, len(taken))
        if len(taken) < wanted:
            break
        cut = cut or core.work_left() <= 0
    return used_bytes, cut


def _hand_out_sessions(
    core: Core,
    queue: Queue,
    sessions: Sessions,
    now_ms: int,
    budget_bytes: int,
    deliveries: Deliveries,
    drained: Drained,
) -> tuple[int, bool]:
    """As `_hand_out`, for a queue with sessions: each session's receiver gets the messages of its session.

    Bodies are read for many sessions at once, because each may have few messages. A session with more messages than its
    share of a read comes again after the others.
    """
    line, used_bytes = queue.line, 0
    average_bytes = queue.size_bytes // (sum(queue.counts) or 1) + WEIGHT_BYTES
    given_bytes: dict[str, int] = {}  # bytes given to sessions that came again
    gone_left = core.step()
    turn, sessions.awake = deque(sessions.awake.values()), {}
    while turn and used_bytes < budget_bytes and gone_left > 0 and core.work_left() > 0:
        missing = min(READ_MAX, (budget_bytes - used_bytes) // average_bytes + 1)
        batch: list[OfSession] = []
        ids: list[int] = []
        keep = True  # what is given is locked
        while turn and missing > 0 and core.work_left() > 0:
            session = turn.popleft()
            receiver = session.receiver
            if receiver is None or sessions.locked.get(session.id) is not session:
                continue
            wanted = min(receiver.limit - receiver.delivered, missing)
            if wanted > 0:
                if given_bytes.get(session.id, 0) >= core.settings.pump_bytes_per_receiver:
                    sessions.awake[session.id] = session
                    continue
                refs = next_of_session(core, queue, session, wanted, wanted)
                if refs:
                    missing -= len(refs)
                    keep = keep and not receiver.receive_and_delete
                    ids += map(message_id_of, refs)
                    batch.append((session, receiver, refs))
                    continue
                if session.window.cursor < ALL:  # there is more to read
                    turn.appendleft(session)
                    continue
            if receiver.key in line.draining:
                line.end_drain(receiver)
                drained.append((receiver.key, receiver.delivered))
        if not batch:
            continue
        read = core.bodies.read(ids)
        usual = _give_usual(core, queue, batch, read, budget_bytes - used_bytes, now_ms) if keep else None
        if usual is not None:
            given, bytes_used = usual
            used_bytes += bytes_used
            for (session, receiver, refs), items in zip(batch, given, strict=False):
                receiver.delivered += len(refs)
                deliveries.append((receiver.key, session.until_ms, items))
                if receiver.delivered >= receiver.limit:
                    line.waiting.pop(receiver.key, None)
                if session.may_have_more or receiver.key in line.draining:
                    bytes_given = sum(map(len, items[3::ENTRY])) + WEIGHT_BYTES * len(refs)
                    given_bytes[session.id] = given_bytes.get(session.id, 0) + bytes_given
                    turn.append(session)
            for session, _, refs in islice(batch, len(given), None):
                for ref in refs:
                    session.window.put_back(ref)
                turn.append(session)
            continue
        records = iter(read)
        for session, receiver, refs in batch:
            if used_bytes >= budget_bytes or gone_left <= 0:
                for ref in refs:
                    session.window.put_back(ref)
                turn.append(session)
                continue
            items, bytes_given, gone = _give(core, queue, session, receiver, refs, records, gone_left, now_ms)
            used_bytes += bytes_given
            gone_left -= gone
            if items:
                receiver.delivered += len(items) // ENTRY
                until_ms = 0 if receiver.receive_and_delete else session.until_ms
                deliveries.append((receiver.key, until_ms, items))
            if receiver.delivered >= receiver.limit:
                line.waiting.pop(receiver.key, None)
            if session.may_have_more or receiver.key in line.draining:
                given_bytes[session.id] = given_bytes.get(session.id, 0) + bytes_given
                turn.append(session)
    sessions.awake |= {session.id: session for session in turn}
    return used_bytes, bool(sessions.awake)


def _give_usual(
    core: Core, queue: Queue, batch: list[OfSession], records: list[bytes | None], limit_bytes: int, now_ms: int
) -> tuple[list[list[Any]], int] | None:
    """As `_give`, of the first sessions of the batch, until the bytes reach the limit; all of them are locked.

    None if one of their messages is not usual, and nothing was done.
    """
    if extension is None:
        return None
    first = core.take_tokens(len(records))
    found = extension.give(batch, records, WEIGHT_BYTES, limit_bytes, core.token_prefix, first)
    if found is None:
        return None
    given, refs, sizes, holders, used_bytes = found
    queue.locks.add_run(LockRun(core.token_prefix + _token_number(first), refs, sizes, NEVER, holders))
    queue.tally.outgoing += len(refs)
    core.journal.delivered(queue.id, refs, now_ms)
    return given, used_bytes


def _give(
    core: Core,
    queue: Queue,
    session: Session,
    receiver: Receiver,
    refs: Sequence[Ref],
    records: Iterator[bytes | None],
    gone_limit: int,
    now_ms: int,
) -> tuple[list[Any], int, int]:
    """Entry items for the receiver, of messages of its session with their records; their bytes; and a third number.

    Expired messages are expired and unreadable ones quarantined. The third number counts these; after `gone_limit` of
    them the rest stays. The lock of the session is also the lock of its messages.
    """
    items: list[Any] = []
    given: list[Ref] = []
    deleted: list[Held] = []
    gone = 0
    used_bytes = 0
    keep, held, tokens = not receiver.receive_and_delete, queue.locks.held, session.tokens
    prefix, place = core.token_prefix, _AVAILABLE
    for ref, record, token_number in zip(refs, records, range(core.take_tokens(len(refs)), NEVER), strict=False):
        if gone >= gone_limit:
            session.window.put_back(ref)
            continue
        number, message_id, delivery_count, overlay = ref
        if record is None:
            set_aside(core, queue, place, number, message_id)
            gone += 1
            continue
        size = len(record)
        due_ms = message_expires_ms(record)
        if overlay and len(overlay) > 1:  # it has more fields than the session
            due_ms = overlay.get(_EXPIRES_MS, due_ms)
        used_bytes += size + WEIGHT_BYTES
        if due_ms <= now_ms:
            expire(core, queue, unlocked(ref, size, due_ms, place))
            gone += 1
            continue
        token = prefix + _token_number(token_number)
        given.append(ref)
        if keep:
            held[token] = (ref, size, due_ms, place, NEVER, session)
            tokens[token] = None
            if due_ms != NEVER:
                queue.locks.expiring.add(number)
            # The receiver knows the session.
            items += (token, number, delivery_count, record, None if overlay and len(overlay) == 1 else overlay)
        else:
            deleted.append((ref, size, due_ms, place, 0, NOBODY))
            items += (token, number, delivery_count, record, overlay)
    queue.tally.outgoing += len(items) // ENTRY
    core.journal.delivered(queue.id, given, now_ms)
    if deleted:
        discard(core, queue, deleted, Op.COMPLETED, RECEIVED_AND_DELETED)
        queue.tally.received_and_deleted += len(deleted)
    return items, used_bytes, gone


def take(core: Core, queue: Queue, count: int, limit_bytes: int, now_ms: int) -> tuple[Taken, int, bool]:
    """Take the next messages out of the window, without a lock; the bytes read; True if it was cut short.

    Expired messages are expired and unreadable ones quarantined, a step of them at most. The result is cut short by
    `limit_bytes`, by such a step, and when the turn has no work left.
    """
    taken: Taken = []
    used_bytes = 0
    gone_left = 0  # 0 before the first expired or unreadable message
    observe_ttl = not queue.is_dead_letter
    while len(taken) < count:
        missing = count - len(taken)
        at_once = 1
        if missing > 1:
            average_bytes = queue.size_bytes // (sum(queue.counts) or 1) + WEIGHT_BYTES
            at_once = min(missing, READ_MAX, (limit_bytes - used_bytes) // average_bytes + 1)
        refs = next_refs(core, queue, at_once, missing)
        if not refs:
            return taken, used_bytes, queue.window.cursor < queue.next_number
        records = core.bodies.read([*map(message_id_of, refs)])
        usual = extension and extension.take_usual(
            refs, records, NEVER, WEIGHT_BYTES, limit_bytes - used_bytes, now_ms, observe_ttl
        )
        if usual is not None:
            found, bytes_found = usual
            taken += found
            used_bytes += bytes_found
            for unused in islice(refs, len(found), None):
                queue.window.put_back(unused)
            if used_bytes >= limit_bytes:
                return taken, used_bytes, True
            continue
        for index, ref in enumerate(refs):
            record, due_ms = records[index], NEVER
            if record is not None:
                used_bytes += len(record) + WEIGHT_BYTES
                if observe_ttl:
                    due_ms = (ref[3] and overlay_expires_ms(ref[3])) or message_expires_ms(record)
            if record is not None and due_ms > now_ms:
                taken.append((ref, record, due_ms))
                is_enough = used_bytes >= limit_bytes
            else:
                gone_left = (gone_left or core.step()) - 1
                if record is None:
                    number, message_id, _, _ = ref
                    set_aside(core, queue, _AVAILABLE, number, message_id)
                else:
                    expire(core, queue, unlocked(ref, len(record), due_ms, _AVAILABLE))
                is_enough = gone_left <= 0 or used_bytes >= limit_bytes
            if is_enough:
                for unused in islice(refs, index + 1, None):
                    queue.window.put_back(unused)
                return taken, used_bytes, True
    return taken, used_bytes, False


def next_refs(core: Core, queue: Queue, count: int, ahead: int) -> list[Ref]:
    """Take up to `count` available messages out of the window; the caller will ask for `ahead` in all.

    Returns fewer than there are if the turn has no work left.
    """
    window = queue.window
    refs = window.next(count)
    while len(refs) < count and window.cursor < queue.next_number and core.work_left() > 0:
        _fetch(core, queue, min(max(ahead, 32), FETCH_MAX))
        refs += window.next(count - len(refs))
    return refs


def _fetch(core: Core, queue: Queue, limit: int) -> None:
    """Read the next entries behind the window's end into it."""
    window = queue.window
    start = queue_key(queue.id, _AVAILABLE, window.cursor)
    items = core.store.scan(_QUEUE, start, queue_key(queue.id, _DEFERRED, 0), limit)
    core.turn.work += len(items)
    skip = window.skip
    usual = extension.refs_of(items) if extension is not None and not skip else None
    refs: list[Ref] = usual or []
    for key, value in items if usual is None else ():
        _, _, number = unpack_queue_key(key)
        if number in skip:
            skip.discard(number)
            continue
        try:
            refs.append((number, *decode_entry(value)))
        except CorruptRecord:
            set_aside(core, queue, _AVAILABLE, number, None)
    cursor = queue.next_number
    if len(items) == limit:
        last_key, _ = items[-1]
        _, _, last_number = unpack_queue_key(last_key)
        cursor = last_number + 1
    window.fill(refs, cursor)


def next_of_session(core: Core, queue: Queue, session: Session, count: int, ahead: int) -> list[Ref]:
    """As `next_refs`, for one session."""
    window = session.window
    refs = window.next(count)
    while len(refs) < count and window.cursor < ALL and core.work_left() > 0:
        _fetch_of_session(core, queue, session, max(ahead, 32))
        refs += window.next(count - len(refs))
    return refs


def _fetch_of_session(core: Core, queue: Queue, session: Session, limit: int) -> None:
    assert queue.sessions is not None
    window = session.window
    refs: list[Ref] = []
    skip = window.skip
    found = queue.sessions.fetch(session, limit)
    core.turn.work += 1 + len(found)
    for number, entry in found:
        if number in skip:
            skip.discard(number)
            continue
        try:
            refs.append((number, *decode_entry(entry)))
        except CorruptRecord:
            set_aside(core, queue, _AVAILABLE, number, None)
    window.fill(refs, window.cursor)


def withdraw(core: Core, queue: Queue, session: Session | None, numbers: AbstractSet[int]) -> None:
    """These available messages, of the session if there is one, have been locked before it was their turn."""
    window = queue.window if session is None else session.window
    window.withdraw(numbers)
    if len(window.skip) <= queue.locks.count() + core.settings.window:
        return
    if queue.sessions is not None and session is not None:
        queue.sessions.reset(session, queue.locks)
    else:
        window.reset(queue.locks.numbers())  # else what is settled before its turn would stay in memory until then


def new_token(core: Core) -> bytes:
    return core.token_prefix + _token_number(core.take_tokens(1))


def _lock(core: Core, queue: Queue, receiver: Receiver, taken: Taken, until_ms: int, now_ms: int) -> list[Any]:
    """Lock the messages for the receiver; returns the entry items."""
    first = core.take_tokens(len(taken))
    run = _run_of(taken, core.token_prefix, first)
    if run is not None:
        items, refs, sizes = run
        queue.locks.add_run(LockRun(core.token_prefix + _token_number(first), refs, sizes, until_ms, receiver))
    elif extension is None:
        items = _locked(core, queue, receiver, taken, until_ms, first)
    else:
        held, tokens = queue.locks.held, receiver.tokens
        items = extension.lock(taken, core.token_prefix, first, until_ms, _AVAILABLE, receiver, held, tokens)
        queue.locks.expiring.update([number_of(ref) for ref, _, due_ms in taken if due_ms != NEVER])
    core.timers.arm(until_ms, (queue.id, _LOCKS))
    queue.tally.outgoing += len(taken)
    core.journal.delivered(queue.id, map(_ref_of, taken), now_ms)
    return items


def _run_of(taken: Taken, prefix: bytes, first: int) -> tuple[list[Any], list[Ref], list[int]] | None:
    """Entry items, with the tokens from `first` on, refs, and sizes; None if one of the messages expires."""
    if extension is not None:
        found: tuple[list[Any], list[Ref], list[int]] | None = extension.run_of_taken(taken, prefix, first, NEVER)
        return found
    items: list[Any] = []
    for number, (ref, record, due_ms) in enumerate(taken, first):
        if due_ms != NEVER:
            return None
        items += (prefix + _token_number(number), ref[0], ref[2], record, ref[3])
    return items, [*map(_ref_of, taken)], [len(record) for _, record, _ in taken]


def _locked(core: Core, queue: Queue, receiver: Receiver, taken: Taken, until_ms: int, first: int) -> list[Any]:
    """Lock the messages, with the tokens from `first` on; returns the entry items."""
    items: list[Any] = []
    prefix, tokens = core.token_prefix, receiver.tokens
    held, expiring, place = queue.locks.held, queue.locks.expiring, _AVAILABLE
    for (ref, record, due_ms), token_number in zip(taken, range(first, first + len(taken)), strict=True):
        token = prefix + _token_number(token_number)
        number, _, delivery_count, overlay = ref
        items += (token, number, delivery_count, record, overlay)
        held[token] = (ref, len(record), due_ms, place, until_ms, receiver)
        tokens[token] = None
        if due_ms != NEVER:
            expiring.add(number)
    return items


def _remove(core: Core, queue: Queue, taken: Taken, now_ms: int) -> list[Any]:
    """Delete the messages (receive and delete); returns the entry items."""
    items: list[Any] = []
    gone: list[Held] = []
    for ref, record, due_ms in taken:
        number, _, delivery_count, overlay = ref
        items += (new_token(core), number, delivery_count, record, overlay)
        gone.append((ref, len(record), due_ms, _AVAILABLE, 0, NOBODY))
    core.journal.delivered(queue.id, map(_ref_of, taken), now_ms)
    discard(core, queue, gone, Op.COMPLETED, RECEIVED_AND_DELETED)
    queue.tally.outgoing += len(taken)
    queue.tally.received_and_deleted += len(taken)
    return items
