"""Runs a command on the management API: connects, and turns expected failures into messages and exit codes."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import typer

from broker.cli.ending import WRONG_USE, fail
from broker.cli.managing.paths import Path, WrongPath
from broker.cli.target import TRUST_ADVICE, BrokerOptions, http_address, parsed, trusted

if TYPE_CHECKING:
    from broker.administration.client import HttpClient

T = TypeVar("T")


class Connect:
    """What the options say of the connection."""

    def __init__(self, broker: BrokerOptions) -> None:
        """Ends the command if it makes no sense."""
        self.target = parsed(broker.connection_string)
        self.address = http_address(self.target, broker.http_endpoint)
        self._ca = broker.ca

    def run(self, work: Callable[["HttpClient"], Awaitable[T]], subject: str = "") -> T:
        """Do `work`. Ends with a message, about the `subject` if there is one, if that fails."""
        import asyncio

        from broker.administration.client import HttpClient, HttpError, Untrusted

        trust = trusted(self._ca)

        async def main() -> T:
            async with HttpClient(self.address, self.target.credentials, trust) as client:
                return await work(client)

        try:
            return asyncio.run(main())
        except HttpError as error:
            advice = TRUST_ADVICE if isinstance(error, Untrusted) else ""
            fail(f"{subject}: {error}{advice}" if subject else f"{error}{advice}")


def path_of(read: Callable[[str], Path], text: str) -> Path:
    """Ends the command if the path makes no sense."""
    try:
        return read(text)
    except WrongPath as error:
        fail(str(error), WRONG_USE)


def confirm(question: str, is_sure: bool) -> None:
    if not is_sure:
        typer.confirm(question, abort=True, err=True)
