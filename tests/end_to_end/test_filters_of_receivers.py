"""Filters of receivers: those in place are in the answer to the attach, and selectors select (AMQP 1.0 3.5.8)."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.codec import Described, Int, Symbol, UByte, ULong
from tests.brokers import Broker
from tests.caller import WORKERS
from tests.end_to_end.health import assert_unharmed, process_ids
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    BATCH_FORMAT,
    DETACH,
    DISPOSITION,
    MODIFIED,
    REJECTED,
    TRANSFER,
    Frame,
    RawPeer,
    batch,
    message,
    outcome,
    source,
)
from tests.end_to_end.raw_requests import Node
from tests.end_to_end.test_browsers import (
    COPY,
    SESSION_FILTER,
    Attached,
    attach,
    browse,
    delivery_count,
    drain,
    numbers,
    receive_all,
)
from tests.end_to_end.test_catalog_at_run_time import NODE, create, delete
from tests.end_to_end.test_receiving import number_of, purge
from tests.patience import PATIENCE_S, eventually

PARTITIONS = 4
SEVERAL = 2  # workers
CONFIG = f"""
partitions = {PARTITIONS}

[[queues]]
name = "witness"

[[queues]]
name = "orders"

[[queues]]
name = "invoices"

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

[[queues]]
name = "short"
lock_duration_ms = 5000

[[topics]]
name = "news"

  [[topics.subscriptions]]
  name = "all"

[[topics]]
name = "spread-news"
enable_partitioning = true

  [[topics.subscriptions]]
  name = "all"
"""
NAME, CODE = Symbol("apache.org:selector-filter:string"), ULong(0x0000468C00000004)
RED, BLUE = "color = 'red'", "color = 'blue'"
COLORS = ("red", "blue", "green")
QUEUES = ("orders", "spread")


def by(selector: str, key: str = "jms-selector", descriptor: Any = CODE) -> dict[Any, Any]:
    return {Symbol(key): Described(descriptor, selector)}


@pytest.fixture(scope="module")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("selectors"), CONFIG, workers=WORKERS and SEVERAL) as broker:
        yield broker


@pytest.fixture
def broker(shared_broker: Broker) -> Iterator[Broker]:
    before = process_ids(shared_broker)
    yield shared_broker
    for queue in (*QUEUES, "sessions", "spread-sessions", "short", "news/Subscriptions/all"):
        purge(shared_broker, queue)
    assert_unharmed(shared_broker, before)


@pytest.fixture
def peer(broker: Broker) -> Iterator[RawPeer]:
    with RawPeer.connect(broker.amqp_port) as peer:
        yield peer


def put(peer: RawPeer, address: str, *colors: str, first: int = 0, session: str | None = None) -> None:
    """Messages with these colors, whose bodies begin with their number."""
    handle = peer.attach_sender(address)
    properties = [] if session is None else [None] * 10 + [session]
    for number, color in enumerate(colors, first):
        application = {"color": color, "n": Int(number)}
        peer.transfer(message(b"%d " % number, properties=properties, application=application), handle)
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    peer.detach(handle)
    peer.expect(DETACH)


def refused(peer: RawPeer, address: str, filters: dict[Any, Any], mode: Any = None) -> str:
    peer.attach(sender=False, source_=source(address, mode=mode, filters=filters))
    return peer.refusal()[0]


def take(peer: RawPeer, link: Attached, count: int, before: int = 0) -> list[Frame]:
    """So many messages of this link come, and no more."""
    peer.flow(link.handle, 100, delivery_count=before)
    found = [peer.expect(TRANSFER) for _ in range(count)]
    assert all(frame.fields[0] == link.theirs for frame in found)
    peer.nothing_more(TRANSFER, 0.1)
    return found


def complete(peer: RawPeer, frames: list[Frame]) -> None:
    for frame in frames:
        peer.settle(frame.fields[1])
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED


# --- the answer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, COPY])
@pytest.mark.parametrize("queue", QUEUES)
def test_the_answer_has_the_filters_that_are_in_place(peer: RawPeer, queue: str, mode: Any) -> None:
    for filters in (by(RED), by(RED, "selector", NAME), by(RED, str(NAME), CODE), by(" "), {NAME: RED}):
        odd = {Symbol("odd"): Described(Symbol("odd:filter"), "x"), Symbol("bare"): "y", Symbol("none"): None}
        assert attach(peer, queue, mode, filters={**odd, **filters}).filters == filters
        assert not attach(peer, queue, mode, filters=odd).filters
    assert not attach(peer, queue, mode).filters


@pytest.mark.parametrize("queue", ["sessions", "spread-sessions"])
def test_the_answer_of_a_session_has_both(peer: RawPeer, queue: str) -> None:
    for session in ("s", Described(ULong(0x137000000C), "s")):
        link = attach(peer, queue, filters={SESSION_FILTER: session, Symbol("odd"): 1, **by(RED)})
        assert link.filters == {SESSION_FILTER: session, **by(RED)}
        link = attach(peer, queue, None, filters={SESSION_FILTER: session, Symbol("odd"): 1, **by(RED)})
        assert link.filters == {SESSION_FILTER: session, **by(RED)}
        peer.detach(link.handle)
        peer.expect(DETACH)


def test_nodes_of_requests_have_no_filters(peer: RawPeer) -> None:
    for address in ("$cbs", "orders/$management"):
        assert not attach(peer, address, None, filters=by(RED)).filters


@pytest.mark.parametrize("mode", [None, COPY])
@pytest.mark.parametrize(
    ("filters", "condition"),
    [
        (by("color ="), "amqp:invalid-field"),
        (by("color = 'red' AND"), "amqp:invalid-field"),
        (by("foo(color)"), "amqp:invalid-field"),
        (by(7), "amqp:invalid-field"),  # type: ignore[arg-type] # a client may send anything
        ({NAME: Int(7)}, "amqp:invalid-field"),
        (by("n = 1 OR " * 2000 + "n = 2"), "amqp:not-implemented"),
        (by("JMSReplyTo = 'x'"), "amqp:not-implemented"),
        ({Symbol("no-local"): Described(ULong(0x0000468C00000003), "NoLocalFilter{}")}, "amqp:not-implemented"),
        ({Symbol("x"): Described(Symbol("apache.org:no-local-filter:list"), [])}, "amqp:not-implemented"),
    ],
)
def test_what_cannot_be_in_place_is_refused(peer: RawPeer, filters: Any, condition: str, mode: Any) -> None:
    for queue in QUEUES:
        assert refused(peer, queue, filters, mode) == condition


def test_a_wrong_selector_is_named(peer: RawPeer) -> None:
    peer.attach(sender=False, source_=source("orders", filters=by("color == 'red'")))
    assert "column=8" in peer.refusal()[1]


# --- what is selected ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", [*QUEUES, "news", "spread-news"])
def test_what_is_not_selected_stays_for_others_uncounted(peer: RawPeer, queue: str) -> None:
    put(peer, queue, *COLORS * 4)
    address = f"{queue}/Subscriptions/all" if "news" in queue else queue
    found = take(peer, attach(peer, address, None, filters=by(RED)), 4)
    assert sorted(numbers(found)) == [0, 3, 6, 9]
    complete(peer, found)
    other = attach(peer, address, None, filters=by("color = 'blue' AND n > 5", "selector", NAME))
    found = take(peer, other, 2)
    assert sorted(numbers(found)) == [7, 10]
    complete(peer, found)
    rest = receive_all(peer, address, 6)
    assert sorted(numbers(rest)) == [1, 2, 4, 5, 8, 11]
    assert all(delivery_count(frame) == 0 for frame in rest)


@pytest.mark.parametrize("queue", QUEUES)
def test_later_messages_are_selected_as_they_come(broker: Broker, peer: RawPeer, queue: str) -> None:
    links = {color: attach(peer, queue, None, filters=by(f"color = '{color}'")) for color in ("red", "blue")}
    for link in links.values():
        peer.flow(link.handle, 50)
    with RawPeer.connect(broker.amqp_port) as other:
        for number in range(20):
            color = COLORS[number % 3]
            put(other, queue, color, first=number)
            if color != "green":
                frame = peer.expect(TRANSFER)
                assert (frame.fields[0], number_of(frame)) == (links[color].theirs, number)
                complete(peer, [frame])
    peer.nothing_more(TRANSFER)
    assert len(receive_all(peer, queue, 6)) == 6


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("credit", [1, 3, 100])
def test_a_drain_ends_although_there_are_others(peer: RawPeer, queue: str, credit: int) -> None:
    put(peer, queue, *COLORS * 4)
    link = attach(peer, queue, None, filters=by(RED))
    found: list[Frame] = []
    drains = 0
    while len(found) < 4:
        found += drain(peer, link, credit, drains * credit)
        drains += 1
        assert drains <= 4
    assert sorted(numbers(found)) == [0, 3, 6, 9]
    assert drain(peer, link, credit, drains * credit) == []


@pytest.mark.parametrize("queue", QUEUES)
def test_receive_and_delete_deletes_no_other(peer: RawPeer, queue: str) -> None:
    put(peer, queue, *COLORS * 3)
    link = attach(peer, queue, None, settled=True, filters=by(RED))
    assert sorted(numbers(take(peer, link, 3))) == [0, 3, 6]
    assert sorted(numbers(receive_all(peer, queue, 6))) == [1, 2, 4, 5, 7, 8]


@pytest.mark.parametrize("queue", QUEUES)
def test_browsers_select_and_take_nothing(peer: RawPeer, queue: str) -> None:
    put(peer, queue, *COLORS * 3)
    for settled in (True, False):
        assert sorted(numbers(browse(peer, queue, settled=settled, filters=by(BLUE)))) == [1, 4, 7]
    waiting = attach(peer, queue, settled=True, filters=by(RED))
    assert sorted(numbers(take(peer, waiting, 3))) == [0, 3, 6]
    put(peer, queue, "blue", "red", first=9)
    assert number_of(peer.expect(TRANSFER)) == 10
    assert len(receive_all(peer, queue, 11)) == 11


def test_what_is_abandoned_comes_back_and_what_expires_too(peer: RawPeer) -> None:
    put(peer, "short", "red", "red", "blue")
    link = attach(peer, "short", None, filters=by(RED))
    first, second = take(peer, link, 2)
    peer.settle(first.fields[1], state=outcome(MODIFIED, True, False))
    again = [peer.expect(TRANSFER)]
    assert [(number_of(frame), delivery_count(frame)) for frame in again] == [(0, 1)]
    peer.expect(DISPOSITION)
    complete(peer, again)
    late = peer.expect(TRANSFER)  # its lock has ended
    assert (number_of(late), delivery_count(late)) == (1, 1)
    peer.settle(second.fields[1])
    peer.expect(DISPOSITION)
    complete(peer, [late])


def test_dead_letters_are_selected_by_their_reasons(peer: RawPeer) -> None:
    put(peer, "orders", "red", "blue")
    for number, frame in enumerate(take(peer, attach(peer, "orders", None), 2)):
        info = {Symbol("DeadLetterReason"): f"reason-{number}"}
        error = Described(ULong(0x1D), [Symbol("com.microsoft:dead-letter"), None, info])
        peer.settle(frame.fields[1], state=outcome(REJECTED, error))
        peer.expect(DISPOSITION)
    link = attach(peer, "orders/$DeadLetterQueue", None, filters=by("DeadLetterReason = 'reason-1'"))
    found = take(peer, link, 1)
    assert numbers(found) == [1]
    complete(peer, found)
    receive_all(peer, "orders/$DeadLetterQueue", 1)


@pytest.mark.parametrize("queue", QUEUES)
def test_headers_as_jms_names_them(peer: RawPeer, queue: str) -> None:
    handle = peer.attach_sender(queue)
    for number in range(4):
        properties = [f"ID:{number}", None, None, f"type-{number}", None, f"corr-{number}"]
        header = [number % 2 == 0, UByte(number)]
        peer.transfer(message(b"%d " % number, properties=properties, header=header), handle)
        peer.expect(DISPOSITION)
    for selector, expected in {
        "JMSCorrelationID = 'corr-1'": [1],
        "JMSType LIKE 'type-_' AND JMSPriority > 2": [3],
        "JMSMessageID IN ('ID:0', 'ID:2', 'ID:7')": [0, 2],
        "JMSDeliveryMode = 'NON_PERSISTENT'": [1, 3],
        "\"amqp.correlation_id\" = 'corr-2' OR amqp.priority = 0": [0, 2],
        "JMSTimestamp IS NOT NULL": [],
    }.items():
        assert sorted(numbers(browse(peer, queue, filters=by(selector)))) == expected
    receive_all(peer, queue, 4)


@pytest.mark.parametrize("queue", ["sessions", "spread-sessions"])
def test_sessions(peer: RawPeer, queue: str) -> None:
    put(peer, queue, *COLORS * 2, session="a")
    put(peer, queue, *COLORS, session="b", first=6)
    filters = {SESSION_FILTER: "a", **by(RED)}
    assert numbers(browse(peer, queue, filters=filters)) == [0, 3]
    link = attach(peer, queue, None, filters=filters)
    complete(peer, take(peer, link, 2))
    peer.detach(link.handle)
    peer.expect(DETACH)
    assert numbers(receive_all(peer, queue, 4, filters={SESSION_FILTER: "a"})) == [1, 2, 4, 5]
    link = attach(peer, queue, None, filters={SESSION_FILTER: None, **by(BLUE)})
    assert link.filters == {SESSION_FILTER: "b", **by(BLUE)}
    assert numbers(take(peer, link, 1)) == [7]


# --- who competes, and what changes ---------------------------------------------------------------------------------


class Consumer(threading.Thread):
    """Receives and completes until it is stopped; what it got, by color."""

    def __init__(self, port: int, queue: str, selector: str | None) -> None:
        super().__init__()
        self.port, self.queue, self.selector = port, queue, selector
        self.got: list[tuple[str, int]] = []
        self.stopped = threading.Event()
        self.start()

    def run(self) -> None:
        with RawPeer.connect(self.port) as peer:
            link = attach(peer, self.queue, None, filters=by(self.selector) if self.selector else None)
            peer.flow(link.handle, 10)
            while not self.stopped.is_set():
                try:
                    frame = peer.expect(TRANSFER, 0.1)
                except TimeoutError:
                    continue
                color = COLORS[number_of(frame) % 3]
                self.got.append((color, number_of(frame)))
                complete(peer, [frame])
                peer.flow(link.handle, 10, delivery_count=len(self.got))
            peer.close()


@pytest.mark.parametrize("queue", QUEUES)
def test_many_compete_and_each_message_goes_to_one_that_selects_it(broker: Broker, peer: RawPeer, queue: str) -> None:
    selectors = [RED, RED, "color IN ('blue', 'green')", "n >= 0", None]
    consumers = [Consumer(broker.amqp_port, queue, selector) for selector in selectors]
    count = 300
    try:
        put(peer, queue, *[COLORS[number % 3] for number in range(count)])
        eventually(lambda: sum(len(each.got) for each in consumers) >= count, "all received")
    finally:
        for each in consumers:
            each.stopped.set()
        for each in consumers:
            each.join()
    got = Counter(number for each in consumers for _, number in each.got)
    assert got == Counter(range(count))
    assert {color for each in consumers[:2] for color, _ in each.got} <= {"red"}
    assert "red" not in {color for color, _ in consumers[2].got}
    assert all(each.got for each in consumers[2:])


def test_a_search_through_a_long_queue_holds_nobody_up(broker: Broker, peer: RawPeer) -> None:
    """100,000 messages, of which one is selected. Meanwhile others send and receive, on this queue, too."""
    count = 100_000
    handle = peer.attach_sender("orders")
    other = message(b"1 ", application={"color": "blue"})
    for _ in range(count // 500):
        peer.transfer(batch(*[other] * 500), handle, message_format=BATCH_FORMAT)
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    put(peer, "orders", "red", first=7)
    link = attach(peer, "orders", None, filters=by(RED))
    peer.flow(link.handle, 10)
    longest_s = 0.0
    found: list[Frame] = []
    with RawPeer.connect(broker.amqp_port) as beside:
        plain = attach(beside, "orders", None)
        elsewhere = attach(beside, "invoices", None)
        beside.flow(elsewhere.handle, 1000)
        deadline, rounds = time.monotonic() + PATIENCE_S, 0
        while not found and time.monotonic() < deadline:
            started = time.monotonic()
            beside.flow(plain.handle, 1, delivery_count=rounds)
            frame = beside.expect(TRANSFER)
            complete(beside, [frame])
            put(beside, "invoices", "green")
            complete(beside, [beside.expect(TRANSFER)])
            rounds += 1
            longest_s = max(longest_s, time.monotonic() - started)
            try:
                found.append(peer.expect(TRANSFER, 0.001))
            except TimeoutError:
                continue
    assert numbers(found) == [7]
    assert rounds >= 3
    assert longest_s < 2, "usually some 50 ms; it depends on the load of the machine"
    complete(peer, found)
    put(peer, "orders", "red", first=8)  # now only what comes is looked at
    assert number_of(peer.expect(TRANSFER)) == 8


def test_the_entity_is_moved(peer: RawPeer) -> None:
    node = Node(peer, NODE)
    create(node, "queue", name="moved")
    put(peer, "moved", *COLORS)
    link = attach(peer, "moved", None, filters=by(RED))
    complete(peer, take(peer, link, 1))
    for to in (*range(PARTITIONS), 0):
        moved = node.ask("peeklock:move-entity", {"path": "moved", "partition": to})
        assert moved.status in (200, 400), moved
        put(peer, "moved", "blue", "red", first=10 * to)
        frame = peer.expect(TRANSFER)
        assert (frame.fields[0], number_of(frame)) == (link.theirs, 10 * to + 1)
        complete(peer, [frame])
    peer.nothing_more(TRANSFER)
    delete(node, "moved")


@pytest.mark.parametrize("queue", QUEUES)
def test_a_worker_is_killed(tmp_path: Path, queue: str) -> None:
    with Broker(tmp_path, CONFIG, workers=SEVERAL) as broker, RawPeer.connect(broker.amqp_port) as peer:
        put(peer, queue, *COLORS * 2)
        link = attach(peer, queue, None, filters=by(RED))
        assert sorted(numbers(take(peer, link, 2))) == [0, 3]
        for worker in broker.worker_processes():
            worker.kill()
        # Their locks have ended with the workers; what is selected comes again, and nothing else.
        again = [peer.expect(TRANSFER) for _ in range(2)]
        assert sorted(numbers(again)) == [0, 3]
        peer.nothing_more(TRANSFER)
        complete(peer, again)
        assert sorted(numbers(receive_all(peer, queue, 4))) == [1, 2, 4, 5]
        assert "Traceback" not in broker.log_file.read_text()
