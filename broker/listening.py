"""Listening sockets whose connections are counted from the moment they are accepted.

The event loop's own servers report a connection only after its TLS handshake. And while no file descriptor is free,
those of uvloop close new connections without a report, or try to accept them all the time, with all of a CPU.
"""

import asyncio
import errno
import socket
import ssl
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import NamedTuple, Protocol

# Connections accepted before other events are handled.
ACCEPTED_AT_ONCE = 16
# The time after which a listener tries again to accept a connection that could not be accepted.
REST_SECONDS = 0.1


class Reception(Protocol):
    """Takes the connections of a listener."""

    def arrives(self, peer: str) -> asyncio.BaseProtocol | None:
        """The protocol for a new connection, which counts from now on; None if there is no room, to close it."""

    def arrived(self, protocol: asyncio.BaseProtocol) -> None:
        """The TLS handshake is over: the protocol's `connection_made` was called, or the connection has failed."""

    def accept_failed(self, error: OSError) -> None:
        """A connection could not be accepted, usually because no file descriptor is free. It waits."""


class Handshakes(Protocol):
    """How the next TLS handshake is made (`broker.tls.ServerTls`)."""

    @property
    def context(self) -> ssl.SSLContext: ...

    @property
    def handshake_timeout_s(self) -> float: ...


class Listener:
    """Accepts connections until it is closed."""

    def __init__(
        self,
        reception: Reception,
        sockets: list[socket.socket],
        tls: Handshakes | None = None,
    ) -> None:
        self._reception = reception
        self._sockets = sockets
        self._tls = tls
        self._arriving: set[asyncio.Task[None]] = set()
        self._resting: dict[socket.socket, asyncio.TimerHandle] = {}
        self._loop = asyncio.get_running_loop()
        for each in sockets:
            self._listen(each)

    @property
    def port(self) -> int:
        port: int = self._sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Accept no more connections, and end those in the TLS handshake. The others stay."""
        for timer in self._resting.values():
            timer.cancel()
        for each in self._sockets:
            self._loop.remove_reader(each)
            each.close()
        for task in self._arriving:
            task.cancel()

    def _listen(self, listening: socket.socket) -> None:
        self._resting.pop(listening, None)
        self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # it was reset before it was accepted
            except OSError as error:
                self._loop.remove_reader(listening)
                self._resting[listening] = self._loop.call_later(REST_SECONDS, self._listen, listening)
                self._reception.accept_failed(error)
                return
            # That of a unix socket is empty.
            protocol = self._reception.arrives(f"{address[0]}:{address[1]}" if address else "")
            if protocol is None:
                accepted.close()
                continue
            accepted.setblocking(False)
            task = self._loop.create_task(self._connect(accepted, protocol))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    async def _connect(self, accepted: socket.socket, protocol: asyncio.BaseProtocol) -> None:
        tls = self._tls
        context, timeout_s = (None, None) if tls is None else (tls.context, tls.handshake_timeout_s)
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, accepted, ssl=context, ssl_handshake_timeout=timeout_s
            )
        except OSError:
            pass  # the TLS handshake has failed, or took too long
        finally:
            self._reception.arrived(protocol)


def no_delay(transport: asyncio.BaseTransport) -> None:
    """Turn Nagle's algorithm off: turns gather answers already, so it would only delay them."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


_ADVICE = {
    errno.EADDRINUSE: "Another program has the port: end that, or set {setting} to another",
    errno.EACCES: "Ports below 1024 need a right: the capability CAP_NET_BIND_SERVICE, or a lower "
    "net.ipv4.ip_unprivileged_port_start. Or set {setting} to a higher port",
    errno.EADDRNOTAVAIL: "This machine has no such address: set {host_setting} to one that it has, or 0.0.0.0 for all",
}


def cannot_listen(setting: str, host: str, port: int, error: OSError) -> str:
    """The text for the user: what failed, and what to do. `setting` is the port's, such as amqp.port."""
    host_setting = f"{setting.rpartition('.')[0]}.host"
    if isinstance(error, socket.gaierror):
        advice = f"No such name is known: set {host_setting} to an address of this machine, or 0.0.0.0 for all"
    else:
        general = "Set {setting} or {host_setting} to another"
        advice = _ADVICE.get(error.errno or 0, general).format(setting=setting, host_setting=host_setting)
    return f"cannot listen on {host} port {port} ({setting}): {error.strerror or error}. {advice}"


def try_to_listen(host: str, port: int) -> None:
    """See if `listen` could, before other work is done. A port that several processes share counts as in use.

    Raises OSError.
    """
    for family, kind, number, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with ExitStack() as opened:
            try:
                trying = opened.enter_context(socket.socket(family, kind, number))
            except OSError:
                continue  # the system may have no IPv6
            trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                trying.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            trying.bind(address)
            trying.listen(1)


class Unusable(NamedTuple):
    """A port that cannot be listened at now; another program may end and free one that is in use."""

    text: str
    is_in_use: bool


def unusable(listeners: Iterable[tuple[str, str, int]]) -> Iterator[Unusable]:
    """Yield those of these listeners (setting, host, port) that cannot be used."""
    for setting, host, port in listeners:
        try:
            try_to_listen(host, port)
        except OSError as error:
            yield Unusable(cannot_listen(setting, host, port, error), error.errno == errno.EADDRINUSE)


async def listen(host: str, port: int, *, backlog: int, reuse_port: bool = False) -> list[socket.socket]:
    """Sockets that listen at all addresses of the host; port 0 takes any free one. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with ExitStack() as opened:
        sockets: list[socket.socket] = []
        for family, kind, number, _, address in dict.fromkeys(found):
            try:
                listening = opened.enter_context(socket.socket(family, kind, number))
            except OSError:
                if not sockets and family == found[-1][0]:
                    raise
                continue  # the system may have no IPv6; the host has other addresses
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # 0.0.0.0 is an address of its own
            listening.bind(address)
            listening.listen(backlog)
            listening.setblocking(False)
            sockets.append(listening)
        opened.pop_all()
        return sockets
