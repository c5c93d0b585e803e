"""A progress bar for long work: on standard error, and on a terminal only."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class Bar:
    """Shows how many are done, and of how many if that is known. Without a terminal it shows nothing."""

    def __init__(self, shown: "Progress | None" = None) -> None:
        self._shown = shown  # with one task

    @property
    def is_shown(self) -> bool:
        return self._shown is not None

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        if self._shown is not None:
            [task] = self._shown.tasks
            self._shown.update(task.id, advance=count)

    def expect(self, count: int) -> None:
        """So many more are to be done."""
        if self._shown is not None:
            [task] = self._shown.tasks
            known = task.completed if task.total is None else task.total
            self._shown.update(task.id, total=known + count)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Bar]:
    """Show progress while the block runs."""
    if not sys.stderr.isatty():
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(what, total=total)
        yield Bar(bar)
