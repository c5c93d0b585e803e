"""The schema of the journal's rows: one row is about one message in one queue."""

from typing import Final

import pyarrow as pa

_TIME: Final = pa.timestamp("us", tz="UTC")

SCHEMA: Final = pa.schema(
    [
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("journalOffset", pa.int64(), nullable=False),
        pa.field("eventTime", _TIME, nullable=False),
        pa.field("op", pa.string(), nullable=False),
        pa.field("entity", pa.string()),
        pa.field("subQueue", pa.string()),
        pa.field("sequenceNumber", pa.int64()),
        pa.field("messageId", pa.string()),
        pa.field("sessionId", pa.string()),
        pa.field("partitionKey", pa.string()),
        pa.field("correlationId", pa.string()),
        pa.field("subject", pa.string()),
        pa.field("contentType", pa.string()),
        pa.field("enqueuedTime", _TIME),
        pa.field("scheduledTime", _TIME),
        pa.field("expiresAt", _TIME),
        pa.field("deliveryCount", pa.int32()),
        pa.field("reason", pa.string()),
        pa.field("description", pa.string()),
        pa.field("bodySize", pa.int64()),
        pa.field("originEntity", pa.string()),
        pa.field("originSubQueue", pa.string()),
        pa.field("originSequenceNumber", pa.int64()),
        pa.field("copies", pa.int32()),
        pa.field("record", pa.binary()),
        pa.field("overlay", pa.binary()),
    ]
)
