"""One broker for the tests of commands on messages in some states, of sessions, and of several partitions.

Each test leaves its queues empty, or purges them first.
"""

import pytest
from typer.testing import CliRunner

from broker.cli.all_commands import app
from broker.cli.target import CONNECTION_STRING_VARIABLE
from tests.brokers import Broker

CONFIG = """
partitions = 2
[delivery]
abandon_delays = true
receive_active_by_number = true
[[queues]]
name = "later"
[[queues]]
name = "later-spread"
enable_partitioning = true
[[queues]]
name = "refused"
[[queues]]
name = "named"
[[queues]]
name = "named-spread"
enable_partitioning = true
[[queues]]
name = "plain"
[[queues]]
name = "brief"
lock_duration_ms = 5000
[[queues]]
name = "spread"
enable_partitioning = true
[[queues]]
name = "scattered"
enable_partitioning = true
[[queues]]
name = "talks"
requires_session = true
[[queues]]
name = "brief-talks"
requires_session = true
lock_duration_ms = 5000
[[queues]]
name = "talks/spread"
requires_session = true
enable_partitioning = true
[[queues]]
name = "small"
max_message_size_kb = 1
[[queues]]
name = "target"
[[queues]]
name = "full"
max_size_mb = 1
[[topics]]
name = "boomerang"
[[topics.subscriptions]]
name = "back"
forward_to = "plain"
"""


@pytest.fixture(scope="session")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("states"), CONFIG) as running:
        yield running


@pytest.fixture
def peeklock(broker, monkeypatch):
    monkeypatch.setenv(CONNECTION_STRING_VARIABLE, broker.connection_string)
    return lambda *arguments, **options: CliRunner().invoke(app, [str(each) for each in arguments], **options)
