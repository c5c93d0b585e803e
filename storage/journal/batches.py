"""Rows of a range of offsets as a stream of Arrow's IPC: what is stored is passed on as it is where that is possible.

Small batches, of quiet times, are joined, because each costs its reader as much as some thousand rows. Where rows
cannot be read, a row `truncated` in their place says so.
"""

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from storage.journal.entities import Wanted
from storage.journal.events import DAMAGED, Op, name_of
from storage.journal.files import JournalDamaged, Piece, Reading
from storage.journal.frames import STREAM_END, CorruptJournal, decode, message, message_of, stream_begin
from storage.journal.schema import SCHEMA, without_bodies

JOINED_BYTES: Final = 1 << 20  # of small batches, or so many rows
JOINED_ROWS: Final = 16_384
LARGE_BYTES: Final = 64 << 10  # of a payload; a smaller one is joined with others


def stream(
    partition: int, reading: Reading, wanted: Wanted | None, *, records: bool, time_ms: int
) -> Iterator[bytes | memoryview]:
    """Pieces of the stream, of wanted entities or of all; rows without an entity are always in it. Without `records`,
    the columns with bodies are left out. `time_ms` is now.

    Closes the reading. Raises OSError.
    """
    schema = SCHEMA if records else without_bodies(SCHEMA)
    small: list[pa.RecordBatch] = []
    small_bytes = small_rows = 0

    def joined() -> Iterator[memoryview]:
        nonlocal small_bytes, small_rows
        if small:
            yield message(pa.concat_batches(small))
            small.clear()
            small_bytes = small_rows = 0

    try:
        yield stream_begin(schema)
        for piece in reading.pieces:
            try:
                if isinstance(piece, JournalDamaged):
                    raise piece
                payload = piece.payload()
                if wanted is None and records and piece.is_whole and len(payload) >= LARGE_BYTES:
                    yield from joined()
                    yield message_of(payload)
                    continue
                batch = _cut(piece, decode(payload, records=records))
            except JournalDamaged as error:
                batch = _gap(partition, error, time_ms)
            except CorruptJournal as error:  # its checksum is right
                assert isinstance(piece, Piece)
                found = JournalDamaged(piece.path, piece.at, piece.first, piece.end, str(error))
                batch = _gap(partition, found, time_ms)
            batch = batch.select(schema.names)
            if wanted is not None:
                batch = wanted.rows_of(batch)
            if not len(batch):
                continue
            small.append(batch.replace_schema_metadata(None))
            small_bytes += batch.nbytes
            small_rows += len(batch)
            if small_bytes >= JOINED_BYTES or small_rows >= JOINED_ROWS:
                yield from joined()
        yield from joined()
        yield STREAM_END
    finally:
        reading.close()


def _cut(piece: Piece, batch: pa.RecordBatch) -> pa.RecordBatch:
    if piece.is_whole:
        return batch
    return batch.slice(piece.first - piece.head.first_offset, piece.end - piece.first)


def _gap(partition: int, damaged: JournalDamaged, time_ms: int) -> pa.RecordBatch:
    """The row that stands for those that cannot be read, in the place of the last of them."""
    row = {
        "partition": partition,
        "journalOffset": damaged.end - 1,
        "eventTime": time_ms * 1000,
        "op": name_of(Op.TRUNCATED),
        "reason": DAMAGED,
        "description": str(damaged),
    }
    return pa.RecordBatch.from_pylist([row], SCHEMA)
