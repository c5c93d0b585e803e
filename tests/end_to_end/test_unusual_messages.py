"""Messages that no usual client sends, and that Service Bus takes; and batches that it does not."""

from collections.abc import Iterator
from typing import Any

import pytest

from protocol.codec import Described, Symbol, UInt, ULong, decode, encode
from tests.brokers import Broker
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    BATCH_FORMAT,
    DETACH,
    DISPOSITION,
    REJECTED,
    TRANSFER,
    RawPeer,
    body_of,
    error_of,
    message,
    outcome,
)

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
  name = "chosen"
  rules = [{ name = "by-property", filter = { kind = "sql", expression = "colour = 'red'" } }]
"""
DATA = encode(Described(ULong(0x75), b"body"))
NULL_DATA = bytes.fromhex("00537540")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("unusual"), CONFIG) as broker:
        yield broker


@pytest.fixture
def peer(broker: Broker) -> Iterator[RawPeer]:
    with RawPeer.connect(broker.amqp_port) as peer:
        yield peer


def pass_through(peer: RawPeer, sent: bytes, to: str = "plain", at: str = "plain", **reject: Any) -> bytes:
    """What is received of the message, after the header and with other annotations."""
    sender = peer.attach_sender(to)
    peer.transfer(sent, sender)
    assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    receiver = peer.attach_receiver(at, credit=1)
    frame = peer.expect(TRANSFER)
    peer.settle(frame.fields[1])
    assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    peer.detach(receiver)
    peer.detach(sender)
    return frame.payload


@pytest.mark.parametrize("to", ["plain", "spread"])
def test_null_data_arrives_as_it_was_sent(peer: RawPeer, to: str) -> None:
    assert pass_through(peer, NULL_DATA, to, to).endswith(NULL_DATA)


def test_keys_of_annotations_arrive_with_their_types(peer: RawPeer) -> None:
    pairs = {ULong(5): "number", "text": 1, Symbol("symbol"): True}
    received = pass_through(peer, encode(Described(ULong(0x72), pairs)) + DATA)
    assert b"".join(encode(item) for pair in pairs.items() for item in pair) in received


def test_symbols_are_names_of_properties_also_for_rules_and_receivers_changes(peer: RawPeer) -> None:
    properties = {Symbol("colour"): "red", Symbol("tries"): 1}
    sent = encode(Described(ULong(0x74), properties)) + DATA
    at = "news/Subscriptions/chosen"
    sender = peer.attach_sender("news")
    peer.transfer(sent, sender)
    assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    receiver = peer.attach_receiver(at, credit=1)
    frame = peer.expect(TRANSFER)
    assert encode(Described(ULong(0x74), properties)) in frame.payload
    info = {"tries": "2", Symbol("DeadLetterReason"): "r"}
    error = Described(ULong(0x1D), [Symbol("com.microsoft:dead-letter"), None, info])
    peer.settle(frame.fields[1], state=outcome(REJECTED, error))
    assert peer.expect(DISPOSITION).fields[4].descriptor == REJECTED
    peer.detach(receiver)
    dead = peer.attach_receiver(f"{at}/$DeadLetterQueue", credit=1)
    payload = peer.expect(TRANSFER).payload
    found: dict[Any, Any] = {}
    offset = 0
    while offset < len(payload):
        section, offset = decode(payload, offset)
        if section.descriptor == 0x74:
            found = section.value
    assert found == {"colour": "red", "tries": "2", "DeadLetterReason": "r"}
    peer.detach(dead)


@pytest.mark.parametrize("address", ["plain", "spread", "news"])
@pytest.mark.parametrize("envelope", [b"", encode(Described(ULong(0x73), ["id"]))])
@pytest.mark.parametrize("settled", [True, False])
def test_an_empty_batch_detaches_the_link_behind_the_answers_to_what_came_before(
    peer: RawPeer, address: str, envelope: bytes, settled: bool
) -> None:
    handle = peer.attach_sender(address)
    peer.transfer(message(b"before"), handle)
    peer.transfer(envelope, handle, message_format=BATCH_FORMAT, settled=settled)
    peer.transfer(message(b"after"), handle)
    answer = peer.expect(DISPOSITION).fields
    if answer[1] != 0:  # what came behind is let go of, perhaps before the worker has answered
        answer = peer.expect(DISPOSITION).fields
    assert (answer[1], answer[4].descriptor) == (0, ACCEPTED)
    detach = peer.expect(DETACH)
    condition, text = error_of(detach)
    assert condition == "amqp:not-allowed"
    assert "received a batch message with no data in it. Detach origin: Publisher." in text
    peer.say(DETACH, UInt(handle), True)
    if address != "news":
        receiver = peer.attach_receiver(address, credit=2)
        assert body_of(peer.expect(TRANSFER).payload) == b"before"
        peer.nothing_more(TRANSFER)
        peer.settle(0, None)
        peer.detach(receiver)
