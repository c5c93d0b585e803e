"""Calls a function in a process of its own, because damaged pages that it reads may kill the process."""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from storage.liveness import LOOK_SECONDS, SharedSigns, Silence, is_stopped
from storage.parent import die_with_parent
from storage.store import StoreDamaged, StoreError

P = ParamSpec("P")
T = TypeVar("T")

CRASH_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)  # by these, damaged pages kill a process

_FORK = multiprocessing.get_context("fork")  # a copy of this process, so that nothing is imported again


class ProcessDied(Exception):
    """The process ended before it had a result; the text says how.

    `crashed`: a signal that damaged pages cause has killed it, and not one that somebody sent.
    """

    def __init__(self, code: int) -> None:
        super().__init__(signal.Signals(-code).name if code < 0 else f"exit code {code}")
        self.crashed = -code in CRASH_SIGNALS


class ProcessStalled(Exception):
    """The process gave no sign of life for `seconds`, and was killed."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no progress for {seconds:.0f} seconds")
        self.seconds = seconds


def apart(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `function` returns, which must be picklable, or raise what it raises. Raises ProcessDied.

    The process ends with the caller's, because it may hold locks that it inherited. Call it while there is one thread.
    """
    return _run(lambda pid, answer: None, function, *args, **kwargs)


def apart_in_time(
    signs: SharedSigns, stall_seconds: float, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call, as `apart` does, a function that gives these `signs` of life. Raises ProcessStalled, too."""

    def wait(pid: int, answer: Connection) -> None:
        silence = Silence(stall_seconds)
        silence.heard(time.monotonic())
        while not answer.poll(LOOK_SECONDS):
            now = time.monotonic()
            if signs.take():
                silence.heard(now, signs.waits_for_disk)
            if silence.is_too_long(now, lambda: is_stopped(pid)):
                raise ProcessStalled(silence.seconds)

    signs.clear()
    return _run(wait, function, *args, **kwargs)


def _run(wait: Callable[[int, Connection], None], function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """`wait` is called with the process's id and the connection that its answer comes from."""
    reader, writer = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_answer, args=(os.getpid(), writer, function, args, kwargs))
    process.start()
    writer.close()
    try:
        assert process.pid is not None
        wait(process.pid, reader)
        result, error = reader.recv()
    except EOFError:
        process.join()
        raise ProcessDied(process.exitcode or 0) from None
    except BaseException:  # it hangs, or on Ctrl-C nobody waits for the result any more
        process.kill()
        raise
    finally:
        reader.close()
        process.join()
        process.close()
    if error is not None:
        raise error
    found: T = result
    return found


def read_apart(path: Path, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call, as `apart` does, a function that reads the store at `path`. If its process dies, raise StoreError.

    That is StoreDamaged if the process died of what it read.
    """
    try:
        return apart(function, *args, **kwargs)
    except ProcessDied as error:
        raise (StoreDamaged if error.crashed else StoreError)(
            f"{path}: the process that read it died of {error}"
        ) from error


def _answer(caller: int, writer: Connection, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # it ends this process silently; the caller handles it
    die_with_parent()
    if os.getppid() != caller:  # it died before that
        os._exit(1)
    try:
        writer.send((function(*args, **kwargs), None))
    except Exception as error:
        error.add_note(traceback.format_exc())  # the caller's traceback does not show what happened here
        writer.send((None, error))
