"""The image in place of the Service Bus emulator: the emulator's variables, file, key, ports and health route."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from proton import Message
from proton.utils import BlockingConnection

from protocol.nodes.sas_tokens import generate
from tests.brokers import KEY, KEY_NAME, REPOSITORY
from tests.end_to_end.raw_peer import RawPeer
from tests.end_to_end.raw_requests import Node, put_token, token_for
from tests.operations.test_deploy import environment, final_stage, only
from tests.patience import PATIENCE_S, eventually
from tests.ports import free_ports

CONFIG = REPOSITORY / "tests" / "configuration" / "Config.json"
EMULATORS = {"ACCEPT_EULA": "Y", "SQL_SERVER": "mssql", "MSSQL_SA_PASSWORD": "secret", "SQL_WAIT_INTERVAL": "0"}
HEALTHY = {"status": "healthy", "message": "Service is healthy."}


class Container:
    """The image's command in its environment, with `root` in place of its file system, on ports of the loopback."""

    def __init__(self, root: Path, *arguments: str, **more: str) -> None:
        self.amqp_port, self.http_port, ops_port = free_ports(3)
        self.output = root / "output"
        inside = environment()
        inside["PEEKLOCK_CONFIG"] = ":".join(f"{root}{path}" for path in inside["PEEKLOCK_CONFIG"].split(":"))
        inside |= {name: f"{root}{inside[name]}" for name in ("PEEKLOCK_DATA_DIR", "PEEKLOCK_IMAGE")}
        inside |= {name: "127.0.0.1" for name in inside if name.endswith("__HOST")}
        inside |= {"PEEKLOCK_AMQP__PORT": str(self.amqp_port), "PEEKLOCK_OPS__PORT": str(ops_port)}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "broker.cli", *json.loads(only("CMD")), *arguments],
                cwd=REPOSITORY,
                env={**os.environ, **inside, "PATH": os.environ["PATH"], **more},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def said(self) -> str:
        return self.output.read_text()

    def connect(self) -> BlockingConnection:
        return BlockingConnection(
            f"amqp://localhost:{self.amqp_port}", timeout=PATIENCE_S, user=KEY_NAME, password=KEY, allowed_mechs="PLAIN"
        )

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of deploy/ that the image has, where it has them, and the place for the data."""
    (tmp_path / "var/lib").mkdir(parents=True)
    for source, place in (text.split() for name, text in final_stage() if name == "COPY" and "--from" not in text):
        copied = Path(f"{tmp_path}{place}")
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes((REPOSITORY / source).read_bytes())
    return tmp_path


@pytest.fixture
def started() -> Iterator[list[Container]]:
    started: list[Container] = []
    yield started
    for each in started:
        each.process.kill()
        each.process.wait()


def emulators_place() -> str:
    """Where the compose file mounts the file."""
    service = yaml.safe_load((REPOSITORY / "deploy/emulator.yaml").read_text())["services"]["emulator"]
    assert service["image"] == "peeklock"
    assert service["ports"] == ["127.0.0.1:5672:5672", "127.0.0.1:5300:5300"]
    [volume] = service["volumes"]
    source, place, mode = volume.split(":")
    assert (source, mode) == ("${CONFIG_PATH}", "ro")
    return str(place)


def test_the_emulators_file_mounted_where_the_emulator_has_it_is_enough(root, started):
    mounted = Path(f"{root}{emulators_place()}")
    mounted.parent.mkdir(parents=True)
    mounted.write_bytes(CONFIG.read_bytes())
    (http_port,) = free_ports(1)
    broker = Container(root, **EMULATORS, EMULATOR_HTTP_PORT=str(http_port))
    started.append(broker)
    eventually(lambda: "Emulator Service is Successfully Up!" in broker.said(), "what tools wait for")
    address = f"http://localhost:{http_port}"
    with urllib.request.urlopen(f"{address}/health", timeout=PATIENCE_S) as answer:
        assert (answer.status, json.load(answer)) == (200, HEALTHY)
    headers = {"Authorization": generate("sb://localhost/", KEY_NAME, KEY, int(time.time()) + 60)}
    with urllib.request.urlopen(
        urllib.request.Request(f"{address}/queue.1", headers=headers), timeout=PATIENCE_S
    ) as answer:
        assert b"<MaxDeliveryCount>3</MaxDeliveryCount>" in answer.read()
    connection = broker.connect()
    connection.create_sender("queue.1").send(Message(body="x"))
    receiver = connection.create_receiver("queue.1")
    assert receiver.receive(timeout=PATIENCE_S).body == "x"
    receiver.accept()
    connection.close()
    assert broker.stop() == 0, broker.said()


def test_without_that_file_the_image_has_the_emulators_default_entities_and_again_after_a_restart(root, started):
    has_the_default_entities(root, started)
    has_the_default_entities(root, started)
    assert not (root / "var/lib/peeklock/root-key").exists()


def has_the_default_entities(root: Path, started: list[Container]) -> None:
    (http_port,) = free_ports(1)
    broker = Container(root, **EMULATORS, EMULATOR_HTTP_PORT=str(http_port))
    started.append(broker)
    eventually(lambda: "Emulator Service is Successfully Up!" in broker.said(), "what tools wait for")
    assert "not in the emulator's place" not in broker.said()
    headers = {"Authorization": generate("sb://localhost/", KEY_NAME, KEY, int(time.time()) + 60)}

    def answer(path: str) -> str:
        request = urllib.request.Request(f"http://localhost:{http_port}/{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answered:
            return str(answered.read().decode())

    listed = answer("$Resources/queues") + answer("$Resources/topics")
    assert re.findall(r"<entry.*?<title[^>]*>([^<]+)</title>", listed, re.DOTALL) == ["queue.1", "topic.1"]
    assert "sql-filter-1" in answer("topic.1/subscriptions/subscription.4/rules")
    connection = broker.connect()
    connection.create_sender("topic.1").send(Message(properties={"prop1": "value1"}))
    for subscription in ("subscription.2", "subscription.3"):
        receiver = connection.create_receiver(f"topic.1/subscriptions/{subscription}")
        assert receiver.receive(timeout=PATIENCE_S).properties == {"prop1": "value1"}
        receiver.accept()
    connection.close()
    assert broker.stop() == 0, broker.said()


@pytest.mark.parametrize("reason", ["emulator is off", "the data directory has a key of its own"])
def test_where_it_is_not_the_emulator_it_says_why_and_tells_its_clients_what_to_do(root, started, reason):
    (http_port,) = free_ports(1)
    ports = {"EMULATOR_HTTP_PORT": str(http_port), "PEEKLOCK_HTTP__PORT": str(http_port)}
    if reason == "emulator is off":
        arguments: tuple[str, ...] = ("--no-emulator",)
    else:
        arguments = ()
        before = Container(root, **ports)  # without the licence, as before
        started.append(before)
        eventually(lambda: "is ready" in before.said(), "its start")
        assert "not in the emulator's place" not in before.said()
        assert before.stop() == 0
    broker = Container(root, *arguments, **EMULATORS, **ports)
    started.append(broker)
    eventually(lambda: "is ready" in broker.said(), "its start")
    [line] = [line for line in broker.said().splitlines() if "not in the emulator's place" in line]
    assert json.loads(line)["reason"].startswith(reason)
    assert json.loads(line)["level"] == "warning"
    assert "Emulator Service" not in broker.said()
    with RawPeer.anonymous(broker.amqp_port) as peer:
        refused = put_token(Node(peer, "$cbs"), "orders", token_for("orders"))
    assert refused.status == 401
    assert "InvalidSignature: This is the Service Bus emulator's well-known key" in refused.description
    assert "peeklock connection-string" in refused.description
    request = urllib.request.Request(
        f"http://localhost:{http_port}/orders",
        headers={"Authorization": generate("sb://localhost/", KEY_NAME, KEY, int(time.time()) + 60)},
    )
    with pytest.raises(urllib.error.HTTPError) as failed:
        urllib.request.urlopen(request, timeout=PATIENCE_S)
    assert failed.value.code == 401
    assert b"This is the Service Bus emulator's well-known key" in failed.value.read()
    with RawPeer(broker.amqp_port) as peer:
        peer.sasl_plain()
    assert "authentication failed" in broker.said()
    assert broker.stop() == 0
