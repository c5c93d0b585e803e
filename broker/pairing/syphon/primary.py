"""The primary as a syphon sends to it: a connection that is made anew when it was lost, and ways to destinations.

When the connection is lost, or nobody has answered on it for long, the primary is away until a probe succeeds: a new
connection, and a ping of the entity that a message was sent to last, which no receiver gets. An answer counts, whatever
it says.
"""

import asyncio
import ssl
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from broker.logging import get_logger
from broker.pairing.pings import ping
from broker.pairing.syphon.blame import Blame, fault_of
from broker.pairing.syphon.counters import Counters
from protocol.client.connection import Connection, connect_to
from protocol.client.connection_string import ConnectionString
from protocol.client.errors import ClientError, ConnectionLost
from protocol.client.links import Sender

log = get_logger("syphon")

CONNECT_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 30.0
FIRST_PROBE_SECONDS: Final = 0.5
LONGEST_PROBE_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 1.0  # between two looks for overdue answers
MAX_WAYS: Final = 1000
USUAL_LIMIT_BYTES: Final = 1 << 20  # of a message, where the peer names none


class Way:
    """A sender to one destination."""

    def __init__(self, sender: Sender, heard: Callable[["asyncio.Future[None]"], None]) -> None:
        self._sender = sender
        self._heard = heard
        self._sent: deque[tuple[float, asyncio.Future[None]]] = deque()
        self.limit_bytes = min(sender.link.remote_max_message_bytes or USUAL_LIMIT_BYTES, 1 << 30)

    @property
    def is_closed(self) -> bool:
        return self._sender.closed

    def send(self, message: bytes, *, is_batch: bool) -> "asyncio.Future[None]":
        """The future gets the outcome. Raises the reason if the link has ended."""
        outcome = self._sender.enqueue(message, is_batch=is_batch)
        outcome.add_done_callback(self._heard)
        self._sent.append((asyncio.get_running_loop().time(), outcome))
        while self._sent[0][1].done():
            self._sent.popleft()
            if not self._sent:
                break
        return outcome

    def since_s(self) -> float | None:
        """Since when the oldest answer is awaited."""
        while self._sent and self._sent[0][1].done():
            self._sent.popleft()
        return self._sent[0][0] if self._sent else None

    def give_up(self) -> None:
        """Fail all that waits for an answer."""
        self._sender.link.detach()
        self._sender.fail(MessageOverdue("", f"{self._sender.address} has not answered for {ANSWER_SECONDS:.0f} s"))
        self._sender.connection.flush_soon()

    async def close(self) -> None:
        await self._sender.close()


class MessageOverdue(ClientError):
    """The destination has not answered for long, while others have."""


class Primary:
    """`run` keeps it connected. Implements `broker.pairing.syphon.draining.Primary`."""

    def __init__(self, target: ConnectionString, trust: ssl.SSLContext | None, counters: Counters) -> None:
        self._target = target
        self._counters = counters
        self._trust = trust
        self._connection: Connection | None = None
        self._ways: OrderedDict[str, Way] = OrderedDict()
        self._watchers: list[Callable[[], None]] = []
        self._heard_s = 0.0  # when an answer came last
        self._last_path: str | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Have this called when the primary comes or goes. Returns what ends that."""
        self._watchers.append(changed)
        return lambda: self._watchers.remove(changed)

    @property
    def is_up(self) -> bool:
        return self._connection is not None and not self._connection.closed

    def way(self, path: str) -> Way | None:
        """The open way to a destination."""
        way = self._ways.get(path)
        if way is None or way.is_closed:
            return None
        self._ways.move_to_end(path)
        self._last_path = path
        return way

    async def open(self, path: str) -> Way:
        """Open the way to a destination. Raises what `Connection.sender` raises."""
        connection = self._connection
        if connection is None:
            raise ConnectionLost("", "the primary is away")
        self._last_path = path
        began_s = asyncio.get_running_loop().time()
        try:
            sender = await connection.sender(path)
        except TimeoutError as error:
            if self._heard_s >= began_s:
                raise
            self._give_up(connection, str(error))
            raise ConnectionLost("", str(error)) from error
        self._hear()
        way = self._ways[path] = Way(sender, self._hear)
        self._close_others()
        return way

    async def run(self) -> None:
        """Keep it connected until this is cancelled."""
        looking = asyncio.create_task(self._look())
        try:
            while True:
                self._connection = await self._connected()
                self._hear()
                self._tell()
                reason = await self._connection.wait_closed()
                self._counters.losses += 1
                log.warning("primary is away", reason=str(reason))
                self._connection = None
                self._ways.clear()
                self._tell()
        finally:
            looking.cancel()
            if self._connection is not None:
                connection, self._connection = self._connection, None
                await connection.close()

    def _tell(self) -> None:
        for changed in list(self._watchers):
            changed()

    def _hear(self, outcome: "asyncio.Future[None] | None" = None) -> None:
        """There was an answer, unless the outcome is that there will be none."""
        error = None if outcome is None or outcome.cancelled() else outcome.exception()
        if error is None or (fault_of(error).blame is not Blame.PRIMARY and not isinstance(error, MessageOverdue)):
            self._heard_s = asyncio.get_running_loop().time()

    async def _connected(self) -> Connection:
        """A new connection, on which the primary answers."""
        wait_s, told = FIRST_PROBE_SECONDS, ""
        while True:
            self._counters.probes += 1
            try:
                connection = await connect_to(self._target, tls=self._trust, timeout_s=CONNECT_SECONDS)
                try:
                    # Without a token it would be closed soon, as long as there is nothing to send.
                    await connection.authorize(self._target.entity_path)
                    await self._ping(connection)
                except BaseException:
                    connection.abort()
                    raise
            except (ClientError, TimeoutError) as error:
                text = str(error)
                if text != told:
                    log.warning("primary does not answer", reason=text)
                told = text
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_PROBE_SECONDS)
            else:
                log.info("primary is there", host=self._target.host)
                return connection

    async def _ping(self, connection: Connection) -> None:
        """Wait until the primary answers. Raises ConnectionLost or TimeoutError if it does not."""
        if self._last_path is None:
            return
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await ping(connection, self._last_path)
        except ConnectionLost:
            raise
        except ClientError as error:
            log.debug("primary refuses a ping", entity=self._last_path, reason=str(error))

    async def _look(self) -> None:
        """Look for answers that are overdue: of one destination, or of all."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            connection, now_s = self._connection, asyncio.get_running_loop().time()
            for path, way in list(self._ways.items()):
                since_s = way.since_s()
                if way.is_closed:
                    del self._ways[path]
                elif since_s is not None and now_s - since_s >= ANSWER_SECONDS:
                    if self._heard_s >= since_s:
                        del self._ways[path]
                        way.give_up()
                    elif connection is not None:
                        self._give_up(connection, f"no answer for {ANSWER_SECONDS:.0f} s")
                        break

    def _give_up(self, connection: Connection, reason: str) -> None:
        if not connection.closed:
            log.warning("primary hangs", reason=reason)
            connection.abort()

    def _close_others(self) -> None:
        """Close the ways that nobody has used for longest, beyond the limit."""
        for path, way in list(self._ways.items()):
            if len(self._ways) <= MAX_WAYS:
                return
            if way.since_s() is None:
                del self._ways[path]
                task = asyncio.create_task(_closed(way))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)


async def _closed(way: Way) -> None:
    try:
        await way.close()
    except (ClientError, TimeoutError) as error:
        log.debug("way not closed", reason=str(error))
