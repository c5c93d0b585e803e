"""deploy/pairing/compose.yaml: what it says, and its containers as processes, with the image's environment."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from broker.settings.config import Settings
from broker.settings.sources import load
from tests.brokers import REPOSITORY
from tests.deployment.command_line import options
from tests.deployment.manifests import image_environment
from tests.patience import PATIENCE_S, eventually
from tests.ports import free_ports

PAIRING: Final = REPOSITORY / "deploy" / "pairing"
COMPOSE: Final = PAIRING / "compose.yaml"
KEYS: Final = {"PRIMARY_KEY": "the/key+of the primary==", "SECONDARY_KEY": "the/key+of the secondary=="}
BROKERS: Final = ("primary", "secondary")
STOP_SECONDS: Final = 25

Service = dict[str, Any]


def services() -> dict[str, Service]:
    """With the variables replaced, as `docker compose` does it."""
    text = re.sub(r"^\s*#.*\n", "", COMPOSE.read_text(), flags=re.MULTILINE)
    text = re.sub(r"\$\{(\w+):\?\}", lambda match: KEYS[match[1]], text)
    assert "${" not in text, "another variable, or one that may be missing"
    return dict(yaml.safe_load(text.replace("$$", "$"))["services"])


def ours() -> dict[str, Service]:
    return {name: service for name, service in services().items() if service["image"] == "peeklock"}


def test_the_containers_are_those_of_a_pairing():
    assert set(ours()) == {*BROKERS, "syphon", "sidecar", "application"}
    for name, service in ours().items():
        assert (name == "primary") == ("build" in service)  # one image, built once
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"]
        assert service["user"] == "10001:10001"
        place = "/var/lib/peeklock"
        assert service.get("tmpfs") == [place] or f"{name}:{place}" in service["volumes"], name
        assert int(service["stop_grace_period"].removesuffix("s")) > 2 * Settings().shutdown_timeout_ms / 1000


def test_only_this_machine_reaches_them_and_no_port_is_there_twice():
    published = [port for service in services().values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in published)
    outside = [port.split(":")[1] for port in published]
    assert len(outside) == len(set(outside))
    assert "ports" not in services()["application"]  # it is in the sidecar's network


def test_no_key_is_in_the_file():
    text = COMPOSE.read_text()
    assert re.findall(r"(?:SharedAccessKey=|ROOT_KEY: )(?!\$\{\w+_KEY:\?\})", text) == []


def test_files_that_are_mounted_exist_and_are_settings():
    for name, service in services().items():
        for volume in service.get("volumes", []):
            source, place, *mode = volume.split(":")
            if source.startswith("."):
                assert (PAIRING / source).is_file(), source
                assert mode == ["ro"]
                if name in BROKERS:
                    assert place in image_environment()["PEEKLOCK_CONFIG"].split(":")
                    found = load(PAIRING / source, environment=image_environment() | service["environment"]).settings
                    assert found.namespace == name
                    assert found.security.root_key is not None


def test_the_primary_detects_duplicates_for_long():
    [queue] = load(PAIRING / "primary.toml", environment={}).settings.queues
    assert (queue.name, queue.requires_duplicate_detection) == ("orders", True)
    assert queue.duplicate_detection_history_time_window_ms == 86_400_000


@pytest.mark.parametrize("name", ["syphon", "sidecar"])
def test_commands_of_containers_are_commands_of_peeklock(name):
    service = services()[name]
    found = options(service["command"])
    assert found["ops_host"] == "0.0.0.0"
    # The image's health check asks the port of the environment.
    assert str(found["ops_port"]) == service["environment"]["PEEKLOCK_OPS__PORT"]


def test_prometheus_scrapes_every_process_at_its_port():
    [mount] = [each for each in services()["prometheus"]["volumes"] if each.startswith(".")]
    jobs = yaml.safe_load((PAIRING / mount.split(":")[0]).read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    ports = dict.fromkeys(BROKERS, str(Settings().ops.port))
    for name in ("syphon", "sidecar"):
        command = services()[name]["command"]
        ports[name] = command[command.index("--ops-port") + 1]
    assert targets == {name: [f"{name}:{port}"] for name, port in ports.items()}


class Containers:
    """The services as processes, with ports of the loopback interface in place of hosts of their own."""

    def __init__(self, here: Path) -> None:
        self._here = here
        self._services = services()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._amqp = dict(zip((*BROKERS, "sidecar"), free_ports(3), strict=True))
        self._http = dict(zip(BROKERS, free_ports(2), strict=True))
        self._ops = dict(zip((*BROKERS, "syphon", "sidecar"), free_ports(4), strict=True))

    def start(self, name: str, *more: str) -> None:
        service = self._services[name]
        listen = f"127.0.0.1:{self._amqp['sidecar']}"
        command = [each.replace("0.0.0.0:5672", listen) for each in service.get("command", ["serve"])] + [*more]
        if "--ops-port" in command:
            command[command.index("--ops-port") + 1] = str(self._ops[name])
        self._run(name, [sys.executable, "-m", "broker.cli", *command])

    def start_application(self) -> None:
        """With a shell in which `peeklock` is this one."""
        program = self._here / "peeklock"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m broker.cli "$@"\n')
        program.chmod(0o755)
        *shell, script = self._services["application"]["entrypoint"]
        self._run("application", [*shell, script.replace("sleep 5", "sleep 0.5")])

    def _run(self, name: str, command: list[str]) -> None:
        with self.log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=self.environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def environment(self, name: str) -> dict[str, str]:
        inside = image_environment() | {"PEEKLOCK_DATA_DIR": str(self._here / name)}
        inside |= {each: "127.0.0.1" for each in inside if each.endswith("__HOST")}
        inside |= {
            each: re.sub(r"//(\w+)", lambda found: f"//localhost:{self._port(found[1])}", text)
            for each, text in self._services[name].get("environment", {}).items()
        }
        if name in BROKERS:
            inside["PEEKLOCK_CONFIG"] = str(PAIRING / f"{name}.toml")
            inside["PEEKLOCK_AMQP__PORT"] = str(self._amqp[name])
            inside["PEEKLOCK_HTTP__PORT"] = str(self._http[name])
        elif name != "application":
            inside |= {f"PEEKLOCK_{each.upper()}_HTTP": f"http://localhost:{self._http[each]}" for each in BROKERS}
        if name in self._ops:
            inside["PEEKLOCK_OPS__PORT"] = str(self._ops[name])
        return {**os.environ, **inside, "PATH": f"{self._here}{os.pathsep}{os.environ['PATH']}"}

    def _port(self, host: str) -> int:
        return self._amqp["sidecar" if host == "localhost" else host]

    def is_healthy(self, name: str) -> bool:
        """As the image's health check says."""
        program = REPOSITORY / "deploy" / "healthcheck"
        done = subprocess.run(
            [program], env=self.environment(name), capture_output=True, timeout=PATIENCE_S, check=False
        )
        return done.returncode == 0

    def wait_for(self, name: str) -> None:
        eventually(lambda: self.is_healthy(name), f"{name}: {self.log(name).read_text()[-2000:]}")

    def log(self, name: str) -> Path:
        return self._here / f"{name}.log"

    def peeklock(self, broker: str, *arguments: str) -> str:
        """A command as a client of a broker. Returns what it prints."""
        key = KEYS[f"{broker.upper()}_KEY"]
        endpoint = f"Endpoint=sb://localhost:{self._amqp[broker]}"
        connection_string = f"{endpoint};SharedAccessKeyName=RootManageSharedAccessKey;SharedAccessKey={key}"
        done = subprocess.run(
            [sys.executable, "-m", "broker.cli", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "PEEKLOCK_CONNECTION_STRING": f"{connection_string};UseDevelopmentEmulator=true"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def active(self, broker: str) -> dict[str, int]:
        """By queue, those that have some."""
        found = json.loads(self.peeklock(broker, "queues", "--json"))
        return {each["name"]: each["active"] for each in found if each["active"]}

    def stop(self, name: str) -> int:
        """As `docker compose stop` does it."""
        process = self._processes.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(STOP_SECONDS)

    def end(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    started = Containers(tmp_path)
    try:
        yield started
    finally:
        started.end()


def test_the_syphon_brings_what_lies_in_the_backlog(containers):
    options(services()["syphon"]["command"])
    for name in BROKERS:
        containers.start(name)
    for name in BROKERS:
        containers.wait_for(name)
    containers.start("syphon")
    containers.wait_for("syphon")
    backlog = "localhost/x-servicebus-transfer/0"
    containers.peeklock("secondary", "send", backlog, "--body", "x", "--property", "x-ms-path=orders")
    eventually(lambda: containers.active("primary") == {"orders": 1}, "a message moved")
    assert containers.active("secondary") == {}
    assert containers.stop("syphon") == 0


def test_the_application_sends_through_an_outage(containers):
    for name in ("sidecar", "syphon"):
        options(services()[name]["command"])
    for name in BROKERS:
        containers.start(name)
    containers.wait_for("secondary")
    containers.start("sidecar", "--failover-interval", "1s", "--ping-interval", "1s")
    containers.start("syphon")
    for name in ("sidecar", "syphon"):
        containers.wait_for(name)
    containers.start_application()
    eventually(lambda: containers.active("primary"), "a message in the primary")
    assert containers.stop("syphon") == 0
    assert containers.stop("primary") == 0
    assert containers.is_healthy("sidecar")
    eventually(lambda: sum(containers.active("secondary").values()) > 1, "messages in the backlog")
    containers.start("primary")
    containers.wait_for("primary")
    before = containers.active("primary")["orders"]
    eventually(lambda: containers.active("primary")["orders"] > before, "sends to the primary again")
    assert sum(containers.active("secondary").values()) > 1
    containers.start("syphon")
    eventually(lambda: containers.active("secondary") == {}, "an empty backlog")
    for name in ("sidecar", "syphon"):
        assert containers.stop(name) == 0
