"""A dead letter as it is sent again, for any message and any repair."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.jobs.changing.repairing import REPAIRABLE, Unrepairable, message_id, repaired
from protocol.client.messages import Message, data_section, value_section
from protocol.codec import Byte, Char, Float, Int, Long, Short, Symbol, Timestamp, UByte, UInt, ULong, UShort, encode
from protocol.errors import ProtocolError
from protocol.message.sections import content_of, scan
from protocol.symbols import Descriptor
from pyspark_peeklock.decoding import text_of

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.one_of(
    st.none(),
    st.booleans(),
    texts,
    st.binary(max_size=20),
    st.floats(),
    st.uuids(),
    *(
        st.integers(low, high).map(kind)
        for kind, low, high in [
            (UByte, 0, 255), (UShort, 0, 65535), (UInt, 0, 2**32 - 1), (ULong, 0, 2**64 - 1), (Byte, -128, 127),
            (Short, -(2**15), 2**15 - 1), (Int, -(2**31), 2**31 - 1), (Long, -(2**63), 2**63 - 1),
            (Timestamp, -(2**63), 2**63 - 1),
        ]
    ),
    st.just(Symbol("symbol")),
    st.just(Char("c")),
    st.just(Float(1.5)),
)  # fmt: skip
properties = st.dictionaries(texts, values, max_size=6)
bodies = st.one_of(
    st.binary(max_size=50).map(data_section), texts.map(value_section), st.just(value_section([1, None])), st.just(b"")
)
dead_letters = st.builds(
    Message,
    body=bodies,
    durable=st.booleans(),
    delivery_count=st.integers(0, 2**32 - 1),
    ttl_ms=st.none() | st.integers(0, 2**32 - 1),
    message_id=st.none() | texts | st.uuids(),
    correlation_id=st.none() | texts | st.uuids(),
    group_id=st.none() | texts,
    annotations=st.dictionaries(st.sampled_from(["x-opt-sequence-number", "x-opt-enqueued-time", "x-own"]), values),
    application_properties=properties,
)
texts_of_spark = st.none() | st.text(st.characters(), max_size=10)  # with surrogates, too
repairs = st.fixed_dictionaries(
    {},
    optional={
        **{name: texts_of_spark for name in REPAIRABLE if name not in ("body", "applicationProperties")},
        "body": st.none() | st.binary(max_size=10),
        "applicationProperties": st.none()
        | st.dictionaries(st.text(st.characters(), max_size=5), texts_of_spark, max_size=5),
    },
)


def pairs(message):
    """The bytes of the names and values of application properties."""
    for section in scan(message):
        if section.kind is Descriptor.APPLICATION_PROPERTIES:
            at, end, _ = content_of(message, section)
            return message[at:end]
    return b""


@given(dead_letters, properties)
def test_without_repairs_only_what_the_broker_added_is_gone(message, own):
    message.application_properties = own | {"DeadLetterReason": "Bad", "DeadLetterErrorDescription": "why"}
    encoded = message.encode()
    found = repaired(encoded, "new", {})
    expected = {name: value for name, value in own.items() if not name.startswith("DeadLetter")}
    assert pairs(found) == b"".join(encode(name) + encode(value) for name, value in expected.items())
    again = Message.decode(found)
    assert (again.message_id, again.body) == ("new", message.body or data_section(b""))
    assert (again.correlation_id, again.group_id, again.delivery_count) == (
        message.correlation_id,
        message.group_id,
        None,
    )
    assert again.annotations.keys() <= {"x-own"}


@given(dead_letters, repairs)
def test_any_repair_makes_a_message_or_says_why_not(message, changes):
    try:
        found = repaired(message.encode(), "new", changes)
    except (Unrepairable, ProtocolError, TypeError, ValueError):
        return
    again = Message.decode(found)
    assert again.message_id == "new"
    if "subject" in changes:
        assert again.subject == changes["subject"]
    if "applicationProperties" in changes:
        wanted = changes["applicationProperties"] or {}
        assert {name: text_of(value) for name, value in again.application_properties.items()}.keys() == wanted.keys()


@pytest.mark.parametrize(
    ("before", "text", "after"),
    [
        (Int(1), "2", Int(2)),
        (UByte(1), "256", "256"),
        (Long(1), "x", "x"),
        (True, "false", False),
        (True, "maybe", "maybe"),
        (1.5, "nan", float("nan")),
        (UUID(int=1), str(UUID(int=2)), UUID(int=2)),
        (b"\x01", "02", "02"),
        (Char("c"), "d", Char("d")),
        (Char("c"), "", ""),
        (Char("c"), "de", "de"),
        (None, "x", "x"),
        ("x", None, None),
    ],
)
def test_a_repaired_property_keeps_its_type_if_it_can(before, text, after):
    dead_letter = Message(application_properties={"p": before}).encode()
    found = Message.decode(repaired(dead_letter, "new", {"applicationProperties": {"p": text}}))
    value = found.application_properties["p"]
    assert (type(value), str(value)) == (type(after), str(after))


def test_a_body_keeps_its_kind():
    text = Message(value_section("old")).encode()
    assert Message.decode(repaired(text, "new", {"body": b"next"})).body == value_section("next")
    with pytest.raises(Unrepairable, match="body was a text, and is no valid UTF-8"):
        repaired(text, "new", {"body": b"\xff"})
    with pytest.raises(Unrepairable, match="body is null"):
        repaired(text, "new", {"body": None})
    assert Message.decode(repaired(Message.of(b"old").encode(), "new", {"body": b"\xff"})).body == data_section(b"\xff")


@given(st.text(max_size=300), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(1, 2**31))
def test_ids_are_short_enough_for_all_servers(entity, enqueued_ms, number, attempt):
    entity = entity.encode(errors="replace").decode()
    assert len(message_id(entity, enqueued_ms, number, attempt)) <= 128


def test_ids_tell_dead_letters_apart():
    ids = [
        message_id(*each) for each in (("a", 1, 2, 1), ("a", 1, 3, 1), ("a", 2, 2, 1), ("b", 1, 2, 1), ("a", 1, 2, 2))
    ]
    assert len(set(ids)) == len(ids)
    assert ids[0] == "resubmit/a@1/2/1"
