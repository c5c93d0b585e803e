"""Browses a queue as it was at offsets of the journal: `mode=browse` with option `asOfOffsets`.

A queue cannot be browsed as it was. But whatever changed since is in the journal: what came is left out, and what went
is put back, without its body. All of a query's tasks show the queue at the same offsets, however long they take.

Sequence numbers of a queue rise. So what came has higher numbers than all that was there, and is left out by ending
the range of numbers before it. What went is known when a task has browsed its range: it then asks the journal for all
that was confirmed until now, and adds what it has not seen.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from protocol.client.browsing import fragment_of
from pyspark_peeklock import rows
from pyspark_peeklock.browse import BrowseReader, NumberRange, run, split
from pyspark_peeklock.errors import BrowseFailed, OutOfRetention
from pyspark_peeklock.journal_client import Endpoint, JournalClient
from pyspark_peeklock.journal_offsets import Position, given_offsets, places
from pyspark_peeklock.options import BrowseOptions
from pyspark_peeklock.parts import OffsetRange

# A message that moves with its entity to another partition keeps its number: it neither comes nor goes.
ENTERING: Final = frozenset({"enqueued", "scheduled"})
LEAVING: Final = frozenset(
    {
        *("completed", "deadlettered", "expired", "purged", "cancelled", "activated", "forwarded", "published"),
        "quarantined",
    }
)
MOVED: Final = "moved"


@dataclass
class NumbersAsOf(NumberRange):
    """`cut`: the offsets, of which the range is shown."""

    cut: Position


@dataclass
class Changes:
    """What changed in one queue: the lowest number that has come, by fragment; and which went, and how."""

    came: dict[int, int] = field(default_factory=dict)
    went: dict[int, str] = field(default_factory=dict)

    def add(self, op: str, reason: str | None, number: int) -> None:
        """A row of the journal; those of one fragment come in their order."""
        fragment = fragment_of(number)
        if op in ENTERING and reason != MOVED:
            self.came[fragment] = min(number, self.came.get(fragment, number))
        elif op in LEAVING and number < self.came.get(fragment, number + 1):
            self.went[number] = op


def narrowed(found: Iterable[NumberRange], changes: Changes) -> list[NumberRange]:
    """The ranges, one for each fragment that had any message, with all that went and nothing that came."""
    bounds = {fragment_of(each.first): (each.first, each.last) for each in found}
    for number in changes.went:
        first, last = bounds.get(fragment_of(number), (number, number))
        bounds[fragment_of(number)] = min(first, number), max(last, number)
    wanted = []
    for fragment, (first, last) in sorted(bounds.items()):
        last = min(last, changes.came.get(fragment, last + 1) - 1)
        if first <= last:
            wanted.append(NumberRange(first, last))
    return wanted


class AsOfReader(BrowseReader):
    """The reader of a queue as it was. Its methods raise what the client of the journal raises, and BrowseFailed."""

    def __init__(self, options: BrowseOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._endpoint = Endpoint(options.access, options.http_endpoint, options.retry_timeout_s)

    def partitions(self) -> list[Any]:
        client = JournalClient(self._endpoint)
        try:
            _, states = client.states(current=True)
            cut = given_offsets("asOfOffsets", self._options.as_of_offsets or "", states)
            for number, (_, offset) in places(cut).items():
                if offset < states[number].low:
                    raise OutOfRetention(number, offset, states[number].low, states[number].stable)
            found = run(self._ranges(), self._options.address)
            # What comes from now on has higher numbers than these ranges.
            wanted = narrowed(found, self._changes(client, cut))
        finally:
            client.close()
        return [NumbersAsOf(each.first, each.last, cut) for each in split(wanted, self._options.min_partitions)]

    def _changes(self, client: JournalClient, cut: Position) -> Changes:
        """All that was confirmed since the cut."""
        _, states = client.states(current=True)
        changes = Changes()
        entity = "".join(f"[{each}]" if each in "*?[" else each for each in self._options.entity)
        for number, (epoch, offset) in places(cut).items():
            state = states.get(number)
            if state is None:
                raise BrowseFailed(f"the journal has no partition {number} any more")
            end = max(offset, state.stable) if state.epoch == epoch else offset + 1  # that raises AnotherEpoch
            for batch in client.batches(OffsetRange(number, epoch, offset, end), entity=entity, records=False):
                self._add(changes, batch)
        return changes

    def _add(self, changes: Changes, batch: pa.RecordBatch) -> None:
        for row in batch.select(["op", "reason", "subQueue", "sequenceNumber", "description"]).to_pylist():
            if row["op"] == "truncated":
                raise BrowseFailed(f"the journal has a gap since these offsets: {row['description']}")
            if row["subQueue"] == self._options.sub_queue and row["sequenceNumber"] is not None:
                changes.add(row["op"], row["reason"], row["sequenceNumber"])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, NumbersAsOf):
            return
        seen: set[int] = set()
        for numbers, batch in self.pages(partition):
            seen.update(numbers)
            yield batch
        client = JournalClient(self._endpoint)
        try:
            went = self._changes(client, partition.cut).went
        finally:
            client.close()
        missing = sorted(each for each in went.keys() - seen if partition.first <= each <= partition.last)
        if missing:
            yield self._put_back(missing, went)

    def _put_back(self, numbers: list[int], went: dict[int, str]) -> pa.RecordBatch:
        """Rows of messages that are gone: their place, and in `op` how they went."""
        count = len(numbers)
        columns = {
            "namespace": [self._options.access.connection_string().host] * count,
            "entity": [self._options.entity] * count,
            "subQueue": [self._options.sub_queue] * count,
            "partition": [fragment_of(number) for number in numbers],
            "sequenceNumber": numbers,
            "op": [went[number] for number in numbers],
        }
        return rows.batch_of(columns, count, rows.arrow_schema(self._schema))
