"""Which sessions of a queue are offered: they have available messages and no lock.

First come those that were available at the start, in the order of the oldest messages they had then; behind them those
that became available since, in the order in which they did. To find the first takes a look at each session on disk, so
it is done step by step, when somebody wants any session; until it is `complete`, which of them is next is not known.

What happens to sessions meanwhile is noted, so that the order does not depend on when they are looked at. A session
that is neither noted nor locked has been available since the start, if it is available at all. One that gets a message
may have been, too: it counts as new until an older message of it is found.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

FRONT = -1  # below all sequence numbers


class Offered:
    """Ids of sessions. A session is in `_heads` or in `_later`, or in neither."""

    def __init__(self, found: Iterator[tuple[bytes, int]]) -> None:
        """`found`: (encoded session id, lowest sequence number) of those on disk; read by `load`."""
        self._found: Iterator[tuple[bytes, int]] | None = found
        self._heads: dict[str, int] = {}  # available at the start, with the number of the oldest message then
        self._heap: list[tuple[int, str]] = []  # of these; has items that are true no more, too
        # With the number of the message by which a session came here; None if it was not available right before.
        self._later: OrderedDict[str, int | None] = OrderedDict()

    @property
    def complete(self) -> bool:
        return self._found is None

    def load(self, count: int, is_locked: Callable[[str], bool]) -> int:
        """Look at up to `count` sessions on disk. Returns how many there were; fewer, and it is complete."""
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
        """A session that is not locked has this message, the oldest of those available."""
        if session_id in self._heads:
            return
        if session_id in self._later:
            came_by = self._later[session_id]
            if came_by is None or number >= came_by:
                return
            del self._later[session_id]
        self._put(session_id, number)

    def add(self, session_id: str, number: int) -> None:
        """A session that is not locked gets this message: it is offered, after the others, unless it is already."""
        if session_id not in self:
            self._later[session_id] = None if self.complete else number

    def add_again(self, session_id: str) -> None:
        """A session that was locked is offered, after the others, unless it is already."""
        if session_id not in self._heads:
            self._later[session_id] = None

    def put_back(self, session_id: str) -> None:
        """It was taken, and is the next again."""
        self._put(session_id, FRONT)

    def take(self) -> str | None:
        """The next, which is no longer offered. To be asked when it is complete."""
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
        """There are some, or may be."""
        return bool(self._heads or self._later or self._found is not None)

    def _put(self, session_id: str, number: int) -> None:
        self._heads[session_id] = number
        heappush(self._heap, (number, session_id))
