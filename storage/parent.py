"""Ties the life of a process to that of its parent."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends; does nothing except on Linux.

    The parent may have ended before: the caller then has another one (`os.getppid`), and nobody kills it.
    """
    if hasattr(libc := ctypes.CDLL(None), "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
