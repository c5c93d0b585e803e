"""TLS on the AMQP and HTTP ports of a real broker: certificates that are exchanged, and those of clients."""

import json
import os
import pty
import signal
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import proton
import pytest
import trustme
from proton.utils import BlockingConnection, LinkDetached

from protocol.nodes.sas_tokens import generate
from tests.brokers import KEY, KEY_NAME, REPOSITORY, Broker
from tests.patience import PATIENCE_S, eventually
from tests.ports import free_ports

QUEUES = '[[queues]]\nname = "orders"\n[[queues]]\nname = "others"\n'
MESSAGE = proton.Message(body="one")


class Certificates:
    """An authority with the files of a server."""

    def __init__(self, directory: Path) -> None:
        self.authority = trustme.CA()
        self.ca, self.certificate, self.key = (directory / name for name in ("ca.pem", "server.pem", "server.key"))
        self.authority.cert_pem.write_to_path(self.ca)
        self.issue()

    def issue(self, *names: str):
        issued = self.authority.issue_cert("localhost", *names)
        self.certificate.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(self.key)

    def client(self, path: Path, name: str) -> Path:
        self.authority.issue_cert(name, common_name=f"CN {name}").private_key_and_cert_chain_pem.write_to_path(path)
        return path

    def settings(self, **others: object) -> str:
        files: dict[str, object] = {"certificate": self.certificate, "key": self.key} | others
        return "[tls]\n" + "".join(f'{name} = "{value}"\n' for name, value in files.items())


def started(directory: Path, settings: str, gateways: int = 1, **options) -> tuple[Broker, int, int]:
    """The broker, and its ports for AMQP and HTTP with TLS."""
    amqps, https = free_ports(2)
    ports = f"gateways = {gateways}\n[amqp]\ntls_port = {amqps}\n[http]\ntls_port = {https}\n"
    broker = Broker(directory, ports + settings + QUEUES, **options)
    broker.start()
    return broker, amqps, https


def served(port: int, ca: Path) -> bytes | None:
    """The certificate that is shown on this port."""
    context = ssl.create_default_context(cafile=ca)
    with (
        socket.create_connection(("localhost", port), PATIENCE_S) as connection,
        context.wrap_socket(connection, server_hostname="localhost") as secure,
    ):
        return secure.getpeercert(binary_form=True)


def get(port: int, path: str, ca: Path, certificate: Path | None = None) -> int:
    context = ssl.create_default_context(cafile=ca)
    if certificate is not None:
        context.load_cert_chain(certificate)
    try:
        with urllib.request.urlopen(f"https://localhost:{port}{path}", timeout=PATIENCE_S, context=context) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def external(port: int, ca: Path, certificate: Path) -> BlockingConnection:
    domain = proton.SSLDomain(proton.SSLDomain.MODE_CLIENT)
    domain.set_trusted_ca_db(str(ca))
    domain.set_peer_authentication(proton.SSLDomain.VERIFY_PEER_NAME)
    domain.set_credentials(str(certificate), str(certificate), None)
    return BlockingConnection(
        f"amqps://localhost:{port}", timeout=PATIENCE_S, ssl_domain=domain, allowed_mechs="EXTERNAL", sasl_enabled=True
    )


@pytest.mark.parametrize("gateways", [1, 2])
def test_certificates_are_exchanged_while_connections_stay(tmp_path, gateways):
    made = Certificates(tmp_path)
    broker, amqps, https = started(tmp_path, made.settings(), gateways)
    try:
        before = served(amqps, made.ca)
        assert served(https, made.ca) == before
        client = made.client(tmp_path / "client.pem", "client.example")
        domain = proton.SSLDomain(proton.SSLDomain.MODE_CLIENT)
        domain.set_trusted_ca_db(str(made.ca))
        domain.set_credentials(str(client), str(client), None)
        with_key = f"amqps://RootManageSharedAccessKey:SAS_KEY_VALUE@localhost:{amqps}"
        connection = BlockingConnection(with_key, timeout=PATIENCE_S, ssl_domain=domain, allowed_mechs="PLAIN")
        sender = connection.create_sender("orders")
        sender.send(MESSAGE)

        made.issue()
        os.kill(broker.pid, signal.SIGHUP)
        after = eventually(lambda: (now := served(amqps, made.ca)) != before and now, "the new certificate")
        eventually(lambda: served(https, made.ca) == after, "the new certificate for HTTP")
        sender.send(MESSAGE)  # on the connection of before

        made.key.write_text("no key")
        os.kill(broker.pid, signal.SIGHUP)
        eventually(lambda: "certificates not reloaded" in broker.log(), "the log says why not")
        assert str(made.key) in broker.log()
        assert served(amqps, made.ca) == after
        sender.send(MESSAGE)
        connection.close()
    finally:
        broker.stop()


def test_tokens_may_name_the_hosts_of_the_certificate(tmp_path):
    """Of the one that is there now."""
    made = Certificates(tmp_path)
    made.issue("*.first.example", "10.1.2.3")
    broker, _, https = started(tmp_path, made.settings())

    def status(resource):
        token = generate(resource, KEY_NAME, KEY, int(time.time()) + 60)
        request = urllib.request.Request(f"https://localhost:{https}/orders", headers={"Authorization": token})
        try:
            context = ssl.create_default_context(cafile=made.ca)
            with urllib.request.urlopen(request, timeout=PATIENCE_S, context=context) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    try:
        assert status("broker.first.example/orders") == 200
        assert [status(each) for each in ("first.example", "a.b.first.example", "second.example")] == [401] * 3
        made.issue("second.example")
        os.kill(broker.pid, signal.SIGHUP)
        eventually(lambda: status("second.example/orders") == 200, "the new certificate's names")
        assert status("broker.first.example/orders") == 401
        made.key.write_text("no key")
        os.kill(broker.pid, signal.SIGHUP)
        eventually(lambda: "certificates not reloaded" in broker.log(), "the log says why not")
        assert status("second.example") == 200
    finally:
        broker.stop()


def test_a_client_certificate_has_the_rights_of_its_names(tmp_path):
    made = Certificates(tmp_path)
    sends = made.client(tmp_path / "sends.pem", "sends.example")
    manages = made.client(tmp_path / "manages.pem", "manages.example")
    unknown = made.client(tmp_path / "unknown.pem", "unknown.example")
    rights = (
        '[[security.certificates]]\nname = "sends.example"\nrights = ["Send"]\nentity = "Orders"\n'
        '[[security.certificates]]\nname = "CN manages.example"\nrights = ["Manage"]\n'
    )
    broker, amqps, https = started(
        tmp_path, made.settings(client_ca=made.ca, client_certificates="optional") + rights, arguments=()
    )
    try:
        connection = external(amqps, made.ca, sends)
        connection.create_sender("orders").send(MESSAGE)
        with pytest.raises(LinkDetached, match="unauthorized-access"):
            connection.create_sender("others")
        with pytest.raises(LinkDetached, match="unauthorized-access"):
            connection.create_receiver("orders")
        connection.close()
        connection = external(amqps, made.ca, manages)
        receiver = connection.create_receiver("orders")
        assert receiver.receive(PATIENCE_S).body == "one"
        receiver.accept()
        connection.close()
        connection = external(amqps, made.ca, unknown)
        with pytest.raises(LinkDetached, match="unauthorized-access"):
            connection.create_sender("orders")

        assert get(https, "/orders", made.ca, manages) == 200
        assert get(https, "/orders", made.ca, unknown) == 401
        assert get(https, "/orders", made.ca) == 401
        assert get(https, "/others", made.ca, sends) == 401
    finally:
        broker.stop()


def test_clients_without_a_certificate_are_refused_where_one_is_required(tmp_path):
    made = Certificates(tmp_path)
    client = made.client(tmp_path / "client.pem", "client.example")
    foreign = Certificates.__new__(Certificates)
    foreign.authority = trustme.CA()
    other = foreign.client(tmp_path / "foreign.pem", "client.example")
    broker, _, https = started(tmp_path, made.settings(client_ca=made.ca))
    try:
        assert get(https, "/health", made.ca, client) == 200
        for certificate in (None, other):
            with pytest.raises((urllib.error.URLError, OSError)):
                get(https, "/health", made.ca, certificate)
    finally:
        broker.stop()


def test_the_end_of_the_certificate_is_measured_and_warned_about(tmp_path):
    made = Certificates(tmp_path)
    soon = made.authority.issue_cert("localhost", not_after=datetime.now(UTC) + timedelta(days=3))
    made.certificate.write_bytes(soon.cert_chain_pems[0].bytes())
    soon.private_key_pem.write_to_path(made.key)
    broker, _, _ = started(tmp_path, made.settings())
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{broker.ops_port}/metrics", timeout=PATIENCE_S) as answer:
            [line] = [each for each in answer.read().decode().splitlines() if each.startswith("peeklock_tls_cert")]
        assert abs(float(line.split()[-1]) - (time.time() + 3 * 86400)) < 3600
        [warning] = [json.loads(each) for each in broker.log().splitlines() if "certificate ends soon" in each]
        assert 2.9 < warning["days_left"] <= 3
    finally:
        broker.stop()


def test_a_broker_at_a_terminal_ends_with_it(tmp_path):
    broker = Broker(tmp_path)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(REPOSITORY)
        os.execv(sys.executable, [sys.executable, "-m", "broker.cli", *broker.command()])
    shown = b""
    while b"Connection string" not in shown:
        shown += os.read(terminal, 65536)
    os.kill(pid, signal.SIGHUP)  # with the terminal still there, it goes on
    time.sleep(0.5)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.close(terminal)
    eventually(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, "its end")
