"""A gateway process: listeners, client connections, connections to the workers, the operations endpoint."""

import asyncio
import itertools
import signal
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from broker.child import Freed, Instructions, announce_ready, give_back_freed
from broker.gateway.connection import ClientConnection
from broker.gateway.limits.budget import TLS_BYTES, Budget, Holder
from broker.gateway.limits.descriptors import allowed_connections
from broker.gateway.limits.queued import Queued
from broker.gateway.message_ids import MessageIds
from broker.gateway.namespace import Entity, Namespace
from broker.gateway.operations import Operations
from broker.gateway.reports import report_at
from broker.gateway.returning import Returning
from broker.gateway.router import Router, WorkerConnection
from broker.gateway.running import keep_beating, serve_beside, set_at_sigterm
from broker.gateway.waiting_room import Bounds
from broker.gateway.web.endpoint import HttpEndpoint
from broker.gateway.web.routes import http_endpoint
from broker.gateway.worker_tcp import connections
from broker.http.ops import OpsServer, start_ops
from broker.keys import SECURITY_FILE, Keyring, read_security
from broker.listening import Listener, cannot_listen, listen
from broker.logging import get_logger
from broker.metrics import GatewayMetrics
from broker.repeated_warning import RepeatedWarning
from broker.settings.config import ConfigurationError, Settings
from broker.tls import ServerTls
from protocol.engine.unfinished import Pool
from protocol.host_names import HostNames

log = get_logger("gateway")

TICK_SECONDS = 0.25
BACKLOG = 4096
DETACH_SECONDS = 1.0
# So much time of each round of the event loop is for connections with more to do than a step. They are served in turn.
QUEUE_SECONDS = 0.002
GIVE_BACK_SECONDS = 10.0  # freed memory is given back so often at most, which takes some tens of milliseconds
OTHERS_SECONDS = 5.0  # a gateway waits so long for further workers when it has the catalog


class Gateway:
    """Everything that connections share.

    Also what takes them from the listeners (`broker.listening.Reception`), and what the observer asks
    (`broker.gateway.reports.Reporter`).
    """

    def __init__(
        self,
        instructions: Instructions,
        connection: Callable[[str, Router], WorkerConnection] | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`connection` makes the connection to a worker; see `Router`. `beat` is a sign of life to the supervisor.

        Raises ConfigurationError.
        """
        self.settings: Settings = instructions.settings
        self.metrics = GatewayMetrics()
        self.keyring = Keyring.of(self.settings.security)
        self.namespace = Namespace(self.settings.namespace)
        assert instructions.gateway is not None
        self._number = instructions.gateway
        self._instructions = instructions
        self._beat = beat
        self._tls = None if self.settings.tls.certificate is None else ServerTls(self.settings.tls)
        self._named = self.settings.security.host_names
        self.host_names = self._names()
        self._is_cluster = bool(self.settings.cluster.workers)
        self.container_id = f"{uuid.uuid4().hex}_G{self._number}"
        self.router = Router(
            instructions.sockets,
            self.settings.partitions,
            self.metrics,
            self._on_catalog,
            busy_seconds=self.settings.busy_seconds,
            poll_seconds=self.settings.poll_seconds,
            waiting_bounds=Bounds(
                self.settings.worker_restart_wait_ms / 1000,
                self.settings.worker_restart_wait_operations,
                self.settings.worker_restart_wait_bytes,
            ),
            connection=connection or connections(self.settings),
        )
        self.returning = Returning(self.router)
        self.new_message_id = MessageIds()
        self.sender_turns: Iterator[int] = itertools.count()
        self.holders: Iterator[int] = itertools.count(1)
        self.router.on_caught_up = self._on_caught_up
        self.router.on_changed = self._on_changed
        self.router.on_deleted = self._on_deleted
        self.unfinished = Pool(self.settings.amqp.unfinished_bytes)
        self.budget = Budget(self.settings.amqp.connections_bytes, self._on_ended)
        self.connections: set[ClientConnection] = set()
        self.waiting: set[ClientConnection] = set()
        self._queue: deque[Queued] = deque()
        self._serves_queue = False
        self.max_connections, self._max_refused = allowed_connections(self.settings)
        self._arriving: set[asyncio.BaseProtocol] = set()  # accepted, and usually in the TLS handshake
        self.refusals = RepeatedWarning("connections refused")
        self.denials = RepeatedWarning("authentication failed")
        self._crowds = RepeatedWarning("connection ended for want of memory")
        self._failures = RepeatedWarning("no connection can be accepted")
        self._catalog_known = asyncio.Event()
        self._serves = False  # it takes clients, or did until it was told to stop
        self._listeners: list[Listener] = []
        self._http: HttpEndpoint | None = None
        self._reports: Listener | None = None
        self._ops: OpsServer | None = None
        self._background: set[asyncio.Task[None]] = set()  # what is done for clients; it may fail
        self._stopping = asyncio.Event()
        self._left = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM. Raises ConfigurationError if an address or certificate cannot be used."""
        set_at_sigterm(self._stopping)
        self._take_keys()  # this process may have been restarted
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        workers = [worker.keep_connected() for worker in self.router.workers]
        others = [keep_beating(self._beat), self._tick(), *workers]
        if self._tls is not None:
            others.append(self._tls.keep_warning())
        await serve_beside(self._run(), others)

    async def _run(self) -> None:
        ports = await self._start_operations()
        await self._catalog_known.wait()
        await self._wait_for_workers()
        ports |= await self._listen()
        self._serves = True
        announce_ready(**ports)
        await self._stopping.wait()
        await self._stop()

    async def _wait_for_workers(self) -> None:
        """Between machines one may be away for long, and what the others have is served without it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(OTHERS_SECONDS if self._is_cluster else None):
                for worker in self.router.workers:
                    await worker.connected.wait()

    async def _start_operations(self) -> dict[str, int]:
        """Start to report before anything else, so that the endpoint says what this process waits for."""
        if sockets := self._instructions.gateway_sockets:
            self._reports = self._report_at(sockets[self._number])
            return {}
        if self.settings.ops.port is None:
            return {}

        async def counters() -> dict[str, Any]:
            return self.snapshot()

        operations = Operations(
            self._instructions,
            self.router,
            self.namespace,
            unready=self.unready,
            counters={self._number: counters},
        )
        self._ops = await start_ops(operations, self.settings.ops.host, self.settings.ops.port)
        return {"ops_port": self._ops.port}

    def _report_at(self, path: str) -> Listener:
        try:
            return report_at(path, self)
        except OSError as error:
            raise ConfigurationError(f"{Path(path).absolute()} cannot be made: {error.strerror or error}") from error

    async def _listen(self) -> dict[str, int]:
        amqp = self.settings.amqp
        ports = {}
        if amqp.port is not None:
            ports["amqp_port"] = await self._serve(amqp.host, amqp.port, "amqp.port", None)
        if amqp.tls_port is not None:
            ports["amqps_port"] = await self._serve(amqp.host, amqp.tls_port, "amqp.tls_port", self._tls)
        return ports | await self._listen_for_http()

    async def _listen_for_http(self) -> dict[str, int]:
        http = self.settings.http
        if http.port is None and http.tls_port is None:
            return {}
        self._http = http_endpoint(self)
        ports = {}
        for name, port, tls in (("http", http.port, None), ("https", http.tls_port, self._tls)):
            if port is not None:
                setting = "http.port" if tls is None else "http.tls_port"
                try:
                    ports[f"{name}_port"] = await self._http.listen(
                        http.host, port, tls, reuse_port=self.settings.gateways > 1
                    )
                except OSError as error:
                    raise ConfigurationError(cannot_listen(setting, http.host, port, error)) from error
        return ports

    async def _serve(self, host: str, port: int, setting: str, tls: ServerTls | None) -> int:
        try:
            # With several gateways the kernel distributes connections over them.
            sockets = await listen(host, port, backlog=BACKLOG, reuse_port=self.settings.gateways > 1)
        except OSError as error:
            raise ConfigurationError(cannot_listen(setting, host, port, error)) from error
        listener = Listener(self, sockets, tls)
        self._listeners.append(listener)
        return listener.port

    async def _stop(self) -> None:
        log.info("gateway is stopping", connections=len(self.connections))
        for listener in self._listeners:
            listener.close()
        if self._http is not None:
            self._http.stop_listening()
        self.router.await_no_more()
        for connection in list(self.connections):
            connection.shut_down()
        try:
            async with asyncio.timeout(DETACH_SECONDS):
                while self.connections:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            log.warning("clients did not close in time; ending without them", connections=len(self.connections))
        try:
            async with asyncio.timeout(DETACH_SECONDS):
                await self.returning.none.wait()
        except TimeoutError:
            log.error("messages that were received and deleted, and not sent, are lost", messages=self.returning.count)
        if self._http is not None:
            await self._http.close()
        if self._reports is not None:
            self._reports.close()
        if self._ops is not None:
            await self._ops.close()

    async def _tick(self) -> None:
        given_back_s = 0.0
        freed = Freed()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now_s = time.monotonic()
            now_ms = int(now_s * 1000)
            if now_s - given_back_s > GIVE_BACK_SECONDS and self.budget.has_freed_much():
                given_back_s = now_s
                give_back_freed()  # it lies between what others hold, so the C library does not do it by itself
            freed.look(now_s)
            for connection in list(self.connections):
                connection.look_after()
                if connection.next_tick_ms <= now_ms:
                    connection.tick(now_ms)
            if self._http is not None:
                self._http.look_after()

    def _reload(self) -> None:
        """Take new keys and names, and read certificates again. If they cannot be used, the earlier ones stay."""
        self._take_keys()
        if self._tls is None:
            return
        try:
            self._tls.load()
        except ConfigurationError as error:
            self.metrics.tls_reload_failures += 1
            log.error("certificates not reloaded", reason=str(error))
        else:
            log.info("certificates reloaded")
            self.host_names = self._names()

    def _take_keys(self) -> None:
        try:
            security = read_security(Path(SECURITY_FILE))
        except (OSError, ValueError) as error:
            log.error("keys not taken", reason=str(error))
            return
        if security is None:
            return
        self._named = security.host_names
        self.host_names = self._names()
        if self.keyring.set_namespace(Keyring.of(security)):
            log.info("keys changed")
            self._rules_changed()

    def _names(self) -> HostNames:
        """Return the hosts by which tokens may name this broker: as configured, listened on, or certified."""
        certified = () if self._tls is None else self._tls.host_names
        return HostNames([*self._named, self.settings.amqp.host, self.settings.http.host, *certified])

    def go_on_with(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this for a client beside everything else."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _on_catalog(self, documents: Sequence[dict[str, Any]]) -> None:
        entities = [Entity.of(document) for document in documents]
        removed = self.namespace.replace(entities)
        if self.keyring.set_entities(each.description for each in entities):
            self._rules_changed()
        self._catalog_known.set()
        self._forget(frozenset(removed))

    def _on_changed(self, documents: Sequence[dict[str, Any]]) -> None:
        for entity in map(Entity.of, documents):
            if (moved := self.namespace.put(entity)) is not None:
                for connection in list(self.connections):
                    connection.follow(moved)
            if self.keyring.set_entity(entity.description):
                self._rules_changed()

    def _rules_changed(self) -> None:
        for connection in list(self.connections):
            connection.rules_changed()

    def _on_deleted(self, entity_ids: Sequence[int]) -> None:
        removed = self.namespace.remove(frozenset(entity_ids))
        for entity in removed:
            self.keyring.forget_entity(entity.description)
        self._forget(frozenset(removed))

    def _forget(self, removed: Collection[Entity]) -> None:
        """Detach all links from these entities, which were deleted."""
        if not removed:
            return
        for connection in list(self.connections):
            connection.detach_from(removed)
        for entity in removed:
            self.metrics.forget(entity.name)

    def _on_caught_up(self) -> None:
        waiting, self.waiting = self.waiting, set()
        for connection in waiting:
            connection.regulate()

    # -- connections

    def admit(self, connection: ClientConnection) -> None:
        self._discard_arriving(connection)
        self.connections.add(connection)
        self.budget.enter(connection)
        self.metrics.connections_opened += 1

    def leave(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)
        self.budget.leave(connection)
        self.waiting.discard(connection)
        self._left.set()
        self.metrics.connections_closed += 1

    def queue(self, waiting: Queued) -> None:
        self._queue.append(waiting)
        if not self._serves_queue:
            self._serves_queue = True
            asyncio.get_running_loop().call_soon(self._serve_queue)

    def _serve_queue(self) -> None:
        until_s = time.monotonic() + QUEUE_SECONDS
        for _ in range(len(self._queue)):
            first = self._queue.popleft()
            if first.go_on(until_s):
                self._queue.append(first)
            if time.monotonic() >= until_s:
                break
        self._serves_queue = bool(self._queue)
        if self._queue:
            asyncio.get_running_loop().call_soon(self._serve_queue)

    @property
    def is_full(self) -> bool:
        return len(self.connections) + len(self._arriving) > self.max_connections

    # -- broker.listening.Reception

    def arrives(self, peer: str) -> ClientConnection | None:
        if len(self.connections) + len(self._arriving) >= self.max_connections + self._max_refused:
            self.metrics.connections_refused += 1
            self.refusals.happened("connection limit reached", last_peer=peer)
            return None
        connection = ClientConnection(self)
        self._arriving.add(connection)
        self.budget.expect(TLS_BYTES)
        return connection

    def arrived(self, protocol: asyncio.BaseProtocol) -> None:
        self._discard_arriving(protocol)

    def _discard_arriving(self, protocol: asyncio.BaseProtocol) -> None:
        if protocol in self._arriving:
            self._arriving.discard(protocol)
            self.budget.expect(-TLS_BYTES)

    def _on_ended(self, holder: Holder, held_bytes: int) -> None:
        self.metrics.connections_ended_for_memory += 1
        limit = f"all connections together may take {self.budget.maximum_bytes} bytes (amqp.max_connections_bytes)"
        self._crowds.happened(limit, last_peer=holder.peer, last_held_bytes=str(held_bytes))

    def accept_failed(self, error: OSError) -> None:
        self.metrics.accept_failures += 1
        self._failures.happened(error.strerror or str(error))

    # -- for the operations endpoint

    def unready(self) -> str | None:
        """The reason why this gateway takes no clients now, or None."""
        if self._stopping.is_set():
            return "the broker is shutting down"
        if self._serves:
            return None
        return f"waiting for the workers: {self.router.missing() or 'for the catalog'}"

    def problem(self) -> str:
        """Return why this gateway is not ready, or which workers it lacks: the observer sees only its own."""
        return self.unready() or self.router.missing()

    def snapshot(self) -> dict[str, Any]:
        self.metrics.tls_handshakes = len(self._arriving)
        self.metrics.connections_held_bytes = self.budget.held_bytes
        self.metrics.tls_certificate_expires_seconds = 0.0 if self._tls is None else self._tls.expires_s
        return self.metrics.snapshot(self._instructions.restarts)
