"""Which marked deliveries a partition has stored, so that a gateway can ask after the worker has died: see `wire.Mark`.

What is noted in a turn is in the same commit as the messages themselves: one row of META for each gateway that has sent
some. It is small, since a gateway says up to where it will never ask, and nearly all numbers above are consecutive.
"""

from bisect import bisect_right

from storage.records import CorruptRecord, decode_document, encode_document
from storage.store import Store, Table

MARKS_PREFIX = b"stored-marks/"
# Gateways whose marks are kept. Each start of a gateway is another one; the marks of those that were seen last stay.
SENDERS_MAX = 64


class StoredMarks:
    """Numbers by sender; `_noted` are those to be written at the end of this turn."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ranges: dict[bytes, list[int]] = {}  # first number, number behind the last, ...; the last sender is last
        self.noted: dict[bytes, int] = {}  # senders with rows to write, and the time

    def load(self) -> None:
        """A row that cannot be read is one that nobody has: the gateway sends again, as if there were none."""
        rows = []
        for key, value in self._store.scan(Table.META, MARKS_PREFIX, MARKS_PREFIX + b"\xff" * 9, 1 << 32):
            try:
                now_ms, *ranges = decode_document(value)
            except (CorruptRecord, TypeError, ValueError):
                now_ms, ranges = 0, []
            rows.append((now_ms, key.removeprefix(MARKS_PREFIX), ranges))
        self._ranges = {sender: ranges for _, sender, ranges in sorted(rows)}

    def note(self, sender: bytes, first: int, count: int, below: int, now_ms: int) -> None:
        """The deliveries with these numbers are stored. The sender does not ask for any below `below`."""
        ranges = self._ranges.pop(sender, None)
        if ranges is None:
            ranges = []
            while len(self._ranges) >= SENDERS_MAX:
                oldest = next(iter(self._ranges))
                del self._ranges[oldest]
                self.noted.pop(oldest, None)
                self._store.delete(Table.META, MARKS_PREFIX + oldest)
        if ranges and ranges[-1] == first:
            ranges[-1] = first + count
        else:
            ranges += (first, first + count)
        while ranges and ranges[1] <= below:
            del ranges[:2]
        self._ranges[sender] = ranges
        self.noted[sender] = now_ms

    def has(self, sender: bytes, number: int) -> bool:
        return bisect_right(self._ranges.get(sender, ()), number) % 2 == 1  # first numbers and ends in turn

    def of(self, sender: bytes) -> list[int]:
        return list(self._ranges.get(sender, ()))

    def write(self) -> None:
        """Stage what was noted since the last call."""
        self._store.put_many(
            Table.META,
            [
                (MARKS_PREFIX + sender, encode_document([now_ms, *self._ranges[sender]]))
                for sender, now_ms in self.noted.items()
            ],
        )
        self.noted.clear()
