"""The processes that have the journal: the one of this machine, or one beside each worker of several.

Each has the rows of its worker's partitions. A question about all partitions goes to all of them, and their answers
are put together; if one does not answer, there is no answer, because a part of the journal must not be taken for the
whole.

One may take long for an answer, since it reads a disk. So whether a machine is there at all is asked apart, while
something is under way there (see `broker.cluster.silence`).
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
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

from broker.cluster.silence import BEAT_SECONDS, Patience, Silence
from broker.cluster.sockets import end_when_silent
from broker.cluster.tls import client_context
from broker.errors import BrokerError, ServerBusy
from broker.journal_requests import SIGN_OF_LIFE, Consumer, Overview, Range, Target
from broker.logging import get_logger
from broker.settings.addresses import parse_address
from broker.settings.config import Settings

CONNECT_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 60.0  # the journal has sent nothing for so long
READ_BYTES: Final = 256 << 10  # of an answer, before it is read no further until they are passed on
JournalOf = Callable[[int], int]
"""The number of the journal that has a partition; of one that nobody has, that of any, which refuses it."""


log = get_logger("gateway")


class Refused(Exception):
    """A journal's process has refused: the HTTP status, and why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class _UnderWay:
    """One request. `end` ends it: whoever waits for it, or reads its answer, gets ClientError or TimeoutError."""

    def __init__(self) -> None:
        self.how: Callable[[], None] | None = None

    def end(self) -> None:
        how, self.how = self.how, None
        if how is not None:
            how()


class Journals:
    """`count` of them, in the order of the workers that they are beside."""

    def __init__(self, settings: Settings, socket: str) -> None:
        """`socket` is the path of that on which the journal of this machine listens."""
        self._cluster = settings.cluster
        self._patience = Patience.of(settings)
        self._socket = socket
        self._session: ClientSession | None = None
        self.count = len(self._cluster.journals) or 1
        self._under_way: list[set[_UnderWay]] = [set() for _ in range(self.count)]
        self._watches: dict[int, asyncio.Task[None]] = {}  # by journal

    @asynccontextmanager
    async def rows(self, number: int, wanted: Range) -> AsyncIterator[ClientResponse]:
        """The answer of one. Raises Refused, ServerBusy; while it is read, ClientError and TimeoutError."""
        async with self._request(number, "GET", wanted.target()) as answer:
            yield answer

    @asynccontextmanager
    async def _request(
        self, number: int, method: str, target: Target, body: bytes | None = None
    ) -> AsyncIterator[ClientResponse]:
        """Ask a journal, as `rows` does. All targets are of `broker.journal_requests`: no URL has text of clients."""
        with self._watched(number) as under_way:
            try:
                async with asyncio.timeout(None) as limit:
                    under_way.how = lambda: limit.reschedule(0)
                    session, url = self._connected(), f"{self._base(number)}{target.path}"
                    answer = await session.request(method, url, params=target.query, data=body)
            except (ClientConnectionError, TimeoutError):
                raise self._silent(number) from None
            under_way.how = answer.close
            async with answer:
                if answer.status in (400, 404, 500, 503):
                    raise Refused(answer.status, str((await self._document(number, answer)).get("error")))
                yield answer

    @contextmanager
    def _watched(self, number: int) -> Iterator[_UnderWay]:
        under_way = _UnderWay()
        there = self._under_way[number]
        there.add(under_way)
        if self._cluster.journals and number not in self._watches:
            self._watches[number] = asyncio.create_task(self._watch(number))
        try:
            yield under_way
        finally:
            there.discard(under_way)

    async def _watch(self, number: int) -> None:
        """End all that is under way to this journal when its machine gives no sign of life."""
        there, silence = self._under_way[number], Silence(self._patience)
        silence.beats = True
        asked: asyncio.Task[bool] | None = None
        try:
            while True:
                await asyncio.sleep(BEAT_SECONDS)
                if not there:
                    return
                is_heard = asked is None or (asked.done() and asked.result())
                if silence.look(is_heard) and there:
                    log.warning("journal does not give a sign of life", journal=self._cluster.journals[number])
                    for each in [*there]:
                        each.end()
                if asked is None or asked.done():
                    asked = asyncio.create_task(self._is_alive(number))
        finally:
            del self._watches[number]
            if asked is not None:
                asked.cancel()

    async def _is_alive(self, number: int) -> bool:
        try:
            async with asyncio.timeout(self._patience.silence_ms / 1000):
                answer = await self._connected().get(f"{self._base(number)}{SIGN_OF_LIFE.path}")
                async with answer:
                    await answer.read()
        except (ClientError, TimeoutError):
            return False
        return True

    async def overview(self, wanted: Overview) -> dict[str, Any]:
        """Partitions and consumers of all. Raises Refused, ServerBusy."""
        return merged(await self._ask_all("GET", wanted.target(), [None] * self.count))

    async def tell(self, consumer: Consumer, text: bytes, journal_of: JournalOf) -> None:
        """Tell each how far the consumer is in its partitions.

        Raises Refused, ServerBusy, and what `journal_of` raises: then some may have been told. Nobody goes back, so it
        may be told again.
        """
        await self._ask_all("PUT", consumer.target(), split(text, journal_of, self.count))

    async def forget(self, consumer: Consumer) -> None:
        """Forget the consumer in all journals. Raises ServerBusy, and Refused if none knows the consumer."""
        refused = []
        for number in range(self.count):
            try:
                await self._ask(number, "DELETE", consumer.target(), None)
            except Refused as error:
                if error.status != 404:
                    raise
                refused.append(error.with_traceback(None))  # which refers to this call
        if len(refused) == self.count:
            raise refused[0]

    async def close(self) -> None:
        for watch in [*self._watches.values()]:
            watch.cancel()
        if self._session is not None:
            await self._session.close()

    async def _ask_all(self, method: str, target: Target, bodies: Iterable[bytes | None]) -> list[dict[str, Any]]:
        asked = [self._ask(number, method, target, body) for number, body in enumerate(bodies)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            found.append(answer)
        return found

    async def _ask(self, number: int, method: str, target: Target, body: bytes | None) -> dict[str, Any]:
        async with self._request(number, method, target, body) as answer:
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
                connector = TCPConnector(limit=0, ssl=client_context(self._cluster) or True, socket_factory=self._made)
            else:
                connector = UnixConnector(self._socket, limit=0)
            timeout = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS)
            self._session = ClientSession(connector=connector, timeout=timeout, read_bufsize=READ_BYTES)
        return self._session

    def _made(self, address: AddrInfoType) -> socket.socket:
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        end_when_silent(made, self._patience.silence_ms)
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
    """Split what a consumer tells among `count` journals: all hear of it, and each gets its own partitions.

    A text that cannot be read goes to the first, which refuses it. Raises what `journal_of` raises.
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
