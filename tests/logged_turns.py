"""Turns of some partitions, what they must leave, and a checkpointer that does its steps in this process."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

from storage.log import checkpointer, commit_log
from storage.log.changes import packable
from storage.log.checkpointing import Done
from storage.log.commit_log import CommitLog, LogLimits
from storage.store import Store, Table
from tests.logs import log_of, open_log

TABLES = (Table.MESSAGES, Table.QUEUE)
EVERYTHING = (b"\0", b"\xff" * 9, 100_000)
SMALL = LogLimits(segment_bytes=32 << 10, log_bytes=1 << 20)

Contents = dict[tuple[int, Table], dict[bytes, bytes]]


def contents(stores: dict[int, Any]) -> Contents:
    return {
        (partition, table): dict(store.scan(table, *EVERYTHING))
        for partition, store in stores.items()
        for table in TABLES
    }


def _packed(piece: Any) -> bytes:
    packed: bytes = msgpack.packb(piece, default=packable)
    return packed


class Local:
    """In place of the checkpointer's process: a checkpoint is made at once, or when `answer` is called."""

    descriptor: int | None = None

    def __init__(self, *_: Any) -> None:
        self.works_on: int | None = None
        self.starts, self.pid = 0, None
        self.is_running = False
        self.log: CommitLog | None = None
        self.asked: list[Any] = []

    def start(self) -> None:
        self.is_running = True

    def look(self) -> None: ...

    def close(self) -> None:
        self.is_running = False

    def checkpoint(self, layers: Any, up_to_lsn: int, positions: Any) -> None:
        packed = {partition: [*map(_packed, layer.pieces(2))] for partition, layer in layers.items()}
        effects = {
            partition: [msgpack.unpackb(each, use_list=False) for each in of] for partition, of in packed.items()
        }
        self.asked = [effects, up_to_lsn, positions]

    def release_memory(self) -> None: ...

    def prepare(self, path: Path, size_bytes: int) -> None: ...

    def sendall(self, data: bytes) -> None: ...

    def answers(self) -> list[Any]:
        assert self.log is not None
        tables = checkpointer.Tables(self, {}, self.log._log_id, self.log._worker, 0, 1 << 20)  # type: ignore[arg-type]
        tables._stores = self.log._tables
        for store in tables._stores.values():
            store.end_reading()
        _, up_to_lsn, _ = self.asked
        return [Done(up_to_lsn, *tables.checkpoint(*self.asked))]


def open_local(
    monkeypatch: Any, directory: Path, partitions: tuple[int, ...], local: type[Local] = Local, **kwargs: Any
) -> CommitLog:
    """The log with a `Local` checkpointer."""
    monkeypatch.setattr(commit_log, "Checkpointer", local)
    kwargs.setdefault("limits", SMALL)
    log = open_log(directory, partitions, **{"map_size_bytes": 1 << 24, **kwargs})
    log.checkpointer.log = log  # type: ignore[attr-defined]
    return log


class Turns:
    """Random turns. `done` is what must be there; `asked`: that with the turn under way, which may be there, too."""

    def __init__(self, partitions: tuple[int, ...], seed: int, seldom: frozenset[int] = frozenset()) -> None:
        self.chance = random.Random(seed)
        self.partitions = partitions
        self.seldom = seldom  # partitions that change in few turns
        self.done: Contents = {(partition, table): {} for partition in partitions for table in TABLES}
        self.asked = self.copy()

    def copy(self) -> Contents:
        return {place: dict(items) for place, items in self.done.items()}

    def turn(self, stores: dict[int, Any], commit: Callable[[], Any]) -> None:
        self.asked = self.copy()
        for partition in self.partitions:
            if self.chance.random() < (0.05 if partition in self.seldom else 0.7):
                self.change(partition, stores[partition])
        commit()
        log_of(next(iter(stores.values()))).check()
        self.done = self.asked

    def change(self, partition: int, store: Store) -> None:
        for _ in range(self.chance.randint(1, 3)):
            table = self.chance.choice(TABLES)
            there = self.asked[partition, table]
            size = self.chance.choice((0, 10, 1000, 6000, 12_000))
            value = self.chance.randbytes(16).ljust(size, b"v")[:size]
            keys = [self.chance.randint(1, 60).to_bytes(4, "big") for _ in range(self.chance.randint(1, 3))]
            match self.chance.randrange(4):
                case 0:
                    store.delete_many(table, keys)
                    for key in keys:
                        there.pop(key, None)
                case 1:
                    new = [(key, value) for key in dict.fromkeys(keys) if key not in there]
                    store.insert_many(table, new)
                    there.update(new)
                case 2:
                    last = max(there, default=b"\0\0\0\0")
                    new = [((int.from_bytes(last, "big") + place).to_bytes(4, "big"), value) for place in (1, 5)]
                    store.append(table, new)
                    there.update(new)
                case _:
                    store.put_many(table, [(key, value) for key in keys])
                    there.update((key, value) for key in keys)
