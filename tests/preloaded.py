"""Starts our commands as copies of one process that has loaded their modules.

Loading takes most of the CPU of a start, and the tests start hundreds of brokers. A copy is a process of its own like
any other: it runs `broker.cli` from its first line, with its own arguments, environment, session and files. What it
does not do is to read modules. With PEEKLOCK_TEST_STARTS=whole, as `make test-all` has it, and wherever the
environment decides how an interpreter starts, it is not used.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from tests.caller import WHOLE_STARTS

MODULE: Final = "broker.cli"
LOADED: Final = (
    "broker.cli.commands",
    "broker.cli.all_commands",
    "broker.supervisor.supervisor",
    "broker.gateway.gateway",
    "broker.observer.observer",
    "broker.worker.process",
    "broker.journal.process",
)
REPOSITORY: Final = Path(__file__).resolve().parents[1]
OF_INTERPRETERS: Final = ("PYTHON", "LD_", "MALLOC_", "COVERAGE", "COV_", "PEEKLOCK_PURE")
"""Variables that begin so are read when an interpreter or a module is loaded."""
REQUEST_BYTES: Final = 1 << 20
PR_SET_PDEATHSIG: Final = 1


class Copy:
    """What the tests use of `subprocess.Popen`, for a process that the one with the modules has for a child."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended  # a pipe that will have the exit code

    def __del__(self) -> None:
        os.close(self._ended)

    def poll(self) -> int | None:
        return self._code(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for the signal that killed it. Raises subprocess.TimeoutExpired."""
        code = self._code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def _code(self, seconds: float | None) -> int | None:
        if self.returncode is None:
            waiting = select.poll()  # select() takes no descriptor above 1023, and some tests have thousands
            waiting.register(self._ended)
            if waiting.poll(None if seconds is None else seconds * 1000):
                self.returncode = int(os.read(self._ended, 16) or -signal.SIGKILL)  # it ends with its parent
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Loaded:
    """The process with the modules. It ends with this one, and its copies with it."""

    def __init__(self) -> None:
        self.pid = os.getpid()  # of the tests: a fork of them has no use for this
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.preloaded", str(theirs.fileno())],
                cwd=REPOSITORY,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C on the terminal is for the tests, which end their brokers
            )
        atexit.register(self._end)

    def start(self, command: Sequence[str], log: IO[bytes]) -> Copy:
        ended, tell = os.pipe()
        try:
            request = json.dumps({"command": command, "environment": dict(os.environ)}).encode()
            with self._lock:
                socket.send_fds(self._socket, [request], [log.fileno(), tell])
                answer = self._socket.recv(16)
            assert answer, "the process with the modules has ended"
        finally:
            os.close(tell)
        return Copy(int(answer), ended)

    def _end(self) -> None:
        if os.getpid() == self.pid:
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever else has it
            self._socket.close()
            self._process.wait()


def _of_interpreters(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(OF_INTERPRETERS)}


_loaded: _Loaded | None = None
_environment = _of_interpreters(os.environ)


def start(command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes] | Copy:
    """Start a command as the leader of a session, without input; `log` gets what it writes."""
    global _loaded
    is_ours = [*command[:3]] == [sys.executable, "-m", MODULE]
    if WHOLE_STARTS or not is_ours or _of_interpreters(os.environ) != _environment:
        return subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    if _loaded is None or _loaded.pid != os.getpid():
        _loaded = _Loaded()
    return _loaded.start(command, log)


# --- the process with the modules -------------------------------------------------------------------------------------


def serve(requests: socket.socket) -> tuple[dict[str, Any], int] | None:
    """Make copies until the tests have ended. Returns in a copy: what it is to run, and its log; None at the end."""
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    tell: dict[int, int] = {}  # copy's pid -> where to tell its end
    while True:
        for key, _ in selector.select():
            if key.fileobj is requests:
                message, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 2)
                if not message:
                    return None
                log, ended = descriptors
                pid = os.fork()
                if not pid:
                    for descriptor in (ended, *tell.values(), *(each.fd for each in selector.get_map().values())):
                        os.close(descriptor)
                    selector.close()
                    requests.detach()
                    return json.loads(message), log
                os.close(log)
                tell[pid] = ended
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                requests.send(b"%d" % pid)
            else:
                _, status = os.waitpid(key.data, 0)
                selector.unregister(key.fd)
                os.close(key.fd)
                ended = tell.pop(key.data)
                with suppress(BrokenPipeError):  # nobody waits for it any more
                    os.write(ended, b"%d" % os.waitstatus_to_exitcode(status))
                os.close(ended)


def become(request: dict[str, Any], log: int) -> None:
    """Be the command, as if it had been started."""
    from setproctitle import setproctitle

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, standard)
    os.close(nothing)
    os.close(log)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    command = request["command"]
    setproctitle(" ".join(command))  # first: it writes over what /proc shows of the variables, too
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["-m", *command[3:]]
    gc.enable()
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


def main() -> None:
    gc.disable()
    for module in LOADED:
        importlib.import_module(module)
    gc.freeze()
    found = serve(socket.socket(fileno=int(sys.argv[1])))
    if found is not None:
        become(*found)


if __name__ == "__main__":
    main()
