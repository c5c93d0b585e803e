"""Positions in the journal: what a query has read, what it reads next, and what is lost. Pure.

A position is `{"0": {"epoch": "3f...", "offset": 17}, ...}`: by partition, the next offset to read. Its partitions are
in the order of their numbers, because Spark compares positions as JSON text.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from protocol.bounds import MAX_NUMBER
from pyspark_peeklock.errors import (
    AnotherEpoch,
    BehindEnd,
    InvalidOption,
    JournalRefused,
    JournalTooShort,
    OutOfRetention,
)
from pyspark_peeklock.options import partition_of
from pyspark_peeklock.parts import NOTHING_CAPTURED, Captured, OffsetRange, Part, Source, parts

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


def told_of(answer: Any, consumer: str) -> dict[tuple[int, str], int]:
    """Return before which offset the consumer has all, by partition and epoch, as an answer to `GET /$journal` says;
    nothing if it does not know the consumer. Raises JournalRefused if it makes no sense.
    """
    try:
        return {
            (_number(each["partition"], MAX_PARTITION), _epoch(each["epoch"])): _number(each["offset"])
            for known in answer.get("consumers", ())
            if known["name"] == consumer
            for each in known["partitions"]
        }
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


def given_offsets(
    option: str, text: str, states: Mapping[int, PartitionState], captured: Captured = NOTHING_CAPTURED
) -> Position:
    """What `startingOffsets` or `endingOffsets` mean: earliest, latest, or JSON such as {"0": 17}.

    Partitions that the JSON leaves out begin at their first offset, and end at their last. Raises InvalidOption;
    BehindEnd for an offset that the journal has not written.
    """
    if text.lower() in ("earliest", "latest"):
        lowest = text.lower() == "earliest"
        return position(
            (each.partition, each.epoch, first_offset(each, captured) if lowest else each.stable)
            for each in states.values()
        )
    try:
        given = {partition_of(partition): _number(offset) for partition, offset in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        what = 'may be earliest, latest, or JSON such as {"0": 17}'
        raise InvalidOption(f"option '{option}' {what}, not {text[:100]!r}") from None
    if unknown := given.keys() - states.keys():
        raise InvalidOption(f"option '{option}': there is no partition {min(unknown)}; there are {list(states)}")
    for number, offset in given.items():
        if offset > states[number].stable:
            raise BehindEnd(option, number, offset, states[number].stable)
    starts = option == "startingOffsets"
    return position(
        (each.partition, each.epoch, given.get(each.partition, first_offset(each, captured) if starts else each.stable))
        for each in states.values()
    )


def latest(
    start: Position,
    states: Mapping[int, PartitionState],
    captured: Captured = NOTHING_CAPTURED,
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
        lowest = first_offset(state, captured)
        epoch, offset = begun.get(number, (state.epoch, lowest))
        first = max(offset, lowest) if epoch == state.epoch else lowest
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
    """Share at most `most` in proportion to what is left of each; all that has any gets some, if there are enough."""
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
    start: Position, end: Position, states: Mapping[int, PartitionState], captured: Captured = NOTHING_CAPTURED
) -> tuple[list[Part], list[Loss]]:
    """What is to be read between two positions, and what of it is lost, as far as that is known now.

    Behind the end of an epoch comes the next one's beginning. What the capture has of the one that ended is read; how
    much is lost there is not known.
    """
    begun = places(start)
    found, losses = [], []
    for number, (epoch, last) in places(end).items():
        begun_epoch, offset = begun.get(number, (epoch, -1))
        state = states.get(number)
        wanted = []
        if begun_epoch != epoch:
            losses.append(Loss(0, AnotherEpoch(number, begun_epoch, epoch)))
            behind = max((span_end for _, span_end in captured.get((number, begun_epoch), ())), default=0)
            wanted.append(OffsetRange(number, begun_epoch, offset, behind))
            offset = -1
        if offset < 0:
            offset = _first(number, epoch, state, captured)
        wanted.append(OffsetRange(number, epoch, offset, last))
        for each in wanted:
            low = state.low if state is not None and each.epoch == state.epoch else None
            for part in parts(each, low, captured):
                if part.source is Source.NOWHERE:
                    losses.append(Loss(part.offsets.end - part.offsets.first, _reason(part.offsets, state)))
                else:
                    found.append(part)
    return found, losses


def _reason(lost: OffsetRange, state: PartitionState | None) -> Exception:
    """Why these offsets are nowhere."""
    if state is None:
        return JournalRefused(f"the journal has no partition {lost.partition} any more")
    if state.epoch != lost.epoch:
        return AnotherEpoch(lost.partition, lost.epoch, state.epoch, lost.first)
    return OutOfRetention(lost.partition, lost.first, state.low, state.stable)


def check_written(found: Position, states: Mapping[int, PartitionState]) -> None:
    """Raise JournalTooShort for a place that the journal has not written, in the epoch that it has now."""
    for number, (epoch, offset) in places(found).items():
        state = states.get(number)
        if state is not None and state.epoch == epoch and offset > state.stable:
            raise JournalTooShort(number, offset, state.stable)


def rows_between(start: Position, end: Position) -> int:
    """How many offsets; those of another epoch count from its beginning."""
    begun = places(start)
    return sum(
        max(0, offset - (begun[number][1] if number in begun and begun[number][0] == epoch else 0))
        for number, (epoch, offset) in places(end).items()
    )


def with_lag(read: Position, states: Mapping[int, PartitionState]) -> Position:
    """The end of the journal, with how much lies behind what was read; bytes are those of rows of the mean size."""
    begun = places(read)
    found = position((each.partition, each.epoch, each.stable) for each in states.values())
    for number, state in states.items():
        epoch, offset = begun.get(number, (state.epoch, state.low))
        behind = max(0, state.stable - (max(offset, state.low) if epoch == state.epoch else state.low))
        found[str(number)] |= {
            "offsetsBehindLatest": behind,
            "estimatedBytesBehindLatest": int(behind * _row_bytes(state)) if behind else 0,
        }
    return found


class TriggerDelay:
    """A batch waits until there are so many rows, but not for longer than this since the one before. The first does not
    wait. Times are in seconds of any clock.
    """

    def __init__(self, min_rows: int, longest_s: float) -> None:
        self._min_rows, self._longest_s = min_rows, longest_s
        self._batch_at: float | None = None

    def is_over(self, rows: int, now_s: float) -> bool:
        """Whether a batch with so many rows is made now."""
        is_late = self._batch_at is None or now_s - self._batch_at >= self._longest_s
        if rows < self._min_rows and not is_late:
            return False
        if rows:
            self._batch_at = now_s
        return True


def needs_capture(start: Position, states: Mapping[int, PartitionState]) -> bool:
    """Whether any of what follows `start` may be in a capture alone."""
    begun = places(start)
    return any(number not in begun for number in states) or any(
        number not in states or states[number].epoch != epoch or offset < states[number].low
        for number, (epoch, offset) in begun.items()
    )


def first_offset(state: PartitionState, captured: Captured) -> int:
    """The first of the journal's epoch, wherever it is."""
    return _first(state.partition, state.epoch, state, captured)


def _first(partition: int, epoch: str, state: PartitionState | None, captured: Captured) -> int:
    firsts = [first for first, _ in captured.get((partition, epoch), ())]
    if state is not None and state.epoch == epoch:
        firsts.append(state.low)
    return min(firsts, default=0)


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
