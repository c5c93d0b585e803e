"""Celery runs tasks with Peeklock as its broker, by kombu's transport for Azure Service Bus, both unmodified.

The transport takes host names that end in .net, and the ports of the cloud: 5671 for AMQP with TLS, 443 for HTTPS. So
the programs see a table of hosts in which such a name is the broker's address, and trust its authority as the page for
users says (docs/celery.md): its certificate is added to the bundle of the package certifi, which the SDK reads.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from broker.cli.authority import Authority
from tests.brokers import KEY, KEY_NAME, Broker
from tests.interop import harness
from tests.interop.sdks import HERE, TOOLCHAINS
from tests.interop.test_interop import ensure
from tests.patience import PATIENCE_S, eventually

pytestmark = pytest.mark.interop

NAME = "peeklock.net"
OWN_HOSTS = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')
PYTHON = TOOLCHAINS["celery"].directory / "venv" / "bin" / "python"


class Celery:
    """Programs of Celery's users, beside a broker that has TLS at an address of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        host = harness.free_host()
        authority = Authority(directory / "authority")
        certificate, key = authority.issue("server", [NAME], is_server=True)
        self.broker = Broker(
            directory / "broker",
            f'[amqp]\nhost = "{host}"\ntls_port = 5671\n[http]\nhost = "{host}"\ntls_port = 443\n'
            f'[tls]\ncertificate = "{certificate}"\nkey = "{key}"\n',
        )
        self._hosts = directory / "hosts"
        self._hosts.write_text(f"{host} {NAME}\n")
        self._results = directory / "results"
        self._results.mkdir()
        _trust(authority.certificate_file)

    def command(self, *arguments: str) -> list[str]:
        return [OWN_HOSTS[0], *OWN_HOSTS[1:], str(self._hosts), str(PYTHON), *arguments]

    @property
    def environment(self) -> dict[str, str]:
        broker = f"azureservicebus://{KEY_NAME}:{KEY}@{NAME}"
        own = {"BROKER": broker, "RESULTS": quote(str(self._results)), "PYTHONPATH": str(HERE / "celery")}
        return {name: value for name, value in os.environ.items() if not name.endswith("_CA_BUNDLE")} | own

    def run(self, *arguments: str) -> str:
        program = str(HERE / "celery" / "client.py")
        done = subprocess.run(
            self.command(program, *arguments), env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, f"{done.stderr}\n{self.broker.log()}"
        return done.stdout.strip()

    @contextmanager
    def worker(self) -> Iterator[subprocess.Popen[bytes]]:
        options = ("worker", "--pool", "solo", "--without-gossip", "--without-mingle", "--without-heartbeat")
        with (self._directory / "worker.log").open("ab") as log:
            worker = subprocess.Popen(
                self.command("-m", "celery", "--app", "tasks", *options),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            yield worker
        finally:
            worker.kill()
            worker.wait()

    def worker_log(self) -> str:
        return (self._directory / "worker.log").read_text()[-5000:]


def _trust(authority: Path) -> None:
    """Add it to the bundle of the programs' environment, and nothing of an earlier run."""
    where = subprocess.run([PYTHON, "-m", "certifi"], capture_output=True, text=True, check=True).stdout.strip()
    bundle, original = Path(where), Path(f"{where}.original")
    if not original.exists():
        original.write_bytes(bundle.read_bytes())
    bundle.write_bytes(original.read_bytes() + authority.read_bytes())


@pytest.fixture
def celery(tmp_path: Path) -> Iterator[Celery]:
    ensure(TOOLCHAINS["celery"])
    if os.geteuid() != 0:
        pytest.skip("needs root for ports of the cloud and a table of hosts")
    scene = Celery(tmp_path)
    with scene.broker:
        yield scene


def test_tasks_are_run_tried_again_and_given_to_another_worker(celery: Celery, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with celery.worker() as worker:
        assert celery.run("tasks") == "all as expected", celery.worker_log()
        task = celery.run("note", str(notes))
        eventually(notes.exists, "the task is begun")
        worker.kill()
    with celery.worker():
        assert celery.run("result", task) == "2", celery.worker_log()
