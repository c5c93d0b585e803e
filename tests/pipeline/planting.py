"""Faults that are planted where a broker's messages and its ledger are stored, by chance: the audit must name them.

In the stores of a broker that does not run, messages are taken away, put back, or made of nothing, with the counts as
if the broker had done so. In the files of a capture, rows are changed, removed and doubled.
"""

import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from storage.capture.manifest import TableName
from storage.capture.reading import captured
from storage.lmdb_store import LmdbStore
from storage.queue_ids import Part, queue_id_of
from storage.records import (
    Counts,
    Place,
    decode_counts,
    decode_entry,
    encode_counts,
    encode_entry,
    entity_key,
    message_key,
    queue_key,
    unpack_message_key,
    unpack_queue_key,
)
from storage.store import Table

Row = dict[str, Any]
MAP_BYTES: Final = 1 << 30
GRACE_SECONDS: Final = 1  # of the audit
MARGIN: Final = timedelta(seconds=GRACE_SECONDS + 1)
# Each message has a body of its own there, and no timer.
SIMPLE: Final = ("orders", "spread", "archive", "bin", "once", "roaming")
STAYS: Final = ("orders", "spread", "archive", "bin", "once")  # on its partitions


class Fault(NamedTuple):
    """`number`: of the message; of a fault of the ledger alone (gap, repeated), the offset. `queue` is then empty."""

    verdict: str
    queue: str
    number: int
    partition: int

    def __str__(self) -> str:
        where = f"message {self.number} of {self.queue}" if self.queue else f"offset {self.number}"
        return f"{self.verdict.replace('_', ' ')}: {where}, partition {self.partition}"


class Ledger:
    """The rows of a capture's ledger, in order, with those of each message."""

    def __init__(self, url: str) -> None:
        self.url = url
        found = captured(url)
        tables = [_table(each) for each in found.uris()]
        self.rows: list[Row] = pa.concat_tables(tables).to_pylist()
        self.rows.sort(key=lambda row: (row["partition"], row["epoch"], row["journalOffset"]))
        self.by_message: dict[tuple[str, int, str, int], list[Row]] = {}
        for row in self.rows:
            if row["sequenceNumber"] is not None:
                self.by_message.setdefault(_message_of(row), []).append(row)
        brought = [_table(each) for each in found.uris(TableName.MESSAGES)]
        self.records = {
            _message_of(row): row["record"]
            for table in brought
            for row in table.to_pylist()
            if row["record"] is not None and row["sequenceNumber"] is not None
        }

    def messages(self, fits: Callable[[Sequence[Row]], bool], entities: Iterable[str] = SIMPLE) -> list[list[Row]]:
        """The rows of each message of one of these entities, whose rows fit; in a certain order."""
        wanted = set(entities)
        return [rows for key, rows in sorted(self.by_message.items()) if key[0] in wanted and fits(rows)]


def _message_of(row: Row) -> tuple[str, int, str, int]:
    return row["entity"], row["entityId"], row["subQueue"], row["sequenceNumber"]


def _fault(verdict: str, row: Row) -> Fault:
    return Fault(verdict, f"{row['entity']} ({row['subQueue']})", row["sequenceNumber"], row["partition"])


def ops(rows: Sequence[Row]) -> list[str]:
    return [row["op"] for row in rows]


def _table(uri: str) -> pa.Table:
    return pq.ParquetFile(uri.removeprefix("file://")).read()


# -- in the stores


class Stores:
    """Of a broker that does not run. To be closed."""

    def __init__(self, data: Path) -> None:
        self._stores = {
            int(path.name): LmdbStore(path, partition_id=int(path.name), map_size_bytes=MAP_BYTES, create=False)
            for path in sorted((data / "partitions").iterdir())
        }

    def close(self) -> None:
        for store in self._stores.values():
            store.commit()
            store.close()

    def take_away(self, row: Row) -> None:
        """The message of this row, with its body."""
        store, queue_id, number = self._queue_of(row)
        for place in Place:
            key = queue_key(queue_id, place, number)
            if (value := store.get(Table.QUEUE, key)) is not None:
                body = message_key(decode_entry(value).message_id)
                size = len(store.get(Table.MESSAGES, body) or b"")
                store.delete(Table.QUEUE, key)
                store.delete(Table.MESSAGES, body)
                self._count(store, queue_id, place, -1, -size)
                return
        raise AssertionError(f"{row['entity']} has no message {number}")

    def has(self, row: Row) -> bool:
        store, queue_id, number = self._queue_of(row)
        return any(store.get(Table.QUEUE, queue_key(queue_id, place, number)) is not None for place in Place)

    def put(self, row: Row, record: bytes, number: int | None = None) -> int:
        """A message into the queue of this row, with the row's number or another one; 0 is the next. Returns it."""
        store, queue_id, its_number = self._queue_of(row)
        if number is None:
            number = its_number
        is_next = number == 0
        if is_next:
            number = decode_counts(store.get(Table.COUNTS, entity_key(queue_id)) or b"").next_sequence_number
        last = store.last_key(Table.MESSAGES)
        body = unpack_message_key(last)[0] + 1 if last else 1
        store.put(Table.MESSAGES, message_key(body), record)
        store.put(Table.QUEUE, queue_key(queue_id, Place.AVAILABLE, number), encode_entry(body))
        self._count(store, queue_id, Place.AVAILABLE, 1, len(record), numbers=int(is_next))
        return number

    def a_record(self, row: Row) -> bytes:
        """Of some message of this queue."""
        store, queue_id, _ = self._queue_of(row)
        [(_, value)] = store.scan(Table.QUEUE, queue_key(queue_id, 0, 0), queue_key(queue_id + 1, 0, 0), 1)
        return store.get(Table.MESSAGES, message_key(decode_entry(value).message_id)) or b""

    def numbers(self, row: Row) -> list[int]:
        """Those that are available in the queue of this row."""
        store, queue_id, _ = self._queue_of(row)
        start, end = queue_key(queue_id, Place.AVAILABLE, 0), queue_key(queue_id, Place.AVAILABLE + 1, 0)
        return [unpack_queue_key(key)[2] for key, _ in store.scan(Table.QUEUE, start, end, 1 << 32)]

    def _queue_of(self, row: Row) -> tuple[LmdbStore, int, int]:
        part = {"active": Part.MAIN, "deadletter": Part.DEAD_LETTER}[row["subQueue"]]
        return self._stores[row["partition"]], queue_id_of(row["entityId"], part), row["sequenceNumber"]

    def _count(self, store: LmdbStore, queue_id: int, place: Place, messages: int, size: int, numbers: int = 0) -> None:
        key = entity_key(queue_id)
        counts = decode_counts(store.get(Table.COUNTS, key) or encode_counts(Counts()))
        field = {Place.AVAILABLE: "available", Place.DEFERRED: "deferred", Place.SCHEDULED: "scheduled"}[place]
        changed = counts._replace(
            **{field: getattr(counts, field) + messages},
            size_bytes=counts.size_bytes + size,
            next_sequence_number=counts.next_sequence_number + numbers,
        )
        store.put(Table.COUNTS, key, encode_counts(changed))


def plant_in_stores(data: Path, ledger: Ledger, chance: random.Random) -> list[Fault]:
    """Three messages are lost, of them one dead letter; two that were completed are back; one comes from nowhere."""
    stores = Stores(data)
    try:
        planted = []
        # The ledger will have a gap, in which a message that has moved once may have moved on, which is no fault.
        waiting = ledger.messages(
            lambda rows: ops(rows)[-1] not in _GONE and len({row["partition"] for row in rows}) == 1
        )
        waiting = [rows for rows in waiting if stores.has(rows[-1])]
        active = [rows[-1] for rows in waiting if rows[-1]["subQueue"] == "active"]
        dead = [rows[-1] for rows in waiting if rows[-1]["subQueue"] == "deadletter"]
        for row in (*chance.sample(active, 2), *chance.sample(dead, 1)):
            stores.take_away(row)
            planted.append(_fault("lost", row))
        completed = ledger.messages(
            lambda rows: ops(rows).count("completed") == 1 and ops(rows)[-1] == "completed", STAYS
        )
        completed = [
            rows for rows in completed if _message_of(rows[0]) in ledger.records and not _planted(rows, planted)
        ]
        for rows in chance.sample([rows for rows in completed if rows[0]["subQueue"] == "active"], 2):
            stores.put(rows[-1], ledger.records[_message_of(rows[0])])
            planted.append(_fault("left_but_present", rows[-1]))
        row = chance.choice(
            [row for row in active if row["entity"] in ("orders", "bin", "once") and stores.numbers(row)]
        )
        number = stores.put(row, stores.a_record(row), 0)
        planted.append(_fault("ghost", row | {"sequenceNumber": number}))
        return planted
    finally:
        stores.close()


_GONE: Final = (
    "completed",
    "expired",
    "purged",
    "cancelled",
    "deadlettered",
    "forwarded",
    "moved",
    "activated",
    "published",
)


def _planted(rows: Sequence[Row], planted: Sequence[Fault]) -> bool:
    return _fault("", rows[0])[1:3] in {fault[1:3] for fault in planted}


# -- in the ledger


def _hides_more(gap: Row, planted: Sequence[Fault], ledger: Ledger) -> bool:
    """Whether a gap in place of this row would hide what became of a planted message."""
    numbers = {(fault.queue, fault.number) for fault in planted if fault.partition == gap["partition"]}
    last = {
        _fault("", rows[-1])[1:3]: rows[-1]["journalOffset"]
        for rows in ledger.by_message.values()
        if _fault("", rows[-1])[1:3] in numbers
    }
    return gap["journalOffset"] == 0 or any(offset < gap["journalOffset"] for offset in last.values())


def plant_in_ledger(ledger: Ledger, before: Sequence[Fault], chance: random.Random) -> list[Fault]:
    """Of two messages an end, and of one a beginning is told twice; one forwarded message does not arrive; one row is
    missing, and one is there twice. `before` were planted in the stores. The ledger has no manifest then.
    """
    planted: list[Fault] = []
    changes: dict[tuple[int, str, int], Row | None] = {}  # by place of the row; None: it is removed
    doubled: set[tuple[int, str, int]] = set()

    def place(row: Row) -> tuple[int, str, int]:
        return row["partition"], row["epoch"], row["journalOffset"]

    # What is behind a gap may say where a message has gone that was seen before it. So it is at the beginning.
    gap = next(row for row in ledger.rows if row["op"] == "delivered" and not _hides_more(row, before, ledger))
    changes[place(gap)] = None
    planted.append(Fault("gap", "", gap["journalOffset"], gap["partition"]))
    used = [fault[1:3] for fault in before]

    def is_free(rows: Sequence[Row]) -> bool:
        return _fault("", rows[0])[1:3] not in used and all(row is not gap for row in rows)

    ended = [
        rows
        for rows in ledger.messages(lambda rows: ops(rows) == ["enqueued", "delivered", "completed"])
        if is_free(rows)
    ]
    *twice, entered = chance.sample(ended, 3)
    for rows in twice:
        changes[place(rows[1])] = rows[1] | {"op": "completed"}
        planted.append(_fault("left_twice", rows[1]))
    changes[place(entered[1])] = entered[1] | {"op": "enqueued"}
    planted.append(_fault("entered_twice", entered[1]))
    # Near the gap and the ledger's end, a move is undecided.
    first, last = gap["eventTime"] + MARGIN, max(row["eventTime"] for row in ledger.rows) - MARGIN
    dropped = [row for row in ledger.rows if row["op"] == "duplicate" and row["originSequenceNumber"] is not None]
    row = chance.choice([row for row in dropped if first < row["eventTime"] < last])
    changes[place(row)] = row | {"op": "ping"}
    moved = row | {"entity": row["originEntity"], "subQueue": row["originSubQueue"]}
    moved |= {"sequenceNumber": row["originSequenceNumber"]}
    planted.append(_fault("not_arrived", moved))
    again = chance.choice([row for row in ledger.rows if row["op"] == "delivered" and place(row) not in changes])
    doubled.add(place(again))
    planted.append(Fault("repeated", "", again["journalOffset"], again["partition"]))
    for uri in captured(ledger.url).uris():
        path = Path(uri.removeprefix("file://"))
        table = _table(uri)
        rows = []
        for row in table.to_pylist():
            changed = changes.get(place(row), row)
            rows += [] if changed is None else [changed] * (1 + (place(row) in doubled))
        path.unlink()  # it may be a link to the file of another capture
        pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    # These are a broker's faults and no damage: the audit refuses files that the manifest knows otherwise.
    shutil.rmtree(Path(ledger.url) / "manifest")
    return planted
