import contextlib
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.client.messages import Message, data_section, value_section
from protocol.codec import Described, Long, Symbol, Timestamp, UByte, UInt, ULong, decode, encode
from protocol.errors import DecodeError, ProtocolError
from protocol.message.intake import take_apart


def sections(message: bytes) -> list[Described]:
    result = []
    at = 0
    while at < len(message):
        section, at = decode(message, at)
        result.append(section)
    return result


def test_a_small_message_has_few_sections():
    assert sections(Message.of(b"hello", message_id="1").encode()) == [
        Described(ULong(0x70), [True]),
        Described(ULong(0x73), ["1"]),
        Described(ULong(0x75), b"hello"),
    ]


def test_fields_have_their_types_on_the_wire():
    encoded = Message.of(
        b"", priority=7, ttl_ms=1000, content_type="text/plain", absolute_expiry_ms=5, group_id="s", group_sequence=2,
        annotations={"x-opt-partition-key": "k"}, application_properties={"n": 1},
    ).encode()  # fmt: skip
    header, annotations, properties, application_properties, _ = sections(encoded)
    assert [type(value) for value in header.value] == [bool, UByte, UInt]
    assert [type(key) for key in annotations.value] == [Symbol]
    assert type(properties.value[6]) is Symbol
    assert type(properties.value[8]) is Timestamp
    assert type(properties.value[11]) is UInt
    assert [(type(key), type(value)) for key, value in application_properties.value.items()] == [(str, Long)]


def test_the_broker_takes_what_is_made():
    take_apart(
        Message.of(
            b"x",
            message_id="m",
            user_id=b"u",
            to="t",
            subject="s",
            reply_to="r",
            correlation_id=UUID(int=1),
            content_type="a/b",
            content_encoding="gzip",
            absolute_expiry_ms=1,
            creation_ms=1,
            group_id="g",
            group_sequence=1,
            reply_to_group_id="h",
            application_properties={"a": 1.5, "b": True, "c": b"x", "d": UUID(int=2)},
        ).encode()
    )


EVERYTHING = Message(
    body=value_section({"k": [Long(1), "two"]}),
    priority=UByte(4),
    ttl_ms=UInt(60_000),
    delivery_count=UInt(2),
    message_id=UUID(int=7),
    subject="s",
    correlation_id=b"c",
    content_type=Symbol("a/b"),
    creation_ms=Timestamp(1),
    annotations={Symbol("x-opt-sequence-number"): Long(5)},
    application_properties={"a": Long(1), "b": "text"},
)


def test_decoded_messages_encode_to_the_same_bytes():
    encoded = EVERYTHING.encode()
    assert Message.decode(encoded) == EVERYTHING
    assert Message.decode(encoded).encode() == encoded
    assert EVERYTHING.sequence_number == 5


def test_delivery_annotations_are_left_out_and_the_footer_stays():
    footer = encode(Described(0x78, {Symbol("f"): "x"}))
    encoded = encode(Described(0x71, {Symbol("a"): "b"})) + data_section(b"x") + footer
    message = Message.decode(encoded)
    assert message.body == data_section(b"x") + footer
    assert message.annotations == {}
    assert message.content() == b"x"


def test_symbolic_descriptors_are_read():
    encoded = encode(Described(Symbol("amqp:properties:list"), ["id"])) + encode(
        Described(Symbol("amqp:data:binary"), b"x")
    )
    message = Message.decode(encoded)
    assert (message.message_id, message.content()) == ("id", b"x")


@pytest.mark.parametrize(
    ("body", "content"),
    [
        (data_section(b"a") + data_section(b"b"), b"ab"),
        (value_section("text"), "text"),
        (value_section(None), None),
        (encode(Described(0x76, [1])) + encode(Described(0x76, ["b"])), [1, "b"]),
        (b"", b""),
    ],
)
def test_content(body, content):
    assert Message(body).content() == content


def test_a_message_without_a_body_gets_an_empty_one():
    assert Message().encode().endswith(data_section(b""))


@pytest.mark.parametrize(
    "message",
    [
        b"\x40",
        b"\x00",
        encode(Described(0x24, [])),
        encode(Described(Symbol("amqp:accepted:list"), [])),
        encode(Described(0x70, {})),
        encode(Described(0x73, [None] * 14)),
        encode(Described(0x74, ["a"])),
        encode(Described(0x73, ["a"]))[:-1],
    ],
)
def test_bytes_that_are_no_message_are_a_decode_error(message):
    with pytest.raises(DecodeError):
        Message.decode(message)


@given(st.binary(max_size=64))
def test_nothing_but_protocol_errors_comes_of_random_bytes(data):
    with contextlib.suppress(ProtocolError):
        Message.decode(b"\x00\x53" + data).content()
