"""A gateway's connection to a worker on any machine: as over a unix socket, by TCP, and by TLS beyond the machine."""

import asyncio
import ssl
from collections.abc import Callable

from broker.cluster.sockets import end_when_silent
from broker.cluster.tls import client_context
from broker.gateway.router import Router, WorkerConnection
from broker.gateway.worker_socket import SocketConnection
from broker.logging import get_logger
from broker.settings.addresses import parse_address
from broker.settings.config import Cluster

CONNECT_SECONDS = 5.0  # for the name, the connection and the handshake

log = get_logger("gateway")


class TcpConnection(SocketConnection):
    reconnect_seconds = 0.5  # a name is resolved each time

    def __init__(self, address: str, router: Router, tls: ssl.SSLContext | None) -> None:
        super().__init__(address, router)
        self._address = parse_address(address)
        self._tls = tls

    async def _connect(self) -> None:
        host, port = self._address
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                transport, _ = await loop.create_connection(
                    lambda: self, host, port, ssl=self._tls, server_hostname=host if self._tls else None
                )
        except TimeoutError:
            raise OSError(f"no connection within {CONNECT_SECONDS:g} seconds") from None
        end_when_silent(transport.get_extra_info("socket"))
        if not self.connected.is_set():
            self.problem = ""

    def connection_lost(self, error: Exception | None) -> None:
        if not self.connected.is_set() and not self.problem:
            # A worker that does not take our certificate says so after the handshake.
            self._note(str(error) if error else "it closed the connection before it greeted")
        super().connection_lost(error)

    def _cannot_connect(self, error: OSError) -> None:
        self._note(error.strerror or str(error) or type(error).__name__)

    def _note(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("cannot connect to worker", worker=self.name, reason=problem)
        self.problem = problem


def connections(cluster: Cluster) -> Callable[[str, Router], WorkerConnection]:
    """What connects to the workers: those of this cluster, else of this machine. Raises ConfigurationError."""
    if not cluster.workers:
        return SocketConnection
    tls = client_context(cluster)
    return lambda address, router: TcpConnection(address, router, tls)
