"""One real broker with entities that require sessions, and a check after each test that it took no harm."""

from collections.abc import Iterator

import pytest

from broker.catalog.catalog import home_partition
from tests.brokers import Broker
from tests.end_to_end.health import assert_unharmed, process_ids
from tests.end_to_end.raw_peer import RawPeer
from tests.sessions.raw_sessions import purge

_NAMES = [f"queue-{number}" for number in range(100)]
ELSEWHERE = next(name for name in _NAMES if home_partition(name, 2) != home_partition("orders", 2))
PLAIN = next(name for name in _NAMES if home_partition(name, 2) == home_partition("orders", 2))

CONFIG = f"""
partitions = 2

[[queues]]
name = "{ELSEWHERE}"
requires_session = true

[[queues]]
name = "{PLAIN}"

[[queues]]
name = "witness"

[[queues]]
name = "plain"

[[queues]]
name = "orders"
requires_session = true

[[queues]]
name = "short"
requires_session = true
lock_duration_ms = 5000

[[queues]]
name = "small"
requires_session = true
max_message_size_kb = 1

[[queues]]
name = "spread"
requires_session = true
enable_partitioning = true

[[queues]]
name = "forwards"
forward_to = "orders"

[[topics]]
name = "news"

  [[topics.subscriptions]]
  name = "all"
  requires_session = true
"""


@pytest.fixture(scope="session")
def session_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("sessions"), CONFIG) as broker:
        yield broker


@pytest.fixture
def broker(session_broker: Broker) -> Iterator[Broker]:
    """The shared broker; whatever the test does to it, another client must be served as before."""
    before = process_ids(session_broker)
    yield session_broker
    assert_unharmed(session_broker, before)


@pytest.fixture
def peer(broker: Broker) -> Iterator[RawPeer]:
    with RawPeer.connect(broker.amqp_port) as peer:
        yield peer
    purge(broker.amqp_port, "orders", "short", "small", "spread", ELSEWHERE, PLAIN)
