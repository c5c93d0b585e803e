"""Processes that do the units of a long work side by side."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import pyarrow as pa

from storage.maintenance import MaintenanceError
from storage.parent import die_with_parent

T = TypeVar("T")

_SPAWN: Final = multiprocessing.get_context("spawn")  # pyarrow has threads, which a copy of this process had not


class CrewDied(MaintenanceError):
    """A process ended before it had done its unit."""

    def __init__(self, code: int | None) -> None:
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        super().__init__(
            f"a process ended {how}; if it was killed for want of memory, choose fewer with --processes and run the "
            "command again"
        )


class Crew:
    """With one process, units are done in this one. Processes are started when there is a unit for them, and killed at
    the end of the `with` block."""

    def __init__(self, processes: int) -> None:
        self._count = processes
        self._members: dict[Connection, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for connection, process in self._members.items():
            process.kill()
            process.join()
            connection.close()
        self._members.clear()

    def each(self, function: Callable[..., T], units: Iterable[tuple[Any, ...]]) -> Iterator[T]:
        """What `function` returns for the arguments of each unit, in the order in which they are done. Function,
        arguments and results must be picklable. Raises what `function` raises, and CrewDied."""
        if self._count == 1:
            for unit in units:
                yield function(*unit)
            return
        waiting = iter(units)
        busy: set[Connection] = set()
        for unit in waiting:
            idle = next((each for each in self._members if each not in busy), None)
            if idle is None:
                idle = self._another()
            idle.send((function, unit))
            busy.add(idle)
            if len(busy) == self._count:
                yield from self._results(busy)
        while busy:
            yield from self._results(busy)

    def _another(self) -> Connection:
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        process.start()
        theirs.close()
        self._members[ours] = process
        return ours

    def _results(self, busy: set[Connection]) -> Iterator[Any]:
        for connection in wait([*busy]):
            assert isinstance(connection, Connection)
            try:
                result, error = connection.recv()
            except (EOFError, ConnectionResetError):
                process = self._members[connection]
                process.join()
                raise CrewDied(process.exitcode) from None
            busy.discard(connection)
            if error is not None:
                raise error
            yield result


def _serve(connection: Connection, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C its parent hears as well
    die_with_parent()
    if os.getppid() != parent:  # it died before that
        return
    pa.set_cpu_count(1)
    while True:
        try:
            function, unit = connection.recv()
        except EOFError:
            return
        try:
            connection.send((function(*unit), None))
        except Exception as error:
            error.add_note(traceback.format_exc())  # the parent's traceback does not show what happened here
            connection.send((None, error))
