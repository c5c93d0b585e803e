"""Reads rows of the journal from its capture: the Parquet files that `peeklock capture` has written.

The manifest is read anew for each range, so that files which a compaction has replaced since the query was planned are
not missed. Imported only where option `capturePath` is given.
"""

from collections.abc import Collection, Iterator
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_peeklock.errors import CaptureChanged, CaptureFailed, InvalidOption
from pyspark_peeklock.parts import Captured, OffsetRange
from storage.capture.errors import CaptureError, InvalidPlace, MissingFile, NotCaptured
from storage.capture.reading import Captured as Manifest
from storage.capture.reading import captured
from storage.journal.entities import Wanted


class Capture:
    """What a capture had when this was made. Raises InvalidOption, CaptureFailed."""

    def __init__(self, url: str, namespace: str) -> None:
        self._url = url
        try:
            self._manifest: Manifest = captured(url)
        except InvalidPlace as error:
            raise InvalidOption(f"option 'capturePath': {error}") from None
        except (CaptureError, OSError) as error:
            raise self._failed(error) from error
        found = self._manifest.namespace
        if found is None:
            raise InvalidOption(f"option 'capturePath': {url} has no capture: its folder 'manifest' has no entry")
        if found != namespace:
            raise InvalidOption(f"option 'capturePath': {url} has the rows of namespace {found!r}, not {namespace!r}")

    def ranges(self) -> Captured:
        found: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for each in self._manifest.ranges():
            found.setdefault((each.partition, each.epoch), []).append((each.first, each.end))
        return found

    def file_starts(self, wanted: OffsetRange) -> list[int]:
        """The first offsets of files within the range."""
        position = wanted.partition, wanted.epoch
        files = self._manifest.files_of(*position, wanted.first, wanted.end)
        return [each.first for file in files for each in file.ranges if each.position == position]

    def first_offset_at(self, partition: int, epoch: str, instant: datetime) -> int | None:
        """The first offset whose time is not before `instant`. Raises CaptureFailed."""
        try:
            return self._manifest.first_offset_at(partition, epoch, instant)
        except (CaptureError, OSError) as error:
            raise self._failed(error) from error

    def batches(
        self, wanted: OffsetRange, *, entity: str | None, records: bool, columns: Collection[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of this range, of entities that fit the pattern; in order, each once. Of the journal's columns it
        has at least these.

        Raises CaptureChanged, CaptureFailed.
        """
        of = None if entity is None else Wanted(entity)
        if columns is not None and of is not None:
            columns = {*columns, "entity"}
        at, missing = wanted.first, ""
        while at < wanted.end:
            try:
                for batch in self._manifest.batches(
                    wanted.partition, wanted.epoch, at, wanted.end, records=records, columns=columns
                ):
                    yield batch if of is None else of.rows_of(batch)
                    at = pc.max(batch.column("journalOffset")).as_py() + 1
            except NotCaptured as error:
                raise CaptureChanged(at, str(self._failed(error))) from error
            except MissingFile as error:
                if error.path == missing:
                    raise self._failed(error) from error
                missing = error.path
                self._refresh()  # a compaction may have replaced it
            except (CaptureError, OSError) as error:
                raise self._failed(error) from error

    def _refresh(self) -> None:
        try:
            self._manifest.refresh()
        except (CaptureError, OSError) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CaptureFailed:
        return CaptureFailed(f"the capture at {self._url} cannot be read: {error}")
