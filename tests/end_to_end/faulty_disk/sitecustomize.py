"""In the path of a broker: while the file FAULT exists, calls of its disk wait or fail.

FAULT says which, and how: `pwrite wait`, `fdatasync EIO`. Run the broker without AIO, and for `fdatasync` without
direct writes, so that these are the calls (tests/without_calls.py).
"""

import errno
import os
import time
from pathlib import Path
from typing import Any

_FAULT = Path(os.environ["FAULT"])


def _faulty(name: str) -> Any:
    original = getattr(os, name)

    def call(*arguments: Any) -> Any:
        while _FAULT.exists():
            which, how = _FAULT.read_text().split()
            if which != name:
                break
            if how != "wait":
                raise OSError(getattr(errno, how), os.strerror(getattr(errno, how)))
            time.sleep(0.02)
        return original(*arguments)

    return call


os.pwrite = _faulty("pwrite")
os.fdatasync = _faulty("fdatasync")
