"""Transactions on a queue with sessions, and what of management takes part in them, on a real broker (amqp.md 10)."""

import time
from contextlib import suppress
from pathlib import Path
from uuid import UUID

import pytest

from protocol.codec import Array, Long, Symbol, Timestamp
from protocol.lock_tokens import uuid_of
from tests.brokers import Broker
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    DETACH,
    DISPOSITION,
    END,
    FLOW,
    MODIFIED,
    REJECTED,
    RELEASED,
    TRANSFER,
    RawPeer,
    body_of,
    error_of,
    outcome,
)
from tests.end_to_end.raw_requests import Node
from tests.end_to_end.raw_transactions import Coordinator, answer_of, within
from tests.patience import eventually
from tests.sessions.conftest import PLAIN
from tests.sessions.raw_sessions import accept, in_session, receive, send

SCHEDULED = Symbol("x-opt-scheduled-enqueue-time")


class Story:
    """A peer with a coordinator, a transaction, a sender, a session that has messages 1 and 2, and its node."""

    def __init__(self, peer: RawPeer, queue: str = "orders") -> None:
        self.peer = peer
        self.queue = queue
        send(peer, queue, ("a", b"1"), ("a", b"2"))
        self.sender = peer.attach_sender(queue)
        self.node = Node(peer, f"{queue}/$management")
        self.receiver, _ = accept(peer, queue, "a")
        self.locked = [frame for frame, _ in receive(peer, self.receiver, 2)]
        self.coordinator = Coordinator(peer)
        self.transaction = self.coordinator.declare()

    def send(self, body, session="a"):
        self.peer.transfer(in_session(session, body), self.sender, state=within(self.transaction))
        assert answer_of(self.peer.expect(DISPOSITION)) == "in the transaction"

    def settle(self, frame, state):
        self.peer.settle(frame.fields[1], state=within(self.transaction, state))
        answer = self.peer.expect(DISPOSITION).fields[4]
        assert (answer.value[0], answer.value[1].descriptor) == (self.transaction, state.descriptor)

    def ask(self, operation, body, transacts=True):
        self.node.say(f"com.microsoft:{operation}", body, state=within(self.transaction) if transacts else None)
        return self.node.response()

    def schedule(self, body, after_s, session="a"):
        at = {SCHEDULED: Timestamp(int((time.time() + after_s) * 1000))}
        item = {"message-id": "m", "message": in_session(session, body, annotations=at)}
        response = self.ask("schedule-message", {"messages": [item]})
        assert response.status == 200
        [number] = response.body["sequence-numbers"]
        return number

    def scheduled(self):
        """The bodies of messages that are scheduled."""
        peeked = self.ask("peek-message", {"from-sequence-number": 0, "message-count": 10}, transacts=False)
        bodies = [body_of(bytes(each["message"])) for each in peeked.body["messages"]]
        return [body for body in bodies if body not in (b"1", b"2")]

    def dispose(self, frame, status):
        tokens = Array(UUID, (uuid_of(bytes(frame.fields[2])),))
        body = {"disposition-status": status, "lock-tokens": tokens, "session-id": "a"}
        return self.ask("update-disposition", body).status

    def end(self, fail=False):
        assert self.coordinator.discharge(self.transaction, fail) == "accepted"

    def left(self, session="a"):
        """What the session's next receiver gets; those before have to go first."""
        self.peer.detach(self.receiver)
        self.peer.expect(DETACH)
        self.receiver, attached = accept(self.peer, self.queue, session)
        self.peer.flow(self.receiver, 20, drain=True)
        while (flow := self.peer.expect(FLOW)).fields[4] != attached.fields[1] or flow.fields[6] != 0:
            pass  # credit of other links
        bodies = []
        with suppress(TimeoutError):
            while True:
                bodies.append(body_of(self.peer.expect(TRANSFER, 0).payload))
        return bodies


@pytest.fixture
def story(peer):
    return Story(peer)


OUTCOMES = {
    "completed": (outcome(ACCEPTED), []),
    "abandoned": (outcome(MODIFIED, True, False), [b"1"]),
    "released": (outcome(RELEASED), [b"1"]),
    "defered": (outcome(MODIFIED, True, True), []),
    "suspended": (outcome(REJECTED), []),
}


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("name", OUTCOMES)
def test_each_outcome_and_a_send_are_done_together_or_not_at_all(story, name, commits):
    state, first = OUTCOMES[name]
    story.settle(story.locked[0], state)
    story.send(b"3")
    story.send(b"other", "b")
    story.end(fail=not commits)
    if commits:
        assert story.left() == [*first, b"2", b"3"]
        assert story.left("b") == [b"other"]
    else:
        assert story.left() == [b"1", b"2"]


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("status", [name for name in OUTCOMES if name != "released"])
def test_settling_by_request_takes_part(story, status, commits):
    assert story.dispose(story.locked[0], status) == 200
    assert story.dispose(story.locked[0], status) == 400  # it is settled in a transaction already
    story.end(fail=not commits)
    assert story.left() == ([*OUTCOMES[status][1], b"2"] if commits else [b"1", b"2"])


@pytest.mark.parametrize("commits", [True, False])
def test_a_message_scheduled_in_a_transaction_comes_if_it_is_committed(story, commits):
    number = story.schedule(b"soon", -1)  # its time has come at the commit
    later = story.schedule(b"later", 3600)
    assert later == number + 1
    story.end(fail=not commits)
    assert story.left() == [b"1", b"2"] + [b"soon"] * commits
    response = story.ask("cancel-scheduled-message", {"sequence-numbers": Array(Long, (later,))}, transacts=False)
    assert (response.status, response.condition) == (
        (200, "None") if commits else (404, "com.microsoft:message-not-found")
    )


@pytest.mark.parametrize("commits", [True, False])
def test_a_cancellation_is_done_with_the_commit(story, commits):
    """A message that is not committed yet cannot be cancelled."""
    uncommitted = story.schedule(b"never mind", 3600)
    body = {"sequence-numbers": Array(Long, (uncommitted,))}
    assert story.ask("cancel-scheduled-message", body).status == 404
    story.end()
    story.transaction = story.coordinator.declare()
    assert story.ask("cancel-scheduled-message", body).status == 200
    assert story.ask("cancel-scheduled-message", body).status == 404  # it is cancelled already
    [peeked] = story.scheduled()
    assert peeked == b"never mind"
    story.end(fail=not commits)
    assert story.scheduled() == ([] if commits else [b"never mind"])
    assert story.ask("cancel-scheduled-message", body, transacts=False).status == (404 if commits else 200)


@pytest.mark.parametrize("commits", [True, False])
def test_the_state_of_a_session_is_set_with_the_commit(story, commits):
    story.ask("set-session-state", {"session-id": "a", "session-state": b"before"}, transacts=False)
    story.settle(story.locked[0], outcome(ACCEPTED))
    assert story.ask("set-session-state", {"session-id": "a", "session-state": b"half"}).status == 200
    assert story.ask("set-session-state", {"session-id": "a", "session-state": b"whole"}).status == 200
    for transacts in (True, False):
        state = story.ask("get-session-state", {"session-id": "a"}, transacts=transacts)
        assert state.body == {"session-state": b"before"}
    story.end(fail=not commits)
    state = story.ask("get-session-state", {"session-id": "a"}, transacts=False).body
    assert state == {"session-state": b"whole" if commits else b"before"}
    story.ask("set-session-state", {"session-id": "a", "session-state": None}, transacts=False)


def test_the_lock_is_renewed_at_once_and_stays_so(story):
    """A lock must not end because its renewal waits for the commit."""
    until = story.ask("renew-session-lock", {"session-id": "a"}).body["expiration"]
    time.sleep(0.01)
    again = story.ask("renew-session-lock", {"session-id": "a"}).body["expiration"]
    assert again > until
    story.end(fail=True)
    assert story.ask("set-session-state", {"session-id": "a", "session-state": None}, transacts=False).status == 200


def test_a_session_and_a_plain_queue_take_no_part_together(story):
    """Although they lie on one partition."""
    plain = story.peer.attach_sender(PLAIN)
    story.settle(story.locked[0], outcome(ACCEPTED))
    story.peer.transfer(in_session(None, b"plain"), plain, state=within(story.transaction))
    assert answer_of(story.peer.expect(DISPOSITION)) == "amqp:not-allowed"
    story.end(fail=True)
    assert story.left() == [b"1", b"2"]


@pytest.mark.parametrize("end", ["coordinator", "session", "close", "break"])
def test_a_link_that_ends_before_the_discharge_leaves_nothing(broker, peer, end):
    with RawPeer.connect(broker.amqp_port) as other:
        story = Story(other)
        story.send(b"never")
        story.settle(story.locked[0], outcome(ACCEPTED))
        story.schedule(b"nor this", 0)
        if end == "coordinator":
            other.detach(story.coordinator.handle)
            other.expect(DETACH)
        elif end == "session":
            other.say(END)
            other.expect(END)
        elif end == "close":
            other.close()
        else:
            other.socket.close()
        if end == "coordinator":
            assert story.left() == [b"1", b"2"]
            return
    handle, _ = accept(peer, "orders", wait_ms=5000)
    peer.flow(handle, 5)
    assert [body_of(peer.expect(TRANSFER).payload) for _ in range(2)] == [b"1", b"2"]
    peer.nothing_more(TRANSFER)


SHORT = """
import broker.wire

broker.wire.TRANSACTION_TIME_OUT_MS = 700
"""


def test_a_transaction_that_takes_too_long_is_rolled_back_and_who_goes_on_is_told(tmp_path: Path, monkeypatch):
    """Two minutes are made short for the broker's processes."""
    (tmp_path / "sitecustomize.py").write_text(SHORT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = '[[queues]]\nname = "orders"\nrequires_session = true\n'
    with Broker(tmp_path / "broker", config) as broker, RawPeer.connect(broker.amqp_port) as peer:
        story = Story(peer)
        story.settle(story.locked[0], outcome(ACCEPTED))
        story.send(b"never")

        def timed_out():
            response = story.ask("schedule-message", {"messages": [{"message": in_session("b", b"late")}]})
            return response.status == 400 and response

        response = eventually(timed_out, "the transaction has timed out")
        assert response.condition == "amqp:not-allowed"
        text = (
            f"No active Transaction was found for ID 'txn:{story.transaction.hex()}'. The Transaction may have timed "
            "out or attempted to span multiple top-level entities such as Queue or Topic. The server Transaction "
            "timeout is: 00:00:00.7000000."
        )
        assert response.description.startswith(text)
        # Renewals are done at once, so that the locks do not end with it.
        assert story.ask("renew-session-lock", {"session-id": "a"}).status == 200
        peer.transfer(in_session("a", b"late"), story.sender, state=within(story.transaction))
        assert error_of(peer.expect(DISPOSITION))[1].startswith(text)
        peer.settle(story.locked[1].fields[1], state=within(story.transaction, outcome(ACCEPTED)))
        assert answer_of(peer.expect(DISPOSITION)) == "amqp:not-allowed"
        assert story.coordinator.discharge(story.transaction) == "amqp:not-allowed"
        assert story.coordinator.discharge(story.transaction) == "amqp:transaction:unknown-id"
        assert story.left() == [b"1", b"2"]
