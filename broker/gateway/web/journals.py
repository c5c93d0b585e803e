"""The processes that have the journal: the one of this machine, or one beside each worker of several.

Each has the rows of its worker's partitions. What is about all of them is asked of all, and their answers are put
together; if one does not answer, there is no answer, because a part of the journal must not be taken for the whole.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import (
    AddrInfoType,
    BaseConnector,
    ClientConnectionError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    TCPConnector,
    UnixConnector,
)

from broker.cluster.sockets import end_when_silent
from broker.cluster.tls import client_context
from broker.errors import BrokerError, ServerBusy
from broker.settings.addresses import parse_address
from broker.settings.config import Cluster

CONNECT_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 60.0  # the journal has sent nothing for so long
Query = Mapping[str, str]
JournalOf = Callable[[int], int]
"""The number of the journal that has a partition; of one that nobody has, that of any, which refuses it."""


class Refused(Exception):
    """A journal's process has refused: the HTTP status, and why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class Journals:
    """`count` of them, in the order of the workers that they are beside."""

    def __init__(self, cluster: Cluster, socket: str) -> None:
        """`socket` is the path of that on which the journal of this machine listens."""
        self._cluster = cluster
        self._socket = socket
        self._session: ClientSession | None = None
        self.count = len(cluster.journals) or 1

    @asynccontextmanager
    async def request(
        self, number: int, method: str, path: str, query: Query, body: bytes | None = None
    ) -> AsyncIterator[ClientResponse]:
        """The answer of one. Raises Refused, ServerBusy; while it is read, ClientError and TimeoutError."""
        try:
            answer = await self._connected().request(method, f"{self._base(number)}/{path}", params=query, data=body)
        except (ClientConnectionError, TimeoutError):
            raise self._silent(number) from None
        async with answer:
            if answer.status in (400, 404, 500, 503):
                raise Refused(answer.status, str((await self._document(number, answer)).get("error")))
            yield answer

    async def overview(self, query: Query) -> dict[str, Any]:
        """Partitions and consumers of all. Raises Refused, ServerBusy."""
        return merged(await self._ask_all("GET", "$journal", query, [None] * self.count))

    async def tell(self, path: str, text: bytes, journal_of: JournalOf) -> None:
        """Tell each how far the consumer at this path is in its partitions.

        Raises Refused, ServerBusy, and what `journal_of` raises: then some may have been told. Nobody goes back, so it
        may be told again.
        """
        await self._ask_all("PUT", path, {}, split(text, journal_of, self.count))

    async def forget(self, path: str) -> None:
        """Raises ServerBusy, and Refused if none knows the consumer at this path."""
        refused = []
        for number in range(self.count):
            try:
                await self._ask(number, "DELETE", path, {}, None)
            except Refused as error:
                if error.status != 404:
                    raise
                refused.append(error)
        if len(refused) == self.count:
            raise refused[0]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask_all(
        self, method: str, path: str, query: Query, bodies: Iterable[bytes | None]
    ) -> list[dict[str, Any]]:
        asked = [self._ask(number, method, path, query, body) for number, body in enumerate(bodies)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            found.append(answer)
        return found

    async def _ask(self, number: int, method: str, path: str, query: Query, body: bytes | None) -> dict[str, Any]:
        async with self.request(number, method, path, query, body) as answer:
            return await self._document(number, answer)

    async def _document(self, number: int, answer: ClientResponse) -> dict[str, Any]:
        try:
            found: dict[str, Any] = await answer.json()
        except (ClientError, TimeoutError, ValueError):
            raise self._silent(number) from None
        return found

    def _silent(self, number: int) -> BrokerError:
        beside = f" of {self._cluster.workers[number]}" if self._cluster.journals else ""
        return ServerBusy(f"The journal{beside} does not answer now. Its process is starting, or has ended.")

    def _base(self, number: int) -> str:
        if not self._cluster.journals:
            return "http://journal"
        scheme = "http" if self._cluster.certificate is None else "https"
        return f"{scheme}://{parse_address(self._cluster.journals[number])}"

    def _connected(self) -> ClientSession:
        if self._session is None:
            connector: BaseConnector
            if self._cluster.journals:
                connector = TCPConnector(limit=0, ssl=client_context(self._cluster) or True, socket_factory=_made)
            else:
                connector = UnixConnector(self._socket, limit=0)
            timeout = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS)
            self._session = ClientSession(connector=connector, timeout=timeout)
        return self._session


def _made(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    end_when_silent(made)  # a machine that is gone does not hold a request for SILENT_SECONDS
    return made


def merged(overviews: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One overview of several: each has other partitions, and may know other consumers."""
    found: dict[str, Any] = {}
    consumers: dict[str, dict[str, Any]] = {}
    for each in overviews:
        if not found:
            found = each | {"partitions": []}
        found["partitions"] += each["partitions"]
        for consumer in each["consumers"]:
            known = consumers.setdefault(consumer["name"], {"name": consumer["name"], "behind": 0, "partitions": []})
            known["behind"] += consumer["behind"]
            known["partitions"] += consumer["partitions"]
    for one in (found, *consumers.values()):
        one["partitions"].sort(key=lambda each: each["partition"])
    return found | {"consumers": [consumers[name] for name in sorted(consumers)]}


def split(text: bytes, journal_of: JournalOf, count: int) -> list[bytes]:
    """What a consumer tells, for each of `count` journals: all hear of it, and each gets its own partitions.

    What cannot be read is for the first, which refuses it. Raises what `journal_of` raises.
    """
    if count == 1:
        return [text]
    try:
        told = json.loads(text)["partitions"]
        parts: list[list[Any]] = [[] for _ in range(count)]
        for each in told:
            partition = each["partition"]
            parts[journal_of(partition) if type(partition) is int else 0].append(each)
        return [json.dumps({"partitions": part}).encode() for part in parts]
    except (ValueError, TypeError, KeyError, RecursionError):
        return [text] + [b'{"partitions": []}'] * (count - 1)
