"""One namespace of a pairing, as it is sent to: a connection that is made anew when it was lost, and its senders."""

import asyncio
import ssl
from collections.abc import Coroutine
from typing import Any, TypeVar

from protocol.client.connection import Connection, connect_to
from protocol.client.connection_string import ConnectionString
from protocol.client.errors import ClientError, ConnectionLost, LinkClosed
from protocol.client.links import Sender

T = TypeVar("T")

CONNECT_SECONDS = 10.0
RETIREMENT_SECONDS = 60.0


class Endpoint:
    """`name` says which of the two it is, in texts of errors. `closed` is set when it was closed or has faulted."""

    def __init__(self, name: str, target: ConnectionString, tls: ssl.SSLContext | None = None) -> None:
        self.name = name
        self.target = target
        self.closed = asyncio.Event()
        self._tls = tls
        self._connection: Connection | None = None
        self._connected_s = 0.0  # since when it is shared
        self._connecting: asyncio.Task[Connection] | None = None
        self._senders: dict[str, asyncio.Task[Sender]] = {}
        self._retired: set[asyncio.Task[None]] = set()
        self._fault: ClientError | None = None

    async def connect(self) -> Connection:
        """A connection of the caller's own. Raises ConnectionLost, AuthenticationFailed, and what `fault` was told."""
        self._check()
        connection = await connect_to(self.target, tls=self._tls, timeout_s=CONNECT_SECONDS)
        if self._fault is not None:
            connection.abort()
            raise self._fault.again()
        return connection

    async def connection(self) -> Connection:
        """The connection that all share; raises as `connect` does."""
        self._check()
        if self._connection is not None and not self._connection.closed:
            return self._connection
        if self._connecting is None or self._connecting.done():
            self._connecting = _begun(self.connect())
        connecting = self._connecting
        # The attempt belongs to all who wait for it, so none of them ends it.
        try:
            connection = await _shared(connecting)
        except BaseException:
            if self._connecting is connecting and connecting.done():
                self._connecting = None
            raise
        if self._connecting is connecting:
            self._connecting = None
            self._share(connection)
        return self._connection or connection

    async def sender(self, path: str) -> Sender:
        """The sender to this entity that all share; raises as `Connection.sender` does."""
        connection = await self.connection()
        attaching = self._senders.get(path)
        if attaching is None or _is_of_no_use(attaching, connection):
            attaching = self._senders[path] = _begun(connection.sender(path))
        try:
            return await _shared(attaching)
        except BaseException:
            if self._senders.get(path) is attaching and attaching.done():
                del self._senders[path]
            raise

    def adopt(self, connection: Connection) -> None:
        """Let all share this connection, which works, from now on."""
        self.retire(asyncio.get_running_loop().time())
        if self._fault is not None:
            connection.abort()
        else:
            self._share(connection)

    def retire(self, used_s: float) -> None:
        """An answer is overdue that somebody waits for since `used_s`: let all share another connection from now on.

        What is on its way on the old one may still be answered.
        """
        if self._connection is not None and self._connected_s <= used_s:
            task = asyncio.create_task(_end_later(self._connection))
            self._connection = None
            self._retired.add(task)
            task.add_done_callback(self._retired.discard)

    def _share(self, connection: Connection) -> None:
        self._connection = connection
        self._senders = {
            path: attaching for path, attaching in self._senders.items() if not _is_of_no_use(attaching, connection)
        }
        self._connected_s = asyncio.get_running_loop().time()

    async def close(self) -> None:
        connection = self._end(LinkClosed("", f"the {self.name} of the pairing was closed"))
        if connection is not None:
            await connection.close()

    def fault(self, reason: str) -> None:
        """End it as if it had broken. From now on, all uses of it fail with this reason."""
        connection = self._end(ConnectionLost("", reason))
        if connection is not None:
            connection.abort()

    def _end(self, fault: ClientError) -> Connection | None:
        self._fault = self._fault or fault
        self.closed.set()
        for task in (*self._retired, *self._senders.values(), self._connecting):
            if task is not None:
                task.cancel()
        # Tasks that have ended keep their calls, which refer to the connection.
        self._senders, self._connecting = {}, None
        connection, self._connection = self._connection, None
        return connection

    def _check(self) -> None:
        if self._fault is not None:
            raise self._fault.again()


async def _end_later(connection: Connection) -> None:
    try:
        async with asyncio.timeout(RETIREMENT_SECONDS):
            await connection.wait_closed()
    except TimeoutError:
        pass
    finally:
        connection.abort()


def _is_of_no_use(attaching: "asyncio.Task[Sender]", connection: Connection) -> bool:
    if not attaching.done():
        return False
    if attaching.cancelled() or attaching.exception() is not None:
        return True
    sender = attaching.result()
    return sender.closed or sender.connection is not connection


def _begun(attempt: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """An attempt that several may wait for, or nobody any more, and then its failure is no news."""
    task = asyncio.create_task(attempt)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


async def _shared(task: "asyncio.Task[T]") -> T:
    """The result of a task that others wait for, too: nobody's cancellation ends it."""
    await asyncio.wait([task])
    if task.cancelled():
        raise ConnectionLost("", "the attempt was given up")
    error = task.exception()
    if isinstance(error, ClientError):
        raise error.again()
    try:
        return task.result()
    finally:
        del task, error  # which refer to this call if it is raised
