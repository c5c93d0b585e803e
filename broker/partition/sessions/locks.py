"""Locks of sessions: one receiver at a time holds a session, and only it gets the session's messages.

| the lock ends because                    | its locked messages                                       |
|------------------------------------------|-----------------------------------------------------------|
| the receiver is closed                   | are back                                                  |
| the receiver's connection broke          | are back, a failed delivery more (a kept lock ends later) |
| its time is over                         | are back, a failed delivery more; the receiver is closed  |
| the entity's lock duration was changed   | are back; the receiver is closed                          |

Messages are back in the same turn, or over several turns if they are many. Nobody gets the session before all are back,
so that their order holds. A receiver that asks for it by name meanwhile gets it then.

Deferred messages can be received by number without the lock of their session: they are lent, each with a lock of its
own. Who holds the session can have them all the same, and then the lock of the other one ends.

A session that is not exclusive has a lock token, which its receiver is told. Another receiver that names the token
takes the session over, with the locks of its messages, which it can settle. The one that has it is told to leave; when
it has, what never reached its client is back, and the other one has the session, for the whole time of a lock. So the
messages stay in order. A token of a lock that has ended already does no harm: the receiver gets the session as any
does, with that token.

A receiver that asks for any session gets the one that has had available messages and no lock for the longest time; if
there is none, it waits. A session whose lock ends with messages left is offered again after the others, so none
starves. The locks of messages end with the lock of their session, and are renewed with it.
"""

from collections.abc import Hashable, Iterable
from itertools import islice

from broker.errors import (
    BrokerError,
    LockLost,
    NotAllowed,
    OperationTimeout,
    SessionCannotBeLocked,
    SessionLockLost,
    SessionTakenOver,
)
from broker.partition.messages import stored
from broker.partition.messages.leaving import set_aside, unlocked
from broker.partition.messages.moves import expire, put_back, put_back_failed
from broker.partition.messages.session_hand_out import next_of_session
from broker.partition.messages.settlement import put_back_some
from broker.partition.state.core import Core
from broker.partition.state.locks import LOST, Held, ref_of
from broker.partition.state.queue import Queue
from broker.partition.state.receivers import ALL, Receiver, Session, encoded
from broker.partition.state.sessions import EndingSession, Sessions, session_of
from broker.partition.state.timers import Due
from broker.partition.state.window import Ref
from protocol import error_texts
from storage.journal.events import Op
from storage.records import Place, due_key
from storage.store import Table

CHANGED = "The lock duration of the messaging entity was changed, and all its locks are lost."


def accept(
    core: Core,
    queue: Queue,
    receiver: Receiver,
    session_id: str | None,
    timeout_ms: int,
    now_ms: int,
    takes_over: bool = False,
) -> None:
    """Lock this session for the receiver, or any session, for which it waits up to `timeout_ms`.

    `takes_over`: another receiver may have the session, if the token of its lock is the one of this receiver.

    The receiver is told by `Pumped.accepted`, or closed with OperationTimeout. Raises SessionCannotBeLocked,
    InvalidArgument.
    """
    sessions = queue.sessions
    assert sessions is not None
    if session_id is None:
        core.changing()
        core.enter(queue, receiver)
        sessions.wait(receiver, now_ms + timeout_ms)
        core.timers.arm(now_ms + timeout_ms, (queue.id, Due.SESSION_WAITS))
        core.turn.wake(queue)
        return
    encoded(session_id)
    before, ending = sessions.locked.get(session_id), sessions.ending.get(session_id)
    token = receiver.session_token if takes_over else None
    if token is not None and before is not None and before.until_ms > now_ms and before.token == token:
        _take_over(core, queue, before, receiver, now_ms)
        return
    if (before is not None and before.until_ms > now_ms) or (ending is not None and _successor(core, ending.successor)):
        raise SessionCannotBeLocked(
            f"The requested session '{session_id}' cannot be accepted. It may be locked by another receiver."
        )
    core.changing()
    core.enter(queue, receiver)
    if before is not None:
        _lose(core, queue, before, now_ms)
        ending = sessions.ending.get(session_id)
    if ending is not None:
        ending.successor = receiver
        sessions.offered.discard(session_id)
        return
    _lock(core, queue, sessions, session_id, receiver, now_ms)


def _successor(core: Core, receiver: Receiver | None) -> Receiver | None:
    """The receiver that has asked for a session and gets it next, if it is still open."""
    return receiver if receiver is not None and core.receivers.get(receiver.key) is receiver else None


def _take_over(core: Core, queue: Queue, session: Session, receiver: Receiver, now_ms: int) -> None:
    """The receiver gets the session when the one that has it has left, or the lock of that one has ended."""
    core.changing()
    core.enter(queue, receiver)
    rival, former = session.successor, session.receiver
    session.successor = receiver
    if former is None:  # its connection broke, and the lock was kept
        _hand_over(core, queue, session, receiver, now_ms)
        return
    if rival is None:
        queue.line_of(former).grant(former, former.delivered)
        core.turn.closed.append((former.key, SessionTakenOver(error_texts.SESSION_LOCK_LOST)))
        core.turn.wake(queue)
    elif (waiting := _successor(core, rival)) is not None:
        core.close_receiver(waiting, SessionLockLost(error_texts.SESSION_LOCK_LOST))


def _hand_over(core: Core, queue: Queue, session: Session, receiver: Receiver, now_ms: int) -> None:
    assert queue.sessions is not None
    for token in queue.locks.tokens_from(session, session.unsent_from):
        queue.tally.released += 1
        _put_back_one(core, queue, token, Op.RELEASED, now_ms)
    session.successor = session.unsent_from = None
    session.receiver = receiver
    del queue.sessions.locked[session.id]
    session.until_ms = now_ms + queue.terms.lock_duration_ms
    _give(core, queue, session, receiver)
    queue.sessions.awake[session.id] = session
    core.turn.wake(queue)


def _lock(core: Core, queue: Queue, sessions: Sessions, session_id: str, receiver: Receiver, now_ms: int) -> None:
    """Give `receiver` the session of this name, which has no lock."""
    sessions.offered.discard(session_id)
    _give(core, queue, _new(queue, session_id, receiver, now_ms + queue.terms.lock_duration_ms), receiver)


def _new(queue: Queue, session_id: str, receiver: Receiver, until_ms: int) -> Session:
    session = Session(queue.id, session_id, receiver, until_ms)
    # Since the queue forwarded, some may be on their way: they go, or are put back.
    session.window.skip = set(queue.locks.forwarded)
    return session


def _give(core: Core, queue: Queue, session: Session, receiver: Receiver) -> None:
    assert queue.sessions is not None
    queue.sessions.locked[session.id] = receiver.session = session
    core.timers.arm(session.until_ms, (queue.id, Due.LOCKS))
    core.turn.accepted.append(receiver)
    queue.tally.sessions_accepted += 1


def offer(core: Core, now_ms: int) -> None:
    """Give sessions to receivers that wait for any, a step of it. Call it before messages are handed out."""
    offering = core.turn.take_offering()
    core.begin_part()
    for queue in offering.values():
        assert queue.sessions is not None
        if core.work_left() <= 0 or not _offer(core, queue, queue.sessions, now_ms):
            core.turn.offering[queue.id] = queue


def _offer(core: Core, queue: Queue, sessions: Sessions, now_ms: int) -> bool:
    """False if there is more to do than a step. Sessions whose messages have all expired unnoticed are not given."""
    if not sessions.waiting or not sessions.offered:
        return True
    if not sessions.offered.complete:
        looked = sessions.offered.load(core.step(), sessions.is_taken)
        core.turn.work += looked
        if not sessions.offered.complete:
            return False
    until_ms = now_ms + queue.terms.lock_duration_ms
    some_expired = _some_expired(core, queue, now_ms)
    steps = core.step()
    while core.work_left() > 0:
        if not sessions.waiting or (session_id := sessions.offered.take()) is None:
            return True
        if session_id in sessions.ending:  # it is the next, so those behind it wait for it
            sessions.offered.put_back(session_id)
            _put_back(core, queue, sessions, session_id, now_ms)
            continue
        receiver = next(iter(sessions.waiting.values()))
        session = _new(queue, session_id, receiver, until_ms)
        while steps > 0 and (refs := next_of_session(core, queue, session, 1, 1)):
            steps -= 1
            core.turn.work += 1
            if not some_expired or _is_live(core, queue, refs[0], now_ms):
                session.window.put_back(refs[0])
                del sessions.waiting[receiver.key]
                _give(core, queue, session, receiver)
                break
        else:
            if steps <= 0 or session.window.cursor < ALL:
                if sessions.has_available(session.id):
                    sessions.offered.put_back(session.id)
                return False
    return not (sessions.waiting and sessions.offered)


def take_accepted(core: Core) -> list[tuple[Hashable, str, int]]:
    """The receivers that have got a session since the last call, the session ids, and the ends of the locks."""
    accepted = core.turn.take_accepted()
    return [
        (receiver.key, receiver.session.id, core.wall_ms(receiver.session.until_ms))
        for receiver in accepted
        if receiver.session is not None and core.receivers.get(receiver.key) is receiver
    ]


def _some_expired(core: Core, queue: Queue, now_ms: int) -> bool:
    start, end = due_key(queue.id, Due.EXPIRY, 0, 0), due_key(queue.id, Due.EXPIRY, now_ms + 1, 0)
    return bool(core.store.scan(Table.DUE, start, end, 1))


def _is_live(core: Core, queue: Queue, ref: Ref, now_ms: int) -> bool:
    """True if this available message, taken out of its window, can be received. Else it was expired or quarantined."""
    number, message_id, _, overlay = ref
    record = core.bodies.read_one(message_id)
    if record is None:
        set_aside(core, queue, Place.AVAILABLE, number, message_id)
        return False
    due_ms = stored.expires_ms(queue, overlay, record)
    if due_ms <= now_ms:
        expire(core, queue, unlocked(ref, len(record), due_ms, Place.AVAILABLE))
        return False
    return True


def held(queue: Queue, receiver: Hashable, session_id: str, now_ms: int) -> Session:
    """The session, if this receiver has its lock. Raises SessionLockLost, NotAllowed."""
    if queue.sessions is None:
        raise NotAllowed(f"The messaging entity '{queue.terms.name}' does not require sessions.")
    session = queue.sessions.locked.get(session_id)
    if session is None or session.until_ms <= now_ms or session.receiver is None or session.receiver.key != receiver:
        raise SessionLockLost(error_texts.SESSION_LOCK_LOST)
    return session


def require_holder(queue: Queue, receiver: Hashable, tokens: Iterable[bytes], now_ms: int) -> None:
    """Refuse if one of these locks belongs to a session that was taken over from this receiver.

    Raises SessionLockLost.
    """
    for token in tokens:
        *_, holder = queue.locks.find(token, now_ms) or (None,)
        if not isinstance(holder, Session) or holder.token is None:
            continue
        if holder.receiver is None or holder.receiver.key != receiver:
            raise SessionLockLost(error_texts.SESSION_LOCK_LOST)


def named(core: Core, receiver: Hashable, results: list[BrokerError | None], now_ms: int) -> list[BrokerError | None]:
    """Results of a receiver's settlements, with SessionLockLost where a lock was lost with that of the session."""
    if not any(isinstance(result, LockLost) for result in results):
        return results
    opened = core.receivers.get(receiver)
    if opened is not None and opened.session is not None and opened.session.until_ms > now_ms:
        return results
    lost = SessionLockLost(error_texts.SESSION_LOCK_LOST)
    return [lost if isinstance(result, LockLost) else result for result in results]


def renew(core: Core, queue: Queue, session: Session, now_ms: int) -> int:
    """Renew the lock and those of its messages; returns their new end."""
    assert queue.sessions is not None
    core.changing()
    until_ms = session.until_ms = now_ms + queue.terms.lock_duration_ms
    locked = queue.sessions.locked
    locked[session.id] = locked.pop(session.id)
    core.timers.arm(until_ms, (queue.id, Due.LOCKS))
    return until_ms


def close(core: Core, queue: Queue, receiver: Receiver, broken: bool, unsent_from: bytes | None, now_ms: int) -> None:
    """The receiver was closed. `broken` and `unsent_from` as in `Partition.close_receiver`."""
    session = receiver.session
    if session is None:
        return  # it waited for a session
    session.unsent_from = unsent_from
    if (successor := _successor(core, session.successor)) is not None:
        _hand_over(core, queue, session, successor, now_ms)
        return
    session.successor = None
    if broken and core.settings.keep_locks_of_broken_connections:
        session.receiver = None
        return
    unsent = len(queue.locks.tokens_from(session, unsent_from))
    queue.tally.released += unsent
    queue.tally.locks_lost += len(queue.locks.tokens(session)) - unsent if broken else 0
    _release(core, queue, session, Op.LOCK_LOST if broken else None, now_ms)


def _release(core: Core, queue: Queue, session: Session, failed_by: Op | None, now_ms: int) -> None:
    """End the lock and put its messages back, in later turns if they are many. `failed_by`: as in `Ending`."""
    sessions = queue.sessions
    assert sessions is not None
    session.receiver = None  # which refers to the session
    del sessions.locked[session.id]
    sessions.awake.pop(session.id, None)
    ending = sessions.ending[session.id] = EndingSession(session, failed_by)
    ending.successor, session.successor = _successor(core, session.successor), None
    if ending.successor is None:
        sessions.offered.add_again(session.id)
    _put_back(core, queue, sessions, session.id, now_ms)


def _put_back(
    core: Core, queue: Queue, sessions: Sessions, session_id: str, now_ms: int, all_of_it: bool = False
) -> None:
    """Put back a step of the messages of an ended lock. After the last of them, the session can be given again."""
    ending = sessions.ending[session_id]
    has_work_left = all_of_it or not core.turn.work or core.work_left() > 0
    if not has_work_left or not put_back_some(core, queue, ending, now_ms, all_of_it):
        core.timers.arm(now_ms, (queue.id, Due.LOCKS))
        return
    del sessions.ending[session_id]
    core.turn.work += 1
    successor = _successor(core, ending.successor)
    if successor is not None:
        _lock(core, queue, sessions, session_id, successor, now_ms)
    elif sessions.has_available(session_id):
        sessions.offered.add_again(session_id)  # does nothing if it has the place that it got when the lock ended
    else:
        sessions.offered.discard(session_id)
    core.turn.wake(queue)


def release_all(core: Core, queue: Queue, now_ms: int) -> None:
    """The receivers of all locked sessions are closed: put all messages back at once."""
    assert queue.sessions is not None
    for session in list(queue.sessions.locked.values()):
        _release(core, queue, session, None, now_ms)
    for session_id in list(queue.sessions.ending):
        _put_back(core, queue, queue.sessions, session_id, now_ms, all_of_it=True)


def end_locks(core: Core, queue: Queue, now_ms: int) -> None:
    """The timer: end locks whose time is over and put messages back, a step of both; earlier locks come first."""
    sessions = queue.sessions
    assert sessions is not None
    for session_id in list(islice(sessions.ending, core.step())):
        if core.work_left() <= 0:
            break
        _put_back(core, queue, sessions, session_id, now_ms)
    for session in list(islice(sessions.locked.values(), core.step())):
        if session.until_ms > now_ms or core.work_left() <= 0:
            break
        core.turn.work += 1
        _lose(core, queue, session, now_ms)
    if sessions.ending:
        core.timers.arm(now_ms, (queue.id, Due.LOCKS))
    for session in sessions.locked.values():
        core.timers.arm(session.until_ms, (queue.id, Due.LOCKS))
        break
    _end_lent(core, queue, sessions, now_ms)


def _end_lent(core: Core, queue: Queue, sessions: Sessions, now_ms: int) -> None:
    """End a step of the locks of lent messages whose time is over."""
    for token in list(islice(sessions.lent.tokens, core.step())):
        *_, until_ms, _ = _lent(queue, token)
        if until_ms > now_ms or core.work_left() <= 0:
            break
        core.turn.work += 1
        queue.tally.locks_ended += 1
        put_back_failed(core, queue, queue.locks.remove(token), None, Op.LOCK_EXPIRED, now_ms)
    for token in sessions.lent.tokens:
        *_, until_ms, _ = _lent(queue, token)
        core.timers.arm(max(until_ms, now_ms), (queue.id, Due.LOCKS))
        break


def _lent(queue: Queue, token: bytes) -> Held:
    held = queue.locks.find(token, LOST)  # also if its time is over
    assert held is not None
    return held


def take_back_lent(core: Core, queue: Queue, session: Session, numbers: Iterable[int], now_ms: int) -> None:
    """Who holds the session wants these of its messages: put back those that are lent, which is no failed delivery."""
    assert queue.sessions is not None
    for number in numbers:
        token = queue.sessions.lent_token(number)
        if token is None or token in queue.locks.staged:
            continue
        if session_of(ref_of(_lent(queue, token))) == session.id:
            _put_back_one(core, queue, token, Op.RELEASED, now_ms)
            queue.tally.released += 1


def _put_back_one(core: Core, queue: Queue, token: bytes, op: Op, now_ms: int) -> None:
    core.changing()
    held = queue.locks.remove(token)
    core.journal.done(op, queue.id, [held])
    put_back(core, queue, held, now_ms)


def _lose(core: Core, queue: Queue, session: Session, now_ms: int) -> None:
    unsent = len(queue.locks.tokens_from(session, session.unsent_from))
    queue.tally.released += unsent
    queue.tally.locks_ended += len(queue.locks.tokens(session)) - unsent
    queue.tally.session_locks_lost += 1
    if session.receiver is not None:
        core.close_receiver(session.receiver, SessionLockLost(error_texts.SESSION_LOCK_LOST))
    _release(core, queue, session, Op.LOCK_EXPIRED, now_ms)


def drop_locks(core: Core, queue: Queue, now_ms: int) -> None:
    """End all locks because the entity was changed (ST13). This is no failed delivery."""
    assert queue.sessions is not None
    for session in queue.sessions.locked.values():
        queue.tally.locks_lost += len(queue.locks.tokens(session))
        queue.tally.session_locks_lost += 1
        if session.receiver is not None:
            core.close_receiver(session.receiver, SessionLockLost(CHANGED))
    release_all(core, queue, now_ms)
    for token in list(queue.sessions.lent.tokens):
        queue.tally.locks_lost += 1
        _put_back_one(core, queue, token, Op.LOCK_LOST, now_ms)


def end_waits(core: Core, queue: Queue, now_ms: int) -> None:
    """The timer: end the waits of receivers whose time is over.

    First they get sessions that are available now, because a turn fires its timers before it offers sessions, and some
    receivers do not wait at all.
    """
    assert queue.sessions is not None
    if not _offer(core, queue, queue.sessions, now_ms):
        core.timers.arm(now_ms, (queue.id, Due.SESSION_WAITS))
        return
    for receiver in queue.sessions.overdue(now_ms):
        core.close_receiver(receiver, OperationTimeout("No session became available in the time given."))
    deadline_ms = queue.sessions.next_deadline_ms()
    if deadline_ms is not None:
        core.timers.arm(deadline_ms, (queue.id, Due.SESSION_WAITS))
