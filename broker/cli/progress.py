"""A progress bar for long work: on standard error, and on a terminal only."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Advance]:
    """Show how many of `total` are done while the block runs; it calls what it is given with how many more are.

    If `total` is None, the bar only shows that there is work.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description}", markup=False), BarColumn()]
    if total is not None:
        columns += [MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.update(task, advance=count)
