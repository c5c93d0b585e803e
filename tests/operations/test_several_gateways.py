"""Several gateways on one port: a client has one of them, and an operator sees them all."""

import json
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from bench.processes import command_of
from tests.brokers import REPOSITORY, Broker
from tests.end_to_end.health import is_ready, logged, serves
from tests.end_to_end.raw_peer import ACCEPTED, CLOSE, DISPOSITION, Closed, RawPeer, message
from tests.patience import PATIENCE_S, eventually

STALL_MS = 3000
CONFIG = f"""
gateways = 2
gateway_stall_timeout_ms = {STALL_MS}

[[queues]]
name = "witness"

[[queues]]
name = "orders"
"""


@pytest.fixture
def broker(tmp_path):
    with Broker(tmp_path, CONFIG, workers=1) as broker:
        yield broker
        for process in broker.processes():
            process.resume()
    assert "Traceback" not in broker.log_file.read_text(), broker.log()


def gateway_of(broker: Broker, peer: RawPeer) -> psutil.Process:
    """The one that serves this client."""
    own = peer.socket.getsockname()
    return next(
        each for each in broker.gateways() if any(connection.raddr == own for connection in each.net_connections("tcp"))
    )


def clients_of_both(broker: Broker, stack: ExitStack) -> dict[psutil.Process, RawPeer]:
    """A client of each gateway; the system decides which it gets."""
    found: dict[psutil.Process, RawPeer] = {}
    while len(found) < 2:
        peer = stack.enter_context(RawPeer.connect(broker.amqp_port))
        found.setdefault(gateway_of(broker, peer), peer)
    return found


def sends(peer: RawPeer, handle: int) -> None:
    peer.transfer(message(b"m"), handle)
    assert peer.expect(DISPOSITION, 2).fields[4].descriptor == ACCEPTED


def shown(broker: Broker, name: str) -> dict[str, float]:
    """The samples of a metric, by gateway or by process."""
    status, text = broker.get("/metrics")
    assert status == 200
    return {value: float(number) for value, number in re.findall(rf'^{name}\{{\w+="([^"]*)"\}} (\S+)$', text, re.M)}


def readiness(broker: Broker) -> tuple[int, Any]:
    status, body = broker.get("/readyz")
    return status, json.loads(body)


def number_of(process: psutil.Process) -> str:
    """Its number: a gateway has a socket for the observer."""
    paths = {each.laddr for each in process.net_connections("unix") if "run/gateway-" in each.laddr}
    [path] = paths
    return re.fullmatch(r".*gateway-(\d+)\.sock", path)[1]


def connections_to(broker: Broker, gateway: psutil.Process) -> int:
    return sum(
        each.status == psutil.CONN_ESTABLISHED and each.laddr.port == broker.amqp_port
        for each in gateway.net_connections("tcp")
    )


def test_one_endpoint_shows_all_gateways_and_what_partitions_and_workers_count_once(broker):
    with ExitStack() as stack:
        clients = clients_of_both(broker, stack)
        for gateway, peer in clients.items():
            handle = peer.attach_sender("orders")
            for _ in range(3 + int(number_of(gateway))):
                sends(peer, handle)
        assert shown(broker, "peeklock_gateway_up") == {"0": 1, "1": 1}
        held = {number_of(each): connections_to(broker, each) for each in clients}
        assert shown(broker, "peeklock_active_connections") == held
        lines = broker.get("/metrics")[1].splitlines()
        for number in (0, 1):
            assert f'peeklock_incoming_messages_total{{entity="orders",gateway="{number}"}} {3 + number}.0' in lines
        assert 'peeklock_messages{entity="orders"} 7.0' in lines
        assert shown(broker, "peeklock_worker_up") == {"0": 1}
        assert set(shown(broker, "peeklock_process_resident_memory_bytes")) == {
            "gateway", "gateway-1", "observer", "worker-0", "checkpointer-0"
        }  # fmt: skip
        samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
        assert len(samples) == len(set(samples))
    assert readiness(broker) == (200, {"status": "ready", "partitions": 4})


def test_a_gateway_that_hangs_is_replaced_while_the_clients_of_the_other_go_on(broker):
    with ExitStack() as stack:
        (hung, waiting), (sound, served) = clients_of_both(broker, stack).items()
        handle = served.attach_sender("orders")
        number, other = number_of(hung), number_of(sound)
        hung.suspend()
        began = time.monotonic()
        status, body = readiness(broker)
        assert time.monotonic() - began < STALL_MS / 1000 - 1, "it is answered before the gateway is replaced"
        assert status == 503
        assert body["reason"] == f"gateways that fail: {number}"
        assert re.fullmatch(r"no answer for \d\.\d s", body["gateways"][number])
        assert shown(broker, "peeklock_gateway_up") == {number: 0, other: 1}
        assert set(shown(broker, "peeklock_active_connections")) == {other}
        assert broker.get("/livez")[0] == 200
        while hung.is_running():
            assert time.monotonic() < began + PATIENCE_S
            sends(served, handle)
            time.sleep(0.05)
        assert time.monotonic() - began > STALL_MS / 1000 - 1.5
        assert logged(broker, "process stalled")
        with pytest.raises(Closed):
            waiting.expect(DISPOSITION)
        eventually(lambda: len(broker.gateways()) == 2, "another was started")
        sends(served, handle)
        assert sound.is_running()
        eventually(lambda: is_ready(broker), "ready again")
        assert shown(broker, "peeklock_gateway_restarts_total") == {number: 1, other: 0}
    for _ in range(8):  # whichever of the two
        serves(broker.amqp_port)


def test_whichever_process_dies_the_endpoint_is_there_again_and_clients_of_others_go_on(broker):
    with ExitStack() as stack:
        (killed, _), (_, served) = clients_of_both(broker, stack).items()
        handle = served.attach_sender("orders")
        number = number_of(killed)
        supervisor = broker.processes()[0]
        supervisor.suspend()  # it shall not be replaced at once
        killed.kill()
        eventually(lambda: killed.status() == psutil.STATUS_ZOMBIE, "it is dead")
        assert readiness(broker)[1]["gateways"] == {number: "its process is starting, or has ended"}
        assert shown(broker, "peeklock_gateway_up")[number] == 0
        supervisor.resume()
        eventually(lambda: is_ready(broker), "ready again")
        assert shown(broker, "peeklock_gateway_restarts_total")[number] == 1
        before = {each.pid for each in broker.gateways()}
        observer = broker.observer()
        observer.kill()
        observer.wait(PATIENCE_S)
        sends(served, handle)
        eventually(lambda: is_ready(broker), "the endpoint is there again")
        observer = broker.observer()
        observer.suspend()
        sends(served, handle)
        observer.wait(PATIENCE_S)  # it is replaced, too
        eventually(lambda: is_ready(broker), "the endpoint is there again")
        sends(served, handle)
        assert {each.pid for each in broker.gateways()} == before


def test_while_gateways_end_the_endpoint_tells(broker):
    with RawPeer.connect(broker.amqp_port) as peer:  # it does not answer the close, so its gateway waits for a second
        broker.processes()[0].terminate()
        eventually(lambda: "the broker is shutting down" in broker.get("/readyz")[1], "it is told")
        assert peer.expect(CLOSE)
    eventually(lambda: not broker.running, "all have ended")


def test_without_an_endpoint_there_is_no_process_for_it(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(f"workers = 1\namqp.port = 0\nhttp.port = 0\nops.port = 'off'\n{CONFIG}")
    command = [sys.executable, "-m", "broker.cli", "serve", "--config", config, "--data-dir", tmp_path / "data"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as serve:
        said = [serve.stdout.readline() for _ in range(5)]
        modules = [command_of(each)[-1] for each in psutil.Process(serve.pid).children()]
        serve.terminate()
    assert "is ready" in said[0]
    assert not [line for line in said if "Operations" in line]
    assert sorted(modules) == ["broker.gateway", "broker.gateway", "broker.worker"]


def test_gateways_with_nothing_to_do_are_left_alone(broker):
    before = [each.pid for each in broker.processes()]
    time.sleep(STALL_MS / 1000 + 1.5)
    assert [each.pid for each in broker.processes()] == before
