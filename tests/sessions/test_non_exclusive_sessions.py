"""Sessions that are not exclusive as their frames have it, on a real broker (amqp.md 7.1)."""

from typing import Any
from uuid import UUID, uuid4

import pytest

from protocol.codec import Array, Described, Symbol, ULong
from protocol.lock_tokens import uuid_of
from tests.brokers import Broker
from tests.end_to_end.raw_peer import ATTACH, DETACH, DISPOSITION, TRANSFER, Frame, RawPeer, body_of, error_of, source
from tests.end_to_end.raw_requests import Node
from tests.sessions.raw_sessions import accept, receive, send

KEY = Symbol("com.microsoft:non-exclusive-session-filter")
PREVIEW = Symbol("com.microsoft:non-exclusive-session-filter:list")
CODE = ULong(0x000000137000000E)
LOCK_LOST = "com.microsoft:session-lock-lost"
QUEUES = ["orders", "spread"]


def ask(peer: RawPeer, queue: str, *items: Any, key: Symbol = KEY) -> int:
    return peer.attach(sender=False, source_=source(queue, filters={key: Described(CODE, list(items))}))


def share(peer: RawPeer, queue: str, *items: Any, key: Symbol = KEY) -> tuple[int, str, UUID]:
    """The handle, and the session with its token as the answer has them."""
    handle = ask(peer, queue, *items, key=key)
    attached = peer.expect(ATTACH)
    assert attached.fields[5] is not None, peer.expect(DETACH)
    answer = attached.fields[5].value[7][key]
    assert answer.descriptor == CODE
    assert attached.fields[13][Symbol("com.microsoft:locked-until-utc")]
    session_id, token = answer.value
    assert type(session_id) is str
    assert type(token) is UUID
    return handle, session_id, token


def settle(node: Node, session_id: str, frame: Frame, handle: int, status: str = "completed", **more: Any) -> Any:
    body = {"lock-tokens": Array(UUID, (uuid_of(frame.fields[2]),)), "disposition-status": status, **more}
    return of_session(node, "update-disposition", session_id, handle, **body)


def of_session(node: Node, operation: str, session_id: str, handle: int, **body: Any) -> Any:
    """A request as .NET's SDK makes it: it names the session, and the link that received it."""
    body = {"session-id": session_id, **body}
    return node.ask(f"com.microsoft:{operation}", body, associated_link_name=f"link-{handle}")


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("key", [KEY, PREVIEW])
def test_the_answer_has_the_session_and_its_token(peer: RawPeer, queue: str, key: Symbol) -> None:
    send(peer, queue, ("a", b"1"))
    _, named, token = share(peer, queue, "b", None, key=key)
    _, found, other = share(peer, queue, None, None, key=key)
    assert (named, found) == ("b", "a")
    assert token != other
    assert share(peer, queue, "c", key=key)[1] == "c"  # the list may end early


@pytest.mark.parametrize("queue", QUEUES)
def test_who_has_the_token_takes_over_and_settles_what_the_other_one_was_given(
    broker: Broker, peer: RawPeer, queue: str
) -> None:
    send(peer, queue, ("a", b"1"), ("a", b"2"), ("a", b"3"))
    first, _, token = share(peer, queue, "a", None)
    mine = Node(peer, f"{queue}/$management")
    [(one, _), (two, _)] = receive(peer, first, 2)
    with RawPeer.connect(broker.amqp_port) as other:
        node = Node(other, f"{queue}/$management")
        second, session_id, same = share(other, queue, "a", token)
        assert (session_id, same) == ("a", token)
        for response in (
            settle(mine, "a", one, first),
            of_session(mine, "renew-session-lock", "a", first),
            of_session(mine, "get-session-state", "a", first),
        ):
            assert (response.status, response.condition) == (410, LOCK_LOST)
        assert settle(node, "a", one, second).status == 200
        assert settle(node, "a", two, second, "suspended", **{"deadletter-reason": "no"}).status == 200
        assert of_session(node, "set-session-state", "a", second, **{"session-state": b"x"}).status == 200
        assert [body for _, body in receive(other, second)] == [b"3"]
        assert error_of(peer.expect(DETACH))[0] == LOCK_LOST  # later
        other.detach(second)
        other.expect(DETACH)
    assert [body for _, body in receive(peer, accept(peer, queue, "a")[0])] == [b"3"]
    dead = peer.attach_receiver(f"{queue}/$DeadLetterQueue", credit=1)
    assert body_of(peer.expect(TRANSFER).payload) == b"2"
    peer.detach(dead)


def test_on_one_connection_requests_are_those_of_the_link_that_they_name(peer: RawPeer) -> None:
    send(peer, "orders", ("a", b"1"))
    node = Node(peer, "orders/$management")
    first, _, token = share(peer, "orders", "a", None)
    [(frame, _)] = receive(peer, first)
    second, _, _ = share(peer, "orders", "a", token)
    assert settle(node, "a", frame, first).condition == LOCK_LOST
    assert of_session(node, "renew-session-lock", "a", first).condition == LOCK_LOST
    assert of_session(node, "renew-session-lock", "a", second).status == 200
    assert settle(node, "a", frame, second).status == 200


def test_without_the_token_it_is_taken_and_an_exclusive_one_cannot_be_taken_over(peer: RawPeer) -> None:
    share(peer, "orders", "a", None)
    accept(peer, "orders", "b")
    for session_id, token in (("a", None), ("a", uuid4()), ("b", uuid4()), ("b", None)):
        ask(peer, "orders", session_id, token)
        assert peer.refusal()[0] == "com.microsoft:session-cannot-be-locked"


def test_what_is_settled_by_a_request_is_settled_on_the_link(peer: RawPeer) -> None:
    """Else the link would be full some day, because such clients settle nothing on it."""
    send(peer, "orders", ("a", b"1"), ("a", b"2"))
    node = Node(peer, "orders/$management")
    handle, _, _ = share(peer, "orders", "a", None)
    [(one, _), (two, _)] = receive(peer, handle, 2)
    assert settle(node, "a", two, handle).status == 200
    assert settle(node, "a", one, handle, "abandoned").status == 200
    settled = [peer.expect(DISPOSITION) for _ in range(2)]
    assert [(each.fields[1], each.fields[3]) for each in settled] == [(two.fields[1], True), (one.fields[1], True)]


def test_other_clients_may_settle_on_the_link(peer: RawPeer) -> None:
    send(peer, "orders", ("a", b"1"))
    handle, _, _ = share(peer, "orders", "a", None)
    [(frame, _)] = receive(peer, handle)
    peer.settle(frame.fields[1])
    assert peer.expect(DISPOSITION).fields[4].descriptor == 0x24
    assert settle(Node(peer, "orders/$management"), "a", frame, handle).status == 410


@pytest.mark.parametrize(
    "value",
    ["a", None, Described(CODE, "a"), [1], [None, uuid4()], ["a", "token"], ["a", None, None], ["x" * 129]],
)
def test_a_filter_of_another_shape_is_refused(peer: RawPeer, value: Any) -> None:
    value = Described(CODE, value) if isinstance(value, list) else value
    peer.attach(sender=False, source_=source("orders", filters={KEY: value}))
    assert peer.refusal()[0] == "com.microsoft:argument-error"


def test_both_filters_together_are_refused(peer: RawPeer) -> None:
    both = {KEY: Described(CODE, ["a", None]), Symbol("com.microsoft:session-filter"): "a"}
    peer.attach(sender=False, source_=source("orders", filters=both))
    assert peer.refusal()[0] == "com.microsoft:argument-error"


def test_an_entity_without_sessions_refuses_it(peer: RawPeer) -> None:
    ask(peer, "plain", "a", None)
    assert peer.refusal()[0] == "amqp:not-allowed"
