"""How commands that are clients end when they fail: one message on standard error, and an exit code."""

from typing import NoReturn

import typer

FAILED = 1
WRONG_USE = 2


def fail(text: str, code: int = FAILED) -> NoReturn:
    typer.echo(f"peeklock: {text}", err=True)
    raise typer.Exit(code)
