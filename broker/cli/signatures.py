"""Commands whose options are in tables: typer makes options of a function's signature."""

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature, signature
from typing import Any


def option(name: str, annotation: Any) -> Parameter:
    """Describe an option; without it the command gets None."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def standing_for(
    command: Callable[..., None], run: Callable[..., None], value: str, options: Sequence[Parameter]
) -> Callable[..., None]:
    """Let typer call `run`, with the parameters of the command, but with these options in place of `value`.

    `run` makes `value` of them and calls the command, whose name and help typer shows.
    """
    own = [each for each in signature(command).parameters.values() if each.name != value]
    run.__signature__ = Signature([*own, *options])  # type: ignore[attr-defined]  # typer's way to read a signature
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run
