"""Arrow columns to encoded AMQP messages, column by column.

A message is put together from the encodings of its fields as columns: `binary_join_element_wise` of constructor,
length and content. So no Python runs for a single row, and 1 KiB costs about a microsecond. All lengths are in the wide
form of AMQP (four bytes), because that is the same for all rows. The result is one binary array whose elements are the
data sections of a batch (`protocol.message.batches`): any range of rows is a batch already, as one slice of its buffer.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from protocol.bounds import LATEST_MS
from protocol.errors import ProtocolError
from protocol.extension import extension
from protocol.message.fields import MAX_ID_CHARACTERS, MAX_PROPERTY_BYTES, UINT_MAX
from protocol.message.intake import take_apart
from protocol.symbols import PARTITION_KEY, SCHEDULED_ENQUEUE_TIME, Descriptor

MAX_BATCH_MESSAGES: Final = 1000  # Azure Service Bus takes no more than 4500 in a batch
_HEAD_BYTES: Final = 5  # before the content of an encoded string: its constructor, and four bytes of length
SECTION_BYTES: Final = 8  # before each message: 00 53 75 b0 and four bytes of length
CHUNK_BYTES: Final = 16 << 20  # rows that are encoded together; far below the 2 GiB of an Arrow array

_EMPTY: Final = pa.scalar(b"", pa.binary())
_NULL: Final = b"\x40"
_STRING: Final = b"\xb1"
_BINARY: Final = b"\xb0"
_SYMBOL: Final = b"\xb3"
_TIMESTAMP: Final = b"\x83"
_HEADER_DURABLE: Final = b"\x00\x53\x70\xc0\x02\x01\x41"
_HEADER_WITH_TTL: Final = b"\x00\x53\x70\xc0\x08\x03\x41\x40\x70"
# Fields of the properties section in their order (3.2.4), up to the last that we write.
_PROPERTIES: Final = (
    ("messageId", _STRING),
    ("userId", None),
    ("to", _STRING),
    ("subject", _STRING),
    ("replyTo", _STRING),
    ("correlationId", _STRING),
    ("contentType", _SYMBOL),
    ("contentEncoding", _SYMBOL),
    ("absoluteExpiryTime", None),
    ("creationTime", None),
    ("sessionId", _STRING),
    ("groupSequence", None),
    ("replyToSessionId", _STRING),
)
_IDS: Final = ("messageId", "sessionId", "partitionKey", "replyToSessionId")
TEXTS: Final = (*(name for name, code in _PROPERTIES if code is not None), "partitionKey")


class Payload(NamedTuple):
    """Rows `first` to `end` of an array of sections: a batch, or one message that stands alone."""

    first: int
    end: int
    content: bytes
    is_batch: bool


def sections(columns: dict[str, pa.Array]) -> pa.Array:
    """Messages as data sections, one for each row of these columns (binary, string, timestamps in UTC, a map).

    `body` and `messageId` are there, or else `amqpMessage`, with whole messages. No row is one of `unfit`.
    """
    whole = columns.get("amqpMessage")
    if whole is not None:
        return _joined(b"\x00\x53\x75\xb0", _lengths(whole), whole)
    body = columns["body"].cast(pa.binary())
    rows = len(body)
    parts = [_header(columns.get("timeToLiveMs")), _annotations(columns, rows), _properties(columns)]
    properties = columns.get("applicationProperties")
    if properties is not None:
        parts.append(_application_properties(properties))
    parts.append(_joined(b"\x00\x53\x75\xb0", _lengths(body), body))
    messages = _joined(*parts)
    return _joined(b"\x00\x53\x75\xb0", _lengths(messages), messages)


def payloads(array: pa.Array, batch_bytes: int) -> Iterator[Payload]:
    """The sections cut into transfers of at most this size; a message that is larger stands alone."""
    _, offsets_buffer, data = array.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[array.offset : array.offset + len(array) + 1]
    view = memoryview(data) if data is not None else memoryview(b"")
    first = 0
    while first < len(array):
        end = int(np.searchsorted(offsets, int(offsets[first]) + batch_bytes, side="right")) - 1
        end = min(max(end, first + 1), first + MAX_BATCH_MESSAGES, len(array))
        content = view[offsets[first] : offsets[end]]
        if end == first + 1:
            yield Payload(first, end, bytes(content[SECTION_BYTES:]), False)
        else:
            yield Payload(first, end, bytes(content), True)
        first = end


Unfit = tuple[str, str]  # the column and why


def unfit(columns: dict[str, pa.Array]) -> dict[int, Unfit]:
    """The rows that cannot become messages, by their places among these, in order."""
    if "amqpMessage" in columns:
        return _unfit_messages(columns["amqpMessage"])
    found: dict[int, Unfit] = {}
    for wrong, name, reason in _checks(columns):
        for row in pc.indices_nonzero(wrong).to_pylist():
            found.setdefault(row, (name, reason))
    return dict(sorted(found.items()))


def too_large(array: pa.Array, max_message_bytes: int) -> dict[int, Unfit]:
    """The sections of messages that are larger than their entity takes; 0 is no limit."""
    sizes = pc.subtract(pc.binary_length(array), SECTION_BYTES)
    if not max_message_bytes or not len(array) or pc.max(sizes).as_py() <= max_message_bytes:
        return {}
    return {
        row: ("body", f"makes a message of {sizes[row]} bytes; the entity takes {max_message_bytes}")
        for row in pc.indices_nonzero(pc.greater(sizes, max_message_bytes)).to_pylist()
    }


def _checks(columns: dict[str, pa.Array]) -> Iterator[tuple[pa.Array, str, str]]:
    """Yield masks of rows that do not fit, with the column and the reason."""
    yield pc.is_null(columns["body"]), "body", "is null"
    for name in TEXTS:
        column = columns.get(name)
        if column is None:
            continue
        invalid = _invalid(column)
        if invalid is not None:
            yield invalid, name, "is not of valid UTF-8"
            column = pc.if_else(invalid, pa.scalar(None, column.type), column)
        if name in _IDS:
            too_long = pc.greater(pc.utf8_length(column), MAX_ID_CHARACTERS)
            yield too_long, name, f"has more than {MAX_ID_CHARACTERS} characters"
        elif name in ("contentType", "contentEncoding"):
            yield pc.invert(pc.string_is_ascii(column)), name, "is not of ASCII characters"
    session, key = columns.get("sessionId"), columns.get("partitionKey")
    if session is not None and key is not None:
        yield pc.not_equal(session, key), "partitionKey", "differs from sessionId"
    scheduled = columns.get("scheduledTime")
    if scheduled is not None:
        micros = scheduled.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        out_of_range = pc.or_(pc.less(micros, 0), pc.greater(micros, LATEST_MS * 1000 + 999))
        yield out_of_range, "scheduledTime", "is not from 1970 to 9999"
    ttl_ms = columns.get("timeToLiveMs")
    if ttl_ms is not None:
        out_of_range = pc.or_(pc.less(ttl_ms, 1), pc.greater(ttl_ms, UINT_MAX))
        yield out_of_range, "timeToLiveMs", f"is not from 1 to {UINT_MAX}"
    properties = columns.get("applicationProperties")
    if properties is not None:
        yield from _property_checks(properties)


def _unfit_messages(whole: pa.Array) -> dict[int, Unfit]:
    """Find, by row, messages that any broker would refuse; the one that gets them may ask for more."""
    found = {}
    for row, message in enumerate(whole.to_pylist()):
        if message is None:
            found[row] = "amqpMessage", "is null"
        elif extension is None or extension.take_apart(message, None) is None:
            try:
                take_apart(message)
            except ProtocolError as error:
                found[row] = "amqpMessage", f"is no message that could be sent: {error}"
    return found


def _property_checks(column: pa.Array) -> Iterator[tuple[pa.Array, str, str]]:
    keys, values, starts = _entries(column)
    row_of = np.searchsorted(starts, np.arange(len(keys)), side="right") - 1

    def rows_of(wrong: pa.Array) -> pa.Array:
        """The rows that have such an entry."""
        found: Any = np.zeros(len(column), np.bool_)
        found[row_of[pc.indices_nonzero(wrong).to_numpy(zero_copy_only=False)]] = True
        return pa.array(found)

    for array in (keys, values):
        invalid = _invalid(array)
        if invalid is not None:
            yield rows_of(invalid), "applicationProperties", "is not of valid UTF-8"
    sizes = pc.add(pc.binary_length(keys), pc.fill_null(pc.add(pc.binary_length(values), _HEAD_BYTES), 1))
    too_long = pc.greater(pc.add(sizes, _HEAD_BYTES), MAX_PROPERTY_BYTES)
    yield rows_of(too_long), "applicationProperties", f"has a property of more than {MAX_PROPERTY_BYTES} bytes"


def _invalid(column: pa.Array) -> pa.Array | None:
    """Spark keeps any bytes in a string; AMQP wants UTF-8. None if all are valid."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return pa.array([not _is_text(value or b"") for value in column.cast(pa.binary()).to_pylist()], pa.bool_())
    return None


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


# --- sections ---------------------------------------------------------------------------------------------------------


def _header(ttl_ms: pa.Array | None) -> Any:
    if ttl_ms is None:
        return pa.scalar(_HEADER_DURABLE)
    numbers = _numbers(ttl_ms.fill_null(0), ">u4")
    return pc.if_else(pc.is_null(ttl_ms), pa.scalar(_HEADER_DURABLE), _joined(_HEADER_WITH_TTL, numbers))


def _annotations(columns: dict[str, pa.Array], rows: int) -> Any:
    pairs: list[Any] = []
    counts: Any = np.zeros(rows, np.int64)
    key, scheduled = columns.get("partitionKey"), columns.get("scheduledTime")
    if key is not None:
        pairs.append(pc.if_else(pc.is_null(key), _EMPTY, _joined(_symbol(PARTITION_KEY), _field(key, _STRING))))
        counts += 2 * pc.is_valid(key).to_numpy(zero_copy_only=False)
    if scheduled is not None:
        # Floored: a message is never scheduled for later than its column says.
        micros = scheduled.cast(pa.timestamp("us", "UTC")).cast(pa.int64()).fill_null(0)
        millis = pa.array(np.floor_divide(micros.to_numpy(zero_copy_only=False), 1000))
        time = _joined(_symbol(SCHEDULED_ENQUEUE_TIME), _TIMESTAMP, _numbers(millis, ">i8"))
        pairs.append(pc.if_else(pc.is_null(scheduled), _EMPTY, time))
        counts += 2 * pc.is_valid(scheduled).to_numpy(zero_copy_only=False)
    if not pairs:
        return _EMPTY
    counted = pa.array(counts)
    section = _compound(Descriptor.MESSAGE_ANNOTATIONS, 0xD1, _numbers(counted, ">u4"), _joined(*pairs))
    return pc.if_else(pc.equal(counted, 0), _EMPTY, section)


def _properties(columns: dict[str, pa.Array]) -> Any:
    last = max(index for index, (name, _) in enumerate(_PROPERTIES) if name in columns)
    fields: list[Any] = []
    for name, code in _PROPERTIES[: last + 1]:
        column = columns.get(name)
        fields.append(_NULL if column is None or code is None else _field(column, code))
    return _compound(Descriptor.PROPERTIES, 0xD0, _constant(last + 1), _joined(*fields))


def _application_properties(column: pa.Array) -> Any:
    """Encode a column of maps of strings. All entries are encoded at once; a row's are then a range of their buffer."""
    keys, values, starts = _entries(column)
    entries = _joined(_field(keys, _STRING), _field(values, _STRING))
    _, offsets, data = entries.buffers()
    of_entries = np.frombuffer(offsets, np.int32)[entries.offset : entries.offset + len(entries) + 1]
    of_rows = np.ascontiguousarray(of_entries[starts], np.int32)
    content = pa.Array.from_buffers(pa.binary(), len(column), [None, pa.py_buffer(of_rows), data])
    counts = pa.array((starts[1:] - starts[:-1]) * 2)
    section = _compound(Descriptor.APPLICATION_PROPERTIES, 0xD1, _numbers(counts, ">u4"), content)
    return pc.if_else(pc.or_(pc.is_null(column), pc.equal(counts, 0)), _EMPTY, section)


def _entries(column: pa.Array) -> tuple[pa.Array, pa.Array, Any]:
    """Keys and values of all rows, and where those of each row begin among them, and the last one's end."""
    starts = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    begin, end = (int(starts[0]), int(starts[-1])) if len(column) else (0, 0)
    return column.keys[begin:end], column.items[begin:end], starts - begin


def _compound(kind: Descriptor, code: int, count: Any, content: Any) -> Any:
    """A section that is a list or map of 32-bit size."""
    size = _numbers(pc.add(pc.binary_length(content), 4), ">u4")
    return _joined(bytes((0, 0x53, kind, code)), size, count, content)


# --- values -----------------------------------------------------------------------------------------------------------


def _symbol(name: str) -> bytes:
    return b"\xa3" + bytes((len(name),)) + name.encode()


def _constant(count: int) -> bytes:
    return count.to_bytes(4, "big")


def _field(column: pa.Array, code: bytes) -> Any:
    """The encoded values, nulls as AMQP's null."""
    content = column.cast(pa.binary())
    return _joined(code, _lengths(content), content, null=pa.scalar(_NULL))


def _lengths(content: pa.Array) -> pa.Array:
    return _numbers(pc.binary_length(content).fill_null(0), ">u4")


def _numbers(numbers: Any, form: str) -> pa.Array:
    """Numbers as big-endian bytes."""
    octets = numbers.to_numpy(zero_copy_only=False).astype(form)
    kind = pa.binary(octets.dtype.itemsize)
    return pa.Array.from_buffers(kind, len(octets), [None, pa.py_buffer(octets.tobytes())]).cast(pa.binary())


def _joined(*parts: Any, null: Any = None) -> Any:
    """The parts of each row one behind the other; they are arrays, or the same bytes for all rows."""
    typed = [pa.scalar(part, pa.binary()) if isinstance(part, bytes) else part for part in parts]
    joined = pc.binary_join_element_wise(*typed, _EMPTY)
    return joined if null is None else pc.fill_null(joined, null)
