"""The wheel pyspark-peeklock, environments that have it, and a broker whose journal it reads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.client.messages import Message
from tests import clients
from tests.brokers import Broker
from tests.pipeline.session import require
from tests.pipeline.wheel.environments import build

CONFIG = """
[[queues]]
name = "orders"
[[queues]]
name = "checked"
[[queues]]
name = "measured"
[journal]
mode = "bodies"
"""
ORDERS = [{"id": number, "customer": f"c{number}", "amount": number / 2} for number in range(3)]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its file."""
    require()
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture
def shop(tmp_path):
    """A broker with three orders in JSON, whose connection string is in the file `secret` beside it."""

    async def orders(connection):
        await clients.send(connection, "orders", *(Message.of(json.dumps(order).encode()) for order in ORDERS))

    with Broker(tmp_path, CONFIG) as broker:
        (tmp_path / "secret").write_text(broker.connection_string)
        clients.run(broker, orders)
        yield broker


@pytest.fixture
def capture(shop, tmp_path):
    """A folder with what has happened to the three orders."""
    folder, rows = tmp_path / "captures", 0
    endpoint = ("--http-endpoint", f"http://localhost:{shop.http_port}")
    while rows < len(ORDERS):  # the journal's process is a moment behind
        command = [sys.executable, "-m", "broker.cli", "capture", str(folder), "--once", *endpoint]
        command += ["--connection-string", shop.connection_string]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows += int(said.split()[0].replace(",", ""))
    return folder
