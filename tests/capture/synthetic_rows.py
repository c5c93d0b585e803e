"""Rows of a journal, made up: what an offset has is always the same, so that any two readers can be compared."""

import random
from datetime import UTC, datetime, timedelta

import pyarrow as pa

from storage.journal.schema import SCHEMA

BEGIN = datetime(2026, 1, 31, 22, 59, 0, tzinfo=UTC)
OPS = ("enqueued", "delivered", "completed")
ENTITIES = ("orders", "invoices", "events/subscriptions/audit", "événements")
EPOCH = "00000000000000a1"


def row(partition: int, offset: int, *, rows_per_second: int = 10, body_bytes: int = 0) -> dict[str, object]:
    """Three rows for each message: enqueued, delivered, completed."""
    chance = random.Random(f"{partition} {offset}")
    op = OPS[offset % 3]
    at = BEGIN + timedelta(seconds=offset // rows_per_second, microseconds=partition)
    brings = op == "enqueued"
    found: dict[str, object] = dict.fromkeys(SCHEMA.names)
    found |= {
        "partition": partition,
        "journalOffset": offset,
        "eventTime": at,
        "op": op,
        "entity": chance.choice(ENTITIES),
        "subQueue": "active",
        "sequenceNumber": offset // 3 + 1,
        "deliveryCount": 0,
    }
    if brings:
        found |= {
            "messageId": chance.randbytes(16).hex(),
            "enqueuedTime": at,
            "bodySize": body_bytes,
            "record": chance.randbytes(body_bytes) if body_bytes else None,
            "overlay": b"\x80" if body_bytes and offset % 2 else None,
        }
    return found


def batch(partition: int, first: int, end: int, *, rows_per_second: int = 10, body_bytes: int = 0) -> pa.RecordBatch:
    rows = [
        row(partition, offset, rows_per_second=rows_per_second, body_bytes=body_bytes) for offset in range(first, end)
    ]
    return pa.RecordBatch.from_pylist(rows, SCHEMA)
