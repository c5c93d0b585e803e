"""The operations endpoint: metrics for Prometheus, and health for whoever restarts or routes around a broker.

    GET /livez    200 while the event loop turns
    GET /readyz   200 after a real write and read on every partition, else 503 and which partition fails and why
    GET /health   the same, as the Service Bus emulator words it
    GET /metrics  Prometheus's text format

Answers are JSON but for the metrics. Nothing here changes the broker, and there are no credentials: whoever reaches
the port may read it, so it listens on loopback by default.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Protocol

from broker.http.server import METHODS, Answer, HttpServer, Request
from broker.logging import Logger
from broker.metrics import Scene
from broker.settings.config import ConfigurationError

PROBE_SECONDS = 5.0  # for one partition: a disk slower than this does not serve
METRICS_SECONDS = 10.0  # Prometheus's own default time-out for a scrape

_HEADERS = {"Cache-Control": "no-store"}
_HEALTH = {  # what the Service Bus emulator answers
    True: {"status": "healthy", "message": "Service is healthy."},
    False: {"status": "unhealthy", "message": "Service not available. Please try after some time."},
}

log = Logger()


class OpsSource(Protocol):
    """What the endpoint asks of the process that it runs in."""

    @property
    def version(self) -> str: ...

    @property
    def partitions(self) -> Sequence[int]: ...

    def unready(self) -> str | None:
        """Why this process takes no work now (it starts, it stops), or None."""

    async def probe(self, partition: int) -> None:
        """Write, commit and read on the partition. Raises what went wrong."""

    async def scene(self) -> Scene:
        """All that was counted. A worker that does not answer is left out after a short time."""


PATHS = ("/livez", "/readyz", "/health", "/metrics")


class OpsServer:
    """A listening endpoint."""

    def __init__(self, server: HttpServer, port: int) -> None:
        self._server = server
        self.port = port

    async def close(self) -> None:
        await self._server.close()


async def start_ops(source: OpsSource, host: str, port: int, probe_seconds: float = PROBE_SECONDS) -> OpsServer:
    """Listen; port 0 takes any free one. Raises ConfigurationError if the address cannot be had."""
    server = HttpServer(_Pages(source, probe_seconds).respond, lambda status, reason: _json({"error": reason}, status))
    try:
        return OpsServer(server, await server.listen(host, port))
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host} port {port} for operations: {error.strerror or error}. "
            "Free the port, or set ops.port (--ops-port) or ops.host to another"
        ) from error


class _Pages:
    """What each path answers."""

    def __init__(self, source: OpsSource, probe_seconds: float) -> None:
        self._source = source
        self._readiness = _Readiness(source, probe_seconds)
        self._pages = dict(zip(PATHS, (self._live, self._ready, self._health, self._metrics), strict=True))

    async def respond(self, request: Request) -> Answer:
        page = self._pages.get(request.path)
        if page is None:
            return _json({"error": "not found", "paths": PATHS}, status=404)
        if request.method not in METHODS:
            allow = ", ".join(METHODS)
            return _json({"error": f"only {allow} is allowed here"}, status=405, Allow=allow)
        try:
            return await page()
        except Exception:
            log.exception("operations request failed", path=request.path)
            return _json({"error": "internal error, see the log"}, status=500)

    async def _live(self) -> Answer:
        return _json({"status": "live", "version": self._source.version})

    async def _ready(self) -> Answer:
        reason, faults = await self._readiness.check()
        if reason is None:
            return _json({"status": "ready", "partitions": len(self._source.partitions)})
        body = {"status": "not ready", "reason": reason, "partitions": {str(p): text for p, text in faults.items()}}
        return _json(body, status=503)

    async def _health(self) -> Answer:
        reason, _faults = await self._readiness.check()
        return _json(_HEALTH[reason is None], status=200 if reason is None else 503)

    async def _metrics(self) -> Answer:
        try:
            async with asyncio.timeout(METRICS_SECONDS):
                content_type, text = await _metrics_text(self._source)
        except TimeoutError:
            return _json({"error": f"no metrics within {METRICS_SECONDS:g} s"}, status=503)
        return Answer(200, text, content_type, _HEADERS)


async def _metrics_text(source: OpsSource) -> tuple[str, bytes]:
    from broker.exposition import CONTENT_TYPE, render  # only a broker that is scraped pays for this import

    text = bytearray()
    for family in render(await source.scene()):
        text += family
        await asyncio.sleep(0)
    return CONTENT_TYPE, bytes(text)


class _Readiness:
    """Probes all partitions, once for all who ask at the same time: no number of askers makes more than one fsync."""

    def __init__(self, source: OpsSource, probe_seconds: float) -> None:
        self._source = source
        self._probe_seconds = probe_seconds
        self._probing: asyncio.Task[dict[int, str]] | None = None

    async def check(self) -> tuple[str | None, Mapping[int, str]]:
        """Why the broker is not ready, or None; and what is wrong, by partition."""
        reason = self._source.unready()
        if reason is not None:
            return reason, {}
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe_all())
        faults = await asyncio.shield(self._probing)  # a client that hangs up must not end it for the others
        if not faults:
            return None, {}
        return "partitions that fail: " + ", ".join(map(str, faults)), faults

    async def _probe_all(self) -> dict[int, str]:
        partitions = self._source.partitions
        faults = await asyncio.gather(*map(self._probe, partitions))
        return {partition: fault for partition, fault in zip(partitions, faults, strict=True) if fault is not None}

    async def _probe(self, partition: int) -> str | None:
        try:
            async with asyncio.timeout(self._probe_seconds):
                await self._source.probe(partition)
        except TimeoutError:
            return f"no answer within {self._probe_seconds:g} s"
        except Exception as error:  # whatever it is, this partition does not serve
            return str(error) or type(error).__name__
        return None


def _json(body: object, status: int = 200, **headers: str) -> Answer:
    return Answer(status, json.dumps(body).encode(), "application/json", {**_HEADERS, **headers})
