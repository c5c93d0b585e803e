"""Positions in the journal: what a query has read, what it reads next, and what is lost. Pure.

A position is `{"0": {"epoch": "3f...", "offset": 17}, ...}`: by partition, the next offset to read. Its partitions are
in the order of their numbers, because Spark compares positions as JSON text.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from protocol.bounds import MAX_NUMBER
from pyspark_peeklock.errors import AnotherEpoch, InvalidOption, JournalRefused, OutOfRetention

Position = dict[str, dict[str, Any]]

MAX_PARTITION: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class PartitionState:
    """Offsets `low` to `stable`, the latter not included, can be read; times are those of the first and last row."""

    partition: int
    epoch: str
    low: int
    stable: int
    kept_bytes: int
    low_time: datetime | None = None
    stable_time: datetime | None = None


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets `first` to `end`, the latter not included."""

    partition: int
    epoch: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Loss:
    """Rows that the query can never read, with the error that says so."""

    rows: int
    error: Exception


def states_of(answer: Any) -> tuple[str, dict[int, PartitionState]]:
    """The namespace and the partitions of an answer to `GET /$journal`. Raises JournalRefused if it makes no sense."""
    try:
        found = {}
        for each in answer["partitions"]:
            state = PartitionState(
                _number(each["partition"], MAX_PARTITION),
                _epoch(each["epoch"]),
                _number(each["low"]),
                _number(each["stable"]),
                _number(each.get("bytes", 0)),
                _time(each.get("lowTime")),
                _time(each.get("stableTime")),
            )
            if state.low > state.stable:
                raise ValueError("low is above stable")
            found[state.partition] = state
        return str(answer["namespace"]), dict(sorted(found.items()))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise JournalRefused(f"the answer to GET /$journal makes no sense: {type(error).__name__}: {error}") from None


def position(offsets: Iterable[tuple[int, str, int]]) -> Position:
    return {str(partition): {"epoch": epoch, "offset": offset} for partition, epoch, offset in sorted(offsets)}


def places(found: Position) -> dict[int, tuple[str, int]]:
    """Epoch and offset by partition. Raises JournalRefused for a checkpoint that is not ours."""
    try:
        return {
            _number(int(partition), MAX_PARTITION): (_epoch(place["epoch"]), _number(place["offset"]))
            for partition, place in found.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        text = json.dumps(found)[:200]
        raise JournalRefused(f"the checkpoint has offsets that are not of this source: {text}") from None


def given_offsets(option: str, text: str, states: Mapping[int, PartitionState]) -> Position:
    """What `startingOffsets` or `endingOffsets` mean: earliest, latest, or JSON such as {"0": 17}.

    Partitions that the JSON leaves out begin at their first offset, and end at their last. Raises InvalidOption.
    """
    if text.lower() in ("earliest", "latest"):
        lowest = text.lower() == "earliest"
        return position((each.partition, each.epoch, each.low if lowest else each.stable) for each in states.values())
    try:
        given = {int(partition): _number(offset) for partition, offset in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        what = 'may be earliest, latest, or JSON such as {"0": 17}'
        raise InvalidOption(f"option '{option}' {what}, not {text[:100]!r}") from None
    if unknown := given.keys() - states.keys():
        raise InvalidOption(f"option '{option}': there is no partition {min(unknown)}; there are {list(states)}")
    starts = option == "startingOffsets"
    return position(
        (each.partition, each.epoch, given.get(each.partition, each.low if starts else each.stable))
        for each in states.values()
    )


def latest(
    start: Position,
    states: Mapping[int, PartitionState],
    *,
    max_rows: int | None = None,
    max_bytes: int | None = None,
    target: Mapping[int, tuple[str, int]] | None = None,
) -> Position:
    """Where the next micro-batch ends. The limits are shared by what each partition has left to read.

    `max_bytes` is a soft limit: it counts rows of the partition's mean size. Beyond `target` nothing is read; it has
    epoch and offset by partition. A partition that is new begins at its first offset, and so does one of a new epoch.
    """
    begun = places(start)
    left: dict[int, int] = {}
    firsts: dict[int, int] = {}
    for number, state in states.items():
        epoch, offset = begun.get(number, (state.epoch, state.low))
        first = max(offset, state.low) if epoch == state.epoch else state.low
        end = state.stable
        if target is not None:
            target_epoch, target_offset = target.get(number, (state.epoch, first))
            end = min(end, target_offset) if target_epoch == state.epoch else first
        firsts[number], left[number] = first, max(0, end - first)
    rows = shared(left, max_rows)
    if max_bytes is not None:
        sizes = {number: _row_bytes(states[number]) for number in rows}
        shares = shared({number: int(count * sizes[number]) for number, count in rows.items()}, max_bytes)
        rows = {
            number: min(count, max(1 if shares[number] else 0, int(shares[number] / sizes[number])))
            for number, count in rows.items()
        }
    ends = []
    for number, state in states.items():
        if number in begun and not rows[number]:
            ends.append((number, *begun[number]))  # as it was: else a batch without rows would begin
        else:
            ends.append((number, state.epoch, firsts[number] + rows[number]))
    ends += [(number, *place) for number, place in begun.items() if number not in states]
    return position(ends)


def shared(left: Mapping[int, int], most: int | None) -> dict[int, int]:
    """At most `most` in all, in proportion to what is left of each; all that has any gets some, if there are enough."""
    total = sum(left.values())
    if most is None or total <= most:
        return dict(left)
    shares = dict.fromkeys(left, 0)
    for key in sorted(left, key=lambda each: -left[each])[:most]:
        shares[key] = min(1, left[key])
    spare = most - sum(shares.values())
    beyond = total - sum(shares.values())
    for key, count in left.items():
        shares[key] += (count - shares[key]) * spare // beyond
    for key in left:  # what was rounded off
        shares[key] += min(most - sum(shares.values()), left[key] - shares[key])
    return shares


def ranges(
    start: Position, end: Position, states: Mapping[int, PartitionState]
) -> tuple[list[OffsetRange], list[Loss]]:
    """What is to be read between two positions, and what of it is lost, as far as that is known now."""
    begun = places(start)
    found, losses = [], []
    for number, (epoch, last) in places(end).items():
        begun_epoch, offset = begun.get(number, (epoch, -1))
        state = states.get(number)
        if (begun_epoch, offset) == (epoch, last):
            continue
        if state is None:
            lost = max(0, last - max(0, offset)) if begun_epoch == epoch else last
            losses.append(Loss(lost, JournalRefused(f"the journal has no partition {number} any more")))
            continue
        if begun_epoch != epoch:
            losses.append(Loss(0, AnotherEpoch(number, begun_epoch, epoch)))
            offset = -1
        if epoch != state.epoch:
            losses.append(Loss(last - max(0, offset), AnotherEpoch(number, epoch, state.epoch)))
            continue
        first = state.low if offset < 0 else offset
        if first < state.low:
            gap = OutOfRetention(number, first, state.low, state.stable)
            losses.append(Loss(min(state.low, last) - first, gap))
            first = state.low
        if first < last:
            found.append(OffsetRange(number, epoch, first, last))
    return found, losses


def split(wanted: Sequence[OffsetRange], least: int) -> list[OffsetRange]:
    """The ranges cut so that there are about `least`, as far as they have rows; the parts of one are about equal."""
    total = sum(each.end - each.first for each in wanted)
    if len(wanted) >= least or not total:
        return list(wanted)
    parts = []
    for each in wanted:
        length = each.end - each.first
        count = min(length, max(1, -(-length * least // total)))
        for part in range(count):
            first, end = (each.first + length * at // count for at in (part, part + 1))
            parts.append(OffsetRange(each.partition, each.epoch, first, end))
    return parts


def _row_bytes(state: PartitionState) -> float:
    return max(1.0, state.kept_bytes / max(1, state.stable - state.low))


def _number(value: Any, most: int = MAX_NUMBER) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:50]} is no number from 0 to {most}")
    return value


def _epoch(value: Any) -> str:
    if not isinstance(value, str) or not value or len(value) > 64 or not value.isalnum():
        raise ValueError("an epoch is of hexadecimal digits")
    return value


def _time(value: Any) -> datetime | None:
    if value is None:
        return None
    found = datetime.fromisoformat(value)
    return found if found.tzinfo else found.replace(tzinfo=UTC)
