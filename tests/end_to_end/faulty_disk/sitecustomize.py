"""In the path of a broker: while the file FAULT exists, writes at offsets wait or fail, as the file says."""

import errno
import os
import time
from pathlib import Path
from typing import Any

_FAULT = Path(os.environ["FAULT"])
_write: Any = os.pwrite


def _pwrite(descriptor: int, data: Any, at: int) -> Any:
    while _FAULT.exists():
        name = _FAULT.read_text()
        if name != "wait":
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)))
        time.sleep(0.02)
    return _write(descriptor, data, at)


os.pwrite = _pwrite
