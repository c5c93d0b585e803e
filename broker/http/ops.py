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
from typing import Protocol

from aiohttp import web

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
METRICS_SECONDS = 10.0  # Prometheus's own default time-out for a scrape

_HEADERS = {"Cache-Control": "no-store"}
_HEALTH = {  # what the Service Bus emulator answers
    True: {"status": "healthy", "message": "Service is healthy."},
    False: {"status": "unhealthy", "message": "Service not available. Please try after some time."},
}

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

    def __init__(self, runner: web.AppRunner, listener: Listener) -> None:
        self._runner = runner
        self._listener = listener
        self.port = listener.port

    async def close(self) -> None:
        self._listener.close()
        await self._runner.cleanup()


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
        return await start_app(create_ops_app(source), source, host, port)
    except OSError as error:
        raise ConfigurationError(cannot_listen("ops.port", host, port, error)) from error


async def start_app(app: web.Application, source: Counting, host: str, port: int) -> OpsServer:
    """Serve an application as the operations endpoint is served. Raises OSError if the address cannot be used."""
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        shutdown_timeout=1.0,
        keepalive_timeout=REQUEST_SECONDS,
        lingering_time=1.0,
    )
    await runner.setup()
    assert runner.server is not None
    try:
        sockets = await listen(host, port, backlog=BACKLOG)
    except OSError:
        await runner.cleanup()
        raise
    return OpsServer(runner, Listener(_Reception(runner.server, source), sockets))


def _make_room(server: web.Server, source: Counting) -> None:
    """Abort the oldest connections beyond the limit. They may not read, so nothing is written to them any more."""
    for handler in server.connections[:-MAX_CONNECTIONS]:
        if handler.transport is not None:
            handler.transport.abort()
            source.connection_dropped()


def create_ops_app(source: OpsSource) -> web.Application:
    readiness = Readiness(source)

    async def livez(_: web.Request) -> web.Response:
        return json_answer({"status": "live", "version": source.version})

    async def readyz(_: web.Request) -> web.Response:
        reason, faults, gateways, full = await readiness.check()
        refusing = {"refuse_sends": _named(full)} if full else {}
        if reason is None:
            parked = {"parked": _named(faults)} if faults else {}
            return json_answer({"status": "ready", "partitions": len(source.partitions), **parked, **refusing})
        body = {"status": "not ready", "reason": reason, "partitions": _named(faults)}
        return json_answer(body | ({"gateways": _named(gateways)} if gateways else {}) | refusing, status=503)

    async def health(_: web.Request) -> web.Response:
        is_ready = (await readiness.check()).reason is None
        return json_answer(_HEALTH[is_ready], status=200 if is_ready else 503)

    async def metrics(_: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(METRICS_SECONDS):
                content_type, text = await _metrics_text(source)
        except TimeoutError:
            return json_answer({"error": f"no metrics within {METRICS_SECONDS:g} s"}, status=503)
        return metrics_answer(content_type, text)

    app = web.Application(middlewares=[errors_as_json], client_max_size=1024)
    app.router.add_get("/livez", livez)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    return app


async def _metrics_text(source: OpsSource) -> tuple[str, bytes]:
    from broker.exposition import CONTENT_TYPE, families, render  # only a broker that is scraped needs this import

    text = bytearray()
    for family in render(families(await source.scene())):
        text += family
        await asyncio.sleep(0)
    return CONTENT_TYPE, bytes(text)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        allow = ", ".join(sorted(error.allowed_methods))
        return json_answer({"error": f"only {allow} is allowed here"}, status=405, Allow=allow)
    except web.HTTPNotFound:
        paths = [resource.canonical for resource in request.app.router.resources()]
        return json_answer({"error": "not found", "paths": paths}, status=404)
    except web.HTTPException as error:
        return json_answer({"error": error.reason}, status=error.status)
    except Exception:
        log.exception("operations request failed", path=request.path)
        return json_answer({"error": "internal error, see the log"}, status=500)


def _named(faults: Mapping[int, str]) -> dict[str, str]:
    return {str(number): text for number, text in faults.items()}


def metrics_answer(content_type: str, text: bytes) -> web.Response:
    return web.Response(body=text, headers={"Content-Type": content_type, **_HEADERS})


def json_answer(body: object, status: int = 200, **headers: str) -> web.Response:
    return web.json_response(body, status=status, headers={**_HEADERS, **headers})
