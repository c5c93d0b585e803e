"""Small, consistent contents of a partition, for tests that damage, copy or count them."""

import os
import subprocess
import sys
from pathlib import Path

import storage
from storage.data_dir import Description, partition_path
from storage.durable import write_file
from storage.lmdb_store import LmdbStore
from storage.records import (
    NEVER,
    Counts,
    Field,
    Overlay,
    Place,
    Timer,
    due_key,
    encode_counts,
    encode_entry,
    encode_message,
    entity_key,
    message_key,
    queue_key,
)
from storage.store import Store, Table

MAP_BYTES = 1 << 30
LAYOUT = bytes(16)
QUEUE_ID = 8


def open_store(path: Path, *, partition_id: int = 0, map_size_bytes: int = MAP_BYTES, create: bool = True) -> LmdbStore:
    return LmdbStore(path, partition_id=partition_id, map_size_bytes=map_size_bytes, create=create)


def add_message(
    store: Store, number: int, body: bytes = b"body", place: Place = Place.AVAILABLE, time_ms: int = NEVER
) -> int:
    """Message `number` at sequence number `number` of QUEUE_ID; returns its size.

    `time_ms` is when it becomes available if scheduled, else when it expires.
    """
    scheduled = place is Place.SCHEDULED
    record = encode_message(1_000, NEVER if scheduled else time_ms, LAYOUT, body)
    overlay: Overlay | None = {Field.ENQUEUED_MS: time_ms} if scheduled else None
    store.put(Table.MESSAGES, message_key(number), record)
    store.put(Table.QUEUE, queue_key(QUEUE_ID, place, number), encode_entry(number, 0, overlay))
    if time_ms != NEVER:
        timer = Timer.SCHEDULED if scheduled else Timer.EXPIRY
        store.put(Table.DUE, due_key(QUEUE_ID, timer, time_ms, number), message_key(number))
    return len(record)


def put_counts(store: Store, counts: Counts) -> None:
    store.put(Table.COUNTS, entity_key(QUEUE_ID), encode_counts(counts))


def fill(store: Store) -> None:
    """Messages 1 to 4: available, available and expiring, deferred, scheduled. Committed."""
    size_bytes = (
        add_message(store, 1, b"first body")
        + add_message(store, 2, time_ms=5_000)
        + add_message(store, 3, place=Place.DEFERRED)
        + add_message(store, 4, place=Place.SCHEDULED, time_ms=9_000)
    )
    put_counts(store, Counts(5, available=2, deferred=1, scheduled=1, size_bytes=size_bytes))
    store.commit()


def make_data_directory(path: Path, partitions: int = 2) -> None:
    """A data directory whose partitions are filled; no broker has it."""
    (path / "partitions").mkdir(parents=True)
    for partition in range(partitions):
        with open_store(partition_path(path, partition), partition_id=partition) as store:
            fill(store)
    write_file(path / "peeklock.json", Description(partitions).to_json())


def start(code: str, *arguments: object, prefix: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    """Another process that runs `code` with the repository on its path and talks over its standard input and output.

    `prefix` is a command that runs the command given to it.
    """
    paths = [str(Path(storage.__file__).parents[1]), str(Path(__file__).parent)]
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: "subprocess.Popen[str]") -> str:
    """The next line of its output."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
