"""Calls a function in a process of its own, because what it reads may kill the process: damaged pages do."""

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_FORK = multiprocessing.get_context("fork")  # a copy of this process: nothing is imported again


class ProcessDied(Exception):
    """The process ended before it had a result; the text says how."""


def apart(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """What `function` returns, which must be picklable, or what it raises. Raises ProcessDied."""
    reader, writer = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_answer, args=(writer, function, args, kwargs))
    process.start()
    writer.close()
    try:
        result, error = reader.recv()
    except EOFError:
        result, error = None, None
        process.join()
        code = process.exitcode or 0
        raise ProcessDied(signal.Signals(-code).name if code < 0 else f"exit code {code}") from None
    finally:
        reader.close()
        process.join()
        process.close()
    if error is not None:
        raise error
    found: T = result
    return found


def _answer(writer: Connection, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    try:
        writer.send((function(*args, **kwargs), None))
    except Exception as error:
        writer.send((None, error))
