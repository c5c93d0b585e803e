"""The receivers of one queue that have the same selector, and how far they have looked for what it selects.

They look at the messages of the queue in the order of their numbers, a step at a time, and each message once. The
messages that do not match stay for others. A message that was not there to be had when they passed it (it was locked)
is looked at when it is back, and so is one that others have given back.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from broker.partition.state.line import Line

if TYPE_CHECKING:
    from broker.rules.selectors import Selector


class Selection:
    """`cursor`: messages below it were looked at, except those in `returned`."""

    __slots__ = ("_returned", "cursor", "line", "receivers", "selector")

    def __init__(self, selector: "Selector") -> None:
        self.selector = selector
        self.line = Line()
        self.receivers = 0  # the number of those that are open
        self.cursor = 0
        self._returned: list[int] = []  # a heap; some may be locked, deleted, or there twice

    def put_back(self, number: int, limit: int) -> None:
        """This message is available again. At most so many are remembered one by one."""
        if number >= self.cursor:
            return
        if len(self._returned) >= limit:
            self.cursor = min(number, *self._returned)
            self._returned.clear()
        else:
            heappush(self._returned, number)

    def take_returned(self, count: int) -> list[int]:
        """Up to `count` of the lowest that are back, in order."""
        taken: list[int] = []
        returned = self._returned
        while returned and len(taken) < count:
            number = heappop(returned)
            if not taken or taken[-1] != number:
                taken.append(number)
        return taken

    def look_again(self, numbers: Iterable[int]) -> None:
        """These were taken to be looked at, and were not."""
        for number in numbers:
            heappush(self._returned, number)

    def is_behind(self, next_number: int) -> bool:
        """True if there may be messages below this number that were not looked at."""
        return bool(self._returned) or self.cursor < next_number
