"""How commands that are clients end when they fail: one message on standard error, and an exit code."""

import re
from typing import Final, NoReturn

import typer

from broker.printable import printable_lines

FAILED = 1
WRONG_USE = 2
_FOR_SUPPORT: Final = re.compile(r"( To know more visit \S+)?([\s,]*\bReference:\S+)?[\s,]*\bTrackingId:.*", re.DOTALL)


def fail(text: str, code: int = FAILED) -> NoReturn:
    typer.echo(f"peeklock: {printable_lines(text)}", err=True)
    raise typer.Exit(code)


def told(error: Exception) -> str:
    """Return the text of an error for users: without what is for the service's own support."""
    description, condition = getattr(error, "description", None), getattr(error, "condition", "")
    if not description:
        return str(error)
    text = "".join(each if each.isprintable() else " " for each in _FOR_SUPPORT.sub("", description))
    return f"{text} ({condition})" if condition else text
