"""What waits until a worker is back: operations that no worker has got yet, and those that may be done twice.

The supervisor has a worker back in about a second, and SDKs wait for up to ten seconds after an answer that the broker
is busy. So for a stated time after a worker was lost, operations wait for it, in the order in which they came. How many
and how large they may be is bounded. If the worker is not back in time, they are refused, as is what begins later.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from broker import requests
from broker.errors import BrokerError
from broker.gateway.owner import Owner

# Requests that a worker may have done when it died, and that the next one is asked again: those that only read, and
# renewals, because the worker's locks have ended with it. Any other may have changed what it must not change twice.
REPEATED: Final = (
    requests.RenewLocks,
    requests.RenewSessionLock,
    requests.Peek,
    requests.PeekSession,
    requests.GetSessionState,
    requests.GetMessageSessions,
    requests.PageMessageSessions,
    requests.MessageSessionsBehind,
    requests.GetRule,
    requests.EnumerateRules,
    requests.Counts,
    requests.Accessed,
    requests.FilterCounts,
)


@dataclass(frozen=True)
class Bounds:
    """How long after its loss a worker is waited for, and what may wait then."""

    seconds: float = 0.0  # 0: nothing waits
    operations: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Waiting:
    """An operation, or several that begin together, on one partition."""

    partition: int
    owner: Owner | None  # the client's connection, which is told and flushed
    askers: tuple[object, ...]  # link or connection: with one of them the operation goes, and nobody is told
    operations: int
    size_bytes: int
    begin: Callable[[], object]
    refuse: Callable[[BrokerError], None]


class WaitingRoom:
    """Open for a time after the worker was lost; when it is closed, all leave it. All times are of one clock."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.until_s: float | None = None  # when it closes; None: it is closed
        self.operations = 0
        self.size_bytes = 0
        self._number = 0
        self._all: dict[int, Waiting] = {}  # by numbers in the order in which they came
        self._of: dict[object, dict[int, None]] = {}  # their numbers, by asker

    def __len__(self) -> int:
        return len(self._all)

    def open(self, now_s: float) -> float:
        """The worker was lost. Returns when to close."""
        self.until_s = now_s + self._bounds.seconds
        return self.until_s

    def is_open(self, now_s: float) -> bool:
        return self.until_s is not None and now_s < self.until_s

    def enter(self, waiting: Waiting, now_s: float) -> bool:
        """False if the operation is to be refused: there is no room, or the time is over."""
        bounds = self._bounds
        if (
            not self.is_open(now_s)
            or self.operations + waiting.operations > bounds.operations
            or self.size_bytes + waiting.size_bytes > bounds.size_bytes
        ):
            return False
        self._add(waiting)
        return True

    def close(self) -> Iterator[Waiting]:
        """The worker is back, or its time is over. What has waited leaves in its order, unless it is dropped before."""
        self.until_s = None
        return self._leave()

    def _leave(self) -> Iterator[Waiting]:
        while self._all:
            number, first = next(iter(self._all.items()))
            self._remove(number)
            yield first

    def drop(self, asker: object) -> list[Waiting]:
        """The client, or its link, is gone. Returns what is not to be done for it."""
        dropped = [(number, self._all[number]) for number in self._of.get(asker, ())]
        for number, _ in dropped:
            self._remove(number)
        return [each for _, each in dropped]

    def hand_over(self, partition: int, to: "WaitingRoom") -> None:
        """Another worker has this partition now: what waits for it does so in that worker's room."""
        moved = {number: each for number, each in self._all.items() if each.partition == partition}
        for number, each in moved.items():
            self._remove(number)
            to._add(each)
        if moved and to.until_s is None:
            to.until_s = self.until_s

    def _add(self, waiting: Waiting) -> None:
        self._number = number = self._number + 1
        self._all[number] = waiting
        for asker in waiting.askers:
            self._of.setdefault(asker, {})[number] = None
        self.operations += waiting.operations
        self.size_bytes += waiting.size_bytes

    def _remove(self, number: int) -> None:
        waiting = self._all.pop(number)
        for asker in waiting.askers:
            numbers = self._of[asker]
            del numbers[number]
            if not numbers:
                del self._of[asker]
        self.operations -= waiting.operations
        self.size_bytes -= waiting.size_bytes

    def check(self) -> None:
        """The invariants, for tests."""
        assert self.operations == sum(each.operations for each in self._all.values())
        assert self.size_bytes == sum(each.size_bytes for each in self._all.values())
        named = {asker: {n for n, each in self._all.items() if asker in each.askers} for asker in _askers(self._all)}
        assert named == {asker: {*numbers} for asker, numbers in self._of.items()}


def _askers(waiting: dict[int, Waiting]) -> Iterable[object]:
    return {asker for each in waiting.values() for asker in each.askers}
