"""Options that give values by name: NAME=TEXT, or NAME:=JSON for a number or a boolean."""

import json
from collections.abc import Sequence
from math import isfinite
from typing import Annotated, Any, Final

import typer

from broker.cli.ending import WRONG_USE, fail

PAIR_HELP: Final = "as NAME=TEXT, or NAME:=JSON for a number or a boolean; may be repeated."

SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="PAIR", help=f"Set an application property, {PAIR_HELP}")
]
UnsetOption = Annotated[
    list[str] | None,
    typer.Option("--unset", metavar="NAME", help="Remove an application property; may be repeated."),
]


def pairs(given: Sequence[str] | None, option: str) -> dict[str, Any]:
    """Return the values by name. Ends the command if one makes no sense."""
    values: dict[str, Any] = {}
    for pair in given or ():
        name, equals, text = pair.partition("=")
        is_json = name.endswith(":")
        name = name.removesuffix(":")
        if not equals or not name:
            fail(f"{option}: {pair!r} is neither NAME=TEXT nor NAME:=JSON", WRONG_USE)
        value: Any = text
        if is_json:
            try:
                value = json.loads(text)
            except ValueError:
                value = {}
            if not isinstance(value, str | int | float | bool | None) or (
                isinstance(value, float) and not isfinite(value)
            ):
                fail(f"{option}: {pair!r} has no simple JSON value after :=", WRONG_USE)
        values[name] = value
    return values
