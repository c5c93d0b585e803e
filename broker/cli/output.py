"""What commands print: JSON, and tables, with lines on a terminal and without them for other programs."""

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str | int | None]]) -> None:
    """Numbers stand at the right; None is empty; there may be no `head`.

    Without a terminal no cell is cut, and columns are two spaces apart.
    """
    columns = range(len(head or rows[0]))
    numeric = [bool(rows) and all(isinstance(row[at], int | None) for row in rows) for at in columns]
    cells = [["" if value is None else printable(str(value)) for value in row] for row in rows]
    if not sys.stdout.isatty():
        lines = [head, *cells] if head else cells
        widths = [max(len(line[at]) for line in lines) for at in columns]
        for line in lines:
            placed = zip(line, widths, numeric, strict=True)
            texts = (cell.rjust(width) if right else cell.ljust(width) for cell, width, right in placed)
            typer.echo("  ".join(texts).rstrip())
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=bool(head))
    for at in columns:
        name = Text(head[at] if head else "")
        table.add_column(name, justify="right" if numeric[at] else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    Console().print(table)


def printable(text: str) -> str:
    """The text on one line: what would control the terminal is shown as an escape sequence of Python."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
