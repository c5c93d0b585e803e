"""Ids of the deliveries that come in on one session: those that the peer uses, and those that proton knows (2.6.12).

Proton counts deliveries and closes the connection when an id is not the next one. Some clients repeat an id or leave
one out: pyamqp, when threads or tasks share a link. Such a delivery gets the next id all the same, and what is said of
it is translated, in both directions. The peer may use one id for several deliveries at a time.

The difference between the two changes rarely. A *run* is a series of deliveries, consecutive as proton counts, with
the same difference. Without any run nothing is translated, and who feeds proton may count `next_id` up by himself. A
run is forgotten when all of its deliveries are settled. Ids are serial numbers of 32 bits; within this class proton's
go on beyond.
"""

from bisect import bisect_right
from typing import Final

from protocol.errors import LimitExceeded

_MASK: Final = (1 << 32) - 1
_HALF: Final = 1 << 31
MAX_RUNS: Final = 8192  # 300 tasks that share a link have made 300
MAX_SEARCHED_RUNS: Final = 64  # what the peer settles is looked for in each run

Range = tuple[int, int]  # the first and the last id


class _Run:
    """`shift` is what proton's ids are ahead of the peer's; `unsettled` how many deliveries neither side settled."""

    __slots__ = ("first", "shift", "unsettled")

    def __init__(self, first: int, shift: int) -> None:
        self.first = first
        self.shift = shift
        self.unsettled = 0


def _first(run: _Run) -> int:
    return run.first


class DeliveryIds:
    """`next_id` is the id that proton gives to the next delivery; None before the first, whose id it takes."""

    __slots__ = ("_runs", "_shifted", "next_id")

    def __init__(self) -> None:
        self.next_id: int | None = None
        self._runs: list[_Run] = []  # none, or one at least with a shift; what is before them needs no translation
        self._shifted = 0  # of them, how many have a shift

    @property
    def last_id(self) -> int:
        """Proton's id of the delivery that was taken last."""
        assert self.next_id is not None
        return (self.next_id - 1) & _MASK

    @property
    def translates(self) -> bool:
        return bool(self._runs)

    def take(self, peers_id: int | None, settled: bool) -> int:
        """Proton's id of a new delivery that the peer calls `peers_id`, or does not number. `settled` by the peer.

        Raises LimitExceeded if the difference changes again and again while nothing is settled.
        """
        runs = self._runs
        if self.next_id is None:
            self.next_id = peers_id or 0
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
        """Deliveries of these ids of proton's, unsettled until now, are settled."""
        for index, _, count in reversed(self._parts(first, last)):
            if index < 0:
                continue
            run = self._runs[index]
            run.unsettled = max(0, run.unsettled - count)
            if not run.unsettled and index < len(self._runs) - 1:  # the last goes on with the next delivery
                self._forget(index)
                if not self._runs:
                    break

    # -- translation

    def peers(self, first: int, last: int) -> list[Range]:
        """The peer's ids of deliveries that proton calls `first` to `last`."""
        ranges = []
        for index, start, count in self._parts(first, last):
            begin = start - (self._runs[index].shift if index >= 0 else 0)
            ranges.append((begin & _MASK, (begin + count - 1) & _MASK))
        return ranges

    def protons(self, first: int, last: int) -> list[Range]:
        """Proton's ids of deliveries that the peer calls `first` to `last`. Raises LimitExceeded."""
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
        """Behind the last id of a run; -1 is what is before the first."""
        assert self.next_id is not None
        return self._runs[index + 1].first if index + 1 < len(self._runs) else self.next_id

    def _parts(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Proton's ids `first` to `last` by their runs: index of the run or -1, first id and number of ids."""
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
