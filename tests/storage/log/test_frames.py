"""The bytes of segments and frames: what was encoded is decoded, and nothing else is."""

import random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.extension import extension
from storage import packed_parts
from storage.log import frames
from storage.log.frames import (
    BLOCK_BYTES,
    BUFFER_BYTES,
    FRAME_HEAD_BYTES,
    LOG_ID_BYTES,
    CorruptFrame,
    FrameCodec,
    Kind,
    Next,
    SegmentHeader,
    TablesState,
    UnknownLogFormat,
    decode_header,
    decode_next,
    decode_turn,
    encode_header,
    encode_next,
    header_bytes,
    padded,
)
from storage.packed_parts import APART_BYTES
from tests.examples import examples

LOG_ID = bytes(range(LOG_ID_BYTES))
LARGEST = 2**63 - 1
lsns = st.one_of(st.integers(1, 1000), st.just(LARGEST))
keys = st.binary(min_size=1, max_size=511)
values = st.one_of(st.binary(max_size=50), st.just(b""), st.just(bytes(200_000)), st.just(b"TurN" * 3000))
operations = st.one_of(
    st.tuples(st.sampled_from([0, 2]), st.integers(0, 11), st.lists(st.tuples(keys, values), max_size=5).map(tuple)),
    st.tuples(st.just(1), st.integers(0, 11), st.lists(keys, max_size=5).map(tuple)),
)
changes = st.lists(st.tuples(st.integers(0, 1000), st.lists(operations, max_size=4).map(tuple)), max_size=4).map(tuple)


def frame_of(codec, lsn, payload, kind=Kind.TURN):
    payload = bytes(payload)
    return codec.head(kind, lsn, payload) + payload


@given(time_ms=st.sampled_from([0, 1, LARGEST]), lsn=lsns, turn=changes)
@settings(max_examples=examples(60))
def test_a_turn_in_parts_is_the_same_frame(time_ms, lsn, turn):
    codec = FrameCodec(LOG_ID)
    with codec.pack_turn(time_ms, turn, []) as payload, patch.object(packed_parts, "APART_BYTES", 1 << 16):
        parts = codec.large_turn(time_ms, turn, [])
        assert b"".join(parts) == payload
        assert codec.head_of_parts(Kind.TURN, lsn, parts) == codec.head(Kind.TURN, lsn, payload)


@pytest.mark.parametrize("has_extension", [True, False])
@pytest.mark.parametrize("size", [APART_BYTES - 1, APART_BYTES, BUFFER_BYTES])
def test_a_turn_is_packed_in_parts_if_that_costs_less(monkeypatch, has_extension, size):
    """With the extension, if it is larger than the buffer; without, if a value need not be copied."""
    if not has_extension:
        monkeypatch.setattr(frames, "extension", None)
    elif extension is None:
        pytest.skip("there is no extension")
    turn = [(0, ((1, 3, (b"gone",)), (0, 1, ((b"key", bytes(size)),))))]
    payload = FrameCodec(LOG_ID).pack_turn(1, turn, [], memoryview(bytearray(BUFFER_BYTES)))
    assert (payload is None) == (size >= (BUFFER_BYTES if has_extension else APART_BYTES))


@given(time_ms=st.sampled_from([0, 1, LARGEST]), lsn=lsns, turn=changes)
@settings(max_examples=examples(60))
def test_a_turn_comes_back_as_it_was(time_ms, lsn, turn):
    codec = FrameCodec(LOG_ID)
    with codec.pack_turn(time_ms, turn, []) as payload:
        data = frame_of(codec, lsn, payload)
    found = FrameCodec(LOG_ID).read(memoryview(data + bytes(padded(len(data)) - len(data))))
    assert (found.kind, found.lsn) == (Kind.TURN, lsn)
    found_time_ms, found_turn, events = decode_turn(found.payload)
    assert (found_time_ms, found_turn) == (time_ms, turn)
    assert not events


def test_no_flipped_bit_of_a_frame_is_passed_over():
    codec = FrameCodec(LOG_ID)
    data = bytearray(frame_of(codec, 7, codec.pack_turn(1, [(0, [(0, 1, ((b"key", b"value" * 30),))])], [])))
    assert codec.read(memoryview(data)).lsn == 7
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            with pytest.raises(CorruptFrame):
                codec.read(memoryview(data))
            data[at] ^= 1 << bit


def test_no_shorter_frame_is_one():
    codec = FrameCodec(LOG_ID)
    data = frame_of(codec, 7, codec.pack_turn(1, [(0, [(0, 1, ((b"key", b"value" * 30),))])], []))
    for size in range(len(data)):
        with pytest.raises(CorruptFrame):
            codec.read(memoryview(data)[:size])


def test_a_frame_of_another_log_is_none_of_this():
    data = frame_of(FrameCodec(bytes(LOG_ID_BYTES)), 7, b"payload")
    with pytest.raises(CorruptFrame):
        FrameCodec(LOG_ID).read(memoryview(data))


def test_a_kind_that_is_not_known_is_no_frame():
    codec = FrameCodec(LOG_ID)
    with pytest.raises(CorruptFrame, match="unknown kind of frame 3"):
        codec.read(memoryview(frame_of(codec, 7, b"payload", 3)))


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01", b"\x01", b"\x92\x01\x02", b"\xff" * 10])
def test_a_whole_frame_that_is_no_turn_is_named(payload):
    with pytest.raises(CorruptFrame, match="the turn cannot be read"):
        decode_turn(payload)


@pytest.mark.parametrize("partitions", [0, 1, 4, 1000])
def test_a_header_comes_back_as_it_was(partitions):
    tables = TablesState(LARGEST, dict.fromkeys(range(partitions), LARGEST))
    header = SegmentHeader(LOG_ID, 3, LARGEST, tables, LARGEST)
    data = encode_header(header)
    assert len(data) % BLOCK_BYTES == 0
    assert header_bytes(data) == len(data)
    assert decode_header(data + b"frames") == header
    following = Next(9, tables, LARGEST)
    assert decode_next(encode_next(following)) == following


def test_no_flipped_bit_of_a_header_is_passed_over():
    header = SegmentHeader(LOG_ID, 3, 5, TablesState(4, {0: 3, 1: 4}))
    data = bytearray(encode_header(header))
    used = data.rstrip(b"\0")
    for at in range(len(used)):
        for bit in range(8):
            data[at] ^= 1 << bit
            with pytest.raises(CorruptFrame):
                decode_header(bytes(data))
            data[at] ^= 1 << bit
    for size in range(len(used)):
        with pytest.raises(CorruptFrame):
            decode_header(bytes(data[:size]))


def test_a_newer_format_is_not_taken_for_damage(monkeypatch):
    monkeypatch.setattr("storage.log.frames.VERSION", 3)
    data = encode_header(SegmentHeader(LOG_ID, 3, 5, TablesState(4, {})))
    monkeypatch.undo()
    with pytest.raises(UnknownLogFormat, match="log format 3 found, 2 supported"):
        decode_header(data)


def test_random_bytes_are_no_frame():
    chance = random.Random(1)
    codec = FrameCodec(LOG_ID)
    for size in range(0, 4 * FRAME_HEAD_BYTES):
        with pytest.raises(CorruptFrame):
            codec.read(memoryview(b"TurN" + chance.randbytes(size)))
