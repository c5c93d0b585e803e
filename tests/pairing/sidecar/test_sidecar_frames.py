"""What is read of frames on the way: equal to the whole performative, and never anything but a ProtocolError."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.pairing.sidecar.frames import FrameTooLarge, Incoming, Transfer, read, transfer, write
from broker.pairing.sidecar.through import Through
from protocol.codec import Described, Symbol, UByte, UInt, ULong, UShort, encode
from protocol.engine.frames import HEAD
from protocol.errors import ProtocolError
from protocol.symbols import AMQP_HEADER, Descriptor
from tests.examples import examples

uints = st.one_of(st.integers(0, 300), st.sampled_from([0, 255, 256, 2**31, 2**32 - 1])).map(UInt)
numbers = st.one_of(st.none(), uints)
flags = st.sampled_from([None, True, False])
tags = st.one_of(st.none(), st.binary(max_size=32), st.binary(min_size=250, max_size=300))
states = st.sampled_from([None, Described(ULong(0x34), [b"txn"]), Described(Symbol("amqp:accepted:list"), [])])
descriptors = st.sampled_from([ULong(0x14), Symbol("amqp:transfer:list")])


@st.composite
def transfers(draw):
    fields = [
        draw(uints),
        draw(numbers),
        draw(tags),
        draw(numbers),
        draw(flags),
        draw(flags),
        draw(st.sampled_from([None, UByte(0), UByte(1)])),
        draw(states),
        draw(flags),
        draw(flags),
        draw(flags),
    ]
    return fields[: draw(st.integers(1, len(fields)))]


def field(fields, index):
    return fields[index] if index < len(fields) else None


@settings(max_examples=examples(500))
@given(
    transfers(),
    st.binary(max_size=40),
    st.sampled_from([ULong(0x14), Symbol("amqp:transfer:list")]),
    st.binary(max_size=9),
)
def test_a_transfer_is_read_as_its_whole_performative_says(fields, payload, descriptor, before):
    body = encode(Described(descriptor, fields)) + payload
    data = before + HEAD.pack(8 + len(body), 2, 0, 7) + body
    found = transfer(data, len(before), len(data))
    number = field(fields, 1)
    aborted = field(fields, 9) is True
    assert found == Transfer(
        int(fields[0]),
        None if number is None else int(number),
        field(fields, 4) is True,
        aborted,
        aborted or field(fields, 5) is not True,
    )


@given(transfers(), st.binary(max_size=40))
def test_a_frame_is_written_as_it_was_read(fields, payload):
    data = write(3, Descriptor.TRANSFER, fields, payload)
    frame = read(data, 0, len(data))
    assert (frame.channel, frame.code, frame.payload) == (3, Descriptor.TRANSFER, payload)
    assert write(frame.channel, frame.code, frame.fields, frame.payload) == data
    assert frame.fields == fields + [None] * (11 - len(fields))


class Nobody:
    """An owner whose every entity has failed over."""

    def is_here(self, path):
        return True

    def to_local(self, data): ...

    def on_key(self, key_name, key, accepted): ...

    def on_token(self, audience, token): ...

    def on_unread_token(self): ...

    def on_sender(self, path, error, began_ms): ...

    def on_taken(self, path, count): ...

    def on_refused(self, path, error, began_ms): ...


OPEN = write(0, 0x10, ["client", "host", UInt(65536)])
BEGIN = write(0, 0x11, [None, UInt(0), UInt(100), UInt(100)])
BEGUN = write(0, 0x11, [UShort(0), UInt(0), UInt(100), UInt(100)])
SOURCE, TARGET = Described(ULong(0x28), ["x"]), Described(ULong(0x29), ["q"])
ATTACH = write(0, 0x12, ["s", UInt(0), False, None, None, SOURCE, TARGET])
described = st.sampled_from([ULong(0x24), ULong(0x25), ULong(0x1D), ULong(0x29), "x"])
values = st.recursive(
    st.one_of(st.none(), st.booleans(), uints, st.binary(max_size=9), st.text(max_size=9)),
    lambda inside: st.one_of(
        st.lists(inside, max_size=4), st.builds(Described, described, st.lists(inside, max_size=3))
    ),
    max_leaves=6,
)
sides = st.sampled_from(["client", "primary", "local"])
wild_frames = st.builds(
    lambda channel, code, fields, payload, kind: write(channel, code, fields, payload, kind),
    st.sampled_from([0, 0, 0, 1, 65535]),
    st.integers(0x10, 0x19) | st.sampled_from([0x40, 0x41, 0x44, 0x99]),
    st.lists(values, max_size=9),
    st.binary(max_size=10),
    st.sampled_from([0, 0, 0, 1, 2]),
)


@settings(max_examples=examples(600))
@given(st.lists(st.tuples(sides, wild_frames | st.binary(max_size=60)), max_size=8), st.booleans())
def test_whatever_either_side_sends_only_a_protocol_error_comes_out(sent, attached):
    through = Through(Nobody(), "primary")
    through.from_client(AMQP_HEADER + OPEN + BEGIN, 0)
    through.from_primary(AMQP_HEADER + OPEN + BEGUN)
    if attached:
        through.from_client(ATTACH, 0)
    for side, data in sent:
        try:
            if side == "client":
                through.from_client(data, 0)
            elif side == "primary":
                through.from_primary(data)
            else:
                through.from_local(data)
        except ProtocolError:
            return


@pytest.mark.parametrize("data", [b"\x00\x00\x00\x07\x02\x00\x00\x00", b"\x00\x20\x00\x00\x02\x00\x00\x00"])
def test_a_frame_that_cannot_be_is_refused_before_it_is_kept(data):
    with pytest.raises(ProtocolError):
        Through(Nobody(), "primary").from_client(AMQP_HEADER + data, 0)


def test_a_rejection_with_long_texts_is_passed_on_although_it_is_larger_than_a_frame_may_be():
    error = Described(ULong(0x1D), [Symbol("com.microsoft:dead-letter"), "d" * 100_000])
    rejection = write(0, Descriptor.DISPOSITION, [True, UInt(0), None, False, Described(ULong(0x25), [error])])
    for step in (len(rejection), 1000, 9):
        incoming = Incoming()
        incoming.limit(65_536)
        found = []
        for at in range(0, len(rejection), step):
            data = incoming.feed(rejection[at : at + step])
            found += list(incoming.frames(data))
            incoming.rest_of(data, 0, [])
        assert found == [(0, len(rejection), 0, Descriptor.DISPOSITION)]


@pytest.mark.parametrize("first_bytes", [8, 11, 200])
def test_other_frames_that_are_too_large_are_not_waited_for(first_bytes):
    large = write(0, Descriptor.FLOW, [None, UInt(0), UInt(0), UInt(0), *[None] * 6, {Symbol("x"): "y" * 100_000}])
    incoming = Incoming()
    incoming.limit(65_536)

    def feed_in_parts():
        for part in (large[:first_bytes], large[first_bytes:]):
            data = incoming.feed(part)
            list(incoming.frames(data))
            incoming.rest_of(data, 0, [])

    with pytest.raises(FrameTooLarge):
        feed_in_parts()
    with pytest.raises(FrameTooLarge):
        list(incoming.frames(HEAD.pack(1 << 20, 2, 0, 0)))
