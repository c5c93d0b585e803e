"""One real broker for the tests of this folder, and a check after each test that it took no harm."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.brokers import Broker
from tests.end_to_end.health import assert_unharmed, process_ids

# Short times, so that a test can wait for their end. Limits are small where a test reaches them.
CONFIG = """
partitions = 2

[amqp]
sasl_timeout_ms = 300
open_timeout_ms = 300
cbs_timeout_ms = 1500
write_stall_timeout_ms = 400
max_output_buffer_bytes = 65536
max_links_per_session = 8
max_links_per_connection = 12
max_sessions_per_connection = 10

[[security.authorization_rules]]
key_name = "sends"
primary_key = "key-that-sends"
rights = ["Send"]

[[security.authorization_rules]]
key_name = "listens"
primary_key = "key-that-listens"
rights = ["Listen"]

[[queues]]
name = "witness"

[[queues]]
name = "orders"

[[queues]]
name = "unread"

[[queues]]
name = "invoices"

  [[queues.authorization_rules]]
  key_name = "invoices-only"
  primary_key = "key-of-invoices"
  rights = ["Send", "Listen"]

[[queues]]
name = "v1.orders"

[[queues]]
name = "small"
max_message_size_kb = 1

[[queues]]
name = "disabled"
status = "Disabled"

[[queues]]
name = "send-disabled"
status = "SendDisabled"

[[queues]]
name = "receive-disabled"
status = "ReceiveDisabled"

[[queues]]
name = "sessions"
requires_session = true
"""


@pytest.fixture(scope="session")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("end-to-end"), CONFIG) as broker:
        yield broker


@pytest.fixture
def broker(shared_broker: Broker) -> Iterator[Broker]:
    """The shared broker; whatever the test does to it, another client must be served as before."""
    before = process_ids(shared_broker)
    yield shared_broker
    assert_unharmed(shared_broker, before)


@pytest.fixture
def start_broker(tmp_path):
    """Starts a broker of the test's own with a configuration of its own."""

    @contextmanager
    def start(config: str, **options) -> Iterator[Broker]:
        broker = Broker(tmp_path, config, **options)
        try:
            broker.start()
            before = process_ids(broker)
            yield broker
            assert_unharmed(broker, before)
            broker.stop()
        finally:
            broker.kill()

    return start
