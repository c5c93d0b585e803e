"""A lock file that at most one process holds. The lock ends with its process, however that ends."""

import fcntl
import os
from pathlib import Path


class FileLocked(Exception):
    """Another process holds the lock; `pid` is its process id, if known."""

    def __init__(self, path: Path, pid: int | None) -> None:
        super().__init__(f"{path} is held by process {pid if pid else '(unknown)'}")
        self.path, self.pid = path, pid


class FileLock:
    """The exclusive lock on the file `path`, which is made if missing and contains the process id of the holder.

    The file stays when the lock is released: removing it would let two processes lock two files of the same name.
    Raises FileLocked at once if another process holds the lock, OSError if the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # In place, so that a full disk has room for it.
            os.ftruncate(descriptor, os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0))
        except BlockingIOError:
            pid = _pid_in(descriptor)
            os.close(descriptor)
            raise FileLocked(path, pid) from None
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def holder(path: Path) -> int | None:
    """The process that holds the lock on the file `path`, if one does and it is known. Raises OSError."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # let go when the file is closed
        except BlockingIOError:
            return _pid_in(file.fileno())
    return None


def _pid_in(descriptor: int) -> int | None:
    content = os.pread(descriptor, 32, 0).strip()
    return int(content) if content.isdigit() else None
