"""Receivers of sessions as their frames have it, on a real broker."""

import time

import pytest

from protocol.codec import Described, Int, Long, Symbol, UInt, decode
from tests.brokers import Broker
from tests.end_to_end.health import metrics
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    DETACH,
    DISPOSITION,
    END,
    FLOW,
    MODIFIED,
    REJECTED,
    TRANSFER,
    RawPeer,
    body_of,
    error_of,
    message,
    outcome,
    source,
)
from tests.end_to_end.raw_requests import Node
from tests.patience import PATIENCE_S, eventually
from tests.sessions.conftest import CONFIG
from tests.sessions.raw_sessions import (
    FILTER,
    GO,
    accept,
    annotations_of,
    ask,
    described,
    in_session,
    receive,
    send,
    session_of,
)

TICKS_OF_1970 = 621_355_968_000_000_000
CANNOT_BE_LOCKED = "com.microsoft:session-cannot-be-locked"
LOCK_LOST = "com.microsoft:session-lock-lost"
LOCKED_UNTIL = Symbol("com.microsoft:locked-until-utc")


# -- attach


def test_the_answer_says_which_session_and_until_when(peer):
    send(peer, "orders", ("a", b"1"))
    before_ms = int(time.time() * 1000)
    _, attached = accept(peer, "orders", "a")
    assert session_of(attached) == "a"
    assert type(session_of(attached)) is str
    assert attached.fields[5].value[0] == "orders"
    until = attached.fields[13][LOCKED_UNTIL]
    assert type(until) is Long
    assert before_ms + 30_000 <= (until - TICKS_OF_1970) // 10_000 <= time.time() * 1000 + 30_000


def test_a_described_filter_is_answered_described_alike(peer):
    send(peer, "orders", ("a", b"1"), ("b", b"2"))
    _, attached = accept(peer, "orders", described("b"))
    assert session_of(attached) == Described(GO, "b")
    _, attached = accept(peer, "orders", described(None))
    assert session_of(attached) == Described(GO, "a")


def test_any_session_is_the_next_available(peer):
    send(peer, "orders", ("b", b"1"), ("a", b"2"))
    names = [session_of(accept(peer, "orders")[1]) for _ in range(2)]
    assert names == ["b", "a"]


def test_the_empty_id_is_a_session_and_not_any(peer):
    send(peer, "orders", ("a", b"1"))
    _, attached = accept(peer, "orders", "")
    assert session_of(attached) == ""


def test_a_session_that_is_locked_is_refused_with_its_name(peer, broker):
    accept(peer, "orders", "a")
    with RawPeer.connect(broker.amqp_port) as other:
        ask(other, "orders", "a")
        condition, text = other.refusal()
    assert condition == CANNOT_BE_LOCKED
    assert text.startswith("The requested session 'a' cannot be accepted. It may be locked by another receiver.")
    ask(peer, "orders", "a")
    assert peer.refusal()[0] == CANNOT_BE_LOCKED  # nor by the same connection


def test_the_attach_is_answered_when_there_is_a_session(peer, broker):
    handle = ask(peer, "orders")
    peer.flow(handle, 5)  # clients do not wait
    peer.nothing_more(ATTACH)
    with RawPeer.connect(broker.amqp_port) as sender:
        send(sender, "orders", ("late", b"1"))
    assert session_of(peer.expect(ATTACH)) == "late"
    assert body_of(peer.expect(TRANSFER).payload) == b"1"


def test_a_wait_that_was_in_vain_is_refused_with_a_time_out(peer):
    began = time.monotonic()
    ask(peer, "orders", wait_ms=300)
    condition, text = peer.refusal()
    assert 0.3 <= time.monotonic() - began < 20
    assert condition == "com.microsoft:timeout"
    assert "within the allotted timeout of 00:00:00.3000000." in text


def test_a_waiting_receiver_can_detach_and_the_session_goes_to_the_next(peer, broker):
    first = ask(peer, "orders")
    ask(peer, "orders")
    peer.detach(first)
    attached, detached = peer.expect(ATTACH), peer.expect(DETACH)
    assert (attached.fields[5], detached.fields[:2]) == (None, [first, True])
    with RawPeer.connect(broker.amqp_port) as sender:
        send(sender, "orders", ("a", b"1"))
    attached = peer.expect(ATTACH)
    assert (attached.fields[0], session_of(attached)) == ("link-1", "a")


@pytest.mark.parametrize("end", ["session", "close", "break"])
def test_a_receiver_that_has_left_does_not_wait_any_more(peer, broker, end):
    with RawPeer.connect(broker.amqp_port) as other:
        ask(other, "orders")
        other.nothing_more(ATTACH, 0.1)
        if end == "session":
            other.say(END)
            other.expect(END)
        elif end == "close":
            other.close()
    eventually(lambda: metrics(broker)["peeklock_active_connections",] == 1, "it has left")
    send(peer, "orders", ("a", b"1"))
    assert session_of(accept(peer, "orders", wait_ms=2000)[1]) == "a"


@pytest.mark.parametrize("address", ["orders", "news/Subscriptions/all"])
def test_without_a_session_there_is_no_receiver(peer, address):
    peer.attach(sender=False, address=address)
    condition, text = peer.refusal()
    assert condition == "amqp:not-allowed"
    assert "requires sessions to create a non-sessionful message receiver" in text


@pytest.mark.parametrize("address", ["plain", "orders/$DeadLetterQueue"])
@pytest.mark.parametrize("value", ["a", None])
def test_where_there_are_no_sessions_nobody_receives_one(peer, address, value):
    ask(peer, address, value)
    condition, text = peer.refusal()
    assert condition == "amqp:not-allowed"
    assert "does not require sessions" in text


@pytest.mark.parametrize(
    ("value", "condition"),
    [(Int(1), "com.microsoft:argument-error"), ("x" * 129, "com.microsoft:argument-error")],
)
def test_a_filter_that_makes_no_sense_is_refused(peer, value, condition):
    ask(peer, "orders", value)
    assert peer.refusal()[0] == condition


def test_one_connection_receives_many_sessions(peer):
    sessions = [f"s{at:02}" for at in range(40)]
    send(peer, "orders", *[(session, b"%s-%d" % (session.encode(), at)) for at in range(2) for session in sessions])
    names = {}  # by the broker's handle
    handles = []
    for _ in sessions:
        handle, attached = accept(peer, "orders")
        handles.append(handle)
        names[attached.fields[1]] = session_of(attached)
    assert sorted(names.values()) == sessions
    for handle in handles:
        peer.flow(handle, 5)
    got = {}
    for _ in range(80):
        frame = peer.expect(TRANSFER)
        got.setdefault(names[frame.fields[0]], []).append(body_of(frame.payload))
    assert got == {session: [b"%s-%d" % (session.encode(), at) for at in range(2)] for session in sessions}


# -- messages


def test_messages_of_the_session_come_in_order_and_no_others(peer):
    send(peer, "orders", ("a", b"1"), ("b", b"2"), ("a", b"3"))
    handle, attached = accept(peer, "orders", "a")
    got = receive(peer, handle, 2)
    assert [body for _, body in got] == [b"1", b"3"]
    until = annotations_of(got[0][0].payload)[Symbol("x-opt-locked-until")]
    assert TICKS_OF_1970 + until * 10_000 == attached.fields[13][LOCKED_UNTIL]
    peer.nothing_more(TRANSFER)


def test_an_abandoned_message_comes_again_before_later_ones(peer):
    send(peer, "orders", ("a", b"1"), ("a", b"2"), ("a", b"3"))
    handle, _ = accept(peer, "orders", "a")
    [(first, _), (second, _)] = receive(peer, handle, 2)
    peer.settle(second.fields[1], state=outcome(MODIFIED, True, False))
    peer.settle(first.fields[1], state=outcome(MODIFIED, True, False))
    peer.expect(DISPOSITION)
    peer.expect(DISPOSITION)
    peer.flow(handle, 3, delivery_count=2)
    assert [body_of(peer.expect(TRANSFER).payload) for _ in range(3)] == [b"1", b"2", b"3"]


def test_a_drain_is_answered_in_a_session(peer):
    send(peer, "orders", ("a", b"1"))
    handle, attached = accept(peer, "orders", "a")
    peer.flow(handle, 3, drain=True)
    assert body_of(peer.expect(TRANSFER).payload) == b"1"
    flow = peer.expect(FLOW)
    assert (flow.fields[4], flow.fields[5], flow.fields[6]) == (attached.fields[1], 3, 0)


def test_a_message_without_session_id_is_rejected_and_the_next_is_stored(peer):
    handle = peer.attach_sender("orders")
    peer.transfer(message(b"none"), handle)
    condition, text = error_of(peer.expect(DISPOSITION))
    assert condition == "amqp:not-allowed"
    assert "'orders' requires sessions" in text
    peer.transfer(in_session("a", b"some"), handle)
    assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED


def test_a_session_id_that_is_too_long_is_rejected(peer):
    handle = peer.attach_sender("orders")
    peer.transfer(in_session("x" * 129, b""), handle)
    condition, text = error_of(peer.expect(DISPOSITION))
    assert condition == "com.microsoft:argument-error"
    assert "session id exceeds the limit of 128 characters" in text


def test_dead_letters_of_a_session_are_read_without_one(peer):
    send(peer, "orders", ("a", b"1"))
    handle, _ = accept(peer, "orders", "a")
    [(frame, _)] = receive(peer, handle)
    peer.settle(frame.fields[1], state=outcome(REJECTED))
    assert peer.expect(DISPOSITION).fields[4].descriptor == REJECTED
    peer.attach_receiver("orders/$DeadLetterQueue", credit=1)
    assert body_of(peer.expect(TRANSFER).payload) == b"1"


def test_forwarded_without_session_id_a_message_is_dead_lettered(peer):
    handle = peer.attach_sender("forwards")
    for session_id, body in ((None, b"none"), ("a", b"some")):
        peer.transfer(in_session(session_id, body), handle)
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    receiver, _ = accept(peer, "orders", "a")
    assert [body for _, body in receive(peer, receiver)] == [b"some"]
    peer.attach_receiver("forwards/$DeadLetterQueue", credit=1)
    dead = peer.expect(TRANSFER)
    assert body_of(dead.payload) == b"none"
    assert b"Session ID is null." in dead.payload
    assert b"The SessionId was not set on a message, and it cannot be sent to the entity." in dead.payload


def test_a_subscription_has_sessions(peer):
    send(peer, "news", ("a", b"1"), ("b", b"2"))
    handle, attached = accept(peer, "news/Subscriptions/all")
    assert session_of(attached) == "a"
    [(frame, body)] = receive(peer, handle)
    assert body == b"1"
    peer.settle(frame.fields[1])
    assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    peer.detach(handle)
    peer.expect(DETACH)
    handle, attached = accept(peer, "news/Subscriptions/all")
    assert session_of(attached) == "b"
    peer.settle(receive(peer, handle)[0][0].fields[1])
    peer.expect(DISPOSITION)


# -- the end of a lock


def test_closing_the_link_gives_the_session_back_at_once_and_unharmed(peer):
    send(peer, "orders", ("a", b"1"))
    handle, _ = accept(peer, "orders", "a")
    receive(peer, handle)
    peer.detach(handle)
    handle, _ = accept(peer, "orders", "a")
    [(again, _)] = receive(peer, handle)
    assert decode(again.payload)[0].value[4] == 0  # the header's delivery-count


def test_a_broken_connection_gives_the_session_back_and_counts(peer, broker):
    send(peer, "orders", ("a", b"1"))
    with RawPeer.connect(broker.amqp_port) as other:
        handle, _ = accept(other, "orders", "a")
        receive(other, handle)
    handle, attached = accept(peer, "orders", wait_ms=5000)
    assert session_of(attached) == "a"
    [(again, _)] = receive(peer, handle)
    assert decode(again.payload)[0].value[4] == 1


@pytest.mark.parametrize("settled", [True, False], ids=["receive and delete", "peek-lock"])
def test_who_waits_and_holds_nothing_hears_of_the_end_of_the_lock_later(peer, broker, settled):
    """An SDK that waits for as long as the lock lasts began to wait later, and its wait must end first."""
    send(peer, "short", ("a", b"1"))
    handle, attached = accept(peer, "short", "a", settled=settled)
    began = time.monotonic()
    [(frame, _)] = receive(peer, handle)
    if not settled:
        peer.settle(frame.fields[1])
        peer.expect(DISPOSITION)
    peer.flow(handle, 5, delivery_count=1)
    peer.nothing_more(DETACH, 7)
    with RawPeer.connect(broker.amqp_port) as other:  # the lock has ended all the same
        accept(other, "short", "a")
    peer.flow(handle, 5, delivery_count=1, drain=True)
    drained = peer.expect(FLOW).fields
    assert drained[4:7] == [attached.fields[1], 6, 0]
    assert drained[8] is True
    peer.flow(handle, 1, delivery_count=6)
    condition, _ = error_of(peer.expect(DETACH))
    assert condition == LOCK_LOST
    assert 9 < time.monotonic() - began < 15


def test_a_lock_that_runs_out_detaches_the_link(peer):
    send(peer, "short", ("a", b"1"))
    handle, attached = accept(peer, "short", "a")
    [(frame, _)] = receive(peer, handle)
    detached = peer.expect(DETACH, 30)  # the lock lasts a few seconds
    assert detached.fields[:2] == [attached.fields[1], True]
    condition, text = error_of(detached)
    assert condition == LOCK_LOST
    assert text.startswith("The session lock has expired on the MessageSession.")
    peer.settle(frame.fields[1])  # said before it knew
    peer.detach(handle)
    handle, _ = accept(peer, "short", wait_ms=1000)
    [(again, _)] = receive(peer, handle)
    assert decode(again.payload)[0].value[4] == 1


def test_a_worker_that_dies_takes_the_locks_of_sessions_with_it(tmp_path):
    with (
        Broker(tmp_path, f"worker_restart_wait_ms = 10000\n{CONFIG}", workers=1) as broker,
        RawPeer.connect(broker.amqp_port) as peer,
        RawPeer.connect(broker.amqp_port) as other,
    ):
        send(peer, "orders", ("a", b"1"))
        handle, _ = accept(peer, "orders", "a")
        receive(peer, handle)
        waiting = ask(other, "orders")
        other.nothing_more(ATTACH, 0.1)
        broker.worker().kill()
        assert error_of(peer.expect(DETACH))[0] == LOCK_LOST
        attached = other.expect(ATTACH, PATIENCE_S)  # who waited gets it from the next worker
        assert session_of(attached) == "a"
        assert [body for _, body in receive(other, waiting)] == [b"1"]


def test_a_deferred_message_can_be_asked_for_in_the_same_breath(peer):
    send(peer, "orders", ("a", b"1"))
    handle, _ = accept(peer, "orders", "a")
    node = Node(peer, "orders/$management")
    [(frame, _)] = receive(peer, handle)
    number = annotations_of(frame.payload)[Symbol("x-opt-sequence-number")]
    pieces = []
    peer.send = pieces.append
    peer.settle(frame.fields[1], state=outcome(MODIFIED, True, True), settled=True)
    body = {"sequence-numbers": [Long(number)], "receiver-settle-mode": UInt(1), "session-id": "a"}
    node.say("com.microsoft:receive-by-sequence-number", body)
    del peer.send
    peer.send(b"".join(pieces))
    assert node.response().status == 200


def test_the_filter_key_is_what_counts(peer):
    """A source may carry other filters beside it, which are echoed."""
    other = Symbol("apache.org:selector-filter:string")
    peer.attach(sender=False, source_=source("orders", filters={FILTER: "a", other: "x = 1"}))
    attached = peer.expect(ATTACH)
    assert attached.fields[5].value[7] == {FILTER: "a", other: "x = 1"}
