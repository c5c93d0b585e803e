"""Partitioned entities as a client sees them: one entity, whichever fragment a message is on."""

import time
from collections import Counter
from typing import Any
from uuid import UUID

import pytest

from protocol.codec import Array, Described, Int, Long, Symbol, Timestamp, UInt, ULong
from tests.brokers import Broker
from tests.end_to_end.health import metrics
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    DISPOSITION,
    FLOW,
    MODIFIED,
    REJECTED,
    TRANSFER,
    Frame,
    RawPeer,
    batch,
    body_of,
    error_of,
    message,
    outcome,
    source,
)
from tests.end_to_end.raw_requests import Node
from tests.end_to_end.raw_transactions import Coordinator, answer_of, within
from tests.partitioned.conftest import PARTITIONS
from tests.sessions.raw_sessions import FILTER, accept, annotations_of, in_session, receive, session_of

KEY, NUMBER, SCHEDULED = (
    Symbol("x-opt-partition-key"),
    Symbol("x-opt-sequence-number"),
    Symbol("x-opt-scheduled-enqueue-time"),
)
BATCH_FORMAT = 0x80013700


def keyed(key: str, body: bytes = b"m") -> bytes:
    return message(body, annotations={KEY: key})


def identified(message_id: str, body: bytes = b"m") -> bytes:
    return message(body, properties=[message_id])


def send(peer: RawPeer, address: str, *messages: bytes) -> None:
    """Each must be accepted."""
    handle = peer.attach_sender(address)
    for each in messages:
        peer.transfer(each, handle)
        frame = peer.expect(DISPOSITION)
        assert frame.fields[4].descriptor == ACCEPTED, error_of(frame)
    peer.detach(handle)


def number_of(frame: Frame) -> int:
    return int(annotations_of(frame.payload)[NUMBER])


def fragment_of(frame: Frame) -> int:
    return number_of(frame) >> 48


def received(peer: RawPeer, address: str, count: int, *, settle: bool = True) -> list[Frame]:
    """So many messages, and no more."""
    handle = peer.attach_receiver(address, credit=count)
    frames = [peer.expect(TRANSFER) for _ in range(count)]
    if settle:
        for frame in frames:
            peer.settle(frame.fields[1])
            assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
        peer.detach(handle)
    return frames


# Sending and receiving


def test_messages_without_a_key_are_on_all_fragments_and_come_once(peer: RawPeer) -> None:
    send(peer, "orders", *[message(b"%d" % number) for number in range(20)])
    frames = received(peer, "orders", 20)
    assert Counter(map(fragment_of, frames)) == Counter(dict.fromkeys(range(PARTITIONS), 5))
    assert {body_of(frame.payload) for frame in frames} == {b"%d" % number for number in range(20)}
    assert len(set(map(number_of, frames))) == 20


def test_senders_that_send_one_message_each_spread_them_over_all_fragments(peer: RawPeer) -> None:
    for number in range(2 * PARTITIONS):
        send(peer, "orders", message(b"%d" % number))
    frames = received(peer, "orders", 2 * PARTITIONS)
    assert Counter(map(fragment_of, frames)) == Counter(dict.fromkeys(range(PARTITIONS), 2))


def test_messages_with_a_key_are_on_one_fragment_in_order(peer: RawPeer) -> None:
    send(peer, "orders", *[keyed(key, b"%s %d" % (key.encode(), n)) for n in range(5) for key in "abcdefgh"])
    frames = received(peer, "orders", 40)
    by_key: dict[bytes, list[Frame]] = {}
    for frame in frames:
        by_key.setdefault(body_of(frame.payload).split()[0], []).append(frame)
    for key, each in by_key.items():
        assert len(set(map(fragment_of, each))) == 1
        assert [body_of(frame.payload) for frame in each] == [b"%s %d" % (key, n) for n in range(5)]
    assert len({fragment_of(each[0]) for each in by_key.values()}) > 1


def test_a_batch_is_stored_whole_on_one_fragment(peer: RawPeer) -> None:
    handle = peer.attach_sender("orders")
    peer.transfer(batch(*[message(b"%d" % n) for n in range(10)]), handle, message_format=BATCH_FORMAT)
    assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    frames = received(peer, "orders", 10)
    assert len(set(map(fragment_of, frames))) == 1
    numbers = sorted(map(number_of, frames))
    assert numbers == list(range(numbers[0], numbers[0] + 10))


def test_a_batch_with_several_keys_is_refused(peer: RawPeer) -> None:
    handle = peer.attach_sender("orders")
    peer.transfer(batch(keyed("a"), keyed("b")), handle, message_format=BATCH_FORMAT)
    condition, text = error_of(peer.expect(DISPOSITION))
    assert condition == "amqp:not-allowed"
    assert "partition keys" in text


def test_a_session_id_that_differs_from_the_partition_key_is_refused(peer: RawPeer) -> None:
    handle = peer.attach_sender("sessions")
    peer.transfer(in_session("s", b"m", annotations={KEY: "other"}), handle)
    condition, text = error_of(peer.expect(DISPOSITION))
    assert condition == "amqp:not-allowed"
    assert "session id" in text


def test_a_receiver_with_a_credit_of_one_finds_each_message_wherever_it_is(peer: RawPeer) -> None:
    handle = peer.attach_receiver("orders")
    sender = peer.attach_sender("orders")
    fragments = []
    for number in range(2 * PARTITIONS):
        peer.flow(handle, 1, delivery_count=number, next_incoming_id=number)
        peer.transfer(message(b"%d" % number), sender)
        frame = peer.expect(TRANSFER)
        assert body_of(frame.payload) == b"%d" % number
        fragments.append(fragment_of(frame))
        peer.settle(frame.fields[1])
    assert set(fragments) == set(range(PARTITIONS))
    peer.nothing_more(TRANSFER)


def test_credit_is_never_exceeded(peer: RawPeer) -> None:
    send(peer, "orders", *[message(b"m") for _ in range(20)])
    peer.attach_receiver("orders", credit=7)
    frames = [peer.expect(TRANSFER) for _ in range(7)]
    peer.nothing_more(TRANSFER)
    assert len(frames) == 7


def test_a_drain_returns_what_there_is_and_then_the_credit(broker: Broker, peer: RawPeer) -> None:
    with RawPeer.connect(broker.amqp_port) as sender:
        send(sender, "orders", *[message(b"m") for _ in range(6)])
    handle = peer.attach_receiver("orders")
    peer.flow(handle, 100, drain=True)
    for _ in range(6):
        peer.expect(TRANSFER)
    flow = peer.expect(FLOW)
    assert flow.fields[4:7] == [handle, 100, 0]
    with RawPeer.connect(broker.amqp_port) as sender:
        send(sender, "orders", message(b"late"))
    peer.nothing_more(TRANSFER)


def test_two_receivers_get_disjoint_messages_that_make_the_whole(broker: Broker, peer: RawPeer) -> None:
    with RawPeer.connect(broker.amqp_port) as other:
        for each in (peer, other):
            each.attach_receiver("orders", credit=15)
        with RawPeer.connect(broker.amqp_port) as sender:
            send(sender, "orders", *[message(b"%d" % number) for number in range(30)])
        bodies = [body_of(each.expect(TRANSFER).payload) for each in (peer, other) for _ in range(15)]
        assert sorted(bodies) == sorted(b"%d" % number for number in range(30))


def test_what_is_received_and_deleted_is_gone(peer: RawPeer) -> None:
    send(peer, "orders", *[message(b"%d" % number) for number in range(8)])
    handle = peer.attach(sender=False, address="orders", settled=True)
    peer.flow(handle, 100)
    assert len({body_of(peer.expect(TRANSFER).payload) for _ in range(8)}) == 8
    peer.nothing_more(TRANSFER)


def test_outcomes_reach_the_fragments(peer: RawPeer) -> None:
    send(peer, "orders", *[message(b"%d" % number) for number in range(8)])
    handle = peer.attach_receiver("orders", credit=8)
    frames = [peer.expect(TRANSFER) for _ in range(8)]
    for frame in frames[:4]:
        peer.settle(frame.fields[1], state=outcome(REJECTED))
    for frame in frames[4:]:
        peer.settle(frame.fields[1], state=outcome(MODIFIED, True))
    for _ in frames:
        peer.expect(DISPOSITION)
    peer.flow(handle, 10, delivery_count=8)
    again = [peer.expect(TRANSFER) for _ in range(4)]
    assert {number_of(frame) for frame in again} == {number_of(frame) for frame in frames[4:]}
    dead = received(peer, "orders/$DeadLetterQueue", 4)
    assert {body_of(frame.payload) for frame in dead} == {body_of(frame.payload) for frame in frames[:4]}


def test_locks_end_on_every_fragment(peer: RawPeer) -> None:
    send(peer, "orders", *[message(b"%d" % number) for number in range(4)])
    first = received(peer, "orders", 4, settle=False)
    assert {fragment_of(frame) for frame in first} == set(range(PARTITIONS))
    again = received(peer, "orders", 4)
    assert {number_of(frame) for frame in again} == {number_of(frame) for frame in first}


# $management


def entries(response: Any) -> list[tuple[int, bytes]]:
    """Sequence number and body of each message of an answer."""
    found = []
    for each in response.body["messages"]:
        payload = bytes(each["message"])
        found.append((int(annotations_of(payload)[NUMBER]), body_of(payload)))
    return found


def peek(node: Node, start: int = 0, count: int = 100) -> list[tuple[int, bytes]]:
    body = {"from-sequence-number": start, "message-count": count}
    response = node.ask("com.microsoft:peek-message", body)
    return entries(response) if response.status == 200 else []


def test_peek_shows_all_fragments_in_order_and_page_by_page(peer: RawPeer) -> None:
    send(peer, "orders", *[message(b"%d" % number) for number in range(10)])
    node = Node(peer, "orders/$management")
    found = peek(node)
    assert found == sorted(found)
    assert {body for _, body in found} == {b"%d" % number for number in range(10)}
    paged: list[tuple[int, bytes]] = []
    while page := peek(node, paged[-1][0] + 1 if paged else 0, 3):
        assert len(page) <= 3
        paged += page
    assert paged == found
    assert peek(node, found[7][0]) == found[7:]


def test_pages_that_are_full_by_bytes_leave_out_no_message(peer: RawPeer) -> None:
    """The largest message of a fragment does not fit behind the others, and the first of the next fragment would."""
    sizes = [60_000] * 24 + [10] * 4
    send(peer, "orders", *[message(b"%5d" % number + b"x" * size) for number, size in enumerate(sizes)])
    node = Node(peer, "orders/$management")
    paged: list[tuple[int, bytes]] = []
    while page := peek(node, paged[-1][0] + 1 if paged else 0):
        paged += page
    assert sorted(int(body[:5]) for _, body in paged) == list(range(len(sizes)))
    assert paged == sorted(paged)


def test_scheduled_messages_are_cancelled_by_their_numbers_on_any_fragment(peer: RawPeer) -> None:
    node = Node(peer, "orders/$management")
    due = int((time.time() + 1.5) * 1000)
    listed = []
    for index in range(6):
        annotations = {SCHEDULED: Timestamp(due), KEY: f"key-{index}"}
        encoded = message(b"%d" % index, annotations=annotations)
        listed.append({"message": encoded, "message-id": f"id-{index}"})
    response = node.ask("com.microsoft:schedule-message", {"messages": listed})
    numbers = [int(number) for number in response.body["sequence-numbers"]]
    assert len({number >> 48 for number in numbers}) > 1
    shown = dict(peek(node))
    assert [shown[number] for number in numbers] == [b"%d" % index for index in range(6)]
    assert node.ask("com.microsoft:cancel-scheduled-message", {"sequence-numbers": longs(numbers[::2])}).status == 200
    frames = received(peer, "orders", 3)
    assert {body_of(frame.payload) for frame in frames} == {b"1", b"3", b"5"}


def longs(numbers: list[int]) -> Array:
    return Array(Long, tuple(map(Long, numbers)))


def test_deferred_messages_of_several_fragments_are_received_renewed_and_settled_at_once(peer: RawPeer) -> None:
    send(peer, "orders", *[message(b"%d" % number) for number in range(8)])
    frames = received(peer, "orders", 8, settle=False)
    for frame in frames:
        peer.settle(frame.fields[1], state=outcome(MODIFIED, False, True))
        peer.expect(DISPOSITION)
    numbers = [number_of(frame) for frame in frames]
    node = Node(peer, "orders/$management")
    body = {"sequence-numbers": longs(numbers), "receiver-settle-mode": UInt(1)}
    response = node.ask("com.microsoft:receive-by-sequence-number", body)
    assert {number for number, _ in entries(response)} == set(numbers)
    tokens = [each["lock-token"] for each in response.body["messages"]]
    renewed = node.ask("com.microsoft:renew-lock", {"lock-tokens": Array(UUID, tuple(tokens))})
    assert len(renewed.body["expirations"]) == 8
    settled = node.ask(
        "com.microsoft:update-disposition",
        {"disposition-status": "completed", "lock-tokens": Array(UUID, tuple(tokens))},
    )
    assert settled.status == 200
    assert peek(node) == []
    missing = node.ask("com.microsoft:receive-by-sequence-number", body)
    assert missing.condition.endswith("message-not-found")


@pytest.mark.parametrize("number", [-(2**63), -1, 2**63 - 1, 99 << 48])
def test_a_number_that_no_fragment_gave_is_an_error_of_that_request_alone(peer: RawPeer, number: int) -> None:
    node = Node(peer, "orders/$management")
    body = {"sequence-numbers": longs([number]), "receiver-settle-mode": UInt(1)}
    assert node.ask("com.microsoft:receive-by-sequence-number", body).status in (400, 404, 410)
    assert node.ask("com.microsoft:cancel-scheduled-message", {"sequence-numbers": longs([number])}).status >= 400
    node.ask("com.microsoft:peek-message", {"from-sequence-number": number, "message-count": 10})
    unknown = node.ask("com.microsoft:renew-lock", {"lock-tokens": Array(UUID, (UUID(int=number % 2**128),))})
    assert unknown.status == 410


def test_counts_are_those_of_all_fragments(broker: Broker, peer: RawPeer) -> None:
    send(peer, "orders", *[message(b"m") for _ in range(12)])
    found = {name: value for name, value in metrics(broker).items() if "orders" in name}
    assert found["peeklock_active_messages", "orders"] == 12
    assert found["peeklock_messages", "orders"] == 12


# Sessions, duplicates, topics


def test_a_session_is_on_one_fragment_and_any_receiver_finds_the_next(peer: RawPeer) -> None:
    ids = [f"s{number}" for number in range(8)]
    send(peer, "sessions", *[in_session(each, b"%d" % number) for number in range(2) for each in ids])
    found = []
    fragments = set()
    for _ in ids:
        handle, attached = accept(peer, "sessions")
        session_id = session_of(attached)
        deliveries = receive(peer, handle, 2)
        assert [body for _, body in deliveries] == [b"0", b"1"]
        [fragment] = {fragment_of(frame) for frame, _ in deliveries}
        fragments.add(fragment)
        for frame, _ in deliveries:
            peer.settle(frame.fields[1])
            peer.expect(DISPOSITION)
        found.append(session_id)
    assert sorted(found) == ids
    assert len(fragments) > 1


def test_the_next_session_is_waited_for_on_all_fragments(broker: Broker, peer: RawPeer) -> None:
    for index in range(PARTITIONS):
        with RawPeer.connect(broker.amqp_port) as waiting:
            handle = waiting.attach(
                sender=False, source_=session_source(), properties={Symbol("com.microsoft:timeout"): UInt(5000)}
            )
            waiting.wait_until_read()
            send(peer, "sessions", in_session(f"late-{index}", b"m"))
            assert session_of(waiting.expect(ATTACH)) == f"late-{index}"
            [(frame, _)] = receive(waiting, handle)
            waiting.settle(frame.fields[1])
            waiting.expect(DISPOSITION)


def session_source() -> Described:
    return source("sessions", filters={FILTER: None})


def test_without_a_session_the_wait_ends_in_time(peer: RawPeer) -> None:
    began = time.monotonic()
    peer.attach(sender=False, source_=session_source(), properties={Symbol("com.microsoft:timeout"): UInt(700)})
    condition, _ = peer.refusal()
    assert condition == "com.microsoft:timeout"
    assert 0.6 < time.monotonic() - began < 3


def test_the_state_of_a_session_is_kept_where_the_session_is(peer: RawPeer) -> None:
    for index in range(6):
        accept(peer, "sessions", f"state-{index}")
        node = Node(peer, "sessions/$management")
        body = {"session-id": f"state-{index}", "session-state": b"%d" % index}
        assert node.ask("com.microsoft:set-session-state", body).status == 200
        answer = node.ask("com.microsoft:get-session-state", {"session-id": f"state-{index}"})
        assert answer.body["session-state"] == b"%d" % index
        assert node.ask("com.microsoft:renew-session-lock", {"session-id": f"state-{index}"}).status == 200
        cleared = {"session-id": f"state-{index}", "session-state": None}
        assert node.ask("com.microsoft:set-session-state", cleared).status == 200


def listed(node: Node, skip: int, top: int) -> list[str]:
    """A page of all sessions with messages or a state."""
    body = {"last-updated-time": Timestamp(253_402_300_800_000), "skip": Int(skip), "top": Int(top)}
    response = node.ask("com.microsoft:get-message-sessions", body)
    assert response.status in (200, 204), response
    return [] if response.status == 204 else list(response.body["sessions-ids"])


def test_the_sessions_of_all_fragments_are_listed_page_by_page(peer: RawPeer) -> None:
    session_ids = [f"listed-{index}" for index in range(10)]
    send(peer, "sessions", *[in_session(session_id, b"m") for session_id in session_ids])
    node = Node(peer, "sessions/$management")
    found = listed(node, 0, 10_000)
    assert sorted(found) == session_ids
    paged: list[str] = []
    while page := listed(node, len(paged), 3):
        assert len(page) <= 3
        paged += page
    assert paged == found
    for skip in (7, 2, 9, 10, 0, 11, 2**31 - 1):  # pages that follow no other
        assert listed(node, skip, 3) == found[skip : skip + 3]


def test_an_id_that_was_sent_is_dropped_wherever_it_comes_again(peer: RawPeer) -> None:
    ids = [f"{time.time_ns()}-{number}" for number in range(12)]
    send(peer, "once", *map(identified, ids), *map(identified, ids))
    handle = peer.attach_sender("once")
    again = batch(*map(identified, [*ids, f"{ids[0]}-new"]))
    peer.transfer(again, handle, message_format=BATCH_FORMAT)
    assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    frames = received(peer, "once", 13)
    assert len(set(map(fragment_of, frames))) > 1
    peer.nothing_more(TRANSFER)


def test_ids_with_the_same_text_are_the_same_whatever_their_type(peer: RawPeer) -> None:
    base = time.time_ns()
    for number in range(base, base + 12):
        forms: list[Any] = [str(number), ULong(number), str(number).encode()]
        send(peer, "once", *[message(b"m", properties=[form]) for form in forms])
    received(peer, "once", 12)
    peer.attach_receiver("once", credit=1)
    peer.nothing_more(TRANSFER)


def test_an_id_is_known_for_each_session_by_itself(peer: RawPeer) -> None:
    """The key of a message is its session id, and a part of what must be the same (PE5)."""
    ids = [f"d{number}" for number in range(2 * PARTITIONS)]
    handle = peer.attach_sender("once-in-session")
    for session_id in [*ids, *ids]:
        peer.transfer(message(b"m", properties=["same id", *[None] * 9, session_id]), handle)
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    for session_id in ids:
        link, _ = accept(peer, "once-in-session", session_id)
        peer.flow(link, 2)
        peer.settle(peer.expect(TRANSFER).fields[1])
        peer.expect(DISPOSITION)
        peer.nothing_more(TRANSFER)
        peer.detach(link)


def test_a_topic_publishes_on_every_fragment(peer: RawPeer) -> None:
    send(peer, "news", *[message(b"%d" % n, application={"size": n}) for n in range(12)])
    everything = received(peer, "news/Subscriptions/all", 12)
    assert set(map(fragment_of, everything)) == set(range(PARTITIONS))
    some = received(peer, "news/Subscriptions/some", 6)
    assert {body_of(frame.payload) for frame in some} == {b"%d" % n for n in range(6, 12)}


def test_a_rule_holds_on_every_fragment(peer: RawPeer) -> None:
    node = Node(peer, "news/Subscriptions/some/$management")
    rule = {"sql-filter": {"expression": "size = 0"}}
    body = {"rule-name": "none", "rule-description": {**rule, "rule-name": "none", "sql-rule-action": None}}
    assert node.ask("com.microsoft:add-rule", body).status == 200
    try:
        send(peer, "news", *[message(b"%d" % n, application={"size": 0}) for n in range(PARTITIONS)])
        assert {fragment_of(frame) for frame in received(peer, "news/Subscriptions/some", 4)} == {0, 1, 2, 3}
    finally:
        assert node.ask("com.microsoft:remove-rule", {"rule-name": "none"}).status == 200
    send(peer, "news", *[message(b"m", application={"size": 0}) for _ in range(PARTITIONS)])
    peer.attach_receiver("news/Subscriptions/some", credit=10)
    peer.nothing_more(TRANSFER)


# Transactions and forwarding


def test_a_transaction_with_one_key_settles_and_sends_together(peer: RawPeer) -> None:
    send(peer, "orders", keyed("k", b"old"))
    receiver = peer.attach_receiver("orders", credit=1)
    frame = peer.expect(TRANSFER)
    coordinator = Coordinator(peer)
    transaction = coordinator.declare()
    sender = peer.attach_sender("orders")
    for body in (b"a", b"b"):
        peer.transfer(keyed("k", body), sender, state=within(transaction))
        assert answer_of(peer.expect(DISPOSITION)) == "in the transaction"
    peer.settle(frame.fields[1], state=within(transaction, outcome(ACCEPTED)))
    peer.expect(DISPOSITION)
    assert coordinator.discharge(transaction) == "accepted"
    peer.detach(receiver)
    assert [body_of(each.payload) for each in received(peer, "orders", 2)] == [b"a", b"b"]


@pytest.mark.parametrize("second", [message(b"no key"), keyed("another")])
def test_in_a_transaction_every_message_needs_the_same_key(peer: RawPeer, second: bytes) -> None:
    coordinator = Coordinator(peer)
    transaction = coordinator.declare()
    sender = peer.attach_sender("orders")
    peer.transfer(keyed("k"), sender, state=within(transaction))
    assert answer_of(peer.expect(DISPOSITION)) == "in the transaction"
    peer.transfer(second, sender, state=within(transaction))
    assert answer_of(peer.expect(DISPOSITION)) == "amqp:not-allowed"
    assert coordinator.discharge(transaction, fail=True) == "accepted"
    peer.attach_receiver("orders", credit=5)
    peer.nothing_more(TRANSFER)


def test_messages_of_several_fragments_cannot_be_settled_in_one_transaction(peer: RawPeer) -> None:
    send(peer, "orders", message(b"a"), message(b"b"))
    frames = received(peer, "orders", 2, settle=False)
    assert fragment_of(frames[0]) != fragment_of(frames[1])
    coordinator = Coordinator(peer)
    transaction = coordinator.declare()
    answers = []
    for frame in frames:
        peer.settle(frame.fields[1], state=within(transaction, outcome(ACCEPTED)))
        answers.append(answer_of(peer.expect(DISPOSITION)))
    assert answers == ["in the transaction", "amqp:not-allowed"]
    assert coordinator.discharge(transaction) == "accepted"


def test_a_transaction_on_a_fragment_sends_through_its_entity_to_others(peer: RawPeer) -> None:
    send(peer, "orders", keyed("k", b"old"))
    peer.attach_receiver("orders", credit=1)
    frame = peer.expect(TRANSFER)
    through = {Symbol("com.microsoft:transfer-destination-address"): "sessions"}
    sender = peer.attach_sender("orders", properties=through)
    coordinator = Coordinator(peer)
    transaction = coordinator.declare()
    peer.settle(frame.fields[1], state=within(transaction, outcome(ACCEPTED)))
    peer.expect(DISPOSITION)
    for index in range(4):
        peer.transfer(in_session(f"through-{index}", b"%d" % index), sender, state=within(transaction))
        assert answer_of(peer.expect(DISPOSITION)) == "in the transaction"
    assert coordinator.discharge(transaction) == "accepted"
    for index in range(4):
        handle, _ = accept(peer, "sessions", f"through-{index}")
        [(delivery, body)] = receive(peer, handle)
        assert body == b"%d" % index
        peer.settle(delivery.fields[1])
        peer.expect(DISPOSITION)


def test_forwarded_messages_go_to_the_fragments_of_their_sessions(peer: RawPeer) -> None:
    ids = [f"f{number}" for number in range(8)]
    send(peer, "forwards", *[in_session(each, b"%d" % n) for n in range(3) for each in ids])
    for session_id in ids:
        handle, _ = accept(peer, "sessions", session_id)
        deliveries = receive(peer, handle, 3)
        assert [body for _, body in deliveries] == [b"0", b"1", b"2"]
        for frame, _ in deliveries:
            peer.settle(frame.fields[1])
            peer.expect(DISPOSITION)


def test_a_plain_queue_forwards_to_a_partitioned_one(peer: RawPeer) -> None:
    send(peer, "plain", *[message(b"%d" % number) for number in range(10)])
    assert {body_of(frame.payload) for frame in received(peer, "orders", 10)} == {b"%d" % n for n in range(10)}
