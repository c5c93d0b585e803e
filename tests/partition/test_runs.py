"""A run, as gateways send usual messages, is stored as its messages are when they come one by one."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import runs, wire
from broker.errors import NotAllowed
from broker.wire import ITEMS_AT_ONCE, Outcome
from protocol.codec import Described, UInt, ULong, encode
from protocol.extension import extension
from protocol.message.intake import take_apart
from storage.store import Table
from tests.partition.driver import MAIN, Driver, deliveries, run

IDS = st.none() | st.sampled_from(
    ["a", "b", "c", "", "x" * 128, "ä", ULong(7), "7", UUID(int=7), str(UUID(int=7)), b"a"]
)
SESSIONS = st.sampled_from(["a", "b", "", "x" * 31, "x" * 32, "x" * 128, "\x7f"])
TTLS_MS = st.none() | st.sampled_from([1, 1500, 3999, 4000, 4001, (1 << 32) - 2])
MESSAGES = st.tuples(IDS, SESSIONS | st.none(), st.sampled_from(["s", "s" * 255]), TTLS_MS)
TURNS = st.lists(st.lists(MESSAGES, min_size=1, max_size=6), max_size=8)
TTL = {"default_message_time_to_live_ms": 4000}
DETECTS = {"requires_duplicate_detection": True, "duplicate_detection_history_time_window_ms": 20_000}
SESSION = {"requires_session": True}
KINDS = ({}, TTL, DETECTS, SESSION, TTL | DETECTS, TTL | SESSION, DETECTS | SESSION)


def encoded(message_id: Any, session_id: str | None, subject: str, ttl_ms: int | None) -> bytes:
    header = b"" if ttl_ms is None else encode(Described(ULong(0x70), [None, None, UInt(ttl_ms)]))
    fields = [message_id, None, None, subject, None, ULong(7), None, None, None, None, session_id]
    return header + encode(Described(ULong(0x73), fields)) + encode(Described(ULong(0x75), b"body"))


ENTRIES = st.tuples(
    st.builds(lambda counter: bytes(8) + counter.to_bytes(8, "big"), st.integers(0, 3)),
    st.integers(0, 3) | st.just((1 << 63) - 1),
    st.integers(0, 1),
    st.binary(min_size=40, max_size=60),
    st.sampled_from([None, None, None, {1: 2}]),
)
RANGES = st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([0, 1, 2, 255, 256, 257, 700])), max_size=6)


@given(RANGES, st.lists(st.integers(0, 600), max_size=4))
def test_settlements_are_cut_between_tokens(ranges, counts):
    tokens = [bytes(8) + first.to_bytes(8, "big") + count.to_bytes(4, "big") for first, count in ranges]
    tokens += [bytes(8) + first.to_bytes(8, "big") for first, _ in ranges]
    left = runs.count_of(tokens)
    channels: list[int] = []
    for channel, count in enumerate([*counts, left]):
        channels += (channel, min(count, left))
        left -= min(count, left)
    rest: Any = wire.settle(3, 1, Outcome.ACCEPTED, channels, tokens, None)
    parts = []
    while rest is not None:
        first, rest = runs.cut(rest)
        count = runs.count_of(first.tokens)
        assert count == sum(first.channels[1::2])
        assert count == ITEMS_AT_ONCE or (count < ITEMS_AT_ONCE and rest is None)
        parts.append(first)
    assert [token for part in parts for token in runs.tokens_of(part.tokens)] == runs.tokens_of(tokens)
    assert [channel for part in parts for channel in each_of(part.channels)] == each_of(channels)


def each_of(channels: Sequence[int]) -> list[int]:
    """The channel of each token."""
    return [channel for at in range(0, len(channels), 2) for channel in [channels[at]] * channels[at + 1]]


@pytest.mark.parametrize("properties", KINDS, ids=lambda each: "+".join(each) or "plain")
@given(TURNS)
def test_a_run_is_stored_as_its_messages_are(properties, turns):
    ends = []
    for in_runs in (False, True):
        queue = Driver(**properties)
        session = ["a", 0] if properties.get("requires_session") else None
        queue.partition.open_receiver("r", MAIN, False, queue.now_ms, session)
        queue.partition.grant("r", 7)
        seen = []
        for turn in turns:
            messages = [take_apart(encoded(*each), want_message_id=True) for each in turn]
            is_refused = session is not None and None in [session_id for _, session_id, _, _ in turn]
            with pytest.raises(NotAllowed) if is_refused else nullcontext():
                if in_runs:
                    queue.partition.send_run(MAIN, run(messages), queue.now_ms)
                else:
                    queue.partition.send(MAIN, messages, queue.now_ms)
            queue.partition.advance(queue.now_ms)
            seen += [deliveries(items) for _, _, items in queue.partition.pump(queue.now_ms).deliveries]
            queue.partition.commit()
            queue.partition.check()
            queue.now_ms += 1500
        stored = {table: queue.store.scan(table, b"", b"\xff" * 40, 1000) for table in Table if table != Table.META}
        ends.append((stored, queue.partition.tallies(), [(each.number, each.body) for turn in seen for each in turn]))
    assert ends[0] == ends[1]


TOKENS = st.tuples(
    st.sampled_from([0, 1, 2, 3, (1 << 64) - 1]), st.none() | st.sampled_from([0, 1, 2, (1 << 32) - 1]), st.booleans()
)


@pytest.mark.parametrize("is_native", [True, False])
@given(st.lists(TOKENS, max_size=12), st.lists(st.binary(max_size=21), max_size=2))
def test_consecutive_tokens_become_ranges(is_native, found, strange):
    ranges = [
        bytes(7) + bytes([other]) + first.to_bytes(8, "big") + (b"" if count is None else count.to_bytes(4, "big"))
        for first, count, other in found
    ] + strange
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "extension", None)
        expected = runs.ranges_of(ranges)
        if is_native and extension is not None:
            assert extension.ranges_of(ranges) == expected
        few = [each for each in ranges if len(each) == 16 or (each[8:9] == b"\0" and each[16:] < b"\0\1")]
        assert runs.tokens_of(runs.ranges_of(few)) == runs.tokens_of(few)
    assert runs.count_of(expected) == runs.count_of(ranges)
    assert len(expected) <= len(ranges)


@given(st.lists(st.tuples(st.booleans(), st.lists(ENTRIES, max_size=3)), max_size=4))
def test_small_runs_of_several_channels_go_together(found):
    deliveries_ = [
        (("gateway", channel), 5 * is_locked, [item for each in entries for item in each])
        for channel, (is_locked, entries) in enumerate(found)
    ]
    if extension is None:
        assert runs.together(deliveries_, 120) is None
        return
    together = runs.together(deliveries_, 120)
    each = [runs.parts_of(entries) for _, _, entries in deliveries_]
    are_small = all(
        until_ms and parts is not None and len(parts) == 1 and isinstance(parts[0], tuple) and len(parts[0][-1]) <= 120
        for (_, until_ms, _), parts in zip(deliveries_, each, strict=True)
    )
    expected = [
        (channel, until_ms, parts[0] if parts else None)
        for ((_, channel), until_ms, _), parts in zip(deliveries_, each, strict=True)
    ]
    assert together == (expected if are_small else None)
