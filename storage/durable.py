"""Writes files so that after a power cut they are complete or not there at all, and asks how much room there is."""

import os
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


def free_disk_bytes(path: Path) -> int:
    """Of the file system that has this file or directory. Raises OSError."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def sync_file(path: Path) -> None:
    """Make the content of a file durable that other code has written."""
    _sync(path, os.O_RDONLY)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable: a file's own sync does not include its name."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
