"""Requests of one connection with large answers: few are done at once.

One read may hold a thousand short requests, on many links, from a client that reads none of the answers. A request that
waits takes no more than its own bytes.
"""

from typing import Protocol

AT_ONCE = 8


class Postponing(Protocol):
    def begin_postponed(self) -> None:
        """Begin the requests that wait, as far as there is room."""


class LargeAnswers:
    """The room that one connection has for large answers. Links whose next request needs some get it in turn."""

    def __init__(self) -> None:
        self._begun = 0
        self._waiting: dict[Postponing, None] = {}  # the link that waits longest first
        self._is_going_on = False

    def begin(self, link: Postponing, is_stalled: bool) -> bool:
        """Take room for a request; it must be ended. False if the link has to wait: there is no room, others wait, or
        the client does not read.
        """
        first = next(iter(self._waiting), link)
        if is_stalled or first is not link or self._begun >= AT_ONCE:
            self._waiting[link] = None
            return False
        self._waiting.pop(link, None)
        self._begun += 1
        return True

    def end(self) -> None:
        """A request is answered. Call `go_on` when the answer is under way."""
        self._begun -= 1

    def forget(self, link: Postponing) -> None:
        """The link has ended, and waits no more."""
        self._waiting.pop(link, None)

    def go_on(self, answered: Postponing | None = None) -> None:
        """Begin requests that wait: of the link that was `answered`, and of those that wait for room."""
        if self._is_going_on:
            return  # a request was answered at once
        self._is_going_on = True
        try:
            if answered is not None:
                answered.begin_postponed()
            while self._waiting:
                first = next(iter(self._waiting))
                first.begin_postponed()
                if next(iter(self._waiting), None) is first:
                    break  # there is no room
        finally:
            self._is_going_on = False
