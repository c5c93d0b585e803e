"""Starts the interpreters of child processes, those of the first start before it is known what they are to do.

Loading modules is most of what a start takes. So `peeklock serve` starts one gateway and one worker first of all; they
load while the supervisor reads its settings and opens the stores, and wait for their instructions (`broker.child`).
This module must stay light: it is imported before anything else.
"""

import os
import subprocess
import sys
from pathlib import Path

from broker.settings.variables import VARIABLE_PREFIX

PACKAGES = Path(__file__).resolve().parents[2]  # what children must find, whatever their working directory
FIRST = ("broker.gateway", "broker.worker")

Interpreter = subprocess.Popen[bytes]

_ahead: dict[str, Interpreter] = {}


def start(module: str) -> Interpreter:
    """Run `python -m module`; instructions go to its standard input, one line comes from its standard output."""
    return subprocess.Popen(
        # -P: the working directory is no place for modules.
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(),
        process_group=0,  # a Ctrl-C on the terminal is for the supervisor, which ends children in order
    )


def _environment() -> dict[str, str]:
    """A child's: without the broker's settings, which it gets from its supervisor and which may hold keys."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLE_PREFIX)}
    path = own.get("PYTHONPATH")
    return own | {"PYTHONPATH": f"{PACKAGES}{os.pathsep}{path}" if path else str(PACKAGES)}


def start_ahead() -> None:
    """Start one interpreter for each module of FIRST, for `take` to find."""
    for module in FIRST:
        _ahead[module] = start(module)


def take(module: str) -> Interpreter:
    """The interpreter that was started ahead for `module`, else a new one."""
    return _ahead.pop(module, None) or start(module)


def discard_ahead() -> None:
    """End those that nobody took."""
    while _ahead:
        _, process = _ahead.popitem()
        process.kill()
        process.communicate()
