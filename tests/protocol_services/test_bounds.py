"""Bounds of what comes from outside, as arguments of management requests and as times of messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import bounds
from protocol.codec import Int, Long, Timestamp, UInt, ULong, array
from protocol.nodes import management
from protocol.nodes.management import ArgumentOutOfRange, DeleteMessages, EnumerateRules, PeekMessages
from protocol.nodes.request_message import Request

YEAR_1 = -62_135_596_800_000  # .NET's DateTime.MinValue
INTEGERS = st.integers(-(1 << 63), (1 << 64) - 1)


def parsed(operation, body):
    properties = {"operation": f"com.microsoft:{operation}"}
    return management.parse(Request("1", "me", properties, body)).arguments


@given(INTEGERS)
def test_times_and_spans_are_brought_within_their_bounds(value):
    assert bounds.time_ms(value) == sorted((0, value, bounds.LATEST_MS))[1]
    assert bounds.span_ms(value) == sorted((0, value, bounds.LONGEST_MS))[1]


def test_sums_of_times_and_spans_fit_into_an_amqp_long():
    assert bounds.LATEST_MS + bounds.LONGEST_MS < 1 << 63


@pytest.mark.parametrize(
    ("operation", "body", "arguments"),
    [
        (
            "batch-delete-messages",
            {"message-count": ULong((1 << 64) - 1), "enqueued-time-utc": Timestamp(YEAR_1)},
            DeleteMessages(bounds.MAX_COUNT, 0, None),
        ),
        (
            "batch-delete-messages",
            {"message-count": Int(1), "enqueued-time-utc": Long((1 << 63) - 1)},
            DeleteMessages(1, bounds.LATEST_MS, None),
        ),
        (
            "peek-message",
            {"from-sequence-number": Long(-(1 << 63)), "message-count": UInt((1 << 32) - 1)},
            PeekMessages(0, bounds.MAX_COUNT, None, False),
        ),
        (
            "enumerate-rules",
            {"skip": Long((1 << 63) - 1), "top": ULong((1 << 64) - 1)},
            EnumerateRules(bounds.MAX_COUNT, bounds.MAX_COUNT),
        ),
    ],
)
def test_counts_and_times_of_requests_are_brought_within_their_bounds(operation, body, arguments):
    assert parsed(operation, body) == arguments


@pytest.mark.parametrize(
    ("operation", "body", "text"),
    [
        (
            "peek-message",
            {"from-sequence-number": ULong(1 << 63), "message-count": Int(1)},
            "'from-sequence-number'",
        ),
        ("cancel-scheduled-message", {"sequence-numbers": array(ULong, [1, 1 << 63])}, "'sequence-numbers'"),
    ],
)
def test_a_sequence_number_that_no_message_can_have_is_refused(operation, body, text):
    with pytest.raises(ArgumentOutOfRange, match=text):
        parsed(operation, body)
