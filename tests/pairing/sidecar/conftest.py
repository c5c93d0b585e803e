"""Two brokers with a sidecar, and clients that connect again, as SDKs do."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

from protocol.client.errors import ClientError
from protocol.client.messages import Message
from tests.brokers import KEY, KEY_NAME, Broker
from tests.patience import PATIENCE_S
from tests.ports import free_ports
from tests.sidecars import Sidecar

# Where all that fails is refused, and a busy machine is no outage.
PATIENT = ("--attempt-timeout", "10s")
FAST = ["--failover-interval", "500ms", "--ping-interval", "500ms", "--attempt-timeout", "400ms"]
QUEUES_IN_BACKLOG = 3


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """These tests have a sidecar of their own."""
    monkeypatch.setattr("tests.brokers.SIDECAR", False)


class Pair:
    """A sidecar before these two brokers. `name` is the primary's in the paths of the backlog queues."""

    def __init__(self, directory: Path, primary: Broker, secondary: Broker, name: str, *more: str) -> None:
        self.primary = primary
        self.secondary = secondary
        port, ops_port = free_ports(2)
        self.queues = [f"{name}/x-servicebus-transfer/{number}" for number in range(QUEUES_IN_BACKLOG)]
        arguments = ["--primary", primary.connection_string, "--secondary", secondary.connection_string]
        arguments += ["--primary-http", f"http://localhost:{primary.http_port}", "--primary-name", name]
        arguments += ["--secondary-http", f"http://localhost:{secondary.http_port}", *FAST]
        arguments += ["--backlog-queues", str(QUEUES_IN_BACKLOG), *more]
        self.sidecar = Sidecar(directory / "sidecar", port, ops_port, arguments)

    def __enter__(self) -> Self:
        self.sidecar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.sidecar.kill() if kind else self.sidecar.stop()

    def connection_string(self, key_name: str = KEY_NAME, key: str = KEY) -> str:
        return self.sidecar.connection_string_for(key_name, key)

    def metric(self, name: str) -> float:
        _, text = self.sidecar.get("/metrics")
        lines = [line for line in text.splitlines() if line.startswith(f"peeklock_pair_{name}")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def message(body: bytes | int, **values: object) -> bytes:
    content = body if isinstance(body, bytes) else b"%d" % body
    return Message.of(content, **{"message_id": content.decode(), **values}).encode()


async def until_it_holds(check) -> None:
    """Wait until the check holds; it may fail with an AssertionError or ClientError meanwhile."""
    until = asyncio.get_running_loop().time() + PATIENCE_S
    while asyncio.get_running_loop().time() < until:
        with suppress(AssertionError, ClientError, OSError):
            if await check():
                return
        await asyncio.sleep(0.05)
    assert await check()
