"""How much of a gateway's memory one connection can take, whatever its client sends: measured on a real broker."""

import threading
import time
from collections.abc import Iterable
from contextlib import suppress

import pytest

from protocol.codec import Array, Described, Symbol, UInt, ULong, encode
from protocol.engine.sasl import SASL_HEADER
from protocol.symbols import AMQP_HEADER
from tests.brokers import Broker
from tests.end_to_end.health import assert_unharmed, process_ids
from tests.end_to_end.raw_peer import (
    ATTACH,
    BEGIN,
    CLOSE,
    DISPOSITION,
    OPEN,
    REJECTED,
    TRANSFER,
    Frame,
    RawPeer,
    error_of,
    frame_bytes,
    message,
    performative,
)
from tests.patience import PATIENCE_S

MIB = 1 << 20
LONG = "x" * 60_000
MANY = {Symbol("a"): [None] * 4000}  # each value of which is large in memory and one byte on the wire
LIMIT = "amqp:resource-limit-exceeded"
CONFIG = """
partitions = 1
[[queues]]
name = "witness"
[[queues]]
name = "orders"
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("memory"), CONFIG) as broker:
        yield broker


@pytest.fixture(autouse=True)
def unharmed(broker):
    before = process_ids(broker)
    yield
    assert_unharmed(broker, before)


class Memory:
    """The most that the gateway's resident memory grew while this was watched."""

    def __init__(self, broker: Broker) -> None:
        self._process = broker.gateway()
        self._before = self._process.memory_info().rss
        self._ends = threading.Event()
        self.grown = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._ends.wait(0.01):
            self.grown = max(self.grown, self._process.memory_info().rss - self._before)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


def attach(handle: int, **fields: object) -> bytes:
    """An attach of a sender to orders with some of its fields made large."""
    terminus = [fields.get("address", "orders"), UInt(0), Symbol("session-end"), UInt(0), False]
    origin = [*terminus, None, None, fields.get("filter"), None, None, fields.get("capabilities")]
    return performative(
        0,
        ATTACH,
        [
            fields.get("name", f"link-{handle}"),
            UInt(handle),
            False,
            None,
            None,
            Described(ULong(0x28), origin),
            Described(ULong(0x29), [*terminus, None, fields.get("capabilities")]),
            fields.get("unsettled"),
            None,
            UInt(0),
            None,
            fields.get("capabilities"),
            fields.get("capabilities"),
            fields.get("properties"),
        ],
    )


CAPABILITIES = Array(Symbol, tuple(Symbol("c" * 30) for _ in range(300)))
LARGE = {
    "properties": {"properties": {Symbol("p"): LONG}},
    "values": {"properties": MANY},
    "filter": {"filter": {Symbol("f"): LONG}},
    "values of a filter": {"filter": MANY},
    "capabilities": {"capabilities": CAPABILITIES},
    "unsettled": {"unsettled": {"u": LONG}},
    "address": {"address": LONG[:25_000]},
    "nothing": {},
}


def say_until_cut_off(peer: RawPeer, frames: Iterable[bytes]) -> tuple[str, str]:
    """Condition and description of the close with which the broker ends it."""
    said: list[Frame] = []

    def listen() -> None:
        said.extend(peer.wait_closed())

    listener = threading.Thread(target=listen)
    listener.start()
    with suppress(OSError):
        for frame in frames:
            peer.send(frame)
    listener.join(PATIENCE_S)
    closes = [frame for frame in said if frame.code == CLOSE]
    assert closes, "the broker did not end the connection"
    return error_of(closes[0])


@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE)
def test_a_stranger_has_some_tens_of_small_links_and_then_no_connection(broker, large):
    with Memory(broker) as memory:
        for _ in range(2):
            with RawPeer.anonymous(broker.amqp_port) as peer:
                frames = (attach(handle, **large) for handle in range(9000))
                assert say_until_cut_off(peer, frames)[0] == LIMIT
    assert memory.grown < 8 * MIB


def test_a_stranger_has_a_few_sessions_and_then_no_connection(broker):
    frames = [
        performative(channel, BEGIN, [None, UInt(0), UInt(9), UInt(9), None, None, None, {Symbol("p"): LONG[:1000]}])
        for channel in range(1, 5000)
    ]
    with Memory(broker) as memory, RawPeer.anonymous(broker.amqp_port) as peer:
        assert say_until_cut_off(peer, frames)[0] == LIMIT
    assert memory.grown < 8 * MIB


def test_a_stranger_that_opens_with_much_has_no_connection(broker):
    with Memory(broker) as memory:
        for _ in range(20):
            with RawPeer(broker.amqp_port) as peer:
                peer.sasl("ANONYMOUS", b"")
                fields = ["c", "localhost", UInt(65536), None, None, None, None, None, None, MANY]
                peer.send(AMQP_HEADER + performative(0, OPEN, fields))
                assert error_of(peer.expect(CLOSE))[0] == LIMIT
    assert memory.grown < 8 * MIB


def test_a_stranger_that_sends_more_than_a_frame_of_sasl_is_cut_off(broker):
    with Memory(broker) as memory:
        for _ in range(20):
            with RawPeer(broker.amqp_port) as peer, suppress(OSError):
                init = encode(Described(ULong(0x41), [Symbol("PLAIN"), b"x" * MIB]))
                peer.send(SASL_HEADER + frame_bytes(0, init, kind=1))
                peer.wait_closed()
    assert memory.grown < 16 * MIB


def test_frames_that_never_end_take_no_more_than_one_frame_each(broker):
    peers = []
    with Memory(broker) as memory:
        try:
            for _ in range(100):
                peer = RawPeer.anonymous(broker.amqp_port)
                peers.append(peer)
                peer.send(attach(0, properties={Symbol("p"): LONG})[:-1])
            time.sleep(0.5)  # the gateway reads what there is
        finally:
            for peer in peers:
                peer.socket.close()
    assert memory.grown < 100 * 256 * 1024


def test_a_client_with_a_key_may_have_thousands_of_links_within_a_bound(broker):
    """What its links take is bounded, and what thousands of usual ones take is within that."""
    with RawPeer.connect(broker.amqp_port) as peer:
        listener = threading.Thread(target=peer.wait_closed, args=(30,))
        for channel in range(1, 11):
            peer.begin(channel)
        listener.start()
        for channel in range(11):
            for handle in range(200):
                frame = attach(handle, name=f"{channel}-{handle}", properties={Symbol("product"): "raw peer"})
                peer.send(frame[:6] + channel.to_bytes(2, "big") + frame[8:])
        peer.send(performative(0, CLOSE, []))
        listener.join()
    with Memory(broker) as memory, RawPeer.connect(broker.amqp_port) as peer:
        frames = []
        of_handles = [attach(handle, name="l0000", properties=MANY) for handle in range(250)]
        for number in range(9000):
            channel, handle = 1 + number // 250, number % 250
            if handle == 0:
                frames.append(performative(channel, BEGIN, [None, UInt(0), UInt(9), UInt(9)]))
            frame = of_handles[handle].replace(b"l0000", b"l%04d" % number)
            frames.append(frame[:6] + channel.to_bytes(2, "big") + frame[8:])
        condition, text = say_until_cut_off(peer, frames)
        assert (condition, text.split(" take ")[0]) == (LIMIT, "The sessions and links of the connection")
    assert memory.grown < 128 * MIB


def test_states_that_are_no_outcomes_are_not_kept(broker):
    """A disposition for many deliveries is kept by each of them until it is settled."""
    with RawPeer.connect(broker.amqp_port) as peer:
        sender = peer.attach_sender("orders")
        for number in range(500):
            peer.transfer(message(b"%d" % number), sender, settled=True)
        receiver = peer.attach_receiver("orders", credit=500)
        first, *_ = [peer.expect(TRANSFER).fields[1] for _ in range(500)]
        with Memory(broker) as memory:
            state = Described(ULong(0x99), [LONG])
            peer.say(DISPOSITION, True, UInt(first), UInt(first + 499), False, state)
            frames = peer.wait_closed()
        closes = [frame for frame in frames if frame.code == CLOSE]
        assert error_of(closes[0])[0] == "amqp:invalid-field"
        assert receiver
    assert memory.grown < 8 * MIB


def test_an_outcome_with_much_in_it_is_for_few_deliveries(broker):
    with RawPeer.connect(broker.amqp_port) as peer, Memory(broker) as memory:
        modified = Described(ULong(0x27), [True, False, {Symbol("x"): LONG}])
        peer.say(DISPOSITION, True, UInt(0), UInt(5000), False, modified)
        closes = [frame for frame in peer.wait_closed() if frame.code == CLOSE]
        assert error_of(closes[0])[0] == LIMIT
    assert memory.grown < 8 * MIB


# --- unfinished messages ----------------------------------------------------------------------------------------------

PART = b"x" * 60_000
BUSY = "com.microsoft:server-busy"


def attach_senders(peer: RawPeer, count: int) -> list[tuple[int, int]]:
    """Channel and handle of so many senders, a hundred in each session."""
    senders = []
    for number in range(count):
        channel = 1 + number // 100
        if number % 100 == 0:
            peer.begin(channel)
        handle = number % 100
        peer.attach_sender("orders", name=f"sender-{number}", handle=handle, channel=channel)
        senders.append((channel, handle))
    return senders


def begin_messages(peer: RawPeer, senders: list[tuple[int, int]], size: int, room: int) -> None:
    """Send the head and `size` bytes of a message of size + `room` bytes on each, part by part in turn."""
    head = b"\x00\x53\x75\xb0" + (size + room).to_bytes(4, "big")
    for number, (channel, handle) in enumerate(senders):
        fields = [UInt(handle), UInt(number % 100), b"%d" % number, UInt(0), False, True]
        peer.say(TRANSFER, *fields, channel=channel, payload=head)
    sent = 0
    while sent < size:
        part = PART[: min(len(PART), size - sent)]
        for channel, handle in senders:
            peer.say(TRANSFER, UInt(handle), None, None, None, False, True, channel=channel, payload=part)
        sent += len(part)


def finish_messages(peer: RawPeer, senders: list[tuple[int, int]], room: int) -> list[str]:
    """How each was answered: by nothing if it was accepted, else by the condition of its rejection."""
    answers = []
    for channel, handle in senders:
        peer.say(TRANSFER, UInt(handle), None, None, None, False, False, channel=channel, payload=b"y" * room)
        frame = peer.expect(DISPOSITION)
        answers.append(error_of(frame)[0] if frame.fields[4].descriptor == REJECTED else "")
    return answers


def test_unfinished_messages_take_a_bounded_part_of_memory(broker):
    """Those that are too many are refused so that a client tries again, and what it has sent in vain is not kept."""
    with RawPeer.connect(broker.amqp_port) as peer:
        senders = attach_senders(peer, 300)
        with Memory(broker) as memory:
            begin_messages(peer, senders, 900_000, 10)
            answers = finish_messages(peer, senders, 10)
        assert set(answers) == {"", BUSY}
        assert answers.count("") >= 60
        retried = [sender for sender, answer in zip(senders, answers, strict=True) if answer][:20]
        begin_messages(peer, retried, 900_000, 10)
        assert set(finish_messages(peer, retried, 10)) == {""}
        peer.close()
    assert memory.grown < 160 * MIB


def test_a_stranger_has_no_room_for_unfinished_messages(broker):
    with Memory(broker) as memory:
        peers = [RawPeer.anonymous(broker.amqp_port) for _ in range(10)]
        for peer in peers:
            for handle in range(15):
                peer.attach(sender=True, address="$cbs" if handle == 0 else "orders", handle=handle)
            parts = [
                performative(0, TRANSFER, [UInt(handle), UInt(handle), b"t", UInt(0), False, True], PART)
                for handle in range(15)
            ]
            rest = [
                performative(0, TRANSFER, [UInt(handle), None, None, None, False, True], PART) for handle in range(15)
            ]
            with suppress(OSError):
                peer.send(b"".join(parts) + b"".join(rest) * 30)
        time.sleep(1)  # the gateway reads what there is
        for peer in peers:
            peer.socket.close()
    assert memory.grown < 40 * MIB


def test_large_messages_of_a_few_senders_pass_together(tmp_path):
    size = 32 * MIB
    with (
        Broker(tmp_path, CONFIG + f"[amqp]\nmax_message_size_bytes = {size}\n") as broker,
        RawPeer.connect(broker.amqp_port) as peer,
    ):
        senders = attach_senders(peer, 4)
        begin_messages(peer, senders, size - 100, 10)
        assert finish_messages(peer, senders, 10) == [""] * 4
        peer.close()
