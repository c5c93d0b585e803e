"""A worker's log with events, written by a CommitLog, and what must be in the journal by it.

As a program it writes turns until it has written so many: `python journaled.py DIRECTORY WORKER SEED TURNS`.
"""

import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa

from broker.journal.properties import DECODING
from storage.data_dir import RUN
from storage.journal.batches import stream
from storage.journal.entities import Wanted
from storage.journal.events import Hint, Op
from storage.journal.files import PartitionJournal
from storage.journal.queues import Mode, Modes, Queues
from storage.journal.rows import Rows
from storage.journal.schema import SCHEMA
from storage.log.commit_log import DEFAULT_LIMITS, CommitLog, LogLimits
from storage.log.frames import decode_turn
from storage.log.reading import LogOnDisk
from storage.log.recovery import log_directory
from storage.records import message_key, queue_key
from storage.store import Table
from tests.journal.turns_of_messages import ACTIVE, DEAD, NAMED, ORDERS, STORE, done, entry, record
from tests.logs import open_log

SMALL = LogLimits(segment_bytes=256 << 10, log_bytes=64 << 20)  # with checkpoints, after which segments are free


class _WithEvents:
    """In place of the codec of a writer: the next turn has these events."""

    def __init__(self, codec: Any) -> None:
        self._codec = codec
        self.events: list[Any] = []
        self.payloads: list[bytes] = []

    def pack_turn(self, time_ms: int, changes: list[Any], events: list[Any], buffer: memoryview) -> memoryview:
        events, self.events = self.events or events, []
        packed: memoryview = self._codec.pack_turn(time_ms, changes, events, buffer)
        self.payloads.append(bytes(packed))
        return packed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)


class Worker:
    """Makes random turns of its partitions: sends, completions, dead-letters."""

    def __init__(
        self, directory: Path, worker: int, seed: int, partitions: tuple[int, ...], limits: LogLimits = DEFAULT_LIMITS
    ) -> None:
        self.directory, self.worker, self.partitions = directory, worker, partitions
        self.log: CommitLog = open_log(directory, partitions, worker=worker, limits=limits)
        self._codec = self.log._writer._codec = _WithEvents(self.log._writer._codec)  # type: ignore[assignment]
        self._chance = random.Random(seed)
        self._next = dict.fromkeys(((each, queue) for each in partitions for queue in (ACTIVE, DEAD)), 1)
        self._present: dict[int, list[int]] = {each: [] for each in partitions}
        self._named: set[int] = set()
        self.time_ms = 1_700_000_000_000
        (directory / RUN).mkdir(exist_ok=True)
        self.publish()

    def turn(
        self, *, sends: int | None = None, size: int | None = None, store_id: bytes = STORE, events: Any = True
    ) -> None:
        self.time_ms += self._chance.randint(0, 3)
        items = [
            [partition, store_id, self._change(partition, sends, size)]
            for partition in self.partitions
            if self._chance.random() < 0.8 or sends is not None
        ]
        named, self._named = self._named, self._named | {partition for partition, _, _ in items}
        self._codec.events = items if events is True else events or []
        if not self.log.commit(self.time_ms):  # nothing has changed, and so nothing was logged
            self._named = named
        self.publish()

    def _change(self, partition: int, sends: int | None, size: int | None) -> list[Any]:
        store, chance = self.log.stores[partition], self._chance
        hints: list[Any] = []
        if partition not in self._named:
            hints.append(NAMED)
        present = self._present[partition]
        for _ in range(chance.randint(0, 4) if sends is None else sends):
            number = self._next[partition, ACTIVE]
            self._next[partition, ACTIVE] = number + 1
            body = chance.randbytes(chance.choice((0, 20, 500, 9000)) if size is None else size)
            store.insert_many(Table.MESSAGES, [(message_key(number), record(body, f"id-{number}"))])
            store.insert_many(Table.QUEUE, [entry(ACTIVE, number, number)])
            present.append(number)
        while len(present) > 5 and chance.random() < 0.6:
            number = present.pop(0)
            store.delete_many(Table.QUEUE, [queue_key(ACTIVE, 0, number)])
            if chance.random() < 0.3:
                there = self._next[partition, DEAD]
                self._next[partition, DEAD] = there + 1
                store.insert_many(Table.QUEUE, [entry(DEAD, there, number)])
                hints.append([Hint.MOVED, Op.DEAD_LETTERED, ACTIVE, [number], [1], DEAD, there, "bad"])
            else:
                hints.append(done(Op.COMPLETED, ACTIVE, number))
        if present and chance.random() < 0.5:
            hints.append(done(Op.DELIVERED, ACTIVE, present[0], at_ms=self.time_ms - 1))
        return hints

    @property
    def payloads(self) -> list[bytes]:
        """Of all turns."""
        return self._codec.payloads

    def publish(self) -> None:
        path = self.directory / RUN / f"worker-{self.worker}.lsn"
        partial = path.with_suffix(".partial")
        partial.write_bytes(self.log.lsn.to_bytes(8, "little"))
        partial.rename(path)

    def stop(self) -> None:
        self.log.checkpointer.close()
        self.log.close_files()


def wanted(payloads: Iterable[bytes], partition: int) -> list[dict[str, Any]]:
    """The rows of this partition, by the frames of a log."""
    rows = Rows(partition, Queues(Modes(Mode.BODIES, {}), {ORDERS: "orders"}), DECODING)
    for payload in payloads:
        time_ms, changes, events = decode_turn(payload)
        for number, _, hints in events:
            if number == partition:
                rows.add(time_ms, dict(changes).get(partition, ()), hints)
    found: list[dict[str, Any]] = rows.batch(0).to_pylist()
    return found


def logged(directory: Path, worker: int) -> Iterator[bytes]:
    """The frames of a log from which none was freed."""
    for frame in LogOnDisk(log_directory(directory, worker), worker).turns(0):
        yield bytes(frame.payload)


def read(
    journal: PartitionJournal,
    first: int,
    end: int,
    max_bytes: int = 1 << 30,
    entity: str | None = None,
    records: bool = True,
) -> tuple[list[dict], int]:
    reading = journal.read(first, end, max_bytes)
    following = reading.next_offset
    data = b"".join(stream(2, reading, None if entity is None else Wanted(entity), records=records, time_ms=5))
    table = pa.ipc.open_stream(data).read_all()
    table.validate(full=True)
    return table.to_pylist(), following


def plain_record(offset: int, size: int) -> bytes:
    """A record that cannot be compressed, and that nobody takes for that of another offset."""
    return b"%d:" % offset + random.Random(offset).randbytes(size)


def plain_rows(first: int, count: int, size: int = 10, entity: str = "orders") -> pa.RecordBatch:
    """Rows of any message."""
    made = [
        {
            "partition": 2,
            "journalOffset": at,
            "eventTime": at * 1000,
            "op": "enqueued",
            "record": plain_record(at, size),
        }
        for at in range(first, first + count)
    ]
    return pa.RecordBatch.from_pylist([{**row, "entity": entity} for row in made], SCHEMA)


def journaled(directory: Path, partition: int) -> list[dict[str, Any]]:
    """All rows of this partition that are in journal files."""
    journal = PartitionJournal(directory / "journal" / str(partition))
    assert journal.damage == []
    found, following = read(journal, journal.low, journal.stable)
    assert following == journal.stable
    journal.close()
    return found


def main() -> None:
    directory, worker, seed, turns = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    made = Worker(directory, worker, seed, (worker, worker + 2))
    for _ in range(turns):
        made.turn()
    print(msgpack.packb(made.log.lsn).hex(), flush=True)
    made.stop()


if __name__ == "__main__":
    main()
