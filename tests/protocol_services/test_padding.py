"""The frames are what Proton 0.40 writes; the widths are what azure-servicebus 7.14.3 reads by position."""

import pytest

from protocol.codec import decode
from protocol.engine.padding import CONTROL, EVERYTHING, pad, reads_by_position

HEADER = b"AMQP\x00\x01\x00\x00"
HEARTBEAT = bytes.fromhex("0000000802000000")
OPEN = bytes.fromhex("0000001a02000000005310c00d04a10173407000008000607fff")
BEGIN = bytes.fromhex("0000002102000000005311c0140560000043707fffffff707fffffff707fffffff")
ATTACH = bytes.fromhex(
    "0000003502000000005312c0280ba10172434250025000005328c00805a1017143404342005329c00805a101744340434240404344"
)
LINK_FLOW = bytes.fromhex("0000002402000000005313c0170943707fffffff43707fffffff52014370000003e84042")
SESSION_FLOW = bytes.fromhex("0000001c02000000005313c00f0452017000000fff5201707fffffff")
TRANSFER = bytes.fromhex("0000002802000000005314c016044343a010" + "78" * 16 + "43" + "0053774568")
DISPOSITION = bytes.fromhex("0000001602000000005315c009054143404100532445")
DETACH = bytes.fromhex("0000000f02000000005316c0020143")
END = bytes.fromhex("0000000c0200000000531745")
CLOSE = bytes.fromhex("0000000c0200000000531845")

WIDTH = {OPEN: 10, BEGIN: 8, ATTACH: 14, LINK_FLOW: 11, SESSION_FLOW: 11, DETACH: 3, END: 1, CLOSE: 1}
FREQUENT = {TRANSFER: 11, DISPOSITION: 6}


def fields_and_payload(frame: bytes):
    assert int.from_bytes(frame[:4], "big") == len(frame)
    performative, end = decode(frame, 8)
    return performative.value, frame[end:]


@pytest.mark.parametrize(("frame", "width"), (WIDTH | FREQUENT).items())
def test_a_short_performative_gets_nulls_up_to_its_width(frame, width):
    before, payload = fields_and_payload(frame)
    after, payload_after = fields_and_payload(pad(frame, EVERYTHING))
    assert after == before + [None] * (width - len(before))
    assert payload_after == payload


@pytest.mark.parametrize("frame", FREQUENT)
def test_transfers_and_dispositions_stay_as_they_are_for_most_peers(frame):
    assert pad(frame) is frame
    assert pad(frame, CONTROL) is frame


@pytest.mark.parametrize("frame", WIDTH | FREQUENT)
def test_a_full_performative_stays_as_it_is(frame):
    padded = pad(frame, EVERYTHING)
    assert pad(padded, EVERYTHING) is padded


def test_frames_between_are_kept_in_order():
    stream = HEADER + OPEN + HEARTBEAT + BEGIN + TRANSFER + DISPOSITION + END + HEARTBEAT
    assert pad(stream) == HEADER + pad(OPEN) + HEARTBEAT + pad(BEGIN) + TRANSFER + DISPOSITION + pad(END) + HEARTBEAT


@pytest.mark.parametrize("stream", [b"", HEADER, HEARTBEAT, HEADER + HEARTBEAT, HEARTBEAT * 3, TRANSFER])
def test_frames_with_nothing_to_pad_are_not_copied(stream):
    assert pad(stream) is stream


def frame(code: int, fields: bytes) -> bytes:
    body = bytes((0, 0x53, code)) + fields
    return (8 + len(body)).to_bytes(4, "big") + bytes((2, 0, 0, 7)) + body


def test_a_list_that_outgrows_its_size_byte_gets_the_wide_form():
    name = bytes((0xA1, 248)) + b"n" * 248
    attach = frame(0x12, bytes((0xC0, 252, 2)) + name + b"\x43")
    padded = pad(attach)
    assert padded[11] == 0xD0
    assert fields_and_payload(padded)[0] == ["n" * 248, 0] + [None] * 12
    assert padded[6:8] == b"\x00\x07"


def test_a_list_of_the_largest_short_size_keeps_the_short_form():
    # 254 bytes of fields and the count are 255.
    name = bytes((0xA1, 239)) + b"n" * 239
    padded = pad(frame(0x12, bytes((0xC0, 243, 2)) + name + b"\x43"))
    assert (padded[11], padded[12]) == (0xC0, 255)
    assert len(fields_and_payload(padded)[0]) == 14


def test_a_list_of_the_wide_form_is_padded_too():
    name = b"\xb1\x00\x00\x01\x2c" + b"n" * 300
    attach = frame(0x12, b"\xd0" + (4 + 306).to_bytes(4, "big") + (2).to_bytes(4, "big") + name + b"\x43")
    assert fields_and_payload(pad(attach))[0] == ["n" * 300, 0] + [None] * 12


def test_the_payload_of_a_transfer_may_look_like_frames():
    payload = OPEN + END
    transfer = frame(0x14, b"\xc0\x04\x03\x43\x43\x40") + payload
    transfer = len(transfer).to_bytes(4, "big") + transfer[4:]
    assert pad(transfer) is transfer
    fields, rest = fields_and_payload(pad(transfer, EVERYTHING))
    assert len(fields) == 11
    assert rest == payload


def test_an_end_that_is_an_empty_list_gets_a_size_and_a_count():
    assert pad(END) == bytes.fromhex("0000000f02000000005317c0020140")


@pytest.mark.parametrize("cut", range(1, len(BEGIN)))
def test_bytes_that_end_within_a_frame_are_refused(cut):
    with pytest.raises(ValueError, match="not whole frames"):
        pad(OPEN + BEGIN[:cut])


@pytest.mark.parametrize(
    ("properties", "positional"),
    [
        ({"product": "azsdk-python-servicebus", "version": "7.14.3"}, True),
        ({"product": "azsdk-python-servicebus", "version": "7.15.0"}, True),
        ({"product": "MSJSClient"}, False),
        ({"product": 7}, False),
        ({}, False),
    ],
)
def test_python_sdks_are_known_by_their_product(properties, positional):
    assert reads_by_position(properties) is positional
