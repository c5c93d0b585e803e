"""No secret leaves a broker: not in its output, its logs, its answers, its metrics or its arguments, however given.

Every broker here has keys of its own at every place where one can be given. All it says is kept and searched.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from protocol.codec import ULong
from protocol.symbols import AMQP_HEADER
from tests.brokers import KEY_NAME, REPOSITORY, Broker
from tests.end_to_end.raw_peer import Closed, RawPeer, performative
from tests.end_to_end.raw_requests import Node, put_token, token_for
from tests.patience import PATIENCE_S, eventually

CERTIFICATE = Path(__file__).parents[1] / "protocol_client" / "localhost.pem"
ROOT = "root-8Ks0fnWqB3xT"
KEYS = {
    "security": ("namespace-p-4Jd7", "namespace-s-91Xz"),
    "queue": ("queue-p-Tn5Kq0w", "queue-s-Zr8Lm2c"),
    "topic": ("topic-p-Yb6Vh3e", "topic-s-Qa1Ux9d"),
}
SECRETS = [ROOT, *(key for pair in KEYS.values() for key in pair)]
TERMINAL = (sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])")


def rule(indent: str, table: str, place: str) -> str:
    primary, secondary = KEYS[place]
    return (
        f'{indent}[[{table}authorization_rules]]\n{indent}key_name = "{place}-rule"\n'
        f'{indent}primary_key = "{primary}"\n'
        f'{indent}secondary_key = "{secondary}"\n{indent}rights = ["Send", "Listen"]\n'
    )


def config(*, root_key: str = "", log_format: str = "json", tls_key: Path | None = None) -> str:
    return (
        "partitions = 2\n"
        + (f'[amqp]\ntls_port = 0\n[tls]\ncertificate = "{CERTIFICATE}"\nkey = "{tls_key}"\n' if tls_key else "")
        + f'[log]\nlevel = "debug"\nformat = "{log_format}"\n'
        + (f'[security]\nroot_key = "{root_key}"\n' if root_key else "")
        + rule("", "security.", "security")
        + '[[queues]]\nname = "orders"\n'
        + rule("  ", "queues.", "queue")
        + '[[topics]]\nname = "prices"\n'
        + rule("  ", "topics.", "topic")
    )


class Heard:
    """A socket that remembers what it was told."""

    def __init__(self, inner: socket.socket, heard: list[bytes]) -> None:
        self._inner = inner
        self._heard = heard

    def recv(self, size: int) -> bytes:
        data = self._inner.recv(size)
        self._heard.append(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Watched:
    """A broker, and all that it says to anyone."""

    def __init__(self, broker: Broker, root_key: str) -> None:
        self.broker = broker
        self.root_key = root_key
        self.heard: list[bytes] = []
        self.signatures: list[str] = []

    def peer(self) -> RawPeer:
        peer = RawPeer(self.broker.amqp_port)
        peer.socket = Heard(peer.socket, self.heard)  # type: ignore[assignment]  # only recv is another
        return peer

    def annoy(self) -> None:
        """Everything that makes it speak: rights, wrongs, faults, deaths of its processes."""
        self._greet(KEY_NAME, self.root_key)
        for place, keys in KEYS.items():
            for key in keys:
                self._greet(f"{place}-rule", key)
                self._greet("nobody", key)
        self._put_tokens()
        with self.peer() as peer:
            peer.sasl_plain(KEY_NAME, self.root_key)
            peer.send(AMQP_HEADER + b"\xff" * 64)
            peer.wait_closed()
        with self.peer() as peer:
            peer.sasl_plain(KEY_NAME, self.root_key)
            peer.send(AMQP_HEADER + performative(0, 0x10, [ULong(7)] * 3))
            peer.wait_closed()
        # They may be one. To end it twice counts as damage of the store that it was reading.
        for process in dict.fromkeys((self.broker.worker(), self.broker.gateway())):
            self._end(process)
        for path in ("/metrics", "/readyz", "/health", "/livez", f"/nothing?key={self.root_key}", "/\0"):
            with contextlib.suppress(Exception):
                status, body = self.broker.get(path, timeout_s=10)
                self.heard.append(f"{status} {body}".encode())

    def _greet(self, key_name: str, key: str) -> None:
        with self.peer() as peer, contextlib.suppress(Closed, AssertionError):
            peer.sasl_plain(key_name, key)
            peer.open()
            peer.begin()
            for handle, address in enumerate(("orders", "prices", "missing")):
                peer.attach(sender=True, address=address, handle=handle)
            peer.close()

    def _put_tokens(self) -> None:
        tokens = [token_for("orders", key=self.root_key), token_for("orders", key=self.root_key, valid_s=-60)]
        tokens += [token_for("orders", key_name="queue-rule", key=KEYS["queue"][0]), token_for("x", key=self.root_key)]
        self.signatures = [token.split("sig=")[1].split("&")[0] for token in tokens]
        tokens += [tokens[0].replace("sig=", "sig=x"), tokens[0].replace("se=", "se=x"), tokens[0].replace("skn", "n")]
        with self.peer() as peer:
            peer.sasl("ANONYMOUS", b"")
            peer.open()
            peer.begin()
            node = Node(peer, "$cbs")
            for token in tokens:
                put_token(node, "orders", token)
            peer.close()

    def _end(self, process: psutil.Process) -> None:
        process.send_signal(signal.SIGABRT)
        process.wait(PATIENCE_S)
        eventually(self._is_ready, "readiness")

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return self.broker.get("/readyz")[0] == 200
        return False

    def arguments(self) -> str:
        """Those of all processes, and the variables of the children: the test gave the supervisor its own."""
        processes = self.broker.processes()
        children = [self.broker.gateway(), self.broker.worker()]
        shown = [" ".join(each.cmdline()) for each in processes]
        shown += [f"{name}={value}" for each in children for name, value in each.environ().items()]
        return "\n".join(shown)

    def said(self) -> str:
        output = self.broker.log_file.read_text(errors="replace")
        return "\n".join([output, b"".join(self.heard).decode("latin-1"), self.arguments()])


def assert_silent(watched: Watched, *more: str) -> None:
    said = watched.said()
    assert "is ready" in said
    found = [secret for secret in (*SECRETS, watched.root_key, *watched.signatures, *more) if secret in said]
    assert not found, [line[:300] for line in said.splitlines() if any(secret in line for secret in found)]


def start(broker: Broker, times: int) -> None:
    """Start it so often, the last time to stay."""
    for number in range(1, times + 1):
        broker.start()
        eventually(lambda number=number: broker.log_file.read_text().count("is ready") == number, "the start text")
        if number < times:
            broker.stop()


@pytest.mark.parametrize("log_format", ["json", "console"])
@pytest.mark.parametrize("way", ["toml", "environment", "file"])
def test_no_key_that_was_given_is_ever_told(tmp_path, monkeypatch, way, log_format):
    broker = Broker(tmp_path, config(root_key=ROOT if way == "toml" else "", log_format=log_format), arguments=())
    if way == "environment":
        monkeypatch.setenv("PEEKLOCK_SECURITY__ROOT_KEY", ROOT)
    elif way == "file":
        broker.data_dir.mkdir()
        (broker.data_dir / "root-key").touch(mode=0o600)
        (broker.data_dir / "root-key").write_text(ROOT)
    try:
        start(broker, 2)
        watched = Watched(broker, ROOT)
        watched.annoy()
        assert_silent(watched)
    finally:
        broker.kill()


def test_a_key_that_was_given_is_not_told_on_a_terminal_either(tmp_path, monkeypatch):
    monkeypatch.setenv("PEEKLOCK_SECURITY__ROOT_KEY", ROOT)
    broker = Broker(tmp_path, config(log_format="auto"), arguments=(), prefix=TERMINAL)
    try:
        start(broker, 1)
        watched = Watched(broker, ROOT)
        watched.annoy()
        assert_silent(watched)
    finally:
        broker.kill()


def test_a_key_that_the_broker_made_is_told_once_and_never_again(tmp_path):
    broker = Broker(tmp_path, config(log_format="console"), arguments=())
    try:
        start(broker, 1)
        key = (broker.data_dir / "root-key").read_text().strip()
        assert broker.log_file.read_text().count(key) == 1
        broker.stop()
        broker.log_file.write_text("")
        start(broker, 2)
        watched = Watched(broker, key)
        watched.annoy()
        assert_silent(watched)
    finally:
        broker.kill()


def test_the_private_key_of_tls_is_told_to_nobody(tmp_path):
    private = tmp_path / "private.pem"
    shutil.copy(CERTIFICATE, private)
    lines = private.read_text().split("PRIVATE KEY-----")[1].split()
    broker = Broker(tmp_path, config(root_key=ROOT, tls_key=private), arguments=())
    try:
        start(broker, 1)
        watched = Watched(broker, ROOT)
        watched.annoy()
        assert_silent(watched, *(line for line in lines if len(line) > 30))
    finally:
        broker.kill()


def peeklock(directory: Path, *arguments: str, **environment: str) -> str:
    """What a command says, whether or not it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "broker.cli", *arguments],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.stdout + done.stderr


EMULATOR = """{"UserConfig": {"Namespaces": [{"Name": "n", "Queues": [
    {"Name": "q", "Properties": {"SharedAccessKey": "%s"}}]}], "Logging": {"Type": "File"}, "RootKey": "%s"}}"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("good.toml", config(root_key=ROOT)),
        ("long.toml", config(root_key=ROOT * 40)),
        ("number.toml", config(root_key=ROOT).replace(f'root_key = "{ROOT}"', f'root_key = ["{ROOT}"]')),
        ("misspelled.toml", config(root_key=ROOT).replace("root_key", "rootkey")),
        ("section.toml", config(root_key=ROOT).replace("[security]", "[secruity]")),
        ("syntax.toml", config(root_key=ROOT).replace(f'"{ROOT}"', ROOT)),
        ("quote.toml", config(root_key=ROOT).replace(f'"{ROOT}"', f'"{ROOT}')),
        ("twice.toml", config(root_key=ROOT).replace("[security]", f'[security]\nroot_key = "{ROOT}"')),
        ("rights.toml", config(root_key=ROOT).replace('"Send", ', f'"{KEYS["queue"][0]}", ')),
        ("namespace.toml", f'namespace = "Endpoint=sb://x;SharedAccessKeyName=n;SharedAccessKey={ROOT}"'),
        ("host.toml", f'[amqp]\nhost = "SharedAccessKey={ROOT}=;"'),
        ("Config.json", EMULATOR % (ROOT, ROOT)),
        ("cut.json", (EMULATOR % (ROOT, ROOT))[:-3]),
    ],
)
def test_no_command_that_reads_settings_tells_a_key(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    for command in (["config", "check"], ["config", "show"], ["verify"]):
        said = peeklock(tmp_path, *command, "--config", name)
        assert said.strip()
        assert not [secret for secret in SECRETS if secret in said], said


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", f"--root-key={ROOT}"],
        ["serve", "--data-dir", "/proc/nowhere", "--amqp-port", f"SharedAccessKey={ROOT}"],
        ["queues", "--connection-string", f"Endpoint=sb://localhost:1;SharedAccessKeyName=n;SharedAccessKey={ROOT};"],
        ["queues", "--connection-string", f"Endpoint=http://x;SharedAccessKeyName=n;SharedAccessKey={ROOT};"],
        ["queues", "--connection-string", f"SharedAccessKeyName=n;SharedAccessKey={ROOT};;Odd;{ROOT}"],
        ["queues", "--connection-string", ROOT],
        ["connection-string", "--key-name", "nobody"],
    ],
)
def test_no_message_about_wrong_arguments_tells_a_key(tmp_path, arguments):
    said = peeklock(tmp_path, *arguments, PEEKLOCK_SECURITY__ROOT_KEY=ROOT)
    assert said.strip()
    assert ROOT not in said


def test_settings_that_a_child_cannot_take_are_not_in_its_traceback(tmp_path):
    """Settings that fail in a child, whose traceback would show them, do not show them."""
    code = (
        "import json; from broker.settings.config import Settings; "
        f'Settings.model_validate(json.loads(\'\'\'{{"security": {{"root_key": "{ROOT}"}}, "odd": "{ROOT}"}}\'\'\'))'
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "ValidationError" in done.stderr
    assert ROOT not in done.stderr.split("ValidationError", 1)[1]
