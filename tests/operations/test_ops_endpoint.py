import asyncio
import socket
from contextlib import asynccontextmanager

import aiohttp
import pytest

from broker.errors import ServerBusy
from broker.http.ops import create_ops_app, start_ops
from broker.metrics import GatewayMetrics, Scene
from broker.settings.config import ConfigurationError


class Source:
    """A broker with two partitions, whose faults the test sets."""

    version = "1.2.3"
    partitions = (0, 1)

    def __init__(self):
        self.reason = None
        self.faults = {}
        self.hanging = set()
        self.probes = []

    def ops_connection_dropped(self):
        pass

    def accept_failed(self, error):
        raise error

    def unready(self):
        return self.reason

    async def probe(self, partition):
        self.probes.append(partition)
        if partition in self.hanging:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        if partition in self.faults:
            raise self.faults[partition]

    async def scene(self):
        gateway = GatewayMetrics()
        gateway.connections_opened = 3
        return Scene(gateway, {}, (), {}, self.version)


@asynccontextmanager
async def serving(source):
    server = await start_ops(source, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as client:
            yield client
    finally:
        await server.close()


def ask(source, path, method="GET"):
    async def exchange():
        async with serving(source) as client, client.request(method, path) as response:
            body = await (response.json() if response.content_type == "application/json" else response.text())
            return response.status, body, response.headers

    return asyncio.run(exchange())


def test_live():
    assert ask(Source(), "/livez")[:2] == (200, {"status": "live", "version": "1.2.3"})


def test_ready_after_every_partition_was_probed():
    source = Source()
    assert ask(source, "/readyz")[:2] == (200, {"status": "ready", "partitions": 2})
    assert sorted(source.probes) == [0, 1]


def test_a_partition_that_fails_is_named_with_its_fault():
    source = Source()
    source.faults[1] = ServerBusy("the worker of partition 1 is down")
    assert ask(source, "/readyz")[:2] == (
        503,
        {
            "status": "not ready",
            "reason": "partitions that fail: 1",
            "partitions": {"1": "the worker of partition 1 is down"},
        },
    )


def test_a_fault_without_text_is_named_by_its_kind():
    source = Source()
    source.faults[0] = ConnectionResetError()
    assert ask(source, "/readyz")[1]["partitions"] == {"0": "ConnectionResetError"}


def test_a_partition_that_hangs_is_given_up():
    async def exchange():
        source = Source()
        source.hanging.add(1)
        app = create_ops_app(source, probe_seconds=0.05)
        runner = aiohttp.web.AppRunner(app)
        await runner.setup()
        site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with aiohttp.ClientSession() as client, client.get(f"{site.name}/readyz") as response:
                return response.status, await response.json()
        finally:
            await runner.cleanup()

    status, body = asyncio.run(exchange())
    assert status == 503
    assert body["partitions"] == {"1": "no answer within 0.05 s"}


def test_while_starting_or_stopping_no_partition_is_probed():
    source = Source()
    source.reason = "stopping"
    status, body, _ = ask(source, "/readyz")
    assert (status, body["reason"]) == (503, "stopping")
    assert source.probes == []


def test_all_who_ask_at_once_share_one_probe():
    source = Source()

    async def exchange():
        async with serving(source) as client:
            async with asyncio.TaskGroup() as group:
                for _ in range(20):
                    group.create_task(client.get("/readyz"))
            return len(source.probes)

    assert asyncio.run(exchange()) < 20


def test_a_client_that_hangs_up_does_not_end_the_probe_of_the_others():
    source = Source()
    released = asyncio.Event()

    async def probe(partition):
        await released.wait()

    source.probe = probe

    async def exchange():
        async with serving(source) as client:
            impatient = asyncio.create_task(client.get("/readyz", timeout=aiohttp.ClientTimeout(total=0.05)))
            patient = asyncio.create_task(client.get("/readyz"))
            with pytest.raises(TimeoutError):
                await impatient
            released.set()
            async with await patient as response:
                return response.status

    assert asyncio.run(exchange()) == 200


@pytest.mark.parametrize(
    ("reason", "status", "body"),
    [
        (None, 200, {"status": "healthy", "message": "Service is healthy."}),
        (
            "starting",
            503,
            {"status": "unhealthy", "message": "Service not available. Please try after some time."},
        ),
    ],
)
def test_health_is_worded_as_the_emulators(reason, status, body):
    source = Source()
    source.reason = reason
    assert ask(source, "/health")[:2] == (status, body)


def test_metrics():
    status, text, headers = ask(Source(), "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    assert "peeklock_connections_opened_total 3.0\n" in text


def test_unknown_path():
    status, body, _ = ask(Source(), "/../etc/passwd")
    assert status == 404
    assert "/readyz" in body["paths"]


def test_other_methods():
    status, body, headers = ask(Source(), "/readyz", method="POST")
    assert (status, body) == (405, {"error": "only GET, HEAD is allowed here"})
    assert headers["Allow"] == "GET, HEAD"


def test_head_is_as_get_without_the_body():
    status, body, _ = ask(Source(), "/livez", method="HEAD")
    assert status == 200
    assert not body


def test_a_fault_of_ours_is_an_answer_without_details():
    source = Source()

    async def scene():
        raise RuntimeError("secret")

    source.scene = scene
    assert ask(source, "/metrics")[:2] == (500, {"error": "internal error, see the log"})


def test_a_port_in_use_names_the_setting():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"port {port}.*in use.*ops\.port"):
            asyncio.run(start_ops(Source(), "127.0.0.1", port))
