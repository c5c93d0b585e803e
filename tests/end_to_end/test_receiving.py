"""Credit, drain, windows, settlements and ends of receivers, also odd ones, on a real broker."""

import time
from contextlib import suppress
from typing import Any
from uuid import UUID

import pytest

from protocol.codec import Array, Described, Int, Long, Symbol, UInt, ULong, decode, encode
from protocol.lock_tokens import uuid_of
from tests.end_to_end.health import metrics
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    BATCH_FORMAT,
    CLOSE,
    DETACH,
    DISPOSITION,
    END,
    FLOW,
    MODIFIED,
    RECEIVED,
    REJECTED,
    RELEASED,
    TRANSFER,
    Frame,
    RawPeer,
    batch,
    body_of,
    error_of,
    message,
    outcome,
    performative,
    source,
    target,
)
from tests.end_to_end.raw_requests import Node
from tests.patience import eventually

LOCK_LOST = "com.microsoft:message-lock-lost"


@pytest.fixture
def peer(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        yield peer
    purge(broker)


def sections(payload: bytes) -> dict[int, Any]:
    """By code; none may be there twice."""
    found = {}
    at = 0
    while at < len(payload):
        section, at = decode(payload, at)
        assert section.descriptor not in found
        found[int(section.descriptor)] = section.value
    return found


def purge(broker, queue: str = "orders") -> None:
    """Take all there is; what is locked or deferred by connections that are gone is free."""
    with RawPeer.connect(broker.amqp_port) as peer:
        for address in (queue, f"{queue}/$DeadLetterQueue"):
            assert Node(peer, f"{address}/$management").ask("peeklock:purge", {}).status in (200, 204)
        peer.close()


def fill(peer: RawPeer, count: int, size: int = 0, queue: str = "orders") -> None:
    """`count` messages whose bodies begin with their number."""
    handle = peer.attach_sender(queue)
    for first in range(0, count, 100):
        numbers = range(first, min(count, first + 100))
        for at in range(0, len(numbers), max(1, 50_000 // (size + 100))):
            part = numbers[at : at + max(1, 50_000 // (size + 100))]
            payload = batch(*(message(b"%d " % number + bytes(size)) for number in part))
            peer.transfer(payload, handle, message_format=BATCH_FORMAT)
            assert peer.expect(DISPOSITION).fields[4] == outcome(ACCEPTED)
    peer.detach(handle)
    peer.expect(DETACH)


def number_of(delivery: Frame) -> int:
    return int(body_of(delivery.payload).split(b" ")[0])


def receive_one(peer: RawPeer, handle: int, before: int = 0) -> Frame:
    """The next message of a link on which `before` have come."""
    peer.flow(handle, 1, delivery_count=before)
    return peer.expect(TRANSFER)


# --- credit and drain -------------------------------------------------------------------------------------------------


def test_all_the_credit_there_is_brings_no_flood(start_broker):
    """Credit of 2^32-1 on a backlog: everything comes, and the processes stay small.

    The broker waits for clients that do not read as long as brokers do: on a busy machine this one may be slow.
    """
    config = '[[queues]]\nname = "witness"\n[[queues]]\nname = "backlog"\n'
    with start_broker(config) as broker, RawPeer.connect(broker.amqp_port) as peer:
        fill(peer, 20_000, 1000, "backlog")
        processes = [broker.gateway(), broker.worker()]
        before = [process.memory_info().rss for process in processes]
        peer.attach_receiver("backlog", credit=0xFFFFFFFF)
        grown = 0
        for number in range(20_000):
            delivery = peer.expect(TRANSFER)
            assert number_of(delivery) == number
            if number % 1000 == 999:
                peer.settle(delivery.fields[1] - 999, delivery.fields[1])
                grown = max(grown, *(p.memory_info().rss - b for p, b in zip(processes, before, strict=True)))
        assert grown < 60 << 20
        peer.expect(DISPOSITION)


def test_a_receiver_whose_session_window_is_closed_takes_no_more_than_its_share(broker):
    """All the credit, and no window: a backlog must not end in the gateway's memory, nor be lost from a queue."""
    purge(broker)
    with RawPeer.connect(broker.amqp_port) as peer:
        fill(peer, 2500, 5_000)
        peer.begin(1, incoming_window=1)
        handle = peer.attach_receiver("orders", channel=1, settled=True)
        peer.flow(handle, 0xFFFFFFFF, channel=1, incoming_window=1)
        peer.expect(TRANSFER)
        peer.nothing_more(TRANSFER)
        left = eventually(lambda: metrics(broker)["peeklock_messages", "orders"], "counted")
        assert left >= 500  # receiver_window, and less where it is many bytes
        peer.flow(handle, 0xFFFFFFFF, delivery_count=1, channel=1, incoming_window=100_000, next_incoming_id=1)
        for number in range(1, 2500):
            assert number_of(peer.expect(TRANSFER)) == number


def test_credit_is_kept_to_the_message(peer):
    fill(peer, 10)
    handle = peer.attach_receiver("orders", credit=3)
    assert [number_of(peer.expect(TRANSFER)) for _ in range(3)] == [0, 1, 2]
    peer.nothing_more(TRANSFER)
    peer.flow(handle, 2, delivery_count=3)
    assert [number_of(peer.expect(TRANSFER)) for _ in range(2)] == [3, 4]
    peer.nothing_more(TRANSFER)


def test_credit_that_is_taken_back_is_not_used(broker, peer):
    handle = peer.attach_receiver("orders", credit=5)
    peer.flow(handle, 0, echo=True)
    peer.expect(FLOW)
    with RawPeer.connect(broker.amqp_port) as other:
        fill(other, 3)
    peer.nothing_more(TRANSFER)
    peer.flow(handle, 5)
    assert [number_of(peer.expect(TRANSFER)) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("stored", [0, 2, 5, 8])
def test_a_drain_brings_what_there_is_and_ends_with_the_credit_used_up(peer, stored):
    fill(peer, stored)
    handle = peer.attach_receiver("orders")
    peer.flow(handle, 5, drain=True)
    flow = peer.expect(FLOW)
    assert flow.fields[5:7] == [5, 0]
    transfers = [frame for frame in peer._kept if frame.code == TRANSFER]
    assert len(transfers) == min(stored, 5)


@pytest.mark.parametrize("drain", [True, False], ids=["drain", "echo"])
def test_a_flow_without_credit_that_wants_an_answer_gets_it(peer, drain):
    handle = peer.attach_receiver("orders")
    for _ in range(3):
        peer.flow(handle, 0, drain=drain, echo=not drain)
        assert peer.expect(FLOW).fields[5:7] == [0, 0]


def test_credit_after_a_drain_counts_again(peer):
    handle = peer.attach_receiver("orders")
    peer.flow(handle, 5, drain=True)
    assert peer.expect(FLOW).fields[5] == 5
    fill(peer, 1)
    peer.flow(handle, 1, delivery_count=5)
    assert number_of(peer.expect(TRANSFER)) == 0


def test_the_same_credit_as_before_a_drain_is_new_credit(peer):
    handle = peer.attach_receiver("orders")
    for drained in (0, 5, 10):
        peer.flow(handle, 5, delivery_count=drained)
        peer.flow(handle, 5, delivery_count=drained, drain=True)
        assert peer.expect(FLOW).fields[5] == drained + 5
    peer.flow(handle, 5, delivery_count=15)
    fill(peer, 1)
    assert number_of(peer.expect(TRANSFER)) == 0


def test_an_echo_to_a_sender_says_its_credit(peer):
    handle = peer.attach_sender("orders")
    peer.flow(handle, 0, echo=True)
    assert peer.expect(FLOW).fields[5:7] == [0, 1000]


# --- settlements ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "answer"),
    [
        (outcome(ACCEPTED), outcome(ACCEPTED)),
        (outcome(RELEASED), outcome(RELEASED)),
        (outcome(MODIFIED), outcome(MODIFIED, False, False)),
        (outcome(MODIFIED, True, True), outcome(MODIFIED, False, False)),
        (outcome(REJECTED), outcome(REJECTED)),
    ],
    ids=["accepted", "released", "abandoned", "deferred", "rejected"],
)
def test_an_outcome_is_answered_with_its_kind_once_and_then_the_lock_is_gone(peer, state, answer):
    fill(peer, 1)
    handle = peer.attach_receiver("orders")
    delivery_id = receive_one(peer, handle).fields[1]
    for _ in range(3):  # twice is no error of the connection's, and gets no second answer
        peer.settle(delivery_id, state=state)
    settled = peer.expect(DISPOSITION)
    assert settled.fields[:2] == [False, delivery_id]
    assert settled.fields[3] is True
    assert settled.fields[4] == answer
    peer.nothing_more(DISPOSITION)


def test_a_settled_outcome_is_applied_without_an_answer(peer):
    fill(peer, 2)
    handle = peer.attach_receiver("orders", credit=2)
    first, second = peer.expect(TRANSFER), peer.expect(TRANSFER)
    peer.settle(first.fields[1], settled=True)
    peer.settle(second.fields[1], settled=True, state=outcome(RELEASED))
    peer.nothing_more(DISPOSITION)
    peer.flow(handle, 1, delivery_count=2)
    assert number_of(peer.expect(TRANSFER)) == 1


def test_an_unknown_delivery_id_is_skipped(peer):
    fill(peer, 1)
    handle = peer.attach_receiver("orders")
    delivery_id = receive_one(peer, handle).fields[1]
    for unknown in (delivery_id + 1, delivery_id + 1000, 0xFFFFFFFF):
        peer.settle(unknown)
    peer.settle(delivery_id)
    assert peer.expect(DISPOSITION).fields[1] == delivery_id
    peer.nothing_more(DISPOSITION)


def test_a_range_settles_what_is_in_it_and_skips_the_rest(peer):
    fill(peer, 12_000)
    peer.attach_receiver("orders", credit=12_000)
    for _ in range(12_000):
        last = peer.expect(TRANSFER).fields[1]
    peer.settle(last - 5, last - 5, state=outcome(RELEASED))
    peer.expect(DISPOSITION)
    peer.settle(0, last + 500)
    settled = 0
    while settled < 11_999:
        answer = peer.expect(DISPOSITION)
        assert answer.fields[4] == outcome(ACCEPTED)
        settled += (answer.fields[2] or answer.fields[1]) - answer.fields[1] + 1
    assert settled == 11_999
    peer.nothing_more(DISPOSITION)


@pytest.mark.parametrize(("first", "last"), [(0, 0xFFFFFFFE), (10, 0), (0x80000000, 0x7FFFFFFF)])
def test_a_range_that_makes_no_sense_is_a_fault_of_its_own_connection(broker, first, last):
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_receiver("orders")
        peer.settle(first, last)
        frames = peer.wait_closed()
        assert frames[-1].code == CLOSE
        assert "illegal delivery range" in error_of(frames[-1])[1]


def test_received_is_no_outcome(peer):
    fill(peer, 1)
    handle = peer.attach_receiver("orders")
    delivery_id = receive_one(peer, handle).fields[1]
    peer.settle(delivery_id, state=outcome(RECEIVED, UInt(0), ULong(0)))
    peer.nothing_more(DISPOSITION)
    peer.settle(delivery_id)
    assert peer.expect(DISPOSITION).fields[4] == outcome(ACCEPTED)


@pytest.mark.parametrize("code", [0x34, 0x99], ids=["transactional", "unknown"])
def test_an_outcome_that_is_not_known_is_refused_and_the_lock_stays(peer, code):
    fill(peer, 1)
    handle = peer.attach_receiver("orders")
    delivery = receive_one(peer, handle)
    peer.settle(delivery.fields[1], state=outcome(code, b"transaction"))
    answer = peer.expect(DISPOSITION)
    assert error_of(answer)[0] == "amqp:not-implemented"
    node = Node(peer, "orders/$management")
    token = uuid_of(delivery.fields[2])
    tokens = {"lock-tokens": Array(UUID, (token,))}
    assert node.ask("com.microsoft:renew-lock", tokens).status == 200
    done = node.ask("com.microsoft:update-disposition", {"disposition-status": "completed", **tokens})
    assert done.status == 200


def test_a_lock_that_another_has_settled_is_lost(peer):
    fill(peer, 1)
    handle = peer.attach_receiver("orders")
    delivery = receive_one(peer, handle)
    node = Node(peer, "orders/$management")
    body = {"disposition-status": "completed", "lock-tokens": Array(UUID, (uuid_of(delivery.fields[2]),))}
    assert node.ask("com.microsoft:update-disposition", body).status == 200
    peer.settle(delivery.fields[1])
    condition, description = error_of(peer.expect(DISPOSITION))
    assert condition == LOCK_LOST
    assert "The lock supplied is invalid" in description


def test_odd_properties_to_modify_are_kept_where_they_can_be(peer):
    fill(peer, 1)
    handle = peer.attach_receiver("orders")
    delivery_id = receive_one(peer, handle).fields[1]
    odd = {Symbol("good"): 1, "text": "t", "list": [1, 2], "map": {1: 2}, 5: "odd", Symbol("x" * 200): True}
    peer.settle(delivery_id, state=outcome(MODIFIED, None, None, odd))
    assert peer.expect(DISPOSITION).fields[4].descriptor == MODIFIED
    payload = receive_one(peer, handle, 1).payload
    assert b"good" in payload
    assert b"text" in payload
    assert b"odd" not in payload


def test_properties_to_modify_without_end_are_refused(peer):
    """Each abandoning adds; what they come to has a limit."""
    fill(peer, 1)
    handle = peer.attach_receiver("orders")
    conditions = set()
    for attempt in range(3):
        delivery_id = receive_one(peer, handle).fields[1] if attempt == 0 else peer.expect(TRANSFER).fields[1]
        peer.settle(delivery_id, state=outcome(MODIFIED, None, None, {f"p{attempt}": "x" * 30_000}))
        answer = peer.expect(DISPOSITION)
        if answer.fields[4].descriptor == REJECTED:
            conditions.add(error_of(answer)[0])
            break
        peer.flow(handle, 1, delivery_count=attempt + 1)
    assert conditions == {"amqp:link:message-size-exceeded"}


def test_the_dead_letter_queue_is_received_from_and_its_messages_do_not_die_twice(peer):
    fill(peer, 1)
    handle = peer.attach_receiver("orders")
    delivery_id = receive_one(peer, handle).fields[1]
    error = Described(ULong(0x1D), [Symbol("com.microsoft:dead-letter"), "why", {"DeadLetterReason": "r" * 5000}])
    peer.settle(delivery_id, state=outcome(REJECTED, error))
    assert peer.expect(DISPOSITION).fields[4] == outcome(REJECTED)
    peer.attach_receiver("orders/$DeadLetterQueue", credit=1)
    delivery = peer.expect(TRANSFER)
    assert b"r" * 4096 in delivery.payload
    assert b"r" * 4097 not in delivery.payload
    peer.settle(delivery.fields[1], state=outcome(REJECTED))
    assert error_of(peer.expect(DISPOSITION))[0] == "amqp:not-allowed"
    node = Node(peer, "orders/$DeadLetterQueue/$management")
    body = {"disposition-status": "completed", "lock-tokens": Array(UUID, (uuid_of(delivery.fields[2]),))}
    assert node.ask("com.microsoft:update-disposition", body).status == 200


def test_the_transfer_dead_letter_queue_is_there_and_empty(peer):
    handle = peer.attach_receiver("orders/$Transfer/$DeadLetterQueue")
    peer.flow(handle, 1, drain=True)
    assert peer.expect(FLOW).fields[5:7] == [1, 0]


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_clean_detach_keeps_the_lock_and_a_broken_connection_drops_it(broker, peer):
    fill(peer, 2)
    handle = peer.attach_receiver("orders")
    first = receive_one(peer, handle)
    peer.detach(handle)
    peer.expect(DETACH)
    node = Node(peer, "orders/$management")
    tokens = {"lock-tokens": Array(UUID, (uuid_of(first.fields[2]),))}
    assert node.ask("com.microsoft:renew-lock", tokens).status == 200
    with RawPeer.connect(broker.amqp_port) as other:
        second = receive_one(other, other.attach_receiver("orders"))
        assert number_of(second) == 1
    # The connection broke: the message is free at once, and the delivery counts as failed.
    again = receive_one(peer, peer.attach_receiver("orders"))
    assert number_of(again) == 1
    assert again.payload[:3] == b"\x00\x53\x70"
    assert node.ask("com.microsoft:update-disposition", {"disposition-status": "completed", **tokens}).status == 200


@pytest.mark.parametrize("how", ["close", "end"])
def test_a_clean_end_keeps_the_lock(broker, peer, how):
    fill(peer, 1)
    with RawPeer.connect(broker.amqp_port) as other:
        delivery = receive_one(other, other.attach_receiver("orders"))
        if how == "close":
            other.close()
        else:
            other.say(END)
            other.expect(END)
            other.close()
    node = Node(peer, "orders/$management")
    tokens = {"lock-tokens": Array(UUID, (uuid_of(delivery.fields[2]),))}
    assert node.ask("com.microsoft:renew-lock", tokens).status == 200
    assert node.ask("com.microsoft:update-disposition", {"disposition-status": "completed", **tokens}).status == 200


def test_a_fault_drops_the_lock(broker, peer):
    fill(peer, 1)
    with RawPeer.connect(broker.amqp_port) as other:
        receive_one(other, other.attach_receiver("orders"))
        other.send(bytes(8))
        other.wait_closed()
    assert number_of(receive_one(peer, peer.attach_receiver("orders"))) == 0


def test_a_peer_that_vanishes_in_the_middle_of_a_message_leaves_nothing(broker, peer):
    with RawPeer.connect(broker.amqp_port) as other:
        handle = other.attach_sender("orders")
        other.transfer(message(bytes(50_000))[:30_000], handle, more=True)
        other.send(performative(0, TRANSFER, [UInt(handle)], bytes(1000))[:300])
    handle = peer.attach_receiver("orders")
    peer.flow(handle, 1, drain=True)
    peer.expect(FLOW)
    peer.nothing_more(TRANSFER, 0)


def test_a_link_can_be_detached_without_closing_and_attached_again(peer):
    handle = peer.attach_receiver("orders", name="again")
    for _ in range(3):
        peer.detach(handle, closed=False)
        assert peer.expect(DETACH).fields[1] in (False, None)
        peer.attach_receiver("orders", name="again", handle=handle)
    fill(peer, 1)
    assert number_of(receive_one(peer, handle)) == 0


def test_sender_and_receiver_may_share_a_name(peer):
    sender = peer.attach_sender("orders", name="both")
    receiver = peer.attach_receiver("orders", name="both")
    peer.transfer(message(b"0"), sender)
    assert number_of(receive_one(peer, receiver)) == 0


# --- links that are not offered ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sender", "termini"),
    [
        (False, {"source_": source(None)}),
        (True, {"target_": target(None)}),
        (False, {"source_": source("")}),
        (True, {"target_": target("")}),
    ],
    ids=["null source", "null target", "empty source", "empty target"],
)
def test_a_link_that_names_no_entity_is_refused(peer, sender, termini):
    peer.attach(sender=sender, **termini)
    condition, text = peer.refusal()
    # A client of JMS may mean a subscription to end by a source that is null.
    is_null = termini.get("source_") == source(None)
    assert condition == ("amqp:not-found" if is_null else "com.microsoft:argument-error")
    assert "names no entity" in text
    peer.attach_sender("orders")


def test_a_link_without_any_terminus_is_refused(peer):
    peer.say(ATTACH, "none", UInt(0), True)
    assert peer.refusal()[0] == "com.microsoft:argument-error"


def test_messages_on_a_refused_link_are_not_answered_and_do_not_pile_up(broker, peer):
    gateway = broker.gateway()
    handle = peer.attach(sender=True, address="nothing")
    before = gateway.memory_info().rss
    frames = []
    real, peer.send = peer.send, frames.append
    for _ in range(30_000):
        peer.transfer(b"", handle)
    peer.send = real
    peer.send(b"".join(frames))
    assert peer.refusal()[0] == "amqp:not-found"
    peer.detach(handle)
    peer.flow(None, echo=True)
    peer.expect(FLOW)
    assert gateway.memory_info().rss - before < 20 << 20


# --- peers that do not read -------------------------------------------------------------------------------------------


def test_a_peer_that_stops_reading_is_cut_off_and_its_locks_come_back(broker):
    with RawPeer.connect(broker.amqp_port) as filler:
        fill(filler, 1200, 10_000)
    with (
        RawPeer.connect(broker.amqp_port, receive_buffer_bytes=4096) as deaf,
        RawPeer.connect(broker.amqp_port) as peer,
    ):
        deaf.attach_receiver("orders", credit=0xFFFFFFFF)
        began = time.monotonic()
        eventually(lambda: metrics(broker)["peeklock_active_connections",] == 1, "the deaf one is gone")
        assert 0.3 < time.monotonic() - began < 20
        peer.attach_receiver("orders", credit=1200)
        assert sorted(number_of(peer.expect(TRANSFER)) for _ in range(1200)) == list(range(1200))
        peer.settle(0, 1199)
        peer.expect(DISPOSITION)
    purge(broker)


def test_others_are_served_while_a_peer_does_not_read(broker):
    with RawPeer.connect(broker.amqp_port) as filler:
        fill(filler, 500, 10_000)
    with (
        RawPeer.connect(broker.amqp_port, receive_buffer_bytes=4096) as deaf,
        RawPeer.connect(broker.amqp_port) as peer,
    ):
        deaf.attach_receiver("orders", credit=0xFFFFFFFF)
        sender = peer.attach_sender("invoices")
        peer.attach_receiver("invoices", credit=50)
        for number in range(50):
            peer.transfer(message(b"%d" % number), sender)
            delivery = peer.expect(TRANSFER, 1)
            assert number_of(delivery) == number
            peer.settle(delivery.fields[1])
    purge(broker)
    purge(broker, "invoices")


def test_a_peer_that_asks_much_and_reads_nothing_is_cut_off(broker):
    """Requests whose answers nobody reads are not read, either."""
    gateway = broker.gateway()
    with RawPeer.connect(broker.amqp_port) as filler:
        fill(filler, 100, 2000)
    before = gateway.memory_info().rss
    with RawPeer.connect(broker.amqp_port, receive_buffer_bytes=4096) as deaf:
        node = Node(deaf, "orders/$management", credit=0xFFFFFF)
        deaf.socket.settimeout(3)
        body = {"from-sequence-number": Long(0), "message-count": Int(100)}
        with suppress(OSError):
            for _ in range(100_000):
                node.say("com.microsoft:peek-message", body)
            raise AssertionError("it was read from to the end")
        assert gateway.memory_info().rss - before < 100 << 20
    purge(broker)


def test_a_peer_that_asks_much_on_many_links_and_reads_nothing_takes_no_more(start_broker):
    with start_broker('[[queues]]\nname = "witness"\n[[queues]]\nname = "orders"\n') as broker:
        gateway = broker.gateway()
        with RawPeer.connect(broker.amqp_port) as filler:
            fill(filler, 100, 2400)
        before = gateway.memory_info().rss
        with RawPeer.connect(broker.amqp_port, receive_buffer_bytes=4096) as deaf:
            nodes = [Node(deaf, "orders/$management", credit=0xFFFFFF) for _ in range(40)]
            deaf.socket.settimeout(3)
            body = {"from-sequence-number": Long(0), "message-count": Int(100)}
            with suppress(OSError):
                for number in range(100_000):
                    nodes[number % len(nodes)].say("com.microsoft:peek-message", body)
                raise AssertionError("it was read from to the end")
            assert gateway.memory_info().rss - before < 100 << 20  # without a limit for all links it was 1 GiB


def test_echoes_without_end_to_a_peer_that_does_not_read_are_bounded(broker):
    gateway = broker.gateway()
    before = gateway.memory_info().rss
    with RawPeer.connect(broker.amqp_port, receive_buffer_bytes=4096) as deaf:
        deaf.attach_receiver("orders")
        flow = performative(0, FLOW, [UInt(0), UInt(1), UInt(0), UInt(1), UInt(0), UInt(0), UInt(0), None, False, True])
        deaf.socket.settimeout(3)
        with suppress(OSError):
            for _ in range(1000):
                deaf.send(flow * 2000)
            raise AssertionError("it was read from to the end")
        assert gateway.memory_info().rss - before < 60 << 20


def test_a_close_that_is_never_read_frees_the_connection(broker):
    with RawPeer.connect(broker.amqp_port) as filler:
        fill(filler, 300, 10_000, "unread")
    with RawPeer.connect(broker.amqp_port, receive_buffer_bytes=4096) as deaf:
        deaf.begin(1)
        # A queue of its own: what came to its kernel before the clean end stays locked.
        deaf.attach_receiver("unread", credit=0xFFFFFFFF, channel=1)
        deaf.say(CLOSE)
        eventually(lambda: metrics(broker)["peeklock_active_connections",] == 0, "the deaf one is gone")


def test_a_session_may_begin_where_one_has_ended_while_messages_are_under_way(peer):
    fill(peer, 50)
    for _ in range(5):
        peer.begin(1)
        peer.attach_receiver("orders", credit=50, channel=1)
        for _ in range(50):
            peer.expect(TRANSFER)
        peer.say(DISPOSITION, True, UInt(0), UInt(49), True, outcome(RELEASED), channel=1)
        peer.say(END, channel=1)
        peer.expect(END)


DELIVERY_ANNOTATIONS = 0x71


def with_delivery_annotations(payload: bytes, annotations: dict, *, last: bool) -> bytes:
    section = encode(Described(ULong(DELIVERY_ANNOTATIONS), annotations))
    return payload + section if last else section + payload


def test_a_locked_message_says_its_lock_token_and_another_does_not(peer):
    fill(peer, 2)
    peer.attach_receiver("orders", 1)
    locked = peer.expect(TRANSFER)
    token = uuid_of(locked.fields[2])
    assert sections(locked.payload)[DELIVERY_ANNOTATIONS] == {"x-opt-lock-token": token}
    peer.attach_receiver("orders", 1, settled=True)
    assert DELIVERY_ANNOTATIONS not in sections(peer.expect(TRANSFER).payload)


@pytest.mark.parametrize("last", [False, True], ids=["first", "behind the body"])  # where pyamqp writes them
def test_the_senders_delivery_annotations_arrive_wherever_the_message_goes(peer, last):
    handle = peer.attach_sender("orders")
    annotations = {Symbol("mine"): [1, {"a": None}], Symbol("x-opt-lock-token"): UUID(int=7)}
    own = message(b"body", annotations={Symbol("kept"): 1}, properties=["id"], header=[True])
    peer.transfer(with_delivery_annotations(own, annotations, last=last), handle)
    peer.transfer(with_delivery_annotations(message(b"alone"), {Symbol("x"): "y"}, last=last), handle)
    node = Node(peer, "orders/$management")
    browsed = node.ask("com.microsoft:peek-message", {"from-sequence-number": Long(0), "message-count": Int(1)}).body[
        "messages"
    ][0]["message"]
    assert sections(browsed)[DELIVERY_ANNOTATIONS] == {"mine": [1, {"a": None}]}
    receiver = peer.attach_receiver("orders", 1)
    for _ in range(2):
        locked = peer.expect(TRANSFER)
        found = sections(locked.payload)
        token = uuid_of(locked.fields[2])
        assert found[DELIVERY_ANNOTATIONS] == {"x-opt-lock-token": token, "mine": [1, {"a": None}]}
        assert found[0x72]["kept"] == 1
        assert [key for key in found[0x72] if key not in ("kept", "x-opt-lock-token")] == [
            "x-opt-sequence-number",
            "x-opt-enqueued-time",
            "x-opt-locked-until",
        ]
        assert (found[0x73][0], found[0x75]) == ("id", b"body")
        peer.settle(locked.fields[1], state=outcome(MODIFIED, True, False, {Symbol("tried"): "yes"}))
        peer.expect(DISPOSITION)
        peer.flow(receiver, 1, delivery_count=1)
    assert found[0x74] == {"tried": "yes"}
    receiver = peer.attach_receiver("orders", 5, settled=True)
    peer.say(DETACH, UInt(receiver - 1), True)
    plain = [sections(peer.expect(TRANSFER).payload) for _ in range(2)]
    assert [each[DELIVERY_ANNOTATIONS] for each in plain] == [{"mine": [1, {"a": None}]}, {"x": "y"}]


@pytest.mark.parametrize("wrong", [{1: 2}, {True: 1}], ids=["number", "boolean"])
def test_delivery_annotations_that_a_receiver_could_not_read_are_refused(peer, wrong):
    handle = peer.attach_sender("orders")
    peer.transfer(with_delivery_annotations(message(b"body"), wrong, last=False), handle)
    assert error_of(peer.expect(DISPOSITION))[0] == "amqp:decode-error"
