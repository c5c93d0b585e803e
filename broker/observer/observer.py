"""A process that has nothing but the operations endpoint: of several gateways, or of a worker on its own.

It knows workers and entities as a gateway does, and asks the gateways (`broker.gateway.reports`). It owns nothing, so
whatever happens to it, clients do not notice, and another is started.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from broker.child import Instructions, announce_ready
from broker.gateway.namespace import Entity, Namespace
from broker.gateway.operations import Operations
from broker.gateway.reports import ReportingProcess
from broker.gateway.router import Router
from broker.gateway.running import keep_beating, serve_beside, set_at_sigterm
from broker.gateway.worker_tcp import connections
from broker.http.ops import start_ops
from broker.metrics import GatewayMetrics
from broker.settings.config import Settings


class Observer:
    def __init__(self, instructions: Instructions, beat: Callable[[], None]) -> None:
        """`beat` is a sign of life to the supervisor. Raises ConfigurationError."""
        self._settings: Settings = instructions.settings
        self._beat = beat
        self._namespace = Namespace(self._settings.namespace)
        self._router = Router(
            instructions.sockets,
            self._settings.partitions,
            GatewayMetrics(),  # of a gateway without clients: nobody needs to see them
            self._on_catalog,
            busy_seconds=self._settings.busy_seconds,
            connection=connections(self._settings),
        )
        self._router.on_changed = self._on_changed
        self._router.on_deleted = self._on_deleted
        gateways = {number: ReportingProcess(path) for number, path in enumerate(instructions.gateway_sockets)}
        self._operations = Operations(
            instructions,
            self._router,
            self._namespace,
            unready=self._unready,
            counters={number: gateway.snapshot for number, gateway in gateways.items()},
            probes={number: gateway.probe for number, gateway in gateways.items()},
        )
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM. Raises ConfigurationError if the endpoint's address cannot be used."""
        set_at_sigterm(self._stopping)
        workers = [worker.keep_connected() for worker in self._router.workers]
        await serve_beside(self._serve(), [keep_beating(self._beat), *workers])

    async def _serve(self) -> None:
        assert self._settings.ops.port is not None
        server = await start_ops(self._operations, self._settings.ops.host, self._settings.ops.port)
        announce_ready(ops_port=server.port)
        await self._stopping.wait()
        await server.close()

    def _unready(self) -> str | None:
        return "the broker is shutting down" if self._stopping.is_set() else None

    def _on_catalog(self, documents: Sequence[dict[str, Any]]) -> None:
        self._namespace.replace(map(Entity.of, documents))

    def _on_changed(self, documents: Sequence[dict[str, Any]]) -> None:
        for document in documents:
            self._namespace.put(Entity.of(document))

    def _on_deleted(self, entity_ids: Sequence[int]) -> None:
        self._namespace.remove(frozenset(entity_ids))
