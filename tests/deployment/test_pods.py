"""The commands and variables of the pods make a namespace that serves: real processes, TLS, the manifests' settings.

What cannot be the same on one machine is replaced: names and ports of workers, and places of files.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from tests.capture.checks import captured_rows
from tests.deployment.manifests import ROOT, build, container, image_environment, named, pod, variables, workload
from tests.patience import PATIENCE_S
from tests.ports import free_ports

KEY = "the root key of this test"
STOP_SECONDS = 30.0


class Pods:
    """The gateway and the workers of an overlay, below a directory that takes the place of the root of their files."""

    def __init__(self, overlay: str, here: Path) -> None:
        self.objects = build(overlay)
        self.here = here
        self.replicas = workload(self.objects, "worker")["spec"]["replicas"]
        self.amqp_port, self.http_port, self.gateway_ops, *ports = free_ports(3 + 3 * self.replicas)
        self.worker_ports, self.worker_ops, self.journal_ports = (ports[number::3] for number in range(3))
        self._programs = here / "bin"
        self._programs.mkdir()
        program = self._programs / "peeklock"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m broker.cli "$@"\n')
        program.chmod(0o755)
        program = ROOT / "deploy" / "cluster-certificates"
        subprocess.run(
            [program, here / "certificates", "cluster", "localhost"],
            check=True,
            capture_output=True,
            timeout=PATIENCE_S,
        )
        self.authority = here / "certificates" / "ca.crt"
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Pods":
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for process in self._running.values():
                stack.callback(process.wait, STOP_SECONDS)
                process.kill()  # its children die with a supervisor

    def start_gateway(self) -> None:
        more = {
            "PEEKLOCK_OPS__PORT": str(self.gateway_ops),
            "PEEKLOCK_AMQP__TLS_PORT": str(self.amqp_port),
            "PEEKLOCK_HTTP__TLS_PORT": str(self.http_port),
        }
        self._start("gateway", ["peeklock", *container(workload(self.objects, "gateway"))["args"]], "gateway", more)

    def start_worker(self, ordinal: int) -> None:
        worker = workload(self.objects, "worker")
        more = {
            "POD_NAME": f"{worker['metadata']['name']}-{ordinal}",
            "PEEKLOCK_DATA_DIR": str(self.here / f"data-{ordinal}"),
            "PEEKLOCK_CLUSTER__LISTEN": f"127.0.0.1:{self.worker_ports[ordinal]}",
            "PEEKLOCK_CLUSTER__JOURNAL_LISTEN": f"127.0.0.1:{self.journal_ports[ordinal]}",
            "PEEKLOCK_OPS__PORT": str(self.worker_ops[ordinal]),
        }
        self._start(f"worker-{ordinal}", container(worker)["command"], "worker", more)

    def stop_worker(self, ordinal: int) -> int:
        process = self._running.pop(f"worker-{ordinal}")
        process.terminate()
        return process.wait(STOP_SECONDS)

    def _start(self, name: str, command: list[str], component: str, more: dict[str, str]) -> None:
        environment = self._environment(component) | more
        with (self.here / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                ["env", *command], env=environment, cwd=self.here, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _environment(self, component: str) -> dict[str, str]:
        found = workload(self.objects, component)
        mounts = {mount["name"]: mount["mountPath"] for mount in container(found)["volumeMounts"]}
        for volume in pod(found)["volumes"]:
            place = self.here / mounts[volume["name"]].lstrip("/")
            place.mkdir(parents=True, exist_ok=True)
            if "configMap" in volume:
                config_map = named(self.objects, "ConfigMap", volume["configMap"]["name"])
                assert config_map
                for name, text in config_map["data"].items():
                    (place / name).write_text(text)
            elif "secret" in volume:
                for name, made in {"tls.crt": "cluster.crt", "tls.key": "cluster.key", "ca.crt": "ca.crt"}.items():
                    (place / name).write_bytes((self.authority.parent / made).read_bytes())
        environment = image_environment() | variables(self.objects, found)
        environment = {
            name: str(self.here / value.lstrip("/")) if value.startswith("/etc/peeklock/") else value
            for name, value in environment.items()
        }
        return environment | {
            "PATH": f"{self._programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PEEKLOCK_SECURITY__ROOT_KEY": KEY,
            "PEEKLOCK_CLUSTER__WORKERS": json.dumps([f"localhost:{port}" for port in self.worker_ports]),
            "PEEKLOCK_CLUSTER__JOURNALS": json.dumps([f"localhost:{port}" for port in self.journal_ports]),
            "PEEKLOCK_JOURNAL__MODE": "events",
            "PEEKLOCK_AMQP__HOST": "127.0.0.1",
            "PEEKLOCK_HTTP__HOST": "127.0.0.1",
            "PEEKLOCK_OPS__HOST": "127.0.0.1",
        }

    def wait_for(self, port: int, path: str, status: int) -> str:
        """The answer, once it has this status."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            for name, process in self._running.items():
                assert process.poll() is None, (self.here / f"{name}.log").read_text()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as answer:
                    found, text = answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                with error:
                    found, text = error.code, error.read().decode()
            except OSError:
                found, text = 0, ""
            if found == status:
                return str(text)
            time.sleep(0.1)
        raise AssertionError({log.name: log.read_text()[-2000:] for log in self.here.glob("*.log")})

    def peeklock(self, *arguments: str) -> str:
        """A command as a client of the namespace, over TLS."""
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "SSL_CERT_FILE": str(self.authority),
            "PEEKLOCK_CONNECTION_STRING": f"Endpoint=sb://localhost:{self.amqp_port};"
            f"SharedAccessKeyName=RootManageSharedAccessKey;SharedAccessKey={KEY};",
            "PEEKLOCK_HTTP_ENDPOINT": f"https://localhost:{self.http_port}",
        }
        command = [sys.executable, "-m", "broker.cli", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


def test_production_serves_and_goes_on_without_a_worker(tmp_path):
    with Pods("production", tmp_path) as pods:
        pods.start_gateway()
        pods.wait_for(pods.gateway_ops, "/livez", 200)
        assert "worker" in pods.wait_for(pods.gateway_ops, "/readyz", 503)
        for ordinal in range(pods.replicas):
            pods.start_worker(ordinal)
        pods.wait_for(pods.gateway_ops, "/readyz", 200)
        for ordinal in range(pods.replicas):
            assert '"partitions": 4' in pods.wait_for(pods.worker_ops[ordinal], "/readyz", 200)
        assert sorted(path.name for path in (tmp_path / "data-1" / "partitions").iterdir()) == ["4", "5", "6", "7"]
        pods.peeklock("queue", "create", "made")
        pods.peeklock("send", "orders", "--body", "first", "--count", "24")

        assert pods.stop_worker(1) == 0
        pods.wait_for(pods.gateway_ops, "/readyz", 503)
        # What the readiness probe of the gateways asks, so they stay in the Service; and sends find another partition.
        pods.wait_for(pods.gateway_ops, "/livez", 200)
        pods.peeklock("send", "orders", "--body", "second", "--count", "24")

        pods.start_worker(1)
        pods.wait_for(pods.gateway_ops, "/readyz", 200)
        bodies = [json.loads(line)["body"] for line in pods.peeklock("receive", "orders", "--count", "48").splitlines()]
        assert sorted(bodies) == ["first"] * 24 + ["second"] * 24
        pods.peeklock("capture", str(tmp_path / "captured"), "--once")
        ops = Counter(row["op"] for rows in captured_rows(tmp_path / "captured").values() for row in rows)
        assert ops == dict.fromkeys(("enqueued", "delivered", "completed"), 48)
