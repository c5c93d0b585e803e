"""Whether the commands in files of deploy/ are commands of peeklock: read by the real command line, and not run."""

from collections.abc import Sequence
from typing import Any

import pytest
import typer

from broker.cli.all_commands import app


def options(arguments: Sequence[str]) -> dict[str, Any]:
    """The values of a command's options, as it would get them. Raises the usage error if it does not take these.

    Skips the test if peeklock has no such command yet.
    """
    name, *rest = arguments
    commands: Any = typer.main.get_command(app)
    command = commands.commands.get(name)
    if command is None or (name == "pair" and not any("--listen" in each.opts for each in command.params)):
        pytest.skip(f"`peeklock {name}` is not there yet")
    return dict(command.make_context(name, list(rest)).params)
