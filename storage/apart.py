"""Calls a function in a process of its own, because what it reads may kill the process: damaged pages do."""

import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

CRASH_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)  # what LMDB dies of on damaged pages

_FORK = multiprocessing.get_context("fork")  # a copy of this process: nothing is imported again
_PR_SET_PDEATHSIG = 1  # prctl(2)


class ProcessDied(Exception):
    """The process ended before it had a result; the text says how.

    `crashed`: by a signal that damaged pages of a store bring about, and not by somebody's.
    """

    def __init__(self, code: int) -> None:
        super().__init__(signal.Signals(-code).name if code < 0 else f"exit code {code}")
        self.crashed = -code in CRASH_SIGNALS


def apart(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """What `function` returns, which must be picklable, or what it raises. Raises ProcessDied.

    The process ends with the caller's: it may hold locks that it has from there. Call it while there is one thread.
    """
    reader, writer = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_answer, args=(os.getpid(), writer, function, args, kwargs))
    process.start()
    writer.close()
    try:
        result, error = reader.recv()
    except EOFError:
        process.join()
        raise ProcessDied(process.exitcode or 0) from None
    except BaseException:  # Ctrl-C: nobody waits for the result any more
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


def _answer(caller: int, writer: Connection, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C ends it without a word; the caller has one
    if hasattr(libc := ctypes.CDLL(None), "prctl"):  # Linux
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != caller:  # it died before prctl was called
        os._exit(1)
    try:
        writer.send((function(*args, **kwargs), None))
    except Exception as error:
        error.add_note(traceback.format_exc())  # the caller's own says nothing of what happened here
        writer.send((None, error))
