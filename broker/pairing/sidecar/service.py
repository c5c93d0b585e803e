"""The sidecar: listens for clients, and has what their connections share.

sidecar = Sidecar(setup)
await sidecar.start()
await sidecar.run(stopping)
"""

import asyncio
import ssl
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from broker.listening import Listener, listen
from broker.logging import get_logger
from broker.pairing.health import State
from broker.pairing.namespaces import Namespace, name_of
from broker.pairing.options import InvalidPairing, PairingOptions
from broker.pairing.pairing import Pairing
from broker.pairing.reaching import SecondaryAway, reason_primary_is_away
from broker.pairing.sidecar.checks import prepare_backlog
from broker.pairing.sidecar.connection import Client
from broker.pairing.sidecar.limits import Limits
from broker.pairing.sidecar.trust import Trust
from broker.repeated_warning import RepeatedWarning
from broker.tls import ServerTls
from protocol.engine.unfinished import Pool
from protocol.host_names import DEFAULT_HOST_NAMES, HostNames

log = get_logger("sidecar")

TICK_SECONDS: Final = 0.25
BACKLOG: Final = 1024
END_SECONDS: Final = 2.0  # clients have so long to take their close
START_SECONDS: Final = 10.0
CHECK_SECONDS: Final = 5.0  # for an answer of the primary
LOOK_SECONDS: Final = 1.0  # between looks whether a primary that is away is back
PREPARE_SECONDS: Final = 5.0  # between attempts to make the backlog queues


@dataclass(frozen=True, slots=True)
class Setup:
    """What a sidecar is told. `host` and `port` are where it listens; `tls` is for clients, None without TLS.

    `host_names` are patterns of names by which tokens may name primary or sidecar, beside those that both have here.
    """

    host: str
    port: int
    primary: Namespace
    secondary: Namespace
    options: PairingOptions = field(default_factory=PairingOptions)
    primary_name: str | None = None
    tls: ServerTls | None = None
    host_names: tuple[str, ...] = DEFAULT_HOST_NAMES
    limits: Limits = field(default_factory=Limits)


class Sidecar:
    """Implements `broker.pairing.sidecar.connection.Home` and `broker.listening.Reception`."""

    def __init__(self, setup: Setup) -> None:
        """Prepare the sidecar. Raises InvalidPairing."""
        self._setup = setup
        self.limits = setup.limits
        self.container_id = f"{uuid.uuid4().hex}_sidecar"
        self.primary = setup.primary.target
        self.primary_tls = (setup.primary.trust or ssl.create_default_context()) if self.primary.tls else None
        self.primary_name = name_of(setup.primary, setup.secondary, setup.primary_name)
        self.pairing = Pairing(setup.primary, setup.secondary, self.primary_name, setup.options)
        self.trust = Trust(self.primary, self._is_host)
        self.unfinished = Pool(self.limits.all_unfinished_bytes)
        self.is_away = False
        self.has_backlog = False
        self._clients: set[Client] = set()
        self._arriving: set[asyncio.BaseProtocol] = set()  # accepted, and perhaps in the TLS handshake
        self._held_bytes = 0
        self._failed_over: set[str] = set()
        self._opened = self._refused = self._accept_failures = 0
        self._refusals = RepeatedWarning("connections refused", "sidecar")
        self._left = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._listener: Listener | None = None
        self._is_stopping = False

    def _is_host(self, segment: str) -> bool:
        """Certificates are read again while the sidecar runs."""
        setup = self._setup
        certified = () if setup.tls is None else setup.tls.host_names
        return HostNames([*setup.host_names, self.primary.host, setup.host, *certified]).has(segment)

    @property
    def port(self) -> int:
        assert self._listener is not None
        return self._listener.port

    async def start(self) -> None:
        """Listen, when it is known what both namespaces say, if they say anything soon.

        Raises OSError; InvalidPairing if one of them refuses its key, or the secondary the backlog queues.
        """
        checking = asyncio.create_task(reason_primary_is_away(self._setup.primary, CHECK_SECONDS))
        preparing = asyncio.create_task(self._prepare())
        await asyncio.wait([checking, preparing], timeout=START_SECONDS)
        for task in (checking, preparing):
            task.cancel()
            with suppress(SecondaryAway, asyncio.CancelledError):
                await task
        reason = "it does not answer" if checking.cancelled() else checking.result()
        if reason is not None:
            self.primary_failed(reason)
        sockets = await listen(self._setup.host, self._setup.port, backlog=BACKLOG)
        self._listener = Listener(self, sockets, self._setup.tls)
        self.pairing.begin_syphon()

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set; then end the connections."""
        others = [asyncio.create_task(self._tick()), asyncio.create_task(self._keep_preparing())]
        stopped = asyncio.create_task(stopping.wait())
        try:
            done, _ = await asyncio.wait([stopped, *others], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                task.result()  # it has failed
        finally:
            for task in (stopped, *others):
                task.cancel()
            await self._stop()

    async def _stop(self) -> None:
        self._is_stopping = True
        log.info("sidecar is stopping", connections=len(self._clients))
        if self._listener is not None:
            self._listener.close()
        for client in [*self._clients]:
            client.shut_down()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                while self._clients:
                    self._left.clear()
                    await self._left.wait()
        if self._looking is not None:
            self._looking.cancel()
        await self.pairing.close()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._tell_changes(loop.time())
            now_ms = int(loop.time() * 1000)
            for client in [*self._clients]:
                client.tick(now_ms)

    def _tell_changes(self, now_s: float) -> None:
        """Tell connections which entities have failed over since the last time, and which are back."""
        present = set(self.pairing.availability.failed_over)
        for name in present - self._failed_over:
            for client in [*self._clients]:
                client.failed_over(name, now_s)
        for name in self._failed_over - present:
            for client in [*self._clients]:
                client.is_back(name)
        self._failed_over = present

    async def _prepare(self) -> None:
        setup = self._setup
        await prepare_backlog(setup.primary, setup.secondary, self.primary_name, setup.options.backlog_queue_count)
        self.has_backlog = True

    async def _keep_preparing(self) -> None:
        """Make the backlog queues when the secondary is there. Runs until it is cancelled."""
        said = ""
        while not self.has_backlog:
            try:
                await self._prepare()
            except InvalidPairing as error:
                if str(error) != said:
                    log.warning("no backlog yet", reason=str(error))
                    said = str(error)
                await asyncio.sleep(PREPARE_SECONDS)
        await asyncio.Event().wait()

    # -- broker.listening.Reception

    def arrives(self, peer: str) -> asyncio.BaseProtocol | None:
        if self._count >= self.limits.max_connections:
            self._refused += 1
            self._refusals.happened("connection limit reached", last_peer=peer)
            return None
        client = Client(self)
        self._arriving.add(client)
        return client

    def arrived(self, protocol: asyncio.BaseProtocol) -> None:
        self._arriving.discard(protocol)

    def accept_failed(self, error: OSError) -> None:
        self._accept_failures += 1
        self._refusals.happened(error.strerror or str(error))

    # -- broker.pairing.sidecar.connection.Home

    @property
    def _count(self) -> int:
        return len(self._clients) + len(self._arriving)

    def admit(self, client: Client) -> None:
        self._arriving.discard(client)
        self._clients.add(client)
        self._opened += 1

    def leave(self, client: Client) -> None:
        self._clients.discard(client)
        self._left.set()

    def primary_failed(self, reason: str) -> None:
        if not self.is_away:
            self.is_away = True
            log.warning("primary is away", host=self.primary.host, port=self.primary.port, reason=reason)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())

    def primary_answers(self) -> None:
        if self.is_away:
            self.is_away = False
            log.info("primary can be reached", host=self.primary.host, port=self.primary.port)

    async def _look(self) -> None:
        """Look whether the primary is back, until it is."""
        while self.is_away and not self._is_stopping:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                if await reason_primary_is_away(self._setup.primary, CHECK_SECONDS) is not None:
                    continue
            except InvalidPairing:
                pass  # it answers: its key was changed meanwhile, which it tells clients itself
            except Exception:
                log.exception("cannot look for the primary")
                continue
            self.primary_answers()

    def take_room(self, size_bytes: int) -> bool:
        if self._held_bytes + size_bytes > self.limits.held_bytes:
            return False
        self._held_bytes += size_bytes
        return True

    def give_room_back(self, size_bytes: int) -> None:
        self._held_bytes -= size_bytes

    # -- for the operations endpoint

    def unready(self) -> str | None:
        """Why no messages are taken, or None."""
        if self._is_stopping:
            return "the sidecar is shutting down"
        if self._listener is None:
            return "it is starting"
        if self.is_away and not self.has_backlog:
            return "the primary is away, and the backlog is not there"
        return None

    def snapshot(self) -> dict[str, Any]:
        """What `broker.sidecar_exposition` shows, as plain values.

        `syphon` is for `broker.syphon_exposition`: None if this process runs none.
        """
        availability = self.pairing.availability
        pulled = set(self.pairing.rotation.pulled(availability.now_ms()))
        return {
            "counters": self.pairing.counters,
            "syphon": None if self.pairing.syphon is None else self.pairing.syphon.snapshot(),
            "connections": len(self._clients),
            "answered_here": sum(client.is_answered_here for client in self._clients),
            "connections_opened": self._opened,
            "connections_refused": self._refused,
            "accept_failures": self._accept_failures,
            "held_bytes": self._held_bytes,
            "is_away": self.is_away,
            "has_backlog": self.has_backlog,
            "entities": {
                path.name: path.health.state for path in availability if path.health.state is not State.HEALTHY
            },
            "queues": {queue: queue not in pulled for queue in self.pairing.queues},
        }
