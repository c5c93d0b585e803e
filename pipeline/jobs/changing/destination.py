"""What is known of the entity that messages are sent to: whether it drops those that come twice."""

import asyncio
import ssl
from urllib.parse import quote

from broker.administration.address import parse_http_address, usual_address
from broker.administration.client import HttpClient, HttpError, NotThere
from broker.atom.client_documents import text_of
from pipeline.jobs.running import WrongUse
from pyspark_peeklock.options import Access


def duplicates(access: Access, http_endpoint: str | None, entity: str) -> str:
    """Whether the queue or topic detects duplicates, for the operator to read, or why that is not known.

    Raises WrongUse if there is no such entity, InvalidOption.
    """
    return asyncio.run(_duplicates(access, http_endpoint, entity))


async def _duplicates(access: Access, http_endpoint: str | None, entity: str) -> str:
    target = access.connection_string()
    try:
        address = parse_http_address(http_endpoint) if http_endpoint else usual_address(target.host, target.tls)
    except ValueError as error:
        raise WrongUse(f"--http-endpoint: {http_endpoint!r} {error}") from None
    trust = access.trust() if address.scheme == "https" else ssl.create_default_context()
    async with HttpClient(address, target.credentials, trust) as client:
        try:
            found = (await client.get(quote(entity))).description
        except NotThere:
            raise WrongUse(f"there is no queue or topic '{entity}' to send to") from None
        except HttpError as error:
            return f"whether it detects duplicates is not known: {error}"
    if text_of(found, "RequiresDuplicateDetection").lower() != "true":
        return "it does not detect duplicates: what is sent by two runs is there twice"
    window = text_of(found, "DuplicateDetectionHistoryTimeWindow")
    return f"it drops what comes twice within {window}"
