"""In the path of a broker in one process: when the file FAULT appears, it makes one mistake of the code, named there.

`answers`: the gateway's end of the connection in memory fails to handle them. `turn`: a turn fails before its commit.
"""

import os
import sys
from pathlib import Path
from typing import Any

_FAULT = Path(os.environ["FAULT"])


def _is_said(what: str) -> bool:
    if not _FAULT.exists() or _FAULT.read_text() != what:
        return False
    _FAULT.unlink()
    return True


def _faulty(owner: Any, method: str, what: str) -> None:
    original = getattr(owner, method)

    def call(*arguments: Any) -> Any:
        if _is_said(what):
            raise ValueError(f"a mistake with {what}")
        return original(*arguments)

    setattr(owner, method, call)


if {"broker.cli", "broker.one_process"} & set(sys.orig_argv):  # the first process is a copy of the command's
    from broker.one_process.embedded import LocalConnection
    from broker.worker.worker import Worker

    _faulty(LocalConnection, "take", "answers")
    _faulty(Worker, "_finish_turn", "turn")
