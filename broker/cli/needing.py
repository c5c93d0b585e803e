"""Options that mean nothing where they are given are refused by name. What a variable sets is for all commands."""

import typer


def refuse(context: typer.Context, text: str, *names: str) -> None:
    """End the command if the command line has any of these parameters; `text` says of them why it may not."""
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in names and _is_on_command_line(context, parameter.name)
    ]
    if given:
        raise typer.BadParameter(text, param_hint=", ".join(given))


def _is_on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
