"""The extension in C (`protocol/native`), if it is built and not switched off.

It does for many usual messages at once what Python's code does for each. That code is also the reference: with
PEEKLOCK_PURE=1 in the environment there is no other.
"""

import importlib
import os
from typing import Any, Final


def _load() -> Any:
    if os.environ.get("PEEKLOCK_PURE") == "1":
        return None
    try:
        return importlib.import_module("protocol._native")
    except ModuleNotFoundError:
        return None  # it is not built


extension: Final[Any] = _load()
