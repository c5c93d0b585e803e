"""The whole broker as an operator meets it: signals, deaths, ports in use, health and metrics."""

import os
import re
import signal
import socket

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.brokers import KEY, Broker, BrokerFailed
from tests.patience import PATIENCE_S, eventually

QUEUE = '[[queues]]\nname = "orders"\n'


@pytest.fixture
def broker(tmp_path):
    broker = Broker(tmp_path, QUEUE)
    yield broker
    broker.kill()


def metrics(broker):
    status, text = broker.get("/metrics")
    assert status == 200
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def is_ready(broker):
    try:
        return broker.get("/readyz")[0] == 200
    except OSError:
        return False


def test_it_says_where_it_is_and_how_to_connect(broker):
    broker.start()
    eventually(lambda: "is ready" in broker.log(), "the start text")
    text = broker.log()
    assert f"amqp://127.0.0.1:{broker.amqp_port}\n" in text
    assert broker.connection_string in text
    broker.stop()


def test_the_random_key_is_printed_at_the_first_start_only(tmp_path):
    broker = Broker(tmp_path, QUEUE, arguments=())
    try:
        broker.start()
        eventually(lambda: "is ready" in broker.log(), "the start text")
        key = (broker.data_dir / "root-key").read_text().strip()
        assert broker.log().count(key) == 1
        broker.restart()
        eventually(lambda: broker.log().count("is ready") == 2, "the start text")
        assert broker.log().count(key) == 1
        broker.stop()
    finally:
        broker.kill()


def test_sigterm_ends_all_of_it_cleanly(broker):
    broker.start()
    processes = broker.processes()
    assert len(processes) >= 3
    broker.stop()  # raises unless the exit code is 0
    assert not [each for each in processes if each.is_running()]
    broker.start()
    broker.stop()


def test_sigterm_ends_a_start_cleanly(tmp_path):
    """A container's first process gets no signal that it does not handle."""
    broker = Broker(tmp_path, QUEUE, arguments=())
    broker.data_dir.mkdir()
    os.mkfifo(pipe := broker.data_dir / "root-key", 0o600)

    def pipe_that_is_read():
        try:
            return os.fdopen(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w")
        except OSError:
            return None  # nobody reads it yet

    broker.begin()
    try:
        with eventually(pipe_that_is_read, "it waits for its key"):
            broker.stop()  # raises unless the exit code is 0
        assert "Traceback" not in broker.log()
    finally:
        broker.kill()


def test_a_killed_worker_is_started_again_and_the_broker_becomes_ready(broker):
    broker.start()
    killed = broker.worker()
    killed.kill()
    killed.wait(PATIENCE_S)
    eventually(lambda: is_ready(broker), "ready again")
    shown = metrics(broker)
    assert shown["peeklock_worker_restarts_total", "0"] == 1
    assert shown["peeklock_worker_up", "0"] == 1
    broker.stop()


def test_a_killed_gateway_is_started_again_on_its_ports(broker):
    broker.start()
    killed = broker.gateway()
    killed.kill()
    killed.wait(PATIENCE_S)
    eventually(lambda: is_ready(broker), "ready again")
    socket.create_connection(("127.0.0.1", broker.amqp_port), PATIENCE_S).close()
    broker.stop()


def test_while_a_worker_is_down_readiness_names_its_partitions(tmp_path):
    broker = Broker(tmp_path, "partitions = 2\n" + QUEUE, workers=1)
    try:
        broker.start()
        broker.worker().suspend()
        status, body = broker.get("/readyz")
        assert status == 503
        assert "partitions that fail: 0, 1" in body
        assert broker.get("/livez")[0] == 200
        assert metrics(broker)["peeklock_worker_up", "0"] == 0
        broker.worker().resume()
        eventually(lambda: is_ready(broker), "ready again")
        broker.stop()
    finally:
        broker.kill()


def test_when_the_supervisor_is_killed_nothing_is_left_and_a_successor_can_start_at_once(broker):
    broker.start()
    supervisor, *children = broker.processes()
    supervisor.kill()
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not alive
    broker.kill()  # reaps the supervisor
    broker.start()
    broker.stop()


def test_a_second_signal_means_now(broker):
    broker.start()
    gateway = broker.gateway()
    gateway.suspend()  # cannot end by itself
    children = broker.processes()[1:]
    os.kill(broker.pid, signal.SIGTERM)
    eventually(lambda: '"stopping"' in broker.log(), "that it stops")
    os.kill(broker.pid, signal.SIGTERM)
    _, alive = psutil.wait_procs(children, timeout=5.0)
    assert not alive


@pytest.mark.parametrize(
    ("flag", "setting"),
    [("amqp_port", "amqp.port"), ("http_port", "http.port"), ("ops_port", "ops.port")],
    ids=["AMQP", "HTTP", "operations"],
)
def test_a_port_in_use_is_one_message_with_the_setting(broker, flag, setting):
    with socket.create_server(("127.0.0.1", getattr(broker, flag))) as taken:
        with pytest.raises(BrokerFailed):
            broker.start()
        port = taken.getsockname()[1]
    log = broker.log()
    assert re.search(rf"peeklock: cannot start: cannot listen on 127\.0\.0\.1 port {port} .*{re.escape(setting)}", log)
    assert f"set {setting} to another" in log
    assert "Traceback" not in log
    assert not (broker.data_dir / "partitions" / "0").exists(), "ports are tried before stores are made"


@pytest.mark.parametrize("gateways", [1, 2])
@pytest.mark.parametrize(
    ("host", "advice"),
    [("203.0.113.7", "This machine has no such address: set amqp.host"), ("none.invalid", "No such name is known")],
)
def test_an_address_of_another_machine_is_one_message_with_the_setting(tmp_path, gateways, host, advice):
    broker = Broker(tmp_path, f'gateways = {gateways}\n[amqp]\nhost = "{host}"\n')
    with pytest.raises(BrokerFailed, match=f"cannot listen on {host} port {broker.amqp_port} .*{advice}"):
        broker.start()
    assert "Traceback" not in broker.log()


def test_another_broker_on_its_ports_is_not_taken_for_it(broker, tmp_path):
    broker.start()
    second = Broker(tmp_path / "second", QUEUE)
    second.amqp_port, second.ops_port = broker.amqp_port, broker.ops_port
    with pytest.raises(BrokerFailed, match="cannot listen"):
        second.start()


@pytest.mark.parametrize("content", [None, "not a certificate"], ids=["missing", "nonsense"])
def test_a_certificate_that_cannot_be_used_is_one_message_with_the_setting(tmp_path, content):
    certificate = tmp_path / "server.pem"
    if content is not None:
        certificate.write_text(content)
    tls = f'[amqp]\ntls_port = 0\n[tls]\ncertificate = "{certificate}"\nkey = "{certificate}"\n'
    broker = Broker(tmp_path, tls)
    with pytest.raises(BrokerFailed):
        broker.start()
    log = broker.log()
    assert re.search(r"peeklock: .*tls\.certificate", log, re.DOTALL)
    assert str(certificate) in log
    assert "Traceback" not in log


def test_a_second_broker_on_the_same_directory_is_refused(broker, tmp_path):
    broker.start()
    second = Broker(tmp_path / "second", QUEUE, arguments=("--emulator", "--data-dir", str(broker.data_dir)))
    with pytest.raises(BrokerFailed, match=f"in use by process {broker.pid}"):
        second.start()
    assert is_ready(broker)
    broker.stop()


def test_metrics_and_health_of_a_fresh_broker(broker):
    broker.start()
    assert broker.get("/health") == (200, '{"status": "healthy", "message": "Service is healthy."}')
    shown = metrics(broker)
    assert shown["peeklock_messages", "orders"] == 0
    assert shown["peeklock_size_bytes", "orders"] == 0
    assert shown["peeklock_active_connections", "0"] == 0
    assert 0 < shown["peeklock_store_used_bytes", "0"] < shown["peeklock_store_capacity_bytes", "0"]
    assert shown["peeklock_quarantined_records", "0"] == 0
    assert shown["peeklock_worker_commits_total", "0"] > 0  # the probes that waited for readiness
    assert KEY not in broker.get("/metrics")[1]
    broker.stop()
