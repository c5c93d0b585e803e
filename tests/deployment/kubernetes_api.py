"""A server that speaks as much of the Kubernetes API as Spark uses.

It keeps objects in memory, answers watches, and notes what was asked for, so that a test can hold that against a Role.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import yaml
from aiohttp import web

from tests.patience import PATIENCE_S

Object = dict[str, Any]

_KINDS = {
    "pods": "Pod",
    "services": "Service",
    "configmaps": "ConfigMap",
    "secrets": "Secret",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "networkpolicies": "NetworkPolicy",
}


class Asked(NamedTuple):
    """A request, in the words of a Role's rules."""

    verb: str
    resource: str
    namespace: str
    name: str


class KubernetesApi:
    """The objects of a cluster. `on_pod` is called with each pod that is created, in a thread of its own."""

    def __init__(self) -> None:
        self.on_pod: Callable[[Object], None] = lambda pod: None
        self.asked: list[Asked] = []
        self.objects: dict[tuple[str, str, str], Object] = {}  # by resource, namespace and name
        self.created: list[Object] = []  # copies of all that was ever created
        self.unknown: list[str] = []  # paths of requests that this server does not answer
        self._version = 0
        self._watchers: list[tuple[str, str, dict[str, str], asyncio.Queue[Object]]] = []
        self._loop = asyncio.new_event_loop()
        self.port = 0

    @contextmanager
    def serving(self) -> Iterator["KubernetesApi"]:
        """On a port of the loopback interface."""
        ready = threading.Event()
        thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        thread.start()
        assert ready.wait(PATIENCE_S)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(PATIENCE_S)

    def _serve(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=16 << 20)
        for group in ("/api/v1", "/apis/{group}/v1"):
            app.router.add_route("*", group + "/namespaces/{namespace}/{resource}", self._collection)
            app.router.add_route("*", group + "/namespaces/{namespace}/{resource}/{name}", self._single)
        app.router.add_route("*", "/{path:.*}", self._anything)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        [(_, self.port)] = runner.addresses
        ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def set_status(self, pod: Object, **status: Any) -> None:
        """Change the status of a pod, from any thread. Watchers hear of it."""

        def change() -> None:
            pod["status"] = {**pod.get("status", {}), **status}
            self._tell("MODIFIED", "pods", pod)

        self._loop.call_soon_threadsafe(change)

    def _tell(self, kind: str, resource: str, found: Object) -> None:
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        event = json.loads(json.dumps({"type": kind, "object": found}))
        for watched, namespace, wanted, queue in self._watchers:
            if watched == resource and namespace == found["metadata"]["namespace"] and _fits(found, wanted):
                queue.put_nowait(event)

    async def _collection(self, request: web.Request) -> web.StreamResponse:
        resource, namespace = request.match_info["resource"], request.match_info["namespace"]
        wanted = dict(request.query)
        if request.method == "POST":
            return self._create(resource, namespace, yaml.safe_load(await request.text()))
        if request.method == "DELETE":
            self._note("deletecollection", resource, namespace)
            for found in self._selected(resource, namespace, wanted):
                self._remove(resource, found)
            return web.json_response({"kind": "Status", "status": "Success"})
        if request.query.get("watch") in ("true", "1"):
            self._note("watch", resource, namespace)
            return await self._watch(request, resource, namespace, wanted)
        self._note("list", resource, namespace)
        items = self._selected(resource, namespace, wanted)
        found = {"kind": f"{_KINDS[resource]}List", "apiVersion": "v1", "items": items}
        return web.json_response(found | {"metadata": {"resourceVersion": str(self._version)}})

    def _create(self, resource: str, namespace: str, given: Object) -> web.Response:
        name = given["metadata"]["name"]
        self._note("create", resource, namespace, name)
        if (resource, namespace, name) in self.objects:
            return _failure(409, "AlreadyExists", f'{resource} "{name}" already exists')
        self.put(resource, namespace, given)
        self.created.append(json.loads(json.dumps(given)))
        if resource == "pods":
            given["status"] = {"phase": "Pending"}
            threading.Thread(target=self.on_pod, args=(given,), daemon=True).start()
        self._tell("ADDED", resource, given)
        return web.json_response(given, status=201)

    def put(self, resource: str, namespace: str, given: Object) -> None:
        """Store an object as if it had been there before. No watcher hears of it."""
        name = given["metadata"]["name"]
        given["metadata"] |= {
            "namespace": namespace,
            "uid": f"uid-of-{name}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        }
        self.objects[resource, namespace, name] = given

    def _remove(self, resource: str, found: Object) -> None:
        metadata = found["metadata"]
        del self.objects[resource, metadata["namespace"], metadata["name"]]
        self._tell("DELETED", resource, found)

    def _selected(self, resource: str, namespace: str, wanted: dict[str, str]) -> list[Object]:
        return [
            each
            for (kind, place, _), each in self.objects.items()
            if (kind, place) == (resource, namespace) and _fits(each, wanted)
        ]

    async def _single(self, request: web.Request) -> web.StreamResponse:
        resource, namespace, name = (request.match_info[each] for each in ("resource", "namespace", "name"))
        verb = {"GET": "get", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}[request.method]
        self._note(verb, resource, namespace, name)
        found = self.objects.get((resource, namespace, name))
        if request.method == "PATCH" and "apply-patch" in request.content_type:
            given = yaml.safe_load(await request.text())
            self.put(resource, namespace, given)
            self._tell("ADDED" if found is None else "MODIFIED", resource, given)
            return web.json_response(given, status=201 if found is None else 200)
        if found is None:
            return _failure(404, "NotFound", f'{resource} "{name}" not found')
        if request.method == "DELETE":
            self._remove(resource, found)
        elif request.method in ("PATCH", "PUT"):
            given = yaml.safe_load(await request.text())
            assert isinstance(given, dict), "a JSON patch has no use here yet"
            for key, value in given.get("metadata", {}).items():
                if isinstance(value, dict):
                    found["metadata"].setdefault(key, {}).update(value)
            self._tell("MODIFIED", resource, found)
        return web.json_response(found)

    async def _watch(
        self, request: web.Request, resource: str, namespace: str, wanted: dict[str, str]
    ) -> web.StreamResponse:
        """Over a WebSocket, as clients ask for first."""
        socket = web.WebSocketResponse(protocols=("v4.base64.channel.k8s.io",))
        await socket.prepare(request)
        queue: asyncio.Queue[Object] = asyncio.Queue()
        watcher = (resource, namespace, wanted, queue)
        self._watchers.append(watcher)
        telling = asyncio.create_task(_tell_all(socket, queue))
        try:
            async for _ in socket:  # until the client has closed it
                pass
        finally:
            self._watchers.remove(watcher)
            telling.cancel()
            with suppress(asyncio.CancelledError, ConnectionError):
                await telling
        return socket

    async def _anything(self, request: web.Request) -> web.Response:
        self.unknown.append(f"{request.method} {request.path}")
        return _failure(404, "NotFound", request.path)

    def _note(self, verb: str, resource: str, namespace: str, name: str = "") -> None:
        self.asked.append(Asked(verb, resource, namespace, name))


async def _tell_all(socket: web.WebSocketResponse, queue: asyncio.Queue[Object]) -> None:
    while True:
        await socket.send_json(await queue.get())


def _fits(found: Object, wanted: dict[str, str]) -> bool:
    """By the selectors of a query, of which Spark uses `=` and `!=`."""
    labels = found["metadata"].get("labels", {})
    for term in filter(None, wanted.get("labelSelector", "").split(",")):
        name, _, value = term.partition("=")
        if (labels.get(name.removesuffix("!")) == value) == name.endswith("!"):
            return False
    for term in filter(None, wanted.get("fieldSelector", "").split(",")):
        name, _, value = term.partition("=")
        assert name == "metadata.name", "another field needs its meaning here"
        if found["metadata"]["name"] != value:
            return False
    return True


def _failure(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
    return web.json_response(body | {"message": message}, status=code)
