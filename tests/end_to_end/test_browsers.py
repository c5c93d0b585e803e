"""Links with the distribution mode copy (AMQP 1.0 3.5.7): they show messages, and leave them where they are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from protocol.codec import Described, Symbol, UInt, ULong, decode
from tests.brokers import Broker
from tests.caller import WORKERS
from tests.end_to_end.health import assert_unharmed, process_ids
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    DETACH,
    DISPOSITION,
    FLOW,
    MODIFIED,
    REJECTED,
    RELEASED,
    TRANSFER,
    Closed,
    Frame,
    RawPeer,
    body_of,
    error_of,
    message,
    outcome,
    source,
)
from tests.end_to_end.raw_requests import Node
from tests.end_to_end.raw_transactions import Coordinator
from tests.end_to_end.test_catalog_at_run_time import NODE, create, delete, update
from tests.end_to_end.test_receiving import fill, number_of, purge
from tests.patience import eventually

PARTITIONS = 4
SEVERAL = 2  # workers
CONFIG = f"""
partitions = {PARTITIONS}

[amqp]
max_unsettled_per_link = 100

[[security.authorization_rules]]
key_name = "sends"
primary_key = "key-that-sends"
rights = ["Send"]

[[queues]]
name = "witness"

[[queues]]
name = "orders"

[[queues]]
name = "sessions"
requires_session = true

[[queues]]
name = "spread"
enable_partitioning = true

[[queues]]
name = "spread-sessions"
enable_partitioning = true
requires_session = true

[[topics]]
name = "news"

  [[topics.subscriptions]]
  name = "all"
"""
COPY = Symbol("copy")
SESSION_FILTER = Symbol("com.microsoft:session-filter")


@pytest.fixture(scope="module")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("browsers"), CONFIG, workers=WORKERS and SEVERAL) as broker:
        yield broker


@pytest.fixture
def broker(shared_broker: Broker) -> Iterator[Broker]:
    before = process_ids(shared_broker)
    yield shared_broker
    for queue in ("orders", "sessions", "spread", "spread-sessions", "news/Subscriptions/all"):
        purge(shared_broker, queue)
    assert_unharmed(shared_broker, before)


@pytest.fixture
def peer(broker: Broker) -> Iterator[RawPeer]:
    with RawPeer.connect(broker.amqp_port) as peer:
        yield peer


class Attached(NamedTuple):
    """A link: its handles at this peer's end and at the broker's, and what the answer says of the source."""

    handle: int
    theirs: int
    mode: Any
    filters: Any


def attach(peer: RawPeer, address: str, mode: Any = COPY, *, settled: bool = False, filters: Any = None) -> Attached:
    handle = peer.attach(
        sender=False, address=address, settled=settled, source_=source(address, mode=mode, filters=filters)
    )
    answer = peer.expect(ATTACH)
    assert answer.fields[5] is not None, peer.expect(DETACH)
    return Attached(handle, answer.fields[1], *[*answer.fields[5].value, *[None] * 11][6:8])


def browse(peer: RawPeer, address: str, *, settled: bool = True, filters: Any = None) -> list[Frame]:
    """All that there is, to the end of a drain."""
    link = attach(peer, address, settled=settled, filters=filters)
    assert link.mode == COPY
    found = drain(peer, link)
    peer.detach(link.handle)
    peer.expect(DETACH)
    return found


def drain(peer: RawPeer, link: Attached, credit: int = 1000, before: int = 0) -> list[Frame]:
    peer.flow(link.handle, credit, delivery_count=before, drain=True)
    found = []
    while (frame := peer.receive()).code != FLOW:
        if frame.code == TRANSFER:
            found.append(frame)
    assert frame.fields[4:7] == [link.theirs, before + credit, 0]  # handle, delivery-count, credit
    return found


def receive_all(peer: RawPeer, address: str, count: int, filters: Any = None) -> list[Frame]:
    """Receive and complete; there must be so many."""
    handle = attach(peer, address, None, filters=filters).handle
    peer.flow(handle, 1000)
    found = [peer.expect(TRANSFER) for _ in range(count)]
    for frame in found:
        peer.settle(frame.fields[1])
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    peer.nothing_more(TRANSFER)
    peer.detach(handle)
    peer.expect(DETACH)
    return found


def sections(frame: Frame) -> dict[int, Any]:
    found, at = {}, 0
    while at < len(frame.payload):
        section, at = decode(frame.payload, at)
        found[int(section.descriptor)] = section.value
    return found


def delivery_count(frame: Frame) -> int:
    return int(([*sections(frame).get(0x70, []), *[None] * 5][4]) or 0)


def annotations(frame: Frame) -> dict[str, Any]:
    return sections(frame)[0x72]


def numbers(frames: list[Frame]) -> list[int]:
    return [number_of(frame) for frame in frames]


def active(peer: RawPeer, address: str) -> int:
    node = Node(peer, f"{address}/$management")
    count = node.ask("peeklock:get-counts", {}).body["counts"]["active"]
    for handle in (node.receiver, node.sender):
        peer.detach(handle)
        peer.expect(DETACH)
    return int(count)


# --- what is left --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("queue", ["orders", "spread"])
def test_browsing_twice_leaves_everything(peer: RawPeer, queue: str, settled: bool) -> None:
    fill(peer, 30, queue=queue)
    for _ in range(2):
        found = browse(peer, queue, settled=settled)
        assert sorted(numbers(found)) == list(range(30))
        assert all([*frame.fields, None, None][4] in (settled, settled or None) for frame in found)
        assert all(delivery_count(frame) == 0 for frame in found)
        assert all(annotations(frame)["x-opt-message-state"] == 0 for frame in found)
        assert all("x-opt-locked-until" not in annotations(frame) for frame in found)
    received = receive_all(peer, queue, 30)
    assert sorted(numbers(received)) == list(range(30))
    assert all(delivery_count(frame) == 0 for frame in received)


@pytest.mark.parametrize(("asked", "said"), [(None, None), (Symbol("move"), Symbol("move")), (Symbol("odd"), None)])
@pytest.mark.parametrize("queue", ["orders", "spread"])
def test_the_answer_to_a_receiver_never_says_copy(peer: RawPeer, queue: str, asked: Any, said: Any) -> None:
    assert attach(peer, queue, asked).mode == said


def test_a_node_of_requests_copies_nothing(peer: RawPeer) -> None:
    for address in ("$cbs", "orders/$management"):
        assert attach(peer, address).mode is None


@pytest.mark.parametrize(
    ("state", "answer"),
    [
        (outcome(ACCEPTED), ACCEPTED),
        (outcome(RELEASED), RELEASED),
        (outcome(MODIFIED, True, False), MODIFIED),
        (outcome(MODIFIED, True, True), MODIFIED),
        (outcome(REJECTED), REJECTED),
    ],
)
def test_settling_has_no_effect(peer: RawPeer, state: Described, answer: int) -> None:
    """The client is answered as if it had."""
    fill(peer, 2)
    link = attach(peer, "orders")
    first, second = drain(peer, link)
    peer.settle(first.fields[1], state=state)
    told = peer.expect(DISPOSITION)
    assert told.fields[0] is False
    assert told.fields[3] is True
    assert told.fields[4].descriptor == answer
    peer.settle(second.fields[1], state=state, settled=True)
    peer.detach(link.handle)
    assert error_of(peer.expect(DETACH)) == ("", "")
    assert browse(peer, "orders/$DeadLetterQueue") == []
    assert [delivery_count(frame) for frame in receive_all(peer, "orders", 2)] == [0, 0]


def test_settling_in_a_transaction_has_no_effect(peer: RawPeer) -> None:
    fill(peer, 2)
    coordinator = Coordinator(peer)
    transaction = coordinator.declare()
    link = attach(peer, "orders")
    first, second = drain(peer, link)
    state = Described(ULong(0x34), [transaction, outcome(ACCEPTED)])
    peer.settle(first.fields[1], state=state)
    told = peer.expect(DISPOSITION)
    assert told.fields[4].descriptor == 0x34
    assert told.fields[4].value[1].descriptor == ACCEPTED
    coordinator.discharge(transaction)
    peer.settle(second.fields[1], state=Described(ULong(0x34), [b"unknown", outcome(ACCEPTED)]))
    assert error_of(peer.expect(DISPOSITION))[0] == "amqp:transaction:unknown-id"
    receive_all(peer, "orders", 2)


def test_what_others_have_locked_deferred_and_scheduled_is_shown(peer: RawPeer) -> None:
    fill(peer, 3)
    receiver = peer.attach_receiver("orders", credit=2)
    locked, deferred = peer.expect(TRANSFER), peer.expect(TRANSFER)
    peer.settle(deferred.fields[1], state=outcome(MODIFIED, True, True))
    peer.expect(DISPOSITION)
    later = {Symbol("x-opt-scheduled-enqueue-time"): decode(b"\x83\x00\x00\x03\xff\xff\xff\xff\xff")[0]}
    handle = peer.attach_sender("orders")
    peer.transfer(message(b"3 ", annotations=later), handle)
    peer.expect(DISPOSITION)
    found = browse(peer, "orders")
    assert numbers(found) == [0, 1, 2, 3]
    assert [annotations(frame)["x-opt-message-state"] for frame in found] == [0, 1, 0, 2]
    peer.settle(locked.fields[1])  # the lock is still there
    assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    assert numbers(browse(peer, "orders")) == [1, 2, 3]
    peer.detach(receiver)
    peer.expect(DETACH)


# --- credit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", ["orders", "spread"])
def test_credit_is_kept_to_the_message(peer: RawPeer, queue: str) -> None:
    fill(peer, 10, queue=queue)
    handle = attach(peer, queue, settled=True).handle
    peer.flow(handle, 3)
    first = [peer.expect(TRANSFER) for _ in range(3)]
    peer.nothing_more(TRANSFER)
    peer.flow(handle, 20, delivery_count=3)
    rest = [peer.expect(TRANSFER) for _ in range(7)]
    assert sorted(numbers(first + rest)) == list(range(10))
    peer.nothing_more(TRANSFER)


@pytest.mark.parametrize("queue", ["orders", "spread"])
@pytest.mark.parametrize("credit", [1, 7, 10])
def test_a_drain_uses_up_its_credit(peer: RawPeer, queue: str, credit: int) -> None:
    fill(peer, 10, queue=queue)
    link = attach(peer, queue, settled=True)
    found: list[Frame] = []
    while part := drain(peer, link, credit, (len(found) // credit) * credit):
        assert len(part) == credit or len(found) + len(part) == 10
        found += part
        if len(part) < credit:
            break
    assert sorted(numbers(found)) == list(range(10))


@pytest.mark.parametrize("queue", ["orders", "spread"])
def test_a_drain_shows_what_has_come_since_the_end(peer: RawPeer, queue: str) -> None:
    link = attach(peer, queue, settled=True)
    assert drain(peer, link, 10) == []
    for count in range(1, 4):
        fill(peer, 1, queue=queue)
        assert len(drain(peer, link, 10, 10 * count)) == 1


@pytest.mark.parametrize("queue", ["orders", "spread"])
def test_credit_that_is_left_waits_for_later_messages(broker: Broker, peer: RawPeer, queue: str) -> None:
    fill(peer, 2, queue=queue)
    handle = attach(peer, queue, settled=True).handle
    peer.flow(handle, 50)
    found = [peer.expect(TRANSFER) for _ in range(2)]
    with RawPeer.connect(broker.amqp_port) as other:
        sender = other.attach_sender(queue)
        for number in range(2, 30):
            other.transfer(message(b"%d " % number), sender)
            found.append(peer.expect(TRANSFER))
    assert sorted(numbers(found)) == list(range(30))
    peer.flow(handle, 0, delivery_count=30, echo=True)  # the credit is taken back
    peer.expect(FLOW)
    fill(peer, 1, queue=queue)
    peer.nothing_more(TRANSFER)
    peer.flow(handle, 1, delivery_count=30)
    peer.expect(TRANSFER)


def test_all_the_credit_there_is_brings_no_flood(peer: RawPeer) -> None:
    """More than one step has; unsettled ones are bounded as those of receivers are."""
    fill(peer, 2500, 2000)
    handle = attach(peer, "orders", settled=True).handle
    peer.flow(handle, 0xFFFFFFFF)
    assert [number_of(peer.expect(TRANSFER)) for _ in range(2500)] == list(range(2500))
    peer.nothing_more(TRANSFER)
    held = attach(peer, "orders").handle
    peer.flow(held, 0xFFFFFFFF)
    found = [peer.expect(TRANSFER) for _ in range(100)]  # max_unsettled_per_link
    peer.nothing_more(TRANSFER)
    peer.settle(found[0].fields[1], found[-1].fields[1], settled=True)
    assert [number_of(peer.expect(TRANSFER)) for _ in range(100)] == list(range(100, 200))


def test_a_large_message_is_shown_whole(peer: RawPeer) -> None:
    sender = peer.attach_sender("orders")
    body = b"1 " + bytes(700_000)
    encoded = message(body)
    for at in range(0, len(encoded), 60_000):
        peer.transfer(encoded[at : at + 60_000], sender, first=at == 0, more=at + 60_000 < len(encoded))
    peer.expect(DISPOSITION)
    handle = attach(peer, "orders", settled=True).handle
    peer.flow(handle, 10)
    payload = b""
    while True:
        frame = peer.expect(TRANSFER)
        payload += frame.payload
        if not [*frame.fields, None, None][5]:
            break
    assert body_of(payload) == body


# --- entities of all kinds -------------------------------------------------------------------------------------------


def test_a_subscription_and_a_dead_letter_queue(peer: RawPeer) -> None:
    handle = peer.attach_sender("news")
    peer.transfer(message(b"0 "), handle)
    peer.expect(DISPOSITION)
    address = "news/Subscriptions/all"
    assert numbers(browse(peer, address)) == [0]
    receiver = peer.attach_receiver(address, credit=1)
    peer.settle(peer.expect(TRANSFER).fields[1], state=outcome(REJECTED))
    peer.expect(DISPOSITION)
    peer.detach(receiver)
    peer.expect(DETACH)
    assert browse(peer, address) == []
    for _ in range(2):
        assert numbers(browse(peer, f"{address}/$DeadLetterQueue")) == [0]
    receive_all(peer, f"{address}/$DeadLetterQueue", 1)


@pytest.mark.parametrize("queue", ["sessions", "spread-sessions"])
def test_sessions(peer: RawPeer, queue: str) -> None:
    """All of them without a session filter, or the one that the filter names; nobody's lock is in the way."""
    handle = peer.attach_sender(queue)
    for number in range(6):
        properties = [None] * 10 + [f"s{number % 3}"]
        peer.transfer(message(b"%d " % number, properties=properties), handle)
        peer.expect(DISPOSITION)
    held = attach(peer, queue, None, filters={SESSION_FILTER: "s1"}).handle
    for _ in range(2):
        assert sorted(numbers(browse(peer, queue))) == list(range(6))
        assert numbers(browse(peer, queue, filters={SESSION_FILTER: "s1"})) == [1, 4]
        assert browse(peer, queue, filters={SESSION_FILTER: "none"}) == []
    link = attach(peer, queue, filters={SESSION_FILTER: Described(SESSION_FILTER, "s2")})
    assert link.filters == {SESSION_FILTER: Described(SESSION_FILTER, "s2")}
    link = attach(peer, queue, filters={SESSION_FILTER: None})
    assert not link.filters  # a browser waits for no session, and shows all of them
    assert sorted(numbers(drain(peer, link))) == list(range(6))
    peer.flow(held, 10)
    assert [number_of(peer.expect(TRANSFER)) for _ in range(2)] == [1, 4]
    peer.detach(held)
    peer.expect(DETACH)


def test_a_session_filter_needs_sessions(peer: RawPeer) -> None:
    peer.attach(sender=False, source_=source("orders", mode=COPY, filters={SESSION_FILTER: "s"}))
    assert peer.refusal()[0] == "amqp:not-allowed"


def test_who_may_only_send_may_not_browse(broker: Broker) -> None:
    with RawPeer.connect(broker.amqp_port, key_name="sends", key="key-that-sends") as peer:
        peer.attach(sender=False, source_=source("orders", mode=COPY))
        assert peer.refusal()[0] == "amqp:unauthorized-access"


@pytest.mark.parametrize("address", ["news", "nothing"])
def test_where_nobody_receives_nobody_browses(peer: RawPeer, address: str) -> None:
    peer.attach(sender=False, source_=source(address, mode=COPY))
    assert peer.refusal()[0] in ("amqp:not-allowed", "amqp:not-found")


# --- changes meanwhile ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("credit", [0, 10])
@pytest.mark.parametrize("is_partitioned", [False, True])
def test_the_entity_is_deleted(peer: RawPeer, credit: int, is_partitioned: bool) -> None:
    node = Node(peer, NODE)
    create(node, "queue", name="short-lived", enable_partitioning=is_partitioned)
    handle = attach(peer, "short-lived").handle
    peer.flow(handle, credit, echo=True)
    peer.expect(FLOW)
    delete(node, "short-lived")
    assert error_of(peer.expect(DETACH))[0] == "amqp:not-found"


@pytest.mark.parametrize("changed", [{"status": "ReceiveDisabled"}, {"forward_to": "orders"}])
@pytest.mark.parametrize("is_partitioned", [False, True])
def test_the_entity_is_not_received_from_any_more(peer: RawPeer, changed: dict[str, str], is_partitioned: bool) -> None:
    node = Node(peer, NODE)
    create(node, "queue", name="changed", enable_partitioning=is_partitioned)
    try:
        handle = attach(peer, "changed").handle
        peer.flow(handle, 10, echo=True)
        peer.expect(FLOW)
        update(node, "changed", **changed)
        assert error_of(peer.expect(DETACH))[0] in ("com.microsoft:entity-disabled", "amqp:not-allowed")
    finally:
        delete(node, "changed")


def test_the_entity_is_moved(peer: RawPeer) -> None:
    node = Node(peer, NODE)
    create(node, "queue", name="moved")
    fill(peer, 5, queue="moved")
    handle = attach(peer, "moved", settled=True).handle
    peer.flow(handle, 3)
    found = [peer.expect(TRANSFER) for _ in range(3)]
    waiting = attach(peer, "moved", settled=True)
    peer.flow(waiting.handle, 50)
    seen = [peer.expect(TRANSFER) for _ in range(5)]
    for to in (*range(PARTITIONS), 0):
        moved = node.ask("peeklock:move-entity", {"path": "moved", "partition": to})
        assert moved.status in (200, 400), moved
        fill(peer, 1, queue="moved")
        seen.append(peer.expect(TRANSFER))
    assert all(frame.fields[0] == waiting.theirs for frame in seen)
    assert numbers(seen) == [0, 1, 2, 3, 4, 0, 0, 0, 0, 0]
    peer.flow(handle, 20, delivery_count=3)
    found += [peer.expect(TRANSFER) for _ in range(7)]
    assert numbers(found) == numbers(seen)
    delete(node, "moved")


def test_a_worker_is_killed(tmp_path: Path) -> None:
    with Broker(tmp_path, CONFIG, workers=SEVERAL) as broker, RawPeer.connect(broker.amqp_port) as peer:
        fill(peer, 4)
        fill(peer, 12, queue="spread")
        links = [attach(peer, queue, settled=True) for queue in ("orders", "spread")]
        for link in links:
            peer.flow(link.handle, 100)
        found = [peer.expect(TRANSFER) for _ in range(16)]
        for worker in broker.worker_processes():
            worker.kill()
        with RawPeer.connect(broker.amqp_port) as other:
            eventually(lambda: _sends(other, "orders"), "sent")
            eventually(lambda: _sends(other, "spread"), "sent")
        found += [peer.expect(TRANSFER) for _ in range(2)]
        assert sorted(frame.fields[0] for frame in found[-2:]) == [link.theirs for link in links]
        assert len(numbers(browse(peer, "orders"))) == 5
        assert "Traceback" not in broker.log_file.read_text()


def _sends(peer: RawPeer, queue: str) -> bool:
    handle = peer.attach_sender(queue)
    try:
        peer.transfer(message(b"100 "), handle)
        return bool(peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED)
    except (Closed, TimeoutError):
        return False
    finally:
        peer.detach(handle)
        peer.expect(DETACH)


def test_a_client_that_does_not_read_is_not_browsed_for(broker: Broker) -> None:
    """Its window, and the broker's, bound what is made for it; what it leaves unread is no loss."""
    with RawPeer.connect(broker.amqp_port) as peer:
        fill(peer, 600, 5_000)
        peer.begin(1, incoming_window=2)
        handle = peer.attach(sender=False, channel=1, settled=True, source_=source("orders", mode=COPY))
        peer.expect(ATTACH)
        peer.flow(handle, 0xFFFFFFFF, channel=1, incoming_window=2)
        assert [number_of(peer.expect(TRANSFER)) for _ in range(2)] == [0, 1]
        peer.nothing_more(TRANSFER)
        peer.flow(handle, 0xFFFFFFFF, delivery_count=2, channel=1, incoming_window=100_000, next_incoming_id=2)
        assert [number_of(peer.expect(TRANSFER)) for _ in range(598)] == list(range(2, 600))
        assert UInt(600) == active(peer, "orders")


# --- the window of the session -------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", ["orders", "spread"])
def test_a_browser_goes_on_when_the_window_of_its_session_opens(broker: Broker, queue: str) -> None:
    with RawPeer.connect(broker.amqp_port) as filling:
        fill(filling, 10, queue=queue)
    with RawPeer.connect(broker.amqp_port) as peer:
        link = attach(peer, queue, settled=True)
        found: list[Frame] = []
        while len(found) < 10:
            peer.flow(link.handle, 10, delivery_count=0, incoming_window=4, next_incoming_id=len(found))
            found += [peer.expect(TRANSFER) for _ in range(min(4, 10 - len(found)))]
            peer.nothing_more(TRANSFER)
        assert sorted(numbers(found)) == list(range(10))


@pytest.mark.parametrize("queue", ["orders", "spread"])
def test_a_drain_of_a_browser_is_answered_while_the_window_is_closed(broker: Broker, queue: str) -> None:
    with RawPeer.connect(broker.amqp_port) as filling:
        fill(filling, 10, queue=queue)
    with RawPeer.connect(broker.amqp_port) as peer:
        link = attach(peer, queue, settled=True)
        peer.flow(link.handle, 100, drain=True, incoming_window=4)
        shown = [peer.expect(TRANSFER) for _ in range(4)]
        assert peer.expect(FLOW).fields[4:7] == [link.theirs, 100, 0]
        peer.flow(link.handle, 100, delivery_count=100, drain=True, incoming_window=100, next_incoming_id=4)
        shown += [peer.expect(TRANSFER) for _ in range(6)]
        assert peer.expect(FLOW).fields[4:7] == [link.theirs, 200, 0]
        assert sorted(numbers(shown)) == list(range(10))
