"""`peeklock ca`: what it makes is used by a real broker, and by openssl's rules."""

import ssl
import subprocess
import sys
import urllib.request

import pytest

from broker.cli.authority import Authority, is_client, is_host
from tests.brokers import REPOSITORY, Broker
from tests.ports import free_ports


def peeklock(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "broker.cli", *map(str, arguments)], cwd=REPOSITORY, capture_output=True, text=True
    )


def test_a_broker_and_its_clients_use_what_it_makes(tmp_path):
    made = tmp_path / "certificates"
    result = peeklock("ca", made)
    assert result.returncode == 0, result.stderr
    assert f"NODE_EXTRA_CA_CERTS={made}/ca.pem" in result.stdout
    assert peeklock("ca", made, "--client", "billing").returncode == 0
    assert {each.name for each in made.iterdir() if each.stat().st_mode & 0o077} == {
        "ca.pem",
        "server.pem",
        "billing.pem",
        "truststore.p12",
    }
    [https] = free_ports(1)
    config = (
        f'[http]\ntls_port = {https}\n[tls]\ncertificate = "{made}/server.pem"\nkey = "{made}/server.key"\n'
        f'client_ca = "{made}/ca.pem"\n[[security.certificates]]\nname = "billing"\nrights = ["Manage"]\n'
    )
    with Broker(tmp_path / "broker", config, arguments=()):
        context = ssl.create_default_context(cafile=made / "ca.pem")
        context.load_cert_chain(made / "billing.pem", made / "billing.key")
        for host in ("localhost", "127.0.0.1"):
            with urllib.request.urlopen(f"https://{host}:{https}/$Resources/queues", context=context) as answer:
                assert answer.status == 200


def test_the_authority_stays_and_the_certificate_is_new(tmp_path):
    assert peeklock("ca", tmp_path, "--host", "a.example.net", "--host", "10.0.0.1").returncode == 0
    authority, certificate = (tmp_path / "ca.pem").read_bytes(), (tmp_path / "server.pem").read_bytes()
    assert peeklock("ca", tmp_path, "--host", "a.example.net").returncode == 0
    assert (tmp_path / "ca.pem").read_bytes() == authority
    assert (tmp_path / "server.pem").read_bytes() != certificate
    verify = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", tmp_path / "ca.pem"]
    for host, code in (("a.example.net", 0), ("b.example.net", 2)):
        result = subprocess.run([*verify, "-verify_hostname", host, tmp_path / "server.pem"], capture_output=True)
        assert result.returncode == code, result


def test_files_that_are_no_authority_are_left_alone(tmp_path):
    (tmp_path / "ca.pem").write_text("mine")
    result = peeklock("ca", tmp_path)
    assert result.returncode == 78
    assert "Name another directory" in result.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["ca.pem"]
    one, other = Authority(tmp_path / "one"), Authority(tmp_path / "other")
    one.certificate_file.write_bytes(other.certificate_file.read_bytes())
    assert "is not the key of ca.pem" in peeklock("ca", tmp_path / "one").stderr


@pytest.mark.parametrize(
    "arguments",
    [("--host", "a b"), ("--host", ""), ("--client", "../x"), ("--client", "ca"), ("--client", "a", "--host", "b")],
)
def test_names_that_cannot_be_used_are_refused(tmp_path, arguments):
    result = peeklock("ca", tmp_path / "new", *arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "new").exists()


def test_hosts():
    for host in ("localhost", "a.example.net", "*.example.net", "::1", "10.0.0.1", "_a-b.c"):
        assert is_host(host)
    for text in ("", ".", "a..b", "-a", "a/b", "a\n", "é", "a" * 64, ".".join(["a" * 60] * 5), "*", "a.*"):
        assert not is_host(text)
    assert is_client("billing")
    assert not is_client("Server")
    assert not is_client("*.example.net")
