"""What a client's session does not take is not locked for it: others get it, and nobody counts it as delivered."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from protocol.codec import Int, Long, UInt, UShort, decode
from protocol.symbols import AMQP_HEADER
from tests.brokers import Broker
from tests.end_to_end.health import assert_unharmed, metrics, process_ids
from tests.end_to_end.raw_peer import (
    DISPOSITION,
    FLOW,
    OPEN,
    RELEASED,
    TRANSFER,
    Frame,
    RawPeer,
    body_of,
    message,
    outcome,
    performative,
)
from tests.end_to_end.raw_requests import Node
from tests.patience import PATIENCE_S, eventually
from tests.sessions.raw_sessions import accept, in_session

MESSAGES, WINDOW = 20, 5
KINDS = {"plain": "", "spread": "enable_partitioning = true", "grouped": "requires_session = true"}
USES = 24  # of a kind
CONFIG = 'partitions = 3\n[[queues]]\nname = "witness"\n' + "".join(
    f'[[queues]]\nname = "{kind}-{number}"\nlock_duration_ms = 5000\nmax_delivery_count = 3\n{more}\n'
    for kind, more in KINDS.items()
    for number in range(USES)
)
JS_WINDOW = 2048  # amqp.md 1.5


@pytest.fixture(scope="module")
def windows_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("windows"), CONFIG) as broker:
        yield broker


@pytest.fixture
def broker(windows_broker: Broker) -> Iterator[Broker]:
    before = process_ids(windows_broker)
    yield windows_broker
    assert_unharmed(windows_broker, before)


NUMBERS = {kind: count() for kind in KINDS}


@pytest.fixture(params=KINDS)
def queue(request: pytest.FixtureRequest) -> str:
    """One that no other test uses."""
    return f"{request.param}-{next(NUMBERS[request.param])}"


@pytest.fixture
def plain() -> str:
    return f"plain-{next(NUMBERS['plain'])}"


def fill(broker: Broker, queue: str, messages: int = MESSAGES, size_bytes: int = 1) -> None:
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_sender(queue)
        for first in range(0, messages, 500):
            numbers = range(first, min(messages, first + 500))
            for number in numbers:
                body = b"%06d" % number + bytes(size_bytes)
                peer.transfer(in_session("s", body) if queue.startswith("grouped") else message(body), handle)
            settled = 0
            while settled < len(numbers):
                told = peer.expect(DISPOSITION).fields
                settled += (told[1] if told[2] is None else told[2]) - told[1] + 1
        peer.close()


def attach(peer: RawPeer, queue: str, channel: int = 0, *, settled: bool = False) -> int:
    if not queue.startswith("grouped"):
        return peer.attach_receiver(queue, channel=channel, settled=settled)
    handle, _ = accept(peer, queue, "s", channel=channel, settled=settled)
    return handle


def number_of(delivery: Frame) -> int:
    return int(body_of(delivery.payload)[:6])


def failed_deliveries(delivery: Frame) -> int:
    """The delivery-count of its header (3.2.1)."""
    header, _ = decode(delivery.payload, 0)
    return int(header.value[4] or 0) if header.descriptor == 0x70 else 0


def goes_on(transfer: Frame) -> bool:
    """Further transfers of its delivery follow (2.7.5)."""
    return len(transfer.fields) > 5 and bool(transfer.fields[5])


def take(peer: RawPeer, messages: int) -> list[Frame]:
    return [peer.expect(TRANSFER) for _ in range(messages)]


def locked(broker: Broker, queue: str) -> int:
    return int(metrics(broker)["peeklock_locked_messages", queue])


def active(broker: Broker, queue: str) -> int:
    return int(metrics(broker)["peeklock_active_messages", queue])


def holding_some(broker: Broker, queue: str, *, settled: bool = False, credit: int = MESSAGES) -> tuple[RawPeer, int]:
    """A peer that has got what its window takes, though it has credit for more, and the handle of its link."""
    peer = RawPeer.connect(broker.amqp_port)
    handle = attach(peer, queue, settled=settled)
    peer.flow(handle, credit, incoming_window=WINDOW)
    take(peer, WINDOW)
    return peer, handle


def others_get(broker: Broker, queue: str, messages: int) -> None:
    """Another client gets so many, and none of them counts as delivered before."""
    with RawPeer.connect(broker.amqp_port) as other:
        handle = attach(other, queue)
        other.flow(handle, messages)
        found = take(other, messages)
        assert [failed_deliveries(each) for each in found] == [0] * messages
        other.settle(found[0].fields[1], found[-1].fields[1], state=outcome(RELEASED))
        other.expect(DISPOSITION)
        other.close()


def test_only_what_the_window_takes_is_locked(broker: Broker, queue: str) -> None:
    fill(broker, queue)
    peer, _ = holding_some(broker, queue)
    with peer:
        peer.nothing_more(TRANSFER)
        eventually(lambda: locked(broker, queue) == WINDOW, "the others are not locked")
        if not queue.startswith("grouped"):  # a group has one receiver
            others_get(broker, queue, MESSAGES - WINDOW)
        peer.close()


def test_what_was_not_sent_of_a_group_counts_as_nothing(broker: Broker) -> None:
    queue = f"grouped-{next(NUMBERS['grouped'])}"
    fill(broker, queue)
    peer, _ = holding_some(broker, queue)
    peer.socket.close()
    eventually(lambda: metrics(broker)["peeklock_active_connections",] == 0, "the connection has ended")
    with RawPeer.connect(broker.amqp_port) as other:
        handle, _ = accept(other, queue, "s", wait_ms=10_000)
        other.flow(handle, MESSAGES)
        found = take(other, MESSAGES)
        assert [number_of(each) for each in found] == list(range(MESSAGES))
        assert [failed_deliveries(each) for each in found] == [1] * WINDOW + [0] * (MESSAGES - WINDOW)
        other.close()


@pytest.mark.parametrize("of_link", [True, False], ids=["link", "session"])
def test_when_the_window_is_open_again_the_rest_comes_in_order(broker: Broker, queue: str, of_link: bool) -> None:
    """JavaScript and .NET open it by flows of the session, which name no link (2.7.4)."""
    fill(broker, queue)
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = attach(peer, queue)
        peer.flow(handle, MESSAGES, incoming_window=WINDOW)
        found = take(peer, WINDOW)
        while len(found) < MESSAGES:
            peer.nothing_more(TRANSFER, 0.05)
            windows: dict[str, Any] = {"incoming_window": WINDOW, "next_incoming_id": len(found)}
            if of_link:
                peer.flow(handle, MESSAGES - len(found), delivery_count=len(found), **windows)
            else:
                peer.flow(None, **windows)
            found += take(peer, min(WINDOW, MESSAGES - len(found)))
        peer.nothing_more(TRANSFER)
        numbers = [number_of(each) for each in found]
        assert (sorted(numbers) if queue.startswith("spread") else numbers) == list(range(MESSAGES))
        assert {failed_deliveries(each) for each in found} == {0}
        peer.close()


def test_a_window_that_is_closed_from_the_beginning_locks_nothing(broker: Broker, queue: str) -> None:
    fill(broker, queue)
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.begin(1, incoming_window=0)
        handle = attach(peer, queue, 1)
        peer.flow(handle, MESSAGES, channel=1, incoming_window=0)
        peer.nothing_more(TRANSFER)
        assert locked(broker, queue) == 0
        peer.flow(None, channel=1, incoming_window=1)
        take(peer, 1)
        peer.nothing_more(TRANSFER)
        peer.close()


def test_a_window_that_is_taken_back_is_closed(broker: Broker, plain: str) -> None:
    """The client says so when more has been sent to it than it takes."""
    fill(broker, plain, 10)
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = attach(peer, plain)
        peer.flow(handle, 100)
        take(peer, 10)
        peer.flow(handle, 90, delivery_count=10, incoming_window=2, next_incoming_id=5)
        peer.wait_until_read()
        fill(broker, plain, 3)
        peer.nothing_more(TRANSFER)
        assert locked(broker, plain) == 10
        peer.flow(None, incoming_window=3, next_incoming_id=10)
        assert [number_of(each) for each in take(peer, 3)] == [0, 1, 2]
        peer.close()


@pytest.mark.parametrize("window", [1 << 31, 0xFFFF_FFFF])
def test_a_window_of_the_largest_numbers_is_open(broker: Broker, plain: str, window: int) -> None:
    """As .NET has it."""
    fill(broker, plain)
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.begin(1, incoming_window=window)
        handle = attach(peer, plain, 1)
        peer.flow(handle, 10, channel=1, incoming_window=window)
        take(peer, 10)
        peer.flow(handle, 10, delivery_count=10, channel=1, incoming_window=window)  # before it has seen the ten
        take(peer, 10)
        peer.close()


def test_credit_that_is_set_back_gives_up_what_the_window_did_not_take(broker: Broker, queue: str) -> None:
    fill(broker, queue)
    peer, handle = holding_some(broker, queue)
    with peer:
        peer.flow(handle, 0, delivery_count=WINDOW, incoming_window=0, next_incoming_id=WINDOW)
        peer.wait_until_read()
        eventually(lambda: locked(broker, queue) == WINDOW, "the others are not locked")
        peer.flow(None, incoming_window=100, next_incoming_id=WINDOW)
        peer.nothing_more(TRANSFER)
        peer.flow(handle, 3, delivery_count=WINDOW, incoming_window=100, next_incoming_id=WINDOW)
        assert {failed_deliveries(each) for each in take(peer, 3)} == {0}
        peer.nothing_more(TRANSFER)
        peer.close()


def test_a_drain_is_answered_while_the_window_is_closed(broker: Broker, queue: str) -> None:
    fill(broker, queue)
    peer, handle = holding_some(broker, queue)
    with peer:
        credit = MESSAGES - WINDOW
        windows: dict[str, Any] = {"incoming_window": 0, "next_incoming_id": WINDOW}
        peer.flow(handle, credit, delivery_count=WINDOW, drain=True, **windows)
        assert peer.expect(FLOW).fields[5:7] == [MESSAGES, 0]
        peer.flow(None, incoming_window=100, next_incoming_id=WINDOW)
        peer.nothing_more(TRANSFER)
        peer.flow(handle, 1, delivery_count=MESSAGES, incoming_window=100, next_incoming_id=WINDOW)
        take(peer, 1)
        peer.close()


def test_a_drain_sends_what_the_window_takes_and_is_answered(broker: Broker, queue: str) -> None:
    fill(broker, queue)
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = attach(peer, queue)
        peer.flow(handle, 12, drain=True, incoming_window=WINDOW)
        assert peer.expect(FLOW).fields[5:7] == [12, 0]
        take(peer, WINDOW)
        peer.nothing_more(TRANSFER)
        eventually(lambda: locked(broker, queue) == WINDOW, "the others are not locked")
        peer.close()


def test_what_is_deleted_when_it_is_sent_stays_beyond_the_window(broker: Broker, queue: str) -> None:
    fill(broker, queue)
    peer, _ = holding_some(broker, queue, settled=True)
    with peer:
        eventually(lambda: active(broker, queue) == MESSAGES - WINDOW, "the others are there")
        if not queue.startswith("grouped"):
            others_get(broker, queue, MESSAGES - WINDOW)
        peer.flow(None, incoming_window=100, next_incoming_id=WINDOW)
        take(peer, MESSAGES - WINDOW)
        eventually(lambda: active(broker, queue) == 0, "all are delivered")
        peer.close()


def test_links_of_one_session_share_its_window(broker: Broker) -> None:
    queues = [f"{kind}-{next(NUMBERS[kind])}" for kind in ("plain", "plain", "spread", "grouped")]
    for queue in queues:
        fill(broker, queue)
    with RawPeer.connect(broker.amqp_port) as peer:
        handles = [attach(peer, queue) for queue in queues]
        for handle in handles:
            peer.flow(handle, MESSAGES, incoming_window=WINDOW)
        take(peer, WINDOW)
        peer.nothing_more(TRANSFER)
        eventually(lambda: sum(locked(broker, queue) for queue in queues) == WINDOW, "the others are not locked")
        came = WINDOW
        while came < len(queues) * MESSAGES:
            peer.flow(None, incoming_window=WINDOW, next_incoming_id=came)
            came += len(take(peer, min(WINDOW, len(queues) * MESSAGES - came)))
        peer.nothing_more(TRANSFER)
        assert [locked(broker, queue) for queue in queues] == [MESSAGES] * len(queues)
        peer.close()


def test_a_link_that_gets_nothing_keeps_no_window_from_the_others(broker: Broker, plain: str) -> None:
    empty = f"plain-{next(NUMBERS['plain'])}"
    fill(broker, plain)
    with RawPeer.connect(broker.amqp_port) as peer:
        for queue in (empty, plain):
            peer.flow(attach(peer, queue), MESSAGES, incoming_window=WINDOW)
        take(peer, WINDOW)
        peer.close()


def with_frames_of(broker: Broker, frame_bytes: int) -> RawPeer:
    """A peer whose frames are that large at most, with a session on channel 0."""
    peer = RawPeer(broker.amqp_port)
    peer.sasl_plain()
    peer.send(AMQP_HEADER + performative(0, OPEN, ["small", "localhost", UInt(frame_bytes), UShort(10)]))
    peer.expect(OPEN)
    peer.begin()
    return peer


@pytest.mark.parametrize("settled", [False, True], ids=["locked", "deleted"])
def test_large_messages_beyond_the_window_are_not_locked(broker: Broker, queue: str, settled: bool) -> None:
    """Each takes three frames or more, so that one is sent, another begins, and the others stay."""
    fill(broker, queue, 10, 2000)
    with with_frames_of(broker, 1000) as peer:
        handle = attach(peer, queue, settled=settled)
        peer.flow(handle, 10, incoming_window=WINDOW)
        frames = take(peer, WINDOW)
        peer.nothing_more(TRANSFER)
        begun = len({frame.fields[1] for frame in frames})
        assert begun == 2
        if settled:
            eventually(lambda: active(broker, queue) == 10 - begun, "the others are there")
        else:
            eventually(lambda: locked(broker, queue) == begun, "the others are not locked")
        if not queue.startswith("grouped"):
            others_get(broker, queue, 10 - begun)
        came, messages = WINDOW, []
        while len(messages) < 10:
            if came % WINDOW == 0:
                peer.flow(None, incoming_window=WINDOW, next_incoming_id=came)
            frames.append(peer.expect(TRANSFER))
            came += 1
            parts = [each for each in frames if each.fields[1] == frames[0].fields[1]]
            if not goes_on(parts[-1]):
                messages.append(b"".join(each.payload for each in parts))
                del frames[: len(parts)]
        numbers = [int(body_of(each)[:6]) for each in messages]
        assert (sorted(numbers) if queue.startswith("spread") else numbers) == list(range(10))
        assert all(len(body_of(each)) == 2006 for each in messages)
        peer.close()


@pytest.mark.parametrize("how", ["detach", "end", "close", "reset"])
def test_what_has_begun_and_does_not_go_on_is_back_with_the_link(broker: Broker, plain: str, how: str) -> None:
    """The first frames of a message are no delivery; nor is the rest that the partition handed out with it."""
    fill(broker, plain, 10, 2000)
    with with_frames_of(broker, 1000) as peer:
        handle = attach(peer, plain)
        peer.flow(handle, 10, incoming_window=2)
        take(peer, 2)
        if how == "detach":
            peer.detach(handle)
        elif how == "end":
            peer.say(0x17)
        elif how == "close":
            peer.close()
        else:
            peer.socket.close()
        eventually(lambda: locked(broker, plain) == 0, "it is back")
        others_get(broker, plain, 10)


def test_a_javascript_client_that_holds_as_many_as_it_can_leaves_the_rest_to_others(broker: Broker, queue: str) -> None:
    """Its session takes 2,048 unsettled deliveries; when less than half of the window is left, it says what is free."""
    messages = JS_WINDOW + 500
    fill(broker, queue, messages)
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.begin(1, incoming_window=JS_WINDOW)
        handle = attach(peer, queue, 1)
        peer.flow(handle, messages, channel=1, incoming_window=JS_WINDOW)
        found = take(peer, JS_WINDOW)
        peer.nothing_more(TRANSFER)
        eventually(lambda: locked(broker, queue) == JS_WINDOW, "the others are not locked")
        if not queue.startswith("grouped"):
            others_get(broker, queue, MESSAGES)
        peer.say(
            DISPOSITION, True, UInt(found[0].fields[1]), UInt(found[199].fields[1]), True, outcome(0x24), channel=1
        )
        peer.flow(None, channel=1, incoming_window=200, next_incoming_id=JS_WINDOW)
        assert {failed_deliveries(each) for each in take(peer, 200)} == {0}
        peer.nothing_more(TRANSFER)
        eventually(lambda: active(broker, queue) == messages - 200, "what was accepted is gone")
        peer.close()


def successful_requests(broker: Broker, queue: str) -> float:
    return metrics(broker)["peeklock_successful_requests_total", queue]


def test_responses_wait_for_the_window_outside_of_the_engine(broker: Broker, plain: str) -> None:
    """There they count: a client that asks and does not take the answers loses the oldest ones, as without credit."""
    fill(broker, plain, 16, 55_000)
    with RawPeer.connect(broker.amqp_port) as peer:
        node = Node(peer, f"{plain}/$management", credit=100)
        node.say("com.microsoft:peek-message", {"from-sequence-number": Long(0), "message-count": Int(16)})
        came = len([peer.expect(TRANSFER)])
        peer.flow(None, incoming_window=0, next_incoming_id=came)
        done = successful_requests(broker, plain)
        for _ in range(80):
            node.say("com.microsoft:peek-message", {"from-sequence-number": Long(0), "message-count": Int(16)})
        eventually(lambda: successful_requests(broker, plain) == done + 80, "all are answered")
        peer.nothing_more(TRANSFER)
        peer.flow(None, incoming_window=1000, next_incoming_id=came)
        ended = 0
        try:
            while True:
                ended += not goes_on(peer.expect(TRANSFER, PATIENCE_S if ended < 20 else 0.5))
        except TimeoutError:
            assert 20 <= ended <= 50, "8 MiB, of responses of nearly 256 KiB"
        peer.close()


def test_a_window_that_opens_when_it_is_used_up_is_no_bound(broker: Broker, queue: str) -> None:
    """As Python and AMQP.NET Lite do it. Messages of several frames go on across the moment."""
    fill(broker, queue, 100, 2000)
    window = 7
    with with_frames_of(broker, 1000) as peer:
        handle = attach(peer, queue)
        peer.flow(handle, 100, incoming_window=window)
        came = ended = 0
        while ended < 100:
            frame = peer.expect(TRANSFER)
            came += 1
            ended += not goes_on(frame)
            if came % window == 0:
                peer.flow(None, incoming_window=window, next_incoming_id=came)
        peer.nothing_more(TRANSFER)
        peer.close()


def test_what_a_client_does_not_read_goes_to_others(tmp_path) -> None:
    """Its socket and the gateway keep some; the others are there for another client, before the first is given up."""
    config = '[[queues]]\nname = "slow"\n[amqp]\nmax_output_buffer_bytes = 65536\n'
    with Broker(tmp_path, config) as broker:
        fill(broker, "slow", 120, 60_000)
        with RawPeer.connect(broker.amqp_port, receive_buffer_bytes=4096) as peer:
            peer.flow(attach(peer, "slow"), 120)
            with RawPeer.connect(broker.amqp_port) as other:
                handle, taken = attach(other, "slow"), 0
                while taken + locked(broker, "slow") < 120:
                    other.flow(handle, 1, delivery_count=taken)
                    delivery = other.expect(TRANSFER)
                    assert failed_deliveries(delivery) == 0
                    other.settle(delivery.fields[1])
                    other.expect(DISPOSITION)
                    taken += 1
                assert taken > 0
                written = take(peer, 120 - taken)
                assert {failed_deliveries(each) for each in written} == {0}
                other.close()
            peer.close()
