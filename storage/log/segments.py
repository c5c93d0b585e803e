"""The files of a log: `<data directory>/logs/<worker>/segment-<n>`, written once in advance and used again and again.

`spare` beside them becomes a segment when the disk has no room for one more.

A write to blocks that were written before needs no change of the file system's own data, so one sync is one write of
the disk. Where the file system takes it, frames go past the page cache (O_DIRECT | O_DSYNC), from a buffer at an
address that the disk can read, and this process goes on meanwhile; elsewhere a write is followed by fdatasync.
"""

import os
from collections.abc import Sequence
from errno import EAGAIN, EINVAL, ENOSPC, EOPNOTSUPP
from pathlib import Path

from storage.durable import free_disk_bytes, sync_directory
from storage.liveness import SILENT, Signs
from storage.log.aio import OneWrite
from storage.log.frames import BLOCK_BYTES, BUFFER_BYTES, padded

SEGMENT_NAME = "segment-"
SPARE_NAME = "spare"
# A smaller write is waited for. Asynchronous I/O takes longer, as a thread of the kernel makes the flush behind the
# write: 135 us instead of 120 for one block. And its answers leave only when the next turn is applied. Settlements need
# few bytes and much time: with a journal, turns of 2,000 of them passed 64 KiB, so that gateway and worker waited for
# each other in turn, and receiving lost a tenth of its rate.
ASYNCHRONOUS_BYTES = 128 << 10
_ZEROS = bytes(1 << 20)


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{SEGMENT_NAME}{number}"


def segment_numbers(directory: Path) -> list[int]:
    """The numbers of the segments that are there, ascending. Raises OSError."""
    names = [path.name.removeprefix(SEGMENT_NAME) for path in directory.iterdir() if path.name.startswith(SEGMENT_NAME)]
    return sorted(int(name) for name in names if name.isdecimal())


def prepare(path: Path, size_bytes: int, signs: Signs = SILENT) -> None:
    """Write a file of zeros, so that its blocks are there. It appears under its name when it is on disk.

    Without room for it on the disk, nothing is written. Raises OSError.
    """
    if free_disk_bytes(path.parent) < size_bytes:
        raise OSError(ENOSPC, os.strerror(ENOSPC), str(path))
    partial = path.with_name(path.name + ".partial")
    with signs.waiting_for_disk():
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            at = 0
            while at < size_bytes:
                at += os.write(descriptor, memoryview(_ZEROS)[: size_bytes - at])
            os.fsync(descriptor)
        except OSError:
            partial.unlink()
            raise
        finally:
            os.close(descriptor)
        partial.rename(path)
        sync_directory(path.parent)


class SegmentFile:
    """One segment, open for writing. All methods raise OSError."""

    def __init__(self, path: Path, one_write: OneWrite) -> None:
        """Files share `one_write`, of BUFFER_BYTES: one of them is written at a time."""
        self.path = path
        self._one_write = one_write
        self._begun: tuple[memoryview, int] | None = None  # the write that is under way, and its offset
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

    def begin(self, at: int, parts: Sequence[bytes | memoryview], is_filled: bool = False) -> int:
        """Begin to write the parts one after the other at the offset `at`. Returns the offset of the next block.

        All parts but the first are in the buffer of `one_write` already if it `is_filled`. Those that are not may
        change at once. Before anything else is written, `end` must have said that this is on disk. Where
        the file system takes no direct writes, and for small and very large ones, it is on disk when this returns.
        """
        size = 0
        for part in parts:
            size += len(part)
        size = (size + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES  # `padded`, once for each turn
        if size > BUFFER_BYTES:
            return self.write(at, parts)
        data = self.fill(self._one_write.view, parts[:1] if is_filled else parts, size)
        if size >= ASYNCHRONOUS_BYTES:
            self.start(data, at)
        else:
            self._write_all(data, at)
            self._sync()
        return at + size

    @property
    def is_asynchronous(self) -> bool:
        """Writes need not be waited for."""
        return self._direct and self._one_write.descriptor is not None

    def start(self, data: memoryview, at: int) -> None:
        """Begin to write blocks that are in a buffer of `one_write`, as `begin` does, however few they are."""
        if self.is_asynchronous:
            try:
                self._one_write.begin(self._descriptor, data, at)
            except OSError as error:
                if error.errno not in (EAGAIN, EINVAL):  # the kernel has no room for it, or a disk cannot do it
                    raise
            else:
                self._begun = data, at
                return
        self._write_all(data, at)
        self._sync()

    @property
    def is_writing(self) -> bool:
        """What was begun may not be on disk yet."""
        return self._begun is not None

    def end(self, wait: bool) -> bool:
        """True if what was begun is on disk now; `wait` until it is."""
        if self._begun is None:
            return True
        data, at = self._begun
        try:
            written = self._one_write.result(wait)
        except OSError as error:
            if error.errno != EINVAL:
                raise
            written = 0
        if written is None:
            return False
        self._begun = None
        if written < len(data):
            # What O_DIRECT has written is whole sectors, which need not be whole blocks.
            done = written // BLOCK_BYTES * BLOCK_BYTES
            self._write_all(data[done:], at + done)
            self._sync()
        return True

    def write(self, at: int, parts: Sequence[bytes | memoryview]) -> int:
        """Write, as `begin` does, and wait until it is on disk."""
        size = padded(sum(map(len, parts)))
        if size <= BUFFER_BYTES:
            self._write_all(self.fill(self._one_write.spare, parts, size), at)
        else:
            self._write_in_pieces(at, parts)
        self._sync()
        return at + size

    def _sync(self) -> None:
        if not self._direct:
            os.fdatasync(self._descriptor)

    def fill(self, view: memoryview, parts: Sequence[bytes | memoryview], size_bytes: int) -> memoryview:
        """The buffer with the parts one after the other, and what is there up to `size_bytes`, BUFFER_BYTES at most."""
        at = 0
        for part in parts:
            end = at + len(part)
            view[at:end] = part
            at = end
        return view[:size_bytes]

    def _write_in_pieces(self, at: int, parts: Sequence[bytes | memoryview]) -> None:
        gathered: list[bytes | memoryview] = []
        room = BUFFER_BYTES
        for whole in parts:
            part = memoryview(whole)
            while len(part) >= room:
                self._write_all(self.fill(self._one_write.spare, [*gathered, part[:room]], BUFFER_BYTES), at)
                at += BUFFER_BYTES
                part = part[room:]
                gathered, room = [], BUFFER_BYTES
            if len(part):
                gathered.append(part)
                room -= len(part)
        if gathered:
            self._write_all(self.fill(self._one_write.spare, gathered, padded(BUFFER_BYTES - room)), at)

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
                raise OSError(ENOSPC, "the disk takes no more")
            written = done + more

    def extend(self, size_bytes: int) -> None:
        """Let the file have this size at least, which is durable when this returns. Blocks come when they are written.

        After an error, nobody knows which size the file has.
        """
        if self.size_bytes() < size_bytes:
            os.ftruncate(self._descriptor, size_bytes)
            os.fsync(self._descriptor)

    def allocate(self, size_bytes: int) -> None:
        """Take the blocks of the file from the disk, so that a disk that is full later has room for it.

        Does nothing where the file system cannot do that.
        """
        try:
            os.posix_fallocate(self._descriptor, 0, size_bytes)
        except OSError as error:
            if error.errno not in (
                EINVAL,
                EOPNOTSUPP,
            ):  # the C library would write single bytes, which O_DIRECT refuses
                raise

    def truncate(self, size_bytes: int) -> None:
        """Give back what one large frame needed beyond the usual size."""
        if self.size_bytes() > size_bytes:
            os.ftruncate(self._descriptor, size_bytes)

    def size_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        os.close(self._descriptor)
