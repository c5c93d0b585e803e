"""The name in the connection string for TLS is one that the certificate is for."""

import pytest
import trustme
from typer.testing import CliRunner

from broker.certified_host import choose
from broker.cli.all_commands import app
from broker.settings.config import Settings
from broker.supervisor.supervisor import start_text

ALL = "0.0.0.0"


@pytest.mark.parametrize(
    ("host", "names", "others", "expected"),
    [
        ("127.0.0.1", ["localhost"], [], "localhost"),
        (ALL, ["peeklock.example", "localhost"], [], "localhost"),
        (ALL, ["peeklock.example"], [], "peeklock.example"),
        ("::", ["10.0.0.1", "peeklock.example"], [], "peeklock.example"),
        ("127.0.0.1", ["127.0.0.1"], [], "127.0.0.1"),
        ("::1", ["0:0:0:0:0:0:0:1"], [], "::1"),
        (ALL, ["127.0.0.1"], [], "127.0.0.1"),
        ("10.0.0.1", ["peeklock.example", "10.0.0.1"], [], "10.0.0.1"),
        ("10.0.0.2", ["peeklock.example", "10.0.0.1"], [], "peeklock.example"),
        ("Broker.Example", ["broker.example."], [], "Broker.Example"),
        ("a.example", ["*.example"], [], "a.example"),
        ("a.b.example", ["*.example"], [], None),
        (ALL, ["*.example"], ["bus.example"], "bus.example"),
        (ALL, ["*.example", "other.example"], ["bus.example"], "bus.example"),
        (ALL, ["*.example", "other.test"], ["bus.test"], "other.test"),
        (ALL, ["*.example"], ["example"], None),
        (ALL, [], ["example"], None),
    ],
)
def test_a_host_of_the_certificate(host, names, others, expected):
    assert choose(host, names, others) == expected


@pytest.fixture
def certificate(tmp_path):
    def issue(*names):
        issued = trustme.CA().issue_cert(*names)
        (tmp_path / "server.pem").write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(tmp_path / "server.key")
        return {"certificate": str(tmp_path / "server.pem"), "key": str(tmp_path / "server.key")}

    return issue


def printed(certificate, host=ALL, **others):
    variables = {
        "PEEKLOCK_TLS__CERTIFICATE": certificate["certificate"],
        "PEEKLOCK_TLS__KEY": certificate["key"],
        "PEEKLOCK_AMQP__HOST": host,
        "PEEKLOCK_AMQP__TLS_PORT": "5671",
        "PEEKLOCK_SECURITY__ROOT_KEY": "key",
    }
    return CliRunner().invoke(app, ["connection-string", "--tls"], env=variables | others)


def test_the_command_prints_a_name_of_the_certificate(certificate):
    files = certificate("peeklock.messaging.svc", "10.0.0.1")
    for host in (ALL, "127.0.0.1", "192.168.0.1"):
        result = printed(files, host)
        assert result.stdout.startswith("Endpoint=sb://peeklock.messaging.svc;SharedAccessKeyName="), result.output
    assert printed(files, "10.0.0.1").stdout.startswith("Endpoint=sb://10.0.0.1;")


def test_a_certificate_of_wildcards_needs_a_name(certificate):
    files = certificate("*.messaging.example")
    result = printed(files)
    assert (result.exit_code, "name the host that clients connect to in security.host_names" in result.stderr) == (
        78,
        True,
    )
    named = printed(files, PEEKLOCK_SECURITY__HOST_NAMES='["*.servicebus.windows.net", "bus.messaging.example"]')
    assert named.stdout.startswith("Endpoint=sb://bus.messaging.example;")


def test_the_start_text_of_a_broker_with_tls_alone_has_it_too(certificate):
    settings = Settings(
        amqp={"host": ALL, "port": None, "tls_port": 5671}, tls=certificate("bus.example"), security={"root_key": "key"}
    )
    assert "Endpoint=sb://bus.example;" in start_text(settings, {"amqps_port": 5671}, "key")
