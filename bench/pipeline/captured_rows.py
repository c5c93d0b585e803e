"""Makes a capture of any size, without a broker: `python -m bench.pipeline.captured_rows FOLDER --messages N`.

Each message has three rows, `enqueued`, `delivered` and `completed`; some are never completed. Entities are queues, and
each lives on one partition. Messages are in their queue for a while, so that their rows are in several files.
"""

import argparse
import random
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

import pyarrow as pa

from broker.catalog.catalog import Definition
from broker.namespace.entities import QueueDescription
from protocol.message.intake import take_apart
from storage.capture.definitions import keep
from storage.capture.place import Place
from storage.capture.writing import CaptureOptions, CaptureWriter
from storage.journal.schema import SCHEMA
from storage.records import NEVER, encode_message

NAMESPACE: Final = "peeklock"
EPOCH: Final = "00000000000000a1"
BEGIN_MS: Final = round(datetime(2026, 1, 31, 7, tzinfo=UTC).timestamp() * 1000)
PER_SECOND: Final = 10_000  # messages of all partitions
ID_BYTES: Final = 32
STEP: Final = 10_000  # messages of one partition between two looks whether a roll is due


def write(
    url: str,
    messages: int,
    *,
    partitions: int = 4,
    entities: int = 8,
    body_bytes: int = 1024,
    alive: float = 0.01,
    wait: int = 20_000,
    options: CaptureOptions | None = None,
) -> None:
    """`alive`: this part of the messages is not completed. `wait`: so many messages of a partition come before one is
    received."""
    place = Place.of(url)
    _define(place, partitions, entities)
    with CaptureWriter(place, NAMESPACE, options or CaptureOptions(), namespace_id=f"{1:032x}") as writer:
        sources = [
            _Partition(partition, _of(partition, partitions, entities), body_bytes, alive, wait).batches(
                messages // partitions
            )
            for partition in range(partitions)
        ]
        while sources:
            for source in [*sources]:
                batch = next(source, None)
                if batch is None:
                    sources.remove(source)
                    continue
                writer.add(batch.column("partition")[0].as_py(), EPOCH, batch)
                if writer.is_due():
                    writer.roll()
        writer.roll()


def _of(partition: int, partitions: int, entities: int) -> list[str]:
    """The names of the queues that live there."""
    return [f"queue-{each}" for each in range(entities) if each % partitions == partition]


def _define(place: Place, partitions: int, entities: int) -> None:
    documents = [
        Definition(each + 1, QueueDescription(name=f"queue-{each}"), 0, 0, (each % partitions,)).document()
        for each in range(entities)
    ]
    keep(place, {"namespace": NAMESPACE, "partitions": partitions, "entities": documents, "rules": {}}, BEGIN_MS)


class _Partition:
    def __init__(self, partition: int, queues: list[str], body_bytes: int, alive: float, wait: int) -> None:
        self._partition = partition
        self._queues = queues
        self._chance = random.Random(partition)
        self._alive = alive
        self._wait = max(wait, len(queues))
        self._body_bytes = body_bytes
        self._offset = 0
        message = self._message(bytes(ID_BYTES), bytes(body_bytes))
        self._layout, self._stored, *_ = take_apart(message)

    @staticmethod
    def _message(message_id: bytes, body: bytes) -> bytes:
        values = b"\xa1" + bytes((len(message_id),)) + message_id
        properties = b"\x00\x53\x73\xc0" + bytes((len(values) + 1, 1)) + values
        return properties + b"\x00\x53\x75\xb0" + len(body).to_bytes(4, "big") + body

    def batches(self, messages: int) -> Iterator[pa.RecordBatch]:
        """The rows of so many messages, which are in the queues in turn."""
        for first in range(0, messages + self._wait, STEP):
            sent = range(min(first, messages), min(first + STEP, messages))
            received = range(max(0, first - self._wait), min(max(0, first + STEP - self._wait), messages))
            if len(sent) or len(received):
                yield self._batch(sent, received, first)

    def _batch(self, sent: range, received: range, first: int) -> pa.RecordBatch:
        ids = [self._chance.randbytes(ID_BYTES // 2).hex() for _ in sent]
        completed = [each for each in received if self._chance.random() >= self._alive]
        rows = len(sent) + len(received) + len(completed)
        of_row = [*sent, *received, *completed]
        at_us = (BEGIN_MS + first * 1000 // PER_SECOND) * 1000
        nothing = rows - len(sent)
        columns = {name: pa.nulls(rows, SCHEMA.field(name).type) for name in SCHEMA.names}
        time = pa.timestamp("us", tz="UTC")
        columns |= {
            "partition": pa.array([self._partition] * rows, pa.int32()),
            "journalOffset": pa.array(range(self._offset, self._offset + rows), pa.int64()),
            "eventTime": pa.array([at_us] * rows, time),
            "op": pa.array(["enqueued"] * len(sent) + ["delivered"] * len(received) + ["completed"] * len(completed)),
            "entity": pa.array([self._queues[each % len(self._queues)] for each in of_row]),
            "subQueue": pa.array(["active"] * rows),
            "sequenceNumber": pa.array([each // len(self._queues) + 1 for each in of_row], pa.int64()),
            "messageId": pa.array([*ids, *[None] * nothing], pa.string()),
            "enqueuedTime": pa.array([at_us] * len(sent) + [None] * nothing, time),
            "bodySize": pa.array([self._body_bytes] * len(sent) + [None] * nothing, pa.int64()),
            "deliveryCount": pa.array([0] * rows, pa.int32()),
            "record": pa.array([*(self._record(each, at_us // 1000) for each in ids), *[None] * nothing], pa.binary()),
        }
        self._offset += rows
        return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)

    def _record(self, message_id: str, enqueued_ms: int) -> bytes:
        message = self._message(message_id.encode(), self._chance.randbytes(self._body_bytes))
        assert len(message) == len(self._stored)  # so it has the same layout
        return encode_message(enqueued_ms, NEVER, self._layout, message)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--entities", type=int, default=8)
    parser.add_argument("--body-bytes", type=int, default=1024)
    parser.add_argument("--alive", type=float, default=0.01)
    parser.add_argument("--wait", type=int, default=20_000)
    options = vars(parser.parse_args())
    write(options.pop("url"), options.pop("messages"), **options)


if __name__ == "__main__":
    main()
