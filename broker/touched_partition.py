"""A small file that names the partition a worker is working on.

A damaged page of a store can kill the process that reads it, by a signal that gives the process no chance to report.
Then the supervisor reads this file to learn whose store the worker was reading.
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
    """Writes the file at `path`, which is created again."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(_NONE.to_bytes(_BYTES, "big"))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _BYTES)
        self._last = _NONE

    def set(self, partition: int) -> None:
        if partition != self._last:
            self._last = partition
            self._page[:] = partition.to_bytes(_BYTES, "big")


def touched_partition(path: Path) -> int | None:
    """The partition that the worker worked on last; None if it had not begun."""
    try:
        found = int.from_bytes(path.read_bytes(), "big")
    except OSError:
        return None
    return None if found == _NONE else found
