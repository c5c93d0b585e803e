"""A gateway's connection to a worker on any machine: as over a unix socket, by TCP, and by TLS beyond the machine."""

import asyncio
import ssl
from collections.abc import Callable, Sequence

from broker import wire
from broker.cluster.silence import BEAT_SECONDS, Patience, Silence, let_beats_decide
from broker.cluster.sockets import discard_unsent, end_when_silent
from broker.cluster.tls import client_context
from broker.gateway.router import LOOK_SECONDS, Router, WorkerConnection
from broker.gateway.worker_socket import SocketConnection
from broker.logging import get_logger
from broker.settings.addresses import parse_address
from broker.settings.config import Settings
from broker.wire import Beat, Message

CONNECT_SECONDS = 5.0  # for the name, the connection and the handshake
assert LOOK_SECONDS == BEAT_SECONDS

log = get_logger("gateway")


class TcpConnection(SocketConnection):
    reconnect_seconds = 0.5  # a name is resolved each time

    def __init__(self, address: str, router: Router, tls: ssl.SSLContext | None, patience: Patience) -> None:
        super().__init__(address, router)
        self._address = parse_address(address)
        self._tls = tls
        self._patience = patience
        self._silence: Silence | None = None  # of a worker that is connected and beats
        self._is_heard = False  # since the last look

    async def _connect(self) -> None:
        host, port = self._address
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.create_connection(
                    lambda: self, host, port, ssl=self._tls, server_hostname=host if self._tls else None
                )
        except TimeoutError:
            raise OSError(f"no connection within {CONNECT_SECONDS:g} seconds") from None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        end_when_silent(transport.get_extra_info("socket"), self._patience.silence_ms)
        self.problem = ""  # here, because a greeting that is refused may come before `_connect` goes on

    def connection_lost(self, error: Exception | None) -> None:
        if not self.connected.is_set() and not self.problem:
            # A worker that does not take our certificate says so after the handshake.
            self._note(str(error) if error else "it closed the connection before it greeted")
        self._silence = None
        super().connection_lost(error)

    # -- signs of life

    def _begin(self) -> None:
        super()._begin()
        if self._knows_beats:
            self._silence = Silence(self._patience)
            self._is_heard = True
            self._put(wire.beat())

    def _look(self) -> None:
        super()._look()
        if (silence := self._silence) is None:
            return
        is_heard, self._is_heard = self._is_heard, False
        if silence.look(is_heard):
            self._silence = None
            log.warning("worker does not give a sign of life; its connection ends", worker=self.name)
            if not self.is_stalled:
                self._stall()  # who could wait for it to be back does not: that may be long
            discard_unsent(self._transport.get_extra_info("socket"))  # clients are told that nobody knows
            self._end()
        elif not self._is_behind:  # else what it reads of the other commands tells the same
            self._put(wire.beat())

    def take(self, messages: Sequence[Message]) -> None:
        self._is_heard = True
        silence = self._silence
        if silence is not None and not silence.beats and any(isinstance(each, Beat) for each in messages):
            silence.beats = True
            let_beats_decide(self._transport.get_extra_info("socket"), self._patience)
        if messages and all(isinstance(each, Beat) for each in messages):
            return  # it lives; that it answers is another question
        super().take(messages)

    def _cannot_connect(self, error: OSError) -> None:
        self._note(error.strerror or str(error) or type(error).__name__)

    def _note(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("cannot connect to worker", worker=self.name, reason=problem)
        self.problem = problem


def connections(settings: Settings) -> Callable[[str, Router], WorkerConnection]:
    """What connects to the workers: those of a cluster, else of this machine. Raises ConfigurationError."""
    if not settings.cluster.workers:
        return SocketConnection
    tls = client_context(settings.cluster)
    patience = Patience.of(settings)
    return lambda address, router: TcpConnection(address, router, tls, patience)
