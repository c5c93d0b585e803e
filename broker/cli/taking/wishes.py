"""The options that say which messages of an entity are meant."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from broker.cli.taking.selection import Wish

WhereOption = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="SQL",
        help="Only messages for which this condition of rules is true, such as \"level > 3 AND sys.Label LIKE 'a%'\".",
    ),
]
SessionOption = Annotated[
    str | None, typer.Option("--session", metavar="ID", help="Only messages of this session; by default of all.")
]
CountOption = Annotated[
    int | None,
    typer.Option("--count", min=1, metavar="N", help="At most N messages, the oldest; by default all there are now."),
]


def wish_of(count: int | None, where: str | None, session: str | None) -> "Wish":
    """Ends the command if the condition makes no sense."""
    from broker.cli.taking.filtering import condition
    from broker.cli.taking.selection import Wish

    return Wish(count, None if where is None else condition(where), session)
