"""Names the partition that a process is working on, for its supervisor: in a small file, or in shared memory.

A damaged page of a store can kill the process that reads it, by a signal that gives the process no chance to report.
Then the supervisor learns here whose store the process was reading.
"""

import mmap
from pathlib import Path
from typing import Final

from storage.data_dir import RUN

_NONE: Final = 0xFFFF_FFFF
_BYTES: Final = 4


def touched_file(worker: int) -> str:
    """The path of the worker's file in the data directory."""
    return f"{RUN}/worker-{worker}.partition"


class TouchedPartition:
    """Writes the file at `path`; without `path`, memory shared with forked processes.

    An existing file is written in place, so that a full disk has room for it. Raises OSError.
    """

    def __init__(self, path: Path | None = None) -> None:
        none = _NONE.to_bytes(_BYTES, "big")
        if path is None:
            self._page = mmap.mmap(-1, _BYTES)
            self._page[:] = none
        else:
            path.touch()
            with path.open("r+b") as file:
                file.write(none)
                file.flush()
                self._page = mmap.mmap(file.fileno(), _BYTES)
        self._last = _NONE

    def set(self, partition: int) -> None:
        if partition != self._last:
            self._last = partition
            self._page[:] = partition.to_bytes(_BYTES, "big")

    def get(self) -> int | None:
        """The partition that any of the sharing processes set last; None if none was set."""
        return _partition(self._page[:])


def touched_partition(path: Path) -> int | None:
    """The partition that the process worked on last; None if it had not begun."""
    try:
        return _partition(path.read_bytes())
    except OSError:
        return None


def _partition(page: bytes) -> int | None:
    found = int.from_bytes(page, "big")
    return None if found == _NONE else found
