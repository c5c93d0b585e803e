"""Reaches the two namespaces of a pairing, and tells what nobody can wait for from what may be back later."""

from ssl import SSLCertVerificationError
from typing import Final

from broker.administration.client import Unreachable, Untrusted
from broker.pairing.namespaces import Namespace
from broker.pairing.options import InvalidPairing
from protocol.client.connection import Connection, connect_to
from protocol.client.errors import AuthenticationFailed, ClientError

CONNECT_SECONDS: Final = 10.0


class SecondaryAway(InvalidPairing):
    """Nobody answers there now; it may be back later."""


async def connect_secondary(secondary: Namespace, timeout_s: float = CONNECT_SECONDS) -> Connection:
    """Connect to the secondary.

    Raises InvalidPairing if it refuses the key or is not trusted, SecondaryAway if it cannot be reached.
    """
    try:
        return await connect_to(secondary.target, tls=secondary.trust, timeout_s=timeout_s)
    except AuthenticationFailed as error:
        raise InvalidPairing(f"the secondary refuses the key: {error}") from error
    except (ClientError, TimeoutError) as error:
        if isinstance(error.__cause__, SSLCertVerificationError):
            raise InvalidPairing(f"the secondary is not trusted: {error}") from error
        raise SecondaryAway(f"the secondary cannot be reached: {error}") from error


async def reason_primary_is_away(primary: Namespace, timeout_s: float = CONNECT_SECONDS) -> str | None:
    """None if it takes the key, or why it cannot be asked. Raises InvalidPairing if it refuses the key."""
    try:
        async with await connect_to(primary.target, tls=primary.trust, timeout_s=timeout_s) as connection:
            await connection.authorize(primary.target.entity_path)
    except AuthenticationFailed as error:
        raise InvalidPairing(f"the primary refuses the key: {error}") from error
    except (ClientError, TimeoutError) as error:
        if isinstance(error.__cause__, SSLCertVerificationError):
            raise InvalidPairing(f"the primary is not trusted: {error}") from error
        return str(error) or "it does not answer"
    return None


def is_away(error: Exception | None) -> bool:
    """The management API has not answered, which is what the error is about, or its cause."""
    causes = (error, error.__cause__ if error is not None else None)
    return any(isinstance(each, Unreachable) and not isinstance(each, Untrusted) for each in causes)
