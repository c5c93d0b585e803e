"""Lets the C library keep the memory that a process frees, up to a limit."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
KEPT_BYTES = 16 << 20  # at the end of the heap
MAPPED_BYTES = 8 << 20  # an allocation of so much is given back when it is freed


def give_back_freed() -> None:
    """Give all freed memory back to the system, for once; it takes some tens of milliseconds if there is much."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed() -> None:
    """Let the process keep what it frees: memory that comes back from the kernel is cleared, page by page.

    Turns need buffers of a megabyte, which glibc would map and unmap each time. Does nothing with other libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
