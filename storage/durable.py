"""Writes files so that after a power cut they are complete or not there at all, and asks how much room there is."""

import os
from collections.abc import Iterable
from errno import EDQUOT, ENOSPC
from pathlib import Path


def write_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write `content` to `path`: readers see the old content or all of the new, also after a power cut."""
    partial = path.with_name(path.name + ".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync_directory(path.parent)


def write_in_place(path: Path, content: bytes) -> None:
    """Write `content` to `path`, where its blocks are if it is there: a full disk has room for these. Not durable.

    Readers may see a part of it. Raises OSError.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, os.pwrite(descriptor, content, 0))
    finally:
        os.close(descriptor)


def is_full(error: OSError) -> bool:
    """The disk has no room, or this user may have no more of it."""
    return error.errno in (ENOSPC, EDQUOT)


def free_disk_bytes(path: Path) -> int:
    """Return how much is free in the file system of this file or directory. Raises OSError."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def sync_file(path: Path) -> None:
    """Make the content of a file durable that other code has written. If a sync has failed before: `write_again`."""
    _sync(path, os.O_RDONLY)


def write_again(path: Path, pieces: Iterable[tuple[int, bytes]]) -> None:
    """Write what was read from a file, at these offsets, in its place again, and make all of the file durable.

    What a sync could not write is read by everybody as if it were on the disk, and a later sync does not write it: the
    kernel has taken it for written. Only what is written again is known to be there after a sync.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for at, content in pieces:
            rest = memoryview(content)
            while len(rest):
                done = os.pwrite(descriptor, rest, at)
                rest, at = rest[done:], at + done
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable: a file's own sync does not include its name."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
