"""One Spark and one broker for all tests here: a session takes ten seconds to start."""

import os
from pathlib import Path

import pytest

if not os.environ.get("PEEKLOCK_REQUIRE_SPARK"):
    pytest.importorskip("pyspark", reason="pip install 'peeklock[spark]'")

from pyspark_peeklock.readiness import NotReady, session
from tests.brokers import Broker

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
def spark(tmp_path_factory):
    directory = tmp_path_factory.mktemp("spark")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.memory": "1g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.local.dir": str(directory / "local"),
        "spark.log.level": "ERROR",
    }
    try:
        spark = session("tests", master="local[2]", settings=settings)
    except NotReady as error:
        if os.environ.get("PEEKLOCK_REQUIRE_SPARK"):
            raise
        pytest.skip(str(error))
    yield spark
    spark.stop()


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
