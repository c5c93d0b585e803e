"""Dead-letter requests with reasons as long as a user may have, in the form that SDKs send them; and other texts."""

from collections.abc import Iterator
from typing import Any

import pytest

from protocol.codec import Described, Symbol, ULong, decode
from tests.brokers import Broker
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    CLOSE,
    DISPOSITION,
    MODIFIED,
    REJECTED,
    TRANSFER,
    RawPeer,
    error_of,
    message,
    outcome,
)
from tests.end_to_end.raw_requests import Node
from tests.end_to_end.raw_transactions import Coordinator, within

CONFIG = """
partitions = 2

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
KEPT = 4096  # characters


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("reasons"), CONFIG) as broker:
        yield broker


@pytest.fixture
def peer(broker: Broker) -> Iterator[RawPeer]:
    with RawPeer.connect(broker.amqp_port) as peer:
        yield peer


def received(peer: RawPeer, to: str, at: str) -> Any:
    """The delivery id of a message that is sent there and received at `at`."""
    sender = peer.attach_sender(to)
    peer.transfer(message(b"m"), sender)
    assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    peer.attach_receiver(at, credit=1)
    return peer.expect(TRANSFER).fields[1]


def rejection(reason: str, description: str) -> Described:
    """As the SDK for Python has it, which gives the description twice."""
    info = {Symbol("DeadLetterReason"): reason, Symbol("DeadLetterErrorDescription"): description}
    return outcome(REJECTED, Described(ULong(0x1D), [Symbol("com.microsoft:dead-letter"), description, info]))


def properties_of(peer: RawPeer, address: str) -> dict[str, Any]:
    """Of the next message, completed."""
    handle = peer.attach_receiver(address, credit=1)
    frame = peer.expect(TRANSFER)
    peer.settle(frame.fields[1])
    assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    peer.detach(handle)
    at = 0
    while at < len(frame.payload):
        section, at = decode(frame.payload, at)
        if section.descriptor == 0x74:
            return dict(section.value)
    raise AssertionError("a message without application properties")


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize(("to", "at"), [("plain", "plain"), ("spread", "spread"), ("news", "news/Subscriptions/all")])
@pytest.mark.parametrize(("reason", "description"), [(40_000, 10), (40_000, 40_000), (10, 40_000), (0, 80_000)])
def test_long_reasons_are_cut(peer: RawPeer, to: str, at: str, reason: int, description: int, settled: bool) -> None:
    delivery = received(peer, to, at)
    peer.settle(delivery, state=rejection("r" * reason, "é" * (description // 2)), settled=settled)
    if not settled:
        assert peer.expect(DISPOSITION).fields[4].descriptor == REJECTED
    found = properties_of(peer, f"{at}/$DeadLetterQueue")
    assert found["DeadLetterReason"] == "r" * min(reason, KEPT)
    assert found["DeadLetterErrorDescription"] == "é" * min(description // 2, KEPT)


def test_long_reasons_are_cut_in_a_transaction(peer: RawPeer) -> None:
    delivery = received(peer, "plain", "plain")
    coordinator = Coordinator(peer)
    transaction = coordinator.declare()
    peer.settle(delivery, state=within(transaction, rejection("r" * 40_000, "d" * 40_000)))
    peer.expect(DISPOSITION)
    coordinator.discharge(transaction)
    assert properties_of(peer, "plain/$DeadLetterQueue")["DeadLetterReason"] == "r" * KEPT


@pytest.mark.parametrize(
    "state",
    [
        rejection("r", "d" * 150_000),  # too large for any outcome
        outcome(MODIFIED, True, False, {Symbol("p"): "x" * 80_000}),
        outcome(REJECTED, Described(ULong(0x1D), [Symbol("c"), None, {Symbol("p"): "x" * 80_000}])),
    ],
)
def test_what_is_too_large_without_long_reasons_ends_the_connection(peer: RawPeer, state: Described) -> None:
    delivery = received(peer, "plain", "plain")
    peer.settle(delivery, state=state)
    condition, text = error_of(peer.expect(CLOSE))
    assert condition == "amqp:connection:framing-error"
    assert "65536" in text


def test_a_rule_that_exists_is_named_as_an_entity(peer: RawPeer) -> None:
    node = Node(peer, "news/Subscriptions/all/$management")
    body = {"rule-name": "r", "rule-description": {"sql-filter": {"expression": "1=1"}}}
    assert node.ask("com.microsoft:add-rule", body).status == 200
    response = node.ask("com.microsoft:add-rule", body)
    assert (response.status, response.condition) == (409, "com.microsoft:entity-already-exists")
    assert "The messaging entity 'news/Subscriptions/all/Rules/r' already exists." in response.description
