"""The sessions of a queue that are offered: they have available messages and no lock.

Sessions that were available at the start come first, in the order of the oldest messages that they had then. Sessions
that became available later follow, in that order. To find the first group, each session on disk must be read. This is
done step by step when a receiver asks for any session; until it is `complete`, we do not know which session is next.

Changes of sessions meanwhile are noted, so that the order does not depend on when a session is read. A session that is
neither noted nor locked has been available since the start, if it is available at all. A session that gets a message
may have been available before; it counts as new until an older message of it is found.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

FRONT = -1  # below all sequence numbers


class Offered:
    """The ids of offered sessions, each in `_heads` or in `_later`."""

    def __init__(self, found: Iterator[tuple[bytes, int]]) -> None:
        """`found` has (encoded session id, lowest sequence number) of the sessions on disk; `load` reads it."""
        self._found: Iterator[tuple[bytes, int]] | None = found
        self._heads: dict[str, int] = {}  # available at the start -> number of the oldest message then
        self._heap: list[tuple[int, str]] = []  # items of `_heads`, and stale ones
        # The value is the number of the message by which the session came; None if it was not available right before.
        self._later: OrderedDict[str, int | None] = OrderedDict()

    @property
    def complete(self) -> bool:
        return self._found is None

    def load(self, count: int, is_locked: Callable[[str], bool]) -> int:
        """Read up to `count` sessions on disk and return their number. If there are fewer, it is complete."""
        if self._found is None:
            return 0
        looked = 0
        for looked, (key, number) in enumerate(self._found, 1):
            session_id = key.decode()
            if not is_locked(session_id):
                self.find(session_id, number)
            if looked == count:
                return looked
        self._found = None
        return looked

    def find(self, session_id: str, number: int) -> None:
        """An unlocked session has this message, the oldest available one."""
        if session_id in self._heads:
            return
        if session_id in self._later:
            came_by = self._later[session_id]
            if came_by is None or number >= came_by:
                return
            del self._later[session_id]
        self._put(session_id, number)

    def add(self, session_id: str, number: int) -> None:
        """An unlocked session gets this message: offer it after the others, unless it is offered already."""
        if session_id not in self:
            self._later[session_id] = None if self.complete else number

    def add_again(self, session_id: str) -> None:
        """A session was locked: offer it after the others, unless it is offered already."""
        if session_id not in self._heads:
            self._later[session_id] = None

    def put_back(self, session_id: str) -> None:
        """A session was taken: make it the next again."""
        self._put(session_id, FRONT)

    def take(self) -> str | None:
        """Take the next session, which is then no longer offered. Call it only when it is complete."""
        while self._heap:
            number, session_id = heappop(self._heap)
            if self._heads.get(session_id) == number:
                del self._heads[session_id]
                return session_id
        return self._later.popitem(last=False)[0] if self._later else None

    def discard(self, session_id: str) -> None:
        if self._heads.pop(session_id, None) is None:
            self._later.pop(session_id, None)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._heads or session_id in self._later

    def __bool__(self) -> bool:
        """True if there are offered sessions, or may be."""
        return bool(self._heads or self._later or self._found is not None)

    def _put(self, session_id: str, number: int) -> None:
        self._heads[session_id] = number
        heappush(self._heap, (number, session_id))
