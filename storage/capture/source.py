"""Where a capture gets rows from: the interface of all sources that can read a journal."""

from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple, Protocol

import pyarrow as pa


class Extent(NamedTuple):
    """What the journal of a partition has: offsets low <= offset < stable."""

    partition: int
    epoch: str  # 16 hex digits; offsets of different epochs have nothing to do with each other
    low: int
    stable: int


class Extents(NamedTuple):
    """`namespace_id`: 32 hex digits that no other broker has, but one that was made of a backup; None if the broker
    does not tell it."""

    namespace: str
    partitions: Sequence[Extent]
    namespace_id: str | None = None

    @property
    def positions(self) -> frozenset[tuple[int, str]]:
        """The partitions with their epochs."""
        return frozenset((each.partition, each.epoch) for each in self.partitions)


class Told(NamedTuple):
    """What a broker knows of a capture: the offsets behind the last ones that it was told are captured, by partition
    and epoch. `namespace_id` as of Extents."""

    namespace: str
    namespace_id: str | None
    offsets: Mapping[tuple[int, str], int]


class RowSource(Protocol):
    def extents(self) -> Extents:
        """Return which rows the source has. Raises SourceFailed, SourceRefused."""

    def rows(self, partition: int, epoch: str, first: int, end: int) -> Generator[pa.RecordBatch, None, None]:
        """Rows of the offsets first <= offset < end, in order, with the columns of SCHEMA. May end before `end`;
        is closed by the caller.

        Raises SourceFailed, SourceRefused; OutOfRetention if the journal has dropped some, DamagedRows if it cannot
        read some, after those that come before.
        """

    def tell(self, captured: Sequence[Extent]) -> None:
        """All before each `stable` is captured; `low` says nothing. Raises SourceFailed, SourceRefused."""
