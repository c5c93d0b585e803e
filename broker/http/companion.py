"""The operations endpoint of a process that stands beside brokers, such as a syphon.

    GET /livez, /healthz   200 while the event loop runs
    GET /readyz            200 if it can do its work, else 503 and why not
    GET /metrics           Prometheus's text format

Answers and limits are those of the broker's own endpoint (`broker.http.ops`).
"""

from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from broker import __version__
from broker.http.ops import OpsServer, json_answer, metrics_answer, serve_pages
from broker.metrics import EndpointMetrics, process_usage

if TYPE_CHECKING:
    from broker.exposition import Families


class Companion(Protocol):
    """The process that the endpoint runs in. `name` is that of the process in metrics."""

    @property
    def name(self) -> str: ...

    def unready(self) -> str | None:
        """Why it cannot do its work now, or None."""

    def families(self) -> "Families":
        """Its own metrics."""


class _Counts:
    """Implements `broker.http.ops.Counting`."""

    def __init__(self) -> None:
        self.metrics = EndpointMetrics()

    def connection_dropped(self) -> None:
        self.metrics.connections_dropped += 1

    def accept_failed(self, _: OSError) -> None:
        self.metrics.accept_failures += 1


async def start_companion_ops(companion: Companion, host: str, port: int) -> OpsServer:
    """Listen; port 0 takes any free port. Raises OSError if the address cannot be used."""
    counts = _Counts()

    async def livez() -> web.Response:
        return json_answer({"status": "live", "version": __version__})

    async def readyz() -> web.Response:
        reason = companion.unready()
        if reason is None:
            return json_answer({"status": "ready"})
        return json_answer({"status": "not ready", "reason": reason}, status=503)

    async def metrics() -> web.Response:
        from broker.exposition import CONTENT_TYPE, companion_families, render

        common = companion_families(companion.name, __version__, counts.metrics, process_usage())
        return metrics_answer(CONTENT_TYPE, b"".join([*render(common), *render(companion.families())]))

    pages = {"/livez": livez, "/healthz": livez, "/readyz": readyz, "/metrics": metrics}
    return await serve_pages(pages, counts, host, port)
