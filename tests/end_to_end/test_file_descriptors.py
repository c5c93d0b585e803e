"""A broker with few file descriptors: who takes them all on one port does not shut out the others, and it is said."""

import json
import socket
import time
from contextlib import ExitStack, suppress

import pytest

from tests.brokers import Broker
from tests.end_to_end.health import eventually, metrics, process_of, serves
from tests.end_to_end.raw_peer import CLOSE, RawPeer, error_of

CONFIG = 'partitions = 1\n[[queues]]\nname = "witness"\n'
DESCRIPTORS = 400
LIMITED = ("sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh")
RAISED = ("sh", "-c", 'ulimit -S -n 256; exec "$@"', "sh")


def half_open(port: int, sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    connection.sendall(sent)
    return connection


def events(broker: Broker, text: str) -> list[dict]:
    lines = broker.log_file.read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and text in line]


@pytest.mark.parametrize("sent", [b"", b"GET /readyz HTTP/1.1\r\nHost: x\r\n"], ids=["silent", "half a request"])
def test_half_open_requests_for_operations_cut_off_nobody(tmp_path, sent):
    with Broker(tmp_path, CONFIG, prefix=LIMITED) as broker, ExitStack() as stack:
        peer = stack.enter_context(RawPeer.connect(broker.amqp_port))
        gateway = process_of(broker, "broker.gateway")
        for _ in range(2 * DESCRIPTORS):
            with suppress(OSError):
                stack.enter_context(half_open(broker.ops_port, sent))
        eventually(lambda: gateway.num_fds() < DESCRIPTORS / 2, "descriptors that are given back")
        serves(broker.amqp_port)
        assert broker.get("/readyz", timeout_s=10)[0] == 200
        peer.attach_sender("witness")  # who was there before still is
        assert metrics(broker)["peeklock_operations_connections_dropped_total",] > 0


@pytest.mark.slow
def test_a_request_that_is_not_finished_ends_after_a_time(tmp_path):
    with Broker(tmp_path, CONFIG) as broker, half_open(broker.ops_port, b"GET / HTTP/1.1\r\n") as connection:
        began = time.monotonic()
        connection.settimeout(20)
        while connection.recv(1000):
            pass
        assert time.monotonic() - began > 2


def test_connections_beyond_the_descriptors_are_refused_and_told_why(tmp_path):
    with Broker(tmp_path, CONFIG, prefix=LIMITED) as broker, ExitStack() as stack:
        [warning] = events(broker, "fewer connections than amqp.max_connections")
        allowed = warning["connections"]
        assert DESCRIPTORS / 4 < allowed < DESCRIPTORS
        first = stack.enter_context(RawPeer.connect(broker.amqp_port))
        peers = [stack.enter_context(RawPeer.connect(broker.amqp_port)) for _ in range(allowed - 1)]
        with RawPeer(broker.amqp_port) as refused:
            refused.sasl_plain()
            refused.open()
            condition, text = error_of(refused.expect(CLOSE))
            assert (condition, str(allowed) in text) == ("amqp:resource-limit-exceeded", True)
        for _ in range(2 * DESCRIPTORS):
            with suppress(OSError):
                stack.enter_context(half_open(broker.amqp_port, b""))
        first.attach_sender("witness")
        peers[-1].attach_sender("witness")
        assert broker.get("/readyz", timeout_s=10)[0] == 200
        lines = events(broker, "connections refused")
        assert lines
        assert len(lines) < 20
        shown = metrics(broker)
        assert shown["peeklock_connections_refused_total",] > 50
        for peer in peers:
            peer.socket.close()
        eventually(lambda: metrics(broker)["peeklock_active_connections",] < 10, "connections that have ended", 30)
        serves(broker.amqp_port)


def test_descriptors_that_the_system_allows_are_taken(tmp_path):
    with Broker(tmp_path, CONFIG, prefix=RAISED) as broker, ExitStack() as stack:
        peers = [stack.enter_context(RawPeer.connect(broker.amqp_port)) for _ in range(400)]
        peers[-1].attach_sender("witness")
        assert not events(broker, "fewer connections than amqp.max_connections")
