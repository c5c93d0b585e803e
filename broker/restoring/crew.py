"""Processes that do the units of a long work side by side, and tell how far they are."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Final, Self, TypeVar

import pyarrow as pa

from storage.capture.sifting import Tell
from storage.maintenance import MaintenanceError
from storage.parent import die_with_parent

T = TypeVar("T")

LOOK_SECONDS: Final = 0.5  # how often the progress is looked at while nothing ends
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
    """Processes that do units of a restore; if there is only one, units are done in this process. They are started when
    there is a unit for them, and killed at the end of the `with` block.
    """

    def __init__(self, processes: int, advance: Tell) -> None:
        self._count = processes
        self._advance = advance
        self._told = _SPAWN.Value("q", 0) if processes > 1 else None
        self._known = 0  # of what was told
        self._members: dict[Connection, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, process in self._members.items():
            process.kill()
            process.join()
            connection.close()
        self._members.clear()

    def each(self, function: Callable[..., T], units: Iterable[tuple[Any, ...]]) -> Iterator[T]:
        """What `function` returns for the arguments of each unit, in the order in which they are done. It gets a
        function to tell rows to, too, as its first argument. Function, other arguments and results must be picklable.

        Raises what `function` raises, and CrewDied.
        """
        if self._told is None:
            for unit in units:
                yield function(self._advance, *unit)
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
        process = _SPAWN.Process(target=_serve, args=(theirs, self._told, os.getpid()))
        process.start()
        theirs.close()
        self._members[ours] = process
        return ours

    def _results(self, busy: set[Connection]) -> Iterator[Any]:
        while not (ready := wait([*busy], LOOK_SECONDS)):
            self._look()
        self._look()
        for connection in ready:
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

    def _look(self) -> None:
        assert self._told is not None
        told = self._told.value
        if told > self._known:
            self._advance(told - self._known)
            self._known = told


def _serve(connection: Connection, told: Any, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C its parent hears as well
    die_with_parent()
    if os.getppid() != parent:  # it died before that
        return
    pa.set_cpu_count(1)

    def tell(rows: int) -> None:
        with told.get_lock():
            told.value += rows

    while True:
        try:
            function, unit = connection.recv()
        except EOFError:
            return
        try:
            connection.send((function(tell, *unit), None))
        except Exception as error:
            error.add_note(traceback.format_exc())  # the parent's traceback does not show what happened here
            connection.send((None, error))
