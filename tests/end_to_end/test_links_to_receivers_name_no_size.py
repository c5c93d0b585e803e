"""A link that sends to a client names no largest message: .NET's SDK and Go's give up what is longer than it says.

What is delivered has annotations, and perhaps a dead-letter reason, so it may be longer than what its sender was
allowed; it may come from an entity that takes more, and from a time when this one took more.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from protocol.codec import Symbol
from tests.brokers import Broker
from tests.caller import WORKERS
from tests.end_to_end.raw_peer import ATTACH, DETACH, DISPOSITION, RawPeer, message, source

CONFIG = """
partitions = 2
amqp.max_message_size_bytes = 4096

[[queues]]
name = "plain"
max_message_size_kb = 1

[[queues]]
name = "spread"
max_message_size_kb = 1
enable_partitioning = true

[[queues]]
name = "sessions"
max_message_size_kb = 1
requires_session = true

[[queues]]
name = "spread-sessions"
max_message_size_kb = 1
requires_session = true
enable_partitioning = true

[[topics]]
name = "topic"
max_message_size_kb = 1

  [[topics.subscriptions]]
  name = "sub"

[[topics]]
name = "spread-topic"
max_message_size_kb = 1
enable_partitioning = true

  [[topics.subscriptions]]
  name = "sub"
"""
MAX_MESSAGE_SIZE = 10  # its field in an attach
ENTITIES = ("plain", "spread", "topic/Subscriptions/sub", "spread-topic/Subscriptions/sub")
WITH_SESSIONS = ("sessions", "spread-sessions")
NODES = ("$cbs", "$management", "topic/$management")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("sizes"), CONFIG, workers=WORKERS) as started:
        yield started


@pytest.fixture
def peer(broker: Broker) -> Iterator[RawPeer]:
    with RawPeer.connect(broker.amqp_port) as connected:
        yield connected


def size_named(peer: RawPeer, **attach: Any) -> Any:
    """The largest message that the answer to the attach names; None also for 0, which means any size (2.7.3)."""
    handle = peer.attach(**attach)
    fields = peer.expect(ATTACH).fields
    assert None not in fields[5:7], peer.expect(DETACH)
    peer.detach(handle)
    peer.expect(DETACH)
    return (fields[MAX_MESSAGE_SIZE] or None) if len(fields) > MAX_MESSAGE_SIZE else None


@pytest.mark.parametrize("asked", [None, 1 << 20])
@pytest.mark.parametrize("part", ["", "/$DeadLetterQueue", "/$management", "/$DeadLetterQueue/$management"])
@pytest.mark.parametrize("entity", [*ENTITIES, *WITH_SESSIONS])
def test_receivers(peer: RawPeer, entity: str, part: str, asked: int | None) -> None:
    if entity in WITH_SESSIONS and not part:
        pytest.skip("they need a session: see below")
    assert size_named(peer, sender=False, address=entity + part, max_message_bytes=asked) is None


@pytest.mark.parametrize("address", [*NODES, "topic"])
def test_receivers_of_nodes_and_topics(peer: RawPeer, address: str) -> None:
    assert size_named(peer, sender=False, address=address) is None


@pytest.mark.parametrize("entity", [*ENTITIES, *WITH_SESSIONS])
def test_browsers(peer: RawPeer, entity: str) -> None:
    assert size_named(peer, sender=False, source_=source(entity, mode=Symbol("copy"))) is None


@pytest.mark.parametrize("session", ["mine", None])
@pytest.mark.parametrize("entity", WITH_SESSIONS)
def test_receivers_of_sessions(peer: RawPeer, entity: str, session: str | None) -> None:
    sender = peer.attach_sender(entity)
    peer.transfer(message(b"x", properties=[None] * 10 + ["mine"]), sender)
    peer.expect(DISPOSITION)
    filters = {Symbol("com.microsoft:session-filter"): session}
    assert size_named(peer, sender=False, source_=source(entity, filters=filters)) is None


@pytest.mark.parametrize(("address", "limit"), [("plain", 1024), ("spread", 1024), ("topic", 1024), ("sessions", 1024)])
def test_links_of_senders_say_what_is_taken(peer: RawPeer, address: str, limit: int) -> None:
    assert size_named(peer, sender=True, address=address) == limit
    assert size_named(peer, sender=True, address=address, max_message_bytes=100) == 100


@pytest.mark.parametrize("address", [f"{each}/$management" for each in ("plain", "sessions")] + list(NODES))
def test_links_of_requests_say_what_is_taken(peer: RawPeer, address: str) -> None:
    assert size_named(peer, sender=True, address=address) >= 4096
