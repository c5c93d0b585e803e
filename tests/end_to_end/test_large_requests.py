"""Requests to nodes that are larger than they may be, or find no room, and answers with a message of the largest size.

Clients wait for the answer, not for the outcome of the delivery.
"""

import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest

from broker.gateway.nodes.request_links import MAX_WAITING_BYTES
from protocol.codec import Described, Int, Long, Symbol, Timestamp, ULong, array, encode
from tests.brokers import Broker
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, RawPeer, body_of, message
from tests.end_to_end.raw_requests import Node
from tests.sessions.raw_sessions import in_session

LARGEST = 262_144
UNFINISHED = 12 << 20  # the broker's limit for one connection
TOO_LARGE = (403, "amqp:link:message-size-exceeded")
SCHEDULE = "com.microsoft:schedule-message"
SCHEDULED = Symbol("x-opt-scheduled-enqueue-time")

CONFIG = f"""
[amqp]
max_message_size_bytes = {LARGEST}
max_unfinished_bytes_per_connection = {UNFINISHED}

[[queues]]
name = "orders"

[[queues]]
name = "huge"
max_message_size_kb = 2048

[[queues]]
name = "small"
max_message_size_kb = 1

[[queues]]
name = "sessions"
requires_session = true

[[queues]]
name = "enormous"
max_message_size_kb = 12288

[[topics]]
name = "news"
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("large"), CONFIG) as broker:
        yield broker


@pytest.fixture
def peer(broker: Broker) -> Iterator[RawPeer]:
    with RawPeer.connect(broker.amqp_port) as peer:
        yield peer


def of_size(size_bytes: int, **options: Any) -> bytes:
    """A message of so many bytes as a whole."""
    later = Timestamp(int(time.time() * 1000) + 3_600_000)
    empty = message(b"x" * 1000, annotations={SCHEDULED: later}, **options)
    found = message(b"x" * (1000 + size_bytes - len(empty)), annotations={SCHEDULED: later}, **options)
    assert len(found) == size_bytes
    return found


def schedule(node: Node, *messages: bytes) -> Any:
    items = [{"message": each, "message-id": "m" * 100, "session-id": "s" * 100} for each in messages]
    return node.ask(SCHEDULE, {"messages": items})


@pytest.mark.parametrize(("address", "largest"), [("orders", LARGEST), ("news", LARGEST), ("huge", 2 << 20)])
def test_what_may_be_sent_may_be_scheduled_and_no_more(peer: RawPeer, address: str, largest: int) -> None:
    handle = peer.attach_sender(address)
    peer.transfer_in_parts(of_size(262_000), handle)
    assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    node = Node(peer, f"{address}/$management")
    for size_bytes in (262_000, largest):
        assert schedule(node, of_size(size_bytes)).status == 200
    for size_bytes in (largest + 1, largest + 4096, largest + (2 << 20)):
        response = schedule(node, of_size(size_bytes))
        assert (response.status, response.condition) == TOO_LARGE
        assert f"exceeds the limit ({largest} bytes)" in response.description
    assert schedule(node, of_size(2000)).status == 200


def test_messages_that_are_scheduled_together_are_no_larger_than_one(peer: RawPeer) -> None:
    node = Node(peer, "orders/$management")
    assert schedule(node, *[of_size(2048)] * 128).status == 200
    assert (response := schedule(node, *[of_size(2048)] * 129)).condition == TOO_LARGE[1], response


def test_an_entitys_own_limit_is_for_each_message(peer: RawPeer) -> None:
    node = Node(peer, "small/$management")
    assert schedule(node, *[message(b"x" * 900)] * 3).status == 200
    assert schedule(node, message(b"x" * 1024)).condition == TOO_LARGE[1]


def test_a_state_as_large_as_a_message_is_set(peer: RawPeer) -> None:
    handle = peer.attach_sender("sessions")
    peer.transfer_in_parts(in_session("s", b"m"), handle)
    assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    node = Node(peer, "sessions/$management")
    for size_bytes, status in ((LARGEST + 1, 403), (2 << 20, 403)):
        body = {"session-id": "s", "session-state": bytes(size_bytes)}
        assert node.ask("com.microsoft:set-session-state", body).status == status


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("size_bytes", [2 << 20, 100_000])
@pytest.mark.parametrize("address", ["orders/$management", "$management", "$cbs"])
def test_each_node_answers_by_the_id_of_the_request(
    peer: RawPeer, address: str, size_bytes: int, settled: bool
) -> None:
    if address != "$cbs" and size_bytes < LARGEST:
        pytest.skip("it is not too large there")
    node = Node(peer, address)
    request = b"".join(
        encode(Described(ULong(code), section))
        for code, section in ((0x73, [UUID(int=77)]), (0x74, {"operation": "put-token"}), (0x77, bytes(size_bytes)))
    )
    peer.transfer_in_parts(request, node.sender, settled=settled)
    response = node.response()
    assert response.status == 403 or address == "$cbs"
    if not settled:
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED


def test_a_large_request_without_properties_is_rejected(peer: RawPeer) -> None:
    node = Node(peer, "orders/$management")
    peer.transfer_in_parts(encode(Described(ULong(0x77), bytes(2 << 20))), node.sender)
    assert peer.expect(DISPOSITION).fields[4].descriptor != ACCEPTED
    assert node.ask("com.microsoft:cancel-scheduled-message", {"sequence-numbers": [Long(1 << 40)]}).status == 404


@pytest.mark.parametrize(("address", "size_bytes"), [("orders", LARGEST), ("news", LARGEST), ("huge", 2 << 20)])
def test_a_message_of_the_largest_size_is_peeked_alone(peer: RawPeer, address: str, size_bytes: int) -> None:
    node = Node(peer, f"{address}/$management")
    sizes = [2000, size_bytes, size_bytes, 2000]
    numbers = [int(*schedule(node, of_size(each)).body["sequence-numbers"]) for each in sizes]
    for number, size in zip(numbers, sizes, strict=True):
        asked = {"from-sequence-number": Long(number), "message-count": Int(2)}
        response = node.ask("com.microsoft:peek-message", asked)
        assert response.status == 200, response
        if size == size_bytes:
            (peeked,) = response.body["messages"]
            assert size - 200 < len(body_of(peeked["message"])) < size
        assert (
            node.ask("com.microsoft:cancel-scheduled-message", {"sequence-numbers": array(Long, [number])}).status
            == 200
        )


def test_an_answer_that_is_larger_than_all_that_may_wait_waits_for_credit_if_it_is_alone(
    broker: Broker, peer: RawPeer
) -> None:
    body = bytes(MAX_WAITING_BYTES + 100_000)
    peer.transfer_in_parts(message(body), peer.attach_sender("enormous"))
    assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    node = Node(peer, "enormous/$management", credit=0)
    asked = {"from-sequence-number": Long(1), "message-count": Int(1)}
    node.say("com.microsoft:peek-message", asked)
    peer.wait_until_read()
    with RawPeer.connect(broker.amqp_port) as other:
        behind = {**asked, "from-sequence-number": Long(1000)}
        # The partition has answered the first request when it answers this one.
        assert Node(other, "enormous/$management").ask("com.microsoft:peek-message", behind).status == 204
    peer.flow(node.receiver, 1)
    (peeked,) = node.response().body["messages"]
    assert body_of(peeked["message"]) == body


def test_a_request_that_finds_no_room_is_answered_as_busy(peer: RawPeer) -> None:
    node = Node(peer, "orders/$management")
    begun = [peer.attach_sender("enormous") for _ in range(2)]
    for handle in begun:
        whole = of_size(UNFINISHED // 2 - 50_000)
        for at in range(0, len(whole), 60_000):
            peer.transfer(whole[at : at + 60_000], handle, more=True, first=at == 0)
    response = schedule(node, of_size(200_000))
    assert (response.status, response.condition) == (503, "com.microsoft:server-busy"), response
    for handle in begun:
        peer.detach(handle)
    assert schedule(node, of_size(200_000)).status == 200
