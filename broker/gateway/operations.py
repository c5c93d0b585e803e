"""What the operations endpoint of this process shows: the counters of gateways and workers, and who serves."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from broker import __version__, requests
from broker.child import Instructions
from broker.errors import ServerBusy
from broker.gateway.namespace import Namespace
from broker.gateway.reports import ReportingProcess
from broker.gateway.router import Router
from broker.http.readiness import RefusesSends
from broker.logging import get_logger
from broker.metrics import EndpointMetrics, Scene, process_usage
from broker.repeated_warning import RepeatedWarning
from broker.starting import phase_file, phase_of
from protocol.addresses import Part

# A process that does not answer a scrape within this time is left out.
SCRAPE_SECONDS = 2.0

log = get_logger("gateway")


class Operations:
    """The endpoint's source (`broker.http.ops.OpsSource`).

    `unready` tells why this process takes no work. For each gateway, `counters` has what gives its counters
    (`GatewayMetrics.snapshot`). `probes` raise if it does not serve; this process itself needs none.
    """

    def __init__(
        self,
        instructions: Instructions,
        router: Router,
        namespace: Namespace,
        *,
        unready: Callable[[], str | None],
        counters: Mapping[int, Callable[[], Awaitable[Mapping[str, Any]]]],
        probes: Mapping[int, Callable[[], Awaitable[None]]] | None = None,
    ) -> None:
        self.version = __version__
        self.unready = unready
        self.partitions: Sequence[int] = instructions.partitions or range(instructions.settings.partitions)
        self._router = router
        self._namespace = namespace
        self._counters = counters
        self._probes = probes or {}
        self.gateways: Sequence[int] = tuple(self._probes)
        self._is_cluster = bool(instructions.settings.cluster.workers)
        # Workers on other machines have endpoints of their own.
        self._shows_workers = not self._is_cluster or bool(instructions.partitions)
        self._is_observer = instructions.gateway is None
        self._is_one_process = instructions.worker is not None
        path = instructions.syphon_socket
        self._syphons = {0: ReportingProcess(path)} if path else {}
        path = instructions.journal_socket
        self._journals = {0: ReportingProcess(path)} if path else {}
        self._metrics = EndpointMetrics()
        self._failures = RepeatedWarning("no connection can be accepted")

    def connection_dropped(self) -> None:
        self._metrics.connections_dropped += 1

    def accept_failed(self, error: OSError) -> None:
        self._metrics.accept_failures += 1
        self._failures.happened(error.strerror or str(error))

    async def probe(self, partition: int) -> None:
        try:
            shortage = await self._ask(partition, requests.Probe())
        except ServerBusy:
            if not self._shows_workers:
                raise  # the worker is on another machine
            worker = 0 if self._is_cluster else partition % len(self._router.workers)
            phase = phase_of(Path(phase_file(worker)))
            if phase is None:
                raise
            raise ServerBusy(phase) from None
        if shortage is not None:
            raise RefusesSends(shortage)

    def _ask(self, partition: int, asked: requests.Request) -> Awaitable[Any]:
        """Ask for the present state, without waiting for a worker that is away."""
        return self._router.ask(partition, 0, asked, waits=False)

    async def probe_gateway(self, number: int) -> None:
        await self._probes[number]()

    async def scene(self) -> Scene:
        workers: Sequence[int] = ()
        if self._shows_workers:  # one partition of each worker
            workers = self.partitions[:1] if self._is_cluster else range(len(self._router.workers))
        counted = self.partitions if self._shows_workers else ()
        gateways, syphons, journals, snapshots, counts = await asyncio.gather(
            _all({number: ask() for number, ask in self._counters.items()}, "gateway"),
            _all({number: syphon.snapshot() for number, syphon in self._syphons.items()}, "syphon"),
            _all({number: journal.snapshot() for number, journal in self._journals.items()}, "journal"),
            _all({partition: self._ask(partition, requests.Metrics()) for partition in workers}, "partition"),
            _all({partition: self._ask(partition, requests.Counts()) for partition in counted}, "partition"),
        )
        return Scene(
            gateways=gateways,
            workers=dict(enumerate(snapshots.values())),
            counts=[each for each in counts.values() if each is not None],
            entities=self._namespace.names(),
            version=self.version,
            endpoint=self._metrics,
            forwarding={entity.entity_id for entity in self._namespace if entity.forward_to(Part.MAIN)},
            is_one_process=self._is_one_process,
            observer=process_usage() if self._is_observer else None,
            syphons=syphons,
            journals=journals,
        )


async def _all(asked: Mapping[int, Awaitable[Any]], what: str) -> dict[int, Any]:
    """The answers of all; None for those that gave none in time."""
    answers = await asyncio.gather(*(_answer(awaited, what, number) for number, awaited in asked.items()))
    return dict(zip(asked, answers, strict=True))


async def _answer(awaited: Awaitable[Any], what: str, number: int) -> Any:
    try:
        async with asyncio.timeout(SCRAPE_SECONDS):
            return await awaited
    except Exception as error:
        log.warning(f"{what} did not answer a request for metrics", **{what: number}, error=str(error))
        return None
