"""The work that a peer's bytes cost: linear in their number, and done in steps between which others are served."""

import time
from collections.abc import Callable, Iterator

import pytest

from protocol.codec import UInt
from protocol.engine import engine as engine_module
from protocol.engine.deliveries import Delivery, settle
from protocol.engine.links import Link
from protocol.engine.proton import incoming as incoming_module
from protocol.engine.proton.incoming import MAX_EMPTY_BEFORE_OPEN, MAX_OPEN_BYTES, FrameWalk, IllegalState, WorkTooLarge
from protocol.engine.proton.native import native
from protocol.errors import ProtocolError
from protocol.symbols import AMQP_HEADER
from tests.end_to_end.raw_peer import ACCEPTED, BEGIN, DISPOSITION, FLOW, HEARTBEAT, OPEN, message, outcome
from tests.fuzz.engine_cases import Server
from tests.hostile_input import (
    HOSTILE,
    OPENED,
    TOLD_AGAIN,
    WINDOW,
    WITH_RIGHTS,
    Hostile,
    attach,
    detach,
    extended,
    flow_with,
    nested,
    say,
    telling_again,
)
from tests.protocol_engine.pair import Side

KIB = 1 << 10
WITH_POINTER = ("message", "oversized", "crowded", "outcome")
ALL = {**HOSTILE, **WITH_RIGHTS}
# All of these take less than 1 us; what is not linear takes more for so many bytes, however fast the machine is.
MOST_US_PER_BYTE = 5.0
MOST_STEP_S = 0.05  # one takes some milliseconds


@pytest.fixture(params=["extension", "pure"], autouse=True)
def _implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pure":
        monkeypatch.setattr(engine_module, "native", None)
        monkeypatch.setattr(incoming_module, "native", None)
        monkeypatch.setattr(incoming_module, "_walk_usual", None)
    elif native is None:
        pytest.skip("the extension is not built, or is switched off")


def steps(server: Server, data: bytes) -> Iterator[float]:
    """Push the data as a gateway does; the CPU seconds of each step. Ends at an error of the peer's."""
    goes_on = True
    while goes_on:
        began = time.process_time()
        try:
            goes_on = server.engine.push_some(data)
        except ProtocolError:
            goes_on = False
        server.engine.pull()
        yield time.process_time() - began
        data = b""


def seconds(hostile: Hostile, size: int) -> tuple[float, float]:
    """CPU seconds for so many bytes in one read: all of them, and those of the longest step."""
    found = []
    for _ in range(2):
        server = Server()
        server.engine.push(OPENED + hostile.before)
        server.engine.pull()
        each = [*steps(server, hostile.of(size))]
        found.append((sum(each), max(each)))
        server.engine.free()
    return min(all_ for all_, _ in found), min(longest for _, longest in found)


@pytest.mark.parametrize("hostile", ALL.values(), ids=ALL)
def test_the_work_is_linear_in_the_bytes(hostile: Hostile) -> None:
    few, _ = seconds(hostile, 16 * KIB)
    many, longest = seconds(hostile, 256 * KIB)
    assert longest < MOST_STEP_S
    assert many * 1e6 < MOST_US_PER_BYTE * 256 * KIB
    assert many < 3 * 16 * max(few, 0.001)


def test_a_large_read_of_usual_messages_is_one_step_of_the_walk() -> None:
    walk = FrameWalk(65536)
    walk.feed(OPENED + attach(0))
    usual = WITH_RIGHTS["tiny messages"].of(256 * KIB)
    assert walk.feed(usual) == usual
    assert not walk.is_interrupted


@pytest.mark.parametrize("hostile", ALL.values(), ids=ALL)
@pytest.mark.parametrize("size", [1, 50, 5000])
def test_it_makes_no_difference_how_the_bytes_come(hostile: Hostile, size: int) -> None:
    data = hostile.before + hostile.of(20 * KIB)
    told = []
    for each in (len(data), size):
        side = Side(server=True)
        side.engine.push(OPENED)
        side.engine.pull()
        fault = ""
        try:
            for at in range(0, len(data), each):
                goes_on = side.engine.push_some(data[at : at + each])
                while goes_on:
                    side.engine.pull()
                    goes_on = side.engine.push_some()
                side.engine.pull()
        except ProtocolError as error:
            fault = str(error).partition(" at byte")[0]
        # Without pointers, and whether a message was settled, perhaps by a disposition behind it.
        events = [event[:1] + event[2:-1] if event[0] in WITH_POINTER else event for event in side.events]
        told.append((events, fault, side.engine.fault()))
        side.engine.free()
    assert told[0] == told[1]


def test_bytes_may_come_while_there_is_more_to_do() -> None:
    server = Server()
    server.engine.push(OPENED)
    server.engine.pull()
    data = HOSTILE["links in an unusual form"].of(8 * KIB)
    assert server.engine.push_some(data)
    for _ in range(3):
        assert server.engine.push_some(data)
        server.engine.pull()
    while server.engine.push_some():
        server.engine.pull()
    assert not server.engine.links
    server.engine.free()


def test_a_frame_that_comes_byte_by_byte_is_looked_at_once() -> None:
    """Else each byte would cost what the whole frame does."""
    walk = FrameWalk(1 << 20)
    walk.feed(OPENED)
    frame = flow_with(b"\xb0" + (900_000).to_bytes(4, "big") + bytes(900_000))

    def cpu_seconds(count: int) -> float:
        began = time.process_time()
        for at in range(count):
            assert walk.feed(frame[at : at + 1]) == b""
        return time.process_time() - began

    cpu_seconds(12)
    walk.feed(frame[12:800_000])
    pieces = [frame[at : at + 1] for at in range(800_000, 820_000)]
    began = time.process_time()
    for piece in pieces:
        assert walk.feed(piece) == b""
    assert time.process_time() - began < 0.3  # 20,000 copies of 800,000 bytes take seconds
    assert walk.feed(frame[820_000:]) == frame


# -- before the open


def test_few_frames_may_come_before_the_open() -> None:
    server = Server()
    server.engine.push(AMQP_HEADER + HEARTBEAT * (MAX_EMPTY_BEFORE_OPEN - 1) + extended(HEARTBEAT))
    with pytest.raises(IllegalState, match="not open"):
        server.engine.push(2 * HEARTBEAT)
    server.engine.free()


@pytest.mark.parametrize("form", [HEARTBEAT, extended(HEARTBEAT)])
def test_a_stranger_that_sends_only_empty_frames_is_not_heard_for_long(form: bytes) -> None:
    server = Server()
    began = time.process_time()
    with pytest.raises(IllegalState):
        server.engine.push(AMQP_HEADER + form * 100_000)
    assert time.process_time() - began < 0.1
    server.engine.free()


def test_an_open_has_a_limit_of_its_own() -> None:
    """The peer was told of no other size yet (2.4.1)."""
    large = say(OPEN, "x" * MAX_OPEN_BYTES)
    walk = FrameWalk(1 << 20)
    walk.feed(AMQP_HEADER + large[:100])
    assert isinstance(walk.error, ProtocolError)
    walk = FrameWalk(1 << 20)
    assert walk.feed(OPENED) == OPENED
    assert walk.feed(flow_with(b"\xb0" + (MAX_OPEN_BYTES).to_bytes(4, "big") + bytes(MAX_OPEN_BYTES)))


# -- dispositions for many deliveries


class Sending(Server):
    """Sends `count` messages on the link that has credit, and leaves them unsettled unless `settles`."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self.settles = False
        self.outcomes = 0

    def on_flow(self, link: Link) -> None:
        while self._count and link.credit > 0:
            self._count -= 1
            link.send(self._count.to_bytes(16, "big"), message(), b"", 0, False)

    def on_outcome(self, link: Link, delivery: Delivery, token: bytes, state: int, settled: bool) -> None:
        self.outcomes += 1
        if self.settles:
            settle(delivery, ACCEPTED)


def sending(count: int) -> Sending:
    server = Sending(count)
    server.engine.push(OPENED + attach(1, sender=False))
    server.engine.pull()
    server.engine.push(say(FLOW, UInt(0), WINDOW, UInt(0), WINDOW, UInt(1), UInt(0), UInt(count)))
    server.engine.pull()
    return server


@pytest.mark.parametrize("again", TOLD_AGAIN.values(), ids=TOLD_AGAIN)
def test_unsettled_deliveries_are_not_told_of_again_and_again(again: Callable[[int], bytes]) -> None:
    """Each disposition costs what its deliveries do, and has some 30 bytes."""
    server = sending(20_000)
    began = time.process_time()
    with pytest.raises(WorkTooLarge):
        server.engine.push(again(20_000) * 1000)
    assert time.process_time() - began < 2.0  # each takes 20 ms
    server.engine.free()


def test_one_step_tells_of_some_thousand_deliveries() -> None:
    server = sending(20_000)
    longest = max(steps(server, telling_again(20_000) * 5))
    assert longest < 5 * MOST_STEP_S
    server.engine.free()


def test_a_client_may_tell_of_each_delivery_twice_and_of_ranges_that_do_not_exist() -> None:
    server = sending(20_000)
    server.settles = True
    accepted = outcome(ACCEPTED)
    each = [say(DISPOSITION, True, UInt(at), UInt(at + 99), False, accepted) for at in range(0, 20_000, 100)]
    settled = [say(DISPOSITION, True, UInt(at), UInt(at + 99), True) for at in range(0, 20_000, 100)]
    server.engine.push(b"".join(each) + b"".join(settled))
    assert server.outcomes == 20_000
    server.engine.push(say(DISPOSITION, True, UInt(0), UInt(20_000 - 1), True, accepted) * 10)
    server.engine.free()


def test_deliveries_of_the_peer_are_not_told_of_again_and_again_either() -> None:
    server = Server()
    server.on_message = lambda *_: None
    for data in (OPENED, attach(0), WITH_RIGHTS["tiny messages"].of(600 * KIB)):
        for _ in steps(server, data):
            pass
    began = time.process_time()
    with pytest.raises(WorkTooLarge):
        server.engine.push(say(DISPOSITION, False, UInt(0), UInt(20_000 - 1), False, outcome(ACCEPTED)) * 1000)
    assert time.process_time() - began < 2.0
    server.engine.free()


def test_nested_values_of_one_frame_are_counted_with_their_descriptors() -> None:
    described = b"\x00\x44" * 28 + b"\x40"
    many = b"\xd0" + (4 + 900 * len(described)).to_bytes(4, "big") + (900).to_bytes(4, "big") + described * 900
    server = Server()
    with pytest.raises(ProtocolError, match="number of values"):
        server.engine.push(OPENED + flow_with(many))
    server.engine.free()
    assert nested(1)


# -- what a peer has opened does not make other frames dearer


@pytest.mark.parametrize("by_link", [False, True])
def test_a_flow_costs_the_same_with_many_sessions(by_link: bool) -> None:
    """Its session and its link are found at once, also when it is answered."""

    def flows(count: int) -> float:
        server = Server()
        server.engine.push(OPENED)
        for channel in range(1, count):
            server.engine.push(say(BEGIN, None, UInt(0), WINDOW, WINDOW, channel=channel))
            frame = attach(0, sender=False)
            server.engine.push(frame[:6] + channel.to_bytes(2, "big") + frame[8:])
            server.engine.pull()
        of_link = (UInt(0), UInt(0), UInt(0)) if by_link else (None, None, None)
        flow = say(FLOW, UInt(0), WINDOW, UInt(0), WINDOW, *of_link, None, False, True, channel=count - 1)
        spent = sum(steps(server, flow * 2000))
        server.engine.free()
        return spent

    few, many = min(flows(2) for _ in range(2)), min(flows(2000) for _ in range(2))
    assert many < 2 * few + 0.02


def test_a_detach_costs_the_same_with_many_unsettled_deliveries() -> None:
    def detaches(count: int) -> float:
        server = sending(count)
        spent = sum(steps(server, (attach(7, sender=False) + detach(7)) * 500))
        server.engine.free()
        return spent

    few, many = min(detaches(1) for _ in range(2)), min(detaches(20_000) for _ in range(2))
    assert many < 2 * few + 0.02
