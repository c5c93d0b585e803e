"""A broker that runs a syphon: what is in its backlog reaches the primary, and nobody else notices."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from broker.inner_syphon.inner_syphon import own_address
from broker.settings.config import ConfigurationError
from broker.settings.sources import load
from protocol.client.connection_string import ConnectionString, SharedAccessKey
from tests.brokers import KEY, KEY_NAME, REPOSITORY, Broker
from tests.end_to_end.health import logged
from tests.pairing.conftest import QUEUES, fill, taken
from tests.patience import PATIENCE_S, eventually
from tests.ports import free_ports

QUEUE = "main/x-servicebus-transfer/{}"


@pytest.fixture(scope="module")
def primary(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("primary"), QUEUES) as broker:
        yield broker


def section(primary: Broker, **values: object) -> str:
    lines = [
        "[syphon]",
        f'primary = "{primary.connection_string}"',
        f'primary_http = "http://localhost:{primary.http_port}"',
        'primary_name = "main"',
        "backlog_queues = 2",
        *(f"{name} = {value}" for name, value in values.items()),
    ]
    return "\n".join(lines) + "\n"


def metrics(broker: Broker) -> dict[str, float]:
    """The samples by name and labels."""
    status, text = broker.get("/metrics")
    assert status == 200
    return {name: float(value) for name, value in re.findall(r"^([^#\s]+) (\S+)$", text, re.MULTILINE)}


def syphon_of(broker: Broker) -> psutil.Process:
    [found] = broker.running_as("broker.inner_syphon")
    return found


def is_draining(broker: Broker) -> bool:
    return metrics(broker).get(f'peeklock_syphon_lease_held{{queue="{QUEUE.format(1)}"}}') == 1


@pytest.mark.parametrize(("workers", "gateways"), [(0, 1), (1, 1), (1, 2)])
def test_a_backlog_is_drained_and_shown_among_the_brokers_metrics(primary, tmp_path, workers, gateways):
    text = f"gateways = {gateways}\n" + section(primary, rate=5000.0)
    with Broker(tmp_path, text, workers=workers) as secondary:
        eventually(lambda: is_draining(secondary), "the lease")
        asyncio.run(fill(secondary, QUEUE.format(0), "orders", 300))
        asyncio.run(fill(secondary, QUEUE.format(1), "gone", 1))
        eventually(lambda: metrics(secondary)["peeklock_syphon_completed_messages_total"] == 300, "all")
        dead = 'peeklock_syphon_deadletter_message_total{reason="SyphonDestinationNotFound"}'
        eventually(lambda: metrics(secondary).get(dead) == 1, "the dead letter")
        shown = metrics(secondary)
        assert shown["peeklock_syphon_up"] == shown["peeklock_syphon_primary_up"] == 1
        assert shown["peeklock_syphon_restarts_total"] == 0
        assert shown['peeklock_process_resident_memory_bytes{process="syphon"}'] > 1e6
        assert len(asyncio.run(taken(primary, "orders"))) == 300
    # It was stopped in order, and before the gateway, so that it could give all back.
    log = secondary.log_file.read_text()
    assert "secondary is away" not in log
    assert "Traceback" not in log
    assert "killing" not in log


def test_a_syphon_that_dies_is_started_again_and_no_client_notices(primary, tmp_path):
    with Broker(tmp_path, section(primary), workers=1) as secondary:
        eventually(lambda: is_draining(secondary), "the lease")
        gateway = secondary.gateway()
        first = syphon_of(secondary)
        first.kill()
        eventually(lambda: metrics(secondary).get("peeklock_syphon_restarts_total") == 1, "a restart")
        eventually(lambda: is_draining(secondary), "the lease")
        assert syphon_of(secondary) != first
        assert secondary.gateway() == gateway
        second = syphon_of(secondary)
        second.suspend()
        try:
            assert metrics(secondary)["peeklock_syphon_up"] == 0
            assert secondary.get("/readyz")[0] == 200
        finally:
            second.resume()


def test_a_new_root_key_reaches_the_syphon(primary, tmp_path):
    text = section(primary)
    secondary = Broker(tmp_path, f'[security]\nroot_key = "{KEY}"\n' + text, arguments=())
    with secondary:
        eventually(lambda: is_draining(secondary), "the lease")
        secondary.config_file.write_text('[security]\nroot_key = "another"\n' + text)
        os.kill(secondary.pid, signal.SIGHUP)
        eventually(lambda: secondary.log_file.read_text().count("lease taken") >= 4, "the lease again")
        eventually(lambda: is_draining(secondary), "the lease")


def test_a_broker_serves_although_its_syphon_cannot_work(primary, tmp_path):
    strict = Broker(tmp_path / "strict", f'[security]\nroot_key = "{KEY}"\n', arguments=())
    with strict:
        wrong = strict.connection_string_for(KEY_NAME, "wrong")
        text = section(primary).replace(primary.connection_string, wrong)
        with Broker(tmp_path / "secondary", text) as secondary:
            reason = "the primary refuses the key.*the backlog cannot be drained"
            eventually(lambda: logged(secondary, reason), "the reason")
            assert secondary.get("/readyz")[0] == 200
            assert syphon_of(secondary).is_running()
            assert "wrong" not in secondary.log_file.read_text()


def test_a_primary_that_is_this_broker_by_another_name_is_told(tmp_path):
    secondary = Broker(tmp_path)
    secondary.config_file.write_text(
        section(secondary).replace("sb://localhost", "sb://localhost.localdomain")  # config check cannot know it
    )
    with secondary:
        text = "the secondary is the primary: both are the namespace 'peeklock'"
        eventually(lambda: logged(secondary, text), "the reason")


def test_the_primary_may_have_the_same_ports_at_another_loopback_address(tmp_path):
    hosts = "[amqp]\nhost = '{0}'\n[http]\nhost = '{0}'\n"
    primary = Broker(tmp_path / "primary", hosts.format("127.0.0.2") + QUEUES)
    text = section(primary).replace("//localhost", "//127.0.0.2")
    secondary = Broker(tmp_path / "secondary", hosts.format("127.0.0.1") + text)
    for broker in (primary, secondary):
        broker.own_amqp_port = broker.amqp_port = primary.own_amqp_port
        broker.http_port = primary.http_port
    with primary, secondary:
        eventually(lambda: is_draining(secondary), "the lease")
        asyncio.run(fill(secondary, QUEUE.format(0), "orders", 3))
        eventually(lambda: metrics(secondary)["peeklock_syphon_completed_messages_total"] == 3, "all")


# --- settings ---------------------------------------------------------------------------------------------------------

AWAY = "Endpoint=sb://other:5672;SharedAccessKeyName=a;SharedAccessKey=secret;UseDevelopmentEmulator=true"
TLS = '[tls]\ncertificate = "{0}"\nkey = "{0}"\nclient_ca = "{0}"\n[amqp]\nport = "off"\ntls_port = 5671\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('primary = "nonsense"', "syphon.primary: A part of the connection string has no '='."),
        (f'primary = "{AWAY.replace("other", "localhost")}"', "syphon.primary: is this broker itself; name the other"),
        (f'primary = "{AWAY}"\nprimary_http = "other:5300"', 'syphon.primary_http: "other:5300" is no address such as'),
        (f'primary = "{AWAY}"\nprimary_name = "a b"', 'syphon.primary_name: "a b" must be 1 to 200 letters'),
        (f'primary = "{AWAY}"\nbacklog_queues = 0', "syphon.backlog_queues: 0 is out of range; it must be from 1 to"),
        (f'primary = "{AWAY}"\nrate = 0.0', "syphon.rate: 0.0 is out of range; it must be above 0 to 1000000, or off"),
        (f'primary = "{AWAY}"\nca = "/nowhere.pem"', "syphon.ca: '/nowhere.pem' is not a file; name a PEM file"),
        (f'primary = "{AWAY}"\n[http]\nport = "off"', "syphon.primary: needs http.port, or http.tls_port with"),
        (f'primary = "{AWAY}"\n{TLS}', "syphon.primary: needs amqp.port, or amqp.tls_port with"),
    ],
)
def test_settings_that_cannot_work_are_told_without_the_key(tmp_path, text, problem):
    file = tmp_path / "peeklock.toml"
    file.write_text("[syphon]\n" + text.replace("{0}", str(file)))
    with pytest.raises(ConfigurationError) as raised:
        load(file)
    [line] = str(raised.value).splitlines()
    assert line.startswith(f"{file}: {problem}")
    assert "secret" not in line


def at(primary: str, listening: str) -> str:
    text = AWAY.replace("sb://other", f"sb://[{primary}]" if ":" in primary else f"sb://{primary}")
    return f'[syphon]\nprimary = "{text}"\n[amqp]\nhost = "{listening}"\n'


@pytest.mark.parametrize(
    ("primary", "listening"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "localhost"),
        ("localhost", "127.0.0.1"),
        ("LOCALHOST", "::1"),
        ("127.0.0.2", "127.0.0.2"),
        ("127.0.0.9", "0.0.0.0"),
        ("::1", "::"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("localhost", "0.0.0.0"),
        ("10.0.0.1", "10.0.0.1"),
        ("Broker.example.com", "broker.example.com"),
    ],
)
def test_a_primary_that_is_this_broker_by_its_address_is_told(tmp_path, primary, listening):
    file = tmp_path / "peeklock.toml"
    file.write_text(at(primary, listening))
    with pytest.raises(ConfigurationError, match=r"syphon\.primary: is this broker itself"):
        load(file)


@pytest.mark.parametrize(
    ("primary", "listening"),
    [
        ("127.0.0.2", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.2"),
        ("localhost", "127.0.0.2"),
        ("127.0.0.9", "localhost"),
        ("::1", "127.0.0.1"),
        ("127.0.0.1", "::"),
        ("localhost", "10.0.0.1"),
        ("10.0.0.2", "10.0.0.1"),
    ],
)
def test_another_address_of_this_machine_may_be_the_primary(tmp_path, primary, listening):
    file = tmp_path / "peeklock.toml"
    file.write_text(at(primary, listening))
    assert load(file).settings.syphon.primary is not None


@pytest.mark.parametrize(
    ("listening", "host"),
    [("0.0.0.0", "127.0.0.1"), ("127.0.0.3", "127.0.0.3"), ("::", "::1"), ("::1", "::1"), ("localhost", "localhost")],
)
@pytest.mark.parametrize("tls", [False, True])
def test_the_syphon_connects_to_the_very_address_of_its_broker(listening, host, tls):
    target = ConnectionString.parse(own_address(listening, 7, "k/e+y=", tls=tls))
    assert (target.host, target.port, target.tls) == (host, 7, tls)
    assert target.credentials == SharedAccessKey("RootManageSharedAccessKey", "k/e+y=")


def peeklock(directory: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    own = {name: value for name, value in os.environ.items() if not name.startswith("PEEKLOCK_")}
    return subprocess.run(
        [sys.executable, "-m", "broker.cli", *arguments],
        cwd=REPOSITORY,
        env=own | variables | {"PEEKLOCK_DATA_DIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_the_primary_may_be_a_variable_and_is_not_shown(tmp_path):
    done = peeklock(tmp_path, "config", "show", PEEKLOCK_SYPHON__PRIMARY=AWAY)
    assert 'primary = "***"  # PEEKLOCK_SYPHON__PRIMARY' in done.stdout
    assert "secret" not in done.stdout + done.stderr


def test_one_broker_of_several_machines_runs_none(tmp_path):
    [port] = free_ports(1)
    done = peeklock(tmp_path, "gateway", "--workers", f"127.0.0.1:{port}", PEEKLOCK_SYPHON__PRIMARY=AWAY)
    assert done.returncode == 78
    assert "syphon.primary is for `peeklock serve`; beside gateways, run `peeklock syphon`" in done.stderr
