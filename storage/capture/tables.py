"""Rows of the journal as sorted tables, one for each table and hour. No I/O.

All that is done for single rows is done by Arrow.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from storage.capture.columns import one
from storage.capture.errors import ForeignRows
from storage.capture.manifest import Position, Range, TableName
from storage.journal.events import DAMAGED, Op, name_of
from storage.journal.schema import SCHEMA

HOUR_US: Final = 3_600_000_000
LATEST_US: Final = 253_402_300_800_000_000  # behind the year 9999, where Python's dates and those of paths end

ONLY_IN_MESSAGES: Final = ("record", "overlay")
ADDED: Final = [pa.field("namespace", pa.string(), nullable=False), pa.field("epoch", pa.string(), nullable=False)]
MESSAGES_SCHEMA: Final = pa.schema([*ADDED, *SCHEMA])
LEDGER_SCHEMA: Final = pa.schema([field for field in MESSAGES_SCHEMA if field.name not in ONLY_IN_MESSAGES])
SCHEMAS: Final = {TableName.LEDGER: LEDGER_SCHEMA, TableName.MESSAGES: MESSAGES_SCHEMA}
SORTED_BY: Final = ("entity", "partition", "epoch", "journalOffset")


class Part(NamedTuple):
    """Rows of one file to be: those of `rows` that `order` names, in its order."""

    table: TableName
    hour: int  # since 1970
    rows: pa.Table  # contiguous; may have more columns than the table
    order: pa.Array
    ranges: tuple[Range, ...]

    def pieces(self, piece_bytes: int, piece_rows: int) -> Iterator[pa.Table]:
        """The rows in tables of about so many bytes in memory, but not more rows.

        In pieces, because the allocator then gives the same memory again: made at once, the rows cost three times as
        much, most of it for pages that the kernel must clear.
        """
        rows = self.rows.select(SCHEMAS[self.table].names)
        row_bytes = rows.nbytes // max(1, len(rows)) + 1
        step = max(1, min(piece_rows, piece_bytes // row_bytes))
        for first in range(0, len(self.order), step):
            order = self.order.slice(first, step).cast(pa.int64())
            begin = order[0].as_py()
            if is_contiguous(pa.chunked_array([order]), begin, begin + len(order)):  # of one entity and hour: no copies
                yield rows.slice(begin, len(order))
            else:
                yield rows.take(order)


def check_rows(batch: pa.RecordBatch, partition: int, first: int) -> None:
    """Check a batch. Raises ForeignRows if it has not the rows of the partition from the offset `first` on."""
    if not batch.schema.equals(SCHEMA):
        fields = [field for field in batch.schema if field not in SCHEMA] or [
            field for field in SCHEMA if field not in batch.schema
        ]
        what = ", ".join(map(str, fields)) if fields else "their order"
        raise ForeignRows(f"partition {partition}: the columns are not those of the journal: {what}")
    for name in ("partition", "journalOffset", "eventTime", "op"):
        if batch.column(name).null_count:
            raise ForeignRows(f"partition {partition}: {name} is null in a row behind offset {first - 1}")
    offsets = batch.column("journalOffset")
    if not is_contiguous(pa.chunked_array([offsets]), first, first + len(batch)):
        raise ForeignRows(
            f"partition {partition}: expected the offsets {first} to {first + len(batch) - 1}, got others, "
            f"from {offsets[0].as_py()} to {offsets[-1].as_py()}"
        )
    if not _all(pc.equal(batch.column("partition"), partition)):
        raise ForeignRows(f"partition {partition}: got rows of another partition")
    times = pc.min_max(batch.column("eventTime").cast(pa.int64()))
    if times["min"].as_py() < 0 or times["max"].as_py() >= LATEST_US:
        raise ForeignRows(f"partition {partition}: eventTime is not within 1970 to 9999 in a row behind {first - 1}")


def until_damage(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[str, Any] | None]:
    """What is before the first row that stands for damaged ones, in the place of the last of them; and this row."""
    if not batch.schema.equals(SCHEMA):
        return batch, None
    op, reason = batch.column("op"), batch.column("reason")
    at = pc.index(pc.and_(pc.equal(op, name_of(Op.TRUNCATED)), pc.equal(reason, DAMAGED)), True).as_py()
    return (batch, None) if at < 0 else (batch.slice(0, at), batch.slice(at, 1).to_pylist()[0])


def is_contiguous(offsets: pa.ChunkedArray, first: int, end: int) -> bool:
    """Whether they are all from first to end - 1, in this order."""
    if len(offsets) != end - first:
        return False
    return first == end or (offsets[0].as_py() == first and _all(pc.equal(pc.pairwise_diff(one(offsets)), 1)))


def _all(array: pa.Array) -> bool:
    return pc.all(array, min_count=0).as_py() is not False


def parts(namespace: str, batches: Mapping[Position, Sequence[pa.RecordBatch]]) -> Iterator[Part]:
    """All rows of the batches, which are in the order of their offsets. The ledger comes first."""
    rows = pa.concat_tables([_widened(namespace, position, batches[position]) for position in sorted(batches)])
    rows = rows.combine_chunks()
    order = _order_of_hours_and_entities(rows)
    yield from _by_hour(TableName.LEDGER, rows, order)
    has_more = pc.or_(*(pc.is_valid(one(rows.column(name))) for name in ONLY_IN_MESSAGES))
    if pc.any(has_more).as_py():
        yield from _by_hour(TableName.MESSAGES, rows, order.filter(has_more.take(order)))


def _widened(namespace: str, position: Position, batches: Sequence[pa.RecordBatch]) -> pa.Table:
    rows = pa.Table.from_batches(batches, SCHEMA)
    added = [pa.repeat(pa.scalar(text), len(rows)) for text in (namespace, position[1])]
    return pa.table([*added, *rows.columns], MESSAGES_SCHEMA)


def _order_of_hours_and_entities(rows: pa.Table) -> pa.Array:
    """Indices of the rows, sorted by hour and entity. The sort is stable: offsets stay in their order."""
    key = _ranks(one(rows.column("entity")))
    hours = _hours(rows)
    if not _all(pc.equal(hours, hours[0])):
        width = pc.max(key).as_py() + 1
        key = pc.add(pc.multiply(_ranks(hours), width), key)
    return pc.sort_indices(key)


def _hours(rows: pa.Table) -> pa.Array:
    return pc.divide(one(rows.column("eventTime")).cast(pa.int64()), HOUR_US)


def _ranks(values: pa.Array) -> pa.Array:
    """A number for each value, the greater the value the greater; null has the greatest, as Parquet has it."""
    coded = values.dictionary_encode()
    last = len(coded.dictionary)
    if not last:
        return pa.repeat(pa.scalar(0, pa.int64()), len(values))
    ranks = pc.subtract(pc.rank(coded.dictionary, tiebreaker="dense").cast(pa.int64()), 1)
    return pc.fill_null(ranks.take(coded.indices), last)


def _by_hour(table: TableName, rows: pa.Table, order: pa.Array) -> Iterator[Part]:
    """`order` is sorted by hour."""
    first = 0
    for each in pc.value_counts(_hours(rows).take(order)):
        count = each["counts"].as_py()
        of_hour = order.slice(first, count)
        yield Part(table, each["values"].as_py(), rows, of_hour, _ranges(rows, of_hour))
        first += count


def _ranges(rows: pa.Table, order: pa.Array) -> tuple[Range, ...]:
    return ranges_of(rows.select(["partition", "epoch", "journalOffset"]).take(order))


def ranges_of(rows: pa.Table) -> tuple[Range, ...]:
    """Sorted. The columns `partition`, `epoch` and `journalOffset` are enough."""
    grouped = rows.group_by(["partition", "epoch"], use_threads=False)
    found = grouped.aggregate([("journalOffset", "min"), ("journalOffset", "max"), ("journalOffset", "count")])
    return tuple(
        Range(
            partition=each["partition"],
            epoch=each["epoch"],
            first=each["journalOffset_min"],
            last=each["journalOffset_max"],
            rows=each["journalOffset_count"],
        )
        for each in sorted(found.to_pylist(), key=lambda each: (each["partition"], each["epoch"]))
    )


def merged(table: TableName, hour: int, tables: Iterable[pa.Table]) -> Part:
    """The rows of several files of one hour."""
    rows = pa.concat_tables(tables).combine_chunks()
    keys = {
        "entity": _ranks(one(rows.column("entity"))),
        "partition": rows.column("partition"),
        "epoch": _ranks(one(rows.column("epoch"))),
        "journalOffset": rows.column("journalOffset"),
    }
    order = pc.sort_indices(pa.table(keys), sort_keys=[(name, "ascending") for name in SORTED_BY])
    return Part(table, hour, rows, order, _ranges(rows, order))
