"""Hands out available messages of sessions, each to the receiver that has the lock of the session."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from broker.partition.messages import stored
from broker.partition.messages.deliveries import (
    READ_MAX,
    RECEIVED_AND_DELETED,
    WEIGHT_BYTES,
    Deliveries,
    Drained,
    token_of,
)
from broker.partition.messages.leaving import discard, set_aside, unlocked
from broker.partition.messages.moves import expire
from broker.partition.messages.selecting import of_session
from broker.partition.state.core import Core
from broker.partition.state.locks import NOBODY, Held, LockRun
from broker.partition.state.queue import Queue
from broker.partition.state.receivers import ALL, Receiver, Session
from broker.partition.state.sessions import Sessions
from broker.partition.state.window import Ref
from broker.wire import ENTRY
from protocol.extension import extension
from storage.journal.events import Op
from storage.records import NEVER, Field, Place, message_expires_ms

# Here, because to look up a member of an enum takes as long as a call.
_AVAILABLE, _EXPIRES_MS = Place.AVAILABLE, Field.EXPIRES_MS

OfSession = tuple[Session, Receiver, list[Ref]]  # what a receiver is to get of its session


def hand_out_sessions(
    core: Core,
    queue: Queue,
    sessions: Sessions,
    now_ms: int,
    budget_bytes: int,
    deliveries: Deliveries,
    drained: Drained,
) -> tuple[int, bool]:
    """Each session's receiver gets the messages of its session.

    Returns the bytes used, and True if it was cut short by the budget or because the turn has no work left. Bodies are
    read for many sessions at once, because each may have few messages. A session with more messages than its share of a
    read comes again after the others.
    """
    line, used_bytes = queue.line, 0
    average_bytes = queue.size_bytes // (sum(queue.counts) or 1) + WEIGHT_BYTES
    given_bytes: dict[str, int] = {}  # bytes given to sessions that came again
    gone_left = core.step()
    turn, sessions.awake = deque(sessions.awake.values()), {}
    while turn and used_bytes < budget_bytes and gone_left > 0 and core.work_left() > 0:
        left_bytes = budget_bytes - used_bytes
        most = min(READ_MAX, left_bytes // average_bytes + 1)
        batch = _next_batch(core, queue, sessions, turn, most, given_bytes, drained, now_ms)
        if not batch:
            continue
        records = core.bodies.read([ref[1] for _, _, refs in batch for ref in refs])
        usual = _give_usual(core, queue, batch, records, left_bytes, now_ms)
        if usual is not None:
            given, bytes_used = usual
        else:
            given, bytes_used, gone = _give_each(core, queue, batch, records, left_bytes, gone_left, now_ms)
            gone_left -= gone
        used_bytes += bytes_used
        for (session, receiver, _), items in zip(batch, given, strict=False):
            if items:
                receiver.delivered += len(items) // ENTRY
                deliveries.append((receiver.key, 0 if receiver.receive_and_delete else session.until_ms, items))
            if receiver.delivered >= receiver.limit:
                line.waiting.pop(receiver.key, None)
            if session.may_have_more or (line.draining and receiver.key in line.draining):
                bytes_given = sum(map(len, items[3::ENTRY])) + WEIGHT_BYTES * (len(items) // ENTRY)
                given_bytes[session.id] = given_bytes.get(session.id, 0) + bytes_given
                turn.append(session)
        for session, _, refs in islice(batch, len(given), None):
            for ref in refs:
                session.window.put_back(ref)
            turn.append(session)
    sessions.awake |= {session.id: session for session in turn}
    return used_bytes, bool(sessions.awake)


def _next_batch(
    core: Core,
    queue: Queue,
    sessions: Sessions,
    turn: deque[Session],
    most: int,
    given_bytes: dict[str, int],
    drained: Drained,
    now_ms: int,
) -> list[OfSession]:
    """Take up to `most` messages out of the windows of the next sessions, as far as their receivers have credit.

    Those that have had their share are awake again. Drains end where there is nothing left.
    """
    line, locked, share_bytes = queue.line, sessions.locked, core.settings.pump_bytes_per_receiver
    batch: list[OfSession] = []
    has_work_left = True
    while turn and most > 0 and has_work_left:
        session = turn.popleft()
        receiver = session.receiver
        if receiver is None or locked.get(session.id) is not session:
            continue
        wanted = receiver.limit - receiver.delivered
        if wanted > 0:
            if given_bytes and given_bytes.get(session.id, 0) >= share_bytes:
                sessions.awake[session.id] = session
                continue
            wanted = wanted if wanted < most else most
            window = session.window
            refs = window.next(wanted)
            if len(refs) < wanted and window.cursor < ALL:
                refs += next_of_session(core, queue, session, wanted - len(refs), wanted)
                has_work_left = core.work_left() > 0
            if receiver.selector is not None and refs:
                refs = of_session(core, queue, receiver.selector, refs, now_ms)
                has_work_left = core.work_left() > 0
                if not refs and session.may_have_more:
                    turn.appendleft(session)
                    continue
            if refs:
                most -= len(refs)
                batch.append((session, receiver, refs))
                continue
            if window.cursor < ALL:  # there is more to read
                turn.appendleft(session)
                continue
        if receiver.key in line.draining:
            line.end_drain(receiver)
            drained.append((receiver.key, receiver.delivered))
    return batch


def _give_usual(
    core: Core, queue: Queue, batch: list[OfSession], records: list[bytes | None], limit_bytes: int, now_ms: int
) -> tuple[list[list[Any]], int] | None:
    """Lock the messages of the first sessions of the batch, until the bytes of their records reach the limit.

    Returns entry items for each of these sessions, and the bytes. None if a message is not usual; then nothing was
    done.
    """
    if extension is None or any(receiver.receive_and_delete for _, receiver, _ in batch):
        return None
    first = core.take_tokens(len(records))
    found = extension.give(batch, records, WEIGHT_BYTES, limit_bytes, core.token_prefix, first)
    if found is None:
        return None
    given, refs, sizes, holders, used_bytes = found
    queue.locks.add_run(LockRun(token_of(core, first), refs, sizes, NEVER, holders))
    queue.tally.outgoing += len(refs)
    core.journal.delivered(queue.id, refs, now_ms)
    return given, used_bytes


def _give_each(
    core: Core,
    queue: Queue,
    batch: list[OfSession],
    records: list[bytes | None],
    limit_bytes: int,
    gone_limit: int,
    now_ms: int,
) -> tuple[list[list[Any]], int, int]:
    """Give any messages as `_give_usual` gives usual ones, until so many are gone: see `_give`.

    Returns their number, too.
    """
    given: list[list[Any]] = []
    used_bytes = gone = 0
    of_each = iter(records)
    for session, receiver, refs in batch:
        if used_bytes >= limit_bytes or gone >= gone_limit:
            break
        items, bytes_given, gone_here = _give(core, queue, session, receiver, refs, of_each, gone_limit - gone, now_ms)
        given.append(items)
        used_bytes += bytes_given
        gone += gone_here
    return given, used_bytes, gone


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
    place = _AVAILABLE
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
        token = token_of(core, token_number)
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


def next_of_session(core: Core, queue: Queue, session: Session, count: int, ahead: int) -> list[Ref]:
    """Take up to `count` of the session's messages out of its window; the caller will ask for `ahead` in all.

    Returns fewer than there are if the turn has no work left.
    """
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
        if (ref := stored.read_entry(core, queue, _AVAILABLE, number, entry)) is not None:
            refs.append(ref)
    window.fill(refs, window.cursor)
