"""Sifts a capture: of all rows, those that a restore needs, by partition and in the order of their offsets.

Three steps, each of many units that any process can do, in any order:

1. `look_at`, a file of the ledger: what it says as a whole (`survey`), and the rows that may matter (`lifetimes`).
2. `choose`, a partition: which rows matter.
3. `fetch`, a file of messages: the records and overlays of these rows.

What a unit has found is in the folder of the work (`Work`), in a file of Arrow's IPC and in one of JSON, which is
written last. After a kill, the units without one are done again.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from storage.capture import files, lifetimes
from storage.capture.columns import REPETITIVE, one
from storage.capture.lifetimes import Lifetimes, matters
from storage.capture.manifest import DataFile, Position, Range
from storage.capture.place import Place
from storage.capture.reading import overlapping
from storage.capture.survey import COLUMNS, Look, family_of, look
from storage.capture.tables import HOUR_US, ranges_of
from storage.durable import sync_file, write_file
from storage.journal.schema import SCHEMA

Tell = Callable[[int], object]
CHOSEN_ROWS: Final = 64 << 10  # of a batch of rows that matter
_CHOSEN: Final = [name for name in lifetimes.COLUMNS if name not in ("partition", "enqueuedTime")]
_IDS: Final = (
    "eventTime", "op", "entity", "sequenceNumber", "messageId", "sessionId", "partitionKey", "reason", "originEntity",
)  # fmt: skip
_IDS_OF: Final = ("partition", "journalOffset", *_IDS)
_BODIES: Final = ("journalOffset", "record", "overlay")
_POSITION: Final = ("partition", "epoch", "journalOffset")


@dataclass(frozen=True)
class Sieve:
    """What is wanted. Times in microseconds since 1970.

    `epochs` and `ends`: of each partition the epoch, and the first offset behind the cut. `entities`: paths of queues
    and topics in lower case whose messages are wanted; None for all. `since_us`: if they were enqueued since. `ids_us`:
    ids of messages are wanted that came since, for the windows of duplicate detection; None if there are no windows.
    """

    epochs: Mapping[int, str]
    ends: Mapping[int, int]
    entities: frozenset[str] | None = None
    since_us: int | None = None
    ids_us: int | None = None

    def wants(self, path: str) -> bool:
        """Whether messages of this entity are wanted, by its path in lower case."""
        return self.entities is None or family_of(path) in self.entities


class Work:
    """The folder of a work, and what its units have found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def noted(self, name: str) -> Any:
        """What was written down under this name; None if nothing was."""
        try:
            return json.loads((self.folder / f"{name}.json").read_text())
        except FileNotFoundError:
            return None

    def note(self, name: str, document: object) -> None:
        """Note what a unit has found; it is durable on return. Raises OSError."""
        write_file(self.folder / f"{name}.json", json.dumps(document).encode())

    def write(self, name: str, schema: pa.Schema, tables: Iterable[pa.Table], codec: str | None = "lz4") -> None:
        """Each table, none of them empty, is a batch of the file of this name. Durable on return. Raises OSError."""
        path = self.path(name)
        with (
            pa.OSFile(str(path), "wb") as sink,
            pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer,
        ):
            for each in tables:
                writer.write_table(each.cast(schema).combine_chunks())
        sync_file(path)

    def batches(self, name: str) -> "pa.ipc.RecordBatchFileReader":
        """Open a file of batches, which are read only when they are asked for. Raises OSError."""
        return pa.ipc.open_file(pa.memory_map(str(self.path(name))))

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.arrow"


def unit_of(step: str, file: DataFile) -> str:
    return f"{step}-{Path(file.path).stem}"


# -- 1. files of the ledger


def look_at(place: Place, file: DataFile, sieve: Sieve, work: Work, tell: Tell, *, overlaps: bool) -> None:
    """`tell` is told of rows. `overlaps`: another file of the ledger has offsets between those of this one.

    Raises DamagedFile, OSError.
    """
    unit = unit_of("ledger", file)
    if work.noted(unit) is not None:
        tell(file.rows)
        return
    wants_ids = sieve.ids_us is not None and (file.hour + 1) * HOUR_US > sieve.ids_us
    columns = dict.fromkeys((*COLUMNS, "epoch", *lifetimes.COLUMNS, *(_IDS if wants_ids else ())))
    seen, kept, ids = Look(), [], []
    counted: dict[Position, Range] = {}
    for group in files.groups(place, file, REPETITIVE):
        rows = group.read([*columns]).combine_chunks()
        files.count(counted, rows)
        rows = _of_epochs(rows, sieve, file)
        is_before = _is_before(rows, sieve, file)
        seen.add(look(rows, is_before))
        before = rows if is_before is None else rows.filter(is_before)
        mattering = before.filter(matters(before))
        if not overlaps:
            lives = Lifetimes()
            lives.add(mattering, pa.array(range(len(mattering)), pa.int64()))
            mattering = mattering.take(lives.kept_of_piece())
        kept.append(mattering.select(lifetimes.COLUMNS).cast(_schema(lifetimes.COLUMNS)))
        if wants_ids:
            ids.append(_ids(before, sieve))
        tell(len(rows))
    files.require_counted(place, file, counted)
    partitions = {}
    for name, schema, tables in ((unit, lifetimes.COLUMNS, kept), (f"{unit}-ids", _IDS_OF, ids)):
        found = [*_by_partition(tables)]
        work.write(name, _schema(schema), (rows for _, rows in found))
        partitions[name] = [partition for partition, _ in found]
    work.note(f"{unit}-look", seen.document())
    work.note(unit, partitions)


def _of_epochs(rows: pa.Table, sieve: Sieve, file: DataFile) -> pa.Table:
    """Rows of the epochs that are wanted."""
    others = [each.position for each in file.ranges if sieve.epochs.get(each.partition) != each.epoch]
    for partition, epoch in others:
        is_other = pc.and_(pc.equal(rows.column("partition"), partition), _equals(rows.column("epoch"), epoch))
        rows = rows.filter(pc.invert(is_other))
    return rows.combine_chunks()


def _equals(column: pa.ChunkedArray, text: str) -> pa.Array:
    return pc.equal(one(column).cast(pa.string()), text)


def _is_before(rows: pa.Table, sieve: Sieve, file: DataFile) -> pa.Array | None:
    """Whether each row is before the cut; None if all are."""
    ends = {each.partition: sieve.ends[each.partition] for each in file.ranges if each.partition in sieve.ends}
    last = {each.partition: each.last for each in file.ranges if sieve.epochs.get(each.partition) == each.epoch}
    if all(last[partition] < end for partition, end in ends.items() if partition in last):
        return None
    of = pa.array(ends.keys(), pa.int32())
    end = pa.array(ends.values(), pa.int64()).take(pc.index_in(rows.column("partition"), of))
    return one(pc.less(rows.column("journalOffset"), end))


def _ids(rows: pa.Table, sieve: Sieve) -> pa.Table:
    """Rows that tell an id that a window may have."""
    came = pc.greater_equal(rows.column("eventTime").cast(pa.int64()), sieve.ids_us)
    return rows.filter(pc.and_(came, pc.is_valid(rows.column("messageId")))).select(_IDS_OF).cast(_schema(_IDS_OF))


def _by_partition(tables: Sequence[pa.Table]) -> Iterator[tuple[int, pa.Table]]:
    """The rows of each partition, in the order of their offsets."""
    if not tables:
        return
    rows = pa.concat_tables(tables).combine_chunks()
    for partition in sorted(pc.unique(rows.column("partition")).to_pylist()):
        yield partition, rows.filter(pc.equal(rows.column("partition"), partition)).sort_by("journalOffset")


def seen_in(file: DataFile, work: Work) -> Look:
    """What a file of the ledger says as a whole, after it was looked at."""
    return Look.from_document(work.noted(f"{unit_of('ledger', file)}-look"))


# -- 2. partitions


def choose(partition: int, ledger: Sequence[DataFile], sieve: Sieve, work: Work) -> int:
    """Choose the rows that matter, after all files of the ledger. Returns how many there are. Raises OSError."""
    unit = f"chosen-{partition}"
    if (known := work.noted(unit)) is not None:
        return int(known["rows"])
    runs = [*overlapping(ledger, partition, sieve.epochs[partition])]
    lives = Lifetimes(sieve.wants, sieve.since_us)
    for run in runs:
        rows = _of_partition(run, partition, "", work)
        lives.add(rows, one(rows.column("journalOffset")))
        lives.forget()
    kept = lives.kept()
    Offsets.write(work, partition, kept.ids)
    spans: list[tuple[int, int]] = []
    work.write(unit, _schema(_CHOSEN), _chosen(runs, partition, work, spans))
    work.note(unit, {"rows": len(kept.ids), "spans": spans, "unwanted": kept.unwanted})
    return len(kept.ids)


def _chosen(
    runs: Sequence[Sequence[DataFile]], partition: int, work: Work, spans: list[tuple[int, int]]
) -> Iterator[pa.Table]:
    """`spans` gets the first and last offset of each."""
    offsets = Offsets(work, partition)
    for run in runs:
        rows = _of_partition(run, partition, "", work).select(_CHOSEN)
        if not len(rows):
            continue
        of_rows = rows.column("journalOffset")
        rows = rows.filter(pc.is_in(of_rows, offsets.between(of_rows[0].as_py(), of_rows[-1].as_py())))
        for first in range(0, len(rows), CHOSEN_ROWS):
            piece = rows.slice(first, CHOSEN_ROWS)
            spans.append((piece.column("journalOffset")[0].as_py(), piece.column("journalOffset")[-1].as_py()))
            yield piece


def _of_partition(run: Sequence[DataFile], partition: int, what: str, work: Work) -> pa.Table:
    """What `look_at` has found in files whose offsets overlap, in the order of the offsets."""
    found = []
    for file in run:
        unit = unit_of("ledger", file)
        partitions = work.noted(unit)[f"{unit}{what}"]
        if partition in partitions:
            found.append(work.batches(f"{unit}{what}").get_batch(partitions.index(partition)))
    if not found:
        return _schema(lifetimes.COLUMNS).empty_table()
    rows = pa.Table.from_batches(found)
    return rows.sort_by("journalOffset") if len(found) > 1 else rows


class Offsets:
    """The offsets of a partition that matter, ascending, in a file that is mapped."""

    def __init__(self, work: Work, partition: int) -> None:
        path = self._path(work, partition)
        self._content = pa.memory_map(str(path)).read_buffer() if path.stat().st_size else pa.py_buffer(b"")
        self._numbers = memoryview(self._content).cast("q")

    @staticmethod
    def write(work: Work, partition: int, offsets: pa.Array) -> None:
        """Write the offsets, which are durable on return. Raises OSError."""
        content = pa.concat_arrays([offsets]).buffers()[1]  # none is null, so they are side by side
        write_file(Offsets._path(work, partition), content[: 8 * len(offsets)].to_pybytes() if len(offsets) else b"")

    @staticmethod
    def _path(work: Work, partition: int) -> Path:
        return work.folder / f"chosen-{partition}.offsets"

    def between(self, first: int, last: int) -> pa.Array:
        """Return the offsets from first to last, both included."""
        begin, end = bisect_left(self._numbers, first), bisect_left(self._numbers, last + 1)
        return pa.Array.from_buffers(pa.int64(), end - begin, [None, self._content.slice(begin * 8, (end - begin) * 8)])


def ids_of(partition: int, ledger: Sequence[DataFile], epoch: str, work: Work) -> Iterator[pa.RecordBatch]:
    """Rows that tell ids of messages for duplicate detection, in the order of their offsets."""
    for run in overlapping(ledger, partition, epoch):
        yield from _of_partition(run, partition, "-ids", work).to_batches()


# -- 3. files of messages


def fetch(place: Place, file: DataFile, sieve: Sieve, partitions: Collection[int], work: Work, tell: Tell) -> None:
    """Fetch records, after `choose` for these partitions. `tell` is told of rows. Raises DamagedFile, OSError."""
    unit = unit_of("bodies", file)
    if work.noted(unit) is not None:
        tell(file.rows)
        return
    wanted = {
        each.partition: (each.epoch, Offsets(work, each.partition))
        for each in file.ranges
        if each.partition in partitions and sieve.epochs.get(each.partition) == each.epoch
    }
    needed = any(
        len(wanted[each.partition][1].between(each.first, each.last))
        for each in file.ranges
        if each.partition in wanted
    )
    batches: list[tuple[int, int, int]] = []  # partition, first and last offset
    work.write(unit, _schema(_BODIES), _fetched(place, file, wanted, batches) if needed else (), codec=None)
    work.note(unit, batches)
    tell(file.rows)


def _fetched(
    place: Place,
    file: DataFile,
    wanted: Mapping[int, tuple[str, Offsets]],
    batches: list[tuple[int, int, int]],
) -> Iterator[pa.Table]:
    counted: dict[Position, Range] = {}
    for group in files.groups(place, file):
        rows = group.read(_POSITION).combine_chunks()
        files.count(counted, rows)
        bodies = None
        for each in ranges_of(rows):
            epoch, offsets = wanted.get(each.partition, (None, None))
            if offsets is None or each.epoch != epoch:
                continue
            known = offsets.between(each.first, each.last)
            if not len(known):
                continue
            is_wanted = pc.and_(
                pc.and_(pc.equal(rows.column("partition"), each.partition), pc.equal(rows.column("epoch"), epoch)),
                pc.is_in(rows.column("journalOffset"), known),
            )
            if bodies is None:
                bodies = group.read(_BODIES)
            found = bodies.filter(is_wanted)
            if len(found):
                found = found.sort_by("journalOffset")
                of_found = found.column("journalOffset")
                batches.append((each.partition, of_found[0].as_py(), of_found[-1].as_py()))
                yield found
    files.require_counted(place, file, counted)


# -- what was found


def unwanted_of(partition: int, work: Work) -> list[lifetimes.Message]:
    """See `lifetimes.Kept`."""
    return [lifetimes.Message(*each) for each in work.noted(f"chosen-{partition}")["unwanted"]]


def chosen(partition: int, messages: Sequence[DataFile], work: Work, piece_bytes: int) -> Iterator[pa.Table]:
    """All rows that matter, in the order of their offsets, with about so many bytes of records at a time."""
    bodies = _Bodies(partition, messages, work)
    unit = f"chosen-{partition}"
    reader = work.batches(unit)
    for number, (first, last) in enumerate(work.noted(unit)["spans"]):
        rows = pa.Table.from_batches([reader.get_batch(number)])
        found = bodies.between(first, last)
        at = pc.index_in(rows.column("journalOffset"), one(found.column("journalOffset")))
        for begin, end in _pieces(found, at, piece_bytes):
            of_piece = one(at).slice(begin, end - begin)
            piece = rows.slice(begin, end - begin)
            for name in ("record", "overlay"):
                piece = piece.append_column(name, found.column(name).take(of_piece))
            yield piece


def _pieces(bodies: pa.Table, at: pa.ChunkedArray, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Begin and end of pieces of the rows to which the bodies at these places belong."""
    sizes = pc.fill_null(pc.binary_length(bodies.column("record")), 0).take(at)
    so_far = pc.cumulative_sum(pc.fill_null(sizes, 0).cast(pa.int64())).to_pylist()
    begin = 0
    while begin < len(so_far):
        before = so_far[begin - 1] if begin else 0
        end = max(begin + 1, bisect_left(so_far, before + piece_bytes, begin))
        yield begin, end
        begin = end


class _Bodies:
    """The records and overlays of one partition. Its files are mapped while they are needed."""

    def __init__(self, partition: int, messages: Sequence[DataFile], work: Work) -> None:
        self._work = work
        self._batches = sorted(
            (first, last, unit, number)
            for unit in (unit_of("bodies", file) for file in messages)
            for number, (of, first, last) in enumerate(work.noted(unit))
            if of == partition
        )

    def between(self, first: int, last: int) -> pa.Table:
        """Return the bodies with the offsets from first to last, in no order."""
        while self._batches and self._batches[0][1] < first:
            del self._batches[0]
        found = []
        for begin, end, unit, number in self._batches:
            if begin > last:
                break
            if end < first:
                continue
            rows = self._work.batches(unit).get_batch(number)
            numbers = memoryview(rows.column("journalOffset").buffers()[1]).cast("q")[: len(rows)]
            here = bisect_left(numbers, first)
            found.append(rows.slice(here, bisect_left(numbers, last + 1) - here))
        return pa.Table.from_batches(found, _schema(_BODIES))


def _schema(names: Iterable[str]) -> pa.Schema:
    return pa.schema(pa.field(name, SCHEMA.field(name).type) for name in names)
