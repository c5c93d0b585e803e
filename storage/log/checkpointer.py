"""The process that keeps the tables of one worker's partitions up to date, while the worker goes on.

It is `python -m storage.log.checkpointer DESCRIPTOR DESCRIPTOR`, with a socket to its worker as standard input; the
descriptors are those of shared memory, for net effects and for signs of life (`storage.liveness`). A process, because a
thread would take turns with the worker's own. Requests and answers are msgpack lists; the worker's side is
`checkpointing`. The net effects are pieces [partition, TableEffect], one behind the other, those of a partition
together.

    request  [OPEN, {partition: path}, log id, worker, map size, size of the largest record, process id of the worker]
    request  [CHECKPOINT, sizes of the pieces in the memory, LSN of their last turn, {partition: LSN of its tables}]
    request  [PREPARE, path, size]
    answer   [WORKS_ON, partition]
    answer   [DONE, LSN, {partition: LSN of its tables}, {partition: bytes that find adjacent pages},
             [[partition, problem], …]]; the last are the partitions that had no room, whose tables lack it
    answer   [PREPARED, path, problem, or nothing]
    answer   [DAMAGED, problem], [FAILED, problem]; the process ends
"""

import sys

from storage.liveness import SILENT, SharedSigns, Signs

SIGNS: Signs = SharedSigns(int(sys.argv[2])) if __name__ == "__main__" else SILENT
with SIGNS.loading():
    import mmap
    import os
    import signal
    import socket
    from contextlib import suppress
    from enum import IntEnum
    from pathlib import Path
    from typing import Any, NamedTuple

    import msgpack

    from storage.heap import keep_freed
    from storage.lmdb_store import MAP_SLACK_BYTES, LmdbStore
    from storage.log.changes import NetEffect
    from storage.log.segments import prepare
    from storage.log.tables import LogPosition, position, write_net_effect, write_position
    from storage.parent import die_with_parent
    from storage.store import StoreDamaged, StoreError, StoreFull

READ_BYTES = 1 << 16
# With this much behind the last page of the file, nobody needs to know which other pages are adjacent.
AMPLE_BYTES = MAP_SLACK_BYTES // 2
ADJACENT_BYTES_MAX = 64 << 20  # more is not looked for


class Request(IntEnum):
    OPEN = 0
    CHECKPOINT = 1
    PREPARE = 2


class Answer(IntEnum):
    WORKS_ON = 0
    DONE = 1
    PREPARED = 2
    DAMAGED = 3
    FAILED = 4


class Full(NamedTuple):
    """The disk or the map of a partition had no room for its checkpoint: it has none of it but deletions."""

    partition: int
    problem: str


class Checkpointed(NamedTuple):
    """`positions`: the LSN that the tables of each partition say. `adjacent_bytes`: so many bytes of records of the
    largest size certainly find adjacent pages in its file."""

    positions: dict[int, int]
    adjacent_bytes: dict[int, int]
    full: list[Full]


class Tables:
    """The tables of a worker's partitions, open for writing."""

    def __init__(
        self,
        connection: socket.socket,
        paths: dict[int, str],
        log_id: bytes,
        worker: int,
        map_size: int,
        largest: int,
        signs: Signs = SILENT,
    ) -> None:
        self._connection = connection
        self._log_id = log_id
        self._worker = worker
        self._largest_bytes = largest
        self._stores: dict[int, LmdbStore] = {}
        for partition, path in paths.items():
            self._works_on(partition)
            self._stores[partition] = LmdbStore(
                Path(path),
                partition_id=partition,
                map_size_bytes=map_size,
                create=False,
                attached=True,
                owned=False,
                signs=signs,
            )
            self._stores[partition].reserve()

    def checkpoint(self, effects: dict[int, NetEffect], up_to_lsn: int, positions: dict[int, int]) -> Checkpointed:
        """Write net effects to the tables; one commit for each partition, whether or not the others find room.

        `positions` are those before. Raises StoreError, OSError.
        """
        positions = dict(positions)
        full = []
        for partition, effect in effects.items():
            store = self._stores[partition]
            self._works_on(partition)
            store.begin()
            found = position(store)
            if found is None or found.log_id != self._log_id or found.lsn > up_to_lsn:
                raise StoreError(f"{store.path}: has changes of another process: {found}")
            try:
                self._write(store, effect, up_to_lsn)
            except StoreFull as error:
                full.append(Full(partition, str(error)))
            else:
                store.reserve()
                positions[partition] = up_to_lsn
        adjacent_bytes = {partition: self._adjacent_bytes(store) for partition, store in self._stores.items()}
        return Checkpointed(positions, adjacent_bytes, full)

    def _write(self, store: LmdbStore, effect: NetEffect, lsn: int) -> None:
        try:
            write_net_effect(store, effect)
            write_position(store, LogPosition(self._log_id, self._worker, lsn))
            store.commit()
        except StoreFull:
            # What is only deleted needs few pages, and pages that it frees can be used by the next commit but one.
            # The position stays, so all turns are applied again. It is written all the same: without any change there
            # is no commit, and pages that the last one freed would never be used.
            write_net_effect(store, [(table, deleted, (), ()) for table, deleted, _, _ in effect])
            write_position(store, position(store))
            store.commit()
            raise

    def _adjacent_bytes(self, store: LmdbStore) -> int:
        if store.tail_bytes() > AMPLE_BYTES:
            return ADJACENT_BYTES_MAX
        return store.adjacent_bytes(self._largest_bytes, ADJACENT_BYTES_MAX)

    def _works_on(self, partition: int) -> None:
        _send(self._connection, [Answer.WORKS_ON, partition])


def _send(connection: socket.socket, answer: list[Any]) -> None:
    connection.sendall(msgpack.packb(answer))


def _net_effects(memory: int, sizes: list[int], signs: Signs) -> dict[int, NetEffect]:
    """Return the effects in the shared memory, by partition, with the pieces of each table joined."""
    effects: dict[int, NetEffect] = {}
    if not sizes:
        return effects
    with mmap.mmap(memory, sum(sizes), prot=mmap.PROT_READ) as packed, memoryview(packed) as view:
        at = 0
        for size in sizes:
            signs.beat()
            partition, (table, *piece) = msgpack.unpackb(view[at : at + size], use_list=False)
            at += size
            effect = effects.setdefault(partition, [])
            if not effect or effect[-1][0] != table:
                effect.append((table, [], [], []))
            for whole, part in zip(effect[-1][1:], piece, strict=True):
                whole += part
    return effects


def serve(connection: socket.socket, memory: int, signs: Signs) -> None:
    """`memory` is the descriptor of the shared memory with net effects."""
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=1 << 26)
    tables: Tables | None = None
    while data := connection.recv(READ_BYTES):
        unpacker.feed(data)
        for kind, *fields in unpacker:
            if kind == Request.OPEN:
                paths, log_id, worker, map_size, largest, parent = fields
                if os.getppid() != parent:  # it ended before we were tied to it
                    return
                tables = Tables(connection, paths, log_id, worker, map_size, largest, signs)
            elif kind == Request.PREPARE:
                path, size = fields
                problem = None
                try:
                    prepare(Path(path), size, signs)
                except OSError as error:
                    problem = str(error)
                _send(connection, [Answer.PREPARED, path, problem])
            else:
                assert tables is not None
                sizes, lsn, known = fields
                checkpointed = tables.checkpoint(_net_effects(memory, sizes, signs), lsn, known)
                _send(connection, [Answer.DONE, lsn, *checkpointed])


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    die_with_parent()
    keep_freed()
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # it is in no hurry, and its worker is
    connection = socket.socket(fileno=os.dup(0))
    try:
        serve(connection, int(sys.argv[1]), SIGNS)
    except (BrokenPipeError, ConnectionResetError):
        return 1  # the worker has ended
    except StoreDamaged as error:
        _send(connection, [Answer.DAMAGED, str(error)])
        return 1
    except (StoreError, OSError) as error:
        _send(connection, [Answer.FAILED, str(error)])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
