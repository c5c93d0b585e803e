"""`peeklock pair` as a command: what is wrong is told, and TLS."""

import signal
import socket
import ssl

import pytest

from broker.cli.authority import Authority
from protocol.client.connection import connect
from protocol.client.connection_string import Plain
from tests.brokers import KEY, KEY_NAME, Broker
from tests.pairing.commands import Command, both
from tests.pairing.sidecar.conftest import Pair, message, until_it_holds
from tests.patience import PATIENCE_S, eventually
from tests.ports import free_ports

STRICT = f"""
[security]
root_key = "{KEY}"
[[security.authorization_rules]]
key_name = "listener"
primary_key = "listener's"
rights = ["Listen"]
"""


@pytest.fixture
def start(primary, secondary, tmp_path):
    started = []

    def start(*arguments, options=None):
        options = both(primary, secondary) if options is None else options
        listen = () if "--listen" in arguments else ("--listen", f"127.0.0.1:{free_ports(1)[0]}")
        started.append(Command(tmp_path / str(len(started)), "pair", *options, *listen, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.__exit__()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--backlog-queues", "0"], "--backlog-queues"),
        (["--listen", "5672"], "--listen: '5672' is no address such as 127.0.0.1:5672"),
        (["--listen", "localhost:99999"], "--listen"),
        (["--failover-interval", "soon"], "--failover-interval"),
        (["--ping-interval", "0s"], "ping_interval_ms is 0; it must be 100 to"),
        (["--attempt-timeout", "2d"], "attempt_timeout_ms is 172800000; it must be 10 to"),
        (["--primary-name", "a/b"], "the primary's name is 'a/b'"),
        (["--host-name", "a b"], "--host-name: 'a b' is no name of a host"),
        (["--tls-key", "/nowhere"], "give both --tls-certificate and --tls-key, or neither"),
        (["--tls-key", "/nowhere", "--tls-certificate", "/nowhere"], "--tls-certificate /nowhere with --tls-key"),
    ],
)
def test_wrong_use_is_told(start, arguments, text):
    command = start(*arguments)
    assert command.end() == 2, command.err
    assert text in command.err
    assert "Traceback" not in command.err


def test_one_namespace_is_no_pair(start, primary):
    command = start(options=both(primary, primary))
    assert command.end() == 2
    assert "the secondary is the primary" in command.err


@pytest.mark.parametrize("which", [0, 1])
def test_a_connection_string_is_needed(start, primary, secondary, which):
    options = both(primary, secondary)
    del options[4 * which : 4 * which + 2]
    command = start(options=options)
    assert command.end() == 2
    assert ("PEEKLOCK_PRIMARY", "PEEKLOCK_SECONDARY")[which] in command.err


@pytest.mark.parametrize(
    ("side", "key_name", "key", "text"),
    [
        ("primary", KEY_NAME, "wrong", "the primary refuses the key"),
        ("secondary", KEY_NAME, "wrong", "the secondary refuses the key"),
        ("secondary", "listener", "listener's", "has no right to send to"),
    ],
)
def test_missing_rights_are_told(tmp_path, start, side, key_name, key, text):
    with (
        Broker(tmp_path / "one", STRICT, arguments=()) as one,
        Broker(tmp_path / "other", STRICT, arguments=()) as other,
    ):
        made = start("--primary-name", "rights", options=both(one, other))  # makes the queues
        eventually(lambda: "sidecar is ready" in made.err, "it is ready")
        assert made.end(signal.SIGTERM) == 0
        options = both(one, other)
        at = options.index(f"--{side}") + 1
        broker = one if side == "primary" else other
        options[at] = (
            f"Endpoint=sb://localhost:{broker.amqp_port};SharedAccessKeyName={key_name};SharedAccessKey={key};"
            "UseDevelopmentEmulator=true"
        )
        command = start("--primary-name", "rights", options=options)
        assert command.end() == 1, command.err
        assert text in command.err
        assert "Traceback" not in command.err


def test_a_port_that_is_taken_is_told(start, primary):
    command = start("--listen", f"127.0.0.1:{primary.amqp_port}")
    assert command.end() == 1
    assert "--listen: cannot listen on" in command.err


async def test_clients_by_tls_and_a_new_certificate_by_a_signal(tmp_path, primary, secondary):
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.issue("server", ["localhost"], is_server=True)
    trust = ssl.create_default_context(cafile=str(authority.certificate_file))
    files = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    with Pair(tmp_path, primary, secondary, "tls", *files) as pair:

        async def serial() -> bytes:
            async with await connect(
                "localhost", pair.sidecar.port, Plain(KEY_NAME, KEY), tls=trust, timeout_s=PATIENCE_S
            ) as connection:
                await (await connection.sender("orders")).send(message(b"by TLS"))
            raw = socket.create_connection(("localhost", pair.sidecar.port), PATIENCE_S)
            with trust.wrap_socket(raw, server_hostname="localhost") as connected:
                found = connected.getpeercert(binary_form=True)
                assert found is not None
                return found

        first = await serial()
        other, other_key = authority.issue("other", ["localhost"], is_server=True)
        certificate.write_bytes(other.read_bytes())
        key.write_bytes(other_key.read_bytes())
        pair.sidecar.signal(signal.SIGHUP)

        async def is_new() -> bool:
            return await serial() != first

        await until_it_holds(is_new)
