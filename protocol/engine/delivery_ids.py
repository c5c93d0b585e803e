"""Translates the ids of deliveries that come in on one session: the peer's ids to proton's and back (2.6.12).

Proton counts deliveries and closes the connection when an id is not the next one. Some clients repeat or skip an id:
pyamqp does that when threads or tasks share a link. Such a delivery gets the next id for proton, and dispositions of it
are translated in both directions. The peer may use one id for several deliveries at a time.

The difference between the two ids changes rarely. A *run* is a series of deliveries with the same difference, whose
proton ids are consecutive. Without any run nothing is translated, and the caller may count `next_id` up itself. A run
is forgotten when all of its deliveries are settled. Ids are serial numbers of 32 bits; inside this class proton's ids
do not wrap around.
"""

from bisect import bisect_right
from typing import Final

from protocol.errors import LimitExceeded

_MASK: Final = (1 << 32) - 1
_HALF: Final = 1 << 31
MAX_RUNS: Final = 8192  # 300 tasks that shared a link made 300 runs
MAX_SEARCHED_RUNS: Final = 64  # each run is searched for ids that the peer settles

Range = tuple[int, int]  # the first and the last id


class _Run:
    """`shift` is proton's id less the peer's; `unsettled` the number of deliveries that neither side has settled."""

    __slots__ = ("first", "shift", "unsettled")

    def __init__(self, first: int, shift: int) -> None:
        self.first = first
        self.shift = shift
        self.unsettled = 0


def _first(run: _Run) -> int:
    return run.first


class DeliveryIds:
    """`next_id` is proton's id of the next delivery. It is None before the first one, whose id proton takes."""

    __slots__ = ("_first_id", "_runs", "_shifted", "next_id")

    def __init__(self) -> None:
        self.next_id: int | None = None
        self._first_id = 0
        self._runs: list[_Run] = []  # empty, or at least one has a shift; earlier deliveries need no translation
        self._shifted = 0  # the number of runs with a shift

    @property
    def last_id(self) -> int:
        """Proton's id of the last delivery that was taken."""
        assert self.next_id is not None
        return (self.next_id - 1) & _MASK

    @property
    def count(self) -> int:
        """The number of deliveries so far, modulo 2^32."""
        return 0 if self.next_id is None else (self.next_id - self._first_id) & _MASK

    @property
    def translates(self) -> bool:
        return bool(self._runs)

    def take(self, peers_id: int | None, settled: bool) -> int:
        """Proton's id of a new delivery. `peers_id` is the peer's id, if it has one; `settled`: the peer settled it.

        Raises LimitExceeded if the difference changes again and again while nothing is settled.
        """
        runs = self._runs
        if self.next_id is None:
            self.next_id = self._first_id = peers_id or 0
        if not runs:
            self.next_id &= _MASK
        found = self.next_id
        self.next_id = found + 1
        last_shift = runs[-1].shift if runs else 0
        shift = last_shift if peers_id is None else (found - peers_id) & _MASK
        if shift != last_shift:
            if runs and not runs[-1].unsettled:
                self._forget(len(runs) - 1)
            if shift or runs:
                self._begin(found, shift)
        if runs and not settled:
            runs[-1].unsettled += 1
        return found & _MASK

    def _begin(self, first: int, shift: int) -> None:
        if len(self._runs) >= MAX_RUNS:
            raise LimitExceeded("number of unsettled deliveries whose ids do not follow one another", MAX_RUNS)
        self._runs.append(_Run(first, shift))
        self._shifted += bool(shift)

    def _forget(self, index: int) -> None:
        self._shifted -= bool(self._runs.pop(index).shift)
        if not self._shifted:
            self._runs.clear()

    def settled(self, first: int, last: int) -> None:
        """The deliveries with these proton ids were unsettled and are settled now."""
        for index, _, count in reversed(self._parts(first, last)):
            if index < 0:
                continue
            run = self._runs[index]
            run.unsettled = max(0, run.unsettled - count)
            if not run.unsettled and index < len(self._runs) - 1:  # the last run continues with the next delivery
                self._forget(index)
                if not self._runs:
                    break

    # -- translation

    def peers(self, first: int, last: int) -> list[Range]:
        """The peer's ids of the deliveries with proton's ids `first` to `last`."""
        ranges = []
        for index, start, count in self._parts(first, last):
            begin = start - (self._runs[index].shift if index >= 0 else 0)
            ranges.append((begin & _MASK, (begin + count - 1) & _MASK))
        return ranges

    def protons(self, first: int, last: int) -> list[Range]:
        """Proton's ids of the deliveries with the peer's ids `first` to `last`. Raises LimitExceeded."""
        if len(self._runs) > MAX_SEARCHED_RUNS:
            raise LimitExceeded("number of unsettled deliveries whose ids do not follow one another", MAX_SEARCHED_RUNS)
        count = ((last - first) & _MASK) + 1
        begin = self._runs[0].first - _HALF
        ranges = []
        for index in range(-1, len(self._runs)):
            shift = self._runs[index].shift if index >= 0 else 0
            end = self._end(index)
            ahead = (first - (begin - shift)) & _MASK
            behind = -ahead & _MASK
            if ahead < end - begin:
                ranges.append((begin + ahead, min(begin + ahead + count, end) - 1))
            elif behind < count:
                ranges.append((begin, min(begin + count - behind, end) - 1))
            begin = end
        return [(start & _MASK, end & _MASK) for start, end in ranges]

    def _end(self, index: int) -> int:
        """The id behind the last one of a run; index -1 is the deliveries before the first run."""
        assert self.next_id is not None
        return self._runs[index + 1].first if index + 1 < len(self._runs) else self.next_id

    def _parts(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Split proton's ids `first` to `last` by runs: index of the run or -1, first id and number of ids."""
        assert self.next_id is not None
        start = self.next_id - ((self.next_id - first) & _MASK)
        end = min(start + ((last - first) & _MASK) + 1, self.next_id)
        parts = []
        index = bisect_right(self._runs, start, key=_first) - 1
        while start < end:
            stop = min(end, self._end(index))
            parts.append((index, start, stop - start))
            start, index = stop, index + 1
        return parts
