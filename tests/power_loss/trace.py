"""The trace of what processes did to the files of one directory: written by the shim, read here, in one order.

Clients of the broker write marks between the records of its processes: what they ask for, and what was acknowledged.
"""

import json
import mmap
import os
import struct
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

SHIM = Path(__file__).with_name("shim.c")
MAGIC = 0x53534F4C
_MAGIC_BYTES = MAGIC.to_bytes(4, "little")
_HEADER = struct.Struct("<IIQQqqqBBB5xII")  # `struct record` of the shim


class Kind(IntEnum):
    """The shim's kinds; MARK is ours."""

    WRITE = 1
    SYNC = 2  # fsync, fdatasync; of a file or a directory
    CREATE = 3  # open with O_CREAT or O_TRUNC; the file may have been there
    TRUNCATE = 4  # to any size, also a larger one
    RENAME = 5
    UNLINK = 6
    MKDIR = 7
    RMDIR = 8
    MAPPED = 9  # mapped for writing: what is written to it from now on is not seen
    UNKNOWN = 10
    MARK = 20


class Phase(IntEnum):
    BEGIN = 0
    END = 1


DURABLE, ZEROS, EMPTIES = 1, 2, 4  # flags: O_DSYNC or the like; the data are zeros and were left out; O_TRUNC


class Record(NamedTuple):
    """`size` is that of a write, or the new one of a truncated file. In END, `result` is negative after a failure."""

    kind: int
    phase: int
    flags: int
    operation: int
    inode: int
    offset: int
    size: int
    result: int
    path: str
    target: str
    data: memoryview | bytes


def packed(record: Record) -> bytes:
    path, target = record.path.encode(), record.target.encode()
    size = _HEADER.size + len(path) + len(target) + len(record.data)
    fields = record.operation, record.inode, record.offset, record.size, record.result
    header = _HEADER.pack(MAGIC, size, *fields, record.kind, record.phase, record.flags, len(path), len(target))
    return b"".join((header, path, target, record.data))


class Marker:
    """Appends marks to a trace. Threads may share it."""

    def __init__(self, trace: Path) -> None:
        self._descriptor = os.open(trace, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def mark(self, **said: Any) -> None:
        self.add(Record(Kind.MARK, Phase.END, 0, 0, 0, 0, 0, 0, "", "", json.dumps(said).encode()))

    def add(self, record: Record) -> None:
        os.write(self._descriptor, packed(record))

    def close(self) -> None:
        os.close(self._descriptor)


class Trace:
    """A recorded trace."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        self._bytes = memoryview(self._map)
        self._at: list[int] = []
        at = 0
        while at < len(self._bytes):
            size = self._size(at)
            if size and self._is_followed(at + size):
                self._at.append(at)
                at += size
            else:  # a process was killed while it wrote this record, before the operation or after it
                at = self._next(at + 1)

    def _size(self, at: int) -> int:
        """Of the record at this place; 0 if there is none."""
        if at + _HEADER.size > len(self._bytes):
            return 0
        magic, size = struct.unpack_from("<II", self._bytes, at)
        return size if magic == MAGIC and at + size <= len(self._bytes) else 0

    def _is_followed(self, at: int) -> bool:
        """True at the end, and if a record begins here; perhaps behind some bytes of one that was not finished."""
        return len(self._bytes) - at < len(_MAGIC_BYTES) or self._map.find(_MAGIC_BYTES, at, at + 8) >= 0

    def _next(self, at: int) -> int:
        while (at := self._map.find(_MAGIC_BYTES, at)) >= 0:
            if self._size(at):
                return at
            at += 1
        return len(self._bytes)

    def __len__(self) -> int:
        return len(self._at)

    def __getitem__(self, index: int) -> Record:
        at = self._at[index]
        fields = _HEADER.unpack_from(self._bytes, at)
        _, size, operation, inode, offset, length, result, kind, phase, flags, path_bytes, target_bytes = fields
        path_at = at + _HEADER.size
        target_at = path_at + path_bytes
        data_at = target_at + target_bytes
        path, target = (bytes(self._bytes[a:b]).decode() for a, b in ((path_at, target_at), (target_at, data_at)))
        data = self._bytes[data_at : at + size]
        return Record(kind, phase, flags, operation, inode, offset, length, result, path, target, data)

    def __iter__(self) -> Iterator[Record]:
        return map(self.__getitem__, range(len(self)))


def mark_of(record: Record) -> Any:
    return json.loads(bytes(record.data))
