"""Entries and keys of stores without the extension, and with it if it is there."""

from itertools import chain

from protocol.extension import extension
from storage.records import Place, queue_key
from storage.store import Entries, Keys


class Entered(list[tuple[bytes, bytes]]):
    def __init__(self, values: list[bytes], queues: list[tuple[int, int]]) -> None:
        super().__init__(
            (queue_key(queue_id, Place.AVAILABLE, first + ahead), value)
            for queue_id, first in queues
            for ahead, value in enumerate(values)
        )
        self._values, self._queues = values, queues

    @property
    def begin(self) -> tuple[bytes, int] | None:
        if len(self._queues) != 1:
            return None
        [(queue_id, first)] = self._queues
        return queue_key(queue_id, Place.AVAILABLE, 0)[:-8], first

    def items(self) -> list[tuple[bytes, bytes]]:
        return list(self)

    def part(self, begin: int, end: int) -> "Entered":
        [(queue_id, first)] = self._queues
        return Entered(self._values[begin:end], [(queue_id, first + begin)])


class Ranged(list[bytes]):
    def __init__(self, prefix: bytes, ranges: list[tuple[int, int]]) -> None:
        super().__init__(
            prefix + number.to_bytes(8, "big")
            for number in chain.from_iterable(range(first, first + count) for first, count in ranges)
        )
        self.prefix, self.ranges = prefix, ranges

    @property
    def highest(self) -> bytes:
        return max(self, default=b"")

    def keys(self) -> list[bytes]:
        return list(self)

    def of(self, ranges: list[tuple[int, int]]) -> "Ranged":
        return Ranged(self.prefix, ranges)


def entries(values: list[bytes], queues: list[tuple[int, int]]) -> Entries:
    if extension is None:
        return Entered(values, queues)
    made: Entries = extension.Entries(values, queues)
    return made


def keys(prefix: bytes, ranges: list[tuple[int, int]]) -> Keys:
    if extension is None:
        return Ranged(prefix, ranges)
    made: Keys = extension.Keys(prefix, ranges)
    return made
