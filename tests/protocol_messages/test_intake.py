import struct
from functools import partial
from itertools import permutations
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proton import Message, symbol

from broker.wire import Extra
from protocol import bounds
from protocol.codec import (
    Array,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
    Described,
    Float,
    Int,
    Long,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    decode,
    encode,
)
from protocol.errors import DecodeError, HeaderTooLarge, InvalidField, LimitExceeded, ProtocolError
from protocol.message import fields, intake, sections
from protocol.message.intake import take_apart
from protocol.message.layout import DURABLE, HAS_DELIVERY_ANNOTATIONS, HAS_PRIORITY, unpack_layout
from tests.examples import examples

HEADER, DELIVERY, ANNOTATIONS, PROPERTIES, APPLICATION, DATA, SEQUENCE, VALUE, FOOTER = range(0x70, 0x79)


def section(code: int, value: Any) -> bytes:
    return encode(Described(code, value))


def wide(encoded: bytes) -> bytes:
    """The same section with a four-byte size, as some encoders always write."""
    constructor, content = encoded[3], encoded[4:]
    if constructor in (0xC0, 0xC1):
        size, count, rest = content[0] + 3, content[1], content[2:]
        return encoded[:3] + bytes((constructor | 0x10,)) + size.to_bytes(4, "big") + count.to_bytes(4, "big") + rest
    if constructor == 0xA0:
        return encoded[:3] + b"\xb0" + content[0].to_bytes(4, "big") + content[1:]
    return encoded


BODY = section(DATA, b"body")


def application_properties(**properties: Any) -> bytes:
    return section(APPLICATION, properties) + BODY


def properties(**fields: Any) -> bytes:
    names = ["message_id", *["_"] * 5, "content_type", *["_"] * 3, "group_id"]
    return section(PROPERTIES, [fields.get(name) for name in names]) + BODY


def annotations(values: dict[str, Any]) -> bytes:
    return section(ANNOTATIONS, {Symbol(key): value for key, value in values.items()}) + BODY


def layout_of(message: bytes) -> tuple[int, ...]:
    return tuple(unpack_layout(take_apart(message)[0]))


# --- examples ---------------------------------------------------------------------------------------------------------


def test_a_bare_message_is_stored_as_the_very_bytes_it_came_in():
    message = section(PROPERTIES, ["id"]) + BODY
    layout, stored, ttl_ms, extra = take_apart(message)
    assert stored is message
    assert unpack_layout(layout) == (0, 0, 0, 0, len(message) - len(BODY), 0)
    assert (ttl_ms, extra) == (None, None)
    assert len(layout) == 16


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (None, ["new"]),
        ([], ["new"]),
        ([None], ["new"]),
        ([None, b"user", "to"], ["new", b"user", "to"]),
        ([None, None, "t" * 190], ["new", None, "t" * 190]),
        ([None, None, "t" * 250], ["new", None, "t" * 250]),
        ([None, None, "t" * 1000], ["new", None, "t" * 1000]),
        (["old", None, "to"], ["old", None, "to"]),
        ([UUID(int=1)], [UUID(int=1)]),
        ([""], [""]),
    ],
)
@pytest.mark.parametrize("before", [b"", section(HEADER, [True]), section(ANNOTATIONS, {Symbol("a"): 1})])
def test_a_message_without_an_id_gets_one_where_that_is_wanted(fields, expected, before):
    message = before + (b"" if fields is None else section(PROPERTIES, fields)) + BODY
    layout, stored, _, _ = take_apart(message, new_id=lambda: encode("new"))
    parts = unpack_layout(layout)
    properties_end = parts.annotation_bytes + parts.properties_bytes
    properties, end = decode(stored, parts.annotation_bytes)
    assert (properties.value, end) == (expected, properties_end)
    assert stored[properties_end:] == BODY
    assert stored[: parts.annotation_bytes] == take_apart(message)[1][: parts.annotation_bytes]


def test_header_fields_become_flags_and_a_time_to_live():
    layout, stored, ttl_ms, _ = take_apart(section(HEADER, [True, UByte(7), UInt(1500), None, UInt(3)]) + BODY)
    assert unpack_layout(layout)[:2] == (DURABLE | HAS_PRIORITY, 7)
    assert ttl_ms == 1500
    assert stored == BODY


@pytest.mark.parametrize("value", [True, False])
def test_first_acquirer_is_stored_where_earlier_versions_find_delivery_annotations(value):
    header = section(HEADER, [True, None, None, value])
    layout, stored, _, _ = take_apart(header + BODY)
    pair = encode(Symbol("x-opt-peeklock-first-acquirer")) + encode(value)
    first = encode(Symbol("x-opt-peeklock-delivery-annotations")) + b"\xd1" + struct.pack(">II", 4 + len(pair), 2)
    assert stored == first + pair + BODY
    assert unpack_layout(layout)[:4] == (DURABLE | HAS_DELIVERY_ANNOTATIONS, 0, 2, len(first + pair))
    sent_by_a_client = section(DELIVERY, {Symbol("x-opt-peeklock-first-acquirer"): not value})
    assert take_apart(header + sent_by_a_client + BODY) == (layout, stored, None, None)
    assert take_apart(sent_by_a_client + BODY)[1] == BODY


@pytest.mark.parametrize("fields", [[], [None], [False], [None, None, None, None, None]])
def test_an_empty_header_says_nothing(fields):
    layout, stored, ttl_ms, _ = take_apart(section(HEADER, fields) + BODY)
    assert (unpack_layout(layout)[:2], ttl_ms, stored) == ((0, 0), None, BODY)


def test_a_ttl_of_zero_is_a_ttl():
    assert take_apart(section(HEADER, [None, None, UInt(0)]) + BODY)[2] == 0


def test_a_ttl_longer_than_a_header_can_say_is_in_the_two_times():
    header = section(HEADER, [None, None, UInt(2**32 - 1)])
    days_60 = 60 * 24 * 3600 * 1000
    times = [None] * 8 + [Timestamp(1_000 + days_60), Timestamp(1_000)]
    assert take_apart(header + section(PROPERTIES, times) + BODY)[2] == days_60
    assert take_apart(header + section(PROPERTIES, ["id"]) + BODY)[2] == 2**32 - 1
    assert take_apart(header + BODY)[2] == 2**32 - 1
    shorter = section(HEADER, [None, None, UInt(5)])
    assert take_apart(shorter + section(PROPERTIES, times) + BODY)[2] == 5


def test_annotation_pairs_are_kept_as_encoded_and_stand_before_the_bare_message():
    pairs = encode(Symbol("x-opt-partition-key")) + encode("k") + encode(Symbol("x-mine")) + encode([1, {"a": None}])
    message = b"\x00\x53\x72\xc1" + bytes((len(pairs) + 1, 4)) + pairs + BODY
    layout, stored, _, extra = take_apart(section(HEADER, [True]) + message)
    assert stored == pairs + BODY
    assert unpack_layout(layout)[2:4] == (4, len(pairs))
    assert extra == {Extra.PARTITION_KEY: "k"}


def test_annotations_that_only_a_broker_sets_are_left_out():
    ours = {
        "x-opt-sequence-number": Long(1),
        "x-opt-enqueued-time": Timestamp(1),
        "x-opt-locked-until": Timestamp(1),
        "x-opt-enqueue-sequence-number": None,
        "x-opt-message-state": Int(1),
        "x-opt-deadletter-source": "q",
        "x-opt-partition-id": Short(1),
        "x-opt-lock-token": UUID(int=1),
    }
    kept = {"x-opt-via-partition-key": "v", "x-opt-scheduled-enqueue-time": Timestamp(-5), "other": "o"}
    for order in ({**ours, **kept}, {**kept, **ours}, dict(zip([*ours][:3], [*ours.values()][:3], strict=True)) | kept):
        layout, stored, _, extra = take_apart(annotations(order))
        pairs = b"".join(encode(Symbol(key)) + encode(value) for key, value in kept.items())
        assert stored == pairs + BODY
        assert unpack_layout(layout)[2:4] == (6, len(pairs))
        assert extra == {Extra.SCHEDULED_MS: 0}
    assert take_apart(annotations(ours))[1] == BODY


@pytest.mark.parametrize("time", [Long(70_000), Timestamp(70_000), ULong(70_000), UInt(70_000), Int(70_000)])
def test_a_delivery_time_of_jms_schedules(time):
    _, stored, _, extra = take_apart(annotations({"x-opt-delivery-time": time}))
    assert extra == {Extra.SCHEDULED_MS: 70_000}
    assert stored == encode(Symbol("x-opt-delivery-time")) + encode(time) + BODY


@pytest.mark.parametrize("time", [Long(-(1 << 63)), Int(-1), Long(0), UInt(0)])
def test_a_delivery_time_long_ago_is_one(time):
    assert take_apart(annotations({"x-opt-delivery-time": time}))[3] == {Extra.SCHEDULED_MS: 0}


def test_a_message_without_a_delivery_time_is_not_scheduled():
    assert not take_apart(annotations({"x-opt-delivery-time": None}))[3]


@pytest.mark.parametrize("first", ["x-opt-delivery-time", "x-opt-scheduled-enqueue-time"])
def test_the_time_of_service_bus_precedes_that_of_jms(first):
    times = {"x-opt-delivery-time": Long(5), "x-opt-scheduled-enqueue-time": Timestamp(7)}
    ordered = {first: times[first], **times}
    assert take_apart(annotations(ordered))[3] == {Extra.SCHEDULED_MS: 7}


@pytest.mark.parametrize("key", ["k", "ключ", "x" * 128, "ж" * 128])  # the last does not fit into a short binary
@pytest.mark.parametrize("name", ["x-opt-partition-key", "x-opt-via-partition-key"])
def test_a_partition_key_sent_as_binary_is_stored_as_a_string(name, key):
    between = {"x-opt-sequence-number": Long(1), name: key.encode(), "x-opt-locked-until": Timestamp(1), "other": b"o"}
    layout, stored, _, extra = take_apart(annotations(between))
    pairs = b"".join(encode(item) for item in (Symbol(name), key, Symbol("other"), b"o"))
    assert stored == pairs + BODY
    assert unpack_layout(layout)[2:4] == (4, len(pairs))
    assert (extra or {}).get(Extra.PARTITION_KEY) == (key if name == "x-opt-partition-key" else None)


@pytest.mark.parametrize("name", ["x-opt-partition-key", "x-opt-via-partition-key"])
def test_a_binary_partition_key_has_the_limits_of_one_that_is_a_string(name):
    with pytest.raises(InvalidField, match=f"{name}: is not of valid UTF-8"):
        take_apart(annotations({name: b"k\xff"}))
    with pytest.raises(LimitExceeded, match=name):
        take_apart(annotations({name: b"x" * 129}))
    with pytest.raises(InvalidField, match="differs from the session id"):
        take_apart(section(ANNOTATIONS, {Symbol("x-opt-partition-key"): b"k"}) + properties(group_id="s"))


def test_properties_that_the_broker_needs_are_noted():
    message = properties(message_id="id", group_id="s", content_type=Symbol("application/vnd.ms-servicebus-ping"))
    assert take_apart(message)[3] == {Extra.SESSION_ID: "s", Extra.PING: True}
    assert take_apart(message, want_message_id=True)[3] == {
        Extra.SESSION_ID: "s",
        Extra.PING: True,
        Extra.MESSAGE_ID: encode("id"),
    }
    assert take_apart(properties(group_id=""))[3] == {Extra.SESSION_ID: ""}
    assert take_apart(properties(content_type="application/vnd.ms-servicebus-ping"))[3] == {Extra.PING: True}


@pytest.mark.parametrize("message_id", ["x" * 128, "é" * 128, ULong(0), ULong(7), ULong(2**63), UUID(int=5), b"\xff"])
def test_message_ids_of_all_types_are_noted_as_encoded(message_id):
    extra = take_apart(properties(message_id=message_id), want_message_id=True)[3]
    assert extra == {Extra.MESSAGE_ID: encode(message_id)}


def test_extra_keys_are_those_of_the_language_between_gateway_and_worker():
    found = {name[6:]: key for name, key in vars(fields).items() if name.startswith("EXTRA_")}
    said_by_links = [Extra.DESTINATION]
    assert found == {key.name: key for key in Extra if key not in said_by_links}


@pytest.mark.parametrize("body", [b"", section(VALUE, None), section(SEQUENCE, [1]) * 2, BODY * 3, section(DATA, b"")])
def test_any_body_and_none_is_kept(body):
    start = section(HEADER, [True]) + section(PROPERTIES, ["id"])
    assert take_apart(start + body)[1] == section(PROPERTIES, ["id"]) + body
    assert take_apart(body)[1] == body


def test_a_body_is_not_looked_into():
    nonsense = b"\x00\x53\x77\xc0\x03\x09\xff\xff"
    assert take_apart(nonsense)[1] == nonsense


def test_delivery_annotations_are_the_first_pair_wherever_they_stand():
    footer = section(FOOTER, {Symbol("f"): 1})
    pairs = {Symbol("x-opt-lock-token"): UUID(int=1), Symbol("a"): "b"}
    annotations_ = section(ANNOTATIONS, {Symbol("c"): 1, Symbol("x-opt-peeklock-delivery-annotations"): {"no": "way"}})
    message = section(HEADER, [True]) + annotations_ + section(PROPERTIES, ["id"]) + BODY + footer
    for delivery in (section(DELIVERY, pairs), wide(section(DELIVERY, pairs))):
        layout, stored, _, _ = found = take_apart(message + delivery)
        assert found == take_apart(delivery + message)
        kept = encode(Symbol("a")) + encode("b")
        first = encode(Symbol("x-opt-peeklock-delivery-annotations")) + b"\xd1" + struct.pack(">II", 4 + len(kept), 2)
        rest = encode(Symbol("c")) + encode(1)
        assert stored == first + kept + rest + section(PROPERTIES, ["id"]) + BODY + footer
        assert unpack_layout(layout)[:4] == (DURABLE | HAS_DELIVERY_ANNOTATIONS, 0, 4, len(first + kept + rest))


def test_delivery_annotations_that_only_a_broker_sets_leave_nothing():
    message = section(HEADER, [True]) + section(PROPERTIES, ["id"]) + BODY
    for delivery in (section(DELIVERY, {}), section(DELIVERY, {Symbol("x-opt-lock-token"): UUID(int=1)})):
        assert take_apart(message + delivery) == take_apart(delivery + message) == take_apart(message)


def test_sections_in_any_order_are_put_in_the_usual_one():
    parts = (
        section(HEADER, [True]),
        section(ANNOTATIONS, {Symbol("a"): 1}),
        section(PROPERTIES, ["id"]),
        section(APPLICATION, {"k": "v"}),
        BODY,
    )
    expected = take_apart(b"".join(parts))
    for order in permutations(parts):
        assert take_apart(b"".join(order)) == expected


@pytest.mark.parametrize(
    "descriptor",
    [b"\x80" + (0x73).to_bytes(8, "big"), b"\xa3\x14amqp:properties:list", b"\xb3\0\0\0\x14amqp:properties:list"],
)
def test_descriptors_in_other_forms_are_put_in_the_one_that_every_client_reads(descriptor):
    value = encode(["id"])
    assert take_apart(b"\x00" + descriptor + value + BODY)[1] == b"\x00\x53\x73" + value + BODY


# --- messages of real clients -----------------------------------------------------------------------------------------


def test_a_message_of_proton():
    message = Message(
        id="id",
        durable=True,
        priority=9,
        ttl=2.5,
        group_id="s",
        subject="l",
        inferred=True,
        body=b"body",
        properties={"a": 1, "b": "two", "c": 0.5},
        annotations={symbol("x-opt-partition-key"): "s"},
        instructions={symbol("x-mine"): 1},
    )
    layout, stored, ttl_ms, extra = take_apart(bytes(message.encode()))
    parts = unpack_layout(layout)
    assert (parts.flags, parts.priority, ttl_ms) == (7, 9, 2500)
    assert extra == {Extra.PARTITION_KEY: "s", Extra.SESSION_ID: "s"}
    again: Any = Message()  # by proton's types it never has properties
    again.decode(stored[parts.annotation_bytes :])
    assert (again.id, again.subject, again.body, again.properties) == (
        "id",
        "l",
        b"body",
        {"a": 1, "b": "two", "c": 0.5},
    )


def test_a_message_of_the_python_sdk():
    # azure-servicebus 7: header and properties padded with nulls, application properties in the wide form.
    message = bytes.fromhex(
        "005370 c0 06 05 40 40 40 40 40"
        "005373 c0 14 0d a1 03 696431 40 40 40 40 40 a3 01 74 40 40 40 40 40 40"
        "005374 d1 0000000b 00000002 a1 01 6b a1 02 7631"
        "005375 a0 05 68656c6c6f"
    )
    layout, stored, ttl_ms, extra = take_apart(message, want_message_id=True)
    assert stored == message[11:]
    assert unpack_layout(layout) == (0, 0, 0, 0, 25, 19)
    assert (ttl_ms, extra) == (None, {Extra.MESSAGE_ID: b"\xa1\x03id1"})


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "limit"),
    [
        (properties(message_id="x" * 129), "message-id"),
        (properties(message_id="é" * 129), "message-id"),
        (properties(message_id=b"x" * 129), "message-id"),
        (properties(message_id="x" * 300), "message-id"),
        (properties(group_id="x" * 129), "session id"),
        (properties(group_id="😀" * 65), "session id"),
        (annotations({"x-opt-partition-key": "x" * 129}), "x-opt-partition-key"),
        (annotations({"x-opt-via-partition-key": "x" * 300}), "x-opt-via-partition-key"),
    ],
)
def test_ids_and_keys_of_more_than_128_characters_are_refused(message, limit):
    with pytest.raises(LimitExceeded, match=f"{limit} exceeds the limit of 128 characters") as caught:
        take_apart(message)
    assert (caught.value.limit, caught.value.maximum) == (limit, 128)


def test_keys_of_128_characters_are_taken():
    for key in ("x" * 128, "é" * 128, "😀" * 64):
        assert take_apart(annotations({"x-opt-partition-key": key}))[3] == {Extra.PARTITION_KEY: key}
        assert take_apart(properties(group_id=key))[3] == {Extra.SESSION_ID: key}


def test_everything_but_the_body_may_have_64_kib():
    def of_header_bytes(size: int, *more: bytes) -> bytes:
        start = section(ANNOTATIONS, {Symbol("a"): b"x" * 1000})
        filling = section(FOOTER, {Symbol("f"): b"x" * (size - len(start) - 20)})
        assert len(start + filling) == size
        return start + section(DATA, b"x" * 100_000) + filling

    take_apart(of_header_bytes(64 * 1024))
    with pytest.raises(HeaderTooLarge, match="exceeds the limit of 65536 bytes"):
        take_apart(of_header_bytes(64 * 1024 + 1))
    for code in (ANNOTATIONS, DELIVERY):
        with pytest.raises(HeaderTooLarge):
            take_apart(section(code, {Symbol("a"): b"x" * 70_000}) + BODY)
    with pytest.raises(HeaderTooLarge):
        take_apart(section(PROPERTIES, [None, None, "x" * 70_000]) + BODY)
    with pytest.raises(HeaderTooLarge):
        take_apart(section(APPLICATION, {str(n): "x" * 20_000 for n in range(4)}) + BODY)
    each_is_small = section(ANNOTATIONS, {Symbol("a"): b"x" * 40_000}) + section(APPLICATION, {"b": "x" * 30_000})
    with pytest.raises(HeaderTooLarge):
        take_apart(each_is_small + BODY)


def test_one_application_property_may_have_32_kib():
    take_apart(application_properties(key="x" * (32 * 1024 - 10)))
    with pytest.raises(HeaderTooLarge, match="size of the application property 'key' exceeds the limit of 32768 bytes"):
        take_apart(application_properties(key="x" * (32 * 1024 - 9)))
    with pytest.raises(HeaderTooLarge, match=r"'x{128}\.\.\.'"):
        take_apart(application_properties(**{"x" * 40_000: True}))


def test_a_partition_key_must_equal_the_session_id():
    key = section(ANNOTATIONS, {Symbol("x-opt-partition-key"): "k"})
    with pytest.raises(InvalidField, match="x-opt-partition-key: differs from the session id"):
        take_apart(key + properties(group_id="s"))
    assert take_apart(key + properties(group_id="k"))[3] == {Extra.PARTITION_KEY: "k", Extra.SESSION_ID: "k"}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (properties(message_id=Int(1)), "message-id"),
        (properties(message_id=Symbol("id")), "message-id"),
        (properties(group_id=Symbol("s")), "group-id"),
        (properties(content_type=b"x"), "content-type"),
        (section(PROPERTIES, [None, "user"]), "user-id"),
        (section(PROPERTIES, [None, None, Long(1)]), "to"),
        (section(PROPERTIES, [None] * 8 + [Long(1)]), "absolute-expiry-time"),
        (section(PROPERTIES, [None] * 11 + [Long(1)]), "group-sequence"),
        (section(HEADER, [Int(1)]) + BODY, "header"),
        (section(HEADER, [True, Int(1)]) + BODY, "header"),
        (section(HEADER, [True, UByte(1), Long(1)]) + BODY, "header"),
        (annotations({"x-opt-partition-key": Symbol("k")}), "x-opt-partition-key"),
        (annotations({"x-opt-via-partition-key": Long(1)}), "x-opt-via-partition-key"),
        (annotations({"x-opt-partition-key": b"\xff"}), "x-opt-partition-key"),
        (annotations({"x-opt-scheduled-enqueue-time": Long(5)}), "x-opt-scheduled-enqueue-time"),
        (annotations({"x-opt-delivery-time": "5"}), "x-opt-delivery-time"),
        (annotations({"x-opt-delivery-time": True}), "x-opt-delivery-time"),
        (application_properties(a=[1]), "application property"),
        (application_properties(a=[]), "application property"),
        (application_properties(a={}), "application property"),
        (application_properties(a=Array(Long, (Long(1),))), "application property"),
        (application_properties(a=Described(Symbol("d"), [1])), "application property"),
        (application_properties(a=Described(Symbol("d"), Described(Symbol("d"), 1))), "application property"),
    ],
)
def test_fields_of_a_wrong_type_are_refused_by_name(message, field):
    with pytest.raises(InvalidField, match=field) as caught:
        take_apart(message)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, UByte(1), Int(-1), Long(2**60), ULong(0), UInt(0), Float(0.5), 0.25, Char("x"), Timestamp(1)),
        *(UUID(int=1), b"\xff" * 300, "é", "x" * 300, Symbol("s"), Symbol("s" * 300)),
        *(Decimal32(b"1234"), Decimal64(b"12345678"), Decimal128(b"1234567812345678")),
        Described(Symbol("com.microsoft:timespan"), Long(5)),
        Described(Symbol("com.microsoft:uri"), "http://localhost"),
    ],
)
def test_simple_application_properties_are_taken(value):
    message = application_properties(before=1, it=value, after="x")
    assert take_apart(message)[1] is message


def test_annotations_may_be_of_any_type():
    message = annotations({"a": [1, {"b": Array(Symbol, (Symbol("c"),))}], "d": Described(ULong(1), {}), "e": None})
    decoded, _ = decode(message)
    assert take_apart(message)[1] == message[6:]
    assert [*decoded.value] == ["a", "d", "e"]


@pytest.mark.parametrize(
    ("hexadecimal", "reason"),
    [
        ("48656c6c6f", "should begin with a descriptor"),
        ("00", "end within"),
        ("0053", "end within"),
        ("005375", "end within"),
        ("005375a00568", "end within"),
        ("005375b0ffffffff00", "end within"),
        ("005379a000", "no section of a message"),
        ("00a30161a000", "no section of a message"),
        ("0040a000", "no section of a message"),
        ("00c00100a000", "no section of a message"),
        ("00537541", "wrong type"),
        ("005370c100", "wrong type"),
        ("005372c00100", "wrong type"),
        ("00537240", "wrong type"),
        ("005374c00100", "wrong type"),
        ("005376a000", "wrong type"),
        ("00537345 00537345", "section 0x73 twice"),
        ("00537045 00537045", "section 0x70 twice"),
    ],
)
def test_malformed_sections_say_what_is_wrong(hexadecimal, reason):
    with pytest.raises(DecodeError, match=reason):
        take_apart(bytes.fromhex(hexadecimal))


@pytest.mark.parametrize(
    ("code", "count", "content", "reason"),
    [
        (HEADER, 6, "40 40 40 40 40 40", "more than five"),
        (HEADER, 2, "41", "end|size and content"),
        (HEADER, 1, "41 41", "bytes after|size and content"),
        (PROPERTIES, 14, "40" * 14, "more than thirteen"),
        (PROPERTIES, 2, "40", "size and content|ends within|user-id"),
        (PROPERTIES, 1, "40 40", "size and content"),
        (PROPERTIES, 1, "a1 01 ff", "invalid bytes"),
        (PROPERTIES, 1, "b1 00000001 ff", "invalid bytes"),
        (PROPERTIES, 1, "a1 05 ff", "size and content|invalid bytes|ends? within"),
        (PROPERTIES, 7, "40 40 40 40 40 40 a3 02 c3a9", "invalid bytes"),
        (APPLICATION, 1, "40", "odd number"),
        (APPLICATION, 2, "52 01 40", "key is neither a string nor a symbol"),
        (APPLICATION, 2, "40 40", "key is neither a string nor a symbol"),
        (APPLICATION, 2, "a1 01 ff 40", "invalid bytes"),
        (APPLICATION, 2, "a1 01 61 a1 01 ff", "invalid bytes"),
        (APPLICATION, 2, "a1 01 61 b1 00000001 ff", "string of invalid bytes"),
        (APPLICATION, 2, "a1 01 61 a3 02 c3a9", "symbol of invalid bytes"),
        (APPLICATION, 2, "a1 01 61 56 02", "boolean"),
        (APPLICATION, 2, "a1 01 61 73 00110000", "char"),
        (APPLICATION, 2, "a1 01 61 81 00", "size and content|ends? within"),
        (APPLICATION, 2, "a1 01 61 b1 ffffffff", "ends? within"),
        (APPLICATION, 2, "a1 01 61 3f", "unknown constructor"),
        (APPLICATION, 2, "a1 01 61", "ends? within|size and content"),
        (APPLICATION, 0, "40", "size and content"),
        (APPLICATION, 4, "a1 01 61 40 a1 01 61 40", "equal keys"),
        (ANNOTATIONS, 1, "40", "odd number"),
        (ANNOTATIONS, 2, "52 01 40", "key is no symbol, ulong or string"),
        (ANNOTATIONS, 2, "40 40", "key is no symbol, ulong or string"),
        (ANNOTATIONS, 2, "a3 01 ff 40", "invalid bytes"),
        (ANNOTATIONS, 4, "a3 01 61 40 a3 01 61 40", "equal keys"),
        (ANNOTATIONS, 2, "a3 01 61 c0 02 02 40", "ends? within|size and content"),
        (ANNOTATIONS, 2, "a3 01 61 a1 01 ff", "invalid bytes"),
        (ANNOTATIONS, 2, "a3 01 61 40 40", "size and content"),
    ],
)
def test_malformed_content_of_sections_says_what_is_wrong(code, count, content, reason):
    octets = bytes.fromhex(content)
    constructor = 0xC0 if code in (HEADER, PROPERTIES) else 0xC1
    malformed = bytes((0, 0x53, code, constructor, len(octets) + 1, count)) + octets
    for message in (malformed, malformed + BODY, wide(malformed) + BODY, BODY + malformed):
        with pytest.raises((DecodeError, InvalidField), match=reason):
            take_apart(message)


def test_a_body_of_null_data_is_stored_as_it_is():
    null = bytes.fromhex("00537540")
    assert take_apart(null)[1] == null
    assert take_apart(section(PROPERTIES, ["id"]) + null + BODY)[1] == section(PROPERTIES, ["id"]) + null + BODY


@pytest.mark.parametrize("key", ["a301 61", "a101 61", "b100000001 61", "44", "53 05", "80 8000000000000000"])
@pytest.mark.parametrize("code", [ANNOTATIONS, DELIVERY])
def test_annotation_keys_are_symbols_ulongs_or_strings_and_stay_what_they_are(code, key):
    pair = bytes.fromhex(key) + encode("value")
    other = encode(Symbol("b")) + encode(1)
    message = bytes((0, 0x53, code, 0xC1, len(pair + other) + 1, 4)) + pair + other + BODY
    assert take_apart(message)[1].endswith(pair + other + BODY)
    assert take_apart(wide(message[: -len(BODY)]) + BODY)[1].endswith(pair + other + BODY)


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [("a301 61", "a101 61", "equal keys"), ("44", "53 00", "equal keys"), ("a101 ff", "44", "invalid bytes")],
)
def test_equal_or_broken_annotation_keys_are_refused(one, other, reason):
    pairs = bytes.fromhex(f"{one}40{other}40")
    with pytest.raises(DecodeError, match=reason):
        take_apart(bytes((0, 0x53, ANNOTATIONS, 0xC1, len(pairs) + 1, 4)) + pairs + BODY)


def test_a_string_is_taken_as_the_symbol_that_the_broker_knows():
    known = {"x-opt-partition-key": "k", "x-opt-sequence-number": 7}
    _, stored, _, extra = take_apart(encode(Described(ULong(ANNOTATIONS), known)) + BODY)
    assert extra == {Extra.PARTITION_KEY: "k"}
    assert stored == encode("x-opt-partition-key") + encode("k") + BODY


@pytest.mark.parametrize("key", ["a301 61", "b300000001 61"])
def test_keys_of_application_properties_may_be_symbols_and_stay_so(key):
    pair = bytes.fromhex(key) + encode("value")
    section_ = bytes((0, 0x53, APPLICATION, 0xC1, len(pair) + 1, 2)) + pair
    assert take_apart(section_ + BODY)[1] == section_ + BODY
    twice = bytes((0, 0x53, APPLICATION, 0xC1, 2 * len(pair) + 1, 4)) + pair + b"\xa1\x01a" + encode("value")
    with pytest.raises(DecodeError, match="equal keys"):
        take_apart(twice[:4] + bytes((len(twice) - 5,)) + twice[5:] + BODY)


def test_a_flood_of_sections_is_refused():
    with pytest.raises(LimitExceeded, match="number of sections"):
        take_apart(section(DATA, b"") * (sections.MAX_SECTIONS + 1))


def test_a_huge_map_is_refused_before_it_is_walked():
    pairs = b"\xa3\x00\x40" * 400_000
    message = b"\x00\x53\x72\xd1" + (len(pairs) + 4).to_bytes(4, "big") + (800_000).to_bytes(4, "big") + pairs
    with pytest.raises(HeaderTooLarge):
        take_apart(message + BODY)


# --- any message ------------------------------------------------------------------------------------------------------

short_text = st.text(max_size=8) | st.sampled_from(["k", "x" * 127, "x" * 129, "é" * 128, "é" * 140])
ids = st.one_of(st.none(), short_text, st.uuids(), st.integers(0, 2**64 - 1).map(ULong), st.binary(max_size=5))
times = st.none() | st.integers(-(2**63), 2**63 - 1).map(Timestamp)
names = st.text(st.characters(max_codepoint=127), max_size=5).map(Symbol)
simple = st.one_of(
    st.none(),
    st.booleans(),
    short_text,
    names,
    st.binary(max_size=300),
    times,
    st.uuids(),
    st.integers(-(2**31), 2**31 - 1).map(Int),
    st.floats(),
    st.builds(Described, names, short_text),
)
headers = st.tuples(
    st.none() | st.booleans(),
    st.none() | st.integers(0, 255).map(UByte),
    st.none() | st.integers(0, 2**32 - 1).map(UInt) | st.just(UInt(2**32 - 1)),
    st.none() | st.booleans(),
    st.none() | st.integers(0, 9).map(UInt),
)
properties_fields = st.tuples(
    ids,
    st.none() | st.binary(max_size=3),
    *[st.none() | short_text] * 3,
    ids,
    *[st.none() | names | short_text | st.just(Symbol("application/vnd.ms-servicebus-ping"))] * 2,
    times,
    times,
    st.none() | short_text,
    st.none() | st.integers(0, 2**32 - 1).map(UInt),
    st.none() | short_text,
)
keys = st.none() | short_text | short_text.map(str.encode)
known_annotations = st.fixed_dictionaries(
    {},
    optional={
        Symbol("x-opt-partition-key"): keys,
        Symbol("x-opt-via-partition-key"): keys,
        Symbol("x-opt-scheduled-enqueue-time"): times,
        Symbol("x-opt-sequence-number"): simple,
        Symbol("x-opt-lock-token"): simple,
    },
)
any_annotations = st.builds(lambda known, other: {**other, **known}, known_annotations, st.dictionaries(names, simple))
bodies = st.one_of(
    st.just(b""),
    st.binary(max_size=300).map(lambda data: section(DATA, data)),
    st.lists(st.binary(max_size=3), max_size=3).map(lambda parts: b"".join(section(DATA, part) for part in parts)),
    simple.map(lambda value: section(VALUE, value)),
)


@st.composite
def messages(draw):
    """A message, and its parts: header, annotations, properties, application properties, body with footer."""
    width = draw(st.sampled_from([bytes, wide]))
    header = draw(st.none() | st.builds(lambda fields, count: [*fields][:count], headers, st.integers(0, 5)))
    notes = draw(st.none() | any_annotations)
    fields = draw(st.none() | st.builds(lambda all_, count: [*all_][:count], properties_fields, st.integers(0, 13)))
    pairs = draw(st.none() | st.dictionaries(st.text(max_size=5), simple, max_size=3))
    body = draw(bodies) + (section(FOOTER, {}) if draw(st.booleans()) else b"")
    parts = [
        b"" if value is None else width(section(code, value))
        for code, value in ((HEADER, header), (ANNOTATIONS, notes), (PROPERTIES, fields), (APPLICATION, pairs))
    ]
    return (header or [], notes or {}, fields or [], parts[2], parts[3], body), b"".join((*parts, body))


def outcome(take, message):
    try:
        return take(message, True)
    except ProtocolError as error:
        return type(error), str(error)


@settings(max_examples=examples(300))
@given(messages())
def test_a_message_is_taken_apart_to_what_was_put_in(generated):
    (header, notes, fields, properties_section, application_section, body), message = generated
    header_fields: list[Any] = [*header, None, None, None]
    durable, priority, ttl_ms = header_fields[:3]
    fields = [*fields, *[None] * (13 - len(fields))]
    for name in ("x-opt-partition-key", "x-opt-via-partition-key"):
        if isinstance(notes.get(name), bytes):
            notes = {**notes, name: notes[name].decode()}
    session_id, key, via = fields[10], notes.get("x-opt-partition-key"), notes.get("x-opt-via-partition-key")
    too_long = [text for text in (fields[0], session_id, key, via) if isinstance(text, str) and len(text) > 128]
    if too_long or (None not in (session_id, key) and session_id != key):
        with pytest.raises((LimitExceeded, InvalidField)):
            take_apart(message)
        return
    if ttl_ms == 2**32 - 1 and None not in fields[8:10]:
        ttl_ms = max(ttl_ms, bounds.span_ms(fields[8] - fields[9]))
    kept = {name: value for name, value in notes.items() if name not in ("x-opt-sequence-number", "x-opt-lock-token")}
    pairs = b"".join(encode(item) for pair in kept.items() for item in pair)
    scheduled_ms = notes.get("x-opt-scheduled-enqueue-time")
    expected = {
        Extra.SCHEDULED_MS: None if scheduled_ms is None else bounds.time_ms(scheduled_ms),
        Extra.SESSION_ID: session_id,
        Extra.PARTITION_KEY: key,
        Extra.MESSAGE_ID: None if fields[0] is None else encode(fields[0]),
        Extra.PING: True if fields[6] == "application/vnd.ms-servicebus-ping" else None,
    }
    first_acquirer = [*header, *[None] * 5][3]
    if first_acquirer is not None:
        pair = encode(Symbol("x-opt-peeklock-first-acquirer")) + encode(first_acquirer)
        first = encode(Symbol("x-opt-peeklock-delivery-annotations")) + b"\xd1"
        pairs = first + struct.pack(">II", 4 + len(pair), 2) + pair + pairs
    layout, stored, found_ttl_ms, extra = take_apart(message, want_message_id=True)
    assert stored == pairs + properties_section + application_section + body
    assert unpack_layout(layout) == (
        (1 if durable else 0) | (0 if priority is None else 2) | (0 if first_acquirer is None else 4),
        priority or 0,
        2 * len(kept) + 2 * (first_acquirer is not None),
        len(pairs),
        len(properties_section),
        len(application_section),
    )
    assert found_ttl_ms == ttl_ms
    assert (extra or {}) == {name: value for name, value in expected.items() if value is not None}


@settings(max_examples=examples(300))
@given(messages(), st.data())
def test_the_usual_way_and_the_general_one_agree_even_on_damaged_messages(generated, data):
    message = bytearray(generated[1])
    for _ in range(data.draw(st.integers(0, 2))):
        if message:
            message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del message[data.draw(st.integers(0, len(message))) :]

    def general(message, want, new_id=None):
        try:
            return intake._take_apart_any(message, want, new_id)
        except (IndexError, struct.error):
            raise DecodeError("the message ends within a section", len(message)) from None

    assert outcome(take_apart, bytes(message)) == outcome(general, bytes(message))
    with_id = partial(take_apart, new_id=lambda: encode("new")), partial(general, new_id=lambda: encode("new"))
    assert outcome(with_id[0], bytes(message)) == outcome(with_id[1], bytes(message))


@settings(max_examples=examples(200))
@given(st.binary(max_size=80).map(lambda data: b"\x00\x53" + data))
def test_any_bytes_are_taken_apart_or_refused_with_a_protocol_error(data):
    try:
        layout, stored, _, _ = take_apart(data)
    except ProtocolError:
        return
    assert sum(unpack_layout(layout)[3:]) <= len(stored) <= len(data)
