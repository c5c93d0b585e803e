"""Runs a command on an AMQP connection: connects, and turns expected failures into messages and exit codes."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from broker.cli.ending import WRONG_USE, fail
from broker.cli.target import parsed, trusted

if TYPE_CHECKING:
    from protocol.client.connection import Connection

CONNECT_SECONDS = 10.0

T = TypeVar("T")


def run(connection_string: str | None, ca: str | None, work: Callable[["Connection"], Awaitable[T]]) -> T:
    """Do `work` on a connection. Ends with a message and an exit code if that fails."""
    import asyncio

    from protocol.client.connection import connect_to
    from protocol.client.errors import ClientError
    from protocol.errors import ProtocolError

    target = parsed(connection_string)
    trust = trusted(ca) if target.tls else None

    async def main() -> T:
        async with await connect_to(target, tls=trust, timeout_s=CONNECT_SECONDS) as connection:
            return await work(connection)

    try:
        return asyncio.run(main())
    except (ClientError, ProtocolError, TimeoutError) as error:
        fail(str(error))
    except UnicodeEncodeError:
        fail("a name has characters that are no text", WRONG_USE)
