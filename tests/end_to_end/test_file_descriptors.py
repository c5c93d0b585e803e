"""A broker with few file descriptors: who takes them all on one port does not shut out the others, and it is said."""

import http.client
import json
import resource
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.brokers import REPOSITORY, Broker
from tests.end_to_end.health import metrics, serves
from tests.end_to_end.raw_peer import CLOSE, DISPOSITION, RawPeer, error_of
from tests.patience import PATIENCE_S, eventually
from tests.ports import free_ports

CONFIG = 'partitions = 1\n[[queues]]\nname = "witness"\n[[queues]]\nname = "orders"\n'
DESCRIPTORS = 400
LIMITED = ("sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh")
FEW = ("sh", "-c", 'ulimit -n 60; exec "$@"', "sh")
RAISED = ("sh", "-c", 'ulimit -S -n 256; exec "$@"', "sh")

CERTIFICATE = REPOSITORY / "tests/protocol_client/localhost.pem"
CLIENT_HELLO_BEGINS = b"\x16\x03\x01\x02\x00\x01\x00"


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
        gateway = broker.gateway()
        for _ in range(2 * DESCRIPTORS):
            with suppress(OSError):
                stack.enter_context(half_open(broker.ops_port, sent))
        eventually(lambda: gateway.num_fds() < DESCRIPTORS / 2, "descriptors that are given back")
        serves(broker.amqp_port)
        assert broker.get("/readyz")[0] == 200
        peer.attach_sender("witness")  # who was there before still is
        assert metrics(broker)["peeklock_operations_connections_dropped_total",] > 0


def test_a_request_that_is_not_finished_ends_after_a_time(tmp_path):
    with Broker(tmp_path, CONFIG) as broker, half_open(broker.ops_port, b"GET / HTTP/1.1\r\n") as connection:
        began = time.monotonic()
        connection.settimeout(PATIENCE_S)
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
        assert broker.get("/readyz")[0] == 200
        lines = events(broker, "connections refused")
        assert lines
        assert len(lines) < 20
        shown = metrics(broker)
        assert shown["peeklock_connections_refused_total",] > 50
        for peer in peers:
            peer.socket.close()
        eventually(lambda: metrics(broker)["peeklock_active_connections",] < 10, "connections that have ended")
        serves(broker.amqp_port)


def test_descriptors_that_the_system_allows_are_taken(tmp_path):
    with Broker(tmp_path, CONFIG, prefix=RAISED) as broker, ExitStack() as stack:
        peers = [stack.enter_context(RawPeer.connect(broker.amqp_port)) for _ in range(400)]
        peers[-1].attach_sender("witness")
        assert not events(broker, "fewer connections than amqp.max_connections")


# --- TLS handshakes that do not end -----------------------------------------------------------------------------------


@contextmanager
def tls_broker(directory: Path, connections: int, timeout_ms: int, **options: Any) -> Iterator[tuple[Broker, int]]:
    """A broker with these limits of connections and handshakes, and its port for TLS."""
    [port] = free_ports(1)
    tls = f'[tls]\ncertificate = "{CERTIFICATE}"\nkey = "{CERTIFICATE}"\n'
    tls += f"handshake_timeout_ms = {timeout_ms}\n"
    amqp = f"[amqp]\ntls_port = {port}\nmax_connections = {connections}\n"
    with Broker(directory, CONFIG.replace("[[", f"{amqp}{tls}[[", 1), **options) as broker:
        yield broker, port


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1000) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_peers_in_the_tls_handshake_are_connections(tmp_path):
    with tls_broker(tmp_path, 3, 2000) as (broker, port), ExitStack() as stack:
        for sent in (b"", CLIENT_HELLO_BEGINS, b""):
            stack.enter_context(half_open(port, sent))
        eventually(lambda: metrics(broker)["peeklock_tls_handshakes",] == 3, "accepted")
        with RawPeer(broker.amqp_port) as refused:
            refused.sasl_plain()
            refused.open()
            condition, text = error_of(refused.expect(CLOSE))
            assert (condition, "3 connections" in text) == ("amqp:resource-limit-exceeded", True)
        eventually(lambda: metrics(broker)["peeklock_tls_handshakes",] == 0, "the end of the time for TLS")
        serves(broker.amqp_port)


def test_a_flood_of_unfinished_handshakes_takes_no_more_than_connections_may(tmp_path):
    with tls_broker(tmp_path, 20, 4000, prefix=LIMITED) as (broker, port), ExitStack() as stack:
        peer = stack.enter_context(RawPeer.connect(broker.amqp_port))
        sender = peer.attach_sender("orders")
        gateway = broker.gateway()
        before = gateway.num_fds()
        began = time.monotonic()
        flood = [stack.enter_context(half_open(port, b"")) for _ in range(DESCRIPTORS - 100)]
        eventually(lambda: sum(map(is_closed, flood)) > 200, "those beyond the limit are cut off")
        assert time.monotonic() - began < 3, "before the end of the time for TLS"
        assert gateway.num_fds() < before + 100
        assert broker.get("/readyz")[0] == 200
        peer.transfer(b"", sender)
        assert peer.expect(DISPOSITION)
        assert metrics(broker)["peeklock_connections_refused_total",] > 200
        assert 0 < len(events(broker, "connections refused")) < 5
        eventually(lambda: metrics(broker)["peeklock_tls_handshakes",] == 0, "the end of the time for TLS")
        serves(broker.amqp_port)


def test_a_handshake_that_ends_gives_its_place_back_however_it_ends(tmp_path):
    trusting = ssl.create_default_context(cafile=CERTIFICATE)
    trusting.check_hostname = False

    def finishes(connection: socket.socket) -> None:
        trusting.wrap_socket(connection).close()

    def hangs_up(connection: socket.socket) -> None:
        connection.shutdown(socket.SHUT_WR)

    def resets(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    def speaks_amqp(connection: socket.socket) -> None:
        connection.sendall(b"AMQP\x03\x01\x00\x00")

    def waits(connection: socket.socket) -> None: ...

    with tls_broker(tmp_path, 4, 1000) as (broker, port), ExitStack() as stack:
        for end in (finishes, hangs_up, resets, speaks_amqp, waits):
            for _ in range(5):
                end(stack.enter_context(half_open(port, b"")))
            eventually(lambda: metrics(broker)["peeklock_tls_handshakes",] == 0, "their end")
            eventually(lambda: metrics(broker)["peeklock_active_connections",] == 0, "their end")
            serves(broker.amqp_port)
            serves(broker.amqp_port)


# --- no descriptor is left --------------------------------------------------------------------------------------------


def assert_idle(gateway: Any) -> None:
    """It does not ask again and again for what it does not get."""
    began, before = time.monotonic(), sum(gateway.cpu_times()[:2])
    time.sleep(1.5)
    assert sum(gateway.cpu_times()[:2]) - before < 0.3 * (time.monotonic() - began)


def scraped(connection: http.client.HTTPConnection, name: str) -> float:
    """A metric's value, asked for on this connection."""
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name}{{"))


@pytest.mark.parametrize("spare", [5, -8], ids=["they are used up", "there are fewer than are in use"])
def test_without_a_descriptor_clients_wait_and_others_go_on(tmp_path, spare):
    with Broker(tmp_path, CONFIG, prefix=LIMITED) as broker, ExitStack() as stack:
        peer = stack.enter_context(RawPeer.connect(broker.amqp_port))
        sender = peer.attach_sender("orders")
        scraper = http.client.HTTPConnection("127.0.0.1", broker.ops_port, timeout=PATIENCE_S)
        stack.callback(scraper.close)
        assert scraped(scraper, "peeklock_accept_failures_total") == 0
        gateway = broker.gateway()
        gateway.rlimit(resource.RLIMIT_NOFILE, (gateway.num_fds() + spare, DESCRIPTORS))
        waiting = [stack.enter_context(RawPeer(broker.amqp_port)) for _ in range(30)]
        eventually(lambda: events(broker, "no connection can be accepted"), "a line in the log")
        assert_idle(gateway)
        peer.transfer(b"", sender)
        assert peer.expect(DISPOSITION)
        assert scraped(scraper, "peeklock_accept_failures_total") > 0
        gateway.rlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        waiting[-1].sasl_plain()
        waiting[-1].open()
        serves(broker.amqp_port)
        assert len(events(broker, "no connection can be accepted")) < 5


def test_a_broker_that_has_used_up_its_descriptors_serves_again_when_some_are_free(tmp_path):
    with Broker(tmp_path, CONFIG, prefix=FEW) as broker, RawPeer.connect(broker.amqp_port) as peer:
        sender = peer.attach_sender("orders")
        gateway = broker.gateway()
        with ExitStack() as stack:
            for _ in range(80):
                stack.enter_context(half_open(broker.ops_port, b""))
            eventually(lambda: events(broker, "no connection can be accepted"), "a line in the log")
            late = RawPeer(broker.amqp_port)
            assert_idle(gateway)
            peer.transfer(b"", sender)
            assert peer.expect(DISPOSITION)
        with late:
            late.sasl_plain()
            late.open()
        assert metrics(broker)["peeklock_accept_failures_total",] > 0
