"""One real broker with partitioned entities on four partitions and two workers."""

from collections.abc import Iterator

import pytest

from tests.brokers import Broker
from tests.end_to_end.health import assert_unharmed, process_ids
from tests.end_to_end.raw_peer import RawPeer
from tests.sessions.raw_sessions import purge

PARTITIONS, WORKERS = 4, 2
CONFIG = f"""
partitions = {PARTITIONS}

[[queues]]
name = "witness"

[[queues]]
name = "orders"
enable_partitioning = true
lock_duration_ms = 5000

[[queues]]
name = "sessions"
enable_partitioning = true
requires_session = true

[[queues]]
name = "once"
enable_partitioning = true
requires_duplicate_detection = true

[[queues]]
name = "once-in-session"
enable_partitioning = true
requires_session = true
requires_duplicate_detection = true

[[queues]]
name = "dead"
enable_partitioning = true

[[queues]]
name = "forwards"
enable_partitioning = true
forward_to = "sessions"

[[queues]]
name = "plain"
forward_to = "orders"

[[topics]]
name = "news"
enable_partitioning = true

  [[topics.subscriptions]]
  name = "all"

  [[topics.subscriptions]]
  name = "some"
  rules = [{{ name = "large", filter = {{ kind = "sql", expression = "size > 5" }} }}]
"""


@pytest.fixture(scope="session")
def partitioned_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("partitioned"), CONFIG, workers=WORKERS) as broker:
        yield broker


@pytest.fixture
def broker(partitioned_broker: Broker) -> Iterator[Broker]:
    """The shared broker; whatever the test does to it, another client must be served as before."""
    before = process_ids(partitioned_broker)
    yield partitioned_broker
    assert_unharmed(partitioned_broker, before)


@pytest.fixture
def peer(broker: Broker) -> Iterator[RawPeer]:
    with RawPeer.connect(broker.amqp_port) as peer:
        yield peer
    purge(broker.amqp_port, "orders", "sessions", "once", "news/Subscriptions/all", "news/Subscriptions/some")
