"""Makes the queues that a pairing needs in the secondary, and checks that the two namespaces are two (PN3)."""

from collections.abc import Mapping

from broker.administration.client import HttpClient, HttpError, NotThere, Refused
from broker.atom.client_documents import change, new_description, text_of, write_entry
from broker.logging import get_logger
from broker.pairing.backlog import BACKLOG_SETTINGS, LEASE_SETTINGS, backlog_queues, lease_queue
from broker.pairing.options import InvalidPairing

log = get_logger("pairing")

_CONFLICT = 409


async def create_missing(secondary: HttpClient, primary_name: str, count: int) -> list[str]:
    """Create the backlog queues that are missing; those that exist stay as they are. Returns the paths of all.

    Needs the right Manage. Raises InvalidPairing, with the reason.
    """
    queues = backlog_queues(primary_name, count)
    for queue in queues:
        await _create_if_missing(secondary, queue, BACKLOG_SETTINGS)
    return queues


async def create_lease_queue(secondary: HttpClient, primary_name: str) -> None:
    """Create the queue of the syphons' leases, if it is missing. Raises as `create_missing` does."""
    queue = lease_queue(primary_name)
    await _create_if_missing(secondary, queue, LEASE_SETTINGS)


async def _create_if_missing(secondary: HttpClient, queue: str, settings: Mapping[str, str]) -> None:
    try:
        try:
            await secondary.get(queue)
            return
        except NotThere:
            description = new_description("QueueDescription")
            change("queue", description, settings)
            await secondary.put(queue, write_entry(description), is_update=False)
            log.info("queue created in the secondary", queue=queue)
    except Refused as error:
        if error.status != _CONFLICT:  # else somebody else has just created it
            raise InvalidPairing(f"the secondary does not give {queue}: {error}") from error
    except HttpError as error:
        raise InvalidPairing(f"the secondary does not give {queue}: {error}") from error


async def check_they_differ(primary: HttpClient, secondary: HttpClient) -> None:
    """Raises InvalidPairing if both are one namespace. If one of them does not say what it is, nothing is known."""
    try:
        found = [(await client.get("$namespaceinfo")).description for client in (primary, secondary)]
    except HttpError:
        return
    names = [tuple(text_of(each, name) for name in ("Name", "CreatedTime")) for each in found]
    if names[0] == names[1]:
        raise InvalidPairing(f"the secondary is the primary: both are the namespace {names[0][0]!r}")
