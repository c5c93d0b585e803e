"""Whole messages of the journal's stored records: the column `amqpMessage`, as a receiver gets them.

So nothing is lost on the way to another queue: types of values, bodies that are no bytes, annotations of the sender,
priority, time to live. What the broker itself has set, such as the sequence number, every broker sets anew.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final

import msgpack
import pyarrow as pa

from protocol.errors import ProtocolError
from protocol.extension import extension
from protocol.message.layout import LAYOUT
from protocol.message.rendering import Additions, render_embedded
from pyspark_peeklock.errors import JournalRefused

# Columns of the journal that a message is made of.
NEEDED: Final = frozenset({"record", "overlay", "sequenceNumber", "deliveryCount"})
_NEVER: Final = (1 << 63) - 1  # the time that never comes, milliseconds
_head = struct.Struct(f">8xqq{LAYOUT.size}s")  # checksum, enqueued, expires, layout


class Field(IntEnum):
    """Keys of an overlay that change how a message looks, as `storage.records` calls them."""

    ENQUEUED_MS = 1
    EXPIRES_MS = 2
    ENQUEUE_SEQUENCE_NUMBER = 3
    PROPERTIES = 4
    DEAD_LETTER_SOURCE = 5
    SYSTEM = 6
    SCHEDULED_MS = 12


def messages_of(batch: pa.RecordBatch, states: Sequence[int] = ()) -> pa.Array:
    """Make messages of rows with the columns NEEDED; null where a row brings none.

    The places of `states` have the state of a session, which is no message. Raises JournalRefused for a broken record.
    """
    columns = [batch.column(batch.schema.get_field_index(name)).to_pylist() for name in sorted(NEEDED)]
    without = frozenset(states)
    found: list[bytes | None] = []
    for row, (count, overlay, record, number) in enumerate(zip(*columns, strict=True)):
        if record is None or row in without:
            found.append(None)
            continue
        try:
            found.append(message_of(record, overlay, number or 0, count or 0))
        except (ProtocolError, struct.error, ValueError, IndexError, TypeError, AttributeError, KeyError) as error:
            raise JournalRefused(f"a stored record cannot be read: {type(error).__name__}: {error}") from error
    return pa.array(found, pa.binary())


def message_of(record: bytes, overlay: bytes | None, sequence_number: int, delivery_count: int) -> bytes:
    """The encoded message of a stored record and what is stored beside it."""
    if overlay is None and extension is not None:
        usual: bytes | None = extension.render(record, sequence_number, delivery_count, None, 0)
        if usual is not None:
            return usual
    enqueued_ms, expires_ms, layout = _head.unpack_from(record)
    changed: dict[int, Any] = {} if overlay is None else msgpack.unpackb(overlay, strict_map_key=False)
    enqueued_ms = changed.get(Field.ENQUEUED_MS, enqueued_ms)
    expires_ms = changed.get(Field.EXPIRES_MS, expires_ms)
    additions = Additions(
        changed.get(Field.ENQUEUE_SEQUENCE_NUMBER),
        changed.get(Field.DEAD_LETTER_SOURCE),
        changed.get(Field.PROPERTIES),
        system=changed.get(Field.SYSTEM),
        scheduled_ms=changed.get(Field.SCHEDULED_MS),
    )
    ttl_ms = None if expires_ms == _NEVER else max(0, expires_ms - enqueued_ms)
    return render_embedded(
        layout, record, _head.size, sequence_number, delivery_count, enqueued_ms, None, ttl_ms, additions
    )
