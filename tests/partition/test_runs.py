"""A run, as gateways send usual messages, is stored as its messages are when they come one by one."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from uuid import UUID

import pytest
from driver import MAIN, Driver, deliveries, run
from hypothesis import given
from hypothesis import strategies as st

from broker import runs, wire
from broker.errors import NotAllowed
from broker.wire import ITEMS_AT_ONCE, Outcome
from protocol.codec import Described, ULong, encode
from protocol.message.intake import take_apart
from storage.store import Table

IDS = st.none() | st.sampled_from(
    ["a", "b", "c", "", "x" * 128, "ä", ULong(7), "7", UUID(int=7), str(UUID(int=7)), b"a"]
)
SESSIONS = st.sampled_from(["a", "b", "", "x" * 31, "x" * 32, "x" * 128, "\x7f"])
MESSAGES = st.tuples(IDS, SESSIONS | st.none(), st.sampled_from(["s", "s" * 255]))
TURNS = st.lists(st.lists(MESSAGES, min_size=1, max_size=6), max_size=8)
TTL = {"default_message_time_to_live_ms": 4000}
DETECTS = {"requires_duplicate_detection": True, "duplicate_detection_history_time_window_ms": 20_000}
SESSION = {"requires_session": True}
KINDS = ({}, TTL, DETECTS, SESSION, TTL | DETECTS, TTL | SESSION, DETECTS | SESSION)


def encoded(message_id: Any, session_id: str | None, subject: str) -> bytes:
    fields = [message_id, None, None, subject, None, ULong(7), None, None, None, None, session_id]
    return encode(Described(ULong(0x73), fields)) + encode(Described(ULong(0x75), b"body"))


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
            is_refused = session is not None and None in [session_id for _, session_id, _ in turn]
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
