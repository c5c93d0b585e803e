"""The deferred messages of one destination: their sequence numbers in a backlog queue, in order, 8 bytes each."""

from array import array
from bisect import insort
from collections.abc import Iterable

_COMPACT_AT = 4096  # taken numbers that may still be in the array


class Shelf:
    """A number may be put twice; then it is taken twice."""

    __slots__ = ("_numbers", "_taken")

    def __init__(self) -> None:
        self._numbers = array("q")
        self._taken = 0  # of the front

    def __len__(self) -> int:
        return len(self._numbers) - self._taken

    def put(self, numbers: Iterable[int]) -> None:
        """Add numbers in any order; this is cheap if they are higher than all others."""
        held = self._numbers
        for number in numbers:
            if len(held) == self._taken or number >= held[-1]:
                held.append(number)
            elif self._taken and number <= held[self._taken]:
                self._taken -= 1
                held[self._taken] = number
            else:
                insort(held, number, self._taken)

    def take(self, most: int) -> list[int]:
        """The lowest numbers, at most so many."""
        end = min(self._taken + most, len(self._numbers))
        numbers = list(self._numbers[self._taken : end])
        self._taken = end
        if end == len(self._numbers) or (end >= _COMPACT_AT and 2 * end >= len(self._numbers)):
            del self._numbers[:end]
            self._taken = 0
        return numbers
