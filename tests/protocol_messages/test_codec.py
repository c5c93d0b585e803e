import math
import struct
import time
from contextlib import suppress
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proton import Data

from protocol.codec import (
    MAX_DEPTH,
    MAX_EMPTY_ITEMS,
    MAX_UUID_KEYS,
    Array,
    Byte,
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
    UShort,
    array,
    decode,
    decode_exactly,
    encode,
    skip,
)
from protocol.errors import DecodeError, LimitExceeded, ProtocolError
from tests.examples import examples
from tests.hostile_input import uuids


def same(left: Any, right: Any) -> bool:
    """Equal in value and in AMQP type, at every depth."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same([*left.items()], [*right.items()]) if left and right else left == right
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Array):
        return left.kind is right.kind and same(left.items, right.items) and same(left.descriptor, right.descriptor)
    if isinstance(left, Described):
        return same(left.descriptor, right.descriptor) and same(left.value, right.value)
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    return left == right


def integers(kind: type, bits: int, signed: bool) -> st.SearchStrategy[Any]:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return (st.integers(low, high) | st.integers(max(low, -130), min(high, 260))).map(kind)


SCALARS: dict[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    UByte: integers(UByte, 8, False),
    UShort: integers(UShort, 16, False),
    UInt: integers(UInt, 32, False),
    ULong: integers(ULong, 64, False),
    Byte: integers(Byte, 8, True),
    Short: integers(Short, 16, True),
    Int: integers(Int, 32, True),
    Long: integers(Long, 64, True),
    Timestamp: integers(Timestamp, 64, True),
    Float: st.floats(width=32).map(Float),
    float: st.floats(),
    Char: st.characters().map(Char),
    Decimal32: st.binary(min_size=4, max_size=4).map(Decimal32),
    Decimal64: st.binary(min_size=8, max_size=8).map(Decimal64),
    Decimal128: st.binary(min_size=16, max_size=16).map(Decimal128),
    UUID: st.uuids(),
    bytes: st.binary(max_size=300),
    str: st.text(max_size=300),
    Symbol: st.text(st.characters(max_codepoint=127), max_size=20).map(Symbol),
}
scalars = st.none() | st.one_of(*SCALARS.values())
arrays = st.sampled_from([*SCALARS]).flatmap(
    lambda kind: st.builds(
        Array, st.just(kind), st.lists(SCALARS[kind], max_size=5).map(tuple), st.none() | SCALARS[Symbol]
    )
)
keys = st.one_of(SCALARS[str], SCALARS[Symbol], SCALARS[ULong])
values = st.recursive(
    scalars | arrays,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.builds(Described, SCALARS[ULong] | SCALARS[Symbol], inner)
        | st.lists(st.lists(inner, max_size=2), max_size=3).map(lambda lists: Array(list, tuple(lists)))
    ),
    max_leaves=8,
)


@settings(max_examples=examples(200))
@given(values, st.binary(max_size=3), st.binary(max_size=3))
def test_encoded_values_decode_to_the_same_value_and_type(value, before, after):
    encoded = encode(value)
    data = before + encoded + after
    end = len(before) + len(encoded)
    for buffer in (data, memoryview(data), bytearray(data)):
        decoded, offset = decode(buffer, len(before))
        assert same(decoded, value)
        assert offset == end
        assert skip(buffer, len(before)) == end


@settings(max_examples=examples(300))
@given(st.binary(max_size=60))
def test_any_bytes_decode_or_raise_a_protocol_error(data):
    try:
        value, end = decode(data)
    except ProtocolError:
        return
    assert skip(data, 0) == end <= len(data)
    again, _ = decode(encode(value))
    assert same(again, value)


@settings(max_examples=examples(150))
@given(values, st.data())
def test_any_damage_to_a_value_decodes_or_raises_a_protocol_error(value, data):
    encoded = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    del encoded[data.draw(st.integers(0, len(encoded))) :]
    with suppress(ProtocolError):
        decode(encoded)
    with suppress(ProtocolError):
        skip(encoded, 0)


@settings(max_examples=examples(100))
@given(values)
def test_a_value_cut_short_is_malformed(value):
    encoded = encode(value)
    for length in range(max(0, len(encoded) - 40), len(encoded)):
        with pytest.raises(DecodeError):
            decode(encoded[:length])
        with pytest.raises(DecodeError):
            skip(encoded[:length], 0)


def proton_encoding(put: str, *arguments: Any) -> bytes:
    data = Data()
    getattr(data, put)(*arguments)
    return data.encode()


@pytest.mark.parametrize(
    ("value", "theirs"),
    [
        (None, proton_encoding("put_null")),
        (True, proton_encoding("put_bool", True)),
        (False, proton_encoding("put_bool", False)),
        (UByte(200), proton_encoding("put_ubyte", 200)),
        (Byte(-100), proton_encoding("put_byte", -100)),
        (UShort(60_000), proton_encoding("put_ushort", 60_000)),
        (Short(-30_000), proton_encoding("put_short", -30_000)),
        (UInt(0), proton_encoding("put_uint", 0)),
        (UInt(255), proton_encoding("put_uint", 255)),
        (UInt(2**32 - 1), proton_encoding("put_uint", 2**32 - 1)),
        (Int(-128), proton_encoding("put_int", -128)),
        (Int(2**31 - 1), proton_encoding("put_int", 2**31 - 1)),
        (ULong(0), proton_encoding("put_ulong", 0)),
        (ULong(7), proton_encoding("put_ulong", 7)),
        (ULong(2**64 - 1), proton_encoding("put_ulong", 2**64 - 1)),
        (Long(127), proton_encoding("put_long", 127)),
        (Long(-(2**63)), proton_encoding("put_long", -(2**63))),
        (Timestamp(-62135596800000), proton_encoding("put_timestamp", -62135596800000)),
        (Timestamp(253402300800000), proton_encoding("put_timestamp", 253402300800000)),
        (Float(0.5), proton_encoding("put_float", 0.5)),
        (0.1, proton_encoding("put_double", 0.1)),
        (Char("€"), proton_encoding("put_char", "€")),
        (UUID(int=7), proton_encoding("put_uuid", UUID(int=7))),
        (b"\x00\xff", proton_encoding("put_binary", b"\x00\xff")),
        (b"x" * 256, proton_encoding("put_binary", b"x" * 256)),
        ("grüß", proton_encoding("put_string", "grüß")),
        ("x" * 256, proton_encoding("put_string", "x" * 256)),
        (Symbol("amqp:not-found"), proton_encoding("put_symbol", "amqp:not-found")),
        (Decimal32(b"abcd"), proton_encoding("put_decimal32", struct.unpack("=I", b"dcba")[0])),
    ],
)
def test_scalars_are_what_proton_encodes(value, theirs):
    assert encode(value) == theirs
    assert same(decode_exactly(theirs), value)


def test_compound_values_of_proton_decode():
    data = Data()
    data.put_map()
    data.enter()
    data.put_string("lock-tokens")
    data.put_array(False, Data.UUID)
    data.enter()
    data.put_uuid(UUID(int=1))
    data.put_uuid(UUID(int=2))
    data.exit()
    data.put_symbol("nested")
    data.put_list()
    data.enter()
    data.put_described()
    data.enter()
    data.put_ulong(0x77)
    data.put_bool(True)
    data.exit()
    data.exit()
    data.exit()
    expected = {
        "lock-tokens": Array(UUID, (UUID(int=1), UUID(int=2))),
        Symbol("nested"): [Described(ULong(0x77), True)],
    }
    assert same(decode_exactly(data.encode()), expected)


@settings(max_examples=examples(60))
@given(st.recursive(scalars.filter(lambda value: not isinstance(value, (bytes, Float))), st.lists, max_leaves=5))
def test_proton_reads_every_byte_of_what_is_encoded(value):
    encoded = encode([value])
    assert Data().decode(encoded) == len(encoded)


def test_array_elements_share_the_wide_constructor():
    assert encode(array(Long, [1, 2])) == bytes.fromhex("e0 12 02 81 0000000000000001 0000000000000002")
    assert encode(array(Symbol, ["a"])) == bytes.fromhex("e0 07 01 b3 00000001 61")


def test_arrays_of_the_short_constructors_decode():
    assert same(decode_exactly(bytes.fromhex("e0 04 02 55 01 ff")), Array(Long, (Long(1), Long(-1))))
    assert same(decode_exactly(bytes.fromhex("e0 02 00 a3")), Array(Symbol, ()))
    assert decode_exactly(bytes.fromhex("e0 01 00")) == Array(type(None), ())


def test_a_numeric_descriptor_takes_the_form_every_client_reads():
    assert encode(Described(0x73, [])) == bytes.fromhex("00 53 73 45")


def test_long_descriptors_and_wide_forms_decode():
    section = bytes.fromhex("00 80 0000000000000073 d0 00000004 00000000")
    assert same(decode_exactly(section), Described(ULong(0x73), []))


@pytest.mark.parametrize("hexadecimal", ["73 0000d800", "73 0000dfff", "e0 06 01 73 0000dbff"])
def test_a_surrogate_is_no_char(hexadecimal):
    with pytest.raises(DecodeError, match="char of code point 0xd"):
        decode_exactly(bytes.fromhex(hexadecimal))
    with pytest.raises(ValueError, match="surrogate"):
        encode(Char("\udabc"))


@pytest.mark.parametrize("text", ["", "ab"])
def test_a_char_is_one_character(text):
    for value in (Char(text), Array(Char, (Char(text),))):
        with pytest.raises(ValueError, match=f"a char of {len(text)} characters"):
            encode(value)


@pytest.mark.parametrize(
    ("hexadecimal", "reason"),
    [
        ("", "end within"),
        ("56 02", "boolean of value 2"),
        ("73 00110000", "code point"),
        ("3f", "unknown constructor 0x3f"),
        ("46", "unknown constructor 0x46"),
        ("a1 01 ff", "string of invalid"),
        ("a3 02 c3a9", "symbol of invalid"),
        ("c1 03 01 4041", "size and content differ"),
        ("c1 02 01 40", "odd number"),
        ("c1 03 02 45 40", "a key that cannot be one"),
        ("c1 06 02 005301 40 40", "a key that cannot be one"),
        ("c1 07 02 e0 03 01 50 05 40", "a key that cannot be one"),
        ("c1 09 04 a1016141 a1016142", "equal keys"),
        ("c0 00 00", "too small"),
        ("d0 00000003 00000000", "too small"),
        ("c0 02 02 40", "end within"),
        ("c0 02 01 5005", "size and content differ"),
        ("e0 03 01 3f00", "unknown constructor 0x3f"),
        ("e0 03 02 5001", "end within"),
        ("f0 ffffffff 00000001 50", "end within"),
        ("b0 ffffffff 00", "end within"),
        ("40 40", "bytes after the end"),
    ],
)
def test_malformed_values_say_what_is_wrong(hexadecimal, reason):
    with pytest.raises(DecodeError, match=reason):
        decode_exactly(bytes.fromhex(hexadecimal))


def test_nesting_is_limited_whatever_nests():
    for nested in (b"\xc0\x40\x01" * 50_000, b"\x00" * 50_000, b"\x00\x53\x73" * 50_000, b"\xe0\x7f\x01" * 50_000):
        with pytest.raises(ProtocolError):
            decode(nested + b"\x45" * 100_000)
    value: Any = None
    for _ in range(MAX_DEPTH):
        value = [value]
    assert same(decode_exactly(encode(value)), value)
    with pytest.raises(LimitExceeded, match=f"nesting of values exceeds the limit of {MAX_DEPTH} levels"):
        decode(encode([value]))


def test_values_that_take_no_bytes_count():
    with pytest.raises(LimitExceeded, match="number of values"):
        decode(bytes.fromhex("f0 00000005 ffffffff 40"))
    assert decode_exactly(encode([None] * 10), max_items=10) == [None] * 10
    with pytest.raises(LimitExceeded):
        decode(encode([None] * 11), max_items=10)
    with pytest.raises(LimitExceeded):
        decode(encode([[None] * 6, [None] * 6]), max_items=10)
    for constructor in ("40", "41", "42", "43", "44", "45"):
        with pytest.raises(LimitExceeded, match="elements of an array that take no bytes"):
            decode(bytes.fromhex("f0 00000005") + (MAX_EMPTY_ITEMS + 1).to_bytes(4, "big") + bytes.fromhex(constructor))
    nothing = Array(type(None), (None,) * MAX_EMPTY_ITEMS)
    assert same(decode_exactly(encode(nothing)), nothing)


def test_descriptors_count():
    described = Described(ULong(1), Described(ULong(2), None))
    assert same(decode_exactly(encode([described] * 3), max_items=9), [described] * 3)
    with pytest.raises(LimitExceeded, match="number of values"):
        decode(encode([described] * 3), max_items=8)


def test_keys_whose_hash_a_peer_chooses_are_few():
    """Uuids that differ by a multiple of this have the same hash: a map of n of them takes n^2 comparisons."""
    step = (1 << 61) - 1
    few = {UUID(int=number * step): None for number in range(MAX_UUID_KEYS)}
    assert len(set(map(hash, few))) == 1
    assert decode_exactly(encode(few)) == few
    began = time.process_time()
    with pytest.raises(LimitExceeded, match="uuids that are keys of a map"):
        decode(uuids(20_000))
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("chain", [b"\x00", b"\x00\x53\x01"])
def test_descriptors_of_descriptors_and_of_values_are_limited_when_skipping(chain):
    assert skip(chain * MAX_DEPTH + b"\x40" * (MAX_DEPTH + 1), 0) <= MAX_DEPTH * 4 + 1
    with pytest.raises(LimitExceeded):
        skip(chain * 1_000_000, 0)


@pytest.mark.parametrize("value", [object(), {1, 2}, Array(int, (1,)), Array(Long, ("a",))])
def test_a_value_without_an_amqp_type_is_our_mistake(value):
    with pytest.raises(TypeError):
        encode(value)


@pytest.mark.parametrize("value", [UByte(256), UInt(-1), ULong(2**64), 2**63, Float(1e300), Symbol("é"), "\ud800"])
def test_a_value_outside_its_type_is_our_mistake(value):
    with pytest.raises(ValueError):  # noqa: PT011
        encode(value)
