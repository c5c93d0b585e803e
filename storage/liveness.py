"""Signs of life, from a process to the one that replaces it when it hangs.

A sign is given at progress: a record was read, a piece was written, a module is loaded. So a process that stands still
gives none, whatever its timers and its other threads do. While it waits for the disk it can give none either, and a
slow disk is no hang. So it says so before, and then its silence counts only while it is stopped.
"""

import mmap
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Final

LOOK_SECONDS: Final = 1.0  # between two looks of who watches
STALL_SECONDS: Final = 30.0  # the default of the settings
PIPE_SECONDS: Final = 0.1  # between two signs in a pipe
BEAT: Final = b"\n"
ON_DISK: Final = b'"waits for the disk"\n'
SHARED_BYTES: Final = 16


class Signs:
    """The side that gives signs; these reach nobody."""

    def beat(self) -> None:
        """There was progress. This may be called very often."""
        self._tell(False)

    @contextmanager
    def waiting_for_disk(self) -> Iterator[None]:
        """What is done within is nothing but waiting for the disk. It is not nested."""
        self._tell(True)
        try:
            yield
        finally:
            self._tell(False)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Each module whose loading begins within is a sign."""
        finder = _Finder(self.beat)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)

    def _tell(self, waits_for_disk: bool) -> None: ...


SILENT: Final = Signs()


class _Finder(MetaPathFinder):
    """Finds no module, and calls `beat` when one is looked for."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        self._beat()


class PipeSigns(Signs):
    """Signs as lines in a pipe, by `write`: at most one in PIPE_SECONDS, but for those that tell of the disk."""

    def __init__(self, write: Callable[[bytes], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._next = 0.0
        self._waits_for_disk = False

    def _tell(self, waits_for_disk: bool) -> None:
        now = self._clock()
        if now < self._next and waits_for_disk == self._waits_for_disk:
            return
        self._next = now + PIPE_SECONDS
        self._waits_for_disk = waits_for_disk
        self._write(ON_DISK if waits_for_disk else BEAT)


class SharedSigns(Signs):
    """Signs in memory that two processes share. Each of them has such an object; one gives signs, and one takes them.

    `descriptor` is that of a file of SHARED_BYTES; without one, the memory is shared with forked processes.
    """

    _LAYOUT = struct.Struct("=Q?")  # the number of signs, and whether the last one says that it waits for the disk

    def __init__(self, descriptor: int = -1) -> None:
        self._memory = mmap.mmap(descriptor, SHARED_BYTES)
        self._count = 0  # of signs that were given, or taken
        self.waits_for_disk = False  # by the sign that was taken last

    def _tell(self, waits_for_disk: bool) -> None:
        self._count += 1
        self._LAYOUT.pack_into(self._memory, 0, self._count, waits_for_disk)

    def take(self) -> bool:
        """True if there was a sign since the last call."""
        before = self._count
        self._count, self.waits_for_disk = self._LAYOUT.unpack_from(self._memory)
        return self._count != before

    def clear(self) -> None:
        """Begin anew: from now on another process gives the signs."""
        self._count, self.waits_for_disk = 0, False
        self._LAYOUT.pack_into(self._memory, 0, 0, False)

    def close(self) -> None:
        self._memory.close()


class Silence:
    """The silence of a watched process: how long it has given no sign. Times are seconds of one monotonic clock.

    Time in which nobody looked does not count, because the watched process may not have run then either.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._looked_at = 0.0
        self._waits_for_disk = False
        self.seconds = 0.0
        self.disk_seconds = 0.0  # that it has waited for the disk since its last sign

    def heard(self, now: float, waits_for_disk: bool = False) -> None:
        """It has given a sign, or was started."""
        self._looked_at = now
        self._waits_for_disk = waits_for_disk
        self.seconds = self.disk_seconds = 0.0

    def is_too_long(self, now: float, is_stopped: Callable[[], bool]) -> bool:
        """Look now, as is to be done every LOOK_SECONDS. `is_stopped` is asked while the process waits for the disk."""
        passed, self._looked_at = min(now - self._looked_at, LOOK_SECONDS), now
        if self._waits_for_disk and not is_stopped():
            self.disk_seconds += passed
        else:
            self.seconds += passed
        return self.seconds >= self._limit_seconds

    @property
    def disk_is_slow(self) -> bool:
        """It has waited for the disk for as long as a silence may be."""
        return self.disk_seconds >= self._limit_seconds


def is_stopped(pid: int) -> bool:
    """True if a signal, or who traces the process, has stopped it. False where nobody can tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rfind(b")") + 2 :][:1] in (b"T", b"t")  # the name in front of it may have any byte
