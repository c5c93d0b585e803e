"""The messages that leave queues in a turn, until hints have said why."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import chain


class Leaving:
    """The sequence numbers that left each queue, in the order in which they left; ranges stay ranges."""

    def __init__(self) -> None:
        self._parts: dict[int, deque[Sequence[int]]] = {}

    def add(self, queue_id: int, numbers: Sequence[int]) -> None:
        self._parts.setdefault(queue_id, deque()).append(numbers)

    def has_any(self, queue_id: int, numbers: Collection[int]) -> bool:
        return any(number in part for part in self._parts.get(queue_id, ()) for number in numbers)

    def take_next(self, queue_id: int, numbers: range) -> bool:
        """Take these if they come next, in one range with maybe others. Else False, and they are still there."""
        parts = self._parts.get(queue_id)
        if not parts or not isinstance(parts[0], range):
            return False
        if parts[0][: len(numbers)] != numbers:
            return False
        rest = parts[0][len(numbers) :]
        if rest:
            parts[0] = rest
        else:
            parts.popleft()
        return True

    def take(self, queue_id: int, numbers: Sequence[int]) -> Sequence[int]:
        """Take these as far as they are there; a message leaves once. Returns the indices of those that were."""
        there = [*chain.from_iterable(self._parts.pop(queue_id, ()))]
        if there == [*numbers]:
            return range(len(there))
        left = dict.fromkeys(there)
        found = [index for index, number in enumerate(numbers) if left.pop(number, True) is None]
        self.add(queue_id, [*left])
        return found

    def left(self) -> Iterator[tuple[int, Sequence[int]]]:
        """Queues, and what is still there of each."""
        for queue_id, parts in self._parts.items():
            if numbers := [*chain.from_iterable(parts)]:
                yield queue_id, numbers
