"""The files of a log: `<data directory>/logs/<worker>/segment-<n>`, written once in advance and used again and again.

A write to blocks that were written before needs no change of the file system's own data, so one sync is one write of
the disk. Where the file system takes it, frames go past the page cache (O_DIRECT | O_DSYNC), from a buffer at an
address that the disk can read; elsewhere a write is followed by fdatasync.
"""

import mmap
import os
from collections.abc import Sequence
from errno import EINVAL
from pathlib import Path

from storage.durable import sync_directory
from storage.log.frames import BLOCK_BYTES, padded

SEGMENT_NAME = "segment-"
BUFFER_BYTES = 1 << 20
_ZEROS = bytes(1 << 20)


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{SEGMENT_NAME}{number}"


def segment_numbers(directory: Path) -> list[int]:
    """The numbers of the segments that are there, ascending. Raises OSError."""
    names = [path.name.removeprefix(SEGMENT_NAME) for path in directory.iterdir() if path.name.startswith(SEGMENT_NAME)]
    return sorted(int(name) for name in names if name.isdecimal())


def prepare(path: Path, size_bytes: int) -> None:
    """Write a file of zeros, so that its blocks are there. It appears under its name when it is on disk.

    Raises OSError.
    """
    partial = path.with_name(path.name + ".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        for at in range(0, size_bytes, len(_ZEROS)):
            os.write(descriptor, memoryview(_ZEROS)[: size_bytes - at])
        os.fsync(descriptor)
    except OSError:
        partial.unlink()
        raise
    finally:
        os.close(descriptor)
    partial.rename(path)
    sync_directory(path.parent)


class DirectBuffer:
    """Memory that starts at a page, to write from with O_DIRECT."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, BUFFER_BYTES)
        self._view = memoryview(self._memory)

    def fill(self, parts: Sequence[bytes | memoryview], size_bytes: int) -> memoryview:
        """The parts one after the other, and anything up to `size_bytes`, which is BUFFER_BYTES at most."""
        view, at = self._view, 0
        for part in parts:
            end = at + len(part)
            view[at:end] = part
            at = end
        return view[:size_bytes]


class SegmentFile:
    """One segment, open for writing. All methods raise OSError."""

    def __init__(self, path: Path, buffer: DirectBuffer) -> None:
        self.path = path
        self._buffer = buffer
        try:
            self._open(direct=True)
        except OSError as error:
            if error.errno != EINVAL:
                raise
            self._open(direct=False)

    def _open(self, direct: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT | os.O_DSYNC if direct else 0)
        self._descriptor = os.open(self.path, flags, 0o600)
        self._direct = direct

    def write(self, at: int, parts: Sequence[bytes | memoryview]) -> int:
        """Write the parts one after the other at the offset `at`, and sync. Returns the offset of the next block."""
        size = 0
        for part in parts:
            size += len(part)
        size = (size + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES
        if size <= BUFFER_BYTES:
            self._write_all(self._buffer.fill(parts, size), at)
        else:
            self._write_in_pieces(at, parts)
        if not self._direct:
            os.fdatasync(self._descriptor)
        return at + size

    def _write_in_pieces(self, at: int, parts: Sequence[bytes | memoryview]) -> None:
        gathered: list[bytes | memoryview] = []
        room = BUFFER_BYTES
        for whole in parts:
            part = memoryview(whole)
            while len(part) >= room:
                self._write_all(self._buffer.fill([*gathered, part[:room]], BUFFER_BYTES), at)
                at += BUFFER_BYTES
                part = part[room:]
                gathered, room = [], BUFFER_BYTES
            if len(part):
                gathered.append(part)
                room -= len(part)
        if gathered:
            self._write_all(self._buffer.fill(gathered, padded(BUFFER_BYTES - room)), at)

    def _write_all(self, data: memoryview, at: int) -> None:
        try:
            written = os.pwrite(self._descriptor, data, at)
        except OSError as error:
            if error.errno != EINVAL or not self._direct:
                raise
            # The file system opens files with O_DIRECT, and cannot write them.
            os.close(self._descriptor)
            self._open(direct=False)
            written = os.pwrite(self._descriptor, data, at)
        while written < len(data):  # a short write is followed by an error, or by the rest
            # What O_DIRECT has written is whole sectors, which need not be whole blocks.
            done = written // BLOCK_BYTES * BLOCK_BYTES if self._direct else written
            more = os.pwrite(self._descriptor, data[done:], at + done)
            if done + more <= written:
                raise OSError(28, "the disk takes no more")  # ENOSPC
            written = done + more

    def truncate(self, size_bytes: int) -> None:
        """Give back what one large frame needed beyond the usual size."""
        if os.fstat(self._descriptor).st_size > size_bytes:
            os.ftruncate(self._descriptor, size_bytes)

    def size_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        os.close(self._descriptor)
