import pytest

from tests.brokers import Broker
from tests.protocol_client.scripted_peer import ScriptedPeer


@pytest.fixture
def peer() -> ScriptedPeer:
    return ScriptedPeer()


QUEUES = """
[[queues]]
name = "q"

[[queues]]
name = "keyed"
lock_duration_ms = 5000
authorization_rules = [
    {key_name = "sender", primary_key = "send-key", rights = ["Send"]},
    {key_name = "listener", primary_key = "listen-key", rights = ["Listen"]},
    {key_name = "manager", primary_key = "manage-key", rights = ["Manage"]},
]

[[queues]]
name = "small/one"
max_message_size_kb = 1

[[queues]]
name = "outcomes"

[[queues]]
name = "locks"

[[queues]]
name = "purged"

[[queues]]
name = "counted"

[[queues]]
name = "talks"
lock_duration_ms = 5000
requires_session = true

[[queues]]
name = "in-sessions"
requires_session = true
lock_duration_ms = 5000
"""


@pytest.fixture(scope="session")
def broker(tmp_path_factory):
    """One broker for all; each test leaves its queue empty, or has its own."""
    with Broker(tmp_path_factory.mktemp("client"), QUEUES) as broker:
        yield broker
