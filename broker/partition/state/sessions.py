"""The sessions of one queue or subscription: offered ones, locked ones, and receivers that wait for one.

A session exists as long as messages have its id, or it has a state. For a session with available messages and no lock,
only the id is in memory, so 100,000 of them take 20 to 30 MB. A locked session is an object with the head of its
messages. When its lock ends, it is offered again at once. But while it is in `ending`, because not all its messages are
back, nobody gets it. So its next receiver finds all of them, in their order.

On disk each entry of the queue is listed once more under its session (SESSION_ENTRIES). Code that puts, moves or
deletes an entry of QUEUE does the same here, in the same commit; the entry's overlay names the session. If an
unreadable entry went to quarantine, its listing may stay, and is deleted when it is found.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from struct import Struct

from broker.partition.state.locks import LOST, NOBODY, Ending, Held, Holder, Locks, end_of
from broker.partition.state.offered import Offered
from broker.partition.state.receivers import ALL, Receiver, Session
from broker.partition.state.window import Ref, number_of
from storage.journal.events import Op
from storage.records import (
    CorruptRecord,
    Field,
    Overlay,
    Place,
    SessionRow,
    decode_session,
    entity_key,
    entry_or_none,
    queue_key,
    session_entry_key,
    session_key,
    unpack_session_entry_key,
    unpack_session_key,
)
from storage.store import Store, Table

PAGE = 1000
LENT_FORGOTTEN = 100  # tokens of messages that are not lent any more may be kept beside as many as twice the others
# Here, because to look up a member of an enum takes as long as a call.
_SESSION, _AVAILABLE = Field.SESSION, Place.AVAILABLE
_QUEUE, _ENTRIES = Table.QUEUE, Table.SESSION_ENTRIES
_packed = Struct(">Q").pack


def session_of(ref: Ref) -> str:
    """The session of a message of a queue that requires sessions."""
    overlay = ref[3]  # faster than unpacking, because this is done for each message
    assert overlay is not None
    session_id: str = overlay[_SESSION]
    return session_id


class EndingSession(Ending):
    """`successor`: the receiver that has asked for the session meanwhile, and gets it next if it is still open."""

    __slots__ = ("session", "successor")

    def __init__(self, session: Session, failed_by: Op | None) -> None:
        super().__init__(session, failed_by, session.unsent_from)
        self.session = session
        self.successor: Receiver | None = None


class Sessions:
    """`window` is the number of entries of one session's head in memory; there may be as many returned ones besides."""

    def __init__(self, store: Store, queue_id: int, window: int) -> None:
        self._store = store
        self._queue_id = queue_id
        self._window = window
        self.offered = Offered(first_entries(store, queue_id))
        self.locked: dict[str, Session] = {}  # in the order in which the locks end
        self.ending: dict[str, EndingSession] = {}  # by session id
        self.waiting: OrderedDict[Hashable, Receiver] = OrderedDict()  # receivers that wait for any session
        self.awake: dict[str, Session] = {}  # sessions that may have messages for their receivers
        # Holds the locks of deferred messages that were received without the lock of their session. They end in the
        # order of its tokens, each at its own time, or when who holds the session wants the message.
        self.lent = Holder()
        self._lent_tokens: dict[int, bytes] = {}  # by sequence number; also of some that are not lent any more
        self.last_page: tuple[object, int, bytes] | None = None  # see `broker.partition.sessions.requests`
        self._deadlines: list[tuple[int, int, Receiver]] = []  # also of some that do not wait any more
        self._waits = 0

    # -- messages

    def enter(self, refs: Sequence[Ref]) -> None:
        """Add new available messages, by ascending numbers, whose entries are staged."""
        queue_id, locked, offered, awake, limit = self._queue_id, self.locked, self.offered, self.awake, self._window
        ending = self.ending
        listed = []
        for ref in refs:
            number, session_id = ref[0], session_of(ref)
            session = locked.get(session_id)
            if session is None:
                if session_id not in ending:
                    offered.add(session_id, number)
                listed.append((session_entry_key(queue_id, _AVAILABLE, session_id.encode(), number), b""))
                continue
            listed.append((session.prefix + _packed(number), b""))
            awake[session_id] = session
            window = session.window
            if window.cursor == ALL:
                if len(window.entries) < limit:
                    window.entries.append(ref)
                elif len(window.entries) - window.head < limit:
                    window.fill([ref], ALL)
                else:
                    window.cursor = number  # messages from here on are fetched later
        self._store.insert_many(_ENTRIES, listed)

    def leave(self, messages: Iterable[Held]) -> None:
        """The entries of these messages are deleted."""
        queue_id, locked, offered = self._queue_id, self.locked, self.offered
        keys, perhaps_empty = [], set()  # unlocked sessions
        for ref, _, _, place, _, _ in messages:
            number, session_id = ref[0], session_of(ref)
            session = locked.get(session_id)
            if session is not None and place == _AVAILABLE:
                keys.append(session.prefix + _packed(number))
                continue
            keys.append(session_entry_key(queue_id, place, session_id.encode(), number))
            if place == _AVAILABLE:
                perhaps_empty.add(session_id)
        if not offered.complete:
            for session_id in perhaps_empty:
                if session_id not in self.ending and (oldest := self._oldest(session_id)) is not None:
                    offered.find(session_id, oldest)
        self._store.delete_many(_ENTRIES, keys)
        for session_id in perhaps_empty:
            if session_id in offered and not self.has_available(session_id):
                offered.discard(session_id)

    def lend(self, number: int, token: bytes) -> None:
        """This deferred message gets a lock of its own."""
        lent, tokens = self.lent.tokens, self._lent_tokens
        lent[token] = None
        tokens[number] = token
        if len(tokens) > 2 * len(lent) + LENT_FORGOTTEN:
            self._lent_tokens = {number: token for number, token in tokens.items() if token in lent}

    def lent_token(self, number: int) -> bytes | None:
        """The token of the lock of its own that this message has; None if it has none."""
        token = self._lent_tokens.get(number)
        return token if token in self.lent.tokens else None

    def lock_end_of(self, number: int, session_id: str | None, locks: Locks, now_ms: int) -> int | None:
        """When the lock ends that this message of a session has, by itself or by its session; None if it has none."""
        token = self.lent_token(number)
        if token is not None and (held := locks.find(token, now_ms)) is not None:
            return end_of(held)
        session = self.locked.get(session_id) if session_id is not None else None
        return session.until_ms if session is not None and session.until_ms > now_ms else None

    def has_available(self, session_id: str) -> bool:
        """True if the session has available messages; locked ones count, too."""
        return self._oldest(session_id) is not None

    def _oldest(self, session_id: str) -> int | None:
        start = session_entry_key(self._queue_id, _AVAILABLE, session_id.encode(), 0)
        end = session_entry_key(self._queue_id, _AVAILABLE, session_id.encode(), ALL)
        for key, _ in self._store.scan(_ENTRIES, start, end, 1):
            return int.from_bytes(key[-8:], "big")
        return None

    def put(self, place: Place, ref: Ref) -> None:
        """List an entry that was put into this place; if that is available, see `enter_again`."""
        key = session_entry_key(self._queue_id, place, session_of(ref).encode(), number_of(ref))
        self._store.put(_ENTRIES, key, b"")

    def enter_again(self, ref: Ref) -> None:
        """List an available entry under a number that it had before; `put_back` comes next."""
        session_id = session_of(ref)
        is_known = self.offered.complete or self.is_taken(session_id)
        if not is_known and (oldest := self._oldest(session_id)) is not None:
            self.offered.find(session_id, oldest)  # it is available already, perhaps by messages behind this one
        self.put(_AVAILABLE, ref)

    def drop(self, place: Place, number: int) -> None:
        """Remove the listing of an entry that is about to be quarantined."""
        entry = entry_or_none(self._store.get(_QUEUE, queue_key(self._queue_id, place, number)))
        if entry is not None:
            self.leave([((number, *entry), 0, 0, place, 0, NOBODY)])

    def put_back(self, ref: Ref, locks: Locks) -> None:
        """A message that was handed out is available again."""
        session_id = session_of(ref)
        session = self.locked.get(session_id)
        if session is None:
            if session_id not in self.ending:
                self.offered.add_again(session_id)
            return
        session.window.put_back(ref)
        if len(session.window.returned) > self._window:
            self.reset(session, locks)
        self.awake[session.id] = session

    def is_taken(self, session_id: str) -> bool:
        """True if the session is locked, or its place among the offered ones depends on the end of its lock."""
        return session_id in self.locked or session_id in self.ending

    def forget(self, messages: Iterable[tuple[int, Overlay | None]]) -> None:
        """Forget messages as `Queue.forget` does. Without the overlay we do not know the session of a message."""
        numbers: dict[str, list[int]] = {}  # by session
        unknown: list[int] = []
        for number, overlay in messages:
            if overlay is None:
                unknown.append(number)
            elif overlay[_SESSION] in self.locked:
                numbers.setdefault(overlay[_SESSION], []).append(number)
        for session_id in self.locked if unknown else numbers:
            self.locked[session_id].window.remove([*numbers.get(session_id, ()), *unknown])

    def reset(self, session: Session, locks: Locks) -> None:
        """Let the messages of the session be fetched again from the start."""
        held = (locks.held[token] for token in locks.tokens(session))
        session.window.reset({number_of(ref) for ref, _, _, place, _, _ in held if place == _AVAILABLE})

    def fetch(self, session: Session, limit: int) -> list[tuple[int, bytes]]:
        """The next entries behind the window's end, (sequence number, queue entry), which the caller adds."""
        limit = min(limit, self._window)
        found = self.entries(_AVAILABLE, session.key, session.window.cursor, limit)
        session.window.cursor = ALL
        if len(found) == limit:
            last_number, _ = found[-1]
            session.window.cursor = last_number + 1
        return found

    def entries(self, place: Place, key: bytes, from_number: int, limit: int) -> list[tuple[int, bytes]]:
        """(sequence number, queue entry) of messages of the session with this key, from this number on.

        Fewer than `limit` if there are no more.
        """
        store, queue_id = self._store, self._queue_id
        found: list[tuple[int, bytes]] = []
        end = session_entry_key(queue_id, place, key, ALL)
        more = True
        while more and (missing := limit - len(found)) > 0:
            start = session_entry_key(queue_id, place, key, from_number)
            items = store.scan(_ENTRIES, start, end, missing)
            more = len(items) == missing
            for listed, _ in items:
                number = int.from_bytes(listed[-8:], "big")
                entry = store.get(_QUEUE, queue_key(queue_id, place, number))
                if entry is None:
                    store.delete(_ENTRIES, listed)
                else:
                    found.append((number, entry))
                from_number = number + 1
        return found

    def check(self) -> None:
        """Assert the invariants between operations."""
        assert self.locked.keys().isdisjoint(self.ending)
        assert not any(map(self.offered.__contains__, self.locked)), "a session that is locked is offered"
        for session_id, ending in self.ending.items():
            assert ending.holder.until_ms == LOST
            assert ending.successor is None or session_id not in self.offered, "a session that is promised is offered"
        for session in self.locked.values():
            session.window.check()
        assert self.lent.tokens.keys() <= set(self._lent_tokens.values())

    # -- waiting receivers

    def wait(self, receiver: Receiver, deadline_ms: int) -> None:
        self.waiting[receiver.key] = receiver
        self._waits += 1
        heappush(self._deadlines, (deadline_ms, self._waits, receiver))

    def overdue(self, now_ms: int) -> list[Receiver]:
        """Remove and return the receivers whose time to wait has ended."""
        found = []
        while self._deadlines:
            deadline_ms, _, receiver = self._deadlines[0]
            waits = self.waiting.get(receiver.key) is receiver  # and not another receiver that has its key now
            if waits and deadline_ms > now_ms:
                break
            heappop(self._deadlines)
            if waits:
                del self.waiting[receiver.key]
                found.append(receiver)
        return found

    def next_deadline_ms(self) -> int | None:
        if not self._deadlines:
            return None
        deadline_ms, _, _ = self._deadlines[0]
        return deadline_ms


def first_entries(store: Store, queue_id: int, after: bytes | None = None) -> Iterator[tuple[bytes, int]]:
    """(encoded session id, lowest sequence number) of each session with available messages, in the order of keys.

    Begins behind the session `after`. Takes one seek for each session, however many messages it has.
    """
    start = session_entry_key(queue_id, _AVAILABLE, after or b"", 0)
    if after is not None:
        start = _behind(start)
    end = session_entry_key(queue_id, _AVAILABLE + 1, b"", 0)
    while items := store.scan(_ENTRIES, start, end, 1):
        [(key, _)] = items
        _, _, session_id, number = unpack_session_entry_key(key)
        yield session_id, number
        start = _behind(key)


def _behind(key: bytes) -> bytes:
    """A key above all entries of this entry's session, and below those of the next session."""
    return key[:-8] + b"\xff" * 9


def sessions_with_state(store: Store, queue_id: int, after: bytes | None = None) -> Iterator[tuple[bytes, SessionRow]]:
    """(encoded session id, its row in SESSIONS) in the order of keys, beginning behind the session `after`.

    A state whose row cannot be read counts as set long ago.
    """
    start = entity_key(queue_id) if after is None else session_key(queue_id, after) + b"\0"
    while items := store.scan(Table.SESSIONS, start, entity_key(queue_id + 1), PAGE):
        for key, value in items:
            try:
                row = decode_session(value)
            except CorruptRecord:
                row = SessionRow(0, 0)
            _, session_id = unpack_session_key(key)
            yield session_id, row
        last_key, _ = items[-1]
        start = last_key + b"\0"


def states_bytes(store: Store, queue_id: int) -> int:
    """The bytes of all states of a queue."""
    return sum(row.state_bytes for _, row in sessions_with_state(store, queue_id))
