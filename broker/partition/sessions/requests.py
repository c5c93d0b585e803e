"""Requests about sessions. Their records are in `broker.requests`.

A `receiver` among the arguments must hold the lock of the session; otherwise the request fails with SessionLockLost.
"""

from collections.abc import Generator, Iterator
from heapq import merge
from itertools import groupby

from broker import requests
from broker.errors import InvalidArgument, NotAllowed
from broker.partition.sessions import locks as session_locks
from broker.partition.sessions.states import get_state, set_state
from broker.partition.state.core import Core
from broker.partition.state.queue import Queue
from broker.partition.state.receivers import encoded
from broker.partition.state.sessions import Sessions, first_entries, sessions_with_state
from protocol.bounds import MAX_COUNT


def renew_session_lock(core: Core, queue: Queue, asked: requests.RenewSessionLock, now_ms: int) -> int:
    receiver, session_id = asked
    session = session_locks.held(queue, receiver, session_id, now_ms)
    return core.wall_ms(session_locks.renew(core, queue, session, now_ms))


def get_session_state(core: Core, queue: Queue, asked: requests.GetSessionState, now_ms: int) -> bytes | None:
    receiver, session_id = asked
    return get_state(core, queue, session_locks.held(queue, receiver, session_id, now_ms).id)


def set_session_state(core: Core, queue: Queue, asked: requests.SetSessionState, now_ms: int) -> None:
    receiver, session_id, state = asked
    set_state(core, queue, session_locks.held(queue, receiver, session_id, now_ms).id, state, now_ms)


def get_message_sessions(
    core: Core, queue: Queue, asked: requests.GetMessageSessions, now_ms: int
) -> Generator[None, None, list[str]]:
    """A page of session ids. Shorter ids come first."""
    _, page = yield from page_message_sessions(core, queue, requests.PageMessageSessions(*asked), now_ms)
    return page


def page_message_sessions(
    core: Core, queue: Queue, asked: requests.PageMessageSessions, now_ms: int
) -> Generator[None, None, tuple[int, list[str]]]:
    """The number of sessions that were skipped, which is less than `skip` if there are fewer, and the page."""
    updated_after_ms, skip, top = asked
    sessions = sessions_of(queue)
    _check(skip, top)
    # After a page clients ask for the next one. It begins where the last one ended, instead of counting from the start.
    after, passed = None, 0
    if sessions.last_page is not None and sessions.last_page[:2] == (updated_after_ms, skip):
        after, passed = sessions.last_page[2], skip
    passed, found = yield from _page(core, queue, updated_after_ms, after, passed, skip, top)
    sessions.last_page = (updated_after_ms, skip + len(found), found[-1]) if found else None
    return passed - len(found), [session_id.decode() for session_id in found]


def message_sessions_behind(
    core: Core, queue: Queue, asked: requests.MessageSessionsBehind, now_ms: int
) -> Generator[None, None, list[str]]:
    """List the sessions that come behind this one, whether or not it still is one of them."""
    updated_after_ms, session_id, top = asked
    sessions_of(queue)
    _check(0, top)
    _, found = yield from _page(core, queue, updated_after_ms, encoded(session_id), 0, 0, top)
    return [session_id.decode() for session_id in found]


def _check(skip: int, top: int) -> None:
    """Check the bounds of a page. Raises InvalidArgument."""
    if not 0 <= skip <= MAX_COUNT or not 1 <= top <= MAX_COUNT:
        raise InvalidArgument(f"skip is 0 to {MAX_COUNT} and top is 1 to {MAX_COUNT}, not {skip} and {top}.")


def _page(
    core: Core, queue: Queue, updated_after_ms: int | None, after: bytes | None, passed: int, skip: int, top: int
) -> Generator[None, None, tuple[int, list[bytes]]]:
    """Up to `top` sessions behind `after` and the first `skip` ones, of which `passed` are before it; and the number of
    all that come before the end of these. Step by step.
    """
    found: list[bytes] = []
    for session_id in _session_ids(core, queue, updated_after_ms, after):
        if session_id is not None:
            passed += 1
            if passed > skip:
                found.append(session_id)
            if len(found) == top:
                break
        core.turn.work += 1
        if core.work_left() <= 0:
            yield
            core.queue(queue.id)  # raises EntityNotFound if it was deleted meanwhile
    return passed, found


def _session_ids(core: Core, queue: Queue, updated_after_ms: int | None, after: bytes | None) -> Iterator[bytes | None]:
    """Session ids in their order; None for each session that was read and does not match."""
    with_state = sessions_with_state(core.store, queue.id, after)
    if updated_after_ms is not None:
        return (session_id if row.updated_ms > updated_after_ms else None for session_id, row in with_state)
    with_messages = (session_id for session_id, _ in first_entries(core.store, queue.id, after))
    both = merge(with_messages, (session_id for session_id, _ in with_state), key=lambda each: (len(each), each))
    return (session_id for session_id, _ in groupby(both))


def sessions_of(queue: Queue) -> Sessions:
    """The sessions of the queue. Raises NotAllowed if it has none."""
    if queue.sessions is None:
        raise NotAllowed(f"'{queue.terms.name}' does not require sessions.")
    return queue.sessions
