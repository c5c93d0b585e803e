"""Which sessions of a queue are offered: they have available messages and no lock.

They are given in the order of their oldest messages as they were found at the start, then those that were offered
since. To find them takes a look at each session on disk, so it is done step by step, when somebody wants any session;
until it is `complete`, which of them is next is not known. What happens to sessions meanwhile is taken note of.
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
        self._heads: dict[str, int] = {}  # by the number of their oldest message
        self._heap: list[tuple[int, str]] = []  # of these; has items that are true no more, too
        self._later: OrderedDict[str, None] = OrderedDict()

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
            if session_id not in self._later and not is_locked(session_id):
                self._put(session_id, min(number, self._heads.get(session_id, number)))
            if looked == count:
                return looked
        self._found = None
        return looked

    def add(self, session_id: str, number: int | None) -> None:
        """It is offered, after the others, unless it is already.

        `number` is that of an available message; None for one that comes after the others in any case.
        """
        if session_id in self._heads or session_id in self._later:
            return
        if self._found is not None and number is not None:
            self._put(session_id, number)  # its oldest message may not be found yet
        else:
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
