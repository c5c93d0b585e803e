"""All frames of transactions may come at once: what a link gathers is a part of them before they end."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.brokers import Broker
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    DETACH,
    DISPOSITION,
    END,
    TRANSFER,
    RawPeer,
    message,
    outcome,
)
from tests.end_to_end.raw_transactions import DISCHARGE, Coordinator, answer_of, within

CONFIG = """
partitions = 2

[[queues]]
name = "orders"

[[queues]]
name = "sessions"
requires_session = true
"""
UNKNOWN = b"0123456789abcdef"
ROLLED_BACK, UNKNOWN_ID = "amqp:transaction:rollback", "amqp:transaction:unknown-id"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("one-write"), CONFIG) as broker:
        yield broker


@pytest.fixture
def peer(broker: Broker) -> Iterator[RawPeer]:
    with RawPeer.connect(broker.amqp_port) as peer:
        yield peer
    received(broker)


@contextmanager
def one_write(peer: RawPeer) -> Iterator[None]:
    said: list[bytes] = []
    send = peer.send
    peer.send = said.append  # type: ignore[assignment]
    try:
        yield
    finally:
        peer.send = send
        send(b"".join(said))


def received(broker: Broker, after: RawPeer | None = None) -> list[bytes]:
    """The bodies in the queue, which is empty then; with those that a peer has locked, whose connection breaks."""
    if after is not None:
        after.__exit__(None, None, None)
    found = []
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach_receiver("orders", credit=200)
        while True:
            try:
                frame = peer.expect(TRANSFER, 0.3)
            except TimeoutError:
                return found
            peer.settle(frame.fields[1], settled=True)
            found.append(bytes(frame.payload[frame.payload.rindex(b"m") :]))
            peer.wait_until_read()


def body(number: int) -> bytes:
    return b"m%d" % number


def locked(peer: RawPeer, count: int) -> list[int]:
    """Ids of deliveries on a new link that hold this many messages."""
    sender = peer.attach_sender("orders")
    for number in range(count):
        peer.transfer(message(body(number)), sender)
        assert answer_of(peer.expect(DISPOSITION)) == "accepted"
    peer.attach_receiver("orders", credit=count)
    return [peer.expect(TRANSFER).fields[1] for _ in range(count)]


def answers(peer: RawPeer, count: int) -> Counter[str]:
    """How often each answer came; a disposition may answer several deliveries."""
    found: Counter[str] = Counter()
    while found.total() < count:
        frame = peer.expect(DISPOSITION)
        _, first, last = frame.fields[:3]
        found[answer_of(frame)] += 1 + (first if last is None else last) - first
    return found


def test_what_comes_with_the_discharge_is_committed(broker, peer):
    coordinator, ids = Coordinator(peer), locked(peer, 4)
    sender = peer.attach_sender("orders")
    transaction = coordinator.declare()
    with one_write(peer):
        for number in range(10, 15):
            peer.transfer(message(body(number)), sender, state=within(transaction))
        for id_ in ids:
            peer.settle(id_, state=within(transaction, outcome(ACCEPTED)))
        coordinator.say(DISCHARGE, transaction, False)
    assert answers(peer, 10) == {"in the transaction": 9, "accepted": 1}
    assert received(broker, peer) == [body(number) for number in range(10, 15)]


def test_what_came_before_its_link_ended_is_committed(broker, peer):
    coordinator, ids = Coordinator(peer), locked(peer, 2)
    sender, receiver = peer.attach_sender("orders"), peer.next_handle - 2
    transaction = coordinator.declare()
    with one_write(peer):
        peer.transfer(message(body(10)), sender, state=within(transaction))
        peer.settle(ids[0], state=within(transaction, outcome(ACCEPTED)))
        peer.settle(ids[1], state=within(transaction, outcome(ACCEPTED)), settled=True)
        peer.detach(sender)
        peer.detach(receiver)
    peer.expect(DETACH)
    peer.expect(DETACH)
    peer.drop(DISPOSITION)
    assert coordinator.discharge(transaction) == "accepted"
    assert received(broker, peer) == [body(10)]


def test_transactions_on_one_link_are_kept_apart(broker, peer):
    coordinator, ids = Coordinator(peer), locked(peer, 4)
    sender = peer.attach_sender("orders")
    one, other = coordinator.declare(), coordinator.declare()
    with one_write(peer):
        for number, state in enumerate([within(one), within(other), None, within(one), None, within(other)], 10):
            peer.transfer(message(body(number)), sender, state=state)
        for id_, transaction in zip(ids, (one, other, other, one), strict=True):
            peer.settle(id_, state=within(transaction, outcome(ACCEPTED)))
        coordinator.say(DISCHARGE, one, False)
        coordinator.say(DISCHARGE, other, True)
    assert answers(peer, 12) == {"in the transaction": 8, "accepted": 4}
    assert sorted(received(broker, peer)) == sorted(body(number) for number in (1, 2, 10, 12, 13, 14))


def test_what_names_an_unknown_transaction_is_refused_and_nothing_else(broker, peer):
    coordinator, ids = Coordinator(peer), locked(peer, 3)
    sender = peer.attach_sender("orders")
    transaction = coordinator.declare()
    with one_write(peer):
        for number, state in enumerate([within(UNKNOWN), within(transaction), within(UNKNOWN)], 10):
            peer.transfer(message(body(number)), sender, state=state)
        peer.transfer(message(body(13)), sender, state=within(UNKNOWN), settled=True)
        peer.settle(ids[0], state=within(UNKNOWN, outcome(ACCEPTED)))
        peer.settle(ids[1], state=within(UNKNOWN, outcome(ACCEPTED)), settled=True)
        peer.settle(ids[2], state=within(transaction, outcome(ACCEPTED)))
        coordinator.say(DISCHARGE, transaction, False)
    assert answers(peer, 6) == {UNKNOWN_ID: 3, "in the transaction": 2, "accepted": 1}
    assert sorted(received(broker, peer)) == [body(0), body(1), body(11)]


def test_a_message_that_is_refused_without_an_answer_fails_the_transaction(broker, peer):
    coordinator, sender = Coordinator(peer), peer.attach_sender("orders")
    transaction = coordinator.declare()
    with one_write(peer):
        for number in range(101):
            peer.transfer(message(body(number)), sender, state=within(transaction), settled=True)
        coordinator.say(DISCHARGE, transaction, False)
    assert answers(peer, 1) == {ROLLED_BACK: 1}


def test_all_that_one_transaction_can_hold_is_taken_and_the_rest_refused(broker, peer):
    coordinator, sender = Coordinator(peer), peer.attach_sender("orders")
    transaction = coordinator.declare()
    with one_write(peer):
        for number in range(103):
            peer.transfer(message(body(number)), sender, state=within(transaction))
    found = answers(peer, 103)
    assert found["in the transaction"] == 100
    assert found["amqp:resource-limit-exceeded"] == 3
    assert coordinator.discharge(transaction) == ROLLED_BACK


def test_what_came_before_the_coordinator_ended_is_rolled_back(broker, peer):
    coordinator, ids = Coordinator(peer), locked(peer, 1)
    sender = peer.attach_sender("orders")
    transaction = coordinator.declare()
    with one_write(peer):
        peer.transfer(message(body(10)), sender, state=within(transaction))
        peer.settle(ids[0], state=within(transaction, outcome(ACCEPTED)))
        peer.detach(coordinator.handle)
    peer.expect(DETACH)
    assert received(broker, peer) == [body(0)]


def test_what_came_before_the_session_ended_is_rolled_back(broker, peer):
    coordinator, sender = Coordinator(peer), peer.attach_sender("orders")
    transaction = coordinator.declare()
    with one_write(peer):
        peer.transfer(message(body(10)), sender, state=within(transaction))
        peer.transfer(message(body(11)), sender)
        peer.say(END)
    peer.expect(END)
    assert received(broker, peer) == [body(11)]


def test_a_message_without_a_session_is_refused_in_a_transaction(broker, peer):
    coordinator, sender = Coordinator(peer), peer.attach_sender("sessions")
    transaction = coordinator.declare()
    with one_write(peer):
        for number in range(3):
            session = [None] * 10 + ["a"] if number != 1 else []
            peer.transfer(message(body(number), properties=session), sender, state=within(transaction))
    assert answers(peer, 3) == {"in the transaction": 2, "amqp:not-allowed": 1}
    assert coordinator.discharge(transaction, fail=True) == "accepted"
