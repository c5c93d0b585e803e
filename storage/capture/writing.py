"""The writer of a capture: collects rows of many partitions, and writes them out together.

What `roll` has written is in the manifest, with the offsets to go on from: rows and offsets become valid in one step.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Self

import pyarrow as pa

from storage.capture import files
from storage.capture.chain import LEASE_SECONDS, Chain
from storage.capture.errors import ForeignRows
from storage.capture.manifest import DataFile, Entry, Gap, Kind, Next, Position, State, TableName
from storage.capture.place import Place
from storage.capture.tables import ONLY_IN_MESSAGES, check_rows, parts

MIB: Final = 1 << 20
DAY_SECONDS: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """A roll is due when one of the first three is reached. A capture takes about three times `memory_bytes`."""

    file_bytes: int = 128 * MIB  # of a file: about so many when it is written, and at most about so many when compacted
    memory_bytes: int = 256 * MIB  # of the rows that wait for a roll; and of those that are compacted together
    roll_seconds: float = 300.0  # since the first row that waits
    compact_after_seconds: float = 900.0  # an hour's files are compacted so long after its end
    keep_seconds: float = DAY_SECONDS  # files that are not in the manifest, or not any more, stay so long
    lease_seconds: float = LEASE_SECONDS


class CaptureWriter:
    """Use it in `with`. After any error but ForeignRows, make a new one: it goes on from what is in the manifest."""

    def __init__(
        self,
        place: Place,
        namespace: str,
        options: CaptureOptions,
        *,
        namespace_id: str | None = None,
        journal: Collection[Position] = (),
        sleep: Callable[[float], object] = time.sleep,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`namespace_id` and `journal`: as of `storage.capture.chain.Chain`.

        Raises InUse, Superseded, AnotherNamespace, AnotherBroker, SourceFailed, DamagedManifest, OSError.
        """
        self.place = place
        self.options = options
        self.clock_ms = clock_ms
        self._monotonic = monotonic
        self.chain = Chain(
            place,
            namespace,
            namespace_id=namespace_id,
            journal=journal,
            lease_seconds=options.lease_seconds,
            sleep=sleep,
        )
        self._waiting: dict[Position, list[pa.RecordBatch]] = {}
        self._next: dict[Position, Next] = dict(self.state.next)
        self._gaps: list[Gap] = []
        self._waiting_since: float | None = None
        self._waiting_bytes = dict.fromkeys(TableName, 0)
        # Bytes in a file for each in memory: before the first roll, as if nothing could be compressed.
        self._ratios = dict.fromkeys(TableName, 1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def state(self) -> State:
        return self.chain.state

    @property
    def waiting_rows(self) -> int:
        return sum(len(batch) for batches in self._waiting.values() for batch in batches)

    def next_offset(self, partition: int, epoch: str) -> int | None:
        """The offset that `add` wants next; None if nothing was captured yet, so that any will do."""
        found = self._next.get((partition, epoch))
        return None if found is None else found.offset

    def add(self, partition: int, epoch: str, batch: pa.RecordBatch) -> None:
        """Take rows, which `roll` will write. Raises ForeignRows, and then has taken none of them."""
        if not len(batch):
            return
        position = partition, epoch
        known = self._next.get(position)
        first = known.offset if known is not None else _first_offset(batch)
        check_rows(batch, partition, first)
        self._waiting.setdefault(position, []).append(batch)
        begun = first if known is None else known.first
        self._next[position] = Next(partition=partition, epoch=epoch, first=begun, offset=first + len(batch))
        bodies = sum(batch.column(name).nbytes for name in ONLY_IN_MESSAGES)
        self._waiting_bytes[TableName.MESSAGES] += bodies
        self._waiting_bytes[TableName.LEDGER] += batch.nbytes - bodies
        self._wait_since_now()

    def skip(self, partition: int, epoch: str, first: int, end: int) -> None:
        """The rows first <= offset < end, which come next, are lost: go on behind them. The manifest names them."""
        known = self._next.get((partition, epoch))
        if known is not None and known.offset != first:
            raise ForeignRows(f"partition {partition}: offset {known.offset} comes next, not {first}")
        self._gaps.append(Gap(partition=partition, epoch=epoch, first=first, last=end - 1))
        begun = first if known is None else known.first
        self._next[partition, epoch] = Next(partition=partition, epoch=epoch, first=begun, offset=end)
        self._wait_since_now()

    def _wait_since_now(self) -> None:
        if self._waiting_since is None:
            self._waiting_since = self._monotonic()

    def is_due(self) -> bool:
        if self._waiting_since is None:
            return False
        if self._monotonic() - self._waiting_since >= self.options.roll_seconds:
            return True
        in_files = max(size * self._ratios[table] for table, size in self._waiting_bytes.items())
        return in_files >= self.options.file_bytes or self.is_full()

    def is_full(self) -> bool:
        return sum(self._waiting_bytes.values()) >= self.options.memory_bytes

    def roll(self) -> tuple[DataFile, ...]:
        """Write what waits. Raises Superseded, OSError."""
        if self._waiting_since is None:
            return ()
        now_ms = self.clock_ms()
        written = []
        if self._waiting:
            for part in parts(self.state.namespace, self._waiting):
                written.append(files.write(self.place, part, now_ms))
                self.chain.renew_when_due()
        new = {
            "files": tuple(written),
            "next": tuple(self._next[position] for position in sorted(self._next)),
            "gaps": tuple(self._gaps),
        }
        self.append(self.state.following(Kind.CAPTURED, now_ms).model_copy(update=new))
        for table, size in self._waiting_bytes.items():
            if size > MIB and (in_files := sum(file.bytes for file in written if file.table is table)):
                self._ratios[table] = in_files / size
            self._waiting_bytes[table] = 0
        self._waiting = {}
        self._gaps = []
        self._waiting_since = None
        return tuple(written)

    def append(self, entry: Entry) -> None:
        """Append an entry to the manifest. Raises Superseded, OSError."""
        self.chain.append(entry)

    def close(self) -> None:
        """Drops what waits."""
        self.chain.close()


def _first_offset(batch: pa.RecordBatch) -> int:
    """Return the offset of the first row. Raises ForeignRows."""
    at = batch.schema.get_field_index("journalOffset")
    first = batch.column(at)[0].as_py() if at >= 0 else None
    if not isinstance(first, int) or first < 0:
        raise ForeignRows(f"journalOffset is {first!r} in the first row")
    return first
