"""Large byte strings are packed without a copy, and what is packed is what msgpack makes of the value."""

import gc
import sys
from typing import Any
from unittest.mock import patch

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import packed_parts as module
from storage.packed_parts import packed_parts
from tests.examples import examples

APART_BYTES = 40  # in place of 256 KiB
FEW_ITEMS = 5
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.text(max_size=50),
    st.binary(max_size=50),
    st.binary(min_size=APART_BYTES - 1, max_size=APART_BYTES + 1),
    st.sampled_from([bytes(70_000), b"x" * 300]),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=FEW_ITEMS + 2),
        st.lists(inner, max_size=FEW_ITEMS + 2).map(tuple),
        st.dictionaries(st.integers(0, 9), inner, max_size=3),
    ),
    max_leaves=20,
)


def large_of(value: Any) -> list[bytes]:
    """The byte strings that are to be parts: those in lists and tuples that are not long."""
    if isinstance(value, bytes):
        return [value] if len(value) >= APART_BYTES else []
    if isinstance(value, list | tuple) and len(value) <= FEW_ITEMS:
        return [each for item in value for each in large_of(item)]
    return []


@given(values)
@settings(max_examples=examples(300))
def test_parts_are_msgpack_and_large_byte_strings_are_themselves(value):
    with patch.object(module, "APART_BYTES", APART_BYTES), patch.object(module, "FEW_ITEMS", FEW_ITEMS):
        parts = packed_parts(value)
    # A large one has a head for any size, so it is not bit for bit what msgpack writes.
    assert msgpack.unpackb(b"".join(parts), strict_map_key=False, use_list=False) == msgpack.unpackb(
        msgpack.packb(value), strict_map_key=False, use_list=False
    )
    apart = iter(parts)
    assert all(any(part is large for part in apart) for large in large_of(value)), "each is a part, in order"


def test_large_values_are_bit_for_bit_as_msgpack_writes_them():
    value = (7, [(0, [(2, 1, ((b"key", bytes(module.APART_BYTES)), (b"other", b"small"))), (1, 2, (b"gone",))])], [])
    assert b"".join(packed_parts(value)) == msgpack.packb(value)


def test_nothing_refers_to_the_parts_when_they_were_used():
    """Else a worker would have each large message in memory until Python looks for cycles, which it does rarely."""
    large = bytes(module.APART_BYTES)
    gc.disable()
    try:
        before = sys.getrefcount(large)
        packed_parts([[(b"key", large)]])
        assert sys.getrefcount(large) == before
    finally:
        gc.enable()


def test_what_cannot_be_packed_is_packed_by_the_default_or_raises():
    assert b"".join(packed_parts([{1}], sorted)) == msgpack.packb([[1]])
    with pytest.raises(TypeError, match="set"):
        packed_parts([{1}])
