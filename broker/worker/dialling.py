"""How a worker connects to the others: at once by unix sockets on one machine, by TCP and TLS between machines.

Names are resolved anew for each connection, in a thread, because that may take seconds and a worker must not wait.
"""

import errno
import os
import select
import socket
import ssl
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from broker.cluster.sockets import SILENCE_MS, end_when_silent
from broker.settings.addresses import Address, parse_address

CONNECT_MS = 5000  # a connection that takes longer has failed


class Dialler(Protocol):
    """Connects to the workers of the namespace, which are numbered from 0."""

    is_cluster: bool  # True: a worker keeps connections to all others, because only they say which partitions they have

    @property
    def workers(self) -> int: ...

    def name(self, worker: int) -> str: ...

    def dial(self, worker: int, now_ms: int) -> socket.socket | None:
        """A connection; None if it is not there yet: then call it again. Raises OSError."""

    def waits(self, descriptor: int) -> int | None:
        """The worker that this descriptor of a connection under way is for. Then `dial` is to be called again."""


class UnixDialler:
    is_cluster = False

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    @property
    def workers(self) -> int:
        return len(self._paths)

    def name(self, worker: int) -> str:
        return f"worker {worker}"

    def dial(self, worker: int, now_ms: int) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.connect(self._paths[worker])
        except OSError:
            connection.close()
            raise
        return connection

    def waits(self, descriptor: int) -> int | None:
        return None


class TcpDialler:
    """`poll` wakes the worker when a connection that is under way is made, or has failed."""

    is_cluster = True

    def __init__(
        self,
        addresses: Sequence[str],
        tls: ssl.SSLContext | None,
        poll: select.epoll,
        silence_ms: int = SILENCE_MS,
    ) -> None:
        self._silence_ms = silence_ms
        self._addresses = [parse_address(each) for each in addresses]
        self._tls = tls
        self._poll = poll
        self._resolver = ThreadPoolExecutor(max_workers=4, thread_name_prefix="resolver")
        self._resolving: dict[int, Future[list[Any]]] = {}
        self._dialled: Counter[int] = Counter()  # how often each worker: a name may have several addresses
        self._connecting: dict[int, tuple[socket.socket, int]] = {}  # by worker, with the time of its begin
        self._by_descriptor: dict[int, int] = {}

    @property
    def workers(self) -> int:
        return len(self._addresses)

    def name(self, worker: int) -> str:
        return f"worker {self._addresses[worker]}"

    def waits(self, descriptor: int) -> int | None:
        return self._by_descriptor.get(descriptor)

    def dial(self, worker: int, now_ms: int) -> socket.socket | None:
        if worker in self._connecting:
            return self._connected(worker, now_ms)
        address = self._addresses[worker]
        resolving = self._resolving.get(worker)
        if resolving is None:
            self._resolving[worker] = self._resolver.submit(_resolved, address)
            return None
        if not resolving.done():
            return None
        del self._resolving[worker]
        found = resolving.result()
        family, kind, protocol, _, target = found[self._dialled[worker] % len(found)]
        self._dialled[worker] += 1
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            end_when_silent(connection, self._silence_ms)
            code = connection.connect_ex(target)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except OSError:
            connection.close()
            raise
        self._connecting[worker] = connection, now_ms
        self._by_descriptor[connection.fileno()] = worker
        self._poll.register(connection, select.EPOLLOUT)
        return None

    def _connected(self, worker: int, now_ms: int) -> socket.socket | None:
        connection, began_ms = self._connecting[worker]
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not code:
            try:
                connection.getpeername()
            except OSError:  # it is still under way
                if now_ms - began_ms < CONNECT_MS:
                    return None
                code = errno.ETIMEDOUT
        del self._connecting[worker], self._by_descriptor[connection.fileno()]
        self._poll.unregister(connection)
        if code:
            connection.close()
            raise OSError(code, os.strerror(code))
        if self._tls is None:
            return connection
        host = self._addresses[worker].host
        return self._tls.wrap_socket(connection, server_hostname=host, do_handshake_on_connect=False)


def _resolved(address: Address) -> list[Any]:
    return socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
