"""The intervals of a pairing as options of commands: times such as 10s or 1m, read to milliseconds."""

from typing import Annotated

import typer

from broker.cli.quantities import duration_ms

FailoverIntervalOption = Annotated[
    str,
    typer.Option(
        "--failover-interval",
        metavar="TIME",
        help="How long the sends to an entity may fail until they go to the backlog.",
    ),
]
PingIntervalOption = Annotated[
    str,
    typer.Option(
        "--ping-interval", metavar="TIME", help="How often an entity that has failed over is asked whether it is back."
    ),
]


def milliseconds(option: str, text: str) -> int:
    """Ends the command with wrong use if the text is no time."""
    try:
        return duration_ms(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {error}", param_hint=option) from None
