"""How many requests of one connection with large answers are done at once.

One read may hold a thousand short requests, on many links, from a client that reads none of the answers. So a request
begins when there is room for its answer; until then it waits, and takes no more than its own bytes.
"""

from typing import Protocol

# Of the answers to requests that are being done, as their kinds say. One request is always done.
ANSWER_BYTES_AT_ONCE = 2 << 20


class Postponing(Protocol):
    def begin_postponed(self) -> None:
        """Begin the requests that wait, as far as there is room."""


class AnswerRoom:
    """The room of one connection. Links whose next request waits for room get it in turn.

    `waiting` are these links, the one that waits longest first.
    """

    def __init__(self) -> None:
        self.waiting: dict[Postponing, None] = {}
        self._taken_bytes = 0
        self._is_going_on = False

    def has(self, size_bytes: int, link: Postponing) -> bool:
        """Whether the link may begin a request with an answer of this size. It must not overtake others that wait."""
        if self.waiting and next(iter(self.waiting)) is not link:
            return False
        return not self._taken_bytes or self._taken_bytes + size_bytes <= ANSWER_BYTES_AT_ONCE

    def take(self, size_bytes: int) -> None:
        self._taken_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self._taken_bytes -= size_bytes

    def go_on(self, answered: Postponing | None = None) -> None:
        """Begin requests that wait: of the link that was `answered`, and of those that wait for room."""
        if self._is_going_on:
            return  # a request was answered at once
        self._is_going_on = True
        try:
            if answered is not None:
                answered.begin_postponed()
            while self.waiting:
                link = next(iter(self.waiting))
                link.begin_postponed()
                if next(iter(self.waiting), None) is link:
                    break  # there is no room for its next request
        finally:
            self._is_going_on = False
