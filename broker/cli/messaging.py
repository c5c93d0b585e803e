"""Runs a command on an AMQP connection: connects, and turns expected failures into messages and exit codes."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from broker.cli.ending import WRONG_USE, fail, told
from broker.cli.target import TRUST_ADVICE, BrokerOptions, parsed, trusted

if TYPE_CHECKING:
    from protocol.client.connection import Connection

CONNECT_SECONDS = 10.0

T = TypeVar("T")


def run(broker: BrokerOptions, work: Callable[["Connection"], Awaitable[T]], of: str = "") -> T:
    """Do `work` on a connection. Ends with a message and an exit code if that fails.

    `of` is the queue or subscription that it is about.
    """
    import asyncio

    from protocol.client.connection import connect_to
    from protocol.client.errors import ClientError
    from protocol.errors import ProtocolError

    target = parsed(broker.connection_string)
    trust = trusted(broker.ca) if target.tls else None

    async def main() -> T:
        async with await connect_to(target, tls=trust, timeout_s=CONNECT_SECONDS) as connection:
            return await work(connection)

    try:
        return asyncio.run(main())
    except (ClientError, ProtocolError, TimeoutError) as error:
        fail(told(error) + _advice(error, of))
    except UnicodeEncodeError:
        fail("a name has characters that are no text", WRONG_USE)


def _advice(error: Exception, of: str) -> str:
    import ssl

    from protocol.conditions import NOT_FOUND

    if isinstance(error.__cause__, ssl.SSLCertVerificationError):
        return TRUST_ADVICE
    # The commands for management know a subscription as TOPIC/NAME, too.
    if getattr(error, "condition", "") == NOT_FOUND and "/" in of and "/subscriptions/" not in of.lower():
        return "; if it is a subscription, its name here is TOPIC/subscriptions/NAME"
    return ""
