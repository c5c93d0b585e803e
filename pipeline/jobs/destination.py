"""What is known of the entity that messages are sent to: whether it drops those that come twice."""

import asyncio
import ssl
from typing import Final, NamedTuple
from urllib.parse import quote

from broker.administration.address import parse_http_address, usual_address
from broker.administration.client import HttpClient, HttpError, NotThere
from broker.atom.client_documents import text_of
from pipeline.jobs.running import WrongUse
from pyspark_peeklock.options import Access

_UNKNOWN_RIGHTS: Final = "whether it detects duplicates is not known"


class Duplicates(NamedTuple):
    """`are_detected` is None if nobody says; `text` is for the operator."""

    are_detected: bool | None
    text: str


def duplicates(access: Access, http_endpoint: str | None, entity: str) -> Duplicates:
    """Whether the queue or topic detects duplicates. Raises WrongUse if there is no such entity, InvalidOption."""
    return asyncio.run(_duplicates(access, http_endpoint, entity))


async def _duplicates(access: Access, http_endpoint: str | None, entity: str) -> Duplicates:
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
            return Duplicates(None, f"{_UNKNOWN_RIGHTS}: {error}")
    if text_of(found, "RequiresDuplicateDetection").lower() != "true":
        return Duplicates(False, "it does not detect duplicates: what is sent by two runs is there twice")
    window = text_of(found, "DuplicateDetectionHistoryTimeWindow")
    return Duplicates(True, f"it drops what comes twice within {window}")
