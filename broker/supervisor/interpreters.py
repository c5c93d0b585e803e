"""Starts the Python interpreters of child processes, the first ones even before the settings are read.

Loading modules takes most of the time of a start. So `peeklock serve` first starts one gateway and one worker, or one
process that is both. They load their modules while the supervisor reads its settings and opens the stores, and then
wait for their instructions (`broker.child`). This module must stay light: it is imported before anything else.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from broker.settings.variables import PURE_VARIABLE, VARIABLE_PREFIX

PACKAGES = Path(__file__).resolve().parents[2]  # children must find this, whatever their working directory is
ONE_PROCESS = ("broker.one_process",)
SEPARATE = ("broker.gateway", "broker.worker")

Interpreter = subprocess.Popen[bytes]

_ahead: dict[str, Interpreter] = {}


def start(module: str) -> Interpreter:
    """Run `python -m module`; instructions go to its standard input, one line comes from its standard output."""
    return subprocess.Popen(
        # -P: do not import modules from the working directory.
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(),
        process_group=0,  # Ctrl-C on the terminal goes only to the supervisor, which ends children in order
    )


def _environment() -> dict[str, str]:
    """The environment of a child, without settings: it gets these from its supervisor, and they may have keys."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(VARIABLE_PREFIX) or name == PURE_VARIABLE
    }
    path = own.get("PYTHONPATH")
    return own | {"PYTHONPATH": f"{PACKAGES}{os.pathsep}{path}" if path else str(PACKAGES)}


def end_at_sigterm() -> None:
    """End this process by an exception at SIGTERM. Without a handler the first process of a container would go on: the
    kernel gives it no signal that it does not handle."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def start_ahead(modules: Sequence[str]) -> None:
    """Start one interpreter for each of these modules, for `take` to find."""
    end_at_sigterm()
    for module in modules:
        _ahead[module] = start(module)


def take(module: str) -> Interpreter:
    """The interpreter that `start_ahead` started for `module`, else a new one."""
    return _ahead.pop(module, None) or start(module)


def discard_ahead() -> None:
    """End the interpreters that `take` did not return."""
    while _ahead:
        _, process = _ahead.popitem()
        process.kill()
        process.communicate()
