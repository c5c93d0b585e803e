"""Stored records of the journal as columns: body, application properties and reply-to.

The extension reads the usual records of a batch in one call; Python reads the others, and says what a record should be.

A record is a checksum and two times of eight bytes each, the layout (`protocol.message.layout`), then the annotation
pairs and the bare message. Later changes of properties are in the column `overlay`, and not here.
"""

import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from protocol.client.messages import Message
from protocol.codec import decode, skip
from protocol.errors import ProtocolError
from protocol.extension import extension
from protocol.message.layout import LAYOUT
from pyspark_peeklock.decoding import bytes_of, pairs_of, text_of
from pyspark_peeklock.errors import JournalRefused

LAYOUT_AT: Final = 24
CONTENT_AT: Final = LAYOUT_AT + LAYOUT.size
COLUMNS: Final = frozenset({"body", "applicationProperties", "replyTo"})
_MAP: Final = pa.map_(pa.string(), pa.string())
_TYPES: Final = {"body": pa.binary(), "replyTo": pa.string(), "applicationProperties": _MAP}
_WANTED: Final = {"body": 1, "replyTo": 2, "applicationProperties": 4}  # as the extension calls them
_LIST_0, _LIST_8, _LIST_32 = 0x45, 0xC0, 0xD0
_REPLY_TO: Final = 4  # its place in the properties section
_DATA: Final = b"\x00\x53\x75"


def arrays_of(stored: pa.Array, wanted: frozenset[str], states: Sequence[int] = ()) -> dict[str, pa.Array]:
    """Return what `columns_of` does, for an array of binaries."""
    if extension is None or not len(stored):
        return _arrays(columns_of(stored.to_pylist(), wanted, states))
    is_state = np.zeros(len(stored), np.bool_)
    is_state[list(states)] = True
    records = pc.if_else(pa.array(is_state), pa.scalar(None, pa.binary()), stored) if states else stored
    found, unusual = _native(records, COLUMNS & wanted)
    if unusual:
        rest = _arrays(columns_of(records.take(pa.array(unusual)).to_pylist(), wanted))
        places = np.arange(len(records))
        places[unusual] = np.arange(len(records), len(records) + len(unusual))
        taken = pa.array(places)
        found = {name: pa.concat_arrays([found[name], rest[name]]).take(taken) for name in found}
    if states and "body" in found:
        found["body"] = pc.if_else(pa.array(is_state), stored, found["body"])
    return found


def _arrays(columns: dict[str, list[Any]]) -> dict[str, pa.Array]:
    return {name: pa.array(values, _TYPES[name]) for name, values in columns.items()}


def _native(records: pa.Array, wanted: frozenset[str]) -> tuple[dict[str, pa.Array], list[int]]:
    """What the extension finds, and the rows that it leaves to Python, which are null. The array is not empty."""
    validity, offsets, data = records.buffers()
    flags = sum(_WANTED[name] for name in wanted)
    unusual, body, reply_to, properties, pairs, keys, values = extension.record_columns(
        validity, offsets, data or b"", records.offset, len(records), flags
    )
    found = {}
    if "body" in wanted:
        found["body"] = _array(pa.binary(), len(records), body)
    if "replyTo" in wanted:
        found["replyTo"] = _array(pa.string(), len(records), reply_to)
    if "applicationProperties" in wanted:
        fields = [_array(pa.string(), pairs, each) for each in (keys, values)]
        entries = pa.StructArray.from_arrays(fields, fields=[_MAP.key_field, _MAP.item_field])
        found["applicationProperties"] = _array(_MAP, len(records), properties, [entries])
    return found, unusual


def _array(kind: pa.DataType, rows: int, buffers: Any, children: Any = None) -> pa.Array:
    nulls, validity, offsets, *content = buffers
    given = [validity, offsets] if children else [validity, offsets, *content]
    arrow = [None if each is None else pa.py_buffer(each) for each in given]
    return pa.Array.from_buffers(kind, rows, arrow, null_count=nulls, children=children)


def columns_of(
    stored: Sequence[bytes | None], wanted: frozenset[str], states: Sequence[int] = ()
) -> dict[str, list[Any]]:
    """Return those of COLUMNS that are wanted; null where there is no record.

    The places of `states` have the state of a session, which is a body as it is, in place of a message's record. Raises
    JournalRefused for a broken record.
    """
    records = stored
    if states:
        records = list(stored)
        for place in states:
            records[place] = None
    unpack = LAYOUT.unpack_from
    found: dict[str, list[Any]] = {name: [] for name in COLUMNS & wanted}
    bodies, properties = found.get("body"), found.get("applicationProperties")
    replies = found.get("replyTo")
    try:
        for record in records:
            if record is None:
                for values in found.values():
                    values.append(None)
                continue
            _, _, _, pairs_bytes, properties_bytes, application_bytes = unpack(record, LAYOUT_AT)
            fields_at = CONTENT_AT + pairs_bytes
            application_at = fields_at + properties_bytes
            body_at = application_at + application_bytes
            if bodies is not None:
                bodies.append(_body(record, body_at))
            if properties is not None:
                section = decode(record, application_at + 3)[0] if application_bytes else {}
                properties.append(pairs_of(section))
            if replies is not None:
                replies.append(_reply_to(record, fields_at + 3) if properties_bytes else None)
    except (ProtocolError, struct.error, ValueError, IndexError, TypeError, AttributeError) as error:
        raise JournalRefused(f"a stored record cannot be read: {type(error).__name__}: {error}") from error
    if bodies is not None:
        for place in states:
            bodies[place] = stored[place]
    return found


def _reply_to(record: bytes, at: int) -> str | None:
    """The fifth field of the properties section, whose list is at `at`: the others are not decoded."""
    if record[at] == _LIST_8:
        count, at = record[at + 2], at + 3
    elif record[at] == _LIST_32:
        count, at = int.from_bytes(record[at + 5 : at + 9], "big"), at + 9
    elif record[at] == _LIST_0:
        return None
    else:
        raise ValueError("its properties are no list")
    if count <= _REPLY_TO:
        return None
    for _ in range(_REPLY_TO):
        at = skip(record, at)
    return text_of(decode(record, at)[0])


def _body(record: bytes, at: int) -> bytes | None:
    """Mostly one data section up to the end of the record."""
    if record[at : at + 3] == _DATA:
        if record[at + 3] == 0xA0 and at + 5 + record[at + 4] == len(record):
            return record[at + 5 :]
        if record[at + 3] == 0xB0 and at + 8 + int.from_bytes(record[at + 4 : at + 8], "big") == len(record):
            return record[at + 8 :]
    return bytes_of(Message.decode(record[at:]).content())
