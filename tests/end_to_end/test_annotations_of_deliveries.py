"""What the broker itself says of a message that it delivers, as Service Bus does."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.codec import Int, Long, Short, Symbol, Timestamp, UInt, decode
from tests.brokers import Broker
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    DISPOSITION,
    MODIFIED,
    REJECTED,
    TRANSFER,
    Frame,
    RawPeer,
    message,
    outcome,
    source,
)
from tests.end_to_end.raw_requests import Node
from tests.sessions.raw_sessions import accept, annotations_of, receive

STATE, SCHEDULED = Symbol("x-opt-message-state"), Symbol("x-opt-scheduled-enqueue-time")
KEY, PARTITION, NUMBER = Symbol("x-opt-partition-key"), Symbol("x-opt-partition-id"), Symbol("x-opt-sequence-number")
ENQUEUED_NUMBER = Symbol("x-opt-enqueue-sequence-number")
LOCKED_UNTIL = Symbol("x-opt-locked-until")
WAS_SCHEDULED, IS_DEFERRED, IS_ACTIVE = 2, 1, 0

CONFIG = """
partitions = 4

[[queues]]
name = "plain"

[[queues]]
name = "in-sessions"
requires_session = true

[[queues]]
name = "forwards"
forward_to = "plain"

[[queues]]
name = "spread"
enable_partitioning = true

[[queues]]
name = "once"
enable_partitioning = true
requires_duplicate_detection = true

[[queues]]
name = "plain-once"
requires_duplicate_detection = true

[[queues]]
name = "spread-sessions"
enable_partitioning = true
requires_session = true

[[queues]]
name = "from-once"
enable_partitioning = true
requires_duplicate_detection = true
forward_to = "plain"

[[topics]]
name = "news"

  [[topics.subscriptions]]
  name = "all"

[[topics]]
name = "spread-once-news"
enable_partitioning = true
requires_duplicate_detection = true

  [[topics.subscriptions]]
  name = "all"
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("annotations"), CONFIG) as broker:
        yield broker


@pytest.fixture
def peer(broker: Broker) -> Iterator[RawPeer]:
    with RawPeer.connect(broker.amqp_port) as peer:
        yield peer


def send(peer: RawPeer, address: str, *messages: bytes) -> None:
    handle = peer.attach_sender(address)
    for each in messages:
        peer.transfer(each, handle)
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    peer.detach(handle)


def take(peer: RawPeer, address: str) -> Frame:
    """The next message of the entity, completed."""
    handle = peer.attach_receiver(address, credit=1)
    frame = peer.expect(TRANSFER)
    peer.settle(frame.fields[1])
    assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    peer.detach(handle)
    return frame


def soon() -> Timestamp:
    return Timestamp(int(time.time() * 1000) + 300)


def scheduled(at_ms: Timestamp, **options: Any) -> bytes:
    return message(b"m", annotations={SCHEDULED: at_ms}, **options)


# -- the state


@pytest.mark.parametrize(
    ("to", "at"),
    [("plain", "plain"), ("spread", "spread"), ("news", "news/Subscriptions/all"), ("forwards", "plain")],
)
def test_a_message_that_had_been_scheduled_has_that_state_when_it_is_received(peer: RawPeer, to: str, at: str) -> None:
    send(peer, to, scheduled(soon()))
    annotations = annotations_of(take(peer, at).payload)
    assert annotations[STATE] == WAS_SCHEDULED
    assert type(annotations[STATE]) is Int


def test_a_scheduled_message_of_a_session_has_that_state(peer: RawPeer) -> None:
    send(peer, "in-sessions", scheduled(soon(), properties=[None] * 10 + ["s"]))
    handle, _ = accept(peer, "in-sessions", "s")
    [(frame, _)] = receive(peer, handle)
    assert annotations_of(frame.payload)[STATE] == WAS_SCHEDULED


@pytest.mark.parametrize("ago_ms", [1, 1 << 40])
def test_a_message_whose_time_was_over_when_it_came_was_not_scheduled(peer: RawPeer, ago_ms: int) -> None:
    past = Timestamp(int(time.time() * 1000) - ago_ms)
    send(peer, "plain", scheduled(past))
    send(peer, "forwards", scheduled(past))
    assert [annotations_of(take(peer, "plain").payload).get(STATE) for _ in range(2)] == [None, None]


def test_a_message_that_had_been_scheduled_is_active_for_who_peeks_and_deferred_once_it_is(peer: RawPeer) -> None:
    send(peer, "plain", scheduled(soon()))
    handle = peer.attach_receiver("plain", credit=1)
    frame = peer.expect(TRANSFER)
    number = annotations_of(frame.payload)[NUMBER]
    node = Node(peer, "plain/$management")
    arguments = {"from-sequence-number": number, "message-count": Int(1)}
    [peeked] = node.ask("com.microsoft:peek-message", arguments).body["messages"]
    assert annotations_of(peeked["message"])[STATE] == IS_ACTIVE
    peer.settle(frame.fields[1], state=outcome(MODIFIED, True, True))
    assert peer.expect(DISPOSITION).fields[4].descriptor == MODIFIED
    peer.detach(handle)
    arguments = {"sequence-numbers": [number], "receiver-settle-mode": UInt(0)}
    [deferred] = node.ask("com.microsoft:receive-by-sequence-number", arguments).body["messages"]
    assert annotations_of(deferred["message"])[STATE] == IS_DEFERRED


# -- the end of a lock, for who looks at the message


def looked_at(peer: RawPeer, address: str, number: int, key: Symbol) -> list[Any]:
    """The annotation of this message, peeked and browsed."""
    arguments = {"from-sequence-number": number, "message-count": Int(1)}
    [peeked] = Node(peer, f"{address}/$management").ask("com.microsoft:peek-message", arguments).body["messages"]
    browser = peer.attach(sender=False, source_=source(address, mode=Symbol("copy")))
    shown: dict[Any, Any] = {}
    credit = 0  # from the attach on
    while shown.get(NUMBER) != number:
        credit += 1
        peer.flow(browser, credit)
        shown = annotations_of(peer.expect(TRANSFER).payload)
    peer.detach(browser)
    found = [annotations_of(peeked["message"]), shown]
    assert [each[NUMBER] for each in found] == [number] * 2
    return [each.get(key) for each in found]


@pytest.mark.parametrize(("to", "at"), [("plain", "plain"), ("spread", "spread"), ("news", "news/Subscriptions/all")])
def test_a_peeked_message_has_the_end_of_its_lock(peer: RawPeer, to: str, at: str) -> None:
    send(peer, to, message(b"m"))
    handle = peer.attach_receiver(at, credit=1)
    frame = peer.expect(TRANSFER)
    received = annotations_of(frame.payload)
    seen = looked_at(peer, at, received[NUMBER], LOCKED_UNTIL)
    assert seen == [received[LOCKED_UNTIL]] * 2
    assert type(seen[0]) is Timestamp
    peer.settle(frame.fields[1], state=outcome(MODIFIED, None, True))
    assert peer.expect(DISPOSITION).fields[4].descriptor == MODIFIED
    peer.detach(handle)
    assert looked_at(peer, at, received[NUMBER], LOCKED_UNTIL) == [None] * 2
    numbered = {"sequence-numbers": [received[NUMBER]], "receiver-settle-mode": UInt(1)}
    node = Node(peer, f"{at}/$management")
    [deferred] = node.ask("com.microsoft:receive-by-sequence-number", numbered).body["messages"]
    until = annotations_of(deferred["message"])[LOCKED_UNTIL]
    assert looked_at(peer, at, received[NUMBER], LOCKED_UNTIL) == [until] * 2
    done = {"disposition-status": "completed", "lock-tokens": [deferred["lock-token"]]}
    assert node.ask("com.microsoft:update-disposition", done).status == 200


@pytest.mark.parametrize("address", ["in-sessions", "spread-sessions"])
def test_a_peeked_message_of_a_locked_session_has_the_end_of_that(peer: RawPeer, address: str) -> None:
    send(peer, address, *[message(b"m", properties=[None] * 10 + ["s"]) for _ in range(2)])
    handle, _ = accept(peer, address, "s")
    [(first, _)] = receive(peer, handle)
    received = annotations_of(first.payload)
    for number in (received[NUMBER], received[NUMBER] + 1):
        assert looked_at(peer, address, number, LOCKED_UNTIL) == [received[LOCKED_UNTIL]] * 2
    peer.detach(handle)
    for number in (received[NUMBER], received[NUMBER] + 1):
        assert looked_at(peer, address, number, LOCKED_UNTIL) == [None] * 2
    assert Node(peer, f"{address}/$management").ask("peeklock:purge", {}).status == 200


# -- the header


@pytest.mark.parametrize("value", [True, False, None])
@pytest.mark.parametrize("ttl", [None, UInt(60_000)])
def test_first_acquirer_comes_back_as_it_was_sent(peer: RawPeer, value: bool | None, ttl: UInt | None) -> None:
    send(peer, "plain", message(b"m", header=[False, None, ttl, value]))
    header, _ = decode(take(peer, "plain").payload)
    assert header.value == [False, None, ttl, value, 0]


# -- the partition


def fragment_of(annotations: dict[Any, Any]) -> int:
    return int(annotations[NUMBER]) >> 48


@pytest.mark.parametrize(
    ("address", "sent", "key"),
    [
        ("spread", message(b"m", properties=["id"]), None),
        ("spread", message(b"m", properties=["id"], annotations={KEY: "mine"}), "mine"),
        ("spread", message(b"m", properties=["id", *[None] * 9, "s"]), "s"),
        ("once", message(b"m", properties=["id 1"]), "id 1"),
        ("once", message(b"m", properties=["id 2"], annotations={KEY: "mine"}), "mine"),
        ("once", message(b"m", properties=["id 3", *[None] * 9, "s"]), "s"),
        ("once", message(b"m", properties=["id 4"], annotations={Symbol("other"): [1]}), "id 4"),
        ("once", message(b"m", properties=[b"id 5"]), "id 5"),
        ("once", message(b"m", properties=[b"\xff\xfe"]), None),
        ("once", message(b"m", properties=["id 6"], header=[None, None, UInt(60_000)]), "id 6"),
    ],
)
def test_messages_of_partitioned_entities_say_their_partition_and_its_key(
    peer: RawPeer, address: str, sent: bytes, key: str | None
) -> None:
    send(peer, address, sent)
    handle = peer.attach_receiver(address, credit=1)
    frame = peer.expect(TRANSFER)
    received = annotations_of(frame.payload)
    assert (received[PARTITION], received.get(KEY)) == (fragment_of(received), key)
    assert type(received[PARTITION]) is Short
    arguments = {"from-sequence-number": received[NUMBER], "message-count": Int(1)}
    [peeked] = Node(peer, f"{address}/$management").ask("com.microsoft:peek-message", arguments).body["messages"]
    seen = annotations_of(peeked["message"])
    assert (seen[PARTITION], seen.get(KEY)) == (received[PARTITION], key)
    browser = peer.attach(sender=False, source_=source(address, mode=Symbol("copy")))
    peer.flow(browser, 1)
    browsed = annotations_of(peer.expect(TRANSFER).payload)
    assert (browsed[PARTITION], browsed.get(KEY)) == (received[PARTITION], key)
    peer.detach(browser)
    peer.settle(frame.fields[1])
    peer.expect(DISPOSITION)
    peer.detach(handle)


def test_a_partitioned_topics_subscriptions_say_the_topics_keys(peer: RawPeer) -> None:
    send(peer, "spread-once-news", message(b"m", properties=["id"]))
    annotations = annotations_of(take(peer, "spread-once-news/Subscriptions/all").payload)
    assert (annotations[PARTITION], annotations[KEY]) == (fragment_of(annotations), "id")


def test_a_session_of_a_partitioned_queue_is_its_messages_key(peer: RawPeer) -> None:
    send(peer, "spread-sessions", message(b"m", properties=["id", *[None] * 9, "s"]))
    handle, _ = accept(peer, "spread-sessions", "s")
    [(frame, _)] = receive(peer, handle)
    annotations = annotations_of(frame.payload)
    assert (annotations[PARTITION], annotations[KEY]) == (fragment_of(annotations), "s")


@pytest.mark.parametrize("sent_to", ["plain-once", "from-once"])
def test_plain_entities_say_what_was_sent(peer: RawPeer, sent_to: str) -> None:
    """Also of what a partitioned entity has forwarded: its key is never stored."""
    for annotations in ({}, {KEY: "mine"}):
        identity = f"{len(annotations)} {sent_to}"
        send(peer, sent_to, message(b"m", properties=[identity], annotations=annotations))
        found = annotations_of(take(peer, "plain" if sent_to == "from-once" else sent_to).payload)
        assert {name: found[name] for name in (KEY, PARTITION) if name in found} == annotations


# -- the number of an earlier place


@pytest.mark.parametrize("topic", ["news", "spread-once-news"])
@pytest.mark.parametrize(
    "sent",
    [
        message(b"m", properties=["usual"]),
        message(b"m", properties=["expires"], header=[None, None, UInt(600_000)]),
        message(b"m", properties=["in a session", *[None] * 9, "s"]),
        message(b"m" * 300_000, properties=["large"]),
    ],
    ids=["usual", "expires", "in a session", "large"],
)
def test_a_subscriptions_message_has_an_enqueued_number_however_it_is_seen(
    peer: RawPeer, topic: str, sent: bytes
) -> None:
    """In the cloud it is the topic's number. The topic here gives none, so it is that of the subscription."""
    address = f"{topic}/Subscriptions/all"
    sender = peer.attach_sender(topic)
    peer.transfer_in_parts(sent, sender)
    assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    peer.attach_receiver(address, credit=1)
    frame = peer.expect(TRANSFER)
    received = annotations_of(frame.payload)
    node = Node(peer, f"{address}/$management")
    arguments = {"from-sequence-number": received[NUMBER], "message-count": Int(1)}
    [peeked] = node.ask("com.microsoft:peek-message", arguments).body["messages"]
    browser = peer.attach(sender=False, source_=source(address, mode=Symbol("copy")))
    peer.flow(browser, 1)
    seen = [received, annotations_of(peeked["message"]), annotations_of(peer.expect(TRANSFER).payload)]
    assert [each[ENQUEUED_NUMBER] for each in seen] == [received[NUMBER]] * 3
    assert {type(each[ENQUEUED_NUMBER]) for each in seen} == {Long}
    peer.settle(frame.fields[1], state=outcome(MODIFIED, None, True))
    assert peer.expect(DISPOSITION).fields[4].descriptor == MODIFIED
    arguments = {"sequence-numbers": [received[NUMBER]], "receiver-settle-mode": UInt(0)}
    [deferred] = node.ask("com.microsoft:receive-by-sequence-number", arguments).body["messages"]
    assert annotations_of(deferred["message"])[ENQUEUED_NUMBER] == received[NUMBER]


def test_a_number_that_a_subscriptions_message_had_before_stays(peer: RawPeer) -> None:
    handle = peer.attach_receiver("news/Subscriptions/all", credit=1)
    node = Node(peer, "news/$management")
    items = [{"message": scheduled(soon()), "message-id": "m"}]
    [given] = node.ask("com.microsoft:schedule-message", {"messages": items}).body["sequence-numbers"]
    frame = peer.expect(TRANSFER)
    assert annotations_of(frame.payload)[ENQUEUED_NUMBER] == given
    peer.settle(frame.fields[1], state=outcome(REJECTED))
    peer.expect(DISPOSITION)
    peer.detach(handle)
    dead = annotations_of(take(peer, "news/Subscriptions/all/$DeadLetterQueue").payload)
    assert dead[ENQUEUED_NUMBER] == given


def test_a_queues_own_message_has_no_earlier_number(peer: RawPeer) -> None:
    send(peer, "plain", message(b"m"))
    assert ENQUEUED_NUMBER not in annotations_of(take(peer, "plain").payload)
