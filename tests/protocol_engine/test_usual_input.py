"""Usual input takes short cuts: the handler is told the same however the bytes come, and whatever is among them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import Described, UInt, ULong, encode
from protocol.engine.performatives import FLOW, checked
from protocol.engine.proton.incoming import WIDE_WINDOW, plain_flow
from protocol.engine.proton.library import lib
from protocol.errors import ProtocolError
from protocol.symbols import BATCH_FORMAT
from tests.end_to_end.raw_peer import DISPOSITION, TRANSFER, performative, raw_performative
from tests.examples import examples
from tests.fuzz.engine_cases import Server
from tests.fuzz.mutations import session
from tests.fuzz.test_engine_memory import attach
from tests.protocol_engine.pair import flow

ACCEPTED, TRANSACTIONAL = 0x24, 0x34
HANDLES = (1, 2)
LIMIT_BYTES = 30_000


class Peer(Server):
    """A server's end with two links on which the peer sends. It notes deliveries and settles none of them."""

    limit_bytes = LIMIT_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[Any, ...]] = []
        self.engine.push(b"".join(session("orders")[:3]))
        self.engine.pull()
        for handle in HANDLES:
            self.engine.push(attach(handle))
        self.engine.pull()

    def on_attach(self, link):
        link.accept() if link.is_sender else link.accept(self.limit_bytes, 100)

    def on_message(self, link, delivery, payload, batch, settled, state):
        self.events.append(("message", link.name, payload, batch, settled, state))

    def on_oversized(self, link, delivery, size_bytes, settled):
        self.events.append(("oversized", link.name, size_bytes, settled))

    def on_aborted(self, link):
        self.events.append(("aborted", link.name))


class Script:
    """Frames, and the events that they must cause."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.events: list[tuple[Any, ...]] = []
        self.counts = dict.fromkeys(HANDLES, 0)
        self.number = 0

    def add(self, kind: str, handle: int, size: int) -> None:
        if kind == "flow":
            self.frames.append(flow(handle, self.counts[handle], 0, False, False))
            return
        if kind == "outcome":  # of a delivery of ours: there is none
            self.frames.append(
                performative(0, DISPOSITION, [True, UInt(7), None, True, Described(ULong(ACCEPTED), [])])
            )
            return
        payload = bytes((self.number & 255,)) * size
        name, tag = f"link-{handle}", self.number.to_bytes(4, "big")
        settled, batch = kind == "settled", kind == "batch"
        state = Described(ULong(TRANSACTIONAL), [b"t"]) if kind == "transactional" else None
        fields = [UInt(handle), UInt(self.number), tag, UInt(BATCH_FORMAT if batch else 0), settled]
        self.number += 1
        self.counts[handle] += 1
        if kind in ("parts", "aborted"):
            self.frames.append(performative(0, TRANSFER, [*fields, True], payload[: size // 2]))
            rest = [UInt(handle), None, None, None, None, False, None, None, None, kind == "aborted"]
            self.frames.append(performative(0, TRANSFER, rest, payload[size // 2 :]))
        else:
            self.frames.append(performative(0, TRANSFER, [*fields, False, None, state], payload))
        if kind == "aborted":
            self.events.append(("aborted", name))
        elif size > LIMIT_BYTES:
            self.events.append(("oversized", name, size, settled))
        else:
            self.events.append(("message", name, payload, batch, settled, TRANSACTIONAL if state else 0))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["plain"] * 8 + ["settled", "transactional", "parts", "aborted", "batch", "flow", "outcome"]),
        st.sampled_from(HANDLES),
        st.sampled_from((0, 1, 10, 300, 65_000)),
    ),
    max_size=40,
)


@given(STEPS, st.lists(st.one_of(st.integers(1, 99), st.integers(1, 70_000)), max_size=60))
def test_the_handler_is_told_the_same_however_the_bytes_are_cut(steps, cuts):
    script = Script()
    for step in steps:
        script.add(*step)
    data = b"".join(script.frames)
    peer = Peer()
    for cut in [*cuts, len(data)]:
        peer.engine.push(data[:cut])
        data = data[cut:]
        peer.engine.check()
        for link in peer.engine.links.values():
            assert link.credit == lib.pn_link_credit(link.pointer)
        peer.engine.pull()
    assert peer.events == script.events


def test_a_delivery_that_is_settled_in_the_same_bytes_is_told_as_settled():
    peer = Peer()
    fields = [UInt(1), UInt(0), b"t", UInt(0), False, False]
    peer.engine.push(performative(0, TRANSFER, fields, b"m"))  # so that this form is known
    fields[1] = UInt(1)
    settle = performative(0, DISPOSITION, [False, UInt(1), UInt(1), True])
    peer.engine.push(performative(0, TRANSFER, fields, b"m") + settle)
    assert [event[4] for event in peer.events] == [False, True]


@pytest.mark.parametrize("delivery_count", [0, 3])
def test_credit_is_known_after_grants_messages_and_the_peers_flows(delivery_count):
    peer = Peer()
    link = peer.engine.links[next(iter(peer.engine.links))]
    assert link.credit == 100
    peer.engine.push(performative(0, TRANSFER, [UInt(1), UInt(0), b"t", UInt(0)], b"m"))
    assert link.credit == 99
    link.grant(5)
    assert link.credit == 104
    peer.engine.push(flow(1, 1 + delivery_count, 0, False, False))  # the peer gives back some of its credit
    assert link.credit == 104 - delivery_count == lib.pn_link_credit(link.pointer)


# -- flows that need not be read

UINTS = st.one_of(st.sampled_from((0, 1, 255, 256, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF)), st.integers(0, 5_000))
FIELDS = st.lists(st.one_of(st.none(), UINTS.map(UInt), st.booleans(), st.just({})), min_size=0, max_size=12)


@settings(max_examples=examples(500))
@given(FIELDS, st.lists(st.tuples(st.integers(8, 60), st.integers(0, 255)), max_size=2), st.integers(-2, 2))
def test_a_flow_that_is_not_read_is_valid_and_asks_for_nothing(fields, flips, miscounted):
    content = b"".join(map(encode, fields))
    frame = bytearray(raw_performative(0, FLOW, content, max(0, len(fields) + miscounted)))
    for at, value in flips:
        if at < len(frame):
            frame[at] = value
    data = bytes(frame)
    plain = plain_flow(data, 0, len(data))
    if plain is None:
        return
    _, window, _, _, _, _, credit, _, drain, echo, *_ = checked(memoryview(data), 11, FLOW)
    assert not drain
    assert not echo
    assert credit is None or credit <= 0x7FFF_FFFF
    assert (plain.lastindex is not None) is (window >= WIDE_WINDOW)


@pytest.mark.parametrize("field", ["drain", "echo", "credit", "null", "type"])
def test_a_flow_that_must_be_read_is_not_taken_for_a_plain_one(field):
    fields: list[Any] = [UInt(1), UInt(2000), UInt(0), UInt(2**31), UInt(0), UInt(300), UInt(9), None, False, False]
    frame = performative(0, FLOW, fields)
    assert plain_flow(frame, 0, len(frame))
    at, value = {
        "drain": (8, True),
        "echo": (9, True),
        "credit": (6, UInt(2**31)),
        "null": (1, None),
        "type": (4, "handle"),
    }[field]
    fields[at] = value
    frame = performative(0, FLOW, fields)
    assert not plain_flow(frame, 0, len(frame))


def test_a_malformed_flow_is_still_refused():
    peer = Peer()
    with pytest.raises(ProtocolError):
        peer.engine.push(performative(0, FLOW, [UInt(1), None, UInt(0), UInt(1)]))


def test_the_end_of_a_delivery_comes_alone():
    script, peer = Script(), Peer()
    script.add("parts", 1, 300)
    for frame in script.frames:
        peer.engine.push(frame)
    assert peer.events == script.events
