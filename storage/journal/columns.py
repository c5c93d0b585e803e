"""The columns of the journal that differ from row to row: of messages, sequence numbers and delivery counts."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import pyarrow as pa

from protocol.extension import extension
from storage.journal.schema import SCHEMA

MESSAGE_COLUMNS: Final = (
    "messageId", "sessionId", "partitionKey", "correlationId", "subject", "contentType",
    "enqueuedTime", "scheduledTime", "expiresAt", "bodySize", "originSequenceNumber", "copies", "record", "overlay",
)  # fmt: skip
_ALL_COLUMNS: Final = (*MESSAGE_COLUMNS, "sequenceNumber", "deliveryCount")


class Properties(NamedTuple):
    """What rows tell of a message's own properties."""

    message_id: str | None = None
    session_id: str | None = None
    partition_key: str | None = None
    correlation_id: str | None = None
    subject: str | None = None
    content_type: str | None = None


NO_PROPERTIES: Final = Properties()


class PlainColumns:
    """Columns in lists; those that only rows with a message have are kept for these alone.

    Rows are added in order: first the messages of those that bring some, then the rows.
    """

    def __init__(self) -> None:
        self._messages: tuple[list[Any], ...] = tuple([] for _ in range(9))
        self._message_of: list[int | None] = []  # each row's
        self._has_messages = False  # of rows that are not there yet
        self._numbers: list[int | None] = []
        self._counts: list[int | None] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def append(self, *fields: Any) -> None:
        """The message of the next row: a tuple as `Properties`, and the other columns of messages in their order.

        Times are in microseconds since 1970. A value that does not fit is an error here, or in `arrays`.
        """
        for column, value in zip(self._messages, fields, strict=True):
            column.append(value)
        self._has_messages = True

    def end_rows(self, numbers: Sequence[int | None], counts: Sequence[int | None] | None, /) -> None:
        """Rows with these sequence numbers and delivery counts: the messages of all were appended, or of none."""
        rows, brought = len(numbers), len(self._messages[0])
        self._message_of += range(brought - rows, brought) if self._has_messages else [None] * rows
        self._has_messages = False
        self._numbers += numbers
        self._counts += [None] * rows if counts is None else counts

    def end_run(self, first: int, rows: int, count: int, /) -> None:
        """End rows, as `end_rows` does, with sequence numbers from `first` on, and this delivery count for each."""
        self.end_rows(range(first, first + rows), [count] * rows)

    def arrays(self) -> dict[str, pa.Array]:
        """Return the columns. Raises ValueError, TypeError, OverflowError if a value was out of range."""
        if not self._messages[0]:
            found = {name: pa.nulls(len(self), SCHEMA.field(name).type) for name in MESSAGE_COLUMNS}
        else:
            places = pa.array(self._message_of, pa.int32())
            properties, *others = self._messages
            of_messages = chain(zip(*properties, strict=True), others)
            found = {
                name: taken(values, SCHEMA.field(name).type, places)
                for name, values in zip(MESSAGE_COLUMNS, of_messages, strict=True)
            }
        found["sequenceNumber"] = pa.array(self._numbers, pa.int64())
        found["deliveryCount"] = pa.array(self._counts, pa.int32())
        return found


class NativeColumns:
    """The same as `PlainColumns`, in the extension's buffers, as Arrow has them. `protocol/_native.pyi` has `enter`."""

    __slots__ = ("_columns", "append", "end_rows", "end_run", "enter")

    def __init__(self) -> None:
        self._columns = extension.Columns()
        self.append = self._columns.append
        self.end_rows = self._columns.end_rows
        self.end_run = self._columns.end_run
        self.enter = self._columns.enter

    def __len__(self) -> int:
        return len(self._columns)

    def arrays(self) -> dict[str, pa.Array]:
        """Take the columns. Call this once: they are no more here then."""
        return {name: self._array(index, SCHEMA.field(name).type) for index, name in enumerate(_ALL_COLUMNS)}

    def _array(self, index: int, kind: pa.DataType) -> pa.Array:
        found = self._columns.take_column(index)
        if found is None:
            return pa.nulls(len(self), kind)
        nulls, *buffers = found
        if buffers[-1] is None:
            buffers.pop()
        return pa.Array.from_buffers(
            kind, len(self), [None if each is None else pa.py_buffer(each) for each in buffers], null_count=nulls
        )


def taken(values: Sequence[Any], kind: pa.DataType, places: pa.Array) -> pa.Array:
    """The values at these places; null where a place is null."""
    array = pa.array(values, kind)
    if array.null_count == len(array):
        return pa.nulls(len(places), kind)
    return array if len(values) == len(places) and not places.null_count else array.take(places)


new_columns: Final[Callable[[], PlainColumns | NativeColumns]] = PlainColumns if extension is None else NativeColumns
