"""Conditions of a query that the journal's reader meets itself, before rows come to Spark: option `filterPushdown`.

Offsets, partitions and times choose what is read; entities and kinds of events choose among the rows that were read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from protocol.bounds import MAX_NUMBER

_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Conditions:
    """All of them are to be met: offsets from `first` to before `end`, times from `since` to before `until`, and in
    `values` the values that columns may have. None: any time.
    """

    first: int = 0
    end: int = MAX_NUMBER
    since: datetime | None = None
    until: datetime | None = None
    partitions: frozenset[int] | None = None
    values: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def and_also(self, condition: Filter) -> "Conditions | None":
        """Add a further condition, which is met exactly; None if it is not one of these."""
        column, value = getattr(condition, "attribute", ()), getattr(condition, "value", None)
        if column == ("journalOffset",):
            bounds = _bounds(condition, value, 1) if _is_number(value) else None
            if bounds is None:
                return None
            first, end = bounds
            return replace(
                self,
                first=self.first if first is None else max(self.first, first),
                end=self.end if end is None else min(self.end, end),
            )
        if column == ("eventTime",) and isinstance(value, datetime):
            value = value if value.tzinfo else value.replace(tzinfo=UTC)
            try:
                bounds = _bounds(condition, value, _MICROSECOND)
            except OverflowError:
                return None
            if bounds is None:
                return None
            since = [each for each in (self.since, bounds[0]) if each is not None]
            until = [each for each in (self.until, bounds[1]) if each is not None]
            return replace(self, since=max(since, default=None), until=min(until, default=None))
        given = _given(condition, value)
        if given is None:
            return None
        if column == ("partition",) and all(_is_number(each) for each in given):
            return replace(self, partitions=given if self.partitions is None else self.partitions & given)
        if column in (("entity",), ("op",)) and all(isinstance(each, str) for each in given):
            return replace(self, values={**self.values, column[0]: given & self.values.get(column[0], given)})
        return None

    def has(self, partition: int) -> bool:
        return self.partitions is None or partition in self.partitions

    @property
    def entity(self) -> str | None:
        """The only one whose rows are wanted, as a pattern that fits it, and others that differ in case alone."""
        names = self.values.get("entity", frozenset())
        return (
            "".join(f"[{each}]" if each in "*?[" else each for each in next(iter(names))) if len(names) == 1 else None
        )

    def rows_of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that have the wanted values."""
        for name, wanted in self.values.items():
            column = batch.column(batch.schema.get_field_index(name))
            batch = batch.filter(pc.is_in(column, value_set=pa.array(sorted(wanted), pa.string())))
        return batch


NO_CONDITIONS: Final = Conditions()


def _bounds(condition: Filter, value: Any, step: Any) -> tuple[Any, Any] | None:
    """The least value, and the one behind the greatest; None where there is none, and for other kinds of conditions."""
    if isinstance(condition, EqualTo):
        return value, value + step
    if isinstance(condition, GreaterThan):
        return value + step, None
    if isinstance(condition, GreaterThanOrEqual):
        return value, None
    if isinstance(condition, LessThan):
        return None, value
    if isinstance(condition, LessThanOrEqual):
        return None, value + step
    return None


def _given(condition: Filter, value: Any) -> frozenset[Any] | None:
    """The values that are allowed, without null, which nothing is equal to."""
    if isinstance(condition, In):
        return frozenset(each for each in value if each is not None)
    return frozenset((value,)) if isinstance(condition, EqualTo) and value is not None else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
