"""The columns of the journal's rows, and the words in them. docs/journal.md tells what they mean."""

from typing import Final

import pyarrow as pa

from storage.queue_ids import Part

_TIME = pa.timestamp("us", tz="UTC")
SCHEMA: Final = pa.schema(
    [
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("journalOffset", pa.int64(), nullable=False),
        pa.field("eventTime", _TIME, nullable=False),
        pa.field("op", pa.string(), nullable=False),
        ("entity", pa.string()),
        ("entityId", pa.int32()),  # another one when an entity was deleted and created again under its name
        ("subQueue", pa.string()),
        ("sequenceNumber", pa.int64()),
        ("messageId", pa.string()),
        ("sessionId", pa.string()),
        ("partitionKey", pa.string()),
        ("correlationId", pa.string()),
        ("subject", pa.string()),
        ("contentType", pa.string()),
        ("enqueuedTime", _TIME),
        ("scheduledTime", _TIME),
        ("expiresAt", _TIME),
        ("deliveryCount", pa.int32()),
        ("reason", pa.string()),
        ("description", pa.string()),
        ("bodySize", pa.int64()),
        ("originEntity", pa.string()),
        ("originEntityId", pa.int32()),
        ("originSubQueue", pa.string()),
        ("originSequenceNumber", pa.int64()),
        ("copies", pa.int32()),
        ("record", pa.binary()),
        ("overlay", pa.binary()),
    ]
)
BODY_COLUMNS: Final = ("record", "overlay")
UNEXPLAINED: Final = "unexplained"  # the reason of a row `purged` whose message left its queue without a hint

SUB_QUEUES: Final = {
    Part.MAIN: "active",
    Part.DEAD_LETTER: "deadletter",
    Part.TRANSFER_DEAD_LETTER: "transferdeadletter",
    Part.TRANSFER: "transfer",
}


def without_bodies(schema: pa.Schema) -> pa.Schema:
    return pa.schema(field for field in schema if field.name not in BODY_COLUMNS)
