"""Requests to the management node of an entity with sessions, on a real broker (amqp.md 8.4)."""

import time
from uuid import UUID

import pytest

from protocol.codec import Array, Int, Long, Symbol, Timestamp, UInt
from protocol.lock_tokens import uuid_of
from tests.end_to_end.raw_peer import DETACH, DISPOSITION, MODIFIED, TRANSFER, RawPeer, body_of, outcome
from tests.end_to_end.raw_requests import Node
from tests.sessions.raw_sessions import accept, annotations_of, in_session, receive, send

EVER = Timestamp(253_402_300_800_000)
LOCK_LOST = "com.microsoft:session-lock-lost"


@pytest.fixture
def node(peer):
    return Node(peer, "orders/$management")


def ask(node, operation, **arguments):
    return node.ask(f"com.microsoft:{operation}", {name.replace("_", "-"): value for name, value in arguments.items()})


def set_state(node, session, state):
    assert ask(node, "set-session-state", session_id=session, session_state=state).status == 200


def sessions(node, after=EVER, skip=0, top=100):
    return ask(node, "get-message-sessions", last_updated_time=after, skip=Int(skip), top=Int(top))


# -- the lock


def test_the_lock_of_a_session_is_renewed(peer, node):
    _, attached = accept(peer, "orders", "a")
    first = (attached.fields[13][Symbol("com.microsoft:locked-until-utc")] - 621_355_968_000_000_000) // 10_000
    time.sleep(0.01)  # so that it ends later
    response = ask(node, "renew-session-lock", session_id="a")
    assert response.status == 200
    assert type(response.body["expiration"]) is Timestamp
    assert first < response.body["expiration"] <= time.time() * 1000 + 30_000


def test_a_renewed_lock_outlasts_its_first_end(peer):
    node = Node(peer, "short/$management")
    send(peer, "short", ("a", b"1"))
    handle, _ = accept(peer, "short", "a")
    [(frame, _)] = receive(peer, handle)
    for _ in range(2):
        time.sleep(3)
        assert ask(node, "renew-session-lock", session_id="a").status == 200
    peer.settle(frame.fields[1])
    assert peer.expect(DISPOSITION).fields[4].descriptor == 0x24


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("renew-session-lock", {}),
        ("get-session-state", {}),
        ("set-session-state", {"session_state": None}),
        (
            "receive-by-sequence-number",
            {"sequence_numbers": [Long(1)], "receiver_settle_mode": UInt(1), "peeklock:active": True},
        ),
    ],
)
def test_only_the_connection_that_has_the_lock_may_ask(peer, node, broker, operation, arguments):
    with RawPeer.connect(broker.amqp_port) as other:
        handle, _ = accept(other, "orders", "a")
        response = ask(node, operation, session_id="a", **arguments)
        assert (response.status, response.condition) == (410, LOCK_LOST)
        mine = Node(other, "orders/$management")
        assert ask(mine, operation, session_id="a", **arguments).status in (200, 404)
        other.detach(handle)
        other.expect(DETACH)
        response = ask(mine, operation, session_id="a", **arguments)
        assert (response.status, response.condition) == (410, LOCK_LOST)


@pytest.mark.parametrize("operation", ["renew-session-lock", "get-session-state", "get-message-sessions"])
def test_an_entity_without_sessions_offers_nothing_of_the_kind(peer, operation):
    node = Node(peer, "plain/$management")
    response = ask(node, operation, session_id="a", skip=Int(0), top=Int(1))
    assert (response.status, response.condition) == (400, "amqp:not-allowed")


def test_a_message_of_a_session_has_no_lock_to_be_renewed(peer, node):
    send(peer, "orders", ("a", b"1"))
    handle, _ = accept(peer, "orders", "a")
    [(frame, _)] = receive(peer, handle)
    response = ask(node, "renew-lock", lock_tokens=Array(UUID, (uuid_of(bytes(frame.fields[2])),)))
    assert (response.status, response.condition) == (400, "amqp:not-allowed")


# -- states


def test_a_state_is_set_read_and_cleared(peer, node):
    accept(peer, "orders", "a")
    assert ask(node, "get-session-state", session_id="a").body == {"session-state": None}
    for state in (b"half", bytes(range(256)) * 100):
        set_state(node, "a", state)
        assert ask(node, "get-session-state", session_id="a").body == {"session-state": state}
    for nothing in (None, b""):
        set_state(node, "a", b"half")
        set_state(node, "a", nothing)
        assert ask(node, "get-session-state", session_id="a").body == {"session-state": None}


def test_a_state_is_there_for_the_next_connection(peer, node, broker):
    with RawPeer.connect(broker.amqp_port) as other:
        accept(other, "orders", "kept")
        set_state(Node(other, "orders/$management"), "kept", b"half")
        other.close()
    accept(peer, "orders", "kept")
    assert ask(node, "get-session-state", session_id="kept").body == {"session-state": b"half"}
    set_state(node, "kept", None)


def test_a_state_larger_than_a_message_may_be_is_refused(peer):
    node = Node(peer, "small/$management")
    accept(peer, "small", "a")
    set_state(node, "a", b"x" * 1024)
    response = ask(node, "set-session-state", session_id="a", session_state=b"x" * 1025)
    assert (response.status, response.condition) == (403, "amqp:link:message-size-exceeded")
    assert "'a' has 1025 bytes; the limit is 1024 bytes" in response.description
    assert ask(node, "get-session-state", session_id="a").body == {"session-state": b"x" * 1024}
    set_state(node, "a", None)


# -- which sessions there are


def test_sessions_are_listed_in_an_array(peer, node):
    send(peer, "orders", ("b", b"1"), ("a", b"2"), ("a", b"3"))
    accept(peer, "orders", "kept")
    set_state(node, "kept", b"x")
    response = sessions(node)
    assert response.status == 200
    assert type(response.body["skip"]) is Int
    assert isinstance(response.body["sessions-ids"], Array)
    assert list(response.body["sessions-ids"]) == ["a", "b", "kept"]
    assert list(sessions(node, skip=1, top=1).body["sessions-ids"]) == ["b"]
    assert sessions(node, skip=3).status == 204
    assert list(sessions(node, after=Timestamp(0)).body["sessions-ids"]) == ["kept"]
    set_state(node, "kept", None)


def test_no_sessions_are_no_content(node):
    response = sessions(node)
    assert (response.status, response.body, response.condition) == (204, {}, "com.microsoft:session-not-found")


# -- messages


def test_a_session_is_browsed_without_its_lock(peer, node):
    send(peer, "orders", ("a", b"1"), ("b", b"2"), ("a", b"3"))

    def peek(**more):
        response = ask(node, "peek-message", from_sequence_number=Long(0), message_count=Int(10), **more)
        return [body_of(each["message"]) for each in response.body.get("messages", [])]

    assert peek(session_id="a") == [b"1", b"3"]
    assert peek(session_id="c") == []
    assert peek(session_id=None) == peek() == [b"1", b"2", b"3"]


def defer(peer, handle):
    [(frame, _)] = receive(peer, handle)
    peer.settle(frame.fields[1], state=outcome(MODIFIED, True, True))
    peer.expect(DISPOSITION)
    return annotations_of(frame.payload)[Symbol("x-opt-sequence-number")]


def test_a_deferred_message_is_received_with_its_session(peer, node):
    send(peer, "orders", ("a", b"1"))
    handle, _ = accept(peer, "orders", "a")
    number = defer(peer, handle)
    arguments = {"sequence_numbers": Array(Long, (number,)), "receiver_settle_mode": UInt(1)}
    assert ask(node, "receive-by-sequence-number", **arguments).condition == "amqp:not-allowed"
    response = ask(node, "receive-by-sequence-number", session_id="a", **arguments)
    [found] = response.body["messages"]
    assert body_of(found["message"]) == b"1"
    again = ask(node, "receive-by-sequence-number", session_id="a", **arguments)
    assert (again.status, again.condition) == (404, "com.microsoft:message-not-found")
    settled = ask(
        node,
        "update-disposition",
        disposition_status="completed",
        lock_tokens=Array(UUID, (found["lock-token"],)),
        session_id="a",
    )
    assert settled.status == 200


def test_a_request_of_a_receiver_is_about_its_session(peer, node):
    """Go says which link asks, and not the session."""
    send(peer, "orders", ("a", b"1"), ("b", b"2"), ("a", b"3"))
    accept(peer, "orders", "b", name="receiver of b")
    handle, _ = accept(peer, "orders", "a", name="receiver of a")
    number = defer(peer, handle)

    def of(receiver, operation, **body):
        wanted = {name.replace("_", "-"): value for name, value in body.items()}
        return node.ask(f"com.microsoft:{operation}", wanted, associated_link_name=receiver)

    def peek(receiver, **body):
        response = of(receiver, "peek-message", from_sequence_number=Long(0), message_count=Int(10), **body)
        return [body_of(each["message"]) for each in response.body["messages"]]

    def receive_deferred(receiver):
        numbers = Array(Long, (number,))
        return of(receiver, "receive-by-sequence-number", sequence_numbers=numbers, receiver_settle_mode=UInt(1))

    assert peek("receiver of a") == [b"1", b"3"]
    assert peek("receiver of a", session_id="b") == [b"2"]
    assert peek("another link") == [b"1", b"2", b"3"]
    assert receive_deferred("receiver of b").status == 404
    assert receive_deferred("another link").condition == "amqp:not-allowed"
    [found] = receive_deferred("receiver of a").body["messages"]
    assert body_of(found["message"]) == b"1"
    tokens = Array(UUID, (found["lock-token"],))
    response = of("receiver of a", "update-disposition", disposition_status="completed", lock_tokens=tokens)
    assert response.status == 200
    assert peek("receiver of a") == [b"3"]


def test_an_active_message_of_a_session_is_received_by_its_number_with_the_lock_of_the_session(peer, node):
    send(peer, "orders", ("a", b"1"), ("a", b"2"), ("a", b"3"))
    shown = ask(node, "peek-message", from_sequence_number=Long(0), message_count=Int(10)).body["messages"]
    numbers = [annotations_of(each["message"])[Symbol("x-opt-sequence-number")] for each in shown]

    def receive_by_number(number, **body):
        body |= {"sequence_numbers": Array(Long, (Long(number),)), "receiver_settle_mode": UInt(1), "session_id": "a"}
        return ask(node, "receive-by-sequence-number", **body)

    assert receive_by_number(numbers[1], **{"peeklock:active": True}).condition == LOCK_LOST
    handle, _ = accept(peer, "orders", "a")
    assert receive_by_number(numbers[1]).status == 404
    [found] = receive_by_number(numbers[1], **{"peeklock:active": True}).body["messages"]
    assert body_of(found["message"]) == b"2"
    assert annotations_of(found["message"])[Symbol("x-opt-message-state")] == 0
    peer.flow(handle, 3)
    assert [body_of(peer.expect(TRANSFER).payload) for _ in range(2)] == [b"1", b"3"]
    tokens = Array(UUID, (found["lock-token"],))
    response = ask(node, "update-disposition", disposition_status="abandoned", lock_tokens=tokens, session_id="a")
    assert response.status == 200
    assert body_of(peer.expect(TRANSFER).payload) == b"2"


def test_settling_by_token_tells_a_lost_session_from_a_message_that_is_gone(peer, node):
    send(peer, "orders", ("a", b"1"), ("a", b"2"))
    handle, _ = accept(peer, "orders", "a")
    got = receive(peer, handle, 2)

    def complete(frame):
        tokens = Array(UUID, (uuid_of(bytes(frame.fields[2])),))
        response = ask(node, "update-disposition", disposition_status="completed", lock_tokens=tokens, session_id="a")
        return response.status, response.condition

    assert complete(got[0][0])[0] == 200
    assert complete(got[0][0]) == (410, "com.microsoft:message-lock-lost")
    peer.detach(handle)
    peer.expect(DETACH)
    assert complete(got[1][0]) == (410, LOCK_LOST)


def test_a_scheduled_message_needs_a_session_and_comes_in_it(peer, node):
    def schedule(session, at_ms):
        item = {"message-id": "m", "message": scheduled(session, at_ms)}
        return ask(node, "schedule-message", messages=[item])

    def scheduled(session, at_ms):
        at = {Symbol("x-opt-scheduled-enqueue-time"): Timestamp(at_ms)}
        return in_session(session, b"later", annotations=at)

    refused = schedule(None, time.time() * 1000 + 300)
    assert (refused.status, refused.condition) == (400, "amqp:not-allowed")
    assert schedule("a", int(time.time() * 1000) + 300).status == 200
    handle, _ = accept(peer, "orders", wait_ms=5000)
    assert [body for _, body in receive(peer, handle)] == [b"later"]


def test_messages_of_one_session_are_deleted_in_bulk(peer, node):
    send(peer, "orders", ("a", b"1"), ("b", b"2"), ("a", b"3"))
    arguments = {"message_count": Int(10), "enqueued_time_utc": Timestamp(int(time.time() * 1000) + 1000)}
    assert ask(node, "batch-delete-messages", session_id="a", **arguments).body == {"message-count": 2}
    handle, _ = accept(peer, "orders")
    peer.flow(handle, 5)
    assert body_of(peer.expect(TRANSFER).payload) == b"2"
