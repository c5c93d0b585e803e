"""Captures made by hand, row by row."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from broker.catalog.catalog import Definition
from broker.namespace.entities import Description, QueueDescription
from storage.capture.definitions import keep
from storage.capture.place import Place
from storage.capture.survey import to_ms
from storage.capture.writing import CaptureOptions, CaptureWriter
from storage.journal.schema import SCHEMA
from tests.capture.synthetic_rows import BEGIN, EPOCH
from tests.journal.turns_of_messages import record

NAMESPACE = "peeklock"


def at(second: int) -> datetime:
    return BEGIN + timedelta(seconds=second)


class Written:
    """The rows of some partitions; each is a second later than the one before."""

    def __init__(self) -> None:
        self.rows: dict[int, list[dict[str, Any]]] = {}
        self.second = 0

    def row(self, op: str, number: int | None = None, partition: int = 0, **values: Any) -> None:
        """Of orders, in partition 0."""
        rows = self.rows.setdefault(partition, [])
        found: dict[str, Any] = dict.fromkeys(SCHEMA.names)
        found |= {"partition": partition, "journalOffset": len(rows), "eventTime": at(self.second), "op": op}
        if number is not None:
            found |= {"entity": "orders", "subQueue": "active", "sequenceNumber": number}
        rows.append(found | values)
        self.second += 1

    def sent(self, number: int, partition: int = 0, **values: Any) -> None:
        made = record(b"body %d" % number, f"id-{number}", enqueued_ms=to_ms(at(self.second)))
        self.row("enqueued", number, partition, **{"messageId": f"id-{number}", "record": made} | values)

    def write(self, url: Path, first: int = 0, epoch: str = EPOCH) -> None:
        """The rows of partition 0 from this offset on, and all of the others."""
        with CaptureWriter(Place.of(str(url)), NAMESPACE, CaptureOptions()) as writer:
            for partition, rows in self.rows.items():
                batch = pa.RecordBatch.from_pylist(rows[0 if partition else first :], SCHEMA)
                writer.add(partition, epoch, batch)
            writer.roll()


def define(url: Path, *entities: Description, partitions: int = 1, at_ms: int = 0, first_id: int = 1) -> None:
    """Keep the definitions of these, of orders by default. They live on partition 0."""
    described = entities or (QueueDescription(name="orders"),)
    documents = [
        Definition(entity_id, each, at_ms, at_ms, (0,)).document() for entity_id, each in enumerate(described, first_id)
    ]
    document = {"namespace": NAMESPACE, "partitions": partitions, "entities": documents, "rules": {}}
    keep(Place.of(str(url)), document, at_ms)


def captured_orders(url: Path, count: int = 3) -> Written:
    written = Written()
    for number in range(1, count + 1):
        written.sent(number)
    written.write(url)
    define(url)
    return written


def names(found: Iterable[Any]) -> list[str]:
    return sorted(str(each) for each in found)
