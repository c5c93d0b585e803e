"""What a worker and the process that follows its log tell each other: two small files of the data directory.

run/worker-<n>.lsn           LSN, little-endian. The worker says up to which LSN its log is on disk. What is behind
                             that may be lost with the machine, so nobody may believe it, although it can be read
journal/worker-<n>.position  first 8 bytes of the log's id, LSN big-endian. The follower says up to which LSN it
                             needs the log no more, so that the worker uses these segments again
"""

import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path

from storage.data_dir import JOURNAL, RUN
from storage.durable import free_disk_bytes, is_full, write_file, write_in_place
from storage.log.tail import Position

_LSN = struct.Struct("<Q")
_POSITION = struct.Struct(">8sQ")


def durable_path(data_directory: Path, worker: int) -> Path:
    return data_directory / RUN / f"worker-{worker}.lsn"


def position_path(data_directory: Path, worker: int) -> Path:
    return data_directory / JOURNAL / f"worker-{worker}.position"


class DurableLsn:
    """The worker's end of the first file: memory that others read. Begins with 0. Raises OSError."""

    def __init__(self, path: Path) -> None:
        write_in_place(path, bytes(_LSN.size))  # memory without a block on a full disk would end the process
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(descriptor, _LSN.size)
        finally:
            os.close(descriptor)

    def set(self, lsn: int) -> None:
        _LSN.pack_into(self._memory, 0, lsn)


def durable_lsn(data_directory: Path, worker: int) -> int:
    """0 if the worker has not said it yet."""
    with suppress(OSError):
        content = durable_path(data_directory, worker).read_bytes()
        if len(content) == _LSN.size:
            lsn: int = _LSN.unpack(content)[0]
            return lsn
    return 0


def read_position(path: Path) -> Position | None:
    """None if the follower has said nothing, or what it said was torn. Raises OSError."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return Position(*_POSITION.unpack(content)) if len(content) == _POSITION.size else None


def write_position(path: Path, position: Position) -> None:
    """Write a position: durable on return, and after a crash whole or as before. Raises OSError."""
    content = _POSITION.pack(position.log_id[:8], position.lsn)
    try:
        write_file(path, content)
    except OSError as error:
        if not is_full(error):
            raise
        # Its block is there already, and a disk writes as much at once.
        with path.open("r+b", buffering=0) as file:
            file.write(content)
            os.fdatasync(file.fileno())


class Follower:
    """The process that follows a worker's log, as the worker sees it. Raises OSError.

    `backlog_bytes`: the segments that only it needs take no more than these; then it loses the oldest. It loses them,
    too, while less than `spare_disk_bytes` of the disk are free.
    """

    def __init__(self, data_directory: Path, worker: int, backlog_bytes: int, spare_disk_bytes: int = 0) -> None:
        self._path = position_path(data_directory, worker)
        self.durable = DurableLsn(durable_path(data_directory, worker))
        self.backlog_bytes = backlog_bytes
        self._spare_disk_bytes = spare_disk_bytes

    def takes_room(self) -> bool:
        """True if the disk has so little room that messages need what is kept for it."""
        return free_disk_bytes(self._path.parent) < self._spare_disk_bytes

    def position(self, log_id: bytes) -> int:
        """The LSN up to which it needs this log no more; 0 if it has said nothing of it."""
        found = read_position(self._path)
        return found.lsn if found is not None and found.log_id == log_id[:8] else 0
