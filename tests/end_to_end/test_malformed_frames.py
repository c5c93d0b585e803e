"""Bytes that are not what AMQP says they are: each gets the condition that names the fault, and harms nobody else."""

import struct

import pytest

from protocol.codec import Described, Symbol, UByte, UInt, ULong, UShort, encode
from protocol.engine.sasl import SASL_HEADER
from protocol.symbols import AMQP_HEADER
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    BATCH_FORMAT,
    BEGIN,
    CLOSE,
    DETACH,
    DISPOSITION,
    END,
    FLOW,
    OPEN,
    REJECTED,
    TRANSFER,
    Frame,
    RawPeer,
    body_of,
    error_of,
    frame_bytes,
    message,
    outcome,
    performative,
    raw_performative,
    source,
    target,
)

NULL = b"\x40"


@pytest.fixture
def peer(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        yield peer


def closed_with(peer: RawPeer) -> tuple[str, str]:
    """Condition and description of the close that the broker sends; then it closes the socket."""
    frames = peer.wait_closed()
    assert frames, "closed without a word"
    assert frames[-1].code == CLOSE, frames
    return error_of(frames[-1])


def fields(*values) -> bytes:
    return b"".join(map(encode, values))


def list_of(*encoded: bytes) -> bytes:
    content = b"".join(encoded)
    return b"\xd0" + struct.pack(">II", len(content) + 4, len(encoded)) + content


def map_with(value: bytes) -> bytes:
    """A map of one key with an encoded value."""
    return b"\xd1" + struct.pack(">II", len(value) + 7, 2) + encode(Symbol("a")) + value


def nested_lists(levels: int) -> bytes:
    value = NULL
    for _ in range(levels):
        value = b"\xd0" + struct.pack(">II", len(value) + 4, 1) + value
    return value


def array_of(count: int, element: bytes) -> bytes:
    return b"\xf0" + struct.pack(">II", 4 + len(element), count) + element


HOSTILE = {
    "nested 7000 deep": nested_lists(7000),
    "described 30000 deep": b"\x00\x40" * 30000 + NULL,
    "descriptors 30000 deep": b"\x00" * 30000 + NULL * 30000,
    "a list that claims 2^31 elements": b"\xd0" + struct.pack(">II", 4, 0x7FFFFFFF),
    "a map that claims 2^31 elements": b"\xd1" + struct.pack(">II", 4, 0x7FFFFFFE),
    "an array of 2^31 nulls": array_of(0x7FFFFFFF, b"\x40"),
    "an array of 2^31 trues": array_of(0x7FFFFFFF, b"\x41"),
    "an array of 2^31 empty lists": array_of(0x7FFFFFFF, b"\x45"),
    "an array of 2^31 described nothings": array_of(0x7FFFFFFF, b"\x00\x53\x23\x41"),
    "a binary of 4 GiB": b"\xb0\xff\xff\xff\xffab",
    "a list of 4 GiB": b"\xd0" + struct.pack(">II", 0xFFFFFFF0, 1) + NULL,
    "a map of three": b"\xc1\x04\x03\x41\x42\x40",
    "a constructor that is none": b"\x99",
}


# --- frames -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(bytes.fromhex("0000000002000000"), id="size 0"),
        pytest.param(bytes.fromhex("00000007"), id="size 7"),
        pytest.param(bytes.fromhex("0000000902000000 00"), id="size 9"),
        pytest.param(bytes.fromhex("0000000b02000000 005312"), id="a performative without its list"),
        pytest.param(bytes.fromhex("0001000102000000 00531345"), id="above max-frame-size"),
        pytest.param(bytes.fromhex("7fffffff02000000"), id="2 GiB"),
        pytest.param(bytes.fromhex("0000000c01000000 00531845"), id="data offset 1"),
        pytest.param(bytes.fromhex("0000000cff000000 00531845"), id="data offset behind the frame"),
        pytest.param(bytes.fromhex("0000000c02010000 00531845"), id="a SASL frame"),
        pytest.param(bytes.fromhex("0000000802010000 00000008"), id="an empty frame of another type"),
        pytest.param(AMQP_HEADER, id="a second protocol header"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", id="HTTP"),
    ],
)
def test_bytes_that_are_no_frame_are_a_framing_error(peer, data):
    peer.send(data)
    assert closed_with(peer)[0] == "amqp:connection:framing-error"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x00\x53\x30\x45", id="code 0x30"),
        pytest.param(b"\x00\x53\x00\x45", id="code 0"),
        pytest.param(b"\x00\x80" + bytes(7) + b"\x30\x45", id="code 0x30 as ulong"),
        pytest.param(b"\x00\x80\xff" + bytes(7) + b"\x45", id="another domain"),
        pytest.param(encode(Described(Symbol("amqp:nonsense:list"), [])), id="an unknown symbol"),
        pytest.param(b"\x00\x40" + NULL * 8, id="described by null"),
        pytest.param(b"\x45" * 8, id="not described"),
    ],
)
def test_an_unknown_performative_is_a_decode_error(peer, body):
    peer.send(frame_bytes(0, body))
    assert closed_with(peer)[0] == "amqp:decode-error"


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_a_performative_whose_body_is_hostile_is_refused(broker, hostile):
    for code in (OPEN, BEGIN, ATTACH, FLOW, DISPOSITION, DETACH, END, CLOSE):
        with RawPeer.connect(broker.amqp_port) as peer:
            peer.send(frame_bytes(0, b"\x00\x53" + bytes((code,)) + hostile))
            assert closed_with(peer)[0] == "amqp:decode-error", hex(code)


ATTACH_HEAD = fields("link", UInt(0), True, UByte(0), UByte(0))
SETTLE_HEAD = fields(True, UInt(0), None, False)
ERROR_HEAD = fields(Symbol("test:error"), "text")
FLOW_HEAD = fields(UInt(0), UInt(10), UInt(0), UInt(10), None, None, None, None, False, False)
PLACES = {
    "open properties": lambda value: raw_performative(0, OPEN, fields("c", "h") + NULL * 7 + map_with(value), 10),
    "begin properties": lambda value: raw_performative(
        1, BEGIN, fields(None, UInt(0), UInt(10), UInt(10)) + NULL * 3 + map_with(value), 8
    ),
    "attach properties": lambda value: raw_performative(
        0, ATTACH, ATTACH_HEAD + fields(source("orders"), target("here")) + NULL * 6 + map_with(value), 14
    ),
    "source filter": lambda value: raw_performative(
        0, ATTACH, ATTACH_HEAD + b"\x00\x53\x28" + list_of(encode("orders"), *[NULL] * 6, map_with(value)), 6
    ),
    "source capabilities": lambda value: raw_performative(
        0, ATTACH, ATTACH_HEAD + b"\x00\x53\x28" + list_of(encode("orders"), *[NULL] * 9, value), 6
    ),
    "unsettled map": lambda value: raw_performative(
        0, ATTACH, ATTACH_HEAD + fields(source("orders"), target("here")) + map_with(value), 8
    ),
    "flow properties": lambda value: raw_performative(0, FLOW, FLOW_HEAD + map_with(value), 11),
    "detach error": lambda value: raw_performative(
        0,
        DETACH,
        fields(UInt(0), True) + b"\x00\x53\x1d" + list_of(ERROR_HEAD[:13], ERROR_HEAD[13:], map_with(value)),
        3,
    ),
    "close error": lambda value: raw_performative(0, CLOSE, b"\x00\x53\x1d" + value, 1),
    "rejected info": lambda value: raw_performative(
        0,
        DISPOSITION,
        SETTLE_HEAD
        + b"\x00\x53\x25"
        + list_of(b"\x00\x53\x1d" + list_of(encode(Symbol("a:b")), NULL, map_with(value))),
        5,
    ),
    "modified annotations": lambda value: raw_performative(
        0, DISPOSITION, SETTLE_HEAD + b"\x00\x53\x27" + list_of(NULL, NULL, map_with(value)), 5
    ),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_value_within_a_performative_is_a_decode_error(broker, hostile):
    for name, place in PLACES.items():
        with RawPeer.connect(broker.amqp_port) as peer:
            peer.send(place(hostile))
            assert closed_with(peer)[0] == "amqp:decode-error", name


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_state_of_a_transfer_does_no_harm(peer, hostile):
    handle = peer.attach_sender("orders")
    head = fields(UInt(handle), UInt(0), b"tag", UInt(0), False, False, None)
    peer.send(raw_performative(0, TRANSFER, head + b"\x00\x53\x24" + hostile, 8)[:65536])
    peer.say(CLOSE)
    assert CLOSE in [frame.code for frame in peer.wait_closed()]


def test_open_properties_that_cannot_be_read_are_answered_before_the_connection_is_open(broker):
    with RawPeer(broker.amqp_port) as peer:
        peer.sasl_plain()
        peer.send(AMQP_HEADER + PLACES["open properties"](HOSTILE["an array of 2^31 trues"]))
        opened, closed = peer.wait_closed()
        assert opened.code == OPEN
        assert error_of(closed)[0] == "amqp:decode-error"


# --- fields -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "values", "field"),
    [
        (OPEN, [UInt(5)], "open.container-id"),
        (OPEN, [], "open.container-id"),
        (OPEN, ["c", None, "large"], "open.max-frame-size"),
        (BEGIN, [None, "0", UInt(1), UInt(1)], "begin.next-outgoing-id"),
        (BEGIN, [None, UInt(0)], "begin.incoming-window"),
        (BEGIN, [UInt(0), UInt(0), UInt(1), UInt(1)], "begin.remote-channel"),
        (ATTACH, [["a", "list"], UInt(0), True], "attach.name"),
        (ATTACH, [None, UInt(0), True], "attach.name"),
        (ATTACH, ["a\0b", UInt(0), True], "attach.name"),
        (ATTACH, ["link", "0", True], "attach.handle"),
        (ATTACH, ["link", UInt(0)], "attach.role"),
        (ATTACH, ["link", UInt(0), "receiver"], "attach.role"),
        (ATTACH, ["link", UInt(0), True, None, None, "orders"], "attach.source"),
        (ATTACH, ["link", UInt(0), True, None, None, Described(ULong(0x29), ["orders"])], "attach.source"),
        (ATTACH, ["link", UInt(0), True, None, None, source(["orders"])], "attach.source.address"),
        (ATTACH, ["link", UInt(0), True, None, None, source("orders", filters=["f"])], "attach.source.filter"),
        (ATTACH, ["link", UInt(0), False, None, None, None, target(5)], "attach.target.address"),
        (ATTACH, ["link", UInt(0), False, None, None, None, None, None, None, "0"], "attach.initial-delivery-count"),
        (FLOW, ["a", "b", "c", "d"], "flow.next-incoming-id"),
        (FLOW, [UInt(0), UInt(1), UInt(0), UInt(1), [UInt(0)]], "flow.handle"),
        (FLOW, [UInt(0), UInt(1), UInt(0), UInt(1), UInt(0), "0", UInt(1)], "flow.delivery-count"),
        (FLOW, [UInt(0), UInt(1), UInt(0), UInt(1), UInt(0), UInt(0), UInt(1), None, "yes"], "flow.drain"),
        (FLOW, [], "flow.incoming-window"),
        (DISPOSITION, ["role", UInt(0)], "disposition.role"),
        (DISPOSITION, [True, "0"], "disposition.first"),
        (DISPOSITION, [True], "disposition.first"),
        (DETACH, ["0"], "detach.handle"),
        (DETACH, [UInt(0), "yes"], "detach.closed"),
        (DETACH, [UInt(0), True, "error"], "detach.error"),
        (END, [Described(ULong(0x1D), [5])], "end.error.condition"),
        (CLOSE, ["error"], "close.error"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(peer, code, values, field):
    peer.say(code, *values)
    condition, description = closed_with(peer)
    assert condition == "amqp:invalid-field"
    assert field in description


@pytest.mark.parametrize("values", [[UInt(0), UInt(0), ["tag"]], [[UInt(0)], UInt(0), b"tag"]], ids=["tag", "handle"])
@pytest.mark.parametrize("message_format", [0, BATCH_FORMAT])
def test_a_transfer_whose_tag_or_handle_is_a_list_is_refused_by_name(peer, values, message_format):
    peer.attach_sender("orders")
    peer.say(TRANSFER, *values, UInt(message_format), False, False, payload=message(b""))
    condition, text = closed_with(peer)
    assert condition == "amqp:invalid-field"
    assert text.startswith(
        ("transfer.handle: must not be of type list", "transfer.delivery-tag: must not be of type list")
    )


def test_a_name_that_is_not_utf8_is_a_decode_error(peer):
    peer.send(raw_performative(0, ATTACH, b"\xa1\x03\xff\xfe\xfd" + fields(UInt(0), False), 3))
    assert closed_with(peer)[0] == "amqp:decode-error"


def test_frames_in_front_of_a_bad_one_are_obeyed(peer):
    handle = peer.attach_sender("orders")
    good = performative(0, TRANSFER, [UInt(handle), UInt(0), b"tag", UInt(0), True, False], message(b"kept"))
    peer.send(good + bytes.fromhex("00000001"))
    assert closed_with(peer)[0] == "amqp:connection:framing-error"


# --- forms that are unusual and right ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x00\x80" + bytes(7) + b"\x18\x45", id="ulong"),
        pytest.param(encode(Described(Symbol("amqp:close:list"), [])), id="symbol"),
        pytest.param(b"\x00\x53\x18\xd0\x00\x00\x00\x04\x00\x00\x00\x00", id="wide list"),
    ],
)
def test_descriptors_and_lists_may_have_any_of_their_encodings(peer, body):
    peer.send(frame_bytes(0, body))
    assert closed_with(peer) == ("", "")


def test_an_extended_header_is_skipped(peer):
    peer.send(bytes.fromhex("0000001003000000 deadbeef 00531845"))
    assert closed_with(peer) == ("", "")


def test_a_batch_in_an_unusual_form_is_a_batch_all_the_same(peer):
    """And not a message with two data sections."""
    handle = peer.attach_sender("invoices")
    peer.next_delivery_id = 1
    two = b"".join(encode(Described(ULong(0x75), message(body))) for body in (b"one", b"two"))
    head = encode([UInt(handle), UInt(0), b"tag", UInt(BATCH_FORMAT), False, False])
    peer.send(frame_bytes(0, b"\x00" + encode(Symbol("amqp:transfer:list")) + head + two))
    assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
    receiver = peer.attach_receiver("invoices", credit=10)
    deliveries = [peer.expect(TRANSFER), peer.expect(TRANSFER)]
    assert {each.fields[0] for each in deliveries} == {receiver}
    peer.settle(0, 1)
    peer.expect(DISPOSITION)


def test_bytes_may_come_one_by_one(broker):
    with RawPeer(broker.amqp_port) as peer:
        peer.sasl_plain()
        peer.open()
        peer.begin()
        handle = peer.attach_sender("orders")
        transfer = performative(0, TRANSFER, [UInt(handle), UInt(0), b"tag", UInt(0), True, False], message(b"slow"))
        for byte in transfer + performative(0, CLOSE, []):
            peer.send(bytes((byte,)))
        assert peer.wait_closed()[-1].code == CLOSE


# --- order ------------------------------------------------------------------------------------------------------------


def attach_bytes(name: str, handle: int) -> bytes:
    return performative(
        0,
        ATTACH,
        [name, UInt(handle), False, UByte(0), UByte(0), source("here"), target("orders"), None, None, UInt(0)],
    )


def test_a_second_begin_on_a_channel_is_an_illegal_state(peer):
    peer.say(BEGIN, None, UInt(0), UInt(10), UInt(10))
    assert closed_with(peer)[0] == "amqp:illegal-state"


def test_a_second_open_is_an_illegal_state(peer):
    peer.say(OPEN, "again")
    assert closed_with(peer)[0] == "amqp:illegal-state"


def test_a_begin_before_the_open_is_an_illegal_state(broker):
    with RawPeer(broker.amqp_port) as peer:
        peer.sasl_plain()
        peer.send(AMQP_HEADER + performative(0, BEGIN, [None, UInt(0), UInt(10), UInt(10)]))
        assert closed_with(peer)[0] == "amqp:illegal-state"


def test_a_handle_in_use_cannot_be_attached_again(peer):
    handle = peer.attach_sender("orders")
    peer.attach(sender=True, address="orders", name="another", handle=handle)
    assert closed_with(peer)[0] == "amqp:session:handle-in-use"


def test_a_link_name_in_use_cannot_be_attached_again(peer):
    peer.attach_sender("orders", name="same")
    peer.attach(sender=True, address="orders", name="same")
    condition, description = closed_with(peer)
    assert condition == "amqp:invalid-field"
    assert "same" in description


@pytest.mark.parametrize(
    ("code", "values", "condition"),
    [
        pytest.param(TRANSFER, [UInt(9), UInt(0), b"tag", UInt(0)], "amqp:invalid-field", id="transfer"),
        pytest.param(DETACH, [UInt(9), True], "amqp:invalid-field", id="detach"),
        pytest.param(
            FLOW, [UInt(0), UInt(9), UInt(0), UInt(9), UInt(9), UInt(0), UInt(9)], "amqp:invalid-field", id="flow"
        ),
    ],
)
def test_a_handle_that_is_not_attached_is_named(peer, code, values, condition):
    peer.say(code, *values)
    assert closed_with(peer) == (condition, "no such handle: 9")


@pytest.mark.parametrize("code", [ATTACH, FLOW, END], ids=["attach", "flow", "end"])
def test_a_channel_without_a_session_is_named(peer, code):
    values = {
        ATTACH: ["link", UInt(0), True, None, None, source("orders"), target("here")],
        FLOW: [UInt(0), UInt(1), UInt(0), UInt(1)],
        END: [],
    }[code]
    peer.say(code, *values, channel=5)
    assert closed_with(peer) == ("amqp:not-allowed", "no such channel: 5")


def test_a_transfer_to_its_own_sender_is_an_illegal_state(peer):
    handle = peer.attach_receiver("witness")
    peer.transfer(message(b"the wrong way"), handle)
    assert closed_with(peer)[0] == "amqp:illegal-state"


def test_a_delivery_that_goes_on_under_another_id_is_named(peer):
    handle = peer.attach_sender("orders")
    peer.transfer(message(b""), handle, more=True)
    peer.transfer(message(b""), handle)
    condition, description = closed_with(peer)
    assert condition == "amqp:invalid-field"
    assert description.startswith("transfer.delivery-id: must be that of the link's unfinished delivery, 0")


def test_a_close_for_a_fault_that_the_engine_finds_has_all_three_fields_of_its_error(peer):
    """pyamqp raises an IndexError without them."""
    peer.transfer(message(b""), 9)
    [*_, close] = peer.wait_closed()
    assert close.code == CLOSE
    condition, text, info = close.fields[0].value
    assert (condition, text, info) == ("amqp:invalid-field", "no such handle: 9", {})


def test_messages_with_repeated_delivery_ids_are_stored_and_answered_by_them(peer):
    handle = peer.attach_sender("small")
    for number, delivery_id in enumerate((7, 8, 8, 8, 11, 3)):
        peer.next_delivery_id = delivery_id
        peer.transfer(message(b"%d" % number), handle)
    answered = []
    while len(answered) < 6:
        _, first, last, settled, state, *_ = peer.expect(DISPOSITION).fields
        assert (settled, state.descriptor) == (True, ACCEPTED)
        answered += range(first, (first if last is None else last) + 1)
    assert sorted(answered) == [3, 7, 8, 8, 8, 11]
    peer.attach_receiver("small", 6, settled=True)
    assert [body_of(peer.expect(TRANSFER).payload) for _ in range(6)] == [b"%d" % number for number in range(6)]


def test_a_link_may_be_attached_and_detached_many_times_in_one_segment(peer):
    detach = performative(0, DETACH, [UInt(0), True])
    peer.send((attach_bytes("link", 0) + detach) * 5 + attach_bytes("link", 0))
    for _ in range(5):
        peer.expect(DETACH)
    for _ in range(6):
        peer.expect(ATTACH)
    peer.next_delivery_id = 0
    peer.transfer(message(b"after all that"), 0)
    assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED


def test_a_session_may_begin_and_end_many_times_in_one_segment(peer):
    begin = performative(1, BEGIN, [None, UInt(0), UInt(10), UInt(10)])
    peer.send((begin + performative(1, END, [])) * 5 + begin)
    for _ in range(5):
        peer.expect(END)
    peer.attach_sender("orders", channel=1)


def test_frames_after_a_close_are_ignored(peer):
    peer.send(performative(0, CLOSE, []) + attach_bytes("late", 0))
    assert [frame.code for frame in peer.wait_closed()] == [CLOSE]


def test_detach_and_end_straight_after_a_transfer_are_answered_and_the_message_is_kept(peer):
    handle = peer.attach_sender("orders")
    transfer = performative(0, TRANSFER, [UInt(handle), UInt(0), b"tag", UInt(0), False, False], message(b"kept"))
    peer.send(transfer + performative(0, DETACH, [UInt(handle), True]) + performative(0, END, []))
    assert peer.expect(DETACH).fields[1] is True
    peer.expect(END)
    assert peer.close()[-1] == Frame(0, CLOSE, [None], b"")


@pytest.mark.parametrize("end", [DETACH, END, CLOSE], ids=["detach", "end", "close"])
def test_an_end_straight_after_a_settlement_loses_neither(broker, end):
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.transfer(message(b"to settle"), peer.attach_sender("invoices"))
        peer.expect(DISPOSITION)
        receiver = peer.attach_receiver("invoices", credit=1)
        delivery_id = peer.expect(TRANSFER).fields[1]
        settle = performative(0, DISPOSITION, [True, UInt(delivery_id), None, False, outcome(ACCEPTED)])
        peer.send(settle + performative(0, end, [UInt(receiver), True] if end == DETACH else []))
        peer.expect(end)
    with RawPeer.connect(broker.amqp_port) as peer:
        receiver = peer.attach_receiver("invoices", credit=1)
        peer.flow(receiver, 1, drain=True)
        peer.expect(FLOW)
        peer.nothing_more(TRANSFER, 0)


@pytest.mark.parametrize("state", ["accepted", 5, ["accepted"]], ids=str)
def test_a_state_that_is_not_described_settles_nothing(broker, state):
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.transfer(message(b"stays"), peer.attach_sender("invoices"))
        peer.expect(DISPOSITION)
        peer.attach_receiver("invoices", credit=1)
        delivery_id = peer.expect(TRANSFER).fields[1]
        peer.say(DISPOSITION, True, UInt(delivery_id), None, False, state)
        peer.settle(delivery_id)
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED


# --- the layers below -------------------------------------------------------------------------------------------------


def test_a_second_sasl_header_is_no_amqp(broker):
    with RawPeer(broker.amqp_port) as peer:
        peer.sasl_plain()
        peer.send(SASL_HEADER)
        opened, closed = peer.wait_closed()
        assert opened.code == OPEN
        assert error_of(closed)[0] == "amqp:connection:framing-error"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="HTTP"),
        pytest.param(bytes.fromhex("16030102000100 01fc0303"), id="TLS"),
        pytest.param(b"AMQP\x00\x00\x09\x01", id="AMQP 0-9-1"),
        pytest.param(b"AMQP\x02\x01\x00\x00", id="AMQP over TLS"),
    ],
)
def test_a_peer_with_another_protocol_gets_our_header_and_is_closed(broker, data):
    with RawPeer(broker.amqp_port) as peer:
        peer.send(data)
        assert peer.socket.recv(100) == SASL_HEADER
        assert peer.socket.recv(100) == b""


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(bytes.fromhex("00000007"), id="size 7"),
        pytest.param(bytes.fromhex("00ffffff02010000"), id="too large"),
        pytest.param(frame_bytes(0, encode(Described(ULong(0x41), [Symbol("PLAIN")]))), id="an AMQP frame"),
        pytest.param(frame_bytes(0, encode(Described(ULong(0x41), [])), 1), id="no mechanism"),
        pytest.param(frame_bytes(0, encode(Described(ULong(0x41), [UShort(5)])), 1), id="a mechanism that is a number"),
        pytest.param(frame_bytes(0, b"\x00\x53\x41" + HOSTILE["an array of 2^31 trues"], 1), id="2^31 trues"),
        pytest.param(frame_bytes(0, b"\x00\x53\x41" + nested_lists(400), 1), id="nested"),
    ],
)
def test_nonsense_in_the_sasl_layer_closes_the_connection(broker, frame):
    with RawPeer(broker.amqp_port) as peer:
        peer.send(SASL_HEADER + frame)
        assert all(each.code != 0x44 for each in peer.wait_closed())


def test_rejected_is_not_said_to_an_unknown_outcome_of_sasl(broker):
    """A mechanism that is not offered is refused by an outcome, not by silence."""
    with RawPeer(broker.amqp_port) as peer:
        assert peer.sasl("SCRAM-SHA-256", b"").fields[0] == 1
        assert peer.wait_closed() == []


def test_rejected_without_an_error_dead_letters(broker):
    """A `rejected` whose error is no error counts as one without (amqp.md 6.1)."""
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.transfer(message(b"goes"), peer.attach_sender("invoices"))
        peer.expect(DISPOSITION)
        peer.attach_receiver("invoices", credit=1)
        peer.settle(peer.expect(TRANSFER).fields[1], state=outcome(REJECTED))
        assert peer.expect(DISPOSITION).fields[4] == outcome(REJECTED)
