import asyncio
import re
import socket
import time
from contextlib import asynccontextmanager

import aiohttp
import pytest

from broker.errors import ServerBusy
from broker.gateway.reports import NotReady
from broker.http.connections import FAULTS
from broker.http.ops import start_ops
from broker.http.readiness import ANSWER_SECONDS, RefusesSends
from broker.metrics import EndpointMetrics, GatewayMetrics, Scene
from broker.settings.config import ConfigurationError

BUSY_S = 3.0  # so much later a busy machine may answer


class Source:
    """A broker with two partitions, whose faults the test sets."""

    version = "1.2.3"
    partitions = (0, 1)
    gateways: tuple[int, ...] = ()

    def __init__(self):
        self.reason = None
        self.faults = {}
        self.faults_of_gateways = {}
        self.hanging = set()
        self.released = asyncio.Event()
        self.seconds = 0.0  # that a probe takes
        self.probes = []

    def connection_dropped(self):
        pass

    def accept_failed(self, error):
        raise error

    def unready(self):
        return self.reason

    async def probe(self, partition):
        self.probes.append(partition)
        if partition in self.hanging:
            await self.released.wait()
        await asyncio.sleep(self.seconds)
        if partition in self.faults:
            raise self.faults[partition]

    async def probe_gateway(self, number):
        if number in self.faults_of_gateways:
            raise self.faults_of_gateways[number]

    async def scene(self):
        gateway = GatewayMetrics()
        gateway.connections_opened = 3
        return Scene({0: gateway.snapshot(0)}, {}, (), {}, self.version, EndpointMetrics())


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


def test_a_partition_without_room_for_messages_is_named_and_the_broker_is_ready():
    source = Source()
    source.faults[1] = RefusesSends("the disk is nearly full")
    refuses = {"refuse_sends": {"1": "the disk is nearly full"}}
    assert ask(source, "/readyz")[:2] == (200, {"status": "ready", "partitions": 2} | refuses)
    source.faults[0] = ServerBusy("down")
    status, body, _ = ask(source, "/readyz")
    assert (status, body["reason"], body["partitions"]) == (503, "partitions that fail: 0", {"0": "down"})
    assert body["refuse_sends"] == refuses["refuse_sends"]


def test_a_gateway_that_takes_no_clients_is_named_with_the_reason():
    source = Source()
    source.gateways = (0, 1)
    assert ask(source, "/readyz")[:2] == (200, {"status": "ready", "partitions": 2})
    source.faults_of_gateways[1] = NotReady("its process has ended")
    body = {"status": "not ready", "reason": "gateways that fail: 1", "partitions": {}}
    assert ask(source, "/readyz")[:2] == (503, body | {"gateways": {"1": "its process has ended"}})
    source.faults[0] = ServerBusy("down")
    assert ask(source, "/readyz")[1]["reason"] == "partitions that fail: 0; gateways that fail: 1"


def test_a_fault_without_text_is_named_by_its_kind():
    source = Source()
    source.faults[0] = ConnectionResetError()
    assert ask(source, "/readyz")[1]["partitions"] == {"0": "ConnectionResetError"}


async def readiness(client):
    """The status, the body, and the seconds that the answer took."""
    began = time.monotonic()
    async with client.get("/readyz") as response:
        return response.status, await response.json(), time.monotonic() - began


def seconds_said(answer):
    [text] = answer[1]["partitions"].values()
    return float(re.fullmatch(r"no answer for (\d+\.\d) s", text)[1])


def test_beside_a_partition_that_hangs_the_answer_comes_within_a_second_and_then_at_once():
    source = Source()
    source.hanging.add(1)

    async def exchange():
        async with serving(source) as client:
            first = await readiness(client)
            second = await readiness(client)
            await asyncio.sleep(0.5)  # the third answer tells of it
            third = await readiness(client)
            source.hanging.clear()
            source.released.set()
            return first, second, third, await readiness(client)

    first, second, third, last = asyncio.run(exchange())
    for status, body, seconds in (first, second, third):
        assert status == 503
        assert body["reason"] == "partitions that fail: 1"
        assert set(body["partitions"]) == {"1"}
        assert seconds < ANSWER_SECONDS + BUSY_S
    assert ANSWER_SECONDS < 1
    assert 0.7 < seconds_said(first) < ANSWER_SECONDS + BUSY_S
    assert 1.2 < seconds_said(third) < ANSWER_SECONDS + 0.5 + BUSY_S
    assert second[2] < ANSWER_SECONDS - 0.1
    assert third[2] < ANSWER_SECONDS - 0.1
    assert source.probes.count(1) == 2  # it is not asked again before it has answered
    assert last[0] == 200


def test_a_slow_disk_is_no_fault_once_it_is_known_as_slow():
    source = Source()

    async def exchange():
        async with serving(source) as client:
            before = await readiness(client)
            source.seconds = 1.2
            found = [await readiness(client)]
            await asyncio.sleep(0.6)  # its first slow answer has come
            for _ in range(4):
                found.append(await readiness(client))
                await asyncio.sleep(0.3)  # so that they come at any time of a probe
            source.seconds = 60
            await asyncio.sleep(0.5)  # the last probe of before has ended
            hanging = [await readiness(client) for _ in range(5)]
            return before, found, hanging

    before, found, hanging = asyncio.run(exchange())
    assert before[0] == 200
    assert [status for status, *_ in found] == [503, 200, 200, 200, 200]
    statuses = [status for status, *_ in hanging]
    assert statuses == sorted(statuses)
    assert (statuses[0], statuses[-1]) == (200, 503)  # after 2.4 seconds
    assert all(seconds < ANSWER_SECONDS + BUSY_S for _, _, seconds in (before, *found, *hanging))


def test_a_known_fault_holds_until_a_slow_probe_has_ended():
    source = Source()
    source.seconds = 0.5

    async def exchange():
        async with serving(source) as client:
            assert (await readiness(client))[0] == 200
            source.faults[1] = ServerBusy("the disk is full")
            await readiness(client)
            source.seconds = 0.9
            return await readiness(client)

    assert asyncio.run(exchange())[1]["partitions"] == {"1": "the disk is full"}


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
    assert 'peeklock_connections_opened_total{gateway="0"} 3.0\n' in text


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


@pytest.mark.parametrize(
    "request_",
    [
        b"G" * 200_000,
        b"GET /livez HTTP/1.1\r\n" + b"X-Header: y\r\n" * 20_000,
        b"POST /livez HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
    ],
    ids=["no end", "many headers", "chunks"],
)
def test_a_malformed_request_is_answered_and_not_logged(request_, caplog):
    """Everybody who reaches the port could fill the log with what they send."""

    async def exchange():
        async with serving(Source()) as client:
            reader, writer = await asyncio.open_connection("127.0.0.1", client._base_url.port)
            writer.write(request_)
            answers = await reader.read()
            writer.close()
            return answers

    answers = asyncio.run(exchange())
    assert b"HTTP/1.0 400" in answers or b"HTTP/1.1 400" in answers
    assert not [record.name for record in caplog.records]


def test_a_client_that_goes_while_its_body_is_awaited_is_not_logged_and_other_faults_are(caplog):
    """As aiohttp tells of it, which depends on how the end and the last bytes meet."""
    for error in (RuntimeError("Connection closed."), RuntimeError("another"), ValueError("Connection closed.")):
        FAULTS.error("Unhandled exception", exc_info=error)
    assert [str(record.exc_info[1]) for record in caplog.records] == ["another", "Connection closed."]
