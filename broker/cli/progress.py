"""Progress of long work, on standard error: a bar on a terminal, and lines in logs if that is wanted."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_SECONDS: Final = 30.0


class Bar:
    """Shows how many are done, and of how many if that is known. Without a terminal it shows nothing."""

    def __init__(self, shown: "Progress | None" = None) -> None:
        self._shown = shown  # with one task

    @property
    def is_shown(self) -> bool:
        return self._shown is not None

    def advance(self, count: int = 1) -> None:
        """Say that so many more are done."""
        if self._shown is not None:
            [task] = self._shown.tasks
            self._shown.update(task.id, advance=count)

    def expect(self, count: int) -> None:
        """Say that so many more are to be done."""
        if self._shown is not None:
            [task] = self._shown.tasks
            known = task.completed if task.total is None else task.total
            self._shown.update(task.id, total=known + count)


class Lines(Bar):
    """Writes a line each LINE_SECONDS."""

    def __init__(
        self,
        what: str,
        total: int | None = None,
        write: Callable[[str], object] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._what = what
        self._total = total
        self._write = write or sys.stderr.write
        self._monotonic = monotonic
        self._begun = self._said = monotonic()
        self._done = 0

    def advance(self, count: int = 1) -> None:
        self._done += count
        now = self._monotonic()
        if now - self._said >= LINE_SECONDS:
            self._said = now
            self._write(f"{self._what}: {self._done}{self._rest(now - self._begun)}\n")

    def expect(self, count: int) -> None:
        self._total = count + (self._done if self._total is None else self._total)

    def _rest(self, seconds: float) -> str:
        if self._total is None:
            return ""
        left = seconds * max(0, self._total - self._done) / max(1, self._done)
        shown = f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min"
        return f" of {self._total}, about {shown} left"


@contextmanager
def progress(what: str, total: int | None = None, *, in_logs: bool = False) -> Iterator[Bar]:
    """Show progress while the block runs. `in_logs`: also if standard error is no terminal."""
    if not sys.stderr.isatty():
        yield Lines(what, total) if in_logs else Bar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(what, total=total)
        yield Bar(bar)
