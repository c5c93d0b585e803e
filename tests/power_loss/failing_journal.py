"""As `failing_lives`, of a partition's journal: each number is a row.

When a sync fails, the process ends at once, as if it had been killed before it has cut off what it had appended.
"""

import sys
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from storage.journal.files import PartitionJournal, Piece
from storage.journal.frames import Made, decode
from storage.journal.schema import SCHEMA
from tests.power_loss.trace import Marker

ROWS = 40  # of a life whose disk does not fail


def opened(directory: Path) -> PartitionJournal:
    journal = PartitionJournal(directory / "0", roll_bytes=8000)
    if journal.made is None:
        journal.begin_epoch(1.0)
    return journal


def rows(journal: PartitionJournal) -> set[int]:
    """Their numbers. They are their offsets, too."""
    reading = journal.read(journal.low, journal.stable, 1 << 30)
    found = set()
    for piece in reading.pieces:
        assert isinstance(piece, Piece), piece
        batch = decode(piece.payload())
        offsets = batch.column("journalOffset").to_pylist()
        assert [int(record[:8]) for record in batch.column("record").to_pylist()] == offsets
        found.update(offsets)
    reading.close()
    return found - {0}


def add(journal: PartitionJournal, number: int) -> None:
    record = b"%08d" % number * (1 + number % 300)
    row = {"partition": 0, "journalOffset": number, "eventTime": 1, "op": "enqueued", "entity": "q", "record": record}
    journal.append(pa.RecordBatch.from_pylist([row], SCHEMA), 1, 1, Made(b"store-id", b"log-id----------", number), 1.0)
    journal.sync(1.0)


def live(directory: Path, marker: Marker) -> None:
    """One life, which begins from what it finds."""
    journal = opened(directory)
    last = journal.end
    if last:
        marker.mark(done=last - 1)
    for number in range(last, last + ROWS):
        marker.mark(asked=number)
        add(journal, number)
        marker.mark(done=number)
    journal.close()


def main() -> None:
    setattr(PartitionJournal, "_failed", _kill)  # noqa: B010
    directory, marker = Path(sys.argv[1]), Marker(Path(sys.argv[2]))
    marker.mark(root=directory.stat().st_ino)
    for _ in range(int(sys.argv[3])):
        with suppress(_Killed):
            live(directory, marker)


class _Killed(BaseException):
    pass


def _kill(*_: object) -> None:
    raise _Killed


if __name__ == "__main__":
    main()
