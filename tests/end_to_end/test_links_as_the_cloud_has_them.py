"""What links and requests say and get, where SDKs' own tests saw the broker differ from the cloud."""

from collections.abc import Iterator
from typing import Any

import pytest

from protocol.codec import Described, Int, Long, Symbol, Timestamp, UInt, ULong, decode, encode
from tests.brokers import Broker
from tests.caller import WORKERS
from tests.end_to_end.raw_peer import (
    ATTACH,
    BATCH_FORMAT,
    DETACH,
    DISPOSITION,
    MODIFIED,
    TRANSFER,
    RawPeer,
    batch,
    body_of,
    error_of,
    message,
    outcome,
    source,
    target,
)
from tests.end_to_end.raw_requests import Node

CONFIG = """
partitions = 4
amqp.max_message_size_bytes = 1048576

[[queues]]
name = "plain"

[[queues]]
name = "spread"
enable_partitioning = true

[[queues]]
name = "peeked"

[[queues]]
name = "spread-peeked"
enable_partitioning = true

[[queues]]
name = "sessions"
requires_session = true

[[queues]]
name = "paged"
requires_session = true

[[queues]]
name = "spread-paged"
requires_session = true
enable_partitioning = true

[[queues]]
name = "spread-sessions"
requires_session = true
enable_partitioning = true

[[topics]]
name = "topic"

  [[topics.subscriptions]]
  name = "sub"

[[topics]]
name = "spread-topic"
enable_partitioning = true

  [[topics.subscriptions]]
  name = "sub"
"""
ENTITY_TYPE, PEEK_MODE = Symbol("com.microsoft:entity-type"), Symbol("com.microsoft:peek-mode")
SESSION_FILTER = Symbol("com.microsoft:session-filter")
SUBSCRIPTION, DEAD_LETTERS = "topic/Subscriptions/sub", "topic/Subscriptions/sub/$DeadLetterQueue"
END_OF_TIME = Timestamp(253402300800000)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("links"), CONFIG, workers=WORKERS) as started:
        yield started


@pytest.fixture
def peer(broker: Broker) -> Iterator[RawPeer]:
    with RawPeer.connect(broker.amqp_port) as connected:
        yield connected


def of_session(name: str, address: str = "sessions", handle: int | None = None, **options: Any) -> dict[str, Any]:
    return {"sender": False, "source_": source(address, filters={SESSION_FILTER: name}), "handle": handle, **options}


def send(peer: RawPeer, address: str, *bodies: bytes, session: str | None = None) -> None:
    """Sends, and waits until all are stored."""
    sender = peer.attach_sender(address)
    for body in bodies:
        peer.transfer(message(body, properties=[None] * 10 + [session] if session is not None else ()), sender)
    for _ in bodies:
        peer.expect(DISPOSITION)
    peer.detach(sender)
    peer.expect(DETACH)


# -- com.microsoft:entity-type


@pytest.mark.parametrize(
    ("is_sender", "address", "kind", "text"),
    [
        (True, "plain", Int(1), "'plain' is a queue, and the link asks for a topic."),
        (True, "plain", UInt(2), "'plain' is a queue, and the link asks for a subscription."),
        (True, "topic", Long(0), "'topic' is a topic, and the link asks for a queue."),
        (False, "plain", Int(2), "'plain' is a queue, and the link asks for a subscription."),
        (False, "topic", Int(0), "'topic' is a topic, and the link asks for a queue."),
        (False, SUBSCRIPTION, Int(0), "'topic/Subscriptions/sub' is a subscription, and the link asks for a queue."),
        (False, DEAD_LETTERS, Int(1), "'topic/Subscriptions/sub' is a subscription, and the link asks for a topic."),
    ],
)
def test_a_link_for_another_kind_of_entity_is_refused(peer, is_sender, address, kind, text):
    peer.attach(sender=is_sender, address=address, properties={ENTITY_TYPE: kind})
    condition, description = peer.refusal()
    assert (condition, description.split(" TrackingId")[0].lower()) == ("amqp:not-allowed", text.lower())


@pytest.mark.parametrize(
    ("is_sender", "address", "kind"),
    [
        (True, "plain", Int(0)),
        (True, "topic", Int(1)),
        (False, "plain/$DeadLetterQueue", Int(0)),
        (False, "spread-topic/Subscriptions/sub", UInt(2)),
        (False, DEAD_LETTERS, Int(2)),
        (False, "topic/$Transfer/$DeadLetterQueue", Int(0)),
        (False, "topic/$Transfer/$DeadLetterQueue", Int(1)),
        (True, "plain", Int(3)),
        (True, "plain", Long(-1)),
        (True, "plain", Long((1 << 63) - 1)),
        (True, "plain", True),
        (True, "plain", 1.0),
        (True, "plain", "entity-mgmt"),
        (True, "plain", None),
        (True, "plain/$management", Int(1)),
        (False, "topic/$management", Int(0)),
        (True, "$cbs", Int(1)),
    ],
)
def test_a_link_for_the_same_kind_or_one_that_is_not_known_or_to_a_node_is_accepted(peer, is_sender, address, kind):
    attach = peer.attach_sender if is_sender else peer.attach_receiver
    attach(address, properties={ENTITY_TYPE: kind})


# -- sessions: who does not hold one


@pytest.mark.parametrize("address", ["sessions", "spread-sessions"])
def test_a_deferred_message_of_a_session_is_received_by_a_connection_that_does_not_hold_it(broker, peer, address):
    send(peer, address, b"deferred", session="a")
    receiver = peer.attach(**of_session("a", address))
    peer.expect(ATTACH)
    peer.flow(receiver, 1)
    received = peer.expect(TRANSFER)
    number = Long(int(number_in(received.payload)))
    peer.settle(int(received.fields[1]), state=outcome(MODIFIED, False, True))
    peer.expect(DISPOSITION)
    wanted = {"sequence-numbers": [number], "receiver-settle-mode": UInt(1), "session-id": "a"}
    with RawPeer.connect(broker.amqp_port) as other:
        node = Node(other, f"{address}/$management")
        response = node.ask("com.microsoft:receive-by-sequence-number", wanted)
        assert response.status == 200, response
        [found] = response.body["messages"]
        assert body_of(found["message"]) == b"deferred"
        assert node.ask("com.microsoft:receive-by-sequence-number", wanted).status == 404  # it is locked
        for name in ("renew-session-lock", "get-session-state"):
            failed = node.ask(f"com.microsoft:{name}", {"session-id": "a"})
            assert (failed.status, failed.condition) == (410, "com.microsoft:session-lock-lost")
        lost = {"disposition-status": "completed", "lock-tokens": [found["lock-token"]]}
        mine = Node(peer, f"{address}/$management")
        [again] = mine.ask("com.microsoft:receive-by-sequence-number", wanted).body["messages"]
        failed = node.ask("com.microsoft:update-disposition", lost)
        assert (failed.status, failed.condition) == (410, "com.microsoft:message-lock-lost")
        done = {"disposition-status": "completed", "lock-tokens": [again["lock-token"]], "session-id": "a"}
        assert mine.ask("com.microsoft:update-disposition", done).status == 200


def annotation_in(payload: bytes, name: str) -> Any:
    at = 0
    while at < len(payload):
        section, at = decode(payload, at)
        if section.descriptor == 0x72:
            return section.value[Symbol(name)]
    raise AssertionError("a message without annotations")


def number_in(payload: bytes) -> int:
    return int(annotation_in(payload, "x-opt-sequence-number"))


# -- answers to requests


def request(operation: str, reply_to: str, body: Any) -> bytes:
    sections = ((0x73, ["m", None, None, None, reply_to]), (0x74, {"operation": operation}), (0x77, body))
    return b"".join(encode(Described(ULong(code), section)) for code, section in sections)


@pytest.mark.parametrize("address", ["plain", "topic", "topic/Subscriptions/sub"])
def test_an_answer_goes_to_the_session_that_asked_if_several_have_its_reply_to(peer, address):
    """With a link for answers on each session but the last, whose answers go to the oldest of all."""
    node = f"{address}/$management"
    channels = [0, peer.begin(1).channel, peer.begin(2).channel, peer.begin(3).channel]
    for channel in range(3):
        handle = peer.attach(sender=False, address=node, target_=target("answers"), channel=channel)
        peer.expect(ATTACH)
        peer.flow(handle, 10, channel=channel)
    senders = [peer.attach_sender(node, channel=channel) for channel in range(4)]
    body = {"from-sequence-number": Long(0), "message-count": Int(1)}
    for asking, answered in ((2, 2), (0, 0), (1, 1), (3, 0)):
        asked = request("com.microsoft:peek-message", "answers", body)
        peer.transfer(asked, senders[asking], channel=asking, settled=True)
        assert peer.expect(TRANSFER).channel == channels[answered]


# -- peek


@pytest.mark.parametrize("address", ["peeked", "spread-peeked"])
def test_a_peek_reply_has_at_most_256_kb_but_for_one_larger_message(peer, address):
    sizes = [200_000, 61_000, 1, 262_000, 300_000, 10, 260_000, 100, 260_900]
    sender = peer.attach_sender(address)
    for number, size in enumerate(sizes):
        payload = message(bytes(size), annotations={Symbol("x-opt-partition-key"): str(number)})
        parts = [payload[at : at + 60_000] for at in range(0, len(payload), 60_000)]
        for at, part in enumerate(parts):
            peer.transfer(part, sender, first=at == 0, more=at + 1 < len(parts))
        peer.expect(DISPOSITION)
    node = Node(peer, f"{address}/$management", credit=1000)
    found: list[int] = []
    number, replies = 0, []
    while True:
        body = {"from-sequence-number": Long(number), "message-count": Int(100)}
        node.say("com.microsoft:peek-message", body)
        frames = [peer.expect(TRANSFER)]
        while len(frames[-1].fields) > 5 and frames[-1].fields[5]:
            frames.append(peer.expect(TRANSFER))
        payload = b"".join(frame.payload for frame in frames)
        messages = [each["message"] for each in body_of_answer(payload).get("messages", ())]
        if not messages:
            break
        wire_bytes = sum(len(encode(frame.fields)) + len(frame.payload) + 8 for frame in frames)
        assert wire_bytes <= 256 * 1024 or len(messages) == 1
        replies.append(len(messages))
        found += [len(body_of(each)) for each in messages]
        number = number_in(messages[-1]) + 1
    assert sorted(found) == sorted(sizes)
    if address == "peeked":
        assert found == sizes
        assert replies == [1, 2, 1, 1, 3, 1]


def body_of_answer(payload: bytes) -> dict[str, Any]:
    at = 0
    while at < len(payload):
        section, at = decode(payload, at)
        if section.descriptor == 0x77:
            return dict(section.value or {})
    raise AssertionError("an answer without body")


# -- keys


@pytest.mark.parametrize("address", ["plain", "spread", "topic", "spread-topic", "spread-sessions"])
def test_a_session_id_and_a_partition_key_that_differ_are_not_allowed(peer, address):
    annotations = {Symbol("x-opt-partition-key"): "key", Symbol("x-opt-scheduled-enqueue-time"): Timestamp(5)}
    sent = message(b"m", annotations=annotations, properties=[None] * 10 + ["session"])
    sender = peer.attach_sender(address)
    for is_batch in (False, True):
        peer.transfer(batch(sent, sent) if is_batch else sent, sender, message_format=BATCH_FORMAT if is_batch else 0)
        condition, text = error_of(peer.expect(DISPOSITION))
        assert condition == "amqp:not-allowed"
        assert "x-opt-partition-key: differs from the session id" in text
    response = Node(peer, f"{address}/$management").ask(
        "com.microsoft:schedule-message", {"messages": [{"message-id": "1", "message": sent}]}
    )
    assert (response.status, response.condition) == (400, "amqp:not-allowed")


def sessions_of(node: Node, **asked: Any) -> tuple[list[str], int]:
    """A page, and the number from which the answer says that the next one begins."""
    body = {name.replace("_", "-"): value for name, value in asked.items()}
    response = node.ask("com.microsoft:get-message-sessions", {"last-updated-time": END_OF_TIME, **body})
    if response.status == 204:
        return [], -1
    assert response.status == 200, response
    return list(response.body["sessions-ids"]), int(response.body["skip"])


@pytest.mark.parametrize("address", ["paged", "spread-paged"])
def test_sessions_come_once_each_to_who_pages_by_number_by_the_last_session_or_by_both(peer, address):
    names = [f"r23-{n}" for n in range(12)]
    for name in names:
        send(peer, address, b"m", session=name)
    node = Node(peer, f"{address}/$management")

    def pages(by_number: bool, by_session: bool) -> list[list[str]]:
        found, skip = sessions_of(node, skip=Int(0), top=Int(5))
        pages = [found]
        while found:
            asked: dict[str, Any] = {"skip": Int(skip if by_number else 0), "top": Int(5)}
            if by_session:
                asked["last_session_id"] = found[-1]
            found, skip = sessions_of(node, **asked)
            pages.append(found)
        return pages

    for by_number, by_session in ((True, False), (False, True), (True, True)):
        pages_found = pages(by_number, by_session)
        assert [len(page) for page in pages_found] == [5, 5, 2, 0]
        assert sorted(name for page in pages_found for name in page) == sorted(names)
    assert sessions_of(node, skip=Int(3), top=Int(4))[1] == 7
    assert sessions_of(node, skip=Int(0), top=Int(4), last_session_id="")[1] == 4
    failed = node.ask(
        "com.microsoft:get-message-sessions",
        {"last-updated-time": END_OF_TIME, "skip": Int(0), "top": Int(4), "last-session-id": "x" * 129},
    )
    assert failed.status == 400


def test_a_receiver_in_peek_mode_browses_a_session_without_its_lock(broker, peer):
    send(peer, "sessions", b"browsed", session="browsed")
    send(peer, "sessions", b"other", session="not browsed")
    peer.attach(**of_session("browsed"))
    assert peer.expect(ATTACH).fields[5] is not None  # it holds the session
    with RawPeer.connect(broker.amqp_port) as other:
        handles = [other.attach(**of_session("browsed", properties={PEEK_MODE: True})) for _ in range(2)]
        for handle in handles:
            attached = other.expect(ATTACH)
            assert attached.fields[5].value[7] == {SESSION_FILTER: "browsed"}, other.expect(DETACH)
            other.flow(handle, 5)
        assert [body_of(other.expect(TRANSFER).payload) for _ in handles] == [b"browsed"] * 2
        other.nothing_more(TRANSFER)
        other.attach(**of_session("browsed", properties={PEEK_MODE: False}))
        assert other.refusal()[0] == "com.microsoft:session-cannot-be-locked"


def test_a_receiver_in_peek_mode_leaves_the_messages_of_a_queue(peer):
    send(peer, "plain", b"there")
    for is_browser in (True, True, False):
        peer.attach_receiver("plain", 1, properties={PEEK_MODE: is_browser}, settled=True)
        assert body_of(peer.expect(TRANSFER).payload) == b"there"
    peer.attach_receiver("plain", 1, properties={PEEK_MODE: True}, settled=True)
    peer.nothing_more(TRANSFER)


# -- rules


@pytest.mark.parametrize("topic", ["topic", "spread-topic"])
def test_rules_are_listed_by_name_and_a_property_may_be_null(peer, topic):
    node = Node(peer, f"{topic}/Subscriptions/sub/$management")

    def add(name: str, filter_: dict[str, Any]) -> int:
        body = {"rule-name": name, "rule-description": {"correlation-filter": filter_}}
        return node.ask("com.microsoft:add-rule", body).status

    assert add("with-null", {"correlation-id": "a", "properties": {"key1": "value", "key2": None}}) == 200
    assert add("correlation", {"correlation-id": "a"}) == 200
    response = node.ask("com.microsoft:enumerate-rules", {"skip": Int(0), "top": Int(10)})
    described = [each["rule-description"].value for each in response.body["rules"]]
    assert [each[2] for each in described] == ["$Default", "correlation", "with-null"]
    assert described[2][0].value[8] == {"key1": "value", "key2": None}
    pages = [
        node.ask("com.microsoft:enumerate-rules", {"skip": Int(at), "top": Int(1)}).body["rules"] for at in range(3)
    ]
    assert [page[0]["rule-description"].value[2] for page in pages] == ["$Default", "correlation", "with-null"]


# -- peek on a topic


@pytest.mark.parametrize("topic", ["topic", "spread-topic"])
def test_peek_on_a_topic_shows_its_scheduled_messages(peer, topic):
    receiver = peer.attach_receiver(topic)
    node = Node(peer, f"{topic}/$management")
    peek = {"from-sequence-number": Long(0), "message-count": Int(10)}
    assert node.ask("com.microsoft:peek-message", peek).status == 204
    annotations = {Symbol("x-opt-scheduled-enqueue-time"): Timestamp(4102444800000)}
    scheduled = [
        {"message-id": str(n), "message": message(b"later%d" % n, annotations=annotations, properties=[str(n)])}
        for n in range(2)
    ]
    numbers = node.ask("com.microsoft:schedule-message", {"messages": scheduled}).body["sequence-numbers"]
    found = node.ask("com.microsoft:peek-message", peek).body["messages"]
    assert [body_of(each["message"]) for each in found] == [b"later0", b"later1"]
    assert [number_in(each["message"]) for each in found] == list(numbers)
    assert [annotation_in(each["message"], "x-opt-message-state") for each in found] == [2, 2]
    failed = node.ask("com.microsoft:peek-message", {**peek, "session-id": "s"})
    assert (failed.status, failed.condition) == (400, "amqp:not-allowed")
    node.ask("com.microsoft:cancel-scheduled-message", {"sequence-numbers": list(numbers)})
    assert node.ask("com.microsoft:peek-message", peek).status == 204
    peer.flow(receiver, 1)
    condition, text = error_of(peer.expect(DETACH))
    assert condition == "amqp:not-allowed"
    assert text.startswith(f"A topic has no messages to receive: attach to one of the subscriptions of '{topic}'.")


def test_a_receiver_of_a_session_of_a_topic_is_refused(peer):
    peer.attach(**of_session("a", "topic"))
    assert peer.refusal()[0] == "amqp:not-allowed"


# -- JMS


@pytest.mark.parametrize("says", [True, False, None])
def test_a_client_that_counts_on_jms_is_served_as_any_other(broker, says):
    """As azure-servicebus-jms says it in its open. What it gets is in test_jms.py."""
    properties = {Symbol("com.microsoft:is-client-provider"): says}
    with RawPeer.connect(broker.amqp_port, properties=properties) as peer:
        peer.attach_sender("topic")
        peer.attach_receiver(SUBSCRIPTION)
        peer.attach_receiver("topic")  # to peek
