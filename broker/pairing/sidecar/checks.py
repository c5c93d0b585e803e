"""Makes the backlog queues that are missing, and looks whether a sidecar may use them."""

from typing import Final

from broker.administration.client import HttpError
from broker.logging import get_logger
from broker.pairing.backlog import backlog_queues
from broker.pairing.namespaces import PRIMARY_SECONDS, Namespace
from broker.pairing.options import InvalidPairing
from broker.pairing.provisioning import check_they_differ, create_missing
from broker.pairing.reaching import SecondaryAway, connect_secondary, is_away
from protocol import conditions
from protocol.client.connection import Connection
from protocol.client.errors import AuthenticationFailed, ClientError, ConnectionLost, LinkDetached

log = get_logger("sidecar")

CHECK_SECONDS: Final = 5.0


async def prepare_backlog(primary: Namespace, secondary: Namespace, name: str, count: int) -> None:
    """Make the backlog queues that are missing, and try each as it will be used.

    Without the right Manage they must be there. Raises InvalidPairing, and SecondaryAway if that is all that is wrong.
    """
    async with await connect_secondary(secondary, CHECK_SECONDS) as connection:
        not_made: Exception | None = None
        async with primary.management(PRIMARY_SECONDS) as one, secondary.management() as other:
            try:
                await create_missing(other, name, count)
            except (HttpError, InvalidPairing) as error:
                not_made = error.with_traceback(None)  # which refers to this call
            await check_they_differ(one, other)
        for queue in backlog_queues(name, count):
            await _try(connection, queue, not_made)
        if not_made is not None:
            log.warning("backlog queues are there, but cannot be managed", reason=str(not_made))


async def _try(connection: Connection, queue: str, not_made: Exception | None) -> None:
    try:
        await (await connection.sender(queue)).close()
    except AuthenticationFailed as error:
        raise InvalidPairing(f"the secondary refuses the key for {queue}: {error}") from error
    except LinkDetached as error:
        if error.condition == conditions.NOT_FOUND:
            text = f"{queue} is missing in the secondary, and was not made: {not_made}"
            raise (SecondaryAway if is_away(not_made) else InvalidPairing)(text) from error
        if error.condition == conditions.UNAUTHORIZED_ACCESS:
            raise InvalidPairing(f"the key has no right to send to {queue} in the secondary: {error}") from error
        raise SecondaryAway(f"{queue} in the secondary cannot be used: {error}") from error
    except (ClientError, ConnectionLost, TimeoutError) as error:
        raise SecondaryAway(f"the secondary does not answer for {queue}: {error}") from error
