"""Keys are changed while the broker runs: new ones count at once, and clients with the old ones lose their rights."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from proton import ConnectionException, Message
from proton.utils import BlockingConnection, BlockingSender, LinkDetached

from protocol.nodes.sas_tokens import generate
from tests.brokers import KEY, KEY_NAME, REPOSITORY, Broker
from tests.end_to_end.raw_peer import ACCEPTED, DETACH, DISPOSITION, RawPeer, error_of, message
from tests.end_to_end.raw_requests import Node, put_token, token_for
from tests.operations.test_management_api import ENTRY
from tests.patience import PATIENCE_S, eventually

QUEUES = '[[queues]]\nname = "orders"\n[[queues]]\nname = "others"\n'
RULE = '[[{0}authorization_rules]]\nkey_name = "app"\nprimary_key = "{1}"\nrights = [{2}]\n'
MESSAGE = Message(body=b"x")


def config(key: str, rights: str = '"Send", "Listen"', *, gateways: int = 1) -> str:
    return f"gateways = {gateways}\n" + RULE.format("security.", key, rights) + QUEUES


def connect(broker: Broker, name: str, key: str) -> BlockingConnection:
    return BlockingConnection(
        f"amqp://localhost:{broker.amqp_port}", timeout=PATIENCE_S, user=name, password=key, allowed_mechs="PLAIN"
    )


def is_accepted(broker: Broker, name: str, key: str) -> bool:
    try:
        connect(broker, name, key).close()
    except ConnectionException:
        return False
    return True


def reload(broker: Broker, text: str) -> None:
    broker.config_file.write_text(text)
    os.kill(broker.pid, signal.SIGHUP)


def expect_end(sender: BlockingSender) -> None:
    """The link of a client ends because its rights have."""

    def has_ended() -> bool:
        try:
            sender.send(MESSAGE, timeout=PATIENCE_S)
        except LinkDetached as error:
            text = str(error)
            return "unauthorized-access" in text and "changed or removed" in text
        return False

    eventually(has_ended, "the link is detached")


def status(broker: Broker, path: str, name: str, key: str) -> int:
    token = generate("sb://localhost/", name, key, int(time.time()) + 60)
    request = urllib.request.Request(f"http://localhost:{broker.http_port}{path}", headers={"Authorization": token})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("gateways", [1, 2])
def test_keys_of_the_namespace_are_read_again(tmp_path, gateways):
    with Broker(tmp_path, config("first", gateways=gateways)) as broker:
        others = [connect(broker, KEY_NAME, KEY).create_sender("orders") for _ in range(4)]
        senders = [connect(broker, "app", "first").create_sender("orders") for _ in range(4)]
        for sender in (*others, *senders):
            sender.send(MESSAGE)

        reload(broker, config("second", gateways=gateways))
        for sender in senders:
            expect_end(sender)
        eventually(lambda: not is_accepted(broker, "app", "first"), "the old key is refused")
        eventually(lambda: is_accepted(broker, "app", "second"), "the new key is taken")
        for sender in others:
            sender.send(MESSAGE)

        ready = broker.log().count("process ready")
        for process in psutil.Process(broker.pid).children():
            process.kill()
        eventually(lambda: broker.log().count("process ready") >= 2 * ready, "all are started again")
        for _ in range(2 * gateways):
            assert is_accepted(broker, "app", "second")
            assert not is_accepted(broker, "app", "first")


def test_fewer_rights_end_what_needed_them(tmp_path):
    with Broker(tmp_path, config("key")) as broker:
        connection = connect(broker, "app", "key")
        sender, receiver = connection.create_sender("orders"), connection.create_receiver("others")
        sender.send(MESSAGE)
        reload(broker, config("key", '"Listen"'))
        expect_end(sender)
        connect(broker, KEY_NAME, KEY).create_sender("others").send(MESSAGE)
        assert receiver.receive(timeout=PATIENCE_S).body == b"x"


def test_settings_that_cannot_be_used_change_nothing(tmp_path):
    with Broker(tmp_path, config("first")) as broker:
        sender = connect(broker, "app", "first").create_sender("orders")
        reload(broker, config("second") + "colour = 3\n")
        eventually(lambda: "settings not read again" in broker.log(), "the log says why")
        assert "colour" in broker.log()
        sender.send(MESSAGE)
        assert is_accepted(broker, "app", "first")

        reload(broker, "partitions = 6\n" + config("first"))
        eventually(lambda: "changed settings wait for the next start" in broker.log(), "the log names them")
        assert '["partitions"]' in broker.log()
        sender.send(MESSAGE)


def test_the_root_key_is_changed_one_key_after_the_other(tmp_path):
    def regenerate(*options: str) -> list[str]:
        command = [
            sys.executable,
            "-m",
            "broker.cli",
            "key",
            "regenerate",
            "--data-dir",
            str(broker.data_dir),
            *options,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=REPOSITORY)
        assert (done.returncode, done.stderr) == (0, "")
        said.append(done.stdout)
        return kept.read_text().split()

    said: list[str] = []
    with Broker(tmp_path, QUEUES, arguments=()) as broker:
        kept: Path = broker.data_dir / "root-key"
        (first,) = kept.read_text().split()
        sender = connect(broker, KEY_NAME, first).create_sender("orders")
        primary, second = regenerate("--secondary")
        assert primary == first != second
        assert "The broker takes it now" in said[-1]
        eventually(lambda: is_accepted(broker, KEY_NAME, second), "the secondary key is taken")
        sender.send(MESSAGE)
        third, secondary = regenerate()
        assert secondary == second
        expect_end(sender)
        assert [is_accepted(broker, KEY_NAME, key) for key in (first, second, third)] == [False, True, True]
        assert [status(broker, "/orders", KEY_NAME, key) for key in (first, second, third)] == [401, 200, 200]
        assert not any(key in broker.log() + "".join(said) for key in (second, third))
    assert len(set(regenerate())) == 2
    assert "when it starts" in said[-1]


def test_a_key_that_is_elsewhere_is_not_regenerated(tmp_path):
    (tmp_path / "config.toml").write_text('[security]\nroot_key = "mine"\n')
    command = [sys.executable, "-m", "broker.cli", "key", "regenerate", "--config", str(tmp_path / "config.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (78, "")
    assert "change security.root_key, and send SIGHUP" in done.stderr


def test_a_key_of_an_entity_that_is_changed_ends_the_links_with_tokens_of_it(tmp_path):
    with Broker(tmp_path, QUEUES) as broker:
        define(broker, "first")
        with RawPeer.anonymous(broker.amqp_port) as peer:
            node = Node(peer, "$cbs")
            assert put_token(node, "orders", token_for("orders", key_name="app", key="first")).status == 202
            assert put_token(node, "others", token_for("others")).status == 202
            orders, others = peer.attach_sender("orders"), peer.attach_sender("others")
            define(broker, "second")
            detached = peer.expect(DETACH)
            assert detached.fields[0] == orders
            assert error_of(detached)[0] == "amqp:unauthorized-access"
            assert put_token(node, "orders", token_for("orders", key_name="app", key="first")).status == 401
            assert put_token(node, "orders", token_for("orders", key_name="app", key="second")).status == 202
            peer.transfer(message(b"x"), others)
            assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED


def define(broker: Broker, key: str) -> None:
    """Give the queue orders a rule with this key, through the management API."""
    rule = (
        '<AuthorizationRules><AuthorizationRule i:type="SharedAccessAuthorizationRule">'
        "<Rights><AccessRights>Send</AccessRights></Rights>"
        f"<KeyName>app</KeyName><PrimaryKey>{key}</PrimaryKey></AuthorizationRule></AuthorizationRules>"
    )
    request = urllib.request.Request(
        f"http://localhost:{broker.http_port}/orders",
        ENTRY.format("QueueDescription", rule).encode(),
        {"Authorization": token_for(""), "If-Match": "*"},
        method="PUT",
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert answer.status == 200


def told(broker: Broker, resource: str) -> tuple[int, str]:
    """The status of a look at the queue `orders` with a token for this resource, and the answer."""
    token = generate(resource, KEY_NAME, KEY, int(time.time()) + 60)
    request = urllib.request.Request(f"http://localhost:{broker.http_port}/orders", headers={"Authorization": token})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("gateways", [1, 2])
def test_names_of_the_broker_are_read_again(tmp_path: Path, gateways: int) -> None:
    """Also by a gateway that is started later."""
    names = 'gateways = {}\n[security]\nhost_names = ["{}"]\n' + QUEUES
    with Broker(tmp_path, names.format(gateways, "*.first.example")) as broker:
        assert told(broker, "broker.first.example/orders")[0] == 200
        status, text = told(broker, "broker.second.example/orders")
        assert status == 401
        assert "security.host_names" in text
        reload(broker, names.format(gateways, "broker.second.example"))

        def all_know(resource: str, status: int) -> bool:
            return {told(broker, resource)[0] for _ in range(10)} == {status}

        eventually(lambda: all_know("broker.second.example", 200), "the new name is known")
        eventually(lambda: all_know("broker.first.example/orders", 401), "the old name is none")
        assert "changed settings wait" not in broker.log()
        for gateway in broker.gateways() if gateways > 1 else [broker.gateway()]:
            gateway.kill()
        broker.wait_until_ready(0)
        eventually(lambda: all_know("broker.second.example/orders", 200), "the new name is known after a restart")
