"""Which part of a gateway answers which HTTP requests."""

import time
from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from broker.gateway.limits.budget import Budget
from broker.gateway.web import journal, management, runtime, websockets
from broker.gateway.web.access import Access
from broker.gateway.web.endpoint import HttpEndpoint, Route, Serve
from broker.gateway.web.management import Management
from broker.keys import Keyring
from broker.metrics import GatewayMetrics
from broker.settings.config import Settings
from broker.unix_socket import JOURNAL_SOCKET
from protocol.host_names import HostNames

_HEALTH = {  # what the Service Bus emulator answers
    True: {"status": "healthy", "message": "Service is healthy."},
    False: {"status": "unhealthy", "message": "Service not available. Please try after some time."},
}


class Shared(management.Shared, runtime.Gateway, websockets.Gateway, Protocol):
    """The gateway."""

    settings: Settings
    metrics: GatewayMetrics
    keyring: Keyring
    host_names: HostNames
    budget: Budget

    def problem(self) -> str:
        """Why it takes no clients now, or which partition it does not reach; empty if all is well."""


def http_endpoint(gateway: Shared) -> HttpEndpoint:
    largest = max(management.MAX_BODY_BYTES, gateway.settings.amqp.max_message_size_bytes)
    everybody = gateway.settings.security.allow_anonymous
    access = Access(gateway.keyring, lambda name: gateway.host_names.has(name), everybody=everybody)
    routes = [
        Route("health", _is_health, _health(gateway.problem)),
        Route("websocket", websockets.is_handshake, websockets.websockets(gateway)),
        Route("runtime", runtime.is_runtime, runtime.Runtime(gateway, access).serve),
        Route("management", lambda *_: True, Management(gateway, access, int(time.time() * 1000)).serve),
    ]
    if gateway.settings.journal.is_on:
        reader = journal.Journal(access, JOURNAL_SOCKET, gateway)
        routes.insert(0, Route("journal", journal.is_journal, reader.serve, reader.close))
    denials, budget = gateway.denials, gateway.budget
    return HttpEndpoint(gateway.settings.http, routes, gateway.metrics, denials, largest, gateway.queue, budget)


def _is_health(request: web.BaseRequest, path: str) -> bool:
    """An entity of this name is asked for with a token."""
    return path == "health" and request.method in ("GET", "HEAD") and "Authorization" not in request.headers


def _health(problem: Callable[[], str]) -> Serve:
    async def serve(_: web.BaseRequest, __: str) -> web.StreamResponse:
        is_healthy = not problem()
        return web.json_response(_HEALTH[is_healthy], status=200 if is_healthy else 503)

    return serve
