"""deploy/cluster-certificates makes what TLS between gateways and workers needs."""

import os
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from tests.deployment.manifests import skip_or_fail
from tests.patience import PATIENCE_S

PROGRAM = Path(__file__).parents[2] / "deploy" / "cluster-certificates"


@pytest.fixture(autouse=True)
def openssl():
    if shutil.which("openssl") is None:
        skip_or_fail("openssl is not installed")


def make(*arguments):
    return subprocess.run(
        [PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def made(*arguments):
    done = make(*arguments)
    assert done.returncode == 0, done.stderr


def context(protocol, directory, name, authority=None):
    found = ssl.SSLContext(protocol)
    found.minimum_version = ssl.TLSVersion.TLSv1_3
    found.verify_mode = ssl.CERT_REQUIRED
    found.verify_flags |= ssl.VERIFY_X509_STRICT
    found.load_cert_chain(directory / f"{name}.crt", directory / f"{name}.key")
    found.load_verify_locations((authority or directory) / "ca.crt")
    return found


def shake_hands(client, server, name):
    """A TLS connection in memory: both sides write and read once. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname=name)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    waiting = [one, other]
    for _ in range(10):
        for side in list(waiting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(side)
        if not waiting:
            break
    assert not waiting
    one.write(b"command")
    assert other.read(7) == b"command"
    other.write(b"answer")
    assert one.read(6) == b"answer"


@pytest.mark.parametrize("name", ["worker-a", "worker-a.example.net", "10.1.2.3", "fd00::1"])
def test_both_sides_know_each_other(tmp_path, name):
    made(tmp_path, "worker-a", "worker-a.example.net", "10.1.2.3", "fd00::1")
    made(tmp_path, "gateway")
    server = context(ssl.PROTOCOL_TLS_SERVER, tmp_path, "worker-a")
    client = context(ssl.PROTOCOL_TLS_CLIENT, tmp_path, "gateway")
    shake_hands(client, server, name)


def test_another_name_is_refused(tmp_path):
    made(tmp_path, "worker-a")
    made(tmp_path, "worker-b")
    server = context(ssl.PROTOCOL_TLS_SERVER, tmp_path, "worker-b")
    client = context(ssl.PROTOCOL_TLS_CLIENT, tmp_path, "worker-a")
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(client, server, "worker-a")


def test_a_certificate_of_another_authority_is_refused(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    made(ours, "worker-a")
    made(theirs, "gateway")
    server = context(ssl.PROTOCOL_TLS_SERVER, ours, "worker-a")
    stranger = context(ssl.PROTOCOL_TLS_CLIENT, theirs, "gateway", authority=ours)
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        shake_hands(stranger, server, "worker-a")


def test_keys_are_for_their_owner_alone(tmp_path):
    made(tmp_path, "worker-a")
    assert {file.name for file in tmp_path.iterdir()} == {"ca.crt", "ca.key", "worker-a.crt", "worker-a.key"}
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.iterdir())


def test_the_authority_stays_and_certificates_are_renewed(tmp_path):
    made(tmp_path, "worker-a")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    made(tmp_path, "worker-a")
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"worker-a.crt", "worker-a.key"}


@pytest.mark.parametrize("arguments", [(), ("only-a-directory",)])
def test_without_a_name_it_tells_how_to_call_it(tmp_path, arguments):
    done = make(*(tmp_path / each for each in arguments))
    assert done.returncode == 2
    assert "deploy/cluster-certificates DIR NAME" in done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["ca", "../elsewhere", ".hidden"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path, name):
    done = make(tmp_path / "made", name)
    assert done.returncode == 2
    assert name in done.stderr
    assert not any(tmp_path.iterdir())


def test_a_failure_leaves_nothing(tmp_path):
    temporary, programs, target = (tmp_path / name for name in ("temporary", "programs", "target"))
    temporary.mkdir()
    programs.mkdir()
    (programs / "openssl").write_text("#!/bin/sh\nexit 1\n")
    (programs / "openssl").chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "TMPDIR": str(temporary)}
    done = subprocess.run(
        [PROGRAM, target, "worker-a"], env=environment, capture_output=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1
    assert not any(target.iterdir())
    assert not any(temporary.iterdir())
