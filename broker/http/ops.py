"""The operations endpoint: metrics for Prometheus, and health for orchestrators and load balancers.

    GET /livez    200 while the event loop runs
    GET /readyz   200 after a real write and read on every partition, if all gateways take clients; else 503 and which
                  partition or gateway fails and why
    GET /health   the same, in the form of the Service Bus emulator's answer
    GET /metrics  Prometheus's text format

Answers are JSON, except for the metrics. Nothing here changes the broker. There are no credentials: everybody who
reaches the port may read, so it listens on loopback by default.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from aiohttp import web

from broker.http.connections import HttpServer
from broker.http.readiness import Readiness, ReadinessSource
from broker.listening import Listener, cannot_listen, listen
from broker.logging import get_logger
from broker.metrics import Scene
from broker.settings.config import ConfigurationError

# Connections open at once. A new one replaces the oldest, so that nobody can block others.
MAX_CONNECTIONS = 100
BACKLOG = 100
# The time within which a request must come, on a new connection and after the last answer.
REQUEST_SECONDS = 10.0
CLOSE_SECONDS = 1.0  # for answers under way when the endpoint closes
METRICS_SECONDS = 10.0  # Prometheus's own default time-out for a scrape

_HEADERS = {"Cache-Control": "no-store"}
_HEALTH = {  # what the Service Bus emulator answers
    True: {"status": "healthy", "message": "Service is healthy."},
    False: {"status": "unhealthy", "message": "Service not available. Please try after some time."},
}

Pages = Mapping[str, Callable[[], Awaitable[web.Response]]]
"""Path → what answers a GET of it."""

log = get_logger()


class Counting(Protocol):
    """Counts what becomes of connections to an endpoint."""

    def connection_dropped(self) -> None:
        """Count a connection that was replaced by a newer one."""

    def accept_failed(self, error: OSError) -> None:
        """Count a new connection that could not be accepted (`broker.listening.Reception`)."""


class OpsSource(ReadinessSource, Counting, Protocol):
    """The process that the endpoint runs in, as the endpoint uses it."""

    @property
    def version(self) -> str: ...

    @property
    def partitions(self) -> Sequence[int]: ...

    async def scene(self) -> Scene:
        """All counters. A process that does not answer within a short time is left out."""


class OpsServer:
    """A listening endpoint."""

    def __init__(self, server: web.Server, listener: Listener) -> None:
        self._server = server
        self._listener = listener
        self.port = listener.port

    @property
    def connections(self) -> int:
        return len(self._server.connections)

    async def close(self) -> None:
        self._listener.close()
        self._server.pre_shutdown()
        await self._server.shutdown(CLOSE_SECONDS)


class _Reception:
    """Takes every new connection, in the place of the oldest if there are too many."""

    def __init__(self, server: web.Server, source: Counting) -> None:
        self._server = server
        self._source = source
        self.accept_failed = source.accept_failed

    def arrives(self, peer: str) -> asyncio.BaseProtocol:
        asyncio.get_running_loop().call_soon(_make_room, self._server, self._source)
        return self._server()

    def arrived(self, protocol: asyncio.BaseProtocol) -> None: ...


async def start_ops(source: OpsSource, host: str, port: int) -> OpsServer:
    """Listen; port 0 takes any free port. Raises ConfigurationError if the address cannot be used."""
    try:
        return await serve_pages(ops_pages(source), source, host, port)
    except OSError as error:
        raise ConfigurationError(cannot_listen("ops.port", host, port, error)) from error


async def serve_pages(pages: Pages, source: Counting, host: str, port: int) -> OpsServer:
    """Serve these as the operations endpoint does. Raises OSError if the address cannot be used."""
    server = HttpServer(partial(_answer, pages), access_log=None, keepalive_timeout=REQUEST_SECONDS, lingering_time=1.0)
    sockets = await listen(host, port, backlog=BACKLOG)
    return OpsServer(server, Listener(_Reception(server, source), sockets))


def _make_room(server: web.Server, source: Counting) -> None:
    """Abort the oldest connections beyond the limit. They may not read, so nothing is written to them any more."""
    for handler in server.connections[:-MAX_CONNECTIONS]:
        if handler.transport is not None:
            handler.transport.abort()
            source.connection_dropped()


def ops_pages(source: OpsSource) -> Pages:
    readiness = Readiness(source)

    async def livez() -> web.Response:
        return json_answer({"status": "live", "version": source.version})

    async def readyz() -> web.Response:
        reason, faults, gateways, full = await readiness.check()
        refusing = {"refuse_sends": _named(full)} if full else {}
        if reason is None:
            parked = {"parked": _named(faults)} if faults else {}
            return json_answer({"status": "ready", "partitions": len(source.partitions), **parked, **refusing})
        body = {"status": "not ready", "reason": reason, "partitions": _named(faults)}
        return json_answer(body | ({"gateways": _named(gateways)} if gateways else {}) | refusing, status=503)

    async def health() -> web.Response:
        is_ready = (await readiness.check()).reason is None
        return json_answer(_HEALTH[is_ready], status=200 if is_ready else 503)

    async def metrics() -> web.Response:
        try:
            async with asyncio.timeout(METRICS_SECONDS):
                content_type, text = await _metrics_text(source)
        except TimeoutError:
            return json_answer({"error": f"no metrics within {METRICS_SECONDS:g} s"}, status=503)
        return metrics_answer(content_type, text)

    return {"/livez": livez, "/readyz": readyz, "/health": health, "/metrics": metrics}


async def _metrics_text(source: OpsSource) -> tuple[str, bytes]:
    from broker.exposition import CONTENT_TYPE, families, render  # only a broker that is scraped needs this import

    text = bytearray()
    for family in render(families(await source.scene())):
        text += family
        await asyncio.sleep(0)
    return CONTENT_TYPE, bytes(text)


async def _answer(pages: Pages, request: web.BaseRequest) -> web.StreamResponse:
    page = pages.get(request.path)
    if page is None:
        return json_answer({"error": "not found", "paths": list(pages)}, status=404)
    if request.method not in ("GET", "HEAD"):
        return json_answer({"error": "only GET, HEAD is allowed here"}, status=405, Allow="GET, HEAD")
    try:
        return await page()
    except Exception:
        log.exception("operations request failed", path=request.path)
        return json_answer({"error": "internal error, see the log"}, status=500)


def _named(faults: Mapping[int, str]) -> dict[str, str]:
    return {str(number): text for number, text in faults.items()}


def metrics_answer(content_type: str, text: bytes) -> web.Response:
    return web.Response(body=text, headers={"Content-Type": content_type, **_HEADERS})


def json_answer(body: object, status: int = 200, **headers: str) -> web.Response:
    return web.json_response(body, status=status, headers={**_HEADERS, **headers})
