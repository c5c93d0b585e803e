"""Lets the C library keep the memory that a process frees, as far as the process uses it again."""

import ctypes
import mmap
from contextlib import suppress
from pathlib import Path
from typing import Final

# A buffer of so much is mapped when it is allocated, and unmapped when it is freed, until a larger one was freed.
MAPPED_BYTES: Final = 8 << 20
MOST_KEPT_BYTES: Final = 32 << 20  # a larger buffer is mapped each time
LOOK_SECONDS: Final = 10.0
MUCH_BYTES: Final = 48 << 20  # that are free for so long
# It leaves the memory as it is if there is nothing to copy; `bytearray(size)` clears it.
_new_bytearray = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyByteArray_FromStringAndSize", ctypes.pythonapi)
)
_STATM: Final = Path("/proc/self/statm")


def give_back_freed() -> None:
    """Give all freed memory back to the system, for once; it takes some tens of milliseconds if there is much."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed() -> None:
    """Let the process keep what it frees: memory that comes back from the kernel is cleared, page by page.

    Turns need buffers of a megabyte, which glibc would map and unmap each time. When it unmaps a larger buffer than
    before, it maps only those that are larger still, up to 32 MiB, and keeps twice as much free: so one buffer is freed
    here, and the buffers of large messages do the same. (A limit set by mallopt would not follow.) At 64 MiB in
    messages of 8 MiB, gateway and worker had 160,000 page faults, and 12,000 since.
    """
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    library.free(library.malloc(MAPPED_BYTES))


def room_for(size_bytes: int) -> memoryview:
    """Return memory with whatever is in it: the caller reads only what it has written.

    A large one comes from the kernel: its pages are cleared already, and if the system has huge pages, it faults one
    of them in place of 512 others.
    """
    if size_bytes <= MOST_KEPT_BYTES:
        return memoryview(_new_bytearray(None, size_bytes))
    mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel or C library without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)


class Freed:
    """Gives back what a burst of large messages has left, when it was free at two looks."""

    def __init__(self) -> None:
        self._look_s = 0.0
        self._was_much = False
        # Resident after the last time. Freed memory counts as free when it was given back, too, so only what has become
        # resident since can be given back.
        self._left_bytes = 0

    def look(self, now_s: float) -> None:
        """Call this some times a second; `now_s` never goes back."""
        if now_s < self._look_s:
            return
        self._look_s = now_s + LOOK_SECONDS
        resident = resident_bytes()
        self._left_bytes = min(self._left_bytes, resident)
        is_much = min(free_bytes(), resident - self._left_bytes) > MUCH_BYTES
        if is_much and self._was_much:
            give_back_freed()
            self._left_bytes, is_much = resident_bytes(), False
        self._was_much = is_much


class _Info(ctypes.Structure):
    """The structure that mallinfo2(3) returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def free_bytes() -> int:
    """What the C library has of freed memory, in the system's pages or not; 0 if it does not tell."""
    info = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33
    if info is None:
        return 0
    info.restype = _Info
    return int(info().fordblks)


def resident_bytes() -> int:
    """0 where the system does not tell."""
    try:
        return int(_STATM.read_bytes().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
