"""What clients of JMS say on the wire, as Qpid JMS does it: delivery delays, subscribers, temporary entities."""

import time
from collections.abc import Iterator

import pytest

from protocol.codec import Array, Int, Long, Symbol
from tests.brokers import Broker
from tests.end_to_end.raw_peer import (
    DISPOSITION,
    TRANSFER,
    Frame,
    RawPeer,
    body_of,
    message,
)
from tests.end_to_end.raw_requests import Node
from tests.sessions.raw_sessions import annotations_of

CONFIG = """
partitions = 4

[[queues]]
name = "plain"

[[queues]]
name = "spread"
enable_partitioning = true

[[topics]]
name = "news"

  [[topics.subscriptions]]
  name = "all"
"""

DELAYED_DELIVERY = "DELAYED_DELIVERY"
# As Qpid JMS says it in its open.
DESIRED = ("sole-connection-for-container", DELAYED_DELIVERY, "ANONYMOUS-RELAY", "SHARED-SUBS")
DELIVERY_TIME, STATE = Symbol("x-opt-delivery-time"), Symbol("x-opt-message-state")
WAS_SCHEDULED = 2


@pytest.fixture(scope="module")
def jms_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("jms"), CONFIG) as broker:
        yield broker


@pytest.fixture
def peer(jms_broker: Broker) -> Iterator[RawPeer]:
    with RawPeer.connect(jms_broker.amqp_port, desired=DESIRED) as peer:
        yield peer


def send(peer: RawPeer, to: str, *payloads: bytes) -> None:
    handle = peer.attach_sender(to)
    for payload in payloads:
        peer.transfer(payload, handle)
        assert peer.expect(DISPOSITION).fields[4].descriptor == 0x24
    peer.detach(handle)


def receive(peer: RawPeer, handle: int, count: int = 1) -> list[Frame]:
    """So many messages, completed; the link needs credit."""
    frames = [peer.expect(TRANSFER) for _ in range(count)]
    for frame in frames:
        peer.settle(frame.fields[1], settled=True)
    return frames


# --- delivery delays --------------------------------------------------------------------------------------------------


def now_ms() -> int:
    return int(time.time() * 1000)


def offered(opened: Frame) -> list[str]:
    found = opened.fields[7] if len(opened.fields) > 7 else None
    return [str(each) for each in found] if isinstance(found, Array) else [] if found is None else [str(found)]


@pytest.mark.parametrize("desired", [(DELAYED_DELIVERY,), DESIRED])
def test_delayed_delivery_is_offered_to_who_asks_for_it(jms_broker: Broker, desired: tuple[str, ...]) -> None:
    with RawPeer(jms_broker.amqp_port, desired=desired) as peer:
        peer.sasl_plain()
        assert DELAYED_DELIVERY in offered(peer.open())


@pytest.mark.parametrize("desired", [(), ("ANONYMOUS-RELAY",)])
def test_others_are_offered_nothing(jms_broker: Broker, desired: tuple[str, ...]) -> None:
    with RawPeer(jms_broker.amqp_port, desired=desired) as peer:
        peer.sasl_plain()
        assert offered(peer.open()) == []


@pytest.mark.parametrize(("to", "at"), [("plain", "plain"), ("spread", "spread"), ("news", "news/Subscriptions/all")])
def test_a_message_with_a_delivery_time_comes_then(peer: RawPeer, to: str, at: str) -> None:
    due_ms = now_ms() + 300
    send(peer, to, message(b"later", annotations={DELIVERY_TIME: Long(due_ms)}), message(b"at once"))
    handle = peer.attach_receiver(at, credit=2)
    first, second = receive(peer, handle, 2)
    assert [body_of(first.payload), body_of(second.payload)] == [b"at once", b"later"]
    assert now_ms() >= due_ms
    annotations = annotations_of(second.payload)
    assert annotations[DELIVERY_TIME] == due_ms  # the client shows it
    assert annotations[STATE] == WAS_SCHEDULED
    peer.detach(handle)


def test_a_message_with_a_delivery_time_is_scheduled_and_can_be_cancelled(peer: RawPeer) -> None:
    send(peer, "plain", message(b"m", annotations={DELIVERY_TIME: Long(now_ms() + 3_600_000)}))
    node = Node(peer, "plain/$management")
    peeked = node.ask("com.microsoft:peek-message", {"from-sequence-number": Long(0), "message-count": Int(9)})
    [entry] = peeked.body["messages"]
    number = annotations_of(entry["message"])[Symbol("x-opt-sequence-number")]
    assert annotations_of(entry["message"])[STATE] == WAS_SCHEDULED
    node.ask("com.microsoft:cancel-scheduled-message", {"sequence-numbers": Array(Long, (Long(number),))})


@pytest.mark.parametrize("ago_ms", [1, 1 << 40])
def test_a_delivery_time_that_is_over_delays_nothing(peer: RawPeer, ago_ms: int) -> None:
    send(peer, "plain", message(b"m", annotations={DELIVERY_TIME: Long(now_ms() - ago_ms)}))
    handle = peer.attach_receiver("plain", credit=1)
    [frame] = receive(peer, handle)
    assert STATE not in annotations_of(frame.payload)
    peer.detach(handle)
