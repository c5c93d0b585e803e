"""The message ids of a sink: from a column, from where the rows came from, or from where they are in the query.

An id must be the same when Spark runs a task or a batch again, and another for every other row: then duplicate
detection drops what was sent twice, and nothing else.

The position of a row of the journal is (namespace, epoch, partition, journalOffset); copies of it, as `explode` makes
them, are numbered in their order: `orders-ns/orders/0@3f.../17#0`, `#1`, ... That takes rows of a partition in the
order of their offsets. After a shuffle the order is another; that is refused, because two copies in two places would
get one id, and one of them would be dropped. A column `fanOut` that numbers the copies makes any order right.
"""

import hashlib
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from protocol.message.fields import MAX_ID_CHARACTERS
from pyspark_peeklock.errors import UnfitRow

POSITION_COLUMNS: Final = ("namespace", "entity", "partition", "journalOffset")
_DIGITS: Final = 42  # of an offset, a '/', a '#' and a copy's number


class Identities:
    """Makes the ids of one task's rows, batch by batch. `row_prefix` is for rows that have neither id nor position."""

    def __init__(self, row_prefix: str | None) -> None:
        self._row_prefix = row_prefix
        self._last: dict[str, tuple[int, int]] = {}  # by place: the last offset and its last copy

    def of(self, columns: dict[str, pa.Array], rows: int, first_row: int) -> pa.Array:
        """Strings without null. Raises UnfitRow for a row that has no id and no position to make one from."""
        given = columns.get("messageId")
        if given is not None and not given.null_count:
            return given
        needed = pc.is_null(given) if given is not None else pa.array(np.ones(rows, bool))
        if all(name in columns for name in POSITION_COLUMNS):
            made = self._of_positions(columns, needed, first_row)
        elif self._row_prefix is not None:
            numbers = pa.array(np.arange(first_row, first_row + rows)).cast(pa.string())
            made = pc.binary_join_element_wise(self._row_prefix, numbers, "/")
        else:
            row = first_row + pc.index(needed, True).as_py()
            raise UnfitRow(row, "messageId", "is null, and the row has no position to make an id from")
        return made if given is None else pc.if_else(needed, made, given)

    def _of_positions(self, columns: dict[str, pa.Array], needed: pa.Array, first_row: int) -> pa.Array:
        for name in POSITION_COLUMNS:
            row = pc.index(pc.and_(needed, pc.is_null(columns[name])), True).as_py()
            if row >= 0:
                raise UnfitRow(first_row + row, name, "is null, and messageId too: the row has no id")
        places = _places(columns)
        offsets = columns["journalOffset"].fill_null(0).to_numpy(zero_copy_only=False)
        copies = columns.get("fanOut")
        if copies is not None:
            row = pc.index(pc.and_(needed, pc.is_null(copies)), True).as_py()
            if row >= 0:
                raise UnfitRow(first_row + row, "fanOut", "is null")
            numbers = copies
        else:
            numbers = pa.array(self._numbered(places, offsets, needed.to_numpy(zero_copy_only=False), first_row))
        position = pc.binary_join_element_wise(places, pa.array(offsets).cast(pa.string()), "/")
        return pc.binary_join_element_wise(position, numbers.cast(pa.string()), "#")

    def _numbered(self, places: pa.Array, offsets: Any, needed: Any, first_row: int) -> Any:
        """The number of each row among the rows of its offset, which are one after the other within their place."""
        numbers: Any = np.zeros(len(offsets), np.int64)
        coded = places.dictionary_encode()
        codes = coded.indices.to_numpy(zero_copy_only=False)
        for code, place in enumerate(coded.dictionary.to_pylist()):
            at = np.flatnonzero((codes == code) & needed)
            if not len(at):
                continue
            here = offsets[at]
            last, copy = self._last.get(place, (-1, -1))
            falls = np.flatnonzero(here < np.concatenate(([last], here[:-1])))
            if len(falls):
                reason = "falls within the task, as after a shuffle: number the copies of a row in a column 'fanOut'"
                raise UnfitRow(first_row + int(at[falls[0]]), "journalOffset", reason)
            begins = np.flatnonzero(np.concatenate(([True], here[1:] != here[:-1])))
            numbers[at] = np.arange(len(here)) - np.repeat(begins, np.diff(begins, append=len(here)))
            if here[0] == last:
                same = at[here == last]
                numbers[same] += copy + 1
            self._last[place] = int(here[-1]), int(numbers[at[-1]])
        return numbers


def _places(columns: dict[str, pa.Array]) -> pa.Array:
    """namespace/entity/partition@epoch of each row, or a digest of it where an id would be too long."""
    partition = columns["partition"].cast(pa.string()).fill_null("")
    epoch = columns.get("epoch")
    if epoch is not None:
        partition = pc.binary_join_element_wise(partition, epoch.fill_null(""), "@")
    names = [columns[name].fill_null("") for name in ("namespace", "entity")]
    places = pc.binary_join_element_wise(*names, partition, "/").dictionary_encode()
    short = [_shortened(place) for place in places.dictionary.to_pylist()]
    return pa.array(short, pa.string()).take(places.indices)


def _shortened(place: str) -> str:
    if len(place) <= MAX_ID_CHARACTERS - _DIGITS:
        return place
    return hashlib.sha256(place.encode()).hexdigest()
