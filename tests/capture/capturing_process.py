"""A process that captures made-up rows into a folder as fast as it can, until it is killed.

python -m tests.capture.capturing_process FOLDER
"""

import random
import sys
from collections.abc import Generator, Sequence

import pyarrow as pa

from storage.capture.compaction import clean, compact
from storage.capture.following import Counters, Follower
from storage.capture.place import Place
from storage.capture.source import Extent, Extents
from storage.capture.writing import CaptureOptions, CaptureWriter
from tests.capture.synthetic_rows import EPOCH, batch

NAMESPACE = "sample"
# Small, so that there is much to be interrupted. Hours are over at once: rows are of the past.
OPTIONS = CaptureOptions(file_bytes=40_000, memory_bytes=1 << 20, roll_seconds=0, keep_seconds=3600)
ROWS_PER_SECOND = 1  # a new hour each 3600 rows
MADE = {partition: batch(partition, 0, 500, rows_per_second=ROWS_PER_SECOND, body_bytes=30) for partition in range(2)}


class Rows:
    """A `RowSource` in memory that has a few more rows at each look."""

    def __init__(self, stable: int) -> None:
        self._stable = stable

    def extents(self) -> Extents:
        self._stable += random.randrange(1, 30)
        return Extents(NAMESPACE, [Extent(partition, EPOCH, 0, self._stable) for partition in MADE])

    def tell(self, captured: Sequence[Extent]) -> None: ...

    def rows(self, partition: int, epoch: str, first: int, end: int) -> Generator[pa.RecordBatch, None, None]:
        assert epoch == EPOCH
        if end <= 500:
            yield MADE[partition].slice(first, end - first)
        else:
            yield batch(partition, first, end, rows_per_second=ROWS_PER_SECOND, body_bytes=30)


def main() -> None:
    with CaptureWriter(Place.of(sys.argv[1]), NAMESPACE, OPTIONS) as writer:
        source = Rows(max((each.offset for each in writer.state.next.values()), default=0))
        follower = Follower(source, writer, Counters())
        print("begun", flush=True)
        while True:
            follower.step()
            compact(writer, {})
            clean(writer)


if __name__ == "__main__":
    main()
