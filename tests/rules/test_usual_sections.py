"""The quick way of decoding says what the codec says, or nothing."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.rules.errors import FilterError
from broker.rules.message import MessageView
from broker.rules.usual_sections import properties_fields, user_properties
from broker.rules.values import canonical
from protocol.codec import (
    Byte,
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
    UShort,
    encode,
)

PROPERTIES, APPLICATION_PROPERTIES = 0x73, 0x74


def integers(kind: Any, bits: int, signed: bool) -> st.SearchStrategy[Any]:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return st.integers(low, high).map(kind)


USUAL = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=60),
    st.floats(allow_nan=False),
    integers(UByte, 8, False),
    integers(UShort, 16, False),
    integers(UInt, 32, False),
    integers(ULong, 64, False),
    integers(Byte, 8, True),
    integers(Short, 16, True),
    integers(Int, 32, True),
    integers(Long, 64, True),
    integers(Timestamp, 64, True),
)
OTHERS = st.one_of(
    st.uuids(), st.binary(max_size=9), st.text(min_size=250, max_size=300), st.just(Float(0.5)), st.just(Symbol("s"))
)
NAMES = st.text(max_size=20)


def by_codec(properties: dict[str, Any]) -> dict[str, Any]:
    return MessageView(application_properties=properties).user


@given(st.dictionaries(NAMES, USUAL, max_size=40))
def test_usual_application_properties_are_those_of_the_codec(properties: dict[str, Any]) -> None:
    found = user_properties(encode(Described(APPLICATION_PROPERTIES, properties)))
    expected = by_codec(properties)
    if any(len(text.encode()) > 255 for text in properties.values() if isinstance(text, str)):
        assert found is None
    else:
        assert found == expected
        assert [type(value) for value in (found or {}).values()] == [type(value) for value in expected.values()]


@given(st.dictionaries(NAMES, USUAL | OTHERS, max_size=10))
def test_rules_see_the_same_values_for_any_application_properties(properties: dict[str, Any]) -> None:
    view = MessageView(application_properties=encode(Described(APPLICATION_PROPERTIES, properties)))
    assert view.user == by_codec(properties)


@given(st.lists(st.none() | st.text(max_size=60), max_size=13), st.none() | st.integers(0, 10**14))
def test_texts_and_times_of_the_properties_are_those_of_the_codec(fields: list[Any], time_ms: int | None) -> None:
    if time_ms is not None:
        fields[8:10] = [Timestamp(time_ms)] * len(fields[8:10])
    found = properties_fields(encode(Described(PROPERTIES, fields)))
    if fields:
        assert found == [field if isinstance(field, str) or field is None else int(field) for field in fields]
    assert MessageView(encode(Described(PROPERTIES, fields))).system_properties == MessageView(fields).system_properties


def test_ids_that_are_no_texts_are_left_to_the_codec() -> None:
    section = encode(Described(PROPERTIES, [ULong(5), b"user", "to"]))
    assert properties_fields(section) is None
    assert MessageView(section).system_properties["messageid"] == "5"


@pytest.mark.parametrize("decode", [user_properties, properties_fields])
def test_invalid_bytes_are_left_to_the_codec(decode: Any) -> None:
    code = APPLICATION_PROPERTIES if decode is user_properties else PROPERTIES
    value = {"a": "text", "b": 5.0, "c": Long(1 << 40)} if decode is user_properties else ["id", None, "to"]
    section = encode(Described(code, value))
    assert decode(section) is not None
    for end in range(len(section)):
        assert decode(section[:end]) is None
    assert decode(section + b"@") is None
    assert decode(section.replace(b"t", b"\xff")) is None
    view = MessageView(section[:-1], section[:-1])
    with pytest.raises(FilterError):
        _ = view.user if decode is user_properties else view.system_properties


def test_values_that_only_the_broker_knows_are_made_when_a_rule_needs_them() -> None:
    asked = []
    view = MessageView(given=lambda: asked.append(1) or {"Size": 5})
    assert (view.user, asked) == ({}, [])
    assert (view.other_system, canonical(view.other_system["size"]), asked) == ({"size": 5}, 5, [1])
