"""Starts the Python interpreters of child processes, the first ones even before the settings are read.

Loading modules takes most of the time of a start. So a supervisor loads those that all processes need, and then makes
copies of its process for the gateways and the workers, or one for the process that is both. They load the rest
while the supervisor reads its settings and opens the stores, and then wait for their instructions (`broker.child`).
All other processes, such as those that are started again, are interpreters of their own: by then the supervisor has
files, keys and signal handlers which no copy may have. This module must stay light: it is imported before anything
else.
"""

import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn

from broker.settings.placement import Guess
from broker.settings.variables import PURE_VARIABLE, VARIABLE_PREFIX

PACKAGES = Path(__file__).resolve().parents[2]  # children must find this, whatever their working directory is
MOST_OF_A_KIND = 16  # more are started when their number is known to be allowed
SHARED = ("broker.child", "broker.logging")  # what every process needs, the supervisor, too


class Copy:
    """A copy of this process, with the part of `subprocess.Popen` that the supervisor uses.

    As that of any process, its id stays its own until `poll` or `wait` has told its end.
    """

    def __init__(self, pid: int, stdin: BinaryIO, stdout: BinaryIO) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._code: int | None = None

    def close(self) -> None:
        self.stdin.close()
        self.stdout.close()

    def poll(self) -> int | None:
        """The exit code, negative for the signal that killed it; None while it runs."""
        return self._take_code(os.WNOHANG)

    def wait(self) -> int:
        code = self._take_code(0)
        assert code is not None
        return code

    def _take_code(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Interpreter = subprocess.Popen[bytes] | Copy

_ahead: list[tuple[str, Copy]] = []  # their modules, in the order of `start_ahead`


def modules(command: str, guess: Guess) -> list[str]:
    """Return the modules of the processes that a command (`serve`, `worker` or `gateway`) is likely to need."""
    if command == "serve" and guess.is_one_process:
        return ["broker.one_process"]
    observer = ["broker.observer"]
    if command == "worker":
        return ["broker.worker", *observer]
    gateways = ["broker.gateway"] * min(guess.gateways, MOST_OF_A_KIND)
    workers = ["broker.worker"] * min(guess.workers, MOST_OF_A_KIND) if command == "serve" else []
    return [*gateways, *(observer if len(gateways) > 1 else []), *workers]


def start(module: str) -> Interpreter:
    """Run `python -m module`; instructions go to its standard input, one line comes from its standard output."""
    return subprocess.Popen(
        _command(module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(),
        process_group=0,  # Ctrl-C on the terminal goes only to the supervisor, which ends children in order
    )


def _command(module: str) -> list[str]:
    return [sys.executable, "-P", "-m", module]  # -P: do not import modules from the working directory


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
    """Start one process for each of these modules, for `take` to find.

    Call this in a process with one thread, before anything is opened. A copy returns from here only by SystemExit, or
    by the exception that ends it. The collector of cycles is to be off: a look at the modules would write to the memory
    that the copies share.
    """
    # Not by an exception: Python drops one that is raised in a weak reference's callback, and each import has some.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    _open_standard_descriptors()
    for module in SHARED:
        importlib.import_module(module)
    gc.freeze()
    for module in modules:
        _ahead.append((module, _copy(module)))


def _open_standard_descriptors() -> None:
    """A pipe must not get one of their numbers because the caller has closed it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _copy(module: str) -> Copy:
    instructions, stdin = os.pipe()
    stdout, answer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(stdin)
        os.close(stdout)
        _be(module, instructions, answer)
    os.close(instructions)
    os.close(answer)
    return Copy(pid, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"))


def _be(module: str, instructions: int, answer: int) -> NoReturn:
    """Become what `start` would have started."""
    from setproctitle import setproctitle

    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while _ahead:
        _, other = _ahead.pop()
        other.close()
    for descriptor, standard in ((instructions, 0), (answer, 1)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    # This writes over what /proc shows of the variables, too; it must find them as they were.
    setproctitle(" ".join(_command(module)))
    environment = _environment()
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [str(PACKAGES), *filter(os.path.isabs, sys.path)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def take(module: str) -> Interpreter:
    """A process that `start_ahead` started for `module`, else a new one."""
    for place, (found, process) in enumerate(_ahead):
        if found == module:
            del _ahead[place]
            return process
    return start(module)


def discard_ahead() -> None:
    """End the processes that `take` did not return."""
    while _ahead:
        _, process = _ahead.pop()
        process.kill()
        process.close()
        process.wait()
