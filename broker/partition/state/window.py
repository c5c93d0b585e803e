"""The head of one queue in memory: what can be handed out next, in order of sequence numbers.

Sequence numbers below `cursor` have been fetched from the store. Of these, an available message is in exactly one of:
- `entries` from `head` on: fetched and not handed out yet, at most as many as the window is long;
- `returned`: handed out before and back again, a heap;
- the queue's locks.
Numbers from `cursor` on are in the store only, except that those in `skip` are locked: after `reset` the head is
fetched again, and locked messages must be skipped. So must those that were locked before their turn (`withdraw`). Some
in `skip` may be deleted already. `gone` are numbers that were removed while in `entries` or `returned`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush
from itertools import pairwise
from operator import itemgetter

from storage.records import Overlay

# A message in a queue: sequence number, message id, delivery count, overlay. A plain tuple: one is made per message.
Ref = tuple[int, int, int, Overlay | None]

# Getters of parts of a ref. To get one part of many refs, `map` with these is faster than unpacking each.
number_of: Callable[[Ref], int] = itemgetter(0)
message_id_of: Callable[[Ref], int] = itemgetter(1)
overlay_of: Callable[[Ref], Overlay | None] = itemgetter(3)


class Window:
    __slots__ = ("active", "cursor", "entries", "gone", "head", "returned", "skip")

    def __init__(self) -> None:
        self.active = False  # True while there are receivers; only then new messages are kept
        self.entries: list[Ref] = []
        self.head = 0
        self.cursor = 0
        self.returned: list[Ref] = []
        self.gone: set[int] = set()
        self.skip: set[int] = set()

    def next(self, count: int) -> list[Ref]:
        """Take up to `count` of the lowest messages in memory. If there are fewer, the store may still have more."""
        if not self.returned and not self.gone:
            taken = self.entries[self.head : self.head + count]
            self.head += len(taken)
        else:
            taken = self._merge(count)
        if self.head == len(self.entries):
            self.entries, self.head = [], 0
        return taken

    def _merge(self, count: int) -> list[Ref]:
        taken: list[Ref] = []
        entries, returned, gone = self.entries, self.returned, self.gone
        while len(taken) < count:
            if returned and (self.head == len(entries) or number_of(returned[0]) < number_of(entries[self.head])):
                ref = heappop(returned)
            elif self.head < len(entries):
                ref = entries[self.head]
                self.head += 1
            else:
                break
            number, _, _, _ = ref
            if number in gone:
                gone.discard(number)
            else:
                taken.append(ref)
        return taken

    def fill(self, refs: list[Ref], cursor: int) -> None:
        """Add messages that were fetched from the store, from the old cursor to below the new one."""
        self._compact()
        self.entries += refs
        self.cursor = cursor
        if self.skip:  # those below the cursor that were not met were deleted while locked
            self.skip = {number for number in self.skip if number >= cursor}

    def extend(self, refs: list[Ref], first: int, end: int, limit: int) -> None:
        """Add new messages at the queue's end, which have the numbers from `first` to below `end`.

        If there is no receiver or no room, or earlier messages are not in memory, they are fetched later instead.
        """
        if self.active and self.cursor == first and len(self.entries) - self.head + len(refs) <= limit:
            self.fill(refs, end)

    def put_back(self, ref: Ref) -> None:
        number, _, _, _ = ref
        if number < self.cursor:
            heappush(self.returned, ref)
        else:
            self.skip.discard(number)

    def remove(self, numbers: Iterable[int]) -> None:
        """These messages left the store: forget those that are in memory."""
        returned = set(map(number_of, self.returned))
        for number in numbers:
            at = bisect_left(self.entries, number, self.head, key=number_of)
            if number in returned or (at < len(self.entries) and number_of(self.entries[at]) == number):
                self.gone.add(number)

    def withdraw(self, numbers: AbstractSet[int]) -> None:
        """These available messages are locked before their turn, until they are put back."""
        for number in numbers:
            if number >= self.cursor:
                self.skip.add(number)
                continue
            at = bisect_left(self.entries, number, self.head, key=number_of)
            if at < len(self.entries) and number_of(self.entries[at]) == number:
                del self.entries[at]
        if not numbers.isdisjoint(map(number_of, self.returned)):
            self.returned = [ref for ref in self.returned if number_of(ref) not in numbers]
            heapify(self.returned)

    def free(self, numbers: Iterable[int]) -> set[int]:
        """Return those of these messages, which are in the store, that nobody has taken: see above."""
        entries, cursor, gone, skip = self.entries, self.cursor, self.gone, self.skip
        returned: set[int] | None = None
        found = set()
        for number in numbers:
            if number >= cursor:
                if number not in skip:
                    found.add(number)
                continue
            if number in gone:
                continue
            at = bisect_left(entries, number, self.head, key=number_of)
            if at < len(entries) and number_of(entries[at]) == number:
                found.add(number)
                continue
            if returned is None:
                returned = set(map(number_of, self.returned))
            if number in returned:
                found.add(number)
        return found

    def reset(self, locked: set[int]) -> None:
        """Forget all messages, so that they are fetched again from the start; `locked` are those under lock."""
        self.entries, self.head, self.cursor = [], 0, 0
        self.returned, self.gone, self.skip = [], set(), locked

    def numbers(self) -> set[int]:
        """Sequence numbers of the messages in memory. Takes time in proportion to their number."""
        return {*map(number_of, self.entries[self.head :]), *map(number_of, self.returned)} - self.gone

    def check(self) -> None:
        """Assert what the module's docstring says of a window."""
        assert 0 <= self.head <= len(self.entries)
        fetched = [*map(number_of, self.entries[self.head :])]
        returned = [*map(number_of, self.returned)]
        assert all(before < after for before, after in pairwise(fetched)), "the entries are not in order"
        assert all(returned[(at - 1) // 2] <= number for at, number in enumerate(returned) if at), "not a heap"
        numbers = {*fetched, *returned}
        assert len(numbers) == len(fetched) + len(returned), "a message is in the window twice"
        assert all(number < self.cursor for number in numbers), "a message is in the window and to be fetched"
        assert self.gone <= numbers, "what is gone was not in the window"
        assert all(number >= self.cursor for number in self.skip), "what was to be skipped has been passed"

    def _compact(self) -> None:
        # Otherwise a queue that is never empty would keep every entry that it has handed out.
        if self.head > 512:
            del self.entries[: self.head]
            self.head = 0
