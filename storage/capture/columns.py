"""Questions about many rows at once, answered by Arrow: which queue each is of, and what its operation does to it."""

from collections.abc import Collection, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from storage.journal.events import ENTERING, LEAVING, name_of

ENTERS: Final = frozenset(map(name_of, ENTERING))
LEAVES: Final = frozenset(map(name_of, LEAVING))
REPETITIVE: Final = ("epoch", "op", "entity", "subQueue", "reason", "originEntity", "originSubQueue", "description")


def one(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """The column as one array."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.unify_dictionaries().chunks) if column.num_chunks else pa.array([], column.type)


def is_one_of(column: pa.Array, values: Collection[str]) -> pa.Array:
    """Whether each text of the column is one of these; null is none of them."""
    wanted = pa.array(sorted(values), pa.string())
    if not isinstance(column, pa.DictionaryArray):
        return pc.is_in(column, wanted)
    return pc.fill_null(pc.is_in(column.dictionary, wanted).take(column.indices), False)


def coded(columns: Sequence[pa.Array]) -> tuple[pa.Array, list[tuple[Any, ...]]]:
    """A number from 0 on for each row, the same for rows that have the same values in all columns; and these values,
    by the number."""
    code: pa.Array | None = None
    values: list[list[Any]] = []
    for column in columns:
        encoded = column if isinstance(column, pa.DictionaryArray) else column.dictionary_encode()
        known = [*encoded.dictionary.to_pylist(), None]
        index = pc.fill_null(encoded.indices.cast(pa.int64()), len(known) - 1)
        code = index if code is None else pc.add(pc.multiply(code, len(known)), index)
        values.append(known)
    assert code is not None
    encoded = code.dictionary_encode()
    found = []
    for number in encoded.dictionary.to_pylist():
        row = []
        for known in reversed(values):
            number, index = divmod(number, len(known))
            row.append(known[index])
        found.append(tuple(reversed(row)))
    return encoded.indices, found
