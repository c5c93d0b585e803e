"""A client of the management API over HTTP: requests with tokens, pages of lists, refusals as exceptions.

It speaks to Peeklock and to Azure Service Bus (management.md 1.1, 1.5, 1.8, 1.15).
"""

import os
import ssl
import time
from typing import Final, Self

import aiohttp
from yarl import URL

from broker.administration.address import Address
from broker.atom.client_documents import REQUEST_TYPE, Described, read_entries, read_error
from broker.errors import InvalidArgument
from protocol.client.connection_string import Credentials, SharedAccessKey, SharedAccessSignature
from protocol.nodes.sas_tokens import generate

API_VERSION: Final = "2021-05"
PAGE: Final = 100  # Service Bus gives no more at once
CONNECT_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 60.0
TOKEN_SECONDS: Final = 3600


class HttpError(Exception):
    """The text is for the user."""


class Unreachable(HttpError):
    """There was no answer, or none that is the management API's. What was asked for may have been done."""


class Untrusted(Unreachable):
    """The service's certificate is of no authority that we trust, or of another host."""


class Refused(HttpError):
    """The service answered with an error. `status` is that of HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class NotThere(Refused):
    """There is no such entity, or one of another kind."""

    def __init__(self, text: str) -> None:
        super().__init__(404, text)


class HttpClient:
    """Use it in `async with`. Paths are percent-encoded and begin without a slash."""

    def __init__(
        self,
        address: Address,
        credentials: Credentials,
        trust: ssl.SSLContext,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """`answer_seconds`: within this time each answer must have come."""
        self._address = address
        self._credentials = credentials
        timeout = aiohttp.ClientTimeout(total=answer_seconds, sock_connect=CONNECT_SECONDS)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust), timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> Described:
        """The entry there. Raises HttpError; NotThere also for an empty list, which Service Bus answers then."""
        entries = self._entries(await self._ask("GET", path))
        if not entries:
            raise NotThere("there is no such entity")
        return entries[0]

    async def all_of(self, path: str) -> list[Described]:
        """All entries of a list, page by page. Raises HttpError."""
        found: list[Described] = []
        while True:
            page = self._entries(await self._ask("GET", path, query=f"&$skip={len(found)}&$top={PAGE}"))
            found += page
            if len(page) < PAGE:
                return found

    async def put(
        self, path: str, body: bytes, *, is_update: bool, forwards_to: tuple[str, str] = ("", "")
    ) -> Described:
        """Create, or replace what is there; returns what is there now. Raises HttpError.

        `forwards_to` are the paths of the entities that messages and dead letters are forwarded to: the service wants a
        token for each.
        """
        headers = {"Content-Type": REQUEST_TYPE}
        if is_update:
            headers["If-Match"] = "*"
        for name, destination in zip(_SUPPLEMENTARY, forwards_to, strict=True):
            if destination and (token := self._token(destination)):
                headers[name] = token
        entries = self._entries(await self._ask("PUT", path, body, headers))
        if not entries:
            raise Unreachable(f"{self._address.url} answered without the entity")
        return entries[0]

    async def delete(self, path: str) -> None:
        """Delete what is at `path`. Raises HttpError."""
        await self._ask("DELETE", path)

    async def _ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None, query: str = ""
    ) -> bytes:
        url = URL(f"{self._address.url}/{path}?api-version={API_VERSION}{query}", encoded=True)
        given = dict(headers or {})
        if token := self._token(path):
            given["Authorization"] = token
        try:
            # A redirection would take the token elsewhere.
            async with self._session.request(method, url, data=body, headers=given, allow_redirects=False) as answer:
                content = await answer.read()
                if 200 <= answer.status < 300:
                    return content
                raise _refused(answer.status, answer.reason or "", content)
        except aiohttp.ClientConnectorCertificateError as error:
            raise Untrusted(f"cannot connect to {self._address.url}: {error.certificate_error}") from error
        except aiohttp.ClientConnectorError as error:
            number = error.os_error.errno
            reason = os.strerror(number) if number and number > 0 else error.os_error
            raise Unreachable(f"cannot connect to {self._address.url}: {reason}") from error
        except TimeoutError as error:
            raise Unreachable(f"no answer from {self._address.url} in time") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise Unreachable(f"no answer of HTTP from {self._address.url}: {error}") from error

    def _entries(self, body: bytes) -> list[Described]:
        try:
            return read_entries(body)
        except InvalidArgument as error:
            raise Unreachable(f"{self._address.url} is no management API: {error}") from error

    def _token(self, path: str) -> str:
        """Return a token for what is at `path`; empty without credentials."""
        match self._credentials:
            case SharedAccessKey(name, key):
                return generate(f"{self._address.url}/{path}", name, key, int(time.time()) + TOKEN_SECONDS)
            case SharedAccessSignature(token):
                return token
        return ""


_SUPPLEMENTARY: Final = ("ServiceBusSupplementaryAuthorization", "ServiceBusDlqSupplementaryAuthorization")


def _refused(status: int, reason: str, body: bytes) -> Refused:
    sub_code, text = read_error(body.decode(errors="replace"))
    text = "".join(each if each.isprintable() else " " for each in text or reason or "the request was refused")
    if status == 404:
        return NotThere(text)
    code = f"status {status}" + (f", sub code {sub_code}" if sub_code else "")
    return Refused(status, f"{text} ({code})")
