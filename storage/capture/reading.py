"""The reader of a capture: which offsets are there, in which files, and their rows.

found = captured("s3://bucket/folder")
for each in found.ranges(): ...
for batch in found.batches(partition, epoch, first, end): ...
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime
from math import floor
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from storage.capture import files
from storage.capture.chain import load_captured
from storage.capture.errors import DamagedFile, DamagedManifest, NotCaptured
from storage.capture.inventory import contradictions, inventory
from storage.capture.manifest import DataFile, State, TableName
from storage.capture.place import Place
from storage.capture.tables import ONLY_IN_MESSAGES, is_contiguous
from storage.journal.schema import SCHEMA

BATCH_ROWS = 64 << 10


class CapturedRange(NamedTuple):
    """Offsets first <= offset < end, all of which are captured."""

    partition: int
    epoch: str
    first: int
    end: int


class Captured:
    """What the manifest said when this was made, or at the last `refresh`. Later captures do not change it.

    Files that compaction replaces stay for a day, so a reader refreshes more often than that.
    """

    def __init__(self, place: Place) -> None:
        """Read the manifest. Raises DamagedManifest, OSError."""
        self._place = place
        self._state: State | None = None
        self._whole: set[str] = set()  # paths of files whose checksums were compared
        self.refresh()

    def refresh(self) -> None:
        """Read the manifest again. Raises DamagedManifest, OSError."""
        self._state = load_captured(self._place)

    @property
    def namespace(self) -> str | None:
        """None if nothing was captured yet."""
        return None if self._state is None else self._state.namespace

    @property
    def namespace_id(self) -> str | None:
        """None if it is not known: nothing was captured yet, or by an earlier version."""
        return None if self._state is None else self._state.namespace_id

    @property
    def newest(self) -> str:
        """The newest entry of the manifest: its name and, if it is known, its checksum. Empty if there is none."""
        return "" if self._state is None else f"{self._state.head} {self._state.head_checksum or ''}"

    def ranges(self) -> list[CapturedRange]:
        """All offsets that are there, sorted. Between two of one partition and epoch the journal had dropped some."""
        if self._state is None:
            return []
        return sorted(CapturedRange(*each.position, *span) for each in inventory(self._state) for span in each.captured)

    def require_complete(self) -> None:
        """Check that the files can have all that the manifest says was captured. Raises DamagedManifest."""
        if self._state is not None and (found := [*contradictions(self._state)]):
            raise DamagedManifest("\n".join(found))

    def files(self, table: TableName = TableName.LEDGER) -> list[DataFile]:
        """All files of a table, oldest hour first."""
        found = self._state.files.values() if self._state is not None else ()
        return sorted((file for file in found if file.table == table), key=lambda file: (file.hour, file.path))

    def files_of(
        self, partition: int, epoch: str, first: int, end: int, table: TableName = TableName.LEDGER
    ) -> list[DataFile]:
        """The files that may have rows of the offsets first <= offset < end."""
        return [file for file in self.files(table) if file.overlaps((partition, epoch), first, end)]

    def first_offset_at(self, partition: int, epoch: str, time: datetime) -> int | None:
        """The first captured offset whose eventTime is not before `time`; None if there is none.

        Raises DamagedFile, OSError.
        """
        hour = floor(time.timestamp() / 3600)
        found = []
        for file in self.files():
            for each in file.ranges:
                if each.position != (partition, epoch) or file.hour < hour:
                    continue
                if file.hour > hour:
                    found.append(each.first)
                    continue
                columns = ["eventTime", "journalOffset"]
                rows = self._read(file, columns, partition, epoch, each.first, each.last + 1)
                first = pc.min(rows.filter(pc.field("eventTime") >= time).column("journalOffset")).as_py()
                if first is not None:
                    found.append(first)
        return min(found, default=None)

    def uris(self, table: TableName = TableName.LEDGER) -> list[str]:
        """Where the files are, for other programs such as Spark."""
        return [self._place.uri(file.path) for file in self.files(table)]

    def batches(
        self,
        partition: int,
        epoch: str,
        first: int,
        end: int,
        *,
        records: bool = True,
        columns: Collection[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of the offsets first <= offset < end, in this order, with the columns of the journal's SCHEMA, or
        with these of them and journalOffset.

        Without `records` the columns record and overlay are null, and no file with bodies is read. Raises NotCaptured
        before the first batch if one of the offsets is not there; DamagedFile, OSError.
        """
        self._require(partition, epoch, first, end)
        wanted = SCHEMA.names if columns is None else [*columns, "journalOffset"]
        schema = pa.schema([field for field in SCHEMA if field.name in wanted])
        has_messages = records and any(name in ONLY_IN_MESSAGES for name in schema.names)
        at = first
        for run in overlapping(self.files_of(partition, epoch, first, end), partition, epoch):
            spans = [each for file in run for each in file.ranges if each.position == (partition, epoch)]
            last = min(end, 1 + max(each.last for each in spans))
            for until in self._ends(partition, epoch, at, last) if has_messages else [last]:
                rows = self._rows(run, partition, epoch, at, until, schema, records=records)
                if not is_contiguous(rows.column("journalOffset"), at, until):
                    path = self._place.uri(run[0].path)
                    raise DamagedFile(path, f"partition {partition} has other rows than the manifest says")
                yield from rows.to_batches(BATCH_ROWS)
                at = until

    def _ends(self, partition: int, epoch: str, first: int, end: int) -> list[int]:
        """Offsets behind first, up to end. What lies between two is read at once, and has the bodies of about one file:
        a file without bodies may have the rows of many with them.
        """
        begins = {
            each.first
            for file in self.files_of(partition, epoch, first, end, TableName.MESSAGES)
            for each in file.ranges
            if each.position == (partition, epoch) and first < each.first < end
        }
        return [*sorted(begins), end]

    def _read(
        self, file: DataFile, columns: Sequence[str], partition: int, epoch: str, first: int, end: int
    ) -> pa.Table:
        """Rows of a file, whose checksum is compared before the first of them. Raises DamagedFile, OSError."""
        if file.path not in self._whole:
            files.require_whole(self._place, file)
            self._whole.add(file.path)
        return files.read_range(self._place, file, columns, partition, epoch, first, end)

    def _require(self, partition: int, epoch: str, first: int, end: int) -> None:
        at = first
        for each in self.ranges():
            if (each.partition, each.epoch) == (partition, epoch) and each.first <= at < each.end:
                at = each.end
        if at < end:
            raise NotCaptured(partition, epoch, at, end)

    def _rows(
        self,
        run: Sequence[DataFile],
        partition: int,
        epoch: str,
        first: int,
        end: int,
        schema: pa.Schema,
        *,
        records: bool,
    ) -> pa.Table:
        names = [name for name in schema.names if name not in ONLY_IN_MESSAGES]
        found = [self._read(file, names, partition, epoch, first, end) for file in run]
        rows = pa.concat_tables(found).sort_by("journalOffset")
        only = [name for name in schema.names if name in ONLY_IN_MESSAGES]
        nothing = [pa.nulls(len(rows), SCHEMA.field(name).type) for name in only]
        full = pa.table([*rows.columns, *nothing], schema)
        if not records or not only:
            return full
        messages = [
            self._read(file, schema.names, partition, epoch, first, end)
            for file in self.files_of(partition, epoch, first, end, TableName.MESSAGES)
        ]
        if not messages:
            return full
        with_record = pa.concat_tables(messages).cast(schema)
        others = full.filter(
            pc.invert(pc.is_in(full.column("journalOffset"), with_record.column("journalOffset").combine_chunks()))
        )
        return pa.concat_tables([others, with_record]).sort_by("journalOffset")


def captured(url: str) -> Captured:
    """Read what is captured at the URL. Raises InvalidPlace, DamagedManifest, OSError."""
    return Captured(Place.of(url))


def overlapping(found: Iterable[DataFile], partition: int, epoch: str) -> Iterator[list[DataFile]]:
    """The files that have rows of the partition, in the order of their offsets. Those whose offsets overlap come
    together: files of two hours do if the clock was set back between them."""
    spans = [
        (each.first, each.last, file.path, file)
        for file in found
        for each in file.ranges
        if each.position == (partition, epoch)
    ]
    run: list[DataFile] = []
    end = -1
    for first, last, _, file in sorted(spans, key=lambda each: each[:3]):
        if run and first > end:
            yield run
            run = []
        run.append(file)
        end = max(end, last)
    if run:
        yield run
