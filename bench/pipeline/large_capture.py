"""A capture of any size, made without a broker: what the jobs of the pipeline are measured with.

    python -m bench.pipeline.large_capture FOLDER --messages 2000000

Messages go to eight queues on four partitions, half of them to the first queue. Each is enqueued, delivered, and
completed; one of a hundred is dead-lettered in place of that. Bodies are of two words, a number and digits that hardly
compress; of one of ten dead letters they are letters, so that it is like no other.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64_digest

from protocol.client.messages import Message
from protocol.message.intake import take_apart
from storage.capture.place import Place
from storage.capture.writing import CaptureOptions, CaptureWriter
from storage.journal.schema import SCHEMA
from storage.records import NEVER, encode_message

ENTITIES: Final = tuple(f"{name}-{number}" for number in (1, 2) for name in ("orders", "invoices", "mail", "stock"))
PARTITIONS: Final = 4
EPOCHS: Final = tuple(f"{0xA0 + partition:016x}" for partition in range(PARTITIONS))
REASONS: Final = ("MaxDeliveryCountExceeded", "TTLExpiredException", "BadCurrency", "NoSuchCustomer", "Refused")
DEAD_EACH: Final = 100  # of so many messages, one is dead-lettered
UNLIKE_EACH: Final = 10  # of so many dead letters, one is like no other
BEGIN_US: Final = 1_772_438_400_000_000  # 2026-03-02 08:00 UTC
HOURS: Final = 6
ROWS_AT_ONCE: Final = 50_000  # messages
LEAST_BODY_BYTES: Final = 64
_START: Final = b'{"order": %09d, "kind": "%s", "text": "'
_END: Final = b'"}'
_OPS: Final = pa.array(["enqueued", "delivered", "completed", "deadlettered"])
_ENQUEUED, _DELIVERED, _COMPLETED, _DEAD_LETTERED = range(4)


def write(folder: Path, messages: int, body_bytes: int = 1024, seed: int = 1) -> None:
    """A capture of so many messages with bodies of this size, of at least LEAST_BODY_BYTES."""
    made = _Maker(messages, body_bytes, np.random.default_rng(seed))
    with CaptureWriter(Place.of(str(folder)), "shop", CaptureOptions(), namespace_id="0123456789abcdef" * 2) as writer:
        for first in range(0, messages, ROWS_AT_ONCE):
            for partition, batch in made.batches(first, min(first + ROWS_AT_ONCE, messages)):
                writer.add(partition, EPOCHS[partition], batch)
                if writer.is_due():
                    writer.roll()
        writer.roll()


class _Maker:
    def __init__(self, messages: int, body_bytes: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self._us_each = HOURS * 3600 * 1_000_000 / messages
        self._numbers = np.ones(len(ENTITIES), np.int64)
        self._dead_numbers = np.ones(len(ENTITIES), np.int64)
        self._offsets = [0] * PARTITIONS
        self._body_bytes = body_bytes
        layout, stored, *_ = take_apart(Message.of(bytes(body_bytes)).encode())
        self._template = np.frombuffer(encode_message(0, NEVER, layout, stored), np.uint8)

    def batches(self, first: int, end: int) -> list[tuple[int, pa.RecordBatch]]:
        """The rows of these messages, by partition."""
        index = np.arange(first, end)
        entity = self._rng.integers(0, 2 * len(ENTITIES), len(index))
        entity[entity >= len(ENTITIES)] = 0
        is_dead = index % DEAD_EACH == DEAD_EACH - 1
        number = _counted(entity, np.ones(len(index), np.bool_), self._numbers)
        dead_number = _counted(entity, is_dead, self._dead_numbers)
        found = []
        for partition in range(PARTITIONS):
            chosen = np.flatnonzero(entity % PARTITIONS == partition)
            rows = (each[chosen] for each in (index, entity, is_dead, number, dead_number))
            found.append((partition, self._batch(partition, *rows)))
        return found

    def _batch(
        self,
        partition: int,
        index: np.ndarray[Any, Any],
        entity: np.ndarray[Any, Any],
        is_dead: np.ndarray[Any, Any],
        number: np.ndarray[Any, Any],
        dead_number: np.ndarray[Any, Any],
    ) -> pa.RecordBatch:
        """Of each message its rows, one after the other."""
        counts = 3 + is_dead
        at = np.repeat(np.arange(len(index)), counts)
        step = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
        dead = is_dead[at]
        brings, arrives = step == 0, dead & (step == 2)  # there it comes before it leaves here, as a broker says it
        sent_us = (BEGIN_US + index * self._us_each).astype(np.int64)
        waits_us = self._rng.exponential(20_000, (2, len(index))).astype(np.int64) + 500
        left_us = sent_us + waits_us.sum(axis=0)
        times = np.select([step == 0, step == 1], [sent_us[at], (sent_us + waits_us[0])[at]], left_us[at])
        op = np.select([brings | arrives, step == 1, dead], [_ENQUEUED, _DELIVERED, _DEAD_LETTERED], _COMPLETED)
        enters = brings | arrives
        reasons = np.array(REASONS, object)[index // DEAD_EACH % len(REASONS)]
        reason = np.where(arrives, "deadlettered", np.where(op == _DEAD_LETTERED, reasons[at], None))
        names = pa.array(ENTITIES)
        first = self._offsets[partition]
        self._offsets[partition] += len(at)
        columns = {
            "partition": np.full(len(at), partition, np.int32),
            "journalOffset": np.arange(first, first + len(at)),
            "eventTime": times,
            "op": _OPS.take(pa.array(op)),
            "entity": names.take(pa.array(entity[at])),
            "entityId": (entity[at] + 1).astype(np.int32),
            "subQueue": pa.array(["active", "deadletter"]).take(pa.array(arrives.astype(np.int8))),
            "sequenceNumber": np.where(arrives, dead_number[at], number[at]),
            "messageId": pa.array(np.where(enters, np.char.add("message-", index.astype("U9"))[at], None)),
            "enqueuedTime": pa.array(times, mask=~enters),
            "deliveryCount": pa.array((op == _DELIVERED).astype(np.int32)),
            "reason": pa.array(reason, pa.string()),
            "bodySize": pa.array(np.full(len(at), self._body_bytes), mask=~enters),
            "originEntity": names.take(pa.array(entity[at], mask=~arrives)),
            "originEntityId": pa.array((entity[at] + 1).astype(np.int32), mask=~arrives),
            "originSubQueue": pa.array(np.where(arrives, "active", None), pa.string()),
            "originSequenceNumber": pa.array(number[at], mask=~arrives),
            "record": self._records(index, entity, sent_us).take(pa.array(at, mask=~brings)),
        }
        none = pa.nulls(len(at))
        arrays = []
        for field in SCHEMA:
            column = columns.get(field.name, none)
            arrays.append((column if isinstance(column, pa.Array) else pa.array(column)).cast(field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)

    def _records(
        self, index: np.ndarray[Any, Any], entity: np.ndarray[Any, Any], sent_us: np.ndarray[Any, Any]
    ) -> pa.Array:
        """The stored messages, with their checksums."""
        found = np.tile(self._template, (len(index), 1))
        found[:, 8:16] = (sent_us // 1000).astype(">i8").view(np.uint8).reshape(-1, 8)
        bodies = found[:, -self._body_bytes :]
        digits = self._rng.integers(0, 16, bodies.shape, np.uint8)
        is_unlike = index // DEAD_EACH % UNLIKE_EACH == 0
        bodies[:] = np.where(
            is_unlike[:, None], digits + ord("g"), np.frombuffer(b"0123456789abcdef", np.uint8)[digits]
        )
        starts = [_START % (each, ENTITIES[name].encode()) for each, name in zip(index, entity, strict=True)]
        for at, start in enumerate(starts):
            bodies[at, : len(start)] = np.frombuffer(start, np.uint8)
        bodies[:, -len(_END) :] = np.frombuffer(_END, np.uint8)
        for row in found:
            row[:8] = np.frombuffer(xxh3_64_digest(row[8:]), np.uint8)
        offsets = np.arange(len(found) + 1, dtype=np.int32) * found.shape[1]
        return pa.Array.from_buffers(
            pa.binary(), len(found), [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(found))]
        )


def _counted(
    entity: np.ndarray[Any, Any], counts: np.ndarray[Any, Any], next_numbers: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """The number that each gets in its entity, of those that count; `next_numbers` go on behind them."""
    found = np.zeros(len(entity), np.int64)
    for each in range(len(next_numbers)):
        chosen = np.flatnonzero((entity == each) & counts)
        found[chosen] = next_numbers[each] + np.arange(len(chosen))
        next_numbers[each] += len(chosen)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--messages", type=int, default=2_000_000, metavar="N")
    parser.add_argument("--body-bytes", type=int, default=1024, metavar="N", help=f"At least {LEAST_BODY_BYTES}.")
    options = parser.parse_args(arguments)
    write(options.folder, options.messages, options.body_bytes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
