"""Keys order as the numbers in them do, and refuse numbers that have no place in that order."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.records import (
    CorruptRecord,
    KeyOutOfRange,
    Timer,
    due_key,
    due_keys_end,
    message_key,
    queue_key,
    unpack_due_key,
)

NUMBERS = st.integers(-(1 << 65), 1 << 65)
DUE = st.tuples(st.integers(0, (1 << 32) - 1), st.sampled_from(Timer), NUMBERS, NUMBERS)


def is_number(value: int) -> bool:
    return 0 <= value < 1 << 64


@given(DUE, DUE)
def test_due_keys_order_as_their_numbers_do_or_are_refused(first, second):
    keys = []
    for queue_id, timer, time_ms, number in (first, second):
        if is_number(time_ms) and is_number(number):
            keys.append(due_key(queue_id, timer, time_ms, number))
            assert unpack_due_key(keys[-1]) == (queue_id, timer, time_ms, number)
            assert keys[-1] < due_keys_end(keys[-1]) <= due_key(queue_id, timer + 1, 0, 0)
        else:
            with pytest.raises(KeyOutOfRange, match=str(queue_id)):
                due_key(queue_id, timer, time_ms, number)
    if len(keys) == 2:
        assert (keys[0] < keys[1]) == (first < second)


@given(NUMBERS, NUMBERS)
def test_other_keys_refuse_what_has_no_place_in_their_order(first, second):
    for key in (message_key, lambda number: queue_key(8, 0, number)):
        if is_number(first) and is_number(second):
            assert (key(first) < key(second)) == (first < second)
        elif not is_number(first):
            with pytest.raises(struct.error):
                key(first)


@pytest.mark.parametrize("key", [b"", b"\0" * 20, b"\0" * 22, b"\0\0\0\x08\x02" + bytes(16)])
def test_a_due_key_of_another_shape_is_corrupt(key):
    with pytest.raises(CorruptRecord):
        unpack_due_key(key)
