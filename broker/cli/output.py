"""What commands print: JSON, and tables, with lines on a terminal and without them for other programs."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker.printable import json_text, printable

if TYPE_CHECKING:
    from rich.table import Table

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


Cells = Sequence[Sequence[str | int | None]]


def print_json(value: Any, *, is_line: bool = False) -> None:
    """Print a value on several lines, or on one, where many values follow each other."""
    typer.echo(json_text(value, indent=None if is_line else 2))
    sys.stdout.flush()


def print_table(head: Sequence[str], rows: Cells) -> None:
    """Print a table. Numbers stand at the right; None is empty; there may be no `head`.

    Without a terminal no cell is cut, and columns are two spaces apart.
    """
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(rich_table(head, rows))
        return
    texts = _texts(rows)
    lines = [head, *texts] if head else texts
    numeric = _numeric(head, rows)
    widths = [max(len(line[at]) for line in lines) for at in range(len(numeric))]
    for line in lines:
        placed = zip(line, widths, numeric, strict=True)
        cells = (cell.rjust(width) if right else cell.ljust(width) for cell, width, right in placed)
        typer.echo("  ".join(cells).rstrip())
    sys.stdout.flush()


def rich_table(head: Sequence[str], rows: Cells) -> "Table":
    """Return the table for a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    numeric = _numeric(head, rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=bool(head))
    for name, right in zip(head or [""] * len(numeric), numeric, strict=True):
        table.add_column(Text(name), justify="right" if right else "left", overflow="fold")
    for row in _texts(rows):
        table.add_row(*map(Text, row))
    return table


def _texts(rows: Cells) -> list[list[str]]:
    return [["" if value is None else printable(str(value)) for value in row] for row in rows]


def _numeric(head: Sequence[str], rows: Cells) -> list[bool]:
    """Return for each column whether it has numbers alone."""
    return [bool(rows) and all(isinstance(row[at], int | None) for row in rows) for at in range(len(head or rows[0]))]
