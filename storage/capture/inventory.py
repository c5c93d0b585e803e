"""What should be there, as a manifest says: offsets of each partition and epoch, and the rows of files. Pure.

Whoever reads a capture compares what it finds with this: `verify`, jobs, the data source of Spark, `restore`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from storage.capture.manifest import Position, State, TableName
from storage.wording import counted


class Span(NamedTuple):
    """Offsets first <= offset < end."""

    first: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.first

    def __str__(self) -> str:
        return f"the offsets {self.first} to {self.end - 1}"


class Expected(NamedTuple):
    """What should be captured of one partition in one epoch: offsets from `first` to before `next`.

    All are captured but those in `gaps`, which were lost before. Spans ascend, and do not touch.
    """

    partition: int
    epoch: str
    first: int
    next: int
    gaps: tuple[Span, ...]

    @property
    def position(self) -> Position:
        return self.partition, self.epoch

    @property
    def captured(self) -> tuple[Span, ...]:
        return without([Span(self.first, self.next)], self.gaps)

    @property
    def rows(self) -> int:
        return sum(each.size for each in self.captured)


def inventory(state: State) -> list[Expected]:
    """Return what is expected, in the order in which the manifest got to know it: of one partition, an epoch that was
    restored comes behind the one before.
    """
    gaps: dict[Position, list[Span]] = defaultdict(list)
    for gap in state.gaps:
        gaps[gap.partition, gap.epoch].append(Span(gap.first, gap.last + 1))
    return [
        Expected(each.partition, each.epoch, each.first, each.offset, union(gaps[position]))
        for position, each in state.next.items()
    ]


def contradictions(state: State) -> Iterator[str]:
    """Why the files that the manifest names cannot have what it says was captured; for users."""
    expected = {each.position: each for each in inventory(state)}
    spans: dict[Position, list[Span]] = defaultdict(list)
    rows: dict[Position, int] = defaultdict(int)
    for file in state.files.values():
        in_ranges = sum(each.rows for each in file.ranges)
        if in_ranges != file.rows:
            yield f"{file.path}: has {counted(file.rows, 'row')}, and its ranges have {in_ranges}"
        for each in file.ranges:
            if not 0 < each.rows <= each.last - each.first + 1:
                yield f"{file.path}: {counted(each.rows, 'row')} cannot have the offsets {each.first} to {each.last}"
            known = expected.get(each.position)
            if known is None:
                yield f"{file.path}: {_named(each.position)} is not what was captured"
            elif each.first < known.first or each.last >= known.next:
                yield (
                    f"{file.path}: {_named(each.position)}: {Span(each.first, each.last + 1)} are not within "
                    f"those that were captured, {known.first} to {known.next - 1}"
                )
            if file.table is TableName.LEDGER:
                spans[each.position].append(Span(each.first, each.last + 1))
                rows[each.position] += each.rows
    for position, known in expected.items():
        missing = without(known.captured, union(spans[position]))
        for span in missing:
            yield f"{_named(position)}: {span} are in no file"
        if not missing and rows[position] != known.rows:
            yield f"{_named(position)}: files have {counted(rows[position], 'row')}, captured: {known.rows}"


def behind(state: State, told: Mapping[Position, int]) -> Iterator[str]:
    """Offsets that the manifest does not know, though a capture has told the broker that they are captured: its newest
    entries are gone. `told`: the offset behind the last one, by partition and epoch; for users."""
    for position, offset in sorted(told.items()):
        known = state.next.get(position)
        end = 0 if known is None else known.offset
        if offset > end:
            yield f"{_named(position)}: captured to offset {offset - 1}, as the broker was told, and here to {end - 1}"


def union(spans: Iterable[Span]) -> tuple[Span, ...]:
    found: list[Span] = []
    for each in sorted(spans):
        if each.size <= 0:
            continue
        if found and each.first <= found[-1].end:
            found[-1] = Span(found[-1].first, max(found[-1].end, each.end))
        else:
            found.append(each)
    return tuple(found)


def without(spans: Iterable[Span], removed: Iterable[Span]) -> tuple[Span, ...]:
    """The offsets of `spans` that none of `removed` has."""
    found = list(union(spans))
    for hole in union(removed):
        found = [
            part
            for each in found
            for part in (Span(each.first, min(each.end, hole.first)), Span(max(each.first, hole.end), each.end))
            if part.size > 0
        ]
    return tuple(found)


def _named(position: Position) -> str:
    return f"partition {position[0]}, epoch {position[1]}"
