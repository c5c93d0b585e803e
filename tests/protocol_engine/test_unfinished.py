"""Unfinished messages: bounded for a connection and in all, and their room is given back however they end."""

from random import Random

import pytest

from protocol.codec import UInt
from protocol.engine.deliveries import forget
from protocol.engine.proton.native import address_of, native
from protocol.engine.unfinished import Pool, Unfinished
from protocol.errors import ProtocolError
from tests.end_to_end.raw_peer import DETACH, END, TRANSFER, performative
from tests.fuzz.engine_cases import Server
from tests.fuzz.mutations import session
from tests.fuzz.test_engine_memory import attach

PART = b"x" * 1000


class Peer(Server):
    """A server's end that is told frames, with its own share of a pool."""

    is_native = False  # True: links have an Incoming

    def __init__(self, pool, maximum_bytes=100_000):
        super().__init__()
        self.events = []
        self.engine.unfinished = Unfinished(pool, maximum_bytes)
        self.number = 0
        self.say(b"".join(session("orders")[:3]))

    def on_attach(self, link):
        super().on_attach(link)
        if self.is_native:
            incoming = native.Incoming(address_of(link.pointer), self, link.max_message_bytes)
            link.engine.take_usual(link, incoming)

    def on_gathering(self):
        raise AssertionError("what comes is no usual message")

    def say(self, data):
        self.engine.push(data)
        self.engine.pull()

    def attach(self, *handles):
        for handle in handles:
            self.say(attach(handle))

    def begin(self, handle, payload=PART):
        self.say(performative(0, TRANSFER, [UInt(handle), UInt(self.number), b"t", UInt(0), False, True], payload))
        self.number += 1

    def go_on(self, handle, payload=PART, more=True, aborted=None):
        fields = [UInt(handle), None, None, None, None, more, None, None, None, aborted]
        self.say(performative(0, TRANSFER, fields, payload))

    def on_message(self, link, delivery, payload, batch, settled, state):
        self.events.append(("message", link.name, len(payload)))
        forget(delivery)

    def on_oversized(self, link, delivery, size_bytes, settled):
        self.events.append(("oversized", link.name, size_bytes))
        forget(delivery)

    def on_crowded(self, link, delivery, settled):
        self.events.append(("crowded", link.name))
        forget(delivery)


@pytest.fixture(params=[False, True] if native is not None else [False], ids=lambda is_native: "C" if is_native else "")
def pool(request, monkeypatch):
    monkeypatch.setattr(Peer, "is_native", request.param)
    return Pool(1_000_000)


def test_a_delivery_without_room_is_told_at_its_end_and_the_others_are_whole(pool):
    peer = Peer(pool, 12_000)
    peer.attach(1, 2, 3)
    for handle in (1, 2, 3):
        peer.begin(handle)
    for _ in range(4):
        for handle in (1, 2, 3):
            peer.go_on(handle)
    assert pool.held_bytes <= 12_000
    for handle in (3, 2, 1):
        peer.go_on(handle, more=False)
    assert sorted(event[0] for event in peer.events) == ["crowded", "message", "message"]
    assert {event[2] for event in peer.events if event[0] == "message"} == {6000}
    assert pool.held_bytes == 0
    peer.begin(3)
    peer.go_on(3, more=False)
    assert peer.events[-1] == ("message", "link-3", 2000)


@pytest.mark.parametrize(
    "end",
    [
        lambda peer: peer.go_on(1, more=False),
        lambda peer: peer.go_on(1, b"", more=False, aborted=True),
        lambda peer: peer.say(performative(0, DETACH, [UInt(1), True])),
        lambda peer: peer.say(performative(0, END, [])),
        lambda peer: peer.engine.free(),
        lambda peer: [peer.go_on(1) for _ in range(70)],  # more than the link allows
        lambda peer: peer.engine.links[next(iter(peer.engine.links))].detach() or peer.go_on(1),
    ],
    ids=["finished", "aborted", "detach", "end", "free", "oversized", "closed by us"],
)
def test_its_room_is_given_back_however_a_message_ends(pool, end):
    peer = Peer(pool)
    peer.attach(1)
    peer.begin(1)
    peer.go_on(1)
    assert pool.held_bytes == 2000
    end(peer)
    assert pool.held_bytes == 0


def test_one_connection_leaves_half_of_the_pool_to_the_others(pool):
    pool.maximum_bytes = 40_000
    greedy, modest = Peer(pool), Peer(pool)
    greedy.attach(*range(1, 40))
    for handle in range(1, 40):
        greedy.begin(handle)
    assert pool.held_bytes == 20_000
    modest.attach(1)
    modest.begin(1)
    for _ in range(7):
        modest.go_on(1)
    modest.go_on(1, more=False)
    assert modest.events == [("message", "link-1", 9000)]


def test_buffers_of_unfinished_messages_are_bounded_too(pool):
    """The engine keeps one for each, although its bytes were thrown away."""
    peer = Peer(pool, 10_000)
    peer.attach(*range(1, 40))
    held_by_us = 10 if peer.is_native else 0  # these messages have no buffer of the engine's
    for handle in range(1, 21 + held_by_us):
        peer.begin(handle)
    with pytest.raises(ProtocolError, match="more messages than it may have unfinished"):
        peer.begin(21 + held_by_us)


@pytest.mark.parametrize("seed", range(5))
def test_after_any_traffic_no_room_is_lost_and_no_message_is_cut(pool, seed):
    random = Random(seed)
    peers = [Peer(pool, 30_000) for _ in range(3)]
    open_ = {}
    for peer in peers:
        peer.attach(1, 2, 3, 4)
    for _ in range(600):
        peer, handle = random.choice(peers), random.randrange(1, 5)
        key = (peer, handle)
        if key not in open_:
            peer.begin(handle)
            open_[key] = 1000
        elif random.random() < 0.3:
            open_[key] += 1000
            size = open_.pop(key)
            peer.go_on(handle, more=False)
            assert peer.events[-1] in (("message", f"link-{handle}", size), ("crowded", f"link-{handle}"))
        elif random.random() < 0.05:
            del open_[key]
            peer.go_on(handle, b"", more=False, aborted=True)
        else:
            open_[key] += 1000
            peer.go_on(handle)
        assert pool.held_bytes <= pool.maximum_bytes
    for peer, handle in open_:
        peer.go_on(handle, more=False)
    assert pool.held_bytes == 0
