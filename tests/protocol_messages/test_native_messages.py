"""What the extension takes, it takes as Python does; and it takes what clients usually send."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.gateway.links.delivery import render_delivery
from broker.namespace.fragments import Keys
from protocol.codec import Described, Symbol, Timestamp, UByte, UInt, ULong, encode
from protocol.engine.proton.native import native
from protocol.errors import ProtocolError
from protocol.message.intake import take_apart
from protocol.message.layout import LAYOUT
from storage.records import NEVER, encode_message
from tests.examples import examples
from tests.protocol_messages.test_intake import messages

pytestmark = pytest.mark.skipif(native is None, reason="the extension is not built, or is switched off")

TIMES = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 1 << 45)
ID = b"\xa1\x20" + b"0123456789abcdef" * 2
DATA = encode(Described(ULong(0x75), b"body"))


def section(code: int, value: Any) -> bytes:
    return encode(Described(ULong(code), value))


def check(message: bytes) -> bool:
    """True if the extension takes the message."""
    taken = False
    for message_id in (None, ID):
        found = native.take_apart(message, message_id)
        if found is not None:
            taken = True
            assert take_apart(message, False, None if message_id is None else lambda: ID) == (*found, None)
    return taken


USUAL = {
    "a body alone": DATA,
    "a text": encode(Described(ULong(0x77), "text")),
    "a long body": encode(Described(ULong(0x75), b"x" * 100_000)),
    "a header": section(0x70, [True, UByte(4)]) + DATA,
    "a short time to live": section(0x70, [None, None, UInt(200)]) + DATA,
    "a time to live": section(0x70, [True, UByte(4), UInt(86_400_000), None, UInt(0)]) + DATA,
    "a header without fields": b"\x00\x53\x70\x45" + DATA,
    "an id": section(0x73, ["id"]) + DATA,
    "no properties": section(0x73, []) + DATA,
    "a subject": section(0x73, [None, None, None, "subject"]) + DATA,
    "many properties": section(0x73, [None, b"u", "to" * 99, "s", "r", "c", Symbol("text/plain")]) + DATA,
    "annotations": section(0x72, {Symbol("key"): 5}) + DATA,
    "application properties": section(0x74, {"number": 5, "text": "t", "none": None}) + DATA,
    "all": b"".join(section(*each) for each in ((0x70, [True]), (0x72, {Symbol("k"): 1}), (0x73, ["id"]))) + DATA,
}  # fmt: skip


@pytest.mark.parametrize("message", USUAL.values(), ids=USUAL.keys())
def test_usual_messages_are_taken(message):
    assert check(message)


@settings(max_examples=examples(500))
@given(messages(), st.data())
def test_what_is_taken_is_taken_as_by_python_even_if_it_is_damaged(generated, data):
    message = bytearray(generated[1])
    for _ in range(data.draw(st.integers(0, 2))):
        if message:
            message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del message[data.draw(st.integers(0, len(message))) :]
    check(bytes(message))


PIECES = st.sampled_from(
    [
        *[bytes((0, 0x53, code)) for code in (0x70, 0x71, 0x72, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78)],
        *[bytes((constructor,)) for constructor in (0x40, 0x41, 0x43, 0x45, 0x50, 0x52, 0x56, 0x70, 0x83, 0x98)],
        *[bytes((constructor, size)) for constructor in (0xA0, 0xA1, 0xA3, 0xC0, 0xC1) for size in (0, 1, 5, 34, 255)],
        b"\xb0\0\0\0\1", b"\xb1\xff\xff\xff\xff", b"\xd0\0\0\0\4\0\0\0\0", b"\xd1\0\1\0\1\0\0\0\2",
        b"x-opt-lock-token", b"a", b"\xff", b"\0" * 9,
    ]
)  # fmt: skip


@settings(max_examples=examples(1000))
@given(st.lists(PIECES, max_size=24).map(b"".join))
def test_pieces_of_messages_are_taken_as_by_python(message):
    check(message)


@settings(max_examples=examples(300))
@given(
    messages(),
    st.integers(0, (1 << 63) - 1),
    st.integers(0, (1 << 32) - 1),
    TIMES,
    st.just(NEVER) | TIMES,
    st.none() | st.tuples(st.binary(min_size=16, max_size=16), st.integers(0, (1 << 63) - 1)),
    st.sampled_from(Keys),
    st.booleans(),
)
def test_a_record_is_rendered_as_by_python(generated, number, count, enqueued_ms, expires_ms, lock, keys, is_copy):
    try:
        layout, stored, _, _ = take_apart(generated[1])
    except ProtocolError:
        return
    record = encode_message(enqueued_ms, expires_ms, layout, stored)
    token, until_ms = lock or (None, 0)
    found = native.render(record, number, count, token, until_ms, keys, is_copy)
    if expires_ms == NEVER and keys is Keys.NONE:
        assert (found is not None) == (layout[0] < 4)
    if found is not None:
        until = None if lock is None else until_ms
        prefix, offset = render_delivery(record, number, count, until, None, token, keys, is_copy)
        assert found == prefix + record[offset:]


FIELDS = st.none() | st.sampled_from(["text", b"binary", Symbol("symbol"), ULong(3), Timestamp(5), True])


@given(st.lists(FIELDS, max_size=13), st.integers(0, 1 << 45), st.integers(0, 1 << 48), st.booleans())
def test_the_times_of_a_message_that_expires_are_rendered(fields, enqueued_ms, ttl_ms, is_long):
    properties = encode(Described(ULong(0x73), fields)) if fields else b""
    if is_long and fields:
        properties = b"\x00\x53\x73" + encode([*fields, "x" * 250, None])  # a list of 32 bits
        properties = properties if len(fields) < 12 else b""
    stored = properties + encode(Described(ULong(0x75), b"body"))
    layout = LAYOUT.pack(0, 0, 0, 0, len(properties), 0)
    record = encode_message(enqueued_ms, enqueued_ms + ttl_ms, layout, stored)
    found = native.render(record, 7, 1, bytes(16), 9)
    prefix, offset = render_delivery(record, 7, 1, 9, None, bytes(16))
    assert found == prefix + record[offset:]


@pytest.mark.parametrize("keys", Keys)
@pytest.mark.parametrize("session_id", ["", "s"])
@pytest.mark.parametrize("partition_key", ["", "p"])
def test_messages_of_partitioned_entities_are_rendered_with_their_keys(keys, session_id, partition_key):
    annotations = {Symbol("a"): "b"}
    if partition_key:
        annotations[Symbol("x-opt-partition-key")] = session_id or partition_key
    properties = ["id", *[None] * 9, session_id or None]
    message = section(0x72, annotations) + section(0x73, properties) + DATA
    layout, stored, _, _ = take_apart(message)
    record = encode_message(1, NEVER, layout, stored)
    found = native.render(record, 5 << 48 | 3, 0, bytes(16), 9, keys)
    assert found is not None
    prefix, offset = render_delivery(record, 5 << 48 | 3, 0, 9, None, bytes(16), keys)
    assert found == prefix + record[offset:]


@given(st.binary(max_size=120), st.sampled_from(Keys), st.booleans())
def test_any_record_is_rendered_or_declined(record, keys, is_copy):
    native.render(record, 1, 0, None, 0, keys, is_copy)
    native.render(record[:16] + NEVER.to_bytes(8, "big") + record[24:], 1, 0, bytes(16), 0, keys, is_copy)
