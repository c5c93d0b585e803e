"""Follows the journals of all partitions and captures what comes."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from storage.capture import definitions
from storage.capture.compaction import clean, compact
from storage.capture.errors import (
    DamagedFile,
    DamagedRows,
    ForeignRows,
    OutOfRetention,
    RowsLost,
    SourceFailed,
    SourceRefused,
)
from storage.capture.source import Extent, Extents, RowSource
from storage.capture.writing import CaptureWriter

POLL_SECONDS: Final = 1.0
TEND_SECONDS: Final = 60.0  # between two looks at what can be compacted
CLEAN_SECONDS: Final = 3600.0
DEFINE_SECONDS: Final = 10.0  # between two looks at the definitions of entities
TURN_ROWS: Final = 256 << 10  # of one partition, until the next has its turn


@dataclass(slots=True)
class Counters:
    """What this process has counted. `lag_rows` are those of the journal at the last look that no file has yet."""

    rows: int = 0
    files: int = 0
    bytes: int = 0
    rolls: int = 0
    compacted_files: int = 0
    removed_files: int = 0
    lost_rows: int = 0
    lag_rows: int = 0
    last_roll_s: float = 0.0  # Unix time
    damaged: dict[str, DamagedFile] = field(default_factory=dict)  # found by compaction, by path


class Follower:
    """`skips_lost`: go on behind rows that the journal has dropped or cannot read, instead of raising RowsLost."""

    def __init__(
        self,
        source: RowSource,
        writer: CaptureWriter,
        counters: Counters,
        *,
        skips_lost: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
        definitions: Callable[[], dict[str, Any] | None] | None = None,
        on_lost: Callable[[RowsLost], object] = lambda _: None,
    ) -> None:
        """`definitions`: what the broker says of its entities now; None if it cannot. `on_lost`: rows are skipped."""
        self._source = source
        self._definitions = definitions
        self._writer = writer
        self._counters = counters
        self._skips_lost = skips_lost
        self._on_lost = on_lost
        self._should_stop = should_stop
        self._tended = self._cleaned = self._defined = -CLEAN_SECONDS
        self._extents: Sequence[Extent] = ()  # at the last look
        self._is_told = False  # the journal knows what is captured

    def to_now(self) -> None:
        """Capture what the journals have now, and write it. Raises CaptureError, OSError."""
        extents = self._look()
        self._define()
        self._lag(extents)
        while not self._should_stop() and self._read(extents):
            self._lag(extents)
        self._roll()
        self._tend()

    def step(self) -> bool:
        """Take what there is, up to a turn of each partition. False if there was nothing.

        Raises CaptureError, OSError.
        """
        extents = self._look()
        self._define()
        found = self._read(extents)
        self._lag(extents)
        self.keep()
        return found

    def keep(self) -> None:
        """Do what time demands, also while the journal cannot be read. Raises CaptureError, OSError."""
        if self._writer.is_due():
            self._roll()
            self._tell()
        if time.monotonic() - self._tended >= TEND_SECONDS:
            self._tend()
        self._writer.chain.renew_when_due()

    def finish(self) -> None:
        """Write what waits. Raises Superseded, OSError."""
        self._roll()
        self._tell()

    def _look(self) -> Extents:
        extents = self._source.extents()
        # Another broker may be there since the capture began, or it tells its id now.
        self._writer.chain.require(extents.namespace, extents.namespace_id, extents.positions)
        self._extents = extents.partitions
        return extents

    def _tell(self) -> None:
        """Let the journal drop what is captured. If that fails, it keeps more, until this is called again."""
        if self._is_told:
            return
        captured = [
            extent._replace(stable=found.offset)
            for extent in self._extents
            if (found := self._writer.state.next.get((extent.partition, extent.epoch))) is not None
        ]
        with suppress(SourceFailed, SourceRefused):
            if captured:
                self._source.tell(captured)
                self._is_told = True

    def _define(self) -> None:
        """Keep the definitions of the entities that rows are about, if they have changed. Raises OSError."""
        if self._definitions is None or time.monotonic() - self._defined < DEFINE_SECONDS:
            return
        try:
            document = self._definitions()
        except SourceFailed:
            return  # a partition may be away: rows of the others are captured meanwhile
        self._defined = time.monotonic()
        if document is not None:
            definitions.keep(self._writer.place, document, self._writer.clock_ms())

    def _read(self, extents: Extents) -> bool:
        found = False
        for extent in extents.partitions:
            found = self._read_partition(extent) or found
            self._tell()  # not while rows are read: that needs the connection
            if self._should_stop():
                break
        return found

    def _read_partition(self, extent: Extent) -> bool:
        partition, epoch = extent.partition, extent.epoch
        first = self._writer.next_offset(partition, epoch)
        if first is None:
            first = extent.low
        elif first < extent.low:
            self._lost(OutOfRetention(partition, epoch, first, extent.low))
            first = extent.low
        if first > extent.stable:
            raise ForeignRows(
                f"partition {partition}, epoch {epoch}: captured to offset {first - 1}, and the journal ends before "
                f"{extent.stable}: it is not the one that was captured"
            )
        end = min(extent.stable, first + TURN_ROWS)
        if first >= end:
            return False
        found = False
        try:
            with closing(self._source.rows(partition, epoch, first, end)) as batches:
                for batch in batches:
                    self._writer.add(partition, epoch, batch)
                    found = True
                    if self._writer.is_due():
                        self._roll()
                    self._writer.chain.renew_when_due()
                    if self._should_stop():
                        break
        except OutOfRetention as error:  # dropped since we have asked what there is
            if self._writer.next_offset(partition, epoch) is None:
                return found  # nothing of it was captured, so nothing is missing: begin with what there is next time
            self._lost(error)
            return True
        except DamagedRows as error:
            self._lost(error)
            return True
        return found

    def _lost(self, error: RowsLost) -> None:
        if not self._skips_lost:
            raise error
        self._writer.skip(error.partition, error.epoch, error.first, error.end)
        self._counters.lost_rows += error.end - error.first
        self._on_lost(error)

    def _roll(self) -> None:
        rows = self._writer.waiting_rows
        written = self._writer.roll()
        if written:
            self._counters.rows += rows
            self._counters.rolls += 1
            self._counters.files += len(written)
            self._counters.bytes += sum(file.bytes for file in written)
            self._counters.last_roll_s = time.time()
            self._counters.lag_rows = max(0, self._counters.lag_rows - rows)
            self._is_told = False

    def _lag(self, extents: Extents) -> None:
        lag = self._writer.waiting_rows
        for extent in extents.partitions:
            begin = self._writer.next_offset(extent.partition, extent.epoch)
            lag += max(0, extent.stable - (extent.low if begin is None else begin))
        self._counters.lag_rows = lag

    def _tend(self) -> None:
        now = time.monotonic()
        self._tell()
        self._counters.compacted_files += compact(self._writer, self._counters.damaged)
        self._tended = time.monotonic()
        if now - self._cleaned >= CLEAN_SECONDS:
            self._counters.removed_files += clean(self._writer)
            self._cleaned = now
