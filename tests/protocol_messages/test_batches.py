from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import Described, Symbol, encode
from protocol.errors import DecodeError, EmptyBatch, LimitExceeded, ProtocolError
from protocol.message.batches import unpack_batch
from tests.examples import examples


def section(code, value):
    return encode(Described(code, value))


def batch(*messages: bytes) -> bytes:
    envelope = section(0x72, {Symbol("x-opt-partition-key"): "k"}) + section(0x73, ["first"])
    return envelope + b"".join(section(0x75, message) for message in messages)


def test_each_data_section_is_a_message_and_the_envelope_is_none():
    messages = [section(0x75, b"one"), section(0x77, "two"), section(0x75, b"x" * 1000)]
    assert unpack_batch(batch(*messages)) == messages


def test_an_envelope_may_have_any_metadata():
    message = section(0x75, b"one")
    before = section(0x70, [True]) + section(0x73, ["id"]) + section(0x74, {"k": "v"})
    after = section(0x78, {}) + section(0x71, {})
    assert unpack_batch(before + section(0x75, message) + after) == [message]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\x00\x53\x75\x40", "is null"),
        (section(0x77, [b"m"]), "body is not data"),
        (section(0x75, b"m") + section(0x76, [1]), "body is not data"),
        (section(0x75, b"m")[:-1], "end within"),
        (section(0x75, b"m") + b"\x00", "end within"),
        (b"not amqp", "should begin"),
    ],
)
def test_a_malformed_batch_is_refused_as_a_whole(payload, reason):
    with pytest.raises(DecodeError, match=reason):
        unpack_batch(payload)


@pytest.mark.parametrize("payload", [b"", section(0x73, ["id"])])
def test_a_batch_without_messages_is_told_apart(payload):
    with pytest.raises(EmptyBatch):
        unpack_batch(payload)


def test_the_number_of_messages_is_limited():
    assert len(unpack_batch(batch(*[b""] * 20), max_messages=20)) == 20
    with pytest.raises(LimitExceeded, match="messages in a batch exceeds the limit of 20"):
        unpack_batch(batch(*[b""] * 21), max_messages=20)


def test_a_flood_of_sections_that_are_no_messages_is_limited_too():
    with pytest.raises(LimitExceeded, match="sections"):
        unpack_batch(section(0x78, {}) * 100_000, max_messages=20)


@settings(max_examples=examples(100))
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=5), st.data())
def test_any_damage_is_refused_or_leaves_messages(messages, data):
    payload = bytearray(batch(*messages))
    assert unpack_batch(bytes(payload)) == messages
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        assert unpack_batch(bytes(payload))
