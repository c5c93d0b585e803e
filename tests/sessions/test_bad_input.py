"""What can be asked wrongly of sessions and transactions, and the condition that answers it: amqp.md 7, 8.4, 10.5.

On a real broker. A wrong filter, a second holder and a state that is too large are in test_session_links and
test_session_requests.
"""

from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest

from protocol.codec import Array, Int, Long, Symbol, Timestamp, UInt
from protocol.lock_tokens import uuid_of
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    BATCH_FORMAT,
    DETACH,
    DISPOSITION,
    MODIFIED,
    REJECTED,
    RELEASED,
    TRANSFER,
    RawPeer,
    batch,
    error_of,
    message,
    outcome,
)
from tests.end_to_end.raw_requests import Node
from tests.end_to_end.raw_transactions import DECLARE, Coordinator, answer_of, within
from tests.sessions.conftest import ELSEWHERE, PLAIN
from tests.sessions.raw_sessions import accept, annotations_of, in_session, receive, send

ROLLED_BACK = "amqp:transaction:rollback"
NOT_ALLOWED = "amqp:not-allowed"
ARGUMENT = "com.microsoft:argument-error"
SESSION_LOST = "com.microsoft:session-lock-lost"
NOT_FOUND = "com.microsoft:message-not-found"
MESSAGE_LOST = "com.microsoft:message-lock-lost"
UNKNOWN = "amqp:transaction:unknown-id"
ROLLBACK = "amqp:transaction:rollback"
LIMIT = "amqp:resource-limit-exceeded"
KEY = Symbol("x-opt-partition-key")
LOST_WITHIN_S = 30.0  # a busy machine included; the locks last a few seconds
LATER = Timestamp(4_000_000_000_000)
OUTCOMES = {
    "completed": outcome(ACCEPTED),
    "abandoned": outcome(MODIFIED, True, False),
    "released": outcome(RELEASED),
    "defered": outcome(MODIFIED, True, True),
    "suspended": outcome(REJECTED),
}
STATUSES = [status for status in OUTCOMES if status != "released"]  # nobody can ask for that by request


def settlement(token: UUID, status: str = "completed", session: object = None) -> tuple[str, dict[str, Any]]:
    body = {"disposition-status": status, "lock-tokens": Array(UUID, (token,))}
    return "update-disposition", body | ({} if session is None else {"session-id": session})


def schedule(session: str | None = "a", **given: Any) -> tuple[str, dict[str, Any]]:
    item = {"message-id": "m", "message": in_session(session, b"later", **given)}
    return "schedule-message", {"messages": [item]}


def ask(node: Node, operation: str, body: dict[str, Any], state: object = None) -> tuple[int, str]:
    node.say(f"com.microsoft:{operation}", body, state=state)
    response = node.response()
    return response.status, response.condition


def token_of(frame):
    return uuid_of(bytes(frame.fields[2]))


# -- a session id that is missing or wrong


@pytest.mark.parametrize("how", ["single", "batch", "in a transaction"])
def test_a_message_without_session_is_refused_and_no_other_harmed(peer, how):
    handle = peer.attach_sender("orders")
    if how == "batch":
        peer.transfer(batch(in_session("a", b"1"), message(b"none")), handle, message_format=BATCH_FORMAT)
        assert error_of(peer.expect(DISPOSITION))[0] == NOT_ALLOWED
        expected = [b"2"]
    elif how == "single":
        peer.transfer(message(b"none"), handle)
        assert error_of(peer.expect(DISPOSITION))[0] == NOT_ALLOWED
        expected = [b"2"]
    else:
        coordinator = Coordinator(peer)
        transaction = coordinator.declare()
        for body, answer in ((in_session("a", b"1"), "in the transaction"), (message(b"none"), NOT_ALLOWED)):
            peer.transfer(body, handle, state=within(transaction))
            assert answer_of(peer.expect(DISPOSITION)) == answer
        assert coordinator.discharge(transaction) == ROLLED_BACK
        expected = [b"2"]
    peer.transfer(in_session("a", b"2"), handle)
    assert answer_of(peer.expect(DISPOSITION)) == "accepted"
    receiver, _ = accept(peer, "orders", "a")
    assert [body for _, body in receive(peer, receiver, len(expected))] == expected
    peer.nothing_more(TRANSFER)


@pytest.mark.parametrize(
    "operation", ["renew-session-lock", "get-session-state", "set-session-state", "receive-by-sequence-number"]
)
@pytest.mark.parametrize(
    ("session", "condition"),
    [(None, ARGUMENT), (Int(7), ARGUMENT), ("x" * 129, ARGUMENT), ("another", SESSION_LOST), ("", SESSION_LOST)],
)
def test_a_request_needs_the_session_that_the_connection_has(peer, operation, session, condition):
    node = Node(peer, "orders/$management")
    accept(peer, "orders", "a")
    body = {"session-state": b"", "sequence-numbers": Array(Long, (Long(1),)), "receiver-settle-mode": UInt(1)}
    if session is not None:
        body["session-id"] = session
    if operation == "receive-by-sequence-number":
        # Without a session it would be right elsewhere; and it needs no lock of the session.
        condition = NOT_ALLOWED if session is None else condition if isinstance(session, Int) else NOT_FOUND
    assert ask(node, operation, body)[1] == condition


def test_a_deferred_message_of_another_session_is_not_found(peer):
    node = Node(peer, "orders/$management")
    send(peer, "orders", ("a", b"1"))
    handle, _ = accept(peer, "orders", "a")
    [(frame, _)] = receive(peer, handle)
    peer.settle(frame.fields[1], state=OUTCOMES["defered"])
    peer.expect(DISPOSITION)
    number = annotations_of(frame.payload)[Symbol("x-opt-sequence-number")]
    accept(peer, "orders", "b")
    for session, condition in (("b", NOT_FOUND), ("c", NOT_FOUND), ("a", "None")):
        body = {"sequence-numbers": Array(Long, (number,)), "receiver-settle-mode": UInt(1), "session-id": session}
        assert ask(node, "receive-by-sequence-number", body)[1] == condition


# -- the lock of the session is lost


@contextmanager
def lost_session(broker, how):
    """A connection that had a session with messages locked and one deferred, and has lost it.

    The peer, its management node, the tokens, and the number of what is deferred.
    """
    queue = "short" if how == "ran out" else "orders"
    with RawPeer.connect(broker.amqp_port) as peer:
        send(peer, queue, *[("a", b"%d" % number) for number in range(len(OUTCOMES) + 1)])
        node = Node(peer, f"{queue}/$management")
        handle, _ = accept(peer, queue, "a")
        [(deferred, _), *rest] = receive(peer, handle, len(OUTCOMES) + 1)
        peer.settle(deferred.fields[1], state=OUTCOMES["defered"])
        peer.expect(DISPOSITION)
        number = annotations_of(deferred.payload)[Symbol("x-opt-sequence-number")]
        if how == "ran out":
            assert error_of(peer.expect(DETACH, LOST_WITHIN_S))[0] == SESSION_LOST
        peer.detach(handle)
        if how != "ran out":
            peer.expect(DETACH)
        with RawPeer.connect(broker.amqp_port) as other:
            if how == "another's":
                accept(other, queue, "a")
            yield peer, node, [token_of(frame) for frame, _ in rest], number


@pytest.mark.parametrize("how", ["ran out", "detached", "another's"])
def test_with_the_lock_of_the_session_every_operation_is_lost_but_to_receive_what_is_deferred(peer, broker, how):
    with lost_session(broker, how) as (asker, node, tokens, number):
        named: dict[str, Any] = {"session-id": "a"}
        deferred: dict[str, Any] = {"sequence-numbers": Array(Long, (number,)), "receiver-settle-mode": UInt(1)}
        for operation, body in (
            ("renew-session-lock", named),
            ("get-session-state", named),
            ("set-session-state", named | {"session-state": b"x"}),
            ("receive-by-sequence-number", named | deferred | {"peeklock:active": True}),
            *[settlement(token, status, "a") for token, status in zip(tokens, STATUSES, strict=False)],
        ):
            assert ask(node, operation, body) == (410, SESSION_LOST), operation
        # Who does not say of which session it is hears of its message only.
        assert ask(node, *settlement(tokens[0])) == (410, MESSAGE_LOST)
        coordinator = Coordinator(asker)
        transaction = coordinator.declare()
        for token, status in zip(tokens, STATUSES, strict=False):
            answer = ask(node, *settlement(token, status, "a"), state=within(transaction))
            assert answer == (410, SESSION_LOST), status
        assert coordinator.discharge(transaction) == "accepted"
        # That needs no lock.
        peek = {"from-sequence-number": Long(0), "message-count": Int(10), "session-id": "a"}
        assert ask(node, "peek-message", peek)[0] == 200
        assert ask(node, "receive-by-sequence-number", named | deferred)[0] == 200


@pytest.mark.parametrize(("end", "status"), [*[("detached", status) for status in OUTCOMES], ("ran out", "completed")])
def test_a_session_that_is_lost_within_a_transaction_rolls_it_back(peer, end, status):
    queue = "short" if end == "ran out" else "orders"
    send(peer, queue, ("a", b"1"))
    sender = peer.attach_sender(queue)
    handle, _ = accept(peer, queue, "a")
    [(frame, _)] = receive(peer, handle)
    coordinator = Coordinator(peer)
    transaction = coordinator.declare()
    peer.transfer(in_session("a", b"never"), sender, state=within(transaction))
    assert answer_of(peer.expect(DISPOSITION)) == "in the transaction"
    peer.settle(frame.fields[1], state=within(transaction, OUTCOMES[status]))
    assert answer_of(peer.expect(DISPOSITION)) == "in the transaction"
    if end == "ran out":
        peer.expect(DETACH, LOST_WITHIN_S)
    peer.detach(handle)
    if end != "ran out":
        peer.expect(DETACH)
    assert coordinator.discharge(transaction) == ROLLBACK
    handle, _ = accept(peer, queue, "a")
    assert [body for _, body in receive(peer, handle)] == [b"1"]
    peer.nothing_more(TRANSFER)


# -- transactions that are not known, or have ended


@pytest.fixture
def ended(peer):
    """By name: ids of transactions that there are not."""
    coordinator = Coordinator(peer)
    committed, rolled_back = coordinator.declare(), coordinator.declare()
    assert coordinator.discharge(committed) == coordinator.discharge(rolled_back, fail=True) == "accepted"
    return {
        "never declared": b"\x01" * 16,
        "empty": b"",
        "committed": committed,
        "rolled back": rolled_back,
        "of the coordinator": coordinator,
    }


NAMES = ["never declared", "empty", "committed", "rolled back"]


@pytest.mark.parametrize("name", NAMES)
def test_no_work_is_done_in_a_transaction_that_is_not_known(peer, ended, name):
    transaction = ended[name]
    send(peer, "orders", ("a", b"1"))
    sender = peer.attach_sender("orders")
    peer.transfer(in_session("a", b"2"), sender, state=within(transaction))
    assert answer_of(peer.expect(DISPOSITION)) == UNKNOWN
    handle, _ = accept(peer, "orders", "a")
    [(frame, _)] = receive(peer, handle)
    node = Node(peer, "orders/$management")
    assert ask(node, *schedule(annotations={Symbol("x-opt-scheduled-enqueue-time"): LATER}), within(transaction)) == (
        400,
        UNKNOWN,
    )
    assert ask(node, *settlement(token_of(frame), "completed", "a"), within(transaction)) == (400, UNKNOWN)
    peer.settle(frame.fields[1], state=within(transaction, OUTCOMES["completed"]))
    assert answer_of(peer.expect(DISPOSITION)) == UNKNOWN
    for fail in (False, True):
        assert ended["of the coordinator"].discharge(transaction, fail) == UNKNOWN
    # Nothing of it was done: the message is locked, and can be settled.
    assert ask(node, *settlement(token_of(frame), "completed", "a"))[0] == 200
    peer.nothing_more(TRANSFER)


def test_a_request_that_waits_for_its_disposition_is_refused_by_it(peer, ended):
    node = Node(peer, "orders/$management")
    peer.transfer(b"\x00\x53\x77\x40", node.sender, state=within(ended["committed"]))
    assert answer_of(peer.expect(DISPOSITION)) == UNKNOWN


def test_invalid_messages_to_a_coordinator_are_refused(peer):
    coordinator = Coordinator(peer)
    for kind, *fields in ((0x99, None), (0x32, "text"), (0x32, b"x" * 16, "text"), (DECLARE, b"global")):
        coordinator.say(kind, *fields)
        assert answer_of(peer.expect(DISPOSITION)) in (ARGUMENT, "amqp:decode-error", UNKNOWN)
    assert coordinator.discharge(coordinator.declare()) == "accepted"


def test_an_outcome_that_is_none_is_refused_and_the_message_stays_locked(peer):
    send(peer, "orders", ("a", b"1"))
    handle, _ = accept(peer, "orders", "a")
    [(frame, _)] = receive(peer, handle)
    coordinator = Coordinator(peer)
    transaction = coordinator.declare()
    peer.settle(frame.fields[1], state=within(transaction))
    assert answer_of(peer.expect(DISPOSITION)) == "amqp:not-implemented"
    node = Node(peer, "orders/$management")
    assert ask(node, *settlement(token_of(frame), "completed", "a"), within(transaction))[0] == 200
    assert coordinator.discharge(transaction) == "accepted"


# -- too many, and what does not belong together


@pytest.mark.parametrize("last", ["send", "batch", "schedule"])
def test_the_message_after_the_hundredth_is_refused_and_the_rest_is_not_done_without_it(peer, last):
    """A request is answered to its caller, who decides; the sender of a message may not hear of it."""
    sender = peer.attach_sender("orders")
    coordinator = Coordinator(peer)
    transaction = coordinator.declare()
    hundred = batch(*[in_session("a", b"%d" % number) for number in range(100)])
    peer.transfer(hundred, sender, message_format=BATCH_FORMAT, state=within(transaction))
    assert answer_of(peer.expect(DISPOSITION)) == "in the transaction"
    if last == "schedule":
        node = Node(peer, "orders/$management")
        later = schedule(annotations={Symbol("x-opt-scheduled-enqueue-time"): LATER})
        assert ask(node, *later, within(transaction)) == (403, LIMIT)
    else:
        one = in_session("a", b"one more")
        given = {"message_format": BATCH_FORMAT} if last == "batch" else {}
        peer.transfer(batch(one) if last == "batch" else one, sender, state=within(transaction), **given)
        assert answer_of(peer.expect(DISPOSITION)) == LIMIT
    if last != "schedule":
        assert coordinator.discharge(transaction) == ROLLED_BACK
        return
    assert coordinator.discharge(transaction) == "accepted"
    receiver, _ = accept(peer, "orders", "a")
    assert [body for _, body in receive(peer, receiver, 100)][-1] == b"99"


def test_a_partition_key_that_is_not_the_session_is_refused_everywhere(peer):
    sender = peer.attach_sender("orders")
    wrong = in_session("a", b"1", annotations={KEY: "b"})
    coordinator = Coordinator(peer)
    transaction = coordinator.declare()
    for state in (None, within(transaction)):
        peer.transfer(wrong, sender, state=state)
        assert answer_of(peer.expect(DISPOSITION)) == NOT_ALLOWED
    node = Node(peer, "orders/$management")
    assert ask(node, *schedule(annotations={KEY: "b"}))[1] == NOT_ALLOWED
    assert ask(node, *schedule(annotations={KEY: "b"}), within(transaction))[1] == NOT_ALLOWED
    assert coordinator.discharge(transaction) == ROLLED_BACK


def test_all_keys_of_a_transaction_are_equal(peer):
    """On entities that are not partitioned messages without key may come beside them (PE8 is about the others)."""
    sender = peer.attach_sender(PLAIN)
    coordinator = Coordinator(peer)
    transaction = coordinator.declare()
    for key, answer in (("k", "in the transaction"), (None, "in the transaction"), ("l", NOT_ALLOWED)):
        annotations = None if key is None else {KEY: key}
        peer.transfer(message(b"m", annotations=annotations), sender, state=within(transaction))
        assert answer_of(peer.expect(DISPOSITION)) == answer
    assert coordinator.discharge(transaction) == ROLLED_BACK


def test_several_sessions_take_part_in_one_transaction(peer):
    sender = peer.attach_sender("orders")
    coordinator = Coordinator(peer)
    transaction = coordinator.declare()
    for session in "ab":
        peer.transfer(
            in_session(session, session.encode(), annotations={KEY: session}), sender, state=within(transaction)
        )
        assert answer_of(peer.expect(DISPOSITION)) == "in the transaction"
    assert coordinator.discharge(transaction) == "accepted"
    for session in "ab":
        receiver, _ = accept(peer, "orders", session)
        assert [body for _, body in receive(peer, receiver)] == [session.encode()]


@pytest.mark.parametrize("what", ["send", "settle", "schedule", "settle by request"])
def test_work_on_another_partition_is_refused_and_the_rest_is_not_done_without_a_send(peer, what):
    send(peer, ELSEWHERE, ("a", b"elsewhere"))
    sender = peer.attach_sender("orders")
    coordinator = Coordinator(peer)
    transaction = coordinator.declare()
    peer.transfer(in_session("a", b"1"), sender, state=within(transaction))
    assert answer_of(peer.expect(DISPOSITION)) == "in the transaction"
    node = Node(peer, f"{ELSEWHERE}/$management")
    if what == "send":
        peer.transfer(in_session("a", b"2"), peer.attach_sender(ELSEWHERE), state=within(transaction))
        answer = answer_of(peer.expect(DISPOSITION))
    elif what == "schedule":
        answer = ask(node, *schedule(), within(transaction))[1]
    else:
        handle, _ = accept(peer, ELSEWHERE, "a")
        [(frame, _)] = receive(peer, handle)
        if what == "settle":
            peer.settle(frame.fields[1], state=within(transaction, OUTCOMES["completed"]))
            answer = answer_of(peer.expect(DISPOSITION))
        else:
            answer = ask(node, *settlement(token_of(frame), "completed", "a"), within(transaction))[1]
    assert answer == NOT_ALLOWED
    if what == "send":
        assert coordinator.discharge(transaction) == ROLLED_BACK
        return
    assert coordinator.discharge(transaction) == "accepted"
    receiver, _ = accept(peer, "orders", "a")
    assert [body for _, body in receive(peer, receiver)] == [b"1"]


def test_a_token_that_never_was_is_a_lost_lock(peer):
    node = Node(peer, "orders/$management")
    coordinator = Coordinator(peer)
    transaction = coordinator.declare()
    for state in (None, within(transaction)):
        assert ask(node, *settlement(uuid4()), state) == (410, MESSAGE_LOST)
        assert ask(node, *settlement(uuid4(), session="a"), state) == (410, SESSION_LOST)
    assert coordinator.discharge(transaction) == "accepted"
