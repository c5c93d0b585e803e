"""Rows that make no message, and what becomes of them: option `onBadRow`. Pure.

In the queue for bad rows, each is a message that says where the row came from and what was wrong, with the row's body
if it has one. Its id is the same when Spark runs the task again.
"""

import hashlib
from typing import Any, Final

import pyarrow as pa

from protocol.client.messages import Message
from protocol.codec import Long
from pyspark_peeklock.encoding import Unfit

# Where a row of the journal came from.
PLACE_COLUMNS: Final = ("namespace", "entity", "partition", "epoch", "journalOffset")
_IDS: Final = ("messageId", "fanOut")  # what tells copies of such a row apart
_BODIES: Final = ("amqpMessage", "body")
_LONGEST_TEXT: Final = 1000  # characters of a text of the row that the message shows


def place_of(columns: dict[str, pa.Array], row: int) -> str:
    """Describe the place of a row, for errors; empty if the row is not of the journal."""
    if "journalOffset" not in columns or columns["journalOffset"][row].as_py() is None:
        return ""
    partition = columns["partition"][row].as_py() if "partition" in columns else None
    of = "" if partition is None else f"partition {partition}, "
    return f"{of}journalOffset {columns['journalOffset'][row].as_py()}"


def message_of(columns: dict[str, pa.Array], row: int, number: int, why: Unfit, max_bytes: int) -> bytes:
    """The message for the queue of bad rows, which takes messages of so many bytes; 0 is no limit. `number` is the
    row's in its task.
    """
    properties: dict[str, Any] = {"badRowColumn": why[0], "badRowReason": why[1]}
    for name in (*PLACE_COLUMNS, "targetEntity"):
        value = _value(columns, name, row)
        if value is not None:
            properties[name] = Long(value) if isinstance(value, int) else value[:_LONGEST_TEXT]
    body = next((value for name in _BODIES if (value := _bytes(columns, name, row)) is not None), b"")
    identity = [_bytes(columns, name, row) for name in (*PLACE_COLUMNS, *_IDS)]
    if all(each is None for each in identity):
        identity = [str(number).encode(), body]
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()
    made = Message.of(body, message_id=f"bad-row/{digest}", subject="bad row", application_properties=properties)
    encoded = made.encode()
    if not max_bytes or len(encoded) <= max_bytes:
        return encoded
    properties["badRowBodyBytes"] = Long(len(body))
    return Message.of(b"", message_id=made.message_id, subject=made.subject, application_properties=properties).encode()


def _value(columns: dict[str, pa.Array], name: str, row: int) -> Any:
    """A number or a text; of bytes that are no text, what can be read."""
    if name not in columns:
        return None
    column = columns[name]
    if pa.types.is_integer(column.type):
        return column[row].as_py()
    value = _bytes(columns, name, row)
    return None if value is None else value.decode(errors="replace")


def _bytes(columns: dict[str, pa.Array], name: str, row: int) -> bytes | None:
    if name not in columns:
        return None
    found = columns[name].slice(row, 1)
    if pa.types.is_integer(found.type):
        found = found.cast(pa.string())
    value: bytes | None = found.cast(pa.binary())[0].as_py()
    return value
