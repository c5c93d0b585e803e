"""Which partition a worker is at work on, in a small file: its supervisor reads there what the worker died of.

Damaged pages of a store can kill the process that reads them, by a signal that leaves it no last word.
"""

import mmap
from pathlib import Path
from typing import Final

from storage.data_dir import RUN

_NONE: Final = 0xFFFF_FFFF
_BYTES: Final = 4


def touched_file(worker: int) -> str:
    """Its path in the data directory."""
    return f"{RUN}/worker-{worker}.partition"


class TouchedPartition:
    """The file at `path`, made anew."""

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
    """What the worker whose file this is was at work on last, if anything."""
    try:
        found = int.from_bytes(path.read_bytes(), "big")
    except OSError:
        return None
    return None if found == _NONE else found
