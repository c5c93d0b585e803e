"""Which offsets of a range the journal has, which the capture, and which nobody. Pure.

The capture is asked for what is below the journal's first offset, and for epochs that have ended. Whatever both have
comes from the journal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

# By partition and epoch: the captured offsets, sorted, each from the first to before the second.
Captured = Mapping[tuple[int, str], Sequence[tuple[int, int]]]

NOTHING_CAPTURED: Final[Captured] = {}


class Source(Enum):
    CAPTURE = "capture"
    JOURNAL = "journal"
    NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets `first` to `end`, the latter not included."""

    partition: int
    epoch: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Part:
    source: Source
    offsets: OffsetRange


def parts(wanted: OffsetRange, low: int | None, captured: Captured) -> list[Part]:
    """The range in its order, cut by where its offsets are.

    `low` is the first offset that the journal has of this epoch, None if it has none. Offsets from there on are the
    journal's, also above its end: an endpoint that has just started may not have read all of its files.
    """
    begins = wanted.end if low is None else min(max(low, wanted.first), wanted.end)
    found = []

    def add(source: Source, first: int, end: int) -> None:
        if first < end:
            found.append(Part(source, OffsetRange(wanted.partition, wanted.epoch, first, end)))

    at = wanted.first
    for first, end in captured.get((wanted.partition, wanted.epoch), ()):
        first, end = max(first, at), min(end, begins)
        if first < end:
            add(Source.NOWHERE, at, first)
            add(Source.CAPTURE, first, end)
            at = end
    add(Source.NOWHERE, at, begins)
    add(Source.JOURNAL, max(at, begins), wanted.end)
    return found


def cut(part: Part, places: Sequence[int], least_rows: int) -> list[Part]:
    """The part, cut at some of these places so that each piece but the last has at least so many rows."""
    wanted = part.offsets
    found, first = [], wanted.first
    for place in sorted(places):
        if first + least_rows <= place < wanted.end:
            found.append(Part(part.source, OffsetRange(wanted.partition, wanted.epoch, first, place)))
            first = place
    return [*found, Part(part.source, OffsetRange(wanted.partition, wanted.epoch, first, wanted.end))]


def split(wanted: Sequence[Part], least: int) -> list[Part]:
    """The parts cut so that there are about `least`, as far as they have rows; the pieces of one are about equal."""
    total = sum(each.offsets.end - each.offsets.first for each in wanted)
    if len(wanted) >= least or not total:
        return list(wanted)
    pieces = []
    for part in wanted:
        offsets = part.offsets
        length = offsets.end - offsets.first
        count = min(length, max(1, -(-length * least // total)))
        for piece in range(count):
            first, end = (offsets.first + length * at // count for at in (piece, piece + 1))
            pieces.append(Part(part.source, OffsetRange(offsets.partition, offsets.epoch, first, end)))
    return pieces
