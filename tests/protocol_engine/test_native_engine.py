"""An engine with the extension does what one without it does, however the bytes come and whatever is among them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.gateway.links.delivery import render_delivery
from broker.gateway.links.pending import TakenDeliveries
from broker.runs import entries_of, messages_of, run_of, tokens_of
from broker.wire import ENTRY, RunOfRecords
from protocol.codec import Described, Symbol, UByte, UInt, ULong, decode, encode
from protocol.engine.deliveries import (
    ACCEPTED,
    MODIFIED,
    RELEASED,
    TRANSACTIONAL,
    settle,
    settle_in,
    tag_of,
    transaction_of,
    transactional_state,
)
from protocol.engine.frames import walk
from protocol.engine.links import Link
from protocol.engine.proton import incoming as incoming_walk
from protocol.engine.proton.incoming import FrameWalk
from protocol.engine.proton.native import address_of, delivery_at, native
from protocol.lock_tokens import uuid_bytes
from protocol.message.intake import take_apart
from protocol.symbols import AMQP_HEADER
from storage.records import NEVER, encode_message
from tests.end_to_end.raw_peer import BATCH_FORMAT, DETACH, DISPOSITION, TRANSFER, performative
from tests.examples import examples
from tests.fuzz.engine_cases import Server
from tests.fuzz.mutations import session
from tests.fuzz.test_engine_memory import attach
from tests.protocol_engine.pair import flow
from tests.protocol_engine.test_usual_input import HANDLES, LIMIT_BYTES, Peer

pytestmark = pytest.mark.skipif(native is None, reason="the extension is not built, or is switched off")

USUAL = encode(Described(ULong(0x73), ["id"])) + encode(Described(ULong(0x75), b"usual"))
IN_SESSION = encode(Described(ULong(0x73), ["id", *[None] * 9, "session"])) + encode(Described(ULong(0x75), b"body"))
UNUSUAL = encode(Described(ULong(0x70), [None, None, None, True])) + USUAL  # the first acquirer
MALFORMED = b"\x00\x53\x75\xa0\x05body"
LARGE = encode(Described(ULong(0x73), ["id"])) + encode(Described(ULong(0x75), bytes(LIMIT_BYTES + 1)))


# -- deliveries that come in


class Gathered:
    """The owner of an Incoming, which notes what a peer without it notes."""

    def __init__(self, peer: "NativePeer", link: Link) -> None:
        self._peer, self._link = peer, link
        self.incoming = native.Incoming(
            address_of(link.pointer), self, link.max_message_bytes, takes_sessions=True, takes_transactions=True
        )
        link.engine.take_usual(link, self.incoming)
        self.calls = 0

    def on_gathering(self) -> None:
        self._link.known_credit = None
        self.calls += 1

    def post_early(self) -> None:
        self.take()

    def take(self) -> None:
        if count := self.incoming.count:
            transaction = self.incoming.transaction
            found = messages_of(self.incoming.take_run(), with_extra=True)
            assert len(found) == count
            deliveries = TakenDeliveries(self.incoming.take_pending(count))
            for message, delivery in zip(found, deliveries, strict=True):
                self._peer.events.append(("taken", self._link.name, tuple(message), delivery is None, transaction))


class TransactionPeer(Peer):
    """It notes the transaction in place of the state."""

    def on_message(self, link: Link, delivery: Any, payload: bytes, batch: bool, settled: bool, state: int) -> None:
        super().on_message(link, delivery, payload, batch, settled, transaction_of(delivery) if state else 0)


class NativePeer(TransactionPeer):
    def on_attach(self, link: Link) -> None:
        super().on_attach(link)
        self.links = [*getattr(self, "links", []), Gathered(self, link)]

    def take(self) -> None:
        for link in self.links:
            link.take()

    def on_message(self, *told: Any) -> None:
        self.take()
        super().on_message(*told)

    def on_oversized(self, *told: Any) -> None:
        self.take()
        super().on_oversized(*told)

    def on_aborted(self, link: Link) -> None:
        self.take()
        super().on_aborted(link)

    def push(self, data: bytes) -> None:
        self.engine.push(data)
        self.take()


class WidePeer(NativePeer):
    limit_bytes = 100 << 20


def as_taken(event: tuple[Any, ...]) -> tuple[Any, ...]:
    """The event of a usual message as that of a peer with the extension."""
    if event[0] == "message" and not event[3] and (not event[5] or event[5] in TRANSACTIONS):
        _, name, payload, _, settled, transaction = event
        if payload == IN_SESSION or native.take_apart(payload, None) is not None:
            return "taken", name, take_apart(payload, want_message_id=True), settled, transaction or None
    return event


TRANSACTIONS = [b"transaction one!", b"transaction two!"]
STATES: dict[str, list[Any]] = {
    "transactional": [b"t"],
    "in one": [TRANSACTIONS[0]],
    "in other": [TRANSACTIONS[1]],
    "settled in one": [TRANSACTIONS[0]],
    "in one without outcome": [TRANSACTIONS[0], None],
    "accepted in one": [TRANSACTIONS[0], Described(ULong(ACCEPTED), [])],
}
KINDS = ["plain"] * 8 + [
    "settled at once",
    "settled later",
    "transactional",
    "in one",
    "in one",
    "in one",
    "in other",
    "settled in one",
    "in one without outcome",
    "accepted in one",
    "parts",
    "repeating parts",
    "aborted",
    "batch",
    "flow",
    "bare id",
]
PAYLOADS = {
    "usual": USUAL,
    "session": IN_SESSION,
    "unusual": UNUSUAL,
    "malformed": MALFORMED,
    "empty": b"",
    "large": LARGE,
}
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(HANDLES), st.sampled_from([*PAYLOADS])), max_size=40)


def frames_of(steps: list[tuple[str, int, str]]) -> list[bytes]:
    frames: list[bytes] = []
    counts = dict.fromkeys(HANDLES, 0)
    number = 0
    for kind, handle, name in steps:
        if kind == "settled later" and name == "large":
            continue  # it depends on buffers whether this is seen in time
        payload = PAYLOADS[name]
        if kind == "flow":
            frames.append(flow(handle, counts[handle], 0, False, False))
            continue
        state = Described(ULong(TRANSACTIONAL), STATES[kind]) if kind in STATES else None
        tag = b"same tag" if number % 3 else number.to_bytes(4, "big")
        message_format = {"batch": UInt(BATCH_FORMAT), "bare id": None}.get(kind, UInt(0))
        fields = [
            UInt(handle),
            UInt(number),
            tag,
            message_format,
            kind.startswith("settled ") and kind != "settled later",
        ]
        if kind in ("parts", "repeating parts", "aborted"):
            frames.append(performative(0, TRANSFER, [*fields, True], payload[: len(payload) // 2]))
            again = fields[1:] if kind == "repeating parts" else [None] * 4
            rest = [UInt(handle), *again, False, None, None, None, kind == "aborted"]
            frames.append(performative(0, TRANSFER, rest, payload[len(payload) // 2 :]))
        else:
            frames.append(performative(0, TRANSFER, [*fields, False, None, state], payload))
        if kind == "settled later":
            frames.append(performative(0, DISPOSITION, [False, UInt(number), UInt(number), True]))
        number += 1
        counts[handle] += 1
    return frames


@settings(max_examples=examples(300))
@given(STEPS, st.lists(st.one_of(st.integers(1, 99), st.integers(1, 70_000)), max_size=60))
def test_messages_that_come_are_told_alike(steps, cuts):
    data = b"".join(frames_of(steps))
    peer, reference = NativePeer(), TransactionPeer()
    for cut in [*cuts, len(data)]:
        peer.push(data[:cut])
        reference.engine.push(data[:cut])
        data = data[cut:]
        credits = [link.credit for link in peer.engine.links.values()]
        assert credits == [link.credit for link in reference.engine.links.values()]
        assert peer.engine.pull() == reference.engine.pull()
        peer.engine.check()
        reference.engine.check()
    by_link: dict[bool, dict[str, list[Any]]] = {True: {}, False: {}}
    for each in (peer, reference):
        for event in each.events:
            by_link[each is peer].setdefault(event[1], []).append(as_taken(event))
    assert by_link[True] == by_link[False]


def test_messages_of_a_link_that_was_removed_meanwhile_are_told():
    peer = NativePeer()
    taken = peer.on_message

    def remove(link: Link, *told: Any) -> None:
        taken(link, *told)
        peer.engine.forget_native(link)

    peer.on_message = remove
    steps = [("plain", 1, "usual"), ("plain", 1, "unusual"), ("plain", 1, "usual"), ("plain", 2, "usual")]
    peer.push(b"".join(frames_of(steps)))
    taken_apart = take_apart(USUAL, want_message_id=True)
    assert peer.events == [
        ("taken", "link-1", taken_apart, False, None),
        ("message", "link-1", UNUSUAL, False, False, 0),
        ("message", "link-1", USUAL, False, False, 0),
        ("taken", "link-2", taken_apart, False, None),
    ]


def parts_of(number: int, handle: int, payload: bytes, count: int, tag: bytes | None = b"tag") -> list[bytes]:
    """Transfers of one delivery."""
    frames = []
    size = -(-len(payload) // count)
    for at in range(0, len(payload), size):
        first = [UInt(number), tag, UInt(0), False] if not at else [None] * 4
        frames.append(
            performative(0, TRANSFER, [UInt(handle), *first, at + size < len(payload)], payload[at : at + size])
        )
    return frames


@pytest.mark.parametrize("step", [1, 7, 100, 1 << 20])
def test_usual_messages_of_several_transfers_are_taken(step):
    """Those of two links come in turn, with other messages between them."""
    large = encode(Described(ULong(0x73), ["id"])) + encode(Described(ULong(0x75), bytes(range(256)) * 100))
    first, second = parts_of(0, 1, large, 5), parts_of(1, 2, large, 4)
    [small] = parts_of(2, 2, USUAL, 1)
    data = b"".join((first[0], second[0], *first[1:3], *second[1:], small, *first[3:], *parts_of(3, 1, large, 2)))
    peer = NativePeer()
    pythons: list[Any] = []
    peer.engine.on_unusual = lambda *told: pythons.append(told)
    for at in range(0, len(data), step):
        peer.push(data[at : at + step])
    taken = take_apart(large, want_message_id=True)
    links = [event[1] for event in peer.events]
    assert sorted(links) == ["link-1", "link-1", "link-2", "link-2"]
    if step <= 100:  # else all come with one push, at the end of which one link is asked after the other
        assert links == ["link-2", "link-2", "link-1", "link-1"]
    assert [event[2] for event in peer.events if event[1] == "link-1"] == [taken, taken]
    assert [event[2] for event in peer.events if event[1] == "link-2"] == [
        taken,
        take_apart(USUAL, want_message_id=True),
    ]
    assert not pythons


def body_of(size: int, byte: bytes) -> bytes:
    return encode(Described(ULong(0x73), ["id"])) + encode(Described(ULong(0x75), byte * size))


@pytest.mark.parametrize("is_taken_at_once", [True, False])
def test_large_messages_are_taken_whole_and_in_order(is_taken_at_once):
    """Whether or not they are taken before others come, and however large the buffer for small ones is by then."""
    peer = WidePeer()
    if not is_taken_at_once:
        peer.links[0].post_early = lambda: None
    sizes = [70_000, 5, 300_000, 1_000_000, 64 << 10, 7, 200_000]
    messages = [body_of(size, bytes([at])) for at, size in enumerate(sizes)]
    for number, message in enumerate(messages):
        peer.engine.push(b"".join(parts_of(number, 1, message, 20)))
    assert peer.links[0].incoming.count == (0 if is_taken_at_once else len(sizes))
    assert peer.links[0].incoming.message_bytes == (0 if is_taken_at_once else sum(map(len, messages)))
    peer.take()
    assert [event[2] for event in peer.events] == [take_apart(message, want_message_id=True) for message in messages]


def test_a_large_message_that_nobody_takes_is_freed():
    peer = WidePeer()
    peer.links[0].post_early = lambda: None
    incoming = peer.links[0].incoming
    peer.engine.push(b"".join(parts_of(0, 1, body_of(200_000, b"x"), 5)))
    assert (incoming.count, len(incoming)) == (1, 1)
    incoming.clear()
    assert (incoming.count, len(incoming), incoming.take_run()) == (0, 0, b"")


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_delivery_that_has_begun_goes_on_without_the_extensions_link(is_replaced):
    peer = NativePeer()
    frames = parts_of(0, 1, UNUSUAL, 3)
    peer.push(frames[0] + frames[1])
    link = peer.links[0]._link
    if is_replaced:
        peer.links.append(Gathered(peer, link))
    else:
        peer.engine.forget_native(link)
    peer.push(frames[2] + b"".join(parts_of(1, 1, USUAL, 2)))
    assert peer.events[0] == ("message", "link-1", UNUSUAL, False, False, 0)
    assert as_taken(peer.events[1])[2] == take_apart(USUAL, want_message_id=True)
    assert peer.engine.unfinished._held_bytes == 0


def test_the_last_part_of_a_delivery_that_began_before_is_no_message():
    """It looks like one."""
    peer = NativePeer()
    peer.engine.forget_native(link := peer.links[0]._link)
    fields = [UInt(1), UInt(0), b"tag", UInt(0), False]
    peer.push(performative(0, TRANSFER, [*fields, True], USUAL[:5]))
    peer.links.append(Gathered(peer, link))
    peer.push(performative(0, TRANSFER, [*fields, False], USUAL[5:]))
    assert [as_taken(event)[2] for event in peer.events] == [take_apart(USUAL, want_message_id=True)]


def test_messages_that_come_are_accepted_in_order():
    peer, reference = NativePeer(), Peer()
    told: list[Any] = []
    reference.on_message = lambda link, delivery, *rest: told.append(delivery)
    data = b"".join(frames_of([("plain", 1, "usual")] * 5))
    for each in (peer.engine, reference.engine):
        each.push(data)
    incoming = peer.links[0].incoming
    assert (incoming.count, len(incoming), incoming.message_bytes) == (5, 5, 5 * len(USUAL))
    incoming.accept(3)
    for delivery in told[:3]:
        settle(delivery, ACCEPTED)
    assert peer.engine.pull() == reference.engine.pull()
    settle(delivery_at(incoming.popleft()), RELEASED)
    settle(told[3], RELEASED)
    assert peer.engine.pull() == reference.engine.pull()
    with pytest.raises(IndexError):
        incoming.accept(2)
    incoming.clear()
    with pytest.raises(IndexError):
        incoming.popleft()


@pytest.mark.parametrize("count", [0, 1, 5])
def test_messages_in_a_transaction_are_accepted_in_it(count):
    peer, reference = NativePeer(), Peer()
    told: list[Any] = []
    reference.on_message = lambda link, delivery, *rest: told.append(delivery)
    for each in (peer.engine, reference.engine):
        each.push(b"".join(frames_of([("in one", 1, "usual")] * count + [("settled in one", 1, "usual")])))
    incoming = peer.links[0].incoming
    taken = []
    while len(incoming):
        taken.append(TakenDeliveries(incoming.take_pending(1)))
    for deliveries in taken[::-1]:
        deliveries.accept_in(TRANSACTIONS[0])
    for delivery in told[:count]:
        settle_in(TRANSACTIONS[0], delivery, ACCEPTED)
    output = peer.engine.pull()
    assert output == reference.engine.pull()
    assert output.count(TRANSACTIONS[0]) == count
    with pytest.raises(IndexError):
        incoming.take_pending(1)


# -- deliveries that go out

OPEN, BEGIN, FLOW = 0x10, 0x11, 0x13


class Sending(Server):
    """A server's end with links on which the peer receives; with or without an Outgoing for each."""

    def __init__(self, is_native: bool, max_frame: int, window: int) -> None:
        super().__init__()
        self.is_native = is_native
        self.senders: list[Link] = []
        self.accepting: list[Accepting] = []
        self.told: list[Any] = []
        begin = [None, UInt(0), UInt(window), UInt(1000)]
        self.engine.push(AMQP_HEADER + performative(0, OPEN, ["peer", "host", UInt(max_frame)]))
        self.engine.push(performative(0, BEGIN, begin))
        for handle in HANDLES:
            self.engine.push(attach(handle, sender=False))
        self.engine.pull()

    def on_attach(self, link: Link) -> None:
        link.accept()
        self.senders.append(link)
        if self.is_native:
            self.accepting.append(Accepting(self, link))

    def on_flow(self, link: Link) -> None:
        self.told.append(("flow", link.name, link.credit, link.drain))

    def on_outcome(self, link: Link, delivery: Any, token: bytes, state: int, settled: bool) -> None:
        self.take()
        transaction = transactional_state(delivery) if state == TRANSACTIONAL else None
        if transaction and transaction[0] in TRANSACTIONS and transaction[1] == ACCEPTED_OUTCOME:
            self.told.append((link.name, token, ACCEPTED, settled, transaction[0]))
        else:
            self.told.append((link.name, token, state, settled, transaction))

    def on_detach(self, link: Link, closed: bool, condition: str, description: str) -> None:
        self.told.append((link.name, self.engine.last_tags(link, 3), link.queued))

    def take(self) -> None:
        for each in self.accepting:
            each.post_accepted()

    def deliver(self, index: int, records: list[bytes], token: bytes, numbers: int | bytes) -> None:
        link = self.senders[index]
        if link.closed:
            return
        records = records[: max(0, link.credit)]
        numbers = numbers[: 8 * len(records)] if isinstance(numbers, bytes) else numbers
        if not records:
            return
        make = RUN_FORMS[token[-1] % len(RUN_FORMS)]
        if self.is_native and link.send_run(make(records), len(records), token, numbers, 2, 1000):
            return
        entries = entries_of(run_of(records), token, numbers, 2)
        for at in range(0, len(entries), ENTRY):
            tag, sequence_number, count, record, overlay = entries[at : at + ENTRY]
            prefix, offset = render_delivery(record, sequence_number, count, 1000, overlay, uuid_bytes(tag))
            link.send(tag, prefix, record, offset, False)

    def push(self, data: bytes) -> None:
        self.engine.push(data)
        self.take()


# The forms in which a run may come: see `broker.wire`.
RUN_FORMS: list[Any] = [
    run_of,
    lambda records: memoryview(b"    " + run_of(records))[4:],  # at any address
    RunOfRecords,
]


class Accepting:
    def __init__(self, server: Sending, link: Link) -> None:
        self._server, self._link = server, link
        link.outgoing = self.outgoing = native.Outgoing(address_of(link.pointer), self, False)

    def on_accepting(self) -> None: ...

    def post_accepted(self) -> None:
        if count := self.outgoing.count:
            found, is_quiet, ranges, transaction, addresses = self.outgoing.take_accepted()
            tokens = tokens_of(ranges)
            assert len(tokens) == count == found
            self._server.told += [(self._link.name, token, ACCEPTED, is_quiet, transaction) for token in tokens]
            if transaction is not None and not is_quiet:
                assert [*map(tag_of, TakenDeliveries(addresses))] == tokens
            else:
                assert addresses == b""


RECORDS = [
    encode_message(1000, NEVER, *take_apart(message)[:2])
    for message in (
        USUAL,
        encode(Described(ULong(0x70), [True, UByte(4)])) + encode(Described(ULong(0x75), bytes(300))),
        encode(Described(ULong(0x72), {Symbol("k"): "v"})) + encode(Described(ULong(0x75), bytes(5_000))),
    )
]
RECORDS.append(encode_message(1000, 9_000_000_000_000, *take_apart(USUAL)[:2]))  # is not usual, because it expires
ACCEPTED_OUTCOME = Described(ULong(ACCEPTED), [])
OUTCOMES = st.sampled_from(
    (
        *[ACCEPTED_OUTCOME] * 3,
        *[Described(ULong(TRANSACTIONAL), [TRANSACTIONS[0], ACCEPTED_OUTCOME])] * 3,
        Described(ULong(TRANSACTIONAL), [TRANSACTIONS[1], ACCEPTED_OUTCOME]),
        Described(ULong(TRANSACTIONAL), [TRANSACTIONS[1], Described(ULong(RELEASED), [])]),
        Described(ULong(TRANSACTIONAL), [TRANSACTIONS[1]]),
        Described(ULong(TRANSACTIONAL), [b"short", ACCEPTED_OUTCOME]),
        Described(ULong(RELEASED), []),
        Described(ULong(MODIFIED), []),
    )
)
NUMBERS = st.integers(0, 30)
LINKS = st.sampled_from((0, 1))
SENDING_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("deliver"), LINKS, st.lists(st.sampled_from([*range(len(RECORDS))]), max_size=6)),
        st.tuples(st.just("credit"), LINKS, NUMBERS, st.integers(0, 20), st.booleans()),
        st.tuples(st.just("outcome"), NUMBERS, NUMBERS, OUTCOMES, st.booleans()),
        st.tuples(st.just("pull")),
        st.tuples(st.just("detach"), LINKS, st.booleans()),
    ),
    max_size=40,
)


def frames_in(output: bytes) -> list[bytes]:
    return [output[start:end] for start, end, _, _ in walk(output)]


SETTLED, MORE = 4, 5  # fields of a transfer
MANY_FRAMES = 8_192  # with smaller frames, some messages take several


def in_one_piece(output: bytes, max_frame: int) -> dict[int, list[Any]]:
    """Frames by handle, -1 for those without, with the transfers of a delivery put together.

    The extension lets proton write some of them earlier, and does not fill frames to the last byte, as proton does.
    """
    by_handle: dict[int, list[Any]] = {-1: []}
    goes_on = False
    for frame in frames_in(output):
        assert len(frame) <= max_frame
        if len(frame) < 11 or frame[10] not in (TRANSFER, DETACH):
            by_handle[-1].append(frame)
            continue
        performative_, end = decode(memoryview(frame), 8, 100)
        found = by_handle.setdefault(performative_.value[0], [])
        if frame[10] == DETACH:
            found.append(frame)
            continue
        fields = performative_.value + [None] * (MORE + 1 - len(performative_.value))
        more, fields[MORE] = bool(fields[MORE]), None
        if goes_on:
            begun, payload = found[-1]
            fields[SETTLED] = begun[SETTLED] = fields[SETTLED] or begun[SETTLED]  # one of them must say so (2.7.5)
            assert begun == fields, "transfers of a delivery follow each other"
            found[-1] = fields, payload + frame[end:]
        else:
            found.append((fields, frame[end:]))
        goes_on = more
    assert not goes_on
    return by_handle


def pulled(server: Sending, max_frame: int) -> bytes:
    """The server's output, of which each piece has whole frames, and room for one as large as the peer takes."""
    output = server.engine.pull_pieces()
    if isinstance(output, bytes):
        return output
    largest = server.engine.pump.piece_bytes + max_frame
    for piece in output:
        *_, last = frames_in(bytes(piece))
        assert last.startswith(b"AMQP") or len(last) == int.from_bytes(last[:4], "big")
        assert len(piece) <= largest
    return b"".join(output)


@pytest.mark.parametrize("piece_bytes", [1, 3_000, 50_000, 1 << 20])
def test_much_output_comes_in_pieces_and_is_the_same(piece_bytes):
    """Of messages of several frames and of one, and of what proton writes itself."""
    large = encode_message(1000, NEVER, *take_apart(body_of(100_000, b"x"))[:2])
    servers = [Sending(True, 4_096, 100_000) for _ in range(2)]
    servers[1].engine.pump.piece_bytes = piece_bytes
    outputs = []
    for server in servers:
        server.push(performative(0, FLOW, [UInt(0), UInt(100_000), UInt(0), UInt(1000), UInt(1), UInt(0), UInt(50)]))
        for at, records in enumerate(([large, RECORDS[0]], [RECORDS[1]] * 3, [large])):
            server.deliver(0, records, bytes(8) + (10 * at + 1).to_bytes(8, "big"), 10 * at)
        pieces = server.engine.pull_pieces()
        assert isinstance(pieces, list) == (server is servers[1] and piece_bytes < 200_000)
        outputs.append(b"".join(pieces) if isinstance(pieces, list) else pieces)
        assert server.engine.pull() == b""
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 200_000


@settings(max_examples=examples(400))
@given(
    SENDING_STEPS,
    st.sampled_from(((512, 100_000), (4_096, 100_000), (1 << 20, 1000), (1 << 20, 3))),
    st.sampled_from((1, 700, 6_000, 1 << 20)),
)
def test_messages_are_sent_alike(steps, sizes, piece_bytes):
    max_frame, window = sizes
    servers = [Sending(is_native, max_frame, window) for is_native in (True, False)]
    servers[0].engine.pump.piece_bytes = piece_bytes
    number = 0
    detached: set[int] = set()
    for kind, *given_ in [*steps, ("pull",)]:
        data = b""
        if kind == "deliver":
            index, records = given_
            for server in servers:
                strided = b"".join((number + 7 * each).to_bytes(8, "big") for each in range(len(records)))
                numbers = strided if number % 3 == 1 else number
                server.deliver(
                    index, [RECORDS[each] for each in records], bytes(8) + number.to_bytes(8, "big"), numbers
                )
            number += len(records)
        elif kind == "credit":
            index, count, credit, _ = given_
            delivered = 0
            if index in detached:
                continue
            window_fields = [UInt(count), UInt(window), UInt(0), UInt(1000)]
            data = performative(0, FLOW, [*window_fields, UInt(HANDLES[index]), UInt(delivered), UInt(credit)])
        elif kind == "outcome":
            first, more, state, settled = given_
            fields = [True, UInt(first), UInt(first + more), settled, state]
            data = performative(0, DISPOSITION, fields)
        elif kind == "detach":
            index, closed = given_
            if index in detached:
                continue
            detached.add(index)
            data = performative(0, DETACH, [UInt(HANDLES[index]), closed])
        if kind == "pull" or (kind == "deliver" and max_frame < MANY_FRAMES):  # large messages leave at once
            outputs = [in_one_piece(pulled(server, max_frame), max_frame) for server in servers]
            assert outputs[0] == outputs[1]
        if data:
            for server in servers:
                server.push(data)
        for server in servers:
            server.take()
            server.engine.check()
        assert [each.unsettled for each in servers[0].senders] == [each.unsettled for each in servers[1].senders]
    for name in ("link-1", "link-2"):  # accepted ones gather on each link, so there is no order of both
        told = [[event for event in server.told if name in event] for server in servers]
        assert told[0] == told[1]


@pytest.mark.parametrize("window", [1, 2, 3, 5, 6, 100])
def test_a_large_message_needs_a_window_for_all_of_its_frames(window):
    """Else Python sends it as far as it goes, and what follows waits behind it."""
    small = RECORDS[0]
    large = encode_message(1000, NEVER, *take_apart(encode(Described(ULong(0x75), bytes(600))))[:2])  # two frames
    servers = [Sending(is_native, 512, window) for is_native in (True, False)]
    outputs: list[list[bytes]] = [[], []]
    for server, output in zip(servers, outputs, strict=True):
        flow_fields = [UInt(0), UInt(window), UInt(0), UInt(1000)]
        server.push(performative(0, FLOW, [*flow_fields, UInt(HANDLES[0]), UInt(0), UInt(50)]))
        for at, records in enumerate(([large], [small, large], [small])):
            server.deliver(0, records, bytes(8) + (10 * at + 1).to_bytes(8, "big"), 10 * at)
        queued = server.senders[0].queued
        output.append(server.engine.pull())
        assert len(frames_in(output[0])) == min(window, 6)
        assert server.senders[0].queued == len([part for part in (2, 3, 5, 6) if part > window])
        assert queued >= server.senders[0].queued
        server.push(performative(0, FLOW, [UInt(min(window, 6)), UInt(100), UInt(0), UInt(1000)]))
        output.append(server.engine.pull())
    assert in_one_piece(b"".join(outputs[0]), 512) == in_one_piece(b"".join(outputs[1]), 512)
    assert [len(found) for found in in_one_piece(b"".join(outputs[0]), 512).values()] == [0, 4]


def test_large_messages_that_are_deleted_when_they_are_sent_are_settled_in_each_transfer():
    outputs = []
    for is_native in (True, False):
        server = Sending(is_native, 512, 100)
        if is_native:
            link = server.senders[0]
            link.outgoing = native.Outgoing(address_of(link.pointer), server.accepting[0], True)
        server.push(performative(0, FLOW, [UInt(0), UInt(100), UInt(0), UInt(100), UInt(HANDLES[0]), UInt(0), UInt(9)]))
        link = server.senders[0]
        if not (is_native and link.send_run(run_of([RECORDS[2]]), 1, b"0123456789abcdef", 1, 0, 0)):
            prefix, offset = render_delivery(RECORDS[2], 1, 0, 0, None, uuid_bytes(b"0123456789abcdef"))
            link.send(b"0123456789abcdef", prefix, RECORDS[2], offset, True)
        outputs.append(server.engine.pull())
    assert outputs[0] == outputs[1]
    assert len(frames_in(outputs[0])) > 10


# -- the walk

ACCEPTED_IN_ONE = performative(
    0,
    DISPOSITION,
    [True, UInt(7), UInt(300), False, Described(ULong(TRANSACTIONAL), [TRANSACTIONS[0], ACCEPTED_OUTCOME]), True],
)


def in_list_32(frame: bytes) -> bytes:
    """The disposition with its state's fields in a list of the other encoding."""
    at = frame.index(b"\x00\x53\x34\xc0") + 3
    size, count = frame[at + 1 : at + 3]
    longer = frame[:at] + b"\xd0" + (size + 3).to_bytes(4, "big") + count.to_bytes(4, "big") + frame[at + 3 :]
    return len(longer).to_bytes(4, "big") + longer[4:12] + bytes((longer[12] + 6,)) + longer[13:]


@settings(max_examples=examples(1000))
@given(
    st.sampled_from([ACCEPTED_IN_ONE, in_list_32(ACCEPTED_IN_ONE)]),
    st.lists(st.tuples(st.integers(8, 70), st.one_of(st.integers(0, 255), st.sampled_from(b"@ABCERp\xc0\xd0")))),
)
def test_the_walk_finds_the_same_faults_in_dispositions(frame, changes):
    changed = bytearray(frame)
    for at, value in changes[:3]:
        if at < len(changed):
            changed[at] = value
    ends = []
    for walk_usual in (native.walk, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(incoming_walk, "_walk_usual", walk_usual)
            walk = FrameWalk(65536)
            begun = walk.feed(b"".join(session("orders")[:4]))
            given_ = walk.feed(bytes(changed))
            while walk.is_interrupted:
                given_ += walk.feed(b"")
            ends.append((begun, given_, type(walk.error)))
    assert ends[0] == ends[1]


FIELDS = [
    st.sampled_from([UInt(1), UInt(0), None]),
    st.sampled_from([UInt(7), UInt(300), UInt(0), None]),
    st.sampled_from([b"tag", b"", bytes(40), None]),
    st.sampled_from([UInt(0), UInt(BATCH_FORMAT), UInt(5), None]),
    *[st.sampled_from([True, False, None])] * 2,
    st.sampled_from([UByte(0), UByte(1), None]),
    st.sampled_from([None, None, Described(ULong(ACCEPTED), []), Described(ULong(TRANSACTIONAL), [TRANSACTIONS[0]])]),
    *[st.sampled_from([None, False, True])] * 3,
]
TRANSFERS = st.builds(
    lambda fields, count: performative(0, TRANSFER, fields[:count], USUAL), st.tuples(*FIELDS), st.integers(1, 11)
)
CHANGES = st.lists(
    st.tuples(st.integers(8, 50), st.one_of(st.integers(0, 255), st.sampled_from(b"@ABCERp\xa0\xc0\xd0"))), max_size=3
)


@settings(max_examples=examples(1000))
@given(st.lists(st.tuples(TRANSFERS, CHANGES), min_size=1, max_size=4), st.integers(1, 400))
def test_the_walk_reads_transfers_alike(transfers, step):
    data = bytearray()
    for frame, changes in transfers:
        changed = bytearray(frame)
        for at, value in changes:
            if at < len(changed):
                changed[at] = value
        data += changed
    found = []
    for with_c in (native, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(incoming_walk, "native", with_c)
            walk = FrameWalk(65536)
            walk.feed(b"".join(session("orders")[:4]) + attach(1))
            each = []
            for at in range(0, len(data), step):
                given_ = walk.feed(bytes(data[at : at + step]))
                each.append((given_, walk.is_plain, list(walk.stops), type(walk.error)))
                while walk.is_interrupted:
                    given_ = walk.feed(b"")
                    each.append((given_, walk.is_plain, list(walk.stops), type(walk.error)))
            found.append((each, walk.translated.keys()))
    assert found[0] == found[1]


def test_an_accepted_disposition_in_a_transaction_is_passed_by():
    for frame in (ACCEPTED_IN_ONE, in_list_32(ACCEPTED_IN_ONE)):
        assert native.walk(frame, 0, 65536, (b"\xff", b"\xa0\0", b"", 1), True, 0) == (len(frame), 0)
        assert native.walk(frame, 0, 65536, (b"\xff", b"\xa0\0", b"", 1), False, 0) == (0, 0)
