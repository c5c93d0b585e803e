"""One broker for all tests here; the Spark session is that of all tests of the pipeline."""

import os
from pathlib import Path

import pytest

from tests.brokers import Broker
from tests.pipeline.session import missing

if os.environ.get("PEEKLOCK_REQUIRE_SPARK") == "1" and (lacking := missing()):
    raise RuntimeError(f"the tests of Spark need {lacking}")

ENTITIES = """
partitions = 2

[[queues]]
name = "plain"

[[queues]]
name = "other"

[[queues]]
name = "once"
requires_duplicate_detection = true

[[queues]]
name = "talks"
requires_session = true

[[queues]]
name = "small"
max_message_size_kb = 1

[[queues]]
name = "full"
max_size_mb = 1

[[queues]]
name = "spread"
enable_partitioning = true

[[queues]]
name = "failing"
max_delivery_count = 1

[[topics]]
name = "news"

  [[topics.subscriptions]]
  name = "all"
"""


@pytest.fixture(scope="session")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("broker"), ENTITIES) as broker:
        yield broker


@pytest.fixture(scope="session")
def secret(broker, tmp_path_factory) -> Path:
    """The file with the connection string."""
    path = tmp_path_factory.mktemp("secret") / "connection-string"
    path.write_text(broker.connection_string + "\n")
    return path
