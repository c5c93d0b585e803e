"""Parquet files of a capture: how they are written, and how they are read without believing them."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from xxhash import xxh3_64_hexdigest

from storage import wording
from storage.capture.errors import DamagedFile, MissingFile
from storage.capture.manifest import DataFile, Position, Range, path_of
from storage.capture.place import Place
from storage.capture.tables import ONLY_IN_MESSAGES, SCHEMAS, SORTED_BY, Part, ranges_of

COMPRESSION: Final = "zstd"
COMPRESSION_LEVEL: Final = 1
# What readers of few rows must read: a row group has so many bytes in memory, but not more rows than this.
ROW_GROUP_BYTES: Final = 32 << 20
ROW_GROUP_ROWS: Final = 256 << 10

# Columns of few values. The others would only fill a dictionary until it is given up.
_REPETITIVE: Final = (
    "namespace", "epoch", "op", "entity", "subQueue", "contentType", "subject", "reason", "description",
    "originEntity", "originSubQueue", "partition", "deliveryCount", "copies", "bodySize", "eventTime",
)  # fmt: skip
_ASCENDING: Final = (
    "journalOffset", "sequenceNumber", "enqueuedTime", "scheduledTime", "expiresAt", "originSequenceNumber",
)  # fmt: skip
_ENCODINGS: Final = dict.fromkeys(_ASCENDING, "DELTA_BINARY_PACKED")


def write(place: Place, part: Part, now_ms: int) -> DataFile:
    """Write a file under a name that no other has. Nobody knows of it until an entry of the manifest names it."""
    schema = SCHEMAS[part.table]
    path = path_of(part.table, part.hour, secrets.token_hex(16))
    memory_bytes = 0
    with (
        place.writing(path) as sink,
        pq.ParquetWriter(
            sink,
            schema,
            compression=COMPRESSION,
            compression_level=COMPRESSION_LEVEL,
            use_dictionary=list(_REPETITIVE),
            column_encoding=_ENCODINGS,
            write_statistics=[name for name in schema.names if name not in ONLY_IN_MESSAGES],
            write_page_checksum=True,
            sorting_columns=[pq.SortingColumn(schema.names.index(name)) for name in SORTED_BY],
        ) as writer,
    ):
        for piece in part.pieces(ROW_GROUP_BYTES, ROW_GROUP_ROWS):
            writer.write_table(piece)
            memory_bytes += piece.nbytes
    return DataFile(
        path=path,
        table=part.table,
        hour=part.hour,
        bytes=sink.size_bytes,
        memory_bytes=memory_bytes,
        rows=len(part.order),
        checksum=sink.checksum,
        captured_ms=now_ms,
        ranges=part.ranges,
    )


def require_whole(place: Place, file: DataFile) -> None:
    """Check that the file has the bytes that were written. Raises DamagedFile, OSError."""
    try:
        size_bytes, checksum = place.measure(file.path)
    except FileNotFoundError:
        raise MissingFile(place.uri(file.path)) from None
    _require(place, file, size_bytes, checksum)


def _require(place: Place, file: DataFile, size_bytes: int, checksum: str) -> None:
    if size_bytes != file.bytes:
        raise DamagedFile(place.uri(file.path), f"has {size_bytes} bytes, not {file.bytes}")
    if checksum != file.checksum:
        raise DamagedFile(place.uri(file.path), "the checksum does not match")


def verify(place: Place, file: DataFile) -> None:
    """Check that the file has the bytes and the rows that the manifest says. Raises DamagedFile, OSError."""
    counted: dict[Position, Range] = {}
    for group in groups(place, file):
        count(counted, group.read(["partition", "epoch", "journalOffset"]))
    require_counted(place, file, counted)


def count(counted: dict[Position, Range], rows: pa.Table) -> None:
    """Add the rows, with the columns `partition`, `epoch` and `journalOffset`, to those that were counted before."""
    for each in ranges_of(rows):
        known = counted.get(each.position)
        counted[each.position] = each if known is None else known.with_rows_of(each)


def require_counted(place: Place, file: DataFile, counted: Mapping[Position, Range]) -> None:
    """Check that these are the rows that the manifest says. Raises DamagedFile."""
    rows = sum(each.rows for each in counted.values())
    if rows != file.rows:
        raise DamagedFile(place.uri(file.path), f"has {wording.counted(rows, 'row')}, not {file.rows}")
    if counted != {each.position: each for each in file.ranges}:
        raise DamagedFile(place.uri(file.path), "has other rows than the manifest says")


class Group:
    """A row group of a file."""

    def __init__(self, parquet: pq.ParquetFile, number: int, place: Place, file: DataFile) -> None:
        self._parquet = parquet
        self._number = number
        self._place = place
        self._file = file

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Read these columns of the row group. Raises DamagedFile, OSError."""
        with _damage(self._place, self._file):
            return self._parquet.read_row_group(self._number, list(columns), use_threads=False)
        raise AssertionError("the block above returns or raises")


def groups(place: Place, file: DataFile, repetitive: Sequence[str] = ()) -> Iterator[Group]:
    """The row groups, after a look at the checksum of the whole file. The columns in `repetitive` are read as
    dictionaries. Raises DamagedFile, OSError."""
    require_whole(place, file)
    try:
        source = place.open(file.path)
    except FileNotFoundError:
        raise MissingFile(place.uri(file.path)) from None
    with source:
        with _damage(place, file):
            _require_columns(place, file, source)
            parquet = pq.ParquetFile(source, page_checksum_verification=True, read_dictionary=list(repetitive))
        for number in range(parquet.num_row_groups):
            yield Group(parquet, number, place, file)


def read_all(place: Place, file: DataFile) -> pa.Table:
    """All rows, after a look at the checksum of the whole file. Raises DamagedFile, OSError."""
    try:
        content = place.read(file.path)
    except FileNotFoundError:
        raise MissingFile(place.uri(file.path)) from None
    _require(place, file, content.size, xxh3_64_hexdigest(content))
    rows = _table(place, file, pa.BufferReader(content), SCHEMAS[file.table].names, None)
    if len(rows) != file.rows:
        raise DamagedFile(place.uri(file.path), f"has {wording.counted(len(rows), 'row')}, not {file.rows}")
    return rows


def read_range(
    place: Place, file: DataFile, columns: Sequence[str], partition: int, epoch: str, first: int, end: int
) -> pa.Table:
    """Rows of the offsets first <= offset < end, in the order of the file. Raises DamagedFile, OSError.

    Reads only the row groups that may have such rows, and checks the checksums of what it reads.
    """
    offset = pc.field("journalOffset")
    wanted = (pc.field("partition") == partition) & (pc.field("epoch") == epoch) & (offset >= first) & (offset < end)
    try:
        source = place.open(file.path)
    except FileNotFoundError:
        raise MissingFile(place.uri(file.path)) from None
    with source:
        if source.size() != file.bytes:
            raise DamagedFile(place.uri(file.path), f"has {source.size()} bytes, not {file.bytes}")
        return _table(place, file, source, columns, wanted)


def _table(
    place: Place, file: DataFile, source: pa.NativeFile, columns: Sequence[str], wanted: pc.Expression | None
) -> pa.Table:
    with _damage(place, file):
        _require_columns(place, file, source)
        return pq.read_table(source, columns=list(columns), filters=wanted, page_checksum_verification=True)
    raise AssertionError("the block above returns or raises")


def _require_columns(place: Place, file: DataFile, source: pa.NativeFile) -> None:
    """Check the columns of a file. Raises DamagedFile, and what pyarrow raises for a file that is not Parquet."""
    if not pq.read_schema(source).equals(SCHEMAS[file.table]):
        raise DamagedFile(place.uri(file.path), f"has other columns than the table {file.table}")
    source.seek(0)


@contextmanager
def _damage(place: Place, file: DataFile) -> Iterator[None]:
    """Raise DamagedFile in place of what pyarrow raises for damaged content. OSErrors of the file system stay."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError) as error:  # the latter of a column's name
        raise DamagedFile(place.uri(file.path), f"cannot be read: {error}") from None
    except OSError as error:
        if error.errno is not None:  # of the file system
            raise
        raise DamagedFile(place.uri(file.path), f"cannot be read: {error}") from None
